"""Quarantine: damaged objects, kept for a limited time and within a budget, until their chunk is deleted.

root/quarantine/<tenant>.<time>-<inode>-<name>          the file
root/quarantine/<tenant>.<time>-<inode>-<name>.reason   why it did not verify, and its path below the root
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable

from ..io.files import folder, remove, typed_errors

BYTES = 256 << 20
"""Default budget of a tenant's quarantine, in bytes."""

SECONDS = 7 * 24 * 3600
"""Seconds for which a file stays in quarantine."""

_REASON, _FROM = ".reason", "\nfrom "


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """A file in quarantine.

    Attributes:
      path: path below the root.
      tenant: keyed name of its tenant.
      name: name of the object's file, keyed too.
      nbytes: size of the file.
      since: time of its arrival in seconds since the epoch.
    """

    path: str
    tenant: str
    name: str
    nbytes: int
    since: float

    @property
    def chunk(self) -> str:
        """Keyed name of its chunk or library entry."""
        return self.name.partition(".")[0]


def listed(root: str, tenant: str = "") -> list[Quarantined]:
    """Lists the files in quarantine, of all tenants or of one by its keyed name, oldest first. Raises StoreError."""
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


def reason_text(reason: str, path: str) -> bytes:
    """Formats the note of a file in quarantine: the reason, and its path below the root."""
    return f"{reason}{_FROM}{path}".encode(errors="backslashreplace")


def purge(root: str, tenant: str = "", chunk: str | None = None) -> list[Quarantined]:
    """Deletes files in quarantine: all, a tenant's, or those of a tenant's chunk or library entry. Returns them.

    Raises:
      StoreReadOnlyError, StoreIOError: a file could not be deleted.
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
    """Deletes files that are too old or expired, and the oldest ones beyond a budget. Returns them.

    Args:
      tenant: keyed name of a tenant, or "" for all.
      budget: bytes of each tenant's quarantine; None: no limit.
      expires: returns when the object at a path expires, in seconds since the epoch.
      now: the time, in seconds since the epoch.

    Raises:
      StoreReadOnlyError, StoreIOError: a file could not be deleted.
    """
    left: dict[str, int | None] = {}
    gone: list[Quarantined] = []
    for one in reversed(listed(root, tenant)):  # the newest files are kept
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
    names = []
    for one in gone:
        # The note comes first: it is found by the name of the object's file.
        names += [f"{os.path.basename(one.path)}{_REASON}", os.path.basename(one.path)]
    if not names:
        return
    with typed_errors(f"store {root}: quarantine"), folder(root, "quarantine") as fd:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                remove(fd, name)
        os.fsync(fd)
