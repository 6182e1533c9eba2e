"""Write-behind: a thread sends what the outbox holds to the remote store, and goes on after an outage."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from ...errors import (
    StoreBusyError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreIOError,
    StoreVersionError,
)
from ..disk.counters import Counters
from ..disk.outbox import FOLDER, Outbox, OutboxEntry
from ..format.buffers import Buffers
from ..format.naming import name_at
from ..format.objects import blob_of, check_name, read_header, read_leaves
from ..io.files import open_regular, typed
from ..io.locks import SECONDS, lock
from ..io.thread_pool import ThreadPool, register_fork_guard
from ..remotes.remote_store import RemoteStore

_senders = ThreadPool(8, "kvpatch-send")
_ROUND = 64
"""Number of entries that are sent at a time; after a failure no more are tried."""
_SHORTEST, _LONGEST = 0.2, 30.0
"""Seconds between attempts during an outage: doubled after each."""
_IDLE = 5.0
"""Seconds without work after which the thread ends."""


class RemoteSender:
    """Sends one tenant's outbox to a remote store. Thread-safe; several processes may send one outbox.

    Args:
      remote: the remote store.
      root: the store's directory.
      outbox: the tenant's outbox.
      counters: counts `remote_sent`, failures and damaged entries.
      most: bytes that may wait before puts are refused; None: no limit.
    """

    def __init__(self, remote: RemoteStore, root: str, outbox: Outbox, counters: Counters, most: int | None):
        self._remote, self._root, self._outbox, self._counters, self._most = remote, root, outbox, counters, most
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wanted = self._done = 0  # rounds that were asked for, and that have ended
        self._error: StoreError | None = None
        self._pause = 0.0
        self._closed = False
        entries = outbox.entries()
        self._waiting = sum(entry.nbytes for entry in entries)
        register_fork_guard(self)
        if entries:  # an earlier process has left them, perhaps deletions alone
            self.wake()

    def forked(self) -> None:
        """Forgets the thread of the parent process."""
        self._changed, self._thread = threading.Condition(), None

    def expect_room(self, nbytes: int) -> None:
        """Counts bytes to be sent. Raises StoreFullError if too many wait, because the remote store does not answer."""
        with self._changed:
            if self._most is not None and self._waiting + nbytes > self._most:
                raise StoreFullError(
                    f"store: got {nbytes} bytes while {self._waiting} wait for the remote store ({self._error}); "
                    f"expected at most {self._most}, the disk's budget"
                )
            self._waiting += nbytes

    def wake(self) -> None:
        """Has the thread send what was added. Returns immediately."""
        with self._changed:
            self._wanted += 1
            self._start()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kvpatch-remote-sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def flush(self) -> None:
        """Waits until the remote store has everything that was added before.

        Raises:
          StoreError: it does not answer, or refuses; the outbox keeps what was not sent.
        """
        with self._changed:
            self._wanted += 1
            wanted, self._pause, self._error = self._wanted, 0.0, None
            self._start()
            self._changed.wait_for(lambda: self._done >= wanted or self._error is not None)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Sends what waits, if the remote store answers, and ends the thread. Later processes send the rest."""
        with contextlib.suppress(StoreError):
            self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._wanted > self._done
                if self._pause or not due:
                    self._changed.wait_for(
                        lambda: self._closed or (self._wanted > self._done and not self._pause), self._pause or _IDLE
                    )
                    if self._closed or (not self._pause and self._wanted == self._done):
                        self._thread = None
                        return
                wanted = self._wanted
            try:
                error, left = self._send_all()
            except Exception as failure:  # whatever it is, who waits must hear of it, and the next round tries again
                what = "store: send to the remote store"
                error = (
                    typed(failure, what) if isinstance(failure, OSError) else StoreIOError(f"{what}: {failure!r:.200}")
                )
                left = self._waiting
            with self._changed:
                self._waiting, self._error = left, error
                self._pause = 0.0 if error is None else min(max(2 * self._pause, _SHORTEST), _LONGEST)
                self._done = wanted if error is None else self._done
                self._changed.notify_all()

    def _send_all(self) -> tuple[StoreError | None, int]:
        """Sends the outbox until it is empty. Returns the first error, and the bytes that wait then."""
        never, until = set[str](), 0.0
        while True:
            entries = self._outbox.entries()
            waiting = [entry for entry in entries if entry.file not in never]
            busy = set[str]()
            for start in range(0, len(waiting), _ROUND):
                calls: list[Callable[[], StoreError | None]] = []
                for entry in waiting[start : start + _ROUND]:
                    calls.append(functools.partial(self._send, entry, busy, never))
                errors = [error for error in _senders.run_all(calls) if error is not None]
                if errors:
                    return errors[0], sum(entry.nbytes for entry in self._outbox.entries())

            if not waiting:
                return None, sum(entry.nbytes for entry in entries)
            if len(busy) == len(waiting):  # other processes send them; they may be stopped
                now = time.monotonic()
                until = until or now + SECONDS
                if now >= until:
                    error = StoreBusyError(f"store: got {len(busy)} objects that others send; expected them to be sent")
                    return error, sum(entry.nbytes for entry in entries)
                time.sleep(0.005)

    def _send(self, entry: OutboxEntry, busy: set[str], never: set[str]) -> StoreError | None:
        """Sends one entry, unless another process does so at this moment. Returns an error of the remote store."""
        began = time.perf_counter()
        try:
            if entry.deletion:
                revision = self._outbox.revision(entry)
                if not revision:
                    raise StoreCorruptError("outbox: got a deletion without a tombstone; expected one")
                self._remote.bury(entry.path, revision)
            else:
                with open_regular(self._root, f"{FOLDER}/{entry.file}", noatime=True) as fd:
                    lock(fd, entry.file, seconds=0.0)  # until it is closed
                    name = name_at(entry.path)
                    header = read_header(fd)
                    check_name(header, name.file)
                    blob = blob_of(header, read_leaves(fd, header, list(header.leaves), Buffers(keep=0)))
                    try:
                        self._remote.put(name, blob)
                    except StoreCorruptError as error:  # what is stored there is damaged, and not this object
                        return error
        except (FileNotFoundError, NotADirectoryError):
            return None
        except StoreBusyError:  # another process sends it
            busy.add(entry.file)
            return None
        except StoreVersionError:
            never.add(entry.file)
            return None
        except StoreCorruptError:
            self._counters.add("outbox_damaged")
        except StoreError as error:
            self._counters.add("remote_errors")
            return error
        except OSError:
            self._counters.add("read_errors")
            never.add(entry.file)
            return None
        self._counters.add("remote_sent")
        self._counters.observe("commit", "remote", time.perf_counter() - began)
        with contextlib.suppress(StoreError, OSError):
            self._outbox.done(entry)
        return None
