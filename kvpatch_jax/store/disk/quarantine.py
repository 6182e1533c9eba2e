"""Quarantine: objects that did not verify, kept for inspection for a while, within a budget, until their chunk goes.

root/quarantine/<tenant>.<when>-<which file>-<name>          the file as it was found
root/quarantine/<tenant>.<when>-<which file>-<name>.reason   why it did not verify, and its path from the root

Damage may have been the reader's own, so that `restore` reads again what is here and puts back what verifies.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable

from ...errors import StoreCorruptError, StoreVersionError
from ..format.buffers import Buffers
from ..format.naming import is_object
from ..format.objects import check_name, read_header, read_leaves
from ..io.files import folder, locked, make_directories, open_regular, remove, rename, typed_errors

BYTES = 256 << 20
"""What a tenant's quarantine may take, unless told otherwise."""

SECONDS = 7 * 24 * 3600
"""How long something stays in it."""

_REASON, _FROM = ".reason", "\nfrom "


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


def reason_text(reason: str, path: str) -> bytes:
    """Formats what is kept beside a file: why it is there, and its path from the root."""
    return f"{reason}{_FROM}{path}".encode(errors="backslashreplace")


def reason(root: str, one: Quarantined) -> str:
    """Reads why a file is in quarantine; empty where nobody says."""
    return _noted(root, one)[0]


def _noted(root: str, one: Quarantined) -> tuple[str, str]:
    """Reads why a file is in quarantine, and the path that it had; empty where nobody says."""
    with contextlib.suppress(OSError), open_regular(root, f"{one.path}{_REASON}") as fd:
        why, _, path = os.read(fd, 1 << 12).decode(errors="backslashreplace").rpartition(_FROM)
        return (why, path) if why else (path, "")
    return "", ""


@dataclasses.dataclass(frozen=True)
class QuarantineRestore:
    """Result of `restore`; each list but the first holds names in quarantine, of files that stay there.

    Attributes:
      restored: paths of what is back under its name.
      damaged: does not verify. newer: a later version of the library wrote it, so that this one cannot verify it.
      taken: its name has another object by now. unplaced: nothing says where it was.
    """

    restored: list[str]
    damaged: list[str]
    newer: list[str]
    taken: list[str]
    unplaced: list[str]


def restore(root: str, tenant: str = "") -> QuarantineRestore:
    """Reads what is in quarantine again, and puts back what verifies where nothing has its name, durably.

    Args:
      tenant: only of the tenant with this keyed name.

    Raises:
      StoreReadOnlyError, StoreIOError: not all of it was read, or put back.
    """
    result = QuarantineRestore([], [], [], [], [])
    buffers = Buffers(keep=0)
    for one in reversed(listed(root, tenant)):  # of several of one name the newest
        path = _place_of(root, one)
        if path is None:
            result.unplaced.append(one.path)
            continue
        try:
            with typed_errors(f"store {root}: quarantine"), open_regular(root, one.path) as fd:
                header = read_header(fd)
                check_name(header, one.name)
                read_leaves(fd, header, list(header.leaves), buffers)
            (result.restored if _put_back(root, one, path) else result.taken).append(path)
        except StoreVersionError:
            result.newer.append(one.path)
        except StoreCorruptError:
            result.damaged.append(one.path)
    return result


def _place_of(root: str, one: Quarantined) -> str | None:
    """Finds the path that a file had; None where nothing says it, as of files that older versions put there."""
    path = _noted(root, one)[1]
    if is_object(path) and path.split("/")[1] == one.tenant and path.endswith(f"/{one.name}"):
        return path
    part = one.name.partition(".")[2]
    if part == "entry.safetensors" or part.startswith("v"):
        path = f"lib/{one.tenant}/{'static' if part.startswith('entry') else 'dynamic'}/{one.name[:2]}/{one.name}"
        return path if is_object(path) else None
    with contextlib.suppress(OSError):  # a chunk's place names its backbone, which a tenant with one has no choice of
        backbones = [name for name in os.listdir(f"{root}/obj/{one.tenant}") if len(name) == 32]
        path = f"obj/{one.tenant}/{backbones[0]}/{one.name[:2]}/{one.name}"
        return path if len(backbones) == 1 and is_object(path) else None
    return None


def _put_back(root: str, one: Quarantined, path: str) -> bool:
    """Gives a file its name again, durably, unless that has another. Whether it did."""
    (above, _, name), file = path.rpartition("/"), os.path.basename(one.path)
    with typed_errors(f"store {root}: quarantine"):
        make_directories(root, above)
        with folder(root, "quarantine") as source, folder(root, above) as target:
            with locked(f"{root}/names.lock", shared=False):  # nobody can take the name meanwhile
                with contextlib.suppress(FileNotFoundError):
                    os.stat(name, dir_fd=target, follow_symlinks=False)
                    return False
                rename(source, file, target, name)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{file}{_REASON}", dir_fd=source)
            os.fsync(target)
            os.fsync(source)
    return True


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
