"""Objects: arrays and a body in one immutable file, written, and read back verified."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...errors import StoreCorruptError
from ..io.files import Identity, ReadInto, read_into, reserve, write_all
from ..io.thread_pool import ThreadPool
from .buffers import Buffers
from .expiry import expiry_mtime, seconds
from .header import ALIGNMENT, PAGE, Header, Leaf, crc32, header_length, make_header, parse_header

Kind = Literal["kv", "patch", "encoder", "entry"]
Arrays = Mapping[str, np.ndarray]
_OVERLAP = 4 << 20
_SPLIT = 8 << 20
_RUN = 4 << 20
_OPENING = 4 * PAGE  # as much as most headers have
_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads that one read takes: half of few cores, for reading waits for memory, and somebody computes meanwhile."""

_NO_DIGITS = str.maketrans("", "", string.digits)


@dataclasses.dataclass(frozen=True, eq=False)
class Blob:
    """An object before it is written: its leaves in the order of the file, and what its header will say.

    The arrays are not copied, and must not change until the object is durable. `expires` becomes a float, so that its
    text is the same wherever it is written, summed or authenticated.

    Raises:
      InputError: `expires` is not finite.
    """

    kind: Kind
    body: Mapping[str, Any] = dataclasses.field(repr=False)
    arrays: Arrays = dataclasses.field(repr=False)
    expires: float | None = None

    def __post_init__(self) -> None:
        if self.expires is not None:
            expires = seconds(self.expires, "object: expires", "finite seconds since the epoch, or None")
            object.__setattr__(self, "expires", expires)

    @property
    def specs(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape of every leaf."""
        return {name: (array.dtype, array.shape) for name, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves."""
        return sum(array.nbytes for array in self.arrays.values())

    def some(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns some of the leaves, as reading an object does."""
        return {name: self.arrays[name] for name in names}


def blob_of(header: Header, arrays: Arrays) -> Blob:
    """Makes an object of what was read, to be written again."""
    return Blob(header.kind, header.body, arrays, header.expires)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of an object: the file that it was read from, and the checksum of its header."""

    file: Identity | None
    crc: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class VerifiedObject:
    """An object read from the disk, verified. `arrays` are read-only views of one buffer; `file` is where they were,
    None for one that comes from elsewhere."""

    header: Header
    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)
    file: Identity | None = None

    @property
    def version(self) -> Version:
        """Which version of the object it is."""
        return Version(self.file, self.header.crc)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, uint8 [n]; a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def planned_header(blob: Blob, name: str) -> Header:
    """Makes the header of an object's file, but for its leaves' checksums."""
    return make_header(name, blob.kind, blob.expires, blob.body, blob.specs)[1]


def file_size(blob: Blob, name: str) -> int:
    """Returns the size of an object's file, in bytes."""
    return planned_header(blob, name).size


_helpers = ThreadPool(_WORKERS, "kvpatch-crc")


def _crcs(arrays: Arrays) -> dict[str, int]:
    return {name: crc32(as_bytes(array)) for name, array in arrays.items()}


def _parts(arrays: Arrays) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    for array in arrays.values():
        parts.append(as_bytes(array))
        if gap := -array.nbytes % ALIGNMENT:
            parts.append(np.zeros(gap, np.uint8))
    return parts


def blob_bytes(blob: Blob, name: str) -> bytes:
    """Makes the whole file as bytes, for stores that take it in one piece."""
    raw, _ = make_header(name, blob.kind, blob.expires, blob.body, blob.specs, _crcs(blob.arrays))
    return b"".join([raw, *(part.tobytes() for part in _parts(blob.arrays))])


def write_blob(fd: int, blob: Blob, name: str) -> Header:
    """Writes an object into an empty file; durable only after a sync. Large ones are written while summed.

    The file's time of last change shows when the object expires.
    """
    header = _written(fd, blob, name)
    now = time.time_ns()
    os.utime(fd, ns=(now, expiry_mtime(blob.expires, now)))
    return header


def _written(fd: int, blob: Blob, name: str) -> Header:
    describe = functools.partial(make_header, name, blob.kind, blob.expires, blob.body, blob.specs)
    if blob.nbytes < _OVERLAP:
        raw, header = describe(_crcs(blob.arrays))
        reserve(fd, header.size)
        write_all(fd, [raw, *_parts(blob.arrays)], 0)
        return header
    _, planned = describe()
    reserve(fd, planned.size)
    sums = _helpers.submit(_crcs, blob.arrays)
    write_all(fd, _parts(blob.arrays), planned.start)
    raw, header = describe(sums.result())
    write_all(fd, [raw], 0)
    return header


def read_header(
    fd: int, parse: Callable[[bytes, int], Header] = parse_header, read_bytes: ReadInto = read_into
) -> Header:
    """Reads and verifies the header of an open file.

    Args:
      parse: `parse_header`, or one that remembers what it said of the same bytes.

    Raises:
      StoreCorruptError: not an object of ours. StoreVersionError: a later version's. OSError: the read failed.
    """
    size = os.fstat(fd).st_size
    opening = os.pread(fd, _OPENING, 0) if read_bytes is read_into else _read_bytes(fd, min(size, _OPENING), read_bytes)
    length = header_length(opening, size)
    if length > len(opening):
        opening = _read_bytes(fd, length, read_bytes)
    return parse(opening[:length], size)


def _read_bytes(fd: int, size: int, read_bytes: ReadInto) -> bytes:
    raw = np.empty(size, np.uint8)
    read_bytes(fd, [raw], 0)
    return raw.tobytes()


def read_leaves(
    fd: int, header: Header, names: Sequence[str], buffers: Buffers, read_bytes: ReadInto = read_into
) -> dict[str, np.ndarray]:
    """Reads neighbouring leaves, verified: read-only views of one buffer, placed as `arranged` says.

    Read and summed in runs, each run summed while the cache still holds it; many bytes by several threads.

    Raises:
      StoreCorruptError: a checksum that does not agree, or a file that ends early. OSError: the read failed.
    """
    leaves = [header.leaves[name] for name in names]
    if not leaves:
        return {}
    places, room = arranged({leaf.name: leaf.nbytes for leaf in leaves})
    data = buffers.lease(room)
    rooms = [(leaf, data[places[leaf.name] : places[leaf.name] + padded(leaf.nbytes)]) for leaf in leaves]
    data.flags.writeable = False
    if room < _SPLIT or _WORKERS == 1:
        return {name: array for run in _runs(rooms) for name, array in _read_run(fd, run, read_bytes).items()}
    reads = [_helpers.submit(_read_run, fd, run, read_bytes) for run in _runs(rooms)]
    concurrent.futures.wait(reads)  # all of them: nobody may read from a descriptor that the caller has closed
    return {name: array for read in reads for name, array in read.result().items()}


def arranged(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Places leaves in memory, at multiples of 64 bytes. Also returns the bytes of all.

    Leaves whose names differ in numbers alone lie together, so that the layers of a channel are one array without
    another copy.
    """
    families: dict[str, list[str]] = {}
    for name in sizes:
        families.setdefault(name.translate(_NO_DIGITS), []).append(name)
    places: dict[str, int] = {}
    at = 0
    for name in itertools.chain.from_iterable(families.values()):
        places[name] = at
        at += padded(sizes[name])
    return places, at


type _Room = tuple[Leaf, np.ndarray]
"""A leaf and the memory for it, with its padding."""


def _runs(rooms: Sequence[_Room]) -> Iterator[list[_Room]]:
    """Groups neighbouring leaves, of `_RUN` bytes or more together."""
    run: list[_Room] = []
    size = 0
    for each in rooms:
        run.append(each)
        size += len(each[1])
        if size >= _RUN:
            yield run
            run, size = [], 0
    if run:
        yield run


def _read_run(fd: int, rooms: Sequence[_Room], read_bytes: ReadInto) -> dict[str, np.ndarray]:
    read_bytes(fd, [room for _, room in rooms], rooms[0][0].offset)
    return {leaf.name: _verified(leaf, room) for leaf, room in rooms}


def padded(size: int) -> int:
    """Returns the bytes that a leaf takes in a file, padding included."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _verified(leaf: Leaf, room: np.ndarray) -> np.ndarray:
    """Verifies a leaf and its padding; returns it as a read-only view."""
    room.flags.writeable = False
    own, rest = room[: leaf.nbytes], room[leaf.nbytes :]
    if (found := crc32(own)) != leaf.crc:
        raise StoreCorruptError(f"object: leaf {leaf.name} has checksum {found:08x}; expected {leaf.crc:08x}")
    if len(rest) and rest.any():
        place = int(np.argmax(rest != 0))
        raise StoreCorruptError(
            f"object: byte {place} behind leaf {leaf.name} is {rest[place]}; expected {len(rest)} zeros"
        )
    return own.view(leaf.dtype).reshape(leaf.shape)


def take_leaves(data: np.ndarray, first: int, leaves: Iterable[Leaf]) -> dict[str, np.ndarray]:
    """Takes leaves out of the file's bytes from `first` on, verified with their padding, as read-only views.

    Raises:
      StoreCorruptError: a checksum that does not agree, or padding that is not zero.
    """
    starts = ((leaf, leaf.offset - first) for leaf in leaves)
    return {leaf.name: _verified(leaf, data[at : at + padded(leaf.nbytes)]) for leaf, at in starts}


def check_name(header: Header, name: str) -> None:
    """Refuses a file whose header has another name. Raises StoreCorruptError."""
    if header.name != name:
        raise StoreCorruptError(f"object: its header has another name; expected {name!r}")
