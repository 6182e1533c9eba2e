"""Objects: arrays and a JSON body in one immutable file. Writing, and verified reading."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import string
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

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
_OPENING = 4 * PAGE  # at least as long as most headers
_LARGEST_KNOWN = 64 << 10
_WORKERS = max(1, min(4, (os.cpu_count() or 1) // 2))
"""Threads per read: half of few cores, because reading is limited by memory bandwidth, and others compute."""

_ZEROS = np.zeros(ALIGNMENT, np.uint8)
_NO_DIGITS = str.maketrans("", "", string.digits)


@dataclasses.dataclass(frozen=True, eq=False)
class Blob:
    """Content of an object to be written: its leaves in the order of the file, and the fields of its header.

    The arrays are not copied, and must not change until the object is durable. `revision` is the name's, which the
    write is given when it begins (`revisions`). `expires` is converted to a float, so that its text is the same in the
    header, its checksum and its authentication.

    Raises:
      InputError: `expires` is not finite.
    """

    kind: Kind
    body: Mapping[str, Any] = dataclasses.field(repr=False)
    arrays: Arrays = dataclasses.field(repr=False)
    expires: float | None = None
    revision: int = 0

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
        """Returns some of the leaves, with the signature of a reader of leaves."""
        return {name: self.arrays[name] for name in names}


def blob_of(header: Header, arrays: Arrays) -> Blob:
    """Returns the content of an object that was read, to be written again."""
    return Blob(header.kind, header.body, arrays, header.expires, header.revision)  # pyright: ignore[reportArgumentType]


class Leaves(dict[str, np.ndarray]):
    """Verified leaves of an object by name: read-only views of one block of memory.

    Attributes:
      block: uint8 [n], read-only.
      places: offset of each leaf in the block.
      memo: that of the object's header.
    """

    def __init__(
        self, block: np.ndarray, places: Mapping[str, int], leaves: Iterable[Leaf], memo: dict[str, Any] | None = None
    ):
        super().__init__()
        self.block, self.places, self.memo = block, places, {} if memo is None else memo
        for name, dtype, shape, _, _, _ in leaves:
            self[name] = np.ndarray(shape, dtype, block, places[name])


def stack_layers(arrays: Arrays, layers: Sequence[int], leaf: str) -> np.ndarray:
    """Stacks the leaves `layer.<n>.<leaf>`, [L, ...]: as a view if they are evenly spaced in one block.

    Raises:
      StoreCorruptError: they differ in shape or dtype. KeyError: one is missing.
    """
    parts = [arrays[f"layer.{layer}.{leaf}"] for layer in layers]  # ends where a forged number of layers does
    first = parts[0]
    if len({(part.shape, part.dtype) for part in parts}) != 1:
        raise StoreCorruptError(f"object: got layers of {leaf} of several forms; expected one")
    if isinstance(arrays, Leaves):
        places = [arrays.places[f"layer.{layer}.{leaf}"] for layer in layers]
        count, step = len(places), places[1] - places[0] if len(places) > 1 else padded(first.nbytes)
        if step >= first.nbytes > 0 and places == list(range(places[0], places[0] + step * count, step)):
            return np.ndarray((count, *first.shape), first.dtype, arrays.block, places[0], (step, *first.strides))
    return np.stack(parts)


class Version(NamedTuple):
    """Version of an object: the identity of its file, and the checksum of its header."""

    file: Identity | None
    crc: bytes


class VerifiedObject(NamedTuple):
    """An object that was read and verified.

    Attributes:
      header: its header.
      arrays: its leaves, read-only views of one buffer.
      file: identity of its file; None for an object of a remote store.
    """

    header: Header
    arrays: dict[str, np.ndarray]
    file: Identity | None = None


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array, uint8 [n]; a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def planned_header(blob: Blob, name: str) -> Header:
    """Returns the header of an object's file, with zeros for the leaves' checksums."""
    return make_header(name, blob.kind, blob.expires, blob.body, blob.specs, revision=blob.revision)[1]


def file_size(blob: Blob, name: str) -> int:
    """Returns the size of an object's file, in bytes."""
    return planned_header(blob, name).size


_helpers = ThreadPool(_WORKERS, "kvpatch-crc")


def _crcs(arrays: Arrays, parts: Sequence[np.ndarray]) -> dict[str, int]:
    """Returns the checksum of each array, whose bytes are every second of its file's parts."""
    return dict(zip(arrays, map(crc32, parts[::2]), strict=True))


def _parts(arrays: Arrays) -> list[np.ndarray]:
    """Returns the parts of a file behind its header: the bytes of each array, and its padding, which may be empty."""
    parts: list[np.ndarray] = []
    for array in arrays.values():
        parts += np.ascontiguousarray(array).reshape(-1).view(np.uint8), _ZEROS[: -array.nbytes % ALIGNMENT]
    return parts


def blob_bytes(blob: Blob, name: str) -> bytes:
    """Returns the whole file as bytes, for stores that write it in one call."""
    parts = _parts(blob.arrays)
    crcs = _crcs(blob.arrays, parts)
    raw, _ = make_header(name, blob.kind, blob.expires, blob.body, blob.specs, crcs, blob.revision)
    return b"".join([raw, *(part.tobytes() for part in parts)])


def write_blob(fd: int, blob: Blob, name: str) -> Header:
    """Writes an object into an empty file; it is durable only after a sync.

    The file's modification time encodes when the object expires.
    """
    describe = functools.partial(
        make_header, name, blob.kind, blob.expires, blob.body, blob.specs, revision=blob.revision
    )
    parts = _parts(blob.arrays)
    if blob.nbytes < _OVERLAP:
        raw, header = describe(_crcs(blob.arrays, parts))
        reserve(fd, header.size)
        write_all(fd, [raw, *parts], 0)
    else:
        # A large object is written while its checksums are computed; the header, whose length is known, comes last.
        _, planned = describe()
        reserve(fd, planned.size)
        crcs = _helpers.submit(_crcs, blob.arrays, parts)
        write_all(fd, parts, planned.start)
        raw, header = describe(crcs.result())
        write_all(fd, [raw], 0)

    now = time.time_ns()  # after the last write, which sets the time itself
    os.utime(fd, ns=(now, expiry_mtime(blob.expires, now)))
    return header


def read_header(
    fd: int,
    parse: Callable[[bytes, int], Header] = parse_header,
    read_bytes: ReadInto = read_into,
    size: int | None = None,
) -> Header:
    """Reads and verifies the header of an open file.

    Args:
      parse: `parse_header`, or a version of it that remembers headers; long ones are not given to it.
      read_bytes: reads from the file.
      size: bytes of the file, if they are known.

    Raises:
      StoreCorruptError: it is no object.
      StoreVersionError: it is of another version of the format.
      OSError: the read failed.
    """
    size = os.fstat(fd).st_size if size is None else size
    opening = os.pread(fd, _OPENING, 0) if read_bytes is read_into else _read_bytes(fd, min(size, _OPENING), read_bytes)
    length = header_length(opening, size)
    if length > len(opening):
        opening = _read_bytes(fd, length, read_bytes)
    # A long header is not remembered: 256 of them could take a gigabyte.
    return (parse if length <= _LARGEST_KNOWN else parse_header)(opening[:length], size)


def _read_bytes(fd: int, size: int, read_bytes: ReadInto) -> bytes:
    raw = np.empty(size, np.uint8)
    read_bytes(fd, [raw], 0)
    return raw.tobytes()


class _Plan(NamedTuple):
    """How adjacent leaves are read: `places` in memory by `arranged`, `spans` there with their padding.

    A run is a number of leaves, `_RUN` bytes or a little more, by the numbers of its first and of the one after it.
    """

    places: Mapping[str, int]
    room: int
    spans: tuple[tuple[int, int], ...]
    runs: tuple[tuple[int, int], ...]


def _plan(leaves: Sequence[Leaf]) -> _Plan:
    """Returns how adjacent leaves are read."""
    places, room = arranged({leaf.name: leaf.nbytes for leaf in leaves})
    spans = tuple((places[leaf.name], places[leaf.name] + padded(leaf.nbytes)) for leaf in leaves)

    runs: list[tuple[int, int]] = []
    begin = size = 0
    for end, leaf in enumerate(leaves, 1):
        size += padded(leaf.nbytes)
        if size >= _RUN or end == len(leaves):
            runs.append((begin, end))
            begin, size = end, 0
    return _Plan(places, room, spans, tuple(runs))


def read_leaves(
    fd: int, header: Header, names: Sequence[str], buffers: Buffers, read_bytes: ReadInto = read_into
) -> Leaves:
    """Reads and verifies adjacent leaves. Returns read-only views of one buffer, placed by `arranged`.

    They are read in runs, and each run's checksums are computed while it is in the cache; large reads use several
    threads.

    Raises:
      StoreCorruptError: a checksum does not match, or the file is too short.
      OSError: the read failed.
    """
    whole = len(names) == len(header.leaves) and all(map(header.leaves.__contains__, names))
    leaves = tuple(header.leaves.values()) if whole else tuple(header.leaves[name] for name in names)
    plan: _Plan | None = header.memo.get("plan") if whole else None
    if plan is None:
        plan = _plan(leaves)
        if whole:  # other objects of this form are read in the same way
            header.memo["plan"] = plan
    block = buffers.lease(plan.room)
    memory = memoryview(block)
    block.flags.writeable = False  # the view made before stays writable, to be read into

    def read(run: tuple[int, int]) -> None:
        first, end = run
        rooms = [memory[begin:end] for begin, end in plan.spans[first:end]]
        read_bytes(fd, rooms, leaves[first].offset)
        for room, leaf in zip(rooms, leaves[first:end], strict=True):
            # The checksum of a leaf with padding is not that of its span, so it is compared on its own.
            if leaf.nbytes % ALIGNMENT or crc32(room) != leaf.crc:
                verify(leaf, room)

    if plan.room < _SPLIT or _WORKERS == 1:
        for run in plan.runs:
            read(run)
    else:
        reads = [_helpers.submit(read, run) for run in plan.runs]
        concurrent.futures.wait(reads)  # all of them: the caller closes the descriptor if one fails
        for job in reads:
            job.result()
    return Leaves(block, plan.places, leaves, header.memo)


def arranged(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Returns the offsets of leaves in memory, multiples of 64 bytes, and the total size.

    Leaves whose names differ only in numbers are adjacent, so that the layers of a channel are one array without
    another copy.
    """
    families: dict[str, list[str]] = {}
    for name in sizes:
        families.setdefault(name.translate(_NO_DIGITS), []).append(name)
    places: dict[str, int] = {}
    at = 0
    for name in itertools.chain.from_iterable(families.values()):
        places[name] = at
        at += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
    return places, at


def padded(size: int) -> int:
    """Returns the size of a leaf in a file, including padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def verify(leaf: Leaf, room: memoryview) -> None:
    """Verifies a leaf and its padding. Raises StoreCorruptError."""
    padding = len(room) - leaf.nbytes
    crc = crc32(room[: leaf.nbytes] if padding else room)
    if crc != leaf.crc:
        raise StoreCorruptError(f"object: leaf {leaf.name}: got checksum {crc:08x}; expected {leaf.crc:08x}")
    if padding and any(room[leaf.nbytes :]):
        index, byte = next((index, byte) for index, byte in enumerate(room[leaf.nbytes :]) if byte)
        raise StoreCorruptError(
            f"object: leaf {leaf.name}: got padding byte {index} of {byte}; expected {padding} zeros"
        )


def take_leaves(data: np.ndarray, first: int, leaves: Iterable[Leaf]) -> Leaves:
    """Returns verified read-only views of leaves in the file's bytes, which begin at offset `first`.

    Raises:
      StoreCorruptError: a checksum does not match, or padding is not zero.
    """
    block, leaves = data.view(), list(leaves)
    block.flags.writeable = False
    memory = memoryview(block)
    places = {leaf.name: leaf.offset - first for leaf in leaves}
    for leaf in leaves:
        at = places[leaf.name]
        verify(leaf, memory[at : at + padded(leaf.nbytes)])
    return Leaves(block, places, leaves)


def check_name(header: Header, name: str) -> None:
    """Raises StoreCorruptError for a file whose header has another name."""
    if header.name != name:
        raise StoreCorruptError(f"object: got a header with another name; expected {name!r}")
