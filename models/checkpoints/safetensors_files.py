"""Directories of safetensors files: `model.safetensors` alone, or shards named by an index.

Format: https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header (JSON), the data.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvpatch_jax.errors import WeightsError

from .json_table import LFS_POINTER
from .source import NUMPY_TYPES, OpenFile, Slices, TensorInfo, whole_region

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")


class SafetensorsSource:
    """The tensors of a directory of safetensors files, which stay open as long as it is there.

    Args:
      directory: where they lie. file: the one to read; None for the model's, which may be shards of an index.

    Raises:
      WeightsError: no safetensors weights there, an index that cannot be read or names a file that is not there, a
        tensor in two shards, or a damaged file.
    """

    def __init__(self, directory: str | os.PathLike[str], file: str | None = None):
        root = Path(directory)
        self.origin = str(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[OpenFile, int]] = {}
        index = _read_index(root) if file is None else dict[str, Path]()
        for path in sorted(set(index.values())) if index else [root / (file or SINGLE_FILE)]:
            opened, start, table = _open(path)
            for name, entry in table.items():
                if name in self.tensors:
                    first = Path(self._places[name][0].path).name
                    raise WeightsError(
                        f"{root}: got tensor {name!r} in two shards, {first} and {path.name}; expected it in one"
                    )
                self.tensors[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"])
                self._places[name] = opened, start + entry["data_offsets"][0]

        for name, path in index.items():
            if name not in self.tensors or Path(self._places[name][0].path) != path:
                raise WeightsError(f"{root / INDEX_FILE}: got tensor {name!r}; expected it in {path.name}")

    def read(self, name: str, region: Slices | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reads a tensor or a region of it. Raises WeightsError for data that cannot be read, or a type NumPy lacks."""
        (file, start), (shape, kind) = self._places[name], dataclasses.astuple(self.tensors[name])
        if kind not in NUMPY_TYPES:
            raise WeightsError(f"tensor {name!r}: got type {kind}; expected one of {sorted(NUMPY_TYPES)}")
        spans, dtype = whole_region(shape, region), NUMPY_TYPES[kind]
        if out is None:
            out = np.empty([max(0, span.stop - span.start) for span in spans], dtype)
        if not out.size:
            return out

        # What lies behind the last axis that is cut is one run of bytes for each place in front of it.
        depth = max((axis for axis, size in enumerate(shape) if out.shape[axis] != size), default=0)
        steps = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        start += sum(span.start * step for span, step in zip(spans, steps, strict=True))
        for index in np.ndindex(out.shape[:depth]):
            offset = sum(place * step for place, step in zip(index, steps, strict=False))
            file.read_into(out[(*index, ...)], start + offset)
        return out


def _read_index(root: Path) -> dict[str, Path]:
    """Returns tensor to shard; {} where there is a whole file, which transformers, too, takes before an index: its
    shards may be of an earlier save.
    """
    if not root.is_dir():
        raise WeightsError(f"{root}: got no directory; expected one with {SINGLE_FILE} or {INDEX_FILE}")
    if (root / SINGLE_FILE).is_file():
        return {}
    path = root / INDEX_FILE
    if not path.is_file():
        raise WeightsError(f"{root}: got {_found(root)}; expected {SINGLE_FILE}, or {INDEX_FILE} with its shards")

    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        index = {str(name): root / str(file) for name, file in entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f'{path}: got a file that is no index ({error}); expected JSON with "weight_map"') from error

    # An index may name files beside it alone, so that a checkpoint reads nothing else.
    for file in index.values():
        if file.parent != root or not file.is_file():
            raise WeightsError(f"{path}: got the file {str(file)!r}; expected one that is there, beside it")
    return index


def _found(root: Path) -> str:
    """Returns what a directory without weights that are read has instead."""
    for name in (INDEX_FILE, SINGLE_FILE):
        if os.path.lexists(root / name):
            return f"{name}, a broken link or no plain file"
    others = sorted(path.name for path in root.iterdir() if path.suffix in _OTHER_WEIGHTS)
    return f"{', '.join(others[:3])}, which is not read" if others else "no weights"


def _open(path: Path) -> tuple[OpenFile, int, dict[str, dict[str, Any]]]:
    """Returns a file, where its data begin, and its header. safetensors' own reader checks it, to the last byte."""
    try:
        with safe_open(path, framework="numpy"):
            file = OpenFile(path)
        length = np.zeros(1, "<u8")
        file.read_into(length, 0)
        text = np.empty(int(length[0]), np.uint8)
        file.read_into(text, 8)
        table = json.loads(text.tobytes())
    except (SafetensorError, OSError, ValueError) as error:
        pointer = path.is_file() and path.stat().st_size < 1000 and path.read_bytes().startswith(LFS_POINTER)
        found = (
            "a pointer of Git LFS: `git lfs pull` fetches it" if pointer else f"a damaged or truncated file ({error})"
        )
        raise WeightsError(f"{path}: got {found}; expected a safetensors file") from error
    table.pop("__metadata__", None)
    return file, 8 + len(text), table
