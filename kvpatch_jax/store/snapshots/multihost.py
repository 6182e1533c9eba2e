"""Coordination of the processes of one job: they wait for one another, and all fail if one does.

Barriers use the job's coordination service, which has time limits and may be called from any thread. Values (one word
per process) are exchanged over the devices, in program order.
"""

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...errors import InputError, StoreIOError, StoreReadOnlyError
from ..io.files import folder, locked_new_file

TIMEOUT = 1200
"""Default time in seconds for which processes wait for one another."""

_TOKEN = 16


class ProcessGroup:
    """Joint operation of all processes of a job, which begin it at the same place of the program.

    Args:
      timeout: seconds for which processes wait for one another.
    """

    def __init__(self, timeout: float | int = TIMEOUT):
        self.count, self.index = jax.process_count(), jax.process_index()
        self._timeout, self._steps = timeout, itertools.count()
        self._key = self.shared(secrets.token_bytes(_TOKEN)).hex()

    def shared(self, token: bytes) -> bytes:
        """Returns the first process's 16 bytes in all processes. Not for a background thread."""
        if self.count == 1:
            return token
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(token, np.uint8))))

    def wait(self) -> None:
        """Waits for all processes, also in a background thread. Raises StoreIOError if they do not arrive."""
        if self.count == 1:
            return
        try:
            from orbax.checkpoint import multihost  # it takes a second to import

            # Every process counts the same steps, so each barrier has a key of its own.
            key = f"kvpatch_jax/{self._key}/{next(self._steps)}"
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(1000 * self._timeout))
        except Exception as error:  # the coordination service raises errors of several kinds
            raise StoreIOError(
                f"process {self.index}: got no answer of the other processes ({str(error)[:200]}); expected all "
                f"{self.count} within {self._timeout:g} s"
            ) from error

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Waits for all processes at the end of the block. If one of them raised, all raise.

        Not for a background thread.

        Raises:
          StoreIOError: another process failed, or did not arrive.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # whatever failed, the others must not wait for this process in vain
            error = raised

        failed = np.zeros(1, np.uint8)
        if self.count > 1:
            self.wait()  # first, because it has a time limit, which the exchange over the devices lacks
            failed = _gathered(error is not None)
        if error is not None:
            raise error
        if failed.any():
            raise StoreIOError(
                f"{what}: got a failure in process {np.argmax(failed)}, which says why; expected all to succeed"
            )

    def expect_one_root(self, root: str) -> None:
        """Checks that the store's root is the same directory, on a shared file system, in all processes.

        Raises:
          InputError: some process has another root. StoreReadOnlyError: the root may not be written, so it is unknown.
        """
        if self.count == 1:
            return

        token = bytes(_TOKEN) if self.index else secrets.token_bytes(_TOKEN)
        with contextlib.ExitStack() as stack:
            if self.index == 0:
                path = f"tmp/settings-{token.hex()}"
                try:
                    above = stack.enter_context(folder(root, "tmp", make=True))
                    stack.enter_context(locked_new_file(above, os.path.basename(path)))
                    stack.callback(os.unlink, f"{root}/{path}")
                except OSError:
                    token = bytes(_TOKEN)  # zeros: nothing could be written
            token = self.shared(token)
            found = _gathered(os.path.exists(f"{root}/tmp/settings-{token.hex()}"))
        if not any(token):
            raise StoreReadOnlyError(
                f"store {root}: got a read-only root, which processes cannot compare; expected write access"
            )
        if not found.all():
            raise InputError(
                f"store {root}: got another root in process {int(np.argmin(found))}; expected one that all share"
            )


def _gathered(flag: bool) -> np.ndarray:
    """Returns the flags of all processes, uint8 [count]."""
    return np.asarray(multihost_utils.process_allgather(np.asarray([flag], np.uint8))).reshape(-1)
