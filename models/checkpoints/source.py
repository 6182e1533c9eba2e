"""What holds the tensors of a checkpoint: names, shapes and types at once, values region by region."""

import dataclasses
import os
import weakref
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from kvpatch_jax.errors import WeightsError

NUMPY_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "C64": np.dtype(np.complex64),
    "BOOL": np.dtype(np.bool_),
    **{f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
}
"""NumPy's types by safetensors' names, where it has them."""

Slices = tuple[slice, ...]
"""A region of a tensor: one slice of step 1 per axis; axes that are left out are whole."""


def whole_region(shape: tuple[int, ...], region: Slices | None) -> Slices:
    """Returns a region with a slice of start and stop for every axis of a tensor of this shape."""
    given = (*(region or ()), *[slice(None)] * (len(shape) - len(region or ())))
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(given, shape, strict=True))


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
    """Tensors by name. Wrappers (renamed, merged) state those of the checkpoint that results.

    Attributes:
      origin: the directory or file, for messages.
      tensors: every tensor's name, shape and type.
    """

    @property
    def origin(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, region: Slices | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reads a tensor, or a region of it and no more; from several threads at once, too.

        Args:
          out: memory that may be filled and returned, in C order, of the region's shape and the tensor's type.

        Raises:
          WeightsError: data that cannot be read.
        """
        ...


class OpenFile:
    """A file that stays open until nothing refers to it, read at any place from several threads.

    It is read by `preadv` and not mapped: of a mapped file that is cut short meanwhile the process would die (SIGBUS).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._opened = self._state()

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fills a contiguous array with the bytes from `start` on.

        Raises:
          WeightsError: the file ends before, cannot be read, or was written to since it was opened.
        """
        left = memoryview(out.reshape(-1).view(np.uint8))
        try:
            while left:
                count = os.preadv(self._file, [left], start)
                if not count:
                    raise WeightsError(
                        f"{self.path}: got the end of the file; expected {len(left)} bytes from byte {start} on"
                    )
                left, start = left[count:], start + count
        except OSError as error:
            raise WeightsError(f"{self.path}: got a file that cannot be read ({error}); expected to read it") from error
        # Of a file that was written to while it was read, old and new numbers may be mixed.
        if self._state() != self._opened:
            raise WeightsError(
                f"{self.path}: got a file that was written to while it was read; expected a file that stays as it is"
            )


class RenamedSource:
    """Tensors of another source under other names: `names` says the inner one of each."""

    def __init__(self, inner: TensorSource, names: Mapping[str, str]):
        self.origin, self._inner, self._names = inner.origin, inner, names
        self.tensors = {new: inner.tensors[old] for new, old in names.items()}

    def read(self, name: str, region: Slices | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """Reads a tensor or a region of it, by its new name."""
        return self._inner.read(self._names[name], region, out)
