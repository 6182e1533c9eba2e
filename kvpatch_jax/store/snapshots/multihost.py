"""Coordination of the processes of one job: they wait for one another, and all fail where one does.

Processes meet through the job's coordination service, which knows time limits and may be used from any thread; what
they tell one another (a word each) goes over their devices, in the order of the program.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...errors import InputError, StoreIOError, StoreReadOnlyError
from ..io.files import open_regular

TIMEOUT = 1200
"""Seconds that processes wait for one another, unless told otherwise."""

_TOKEN = 16


def _barrier(key: str, timeout: float | int) -> None:
    """Waits, in any thread, until all processes of the job have come to `key`. Raises where they do not come."""
    from orbax.checkpoint import multihost  # it takes a second to import

    multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(1000 * timeout))


class ProcessGroup:
    """One operation of all processes of a job, each beginning it at the same place of the program.

    Args:
      timeout: seconds that processes wait for one another.
    """

    def __init__(self, timeout: float | int = TIMEOUT):
        self.count, self.index = jax.process_count(), jax.process_index()
        self._timeout, self._steps = timeout, itertools.count()
        self._key = self.shared(secrets.token_bytes(_TOKEN)).hex()

    def shared(self, token: bytes) -> bytes:
        """Broadcasts the first process's 16 bytes. Not for a background thread."""
        if self.count == 1:
            return token
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(token, np.uint8))))

    def wait(self) -> None:
        """Waits for all processes. Allowed in a background thread. Raises StoreIOError where they do not come."""
        if self.count == 1:
            return
        try:
            _barrier(f"kvpatch_jax/{self._key}/{next(self._steps)}", self._timeout)
        except Exception as error:  # the coordination service raises errors of several kinds
            raise StoreIOError(
                f"process {self.index}: the other processes did not come ({str(error)[:200]}); expected all "
                f"{self.count} within {self._timeout:g} s"
            ) from error

    def _failed(self, error: Exception | None) -> list[int]:
        """Gathers which processes have an error."""
        if self.count == 1:
            return [] if error is None else [0]
        self.wait()
        flags = np.asarray(multihost_utils.process_allgather(np.asarray([error is not None], np.uint8)))
        return [int(index) for index in np.flatnonzero(flags)]

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Waits for all processes at the end of its body. Where one of them raised, all raise.

        Not for a background thread.

        Raises:
          StoreIOError: another process failed, or did not come.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # whatever it is, nobody must wait for this process in vain
            error = raised
        failed = self._failed(error)
        if error is not None:
            raise error
        if failed:
            raise StoreIOError(f"{what}: failed in process {failed[0]}, which says why; expected all to do it")

    def expect_one_root(self, root: str) -> None:
        """Checks that all processes have the same directory as a store's root, on a file system that they share.

        Raises:
          InputError: some process has another root. StoreReadOnlyError: the root may not be written, so it is unknown.
        """
        if self.count == 1:
            return
        with contextlib.ExitStack() as stack:
            token = bytes(_TOKEN) if self.index else secrets.token_bytes(_TOKEN)
            path = f"tmp/settings-{token.hex()}"
            if self.index == 0:
                try:
                    fd = stack.enter_context(open_regular(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                    stack.callback(os.unlink, f"{root}/{path}")
                    fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep takes what nobody holds
                except OSError:
                    token = bytes(_TOKEN)  # zeros tell the others that nothing could be written

            token = self.shared(token)
            there = np.asarray([os.path.exists(f"{root}/tmp/settings-{token.hex()}")], np.uint8)
            found = np.asarray(multihost_utils.process_allgather(there)).reshape(-1)

        if not any(token):
            raise StoreReadOnlyError(
                f"store {root}: may not be written, so processes cannot tell whether it is one root"
            )
        if not found.all():
            raise InputError(
                f"store {root}: process {int(np.flatnonzero(found == 0)[0])} has another root; expected one that all "
                "share, or StoreItem(..., shared=False)"
            )
