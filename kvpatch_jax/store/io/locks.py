"""File locks among threads and processes, with time limits: a process that is stopped keeps its locks.

The system releases a lock when its holder dies. Whoever waits in vain for one gets an error that names the holder.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from ...errors import StoreBusyError
from .files import open_regular

SECONDS = 10.0
"""Seconds for which a lock is tried: locks are held for milliseconds, so the holder is stopped or hangs."""


_FIRST_PAUSE = 2e-5


@contextlib.contextmanager
def locked(path: str, *, shared: bool, below: str = "", seconds: float = SECONDS) -> Iterator[int]:
    """Holds a lock file, and yields it.

    Args:
      below: path of the file below `path`, which is then a root; no link is followed.
      seconds: how long to try.

    Raises:
      StoreBusyError: another process holds it. OSError: it cannot be opened.
    """
    root, name = (path, below) if below else os.path.split(path)
    with open_regular(root, name, os.O_RDWR | os.O_CREAT) as fd:
        lock(fd, f"{root}/{name}", shared=shared, seconds=seconds)
        try:
            yield fd
        finally:  # closing is not enough: a process forked in the meantime has the descriptor too
            unlock(fd)


def lock(
    fd: int, what: str, *, shared: bool = False, seconds: float = SECONDS, note: Callable[[str], object] | None = None
) -> None:
    """Locks an open file or folder until `unlock`, or until it is closed.

    Args:
      what: name of the file in the error.
      seconds: how long to try; 0: once.
      note: called with "lock_waits" if the lock is not free, and with "lock_timeouts" if it is given up.

    Raises:
      StoreBusyError: others hold it; the message names them.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                if note is not None and seconds:
                    note("lock_timeouts")
                raise StoreBusyError(
                    f"store: got no lock of {what} in {seconds:g} s, which {holders(fd)} holds; expected it to be free"
                ) from None
        if note is not None and pause == _FIRST_PAUSE:
            note("lock_waits")
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)


def unlock(fd: int) -> None:
    """Releases the lock of an open file."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int) -> bool:
    """Tries to lock an open file until it is closed. Returns whether it succeeded."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holders(fd: int) -> str:
    """Describes the processes that hold a lock of an open file: "process 17 (python3, stopped)"."""
    stat = os.fstat(fd)
    where = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    found: list[str] = []
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and where in fields[4:7]:
                found.append(_described(fields[fields.index(where) - 1]))
    return ", ".join(dict.fromkeys(found)) or "another process"


def _described(pid: str) -> str:
    """Returns a process's number, with its name and whether it is stopped, as far as they are known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({name}{', stopped' if rest.split()[:1] in (['T'], ['t']) else ''})"
