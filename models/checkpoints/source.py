"""What holds the tensors of a checkpoint: names, shapes and types at once, values region by region."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open

from kvpatch_jax.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Slices = tuple[slice, ...]
"""A region of a tensor: one slice of step 1 per axis; axes that are left out are whole."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
      shape: its sizes.
      dtype: its type by safetensors' name: "F32", "BF16", "I64", …
    """

    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by name. Wrappers (renamed, merged, dequantised) state those of the checkpoint that results.

    Attributes:
      origin: the directory or file, for messages.
      tensors: every tensor's name, shape and type.
      unused: names of those that a model without such a parameter may leave unread.
    """

    @property
    def origin(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def unused(self) -> frozenset[str]: ...

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor, or a region of it and no more; from several threads at once, too.

        Raises:
          WeightsError: data that cannot be read.
        """
        ...


class SafetensorsSource:
    """The safetensors files of a directory: `model.safetensors` alone, or shards named by an index.

    Raises:
      WeightsError: no safetensors weights there, an index that cannot be read or names a file that is not there, or a
        damaged file.
    """

    unused: frozenset[str] = frozenset()

    def __init__(self, directory: str | os.PathLike[str]):
        self.origin = str(directory)
        self.tensors: dict[str, TensorInfo] = {}
        index = weight_index(directory)
        opened = {path: _open(path) for path in sorted(set(index.values()))}
        self._files = {name: opened[path] for name, path in index.items()}
        self._paths = index
        for file in opened.values():
            self.tensors |= _headers(file)

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it. Raises WeightsError where the data cannot be read."""
        file = self._files[name]
        try:
            if self.tensors[name].dtype.startswith("F8"):  # of which safetensors makes no NumPy arrays (0.8)
                return _read_bytes(self._paths[name], name, self.tensors[name].shape)[() if region is None else region]
            return file.get_tensor(name) if region is None else file.get_slice(name)[region]
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"tensor {name!r} cannot be read: {error}") from error


class RenamedSource:
    """Tensors of another source under other names.

    Args:
      inner: the source that is read.
      rename: new name to the inner one, for exactly the tensors that are to be there; or a function of an inner name
        that gives the new one, None for a tensor to leave out.

    Raises:
      WeightsError: an inner name that is not there, or two tensors that get one name.
    """

    def __init__(self, inner: TensorSource, rename: Mapping[str, str] | Callable[[str], str | None]):
        self.origin, self._inner = inner.origin, inner
        self._names = dict(rename) if isinstance(rename, Mapping) else self._renamed(rename)
        absent = sorted(old for old in self._names.values() if old not in inner.tensors)
        if absent:
            raise WeightsError(f"{self.origin}: tensor {absent[0]!r} is missing ({len(absent)} in all)")
        self.tensors = {new: inner.tensors[old] for new, old in self._names.items()}
        self.unused = frozenset(new for new, old in self._names.items() if old in inner.unused)

    def _renamed(self, rename: Callable[[str], str | None]) -> dict[str, str]:
        names: dict[str, str] = {}
        for old in self._inner.tensors:
            new = rename(old)
            if new in names:
                raise WeightsError(
                    f"{self.origin}: tensors {names[new]!r} and {old!r} are both {new!r}; expected one of them"
                )
            if new is not None:
                names[new] = old
        return names

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it, by its new name."""
        return self._inner.read(self._names[name], region)


def weight_index(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Tensor name to the safetensors file that holds it.

    Raises:
      WeightsError: as `SafetensorsSource`.
    """
    root = Path(directory)
    if not root.is_dir():
        raise WeightsError(f"{root} is not a directory; expected one with {SINGLE_FILE} or {INDEX_FILE}")
    if (root / INDEX_FILE).is_file():
        return _sharded_index(root)
    if (root / SINGLE_FILE).is_file():
        return {name: root / SINGLE_FILE for name in _headers(_open(root / SINGLE_FILE))}
    others = sorted(path.name for path in root.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"found {', '.join(others)}, which is not read" if others else "found no weights"
    raise WeightsError(f"{root}: {found}; expected {SINGLE_FILE} or {INDEX_FILE}")


def _sharded_index(root: Path) -> dict[str, Path]:
    path = root / INDEX_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        index = {str(name): root / str(file) for name, file in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f'{path} is not an index: expected JSON with "weight_map": {error}') from error
    present: dict[str, Path] = {}
    for file in sorted(set(index.values())):
        if file.parent != root or file.name in ("", ".", ".."):
            raise WeightsError(f"{path} names the file {str(file)!r}; expected a plain file name beside it")
        if not file.is_file():
            raise WeightsError(f"{path} names {file.name}, which is not in {root}")
        present |= dict.fromkeys(_headers(_open(file)), file)
    for name, file in index.items():
        if present.get(name) != file:
            raise WeightsError(f"{path} says tensor {name!r} is in {file.name}; it is not there")
    return present


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged, cut short or not a safetensors file: {error}") from error


def _read_bytes(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of one byte per value as it lies in the file, uint8, mapped."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return np.memmap(path, np.uint8, "r", 8 + length + start, (stop - start,)).reshape(shape)


def _headers(file: Any) -> dict[str, TensorInfo]:
    """What a file's header says of its tensors."""
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return {name: TensorInfo(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
