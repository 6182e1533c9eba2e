"""Quarantine: damaged objects, kept for a limited time and within a budget, until their chunk is deleted.

root/quarantine/<tenant>.<time>-<inode>-<name>          the file
root/quarantine/<tenant>.<time>-<inode>-<name>.reason   why it did not verify, and its path below the root

The reader may have been at fault, so `restore` verifies the files again and puts back those that pass.
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
from ..io.files import folder, open_regular, remove, rename, typed_errors
from .shard import locked_shards

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


def reason(root: str, one: Quarantined) -> str:
    """Returns the reason why a file is in quarantine; "" if unknown."""
    return _noted(root, one)[0]


def _noted(root: str, one: Quarantined) -> tuple[str, str]:
    """Returns the reason why a file is in quarantine and its former path; "" if unknown."""
    with contextlib.suppress(OSError), open_regular(root, f"{one.path}{_REASON}") as fd:
        why, _, path = os.read(fd, 1 << 12).decode(errors="backslashreplace").rpartition(_FROM)
        return (why, path) if why else (path, "")
    return "", ""


@dataclasses.dataclass(frozen=True)
class QuarantineRestore:
    """Result of `restore`: paths, in quarantine except for those restored or taken.

    Attributes:
      restored: objects that are back under their names.
      damaged: files that do not verify.
      newer: files of a later library version, which this one cannot verify.
      taken: names that have another object by now.
      unplaced: files whose former path is unknown.
    """

    restored: list[str]
    damaged: list[str]
    newer: list[str]
    taken: list[str]
    unplaced: list[str]


def restore(root: str, tenant: str = "") -> QuarantineRestore:
    """Verifies the files in quarantine again, and durably puts back those that pass and whose name is free.

    Args:
      tenant: keyed name of a tenant: only its files.

    Raises:
      StoreReadOnlyError, StoreIOError: a file could not be read or put back.
    """
    result = QuarantineRestore([], [], [], [], [])
    buffers = Buffers(keep=0)

    for one in reversed(listed(root, tenant)):  # of several files with one name, the newest is restored
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
    """Returns the former path of a file; None if it is unknown, as for some files of older versions."""
    path = _noted(root, one)[1]
    if is_object(path) and path.split("/")[1] == one.tenant and path.endswith(f"/{one.name}"):
        return path

    # Without a note the name has to do. It lacks nothing of an entry's path, and the backbone of an object's.
    part = one.name.partition(".")[2]
    if part == "entry.safetensors" or part.startswith("v"):
        path = f"lib/{one.tenant}/{'static' if part.startswith('entry') else 'dynamic'}/{one.name[:2]}/{one.name}"
        return path if is_object(path) else None
    with contextlib.suppress(OSError):  # the path contains the backbone, which is known if the tenant has only one
        backbones = [name for name in os.listdir(f"{root}/obj/{one.tenant}") if len(name) == 32]
        path = f"obj/{one.tenant}/{backbones[0]}/{one.name[:2]}/{one.name}"
        return path if len(backbones) == 1 and is_object(path) else None
    return None


def _put_back(root: str, one: Quarantined, path: str) -> bool:
    """Durably gives a file its former name, if that is free. Returns whether it did."""
    (above, _, name), file = path.rpartition("/"), os.path.basename(one.path)
    with (
        typed_errors(f"store {root}: quarantine"),
        folder(root, "quarantine") as source,
        locked_shards(root, [above], make=True) as shards,  # nobody can take the name in the meantime
    ):
        target = shards[above].fd
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=target, follow_symlinks=False)
            return False
        rename(source, file, target, name)
        # Its note goes last: after a crash in between, the file in quarantine would have no path.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{file}{_REASON}", dir_fd=source)
        os.fsync(target)
        os.fsync(source)
    return True


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
