"""Remote tier of a `ChunkStore`: concurrent calls, counted failures; a failed read is a miss.

An object that does not verify is read a second time. If it fails again it is a miss and stays: other machines may read
it correctly.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreIOError, StoreUnreachableError, StoreVersionError
from ..disk.counters import Counters
from ..format.encryption import Encryption, Read
from ..format.header import Header
from ..format.naming import Name
from ..format.objects import Blob, blob_of
from ..io.thread_pool import ThreadPool
from ..remotes.remote_store import RemoteStore

_callers = ThreadPool(8, "kvpatch-remote")


def delete_below(remote: RemoteStore, prefix: str) -> int:
    """Deletes every object whose path begins with a prefix. Returns their number.

    Raises:
      StoreError: some could not be deleted; the others were.
    """
    paths = remote.paths(prefix)
    _callers.run_all(functools.partial(remote.delete, path) for path in paths)
    return len(paths)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingObject:
    """An object of a remote store that is being read.

    Attributes:
      header: its decrypted header.
      read: reads and decrypts adjacent leaves.
      stored: its header as it is stored, encrypted or not.
      kept: the leaves that were read so far, as they are stored.
    """

    header: Header
    read: Read
    stored: Header
    kept: Mapping[str, np.ndarray]

    def whole(self) -> dict[str, np.ndarray] | None:
        """Reads every leaf; None if one is damaged or cannot be read."""
        try:
            return self.read(list(self.header.leaves))
        except (StoreCorruptError, StoreIOError):
            return None

    @property
    def blob(self) -> Blob | None:
        """Content of the object as it is stored, to be written to the disk; None until every leaf was read."""
        if self.kept.keys() != self.stored.leaves.keys():
            return None
        arrays = {name: self.kept[name] for name in self.stored.leaves}
        return blob_of(self.stored, arrays)


class RemoteTier:
    """Access to the objects of a remote store. Decrypts what it reads.

    Counts failures as `remote_errors`, calls that the circuit breaker prevented as `remote_skipped`, reads that failed
    verification twice as `remote_damaged`, reads that passed the second time as `unsteady_reads`, and objects of a
    later library version as `newer`.
    """

    def __init__(self, remote: RemoteStore, counters: Counters, encryption: Encryption):
        self.remote, self._counters, self._encryption = remote, counters, encryption

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StoreIOError as error:
            spared = isinstance(error, StoreUnreachableError) and not error.asked
            self._counters.add("remote_skipped" if spared else "remote_errors")
            raise
        except StoreCorruptError:
            self._counters.add("remote_damaged")
            raise
        except StoreVersionError:
            self._counters.add("newer")
            raise

    def _read_twice[T](self, read: Callable[[], T]) -> T:
        """Reads, and a second time if the first does not verify. Counts and raises errors of `read`."""
        with self._counted():
            try:
                return read()
            except StoreCorruptError:
                result = read()
        self._counters.add("unsteady_reads")
        return result

    def put(self, items: Sequence[tuple[Name, Blob]]) -> None:
        """Writes several objects concurrently. Raises StoreError if not all are acknowledged."""
        with self._counted():
            _callers.run_all(functools.partial(self.remote.put, name, blob) for name, blob in items)

    def open(self, name: Name) -> PendingObject | None:
        """Opens an object, whose `read` raises StoreCorruptError and StoreIOError; None if it cannot be read.

        Raises:
          StoreKeyError: it is encrypted with another key.
        """
        found = None
        with contextlib.suppress(StoreError), self._counted():
            found = self.remote.open(name, lambda: self._counters.add("unsteady_reads"))
        if found is None:
            return None
        kept: dict[str, np.ndarray] = {}

        def noted(names: Sequence[str]) -> dict[str, np.ndarray]:
            arrays = found.read(names)
            kept.update(arrays)
            return arrays

        try:
            opened = self._read_twice(lambda: self._encryption.opened(found.header, noted))
        except (StoreCorruptError, StoreVersionError, StoreIOError):
            return None
        if opened is None:
            self._counters.add("unsealed")
            return None
        header, plain = opened

        def read(names: Sequence[str]) -> dict[str, np.ndarray]:
            try:
                return self._read_twice(lambda: plain(names))
            except StoreCorruptError:
                kept.clear()  # so that no part of it is copied to the disk
                raise

        return PendingObject(header, read, found.header, kept)

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix; empty if the service fails."""
        with contextlib.suppress(StoreError), self._counted():
            return self.remote.paths(prefix)
        return []

    def delete(self, prefix: str) -> int:
        """Deletes every object whose path begins with a prefix. Returns their number. Raises StoreError."""
        with self._counted():
            return delete_below(self.remote, prefix)

    def collect(self, prefix: str) -> int:
        """Deletes what expired long enough ago. Returns the number of objects; those that cannot be read stay."""
        with contextlib.suppress(StoreError), self._counted():
            deleted, errors = self.remote.collect(prefix)
            for error in errors:
                with contextlib.suppress(StoreError), self._counted():
                    raise error
            return deleted
        return 0
