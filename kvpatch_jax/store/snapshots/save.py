"""Saves snapshots of stores that may be in use: a tenant's, or the whole store.

Objects are linked or copied as they are; `manifest` says what a snapshot holds.
"""

import collections
import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator

from ...errors import InputError, StoreCorruptError, StoreIOError, StoreVersionError
from ...utils.atomic_files import path_of
from ..disk.directory import DirectoryEntry, reading
from ..disk.disk import Disk
from ..disk.partial_exports import WHOLE, new_directory
from ..disk.root_config import SECRETS, find_secret, read_secret, secret_digest, secret_text
from ..disk.tenant_disk import TenantStore
from ..format.buffers import expect_memory
from ..format.naming import ObjectNames, name_at
from ..format.objects import read_leaves
from ..io.files import (
    NotRegularError,
    copy_into,
    folder,
    link,
    open_regular,
    open_regular_in,
    read_small,
    sync_directory,
    typed_errors,
    write_all,
)
from .manifest import MANIFEST, ManifestEntry, Progress, Summary, header_crc, write_list

_LARGEST_KEY = 1 << 10
"""Bytes. A longer key-check file is refused unread."""


def save_snapshot(
    root: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    secret: bytes | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Makes a snapshot of a store, which may be in use, as a new directory that is there whole or not at all.

    Args:
      tenant: whose objects and libraries; None takes the whole store, its secret too: that is for its operator.
      secret: of the names, where the root does not keep it.
      copy: copies the bytes, verified. By default files are linked: at once and without room, but store and snapshot
        then share what a failing disk does to them. Another file system gets copies either way, by their header.

    Raises:
      StoreIOError: no store there. InputError: `directory` exists. StoreFullError, StoreReadOnlyError.
    """
    root = str(path_of(root, "snapshot: root", InputError, "a directory's name"))
    directory = str(path_of(directory, "snapshot: directory", InputError, "a directory's name"))
    if not os.path.isdir(f"{root}/obj"):
        raise StoreIOError(f"store {root}: no objects there; expected a store")
    names = None if tenant is None else ObjectNames(tenant, read_secret(root) if secret is None else secret)
    with new_directory(directory, root, WHOLE if names is None else names.tenant_name) as unfinished:
        return write_snapshot(Disk(root), names, unfinished, copy=copy, progress=progress)


def save_objects(
    store: TenantStore, directory: str, *, copy: bool = False, progress: Progress | None = None
) -> Summary:
    """Fills an empty directory with a snapshot of an open store's tenant; asynchronous puts are waited for.

    Raises:
      StoreError: as `flush`, or the directory cannot be written.
    """
    store.flush()
    tenant_disk = store.tenant_disk
    return write_snapshot(tenant_disk.disk, tenant_disk.names, directory, copy=copy, progress=progress)


def write_snapshot(
    disk: Disk, names: ObjectNames | None, directory: str, *, copy: bool = False, progress: Progress | None = None
) -> Summary:
    """Fills an empty directory with a tenant's objects and libraries, or all tenants'; durable when this returns.

    Objects that are evicted or replaced meanwhile are left out or in, whole. Headers are verified, and with `copy`
    every byte; what does not verify goes to quarantine and is left out, and so is what a later version of the library
    wrote, which stays where it is. Libraries come first, as they are at one
    moment: who would change one waits until its entries are in. So the chunks that were put with entries come too.

    Raises:
      StoreFullError, StoreReadOnlyError, StoreIOError: the directory is then no snapshot, for it has no manifest.
    """
    libraries, space = ("lib", "obj") if names is None else (names.libraries, names.space)
    with typed_errors(f"snapshot {directory}: write"):
        os.chmod(directory, 0o700)  # whoever made it

        # Libraries first: the chunks that their entries name are then still to be listed.
        with unchanged_libraries(disk.root, libraries):
            entries, of_entries = _save_all(disk, libraries, directory, copy, None)
        chunks, of_chunks = _save_all(disk, space, directory, copy, progress)
        saved = entries + chunks
        _save_key_checks(disk.root, directory, {name_at(each.path).tenant for each in saved})

        # Written last: a directory without it is no snapshot.
        listed = [[each.path, each.size, f"{each.crc:08x}"] for each in saved]
        if names is None:
            manifest = {"version": 1, "scope": "store", "objects": listed}
            manifest["secret"] = _save_secret(disk.root, directory)
        else:
            manifest = {"version": 1, "scope": "tenant", "objects": listed}
        write_list(f"{directory}/{MANIFEST}", manifest)
        for each, _, _ in os.walk(directory):
            sync_directory(each)
    left_out = of_entries + of_chunks
    nbytes = sum(each.size for each in saved)
    return Summary(len(saved), nbytes, left_out["skipped"], left_out["damaged"], left_out["newer"])


@contextlib.contextmanager
def unchanged_libraries(root: str, below: str) -> Iterator[None]:
    """Locks the libraries below a folder, shared. Needs to read only, so a root on a read-only medium will do."""
    spaces = [f"{below}/{space}" for space in _listed(root, below)] if below == "lib" else [below]
    with contextlib.ExitStack() as held:
        for path in sorted(f"{space}/{library}/lock" for space in spaces for library in _listed(root, space)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # its tenant was deleted
                fcntl.flock(held.enter_context(open_regular(root, path)), fcntl.LOCK_SH)
        yield


def _listed(root: str, below: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, below) as fd:
        return os.listdir(fd)
    return []


def _save_all(
    disk: Disk, below: str, directory: str, copy: bool, progress: Progress | None
) -> tuple[list[ManifestEntry], collections.Counter[str]]:
    """Saves all objects below a folder. What was saved, and how many were left out, by the words of `Summary`."""
    entries = sorted(disk.scan(below), key=lambda entry: entry.path)
    total, done = sum(entry.size for entry in entries), 0
    left_out = collections.Counter[str]()
    saved: list[ManifestEntry] = []
    for entry in entries:
        try:
            found = _save(disk, entry, directory, copy)
            if found is None:
                left_out["skipped"] += 1
            else:
                saved.append(found)
        except StoreVersionError:
            left_out["newer"] += 1
        except StoreCorruptError:
            disk.examine(name_at(entry.path))  # read anew, since the link has changed the identity of its file
            left_out["damaged"] += 1
        done += entry.size
        if progress is not None:
            progress(done, total)
    return saved, left_out


def _save_secret(root: str, directory: str) -> str | None:
    """Saves the secret of a root, if it keeps one. Its digest. Raises StoreCorruptError where it is damaged."""
    secret = find_secret(root)
    if secret is None:
        return None
    for name in SECRETS:
        with open_regular(directory, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, [secret_text(secret)], 0)
            os.fsync(fd)
    return secret_digest(secret)


def _save_key_checks(root: str, directory: str, tenants: Iterable[str]) -> None:
    """Saves the tenants' key-check files."""
    for tenant in tenants:
        with contextlib.suppress(FileNotFoundError):
            check = read_small(root, f"obj/{tenant}/KEY", _LARGEST_KEY, noatime=True)
            with (
                folder(directory, f"obj/{tenant}", make=True) as parent,
                open_regular_in(parent, "KEY", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as target,
            ):
                write_all(target, [check], 0)
                os.fsync(target)


def _save(disk: Disk, entry: DirectoryEntry, directory: str, copy: bool) -> ManifestEntry | None:
    """Links or copies one object, and verifies what arrived. None where it vanished meanwhile, or is expired."""
    above, _, file = entry.path.rpartition("/")
    good = False
    try:
        with folder(disk.root, above) as source, folder(directory, above, make=True) as target:
            if copy or not link(source, file, target, file):
                expect_memory(entry.size)  # what cannot be verified is not copied
                with open_regular_in(target, file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                    copy_into(fd, disk.root, entry.path)
                    os.fsync(fd)

        # What arrived is verified, not what was there: the name may have got another file in between.
        with reading(directory, entry.path) as (fd, header):
            if header.expires is not None and disk.clock() >= header.expires:
                return None
            if copy:  # a link has the same bytes as the store, which verifies them when it reads them
                read_leaves(fd, header, list(header.leaves), disk.buffers)
            good = True
            return ManifestEntry(entry.path, header.size, header_crc(fd, header))
    except (FileNotFoundError, NotADirectoryError, NotRegularError):  # gone, or no object of ours
        return None
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None
    finally:
        if not good:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{entry.path}")
