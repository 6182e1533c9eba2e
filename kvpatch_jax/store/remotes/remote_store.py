"""Remote store: the same bytes under the same paths as on the disk, in a service that has an adapter.

An object is one value, written at once, so that it exists whole or not at all, and read by ranges: the header, then
leaves. Writes are compare-and-set on the revision in the stored header. A deleted chunk leaves a tombstone, the text
`{"revision": n}` in `<folder>/<chunk>.gone`: what has this revision or a smaller one is not there any more.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import InputError, StoreCorruptError, StoreError, StoreIOError, StoreUnreachableError, StoreVersionError
from ..format.encryption import Read
from ..format.header import PAGE, Header, Leaf, header_length, parse_header
from ..format.naming import Name, is_object, name_at
from ..format.objects import Blob, blob_bytes, check_name, padded, take_leaves
from ..io.thread_pool import ThreadPool
from .adapter import ABSENT, RemoteAdapter
from .leases import FOLDER as LEASES
from .leases import Lease, is_over, take_lease
from .retry_policy import RetryPolicy
from .retrying_adapter import RetryingAdapter
from .tombstones import CHANGES, SUFFIX, Tombstone, raise_tombstone, read_tombstone

GRACE = 3600.0
"""Seconds for which an expired object stays: the clock of the reader that finds it may be ahead."""
RETENTION = 30 * 86400.0
"""Seconds for which a tombstone stays. A machine that was cut off for longer may bring a deleted object back."""
_OPENING = 4 * PAGE
"""Bytes that the first read asks for: the header, and all of a small object."""
_deleters = ThreadPool(8, "kvpatch-remote-delete")


class RemoteObject(NamedTuple):
    """An opened object of a remote store.

    Attributes:
      header: its verified header.
      read: reads and verifies adjacent leaves, from the service each time, and a second time if they are damaged;
        raises StoreCorruptError and StoreIOError.
    """

    header: Header
    read: Read


class StoredVersion(NamedTuple):
    """What is stored at an object's path.

    Attributes:
      generation: the service's name of this value.
      header: its header; or why it has none: StoreCorruptError (the same value was read twice) or StoreVersionError.
      opening: its first bytes.
    """

    generation: bytes
    header: Header | StoreCorruptError | StoreVersionError
    opening: bytes = b""


class Burial(NamedTuple):
    """Result of burying a chunk: how many objects were deleted, and paths of those whose revision cannot be read."""

    deleted: int
    left: tuple[str, ...]


class CollectionReport(NamedTuple):
    """Result of a collection: how many expired objects were deleted, and errors of those that could not be read."""

    deleted: int
    errors: tuple[StoreError, ...]


class _ChangedError(StoreIOError):
    """An object that was replaced or deleted while it was read."""


class RemoteStore:
    """Store of objects in a service, for all machines that reach it. Called from several threads.

    Acknowledged writes are as durable as the service. Reads are verified as those of the disk. Nothing is destroyed on
    one reader's word: damage is a verdict after a second read, and a damaged object stays (see `damaged`, `drop`); an
    expired one is a miss and stays until `collect`; objects of another version of the format are left alone. Every
    call ends within the limits of `patience`.

    Args:
      adapter: the service.
      clock: returns seconds since the epoch.
      patience: time limits and number of tries.

    Raises:
      InputError: the adapter lacks a method, or the patience has another type.
    """

    def __init__(
        self,
        adapter: RemoteAdapter,
        *,
        clock: Callable[[], float] = time.time,
        patience: RetryPolicy | None = None,
    ):
        if not isinstance(adapter, RemoteAdapter):
            raise InputError(f"remote store: got adapter {adapter!r:.80}; expected read, write, delete and paths")
        if patience is not None and not isinstance(patience, RetryPolicy):
            raise InputError(f"remote store: got patience {patience!r:.80}; expected a RetryPolicy, or None")
        self._clock = clock
        self._remote = RetryingAdapter(adapter, RetryPolicy() if patience is None else patience)

    # ------------------------------------------------------------------------------------------------ reading

    def _look(self, name: Name) -> StoredVersion | None:
        """Reads what is stored at an object's path up to the end of the header, once. Raises StoreIOError."""
        opening = self._remote.read(name.path, 0, _OPENING)
        if opening is None:
            return None
        try:
            raw, length = opening.data, header_length(opening.data, None)
            if length > _OPENING:
                raw += self._range_of(name.path, opening.generation, _OPENING, length)
            header = parse_header(raw[:length], None)
            check_name(header, name.file)
            return StoredVersion(opening.generation, header, opening.data)
        except (StoreCorruptError, StoreVersionError) as error:
            return StoredVersion(opening.generation, error)

    def stored(self, name: Name, unsteady: Callable[[], None] | None = None) -> StoredVersion | None:
        """Returns what is stored at an object's path, expired, deleted or not; None: nothing.

        Args:
          unsteady: called if a second read found undamaged what a first one found damaged.

        Raises:
          StoreIOError: the service failed, or the object keeps changing.
        """
        suspect = b""
        for _ in range(CHANGES):
            try:
                found = self._look(name)
            except _ChangedError:
                continue
            if found is None or not isinstance(found.header, StoreCorruptError):
                if found is not None and found.generation == suspect and unsteady is not None:
                    unsteady()
                return found
            if found.generation == suspect:
                return found
            suspect = found.generation
        raise StoreUnreachableError("remote store: get: got an object that keeps changing; expected one version")

    def open(self, name: Name, unsteady: Callable[[], None] | None = None) -> RemoteObject | None:
        """Opens an object; None if it is absent, deleted or expired.

        Args:
          unsteady: called for every second read, of header or leaves, that is undamaged where the first is not.

        Raises:
          StoreCorruptError: it is damaged; it is left unchanged.
          StoreVersionError: it is of another version of the format; it is left unchanged.
          StoreIOError: the service failed.
        """
        found = self.stored(name, unsteady)
        if found is None:
            return None
        generation, header, opening = found
        if not isinstance(header, Header):
            raise header
        if header.expires is not None and self._clock() >= header.expires:
            return None
        # The tombstone is read after the object, so that none of its deletions is missed.
        if header.revision <= self.buried(name.chunk_key):
            return None
        # Of a large object the opening is dropped: it holds no whole leaf, as a rule.
        opening = opening if len(opening) == header.size else b""
        return RemoteObject(header, functools.partial(self._leaves, name.path, generation, header, opening, unsteady))

    def _range_of(self, path: str, generation: bytes, begin: int, end: int) -> bytes:
        """Reads some bytes of one version of a value. Raises StoreIOError if there is another one."""
        if begin == end:
            return b""
        read = self._remote.read(path, begin, end)
        if read is None or read.generation != generation:
            raise _ChangedError("remote store: get: got another version of the object; expected the opened one")
        if len(read.data) != end - begin:
            raise StoreCorruptError(f"object: got {len(read.data)} bytes from {begin}; expected {end - begin}")
        return read.data

    def _leaves(
        self,
        path: str,
        generation: bytes,
        header: Header,
        opening: bytes,
        unsteady: Callable[[], None] | None,
        names: Sequence[str],
    ) -> dict[str, np.ndarray]:
        leaves: list[Leaf] = [header.leaves[name] for name in names]
        if not leaves:
            return {}
        begin, end = leaves[0].offset, leaves[-1].offset + padded(leaves[-1].nbytes)

        def read(opening: bytes = b"") -> dict[str, np.ndarray]:
            data = np.frombuffer(opening[begin:end] or self._range_of(path, generation, begin, end), np.uint8)
            payload = np.empty(len(data), np.uint8)  # an aligned copy, so that the service's buffer is freed
            payload[:] = data
            return take_leaves(payload, begin, leaves)

        try:
            return read(opening)
        except StoreCorruptError:
            arrays = read()
        if unsteady is not None:
            unsteady()
        return arrays

    def damaged(self, name: Name) -> bytes | None:
        """Reads an object whole, and a second time if it does not verify.

        Returns:
          The version that is damaged, for `drop`; None if the object is correct, absent, or changed in the meantime.

        Raises:
          StoreVersionError: it is of another version of the format.
          StoreIOError: the service failed.
        """
        found = self.stored(name)
        if found is None:
            return None
        if isinstance(found.header, StoreVersionError):
            raise found.header
        if isinstance(found.header, StoreCorruptError):
            return found.generation
        for _ in range(2):
            whole = self._remote.read(name.path, 0, found.header.size + 1)
            if whole is None or whole.generation != found.generation:
                return None
            try:
                raw = np.frombuffer(whole.data, np.uint8)
                header = parse_header(whole.data[: found.header.start], len(raw))
                take_leaves(raw.copy(), 0, header.leaves.values())
                return None
            except StoreCorruptError:
                continue
        return found.generation

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix, sorted. Raises StoreIOError."""
        return [path for path in self._remote.paths(prefix) if is_object(path)]

    # ------------------------------------------------------------------------------------------------ writing

    def put(self, name: Name, blob: Blob) -> bool:
        """Writes an object, unless the path or the chunk's tombstone has its revision or a later one.

        An object of revision 0, which has none, replaces another such object. What is damaged, also at the second
        read, is replaced.

        Returns:
          Whether the object is stored; False: a later put, a deletion, or an object of another version of the format
          took its place.

        Raises:
          StoreIOError: it is not acknowledged. It may have been written nevertheless.
          StoreCorruptError: the chunk's tombstone is damaged.
        """
        data = blob_bytes(blob, name.file)
        generation = self._remote.write(name.path, data, ABSENT)
        for _ in range(CHANGES):
            if generation is not None:
                break
            found = self.stored(name)
            if found is None:
                generation = self._remote.write(name.path, data, ABSENT)
                continue
            if isinstance(found.header, StoreVersionError):
                return False
            if isinstance(found.header, Header) and found.header.revision >= max(blob.revision, 1):
                if found.header.revision > blob.revision:
                    return False
                generation = found.generation  # this object, of an earlier try or another machine
                break
            generation = self._remote.write(name.path, data, found.generation)
        else:
            raise StoreUnreachableError("remote store: put: got an object that keeps changing; expected one version")

        # Looked at last: a deletion in between did not see the object. Readers look there too.
        if self.buried(name.chunk_key) < blob.revision:
            return True
        self._remote.delete(name.path, generation)
        return False

    def replace(self, name: Name, blob: Blob, generation: bytes) -> bool:
        """Writes another form of an object, unless it was written since `stored` found a generation of it.

        Returns:
          Whether it was written. Raises StoreIOError.
        """
        return self._remote.write(name.path, blob_bytes(blob, name.file), generation) is not None

    def delete(self, path: str) -> None:
        """Deletes an object if it exists. Raises StoreIOError."""
        self._remote.delete(path)

    def drop(self, path: str, version: bytes) -> bool:
        """Deletes one version of an object. Returns whether it was there. Raises StoreIOError."""
        return self._remote.delete(path, version)

    # ------------------------------------------------------------------------------------------------ deletion

    def deletions(self, prefix: str) -> dict[str, int]:
        """Returns the revisions of deletions by the keys of chunks that begin with a prefix. Raises StoreIOError."""
        chunks = [path.removesuffix(SUFFIX) for path in self._remote.paths(prefix) if path.endswith(SUFFIX)]
        revisions = _deleters.run_all(functools.partial(self.buried, chunk) for chunk in chunks)
        return dict(zip(chunks, revisions, strict=True))

    def buried(self, chunk: str) -> int:
        """Returns the revision of a chunk's deletion; -1 if it was not deleted.

        Args:
          chunk: `Name.chunk_key`, the common beginning of its objects' paths.

        Raises:
          StoreCorruptError: its tombstone is damaged.
          StoreIOError: the service failed.
        """
        found = read_tombstone(self._remote, chunk)
        return -1 if found is None else found.revision

    def bury(self, chunk: str, revision: int) -> Burial:
        """Deletes a chunk as of a revision: writes or raises its tombstone, then deletes the objects that it covers.

        Objects of a later revision stay. So do those whose revision cannot be read, which nobody sees any more: a
        damaged one may be sound for another reader.

        Raises:
          StoreCorruptError: the tombstone is damaged; `drop` it if that is certain.
          StoreIOError: the service failed. The call can be repeated.
        """
        covered = raise_tombstone(self._remote, chunk, revision)
        paths = self.paths(f"{chunk}.")
        calls = [functools.partial(self._delete_if, path, lambda header: header.revision <= covered) for path in paths]
        results = _deleters.run_all(calls)
        left = [path for path, result in zip(paths, results, strict=True) if isinstance(result, StoreError)]
        return Burial(results.count(True), tuple(left))

    def _delete_if(self, path: str, condition: Callable[[Header], bool]) -> bool | StoreError:
        """Deletes an object whose header meets a condition. Returns whether it did, or why the header is unreadable."""
        for _ in range(CHANGES):
            found = self.stored(name_at(path))
            if found is None:
                return False
            if isinstance(found.header, StoreError):
                return found.header
            if not condition(found.header):
                return False
            if self._remote.delete(path, found.generation):
                return True
        raise StoreUnreachableError("remote store: delete: got an object that keeps changing; expected one version")

    def collect(self, prefix: str) -> CollectionReport:
        """Deletes objects that expired more than `GRACE` seconds ago, tombstones after `RETENTION`, and old leases.

        A tombstone stays for as long as there is an object that it covers.

        Args:
          prefix: beginning of the paths of objects and tombstones. Every header is read.

        Raises:
          StoreIOError: the service cannot list.
        """
        now = self._clock()
        old: list[tuple[str, Tombstone]] = []

        def expired(header: Header) -> bool:
            return header.expires is not None and header.expires + GRACE < now

        def collect(path: str) -> bool | StoreError:
            try:
                if is_object(path):
                    return self._delete_if(path, expired)
                if path.startswith(LEASES):
                    found = self._remote.read(path)
                    if found is not None and is_over(found.data, now - GRACE):
                        self._remote.delete(path, found.generation)
                elif path.endswith(SUFFIX):
                    chunk = path.removesuffix(SUFFIX)
                    found = read_tombstone(self._remote, chunk)
                    if found is not None and found.revision < (now - RETENTION) * 1e9:
                        old.append((chunk, found))
                return False
            except StoreError as error:
                return error

        paths = [*self._remote.paths(prefix), *self._remote.paths(LEASES)]
        results = _deleters.run_all(functools.partial(collect, path) for path in paths)
        for chunk, tombstone in old:
            if not self.bury(chunk, tombstone.revision).left:
                self._remote.delete(f"{chunk}{SUFFIX}", tombstone.generation)
        return CollectionReport(
            results.count(True), tuple(result for result in results if isinstance(result, StoreError))
        )

    # ------------------------------------------------------------------------------------------------ leases

    def lease(self, name: str, seconds: float | int) -> Lease | None:
        """Takes a lease of a name for some seconds; None: another holds it.

        Raises:
          StoreIOError: the service failed.
        """
        return take_lease(self._remote, self._clock, name, seconds)
