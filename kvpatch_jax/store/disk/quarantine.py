"""Quarantine: objects that did not verify, kept for inspection for a while, within a budget, until their chunk goes.

root/quarantine/<tenant>.<when>-<which file>-<name>          the file as it was found
root/quarantine/<tenant>.<when>-<which file>-<name>.reason   why it did not verify
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable

from ..io.files import folder, locked, open_regular, remove, typed_errors

BYTES = 256 << 20
"""What a tenant's quarantine may take, unless told otherwise."""

SECONDS = 7 * 24 * 3600
"""How long something stays in it."""

_REASON = ".reason"


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """A file in quarantine.

    Attributes:
      path: from the root. tenant: its keyed name. name: of the object's file, keyed too.
      nbytes: of the file. since: seconds since the epoch, when it came there.
    """

    path: str
    tenant: str
    name: str
    nbytes: int
    since: float

    @property
    def chunk(self) -> str:
        """Keyed name of the chunk, or of the library's entry, that it belonged to."""
        return self.name.partition(".")[0]


def listed(root: str, tenant: str = "") -> list[Quarantined]:
    """Lists the quarantine, all of it or of the tenant with this keyed name, the oldest first. Raises StoreError."""
    found: list[Quarantined] = []
    with (
        typed_errors(f"store {root}: quarantine"),
        contextlib.suppress(FileNotFoundError),
        folder(root, "quarantine") as fd,
    ):
        for file in os.listdir(fd):
            if file.startswith(f"{tenant}." if tenant else "") and not file.endswith(_REASON):
                with contextlib.suppress(FileNotFoundError):
                    found.append(_at(fd, file))
    return sorted(found, key=lambda one: (one.since, one.path))


def _at(parent: int, file: str) -> Quarantined:
    tenant, _, rest = file.partition(".")
    when, _, rest = rest.partition("-")
    stat = os.stat(file, dir_fd=parent, follow_symlinks=False)
    since = int(when) / 1e9 if when.isdecimal() else stat.st_mtime
    return Quarantined(f"quarantine/{file}", tenant, rest.partition("-")[2], stat.st_size, since)


def reason(root: str, one: Quarantined) -> str:
    """Reads why a file is in quarantine; empty where nobody says."""
    with contextlib.suppress(OSError), open_regular(root, f"{one.path}{_REASON}") as fd:
        return os.read(fd, 1 << 12).decode(errors="backslashreplace")
    return ""


def purge(root: str, tenant: str = "", chunk: str | None = None) -> list[Quarantined]:
    """Deletes from quarantine: all, a tenant's, or of one chunk or library entry of a tenant. Returns what it deleted.

    Raises:
      StoreReadOnlyError, StoreIOError: not all of it was deleted.
    """
    gone = [one for one in listed(root, tenant) if chunk is None or one.chunk == chunk]
    _delete(root, gone)
    return gone


def keep_within(
    root: str,
    tenant: str,
    budget: int | None,
    expires: Callable[[str], float | None] = lambda path: None,
    now: float | None = None,
) -> list[Quarantined]:
    """Deletes what was there for too long or expired, and the oldest beyond a budget. Returns what it deleted.

    Args:
      budget: bytes of a tenant's quarantine; None sets no bound.
      expires, now: when the object at a path expires, in seconds since the epoch, and what time it is.

    Raises:
      StoreReadOnlyError, StoreIOError.
    """
    left: dict[str, int | None] = {}
    gone: list[Quarantined] = []
    for one in reversed(listed(root, tenant)):  # the newest stay
        room = left.setdefault(one.tenant, budget)
        until = expires(one.path)
        late = one.since < time.time() - SECONDS or (until is not None and now is not None and now >= until)
        if late or (room is not None and one.nbytes > room):
            gone.append(one)
        elif room is not None:
            left[one.tenant] = room - one.nbytes
    _delete(root, gone)
    return gone


def _delete(root: str, gone: Iterable[Quarantined]) -> None:
    names = [f"{os.path.basename(one.path)}{ending}" for one in gone for ending in (_REASON, "")]  # found by the object
    if not names:
        return
    with typed_errors(f"store {root}: quarantine"), folder(root, "quarantine") as fd:
        with locked(f"{root}/names.lock", shared=False):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    remove(fd, name)
        os.fsync(fd)
