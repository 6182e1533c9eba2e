"""The remote tier of a `ChunkStore`: several objects at a time, failures counted; a failing read is a miss.

What does not verify is read once more, and is then a miss that stays where it is: others may find it whole.
"""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreIOError, StoreUnreachableError, StoreVersionError
from ..disk.counters import Counters
from ..format.encryption import Encryption, Read
from ..format.header import Header
from ..format.naming import Name, name_at
from ..format.objects import Blob, blob_of
from ..io.thread_pool import ThreadPool
from .remote import RemoteStore

_callers = ThreadPool(8, "kvpatch-remote")


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Makes several calls in threads and returns their results. All end before the first error is raised."""
    jobs = [_callers.submit(call) for call in calls]
    concurrent.futures.wait(jobs)
    return [job.result() for job in jobs]


def delete_below(remote: RemoteStore, prefix: str) -> int:
    """Deletes every object whose path begins with a prefix. Returns how many.

    Raises:
      StoreError: not all of them were deleted; the others were.
    """
    paths = remote.paths(prefix)
    at_once((lambda path=path: remote.delete(path)) for path in paths)
    return len(paths)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingObject:
    """An object of a remote store that is being read.

    Attributes:
      header, read: decrypted; `read` reads some neighbouring leaves.
      stored: the header as it is stored, encrypted or not. kept: the leaves read so far, as they are stored.
    """

    header: Header
    read: Read
    stored: Header
    kept: Mapping[str, np.ndarray]

    def whole(self) -> dict[str, np.ndarray] | None:
        """Reads every leaf; None where one is damaged or cannot be read now."""
        try:
            return self.read(list(self.header.leaves))
        except (StoreCorruptError, StoreIOError):
            return None

    @property
    def blob(self) -> Blob | None:
        """The object as it is stored, ready to be written, once every leaf was read; else None."""
        if self.kept.keys() != self.stored.leaves.keys():
            return None
        arrays = {name: self.kept[name] for name in self.stored.leaves}
        return blob_of(self.stored, arrays)


class RemoteTier:
    """Puts, reads and deletes objects of a remote store, decrypting what is read.

    Counts failures as `remote_errors`, calls that its circuit breaker held back as `remote_skipped`, reads that did not
    verify twice as `remote_damaged`, those that did the second time as `unsteady_reads`, and what a later version of
    the library wrote as `newer`.
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
        """Reads, and once more where that does not verify. Raises as `read`, counted."""
        with self._counted():
            try:
                return read()
            except StoreCorruptError:
                found = read()
        self._counters.add("unsteady_reads")
        return found

    def put(self, items: Sequence[tuple[Name, Blob]]) -> None:
        """Writes several objects at once. Raises StoreError: not all are acknowledged."""
        with self._counted():
            at_once((lambda name=name, blob=blob: self.remote.put(name, blob)) for name, blob in items)

    def open(self, name: Name) -> PendingObject | None:
        """Opens an object; None where there is none that can be read, or the service fails. Raises StoreKeyError.

        Its `read` raises StoreCorruptError and StoreIOError.
        """
        found = None
        with contextlib.suppress(StoreError):
            found = self._read_twice(lambda: self.remote.open(name))
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
                kept.clear()  # none of it is to be kept on the disk
                raise

        return PendingObject(header, read, found.header, kept)

    @contextlib.contextmanager
    def _missed(self) -> Iterator[None]:
        with contextlib.suppress(StoreError), self._counted():
            yield

    def paths(self, prefix: str) -> list[str]:
        """Lists objects whose path begins with a prefix; none where the service fails."""
        with self._missed():
            return self.remote.paths(prefix)
        return []

    def delete(self, prefix: str) -> int:
        """Deletes every object whose path begins with a prefix. Returns how many. Raises StoreError."""
        with self._counted():
            return delete_below(self.remote, prefix)

    def collect(self, prefix: str) -> int:
        """Reads every header and deletes what is expired. Returns how many; what fails or does not verify stays."""
        return sum(at_once((lambda path=path: self._gone(path)) for path in self.paths(prefix)))

    def _gone(self, path: str) -> int:
        try:
            name = name_at(path)
        except StoreCorruptError:
            return 0  # it has no object's name, and is none of ours
        try:
            return int(self._read_twice(lambda: self.remote.open(name)) is None)
        except StoreError:
            return 0  # counted: it stays
