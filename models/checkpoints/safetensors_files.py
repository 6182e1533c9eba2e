"""Directories of safetensors files: `model.safetensors` alone, or shards named by an index.

Format: https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header (JSON), the data.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from kvpatch_jax.errors import WeightsError

from .filling import fill
from .json_table import LFS_POINTER
from .source import NUMPY_TYPES, OpenFile, Slices, StoredTensor, TensorInfo, whole_region

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors' own reader has it
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_BITS = {name: 8 * dtype.itemsize for name, dtype in NUMPY_TYPES.items()}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a header says that a tensor is: `start` counts from the file's first byte."""

    info: TensorInfo
    file: OpenFile
    start: int


class SafetensorsSource:
    """The tensors of a directory of safetensors files, which stay open as long as it is there.

    Raises:
      WeightsError: no safetensors weights there, an index that cannot be read or names a file that is not there, or a
        damaged file.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.origin = str(directory)
        self._stored = _stored_tensors(Path(directory))
        self.tensors = {name: stored.info for name, stored in self._stored.items()}

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it. Raises WeightsError where the data cannot be read."""
        stored = self.stored(name)
        spans = tuple((part.start, part.stop) for part in whole_region(stored.shape, region))
        out = np.empty([max(0, stop - start) for start, stop in spans], stored.dtype)
        fill(stored, spans, out)
        return out

    def stored(self, name: str) -> StoredTensor:
        """Returns where a tensor's bytes lie. Raises WeightsError for a type whose elements do not fill whole bytes."""
        found = self._stored[name]
        if found.info.dtype not in NUMPY_TYPES:
            raise WeightsError(f"tensor {name!r}: got type {found.info.dtype}; expected one of {sorted(NUMPY_TYPES)}")
        return StoredTensor(found.file, found.start, found.info.shape, NUMPY_TYPES[found.info.dtype])

    def check_unchanged(self) -> None:
        """Raises WeightsError where a file was written to since it was opened."""
        for file in {stored.file for stored in self._stored.values()}:
            file.check_unchanged()


def _stored_tensors(root: Path) -> dict[str, _Stored]:
    if not root.is_dir():
        raise WeightsError(f"{root}: got no directory; expected one with {SINGLE_FILE} or {INDEX_FILE}")
    # As transformers has it: the shards of an index that lies beside a whole file may be of an earlier save.
    if (root / SINGLE_FILE).is_file():
        return _header(root / SINGLE_FILE)
    if (root / INDEX_FILE).is_file():
        return _sharded(root)

    for name in (INDEX_FILE, SINGLE_FILE):
        if os.path.lexists(root / name):
            raise WeightsError(f"{root / name}: got a broken link, or no plain file; expected a safetensors file there")
    others = sorted(path.name for path in root.iterdir() if path.suffix in _OTHER_WEIGHTS)
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    found = f"{shown}, which is not read" if others else "no weights"
    raise WeightsError(
        f"{root}: got {found}; expected {SINGLE_FILE}, or {INDEX_FILE} with its shards, as transformers' "
        "save_pretrained writes them"
    )


def _sharded(root: Path) -> dict[str, _Stored]:
    path = root / INDEX_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        index = {str(name): root / str(file) for name, file in entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f'{path}: got a file that is not an index ({error}); expected JSON with "weight_map"'
        ) from error

    # An index may name files beside it alone, so that a checkpoint reads nothing else.
    present: dict[str, _Stored] = {}
    for file in sorted(set(index.values())):
        if file.parent != root or file.name in ("", ".", ".."):
            raise WeightsError(f"{path}: got the file {str(file)!r}; expected a plain file name beside it")
        if not file.is_file():
            raise WeightsError(f"{path}: got {file.name}, which is not in {root}; expected a file that is there")
        for name, stored in _header(file).items():
            if name in present:
                raise WeightsError(
                    f"{root}: got tensor {name!r} in two shards, {Path(present[name].file.path).name} and {file.name}; "
                    "expected it in one"
                )
            present[name] = stored

    for name, file in index.items():
        if name not in present or Path(present[name].file.path) != file:
            raise WeightsError(f"{path}: got tensor {name!r}; expected it in {file.name}, which lacks it")
    return present


def _header(path: Path) -> dict[str, _Stored]:
    """Returns what a file's header says of its tensors, checked to the last byte of the file."""
    try:
        file = OpenFile(path)
        return _parsed(file)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: got a damaged or truncated file ({error}); expected a safetensors file") from error


def _parsed(file: OpenFile) -> dict[str, _Stored]:
    """Raises ValueError for what safetensors' own reader refuses: unknown types, gaps, overlaps, bytes left over."""
    length = np.zeros(1, "<u8")
    file.read_into(length, 0)
    if length.tobytes() == LFS_POINTER[:8]:
        raise ValueError("a pointer of Git LFS: `git lfs pull` fetches the file itself")
    if not 2 <= length[0] <= min(_LONGEST_HEADER, file.size - 8):
        raise ValueError(f"header: got {length[0]} bytes in a file of {file.size}; expected a length that fits")

    text = np.empty(int(length[0]), np.uint8)
    file.read_into(text, 8)
    table = json.loads(text.tobytes().decode("utf-8"), object_pairs_hook=_table_of)
    if not isinstance(table, dict):
        raise ValueError(f"header: got a {type(table).__name__}; expected a table")

    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"__metadata__: got {metadata!r:.80}; expected a table of texts")

    first = 8 + len(text)
    spans = {name: _span(name, entry) for name, entry in table.items()}
    end = 0

    # Tensors lie without gaps or overlaps, in whatever order the header lists them.
    for name, (_, start, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != end:
            raise ValueError(f"tensor {name!r}: got start {start}; expected {end}, where the one before it ends")
        end = stop

    if first + end != file.size:
        raise ValueError(f"data: got {end} bytes; expected {file.size - first}, to the end of the file")
    return {name: _Stored(info, file, first + start) for name, (info, start, _) in spans.items()}


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python's reader keeps the last of two alike, and another reader may keep the first.
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"header: got {len(pairs)} names, {len(table)} of them different; expected each once")
    return table


def _span(name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """Returns what a header says of one tensor, with the first byte of its data and the one behind its last."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r}: got a {type(entry).__name__}; expected a table")

    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {name!r}: got type {dtype!r}; expected one of {sorted(_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r}: got shape {shape!r} and data_offsets {offsets!r}; expected sizes")

    # In bits: elements of some types fill no whole bytes.
    (start, stop), bits = offsets, math.prod(shape) * _BITS[dtype]
    if 8 * (stop - start) != bits:
        raise ValueError(f"tensor {name!r}: got {stop - start} bytes; expected {bits} bits, as {shape} of {dtype} has")
    return TensorInfo(tuple(shape), dtype), start, stop


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    # By type: true and false are whole numbers to Python.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
