"""Objects: arrays and a body in one immutable file. Making one, and reading it back verified."""

import concurrent.futures
import dataclasses
import functools
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import StoreCorruptError
from .buffers import Buffers
from .files import as_bytes, read_into, reserve, write_all
from .header import ALIGNMENT, PAGE, Header, Leaf, header_length, make_header, parse_header

Kind = Literal["kv", "patch", "encoder", "entry"]
Arrays = Mapping[str, np.ndarray]
_OVERLAP = 4 << 20
_SPLIT = 2 << 20
_RUN = 1 << 20
_MOST_HELPERS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Blob:
    """An object before it is a file: its leaves in the order of the file, and what its header will say.

    The arrays are not copied, and must not change until the object is durable.
    """

    kind: Kind
    body: Mapping[str, Any] = dataclasses.field(repr=False)
    arrays: Arrays = dataclasses.field(repr=False)
    expires: float | None = None

    @property
    def specs(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape of every leaf."""
        return {name: (array.dtype, array.shape) for name, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves."""
        return sum(array.nbytes for array in self.arrays.values())


def file_size(blob: Blob, name: str) -> int:
    """Bytes of the file that the object will be."""
    return make_header(name, blob.kind, blob.expires, blob.body, blob.specs)[1].size


@functools.cache
def _helpers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(_MOST_HELPERS, os.cpu_count() or 1), "kvpatch-crc")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not follow into a forked process


def _crcs(arrays: Arrays) -> dict[str, int]:
    return {name: zlib.crc32(as_bytes(array)) for name, array in arrays.items()}


def _parts(arrays: Arrays) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    for array in arrays.values():
        parts.append(as_bytes(array))
        if gap := -array.nbytes % ALIGNMENT:
            parts.append(np.zeros(gap, np.uint8))
    return parts


def blob_bytes(blob: Blob, name: str) -> bytes:
    """The whole file as bytes, for stores that take it in one piece."""
    raw, _ = make_header(name, blob.kind, blob.expires, blob.body, blob.specs, _crcs(blob.arrays))
    return b"".join([raw, *(part.tobytes() for part in _parts(blob.arrays))])


def write_blob(fd: int, blob: Blob, name: str) -> Header:
    """Writes an object into an empty file; durable only after a sync. Large ones are written while summed."""
    describe = functools.partial(make_header, name, blob.kind, blob.expires, blob.body, blob.specs)
    _, planned = describe()
    reserve(fd, planned.size)
    if blob.nbytes < _OVERLAP:
        raw, header = describe(_crcs(blob.arrays))
        write_all(fd, [raw, *_parts(blob.arrays)], 0)
        return header
    sums = _helpers().submit(_crcs, blob.arrays)
    write_all(fd, _parts(blob.arrays), planned.start)
    raw, header = describe(sums.result())
    write_all(fd, [raw], 0)
    return header


def read_header(fd: int) -> Header:
    """The header of an open file.

    Raises:
      StoreCorruptError: not an object of ours. OSError: the read failed.
    """
    size = os.fstat(fd).st_size
    opening = os.pread(fd, PAGE, 0)
    length = header_length(opening, size)
    if length > len(opening):
        raw = np.empty(length, np.uint8)
        read_into(fd, raw, 0)
        opening = raw.tobytes()
    return parse_header(opening[:length], size)


def read_leaves(fd: int, header: Header, names: Sequence[str], buffers: Buffers) -> dict[str, np.ndarray]:
    """Some leaves that lie one behind the other, verified; read-only views of one buffer.

    Many bytes are read and summed in runs by several threads, each run summed while the cache still holds it.

    Raises:
      StoreCorruptError: a checksum that does not agree, or a file that ends early. OSError: the read failed.
    """
    leaves = [header.leaves[name] for name in names]
    if not leaves:
        return {}
    first, last = leaves[0].offset, _padded(leaves[-1])
    data = buffers.lease(last - first)
    if last - first < _SPLIT:
        read_into(fd, data, first)
        return take_leaves(data, first, leaves)
    reads = [_helpers().submit(_read_run, fd, data, first, run) for run in _runs(leaves)]
    concurrent.futures.wait(reads)  # all of them: nobody may read from a descriptor that the caller has closed
    arrays = {name: array for read in reads for name, array in read.result().items()}
    data.flags.writeable = False
    return arrays


def _runs(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Neighbouring leaves, of `_RUN` bytes or more together."""
    run: list[Leaf] = []
    for leaf in leaves:
        run.append(leaf)
        if _padded(leaf) - run[0].offset >= _RUN:
            yield run
            run = []
    if run:
        yield run


def _read_run(fd: int, data: np.ndarray, first: int, run: Sequence[Leaf]) -> dict[str, np.ndarray]:
    start = run[0].offset
    part = data[start - first : _padded(run[-1]) - first]
    read_into(fd, part, start)
    return take_leaves(part, start, run)


def _padded(leaf: Leaf) -> int:
    """Where the padding behind a leaf ends, in bytes from the file's start."""
    return -(-(leaf.offset + leaf.nbytes) // ALIGNMENT) * ALIGNMENT


def take_leaves(data: np.ndarray, first: int, leaves: Iterable[Leaf]) -> dict[str, np.ndarray]:
    """Leaves out of the file's bytes from `first` on, verified with the padding behind each, as read-only views.

    Raises:
      StoreCorruptError: a checksum that does not agree, or padding that is not zero.
    """
    data.flags.writeable = False
    arrays: dict[str, np.ndarray] = {}
    for leaf in leaves:
        own = data[leaf.offset - first : leaf.offset - first + leaf.nbytes]
        if (found := zlib.crc32(own)) != leaf.crc:
            raise StoreCorruptError(f"object: leaf {leaf.name} has checksum {found:08x}; expected {leaf.crc:08x}")
        if data[leaf.offset - first + leaf.nbytes : _padded(leaf) - first].any():
            raise StoreCorruptError(f"object: bytes behind leaf {leaf.name}; expected zeros up to {_padded(leaf)}")
        arrays[leaf.name] = own.view(leaf.dtype).reshape(leaf.shape)
    return arrays


def check_name(header: Header, name: str) -> None:
    """Raises StoreCorruptError where a file is not the object that its name says."""
    if header.name != name:
        raise StoreCorruptError(f"object: its header has another name; expected {name!r}")
