"""Snapshots of stores that may be in use: of a tenant, or of the whole store.

Objects are linked or copied unchanged; `manifest` defines the format.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Any

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
    sync_directory,
    typed_errors,
    write_all,
)
from .manifest import MANIFEST, ManifestEntry, Progress, Summary, header_crc, write_list


def save_snapshot(
    root: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    secret: bytes | None = None,
    copy: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Saves a snapshot of a store, which may be in use, as a new directory that exists whole or not at all.

    Args:
      root: the store's directory.
      directory: the new directory.
      tenant: tenant whose objects and libraries are saved; None: the whole store with its secret, for its operator.
      secret: secret of the names, if the root does not store it.
      copy: copies and verifies all bytes. By default files are linked, which is fast and takes no space, but a failing
        disk then damages store and snapshot alike. On another file system files are copied, and headers verified.
      progress: called with the processed and the total number of bytes.

    Raises:
      StoreIOError: there is no store.
      InputError: `directory` exists.
      StoreFullError, StoreReadOnlyError: it could not be written.
    """
    root = str(path_of(root, "snapshot: root", InputError, "a directory's name"))
    directory = str(path_of(directory, "snapshot: directory", InputError, "a directory's name"))
    if not os.path.isdir(f"{root}/obj"):
        raise StoreIOError(f"store {root}: got no objects; expected a store")
    names = None if tenant is None else ObjectNames(tenant, read_secret(root) if secret is None else secret)
    with new_directory(directory, root, WHOLE if names is None else names.tenant_name) as unfinished:
        return write_snapshot(Disk(root), names, unfinished, copy=copy, progress=progress)


def save_objects(store: TenantStore, directory: str, *, copy: bool = False) -> Summary:
    """Fills an empty directory with a snapshot of an open store's tenant, after its asynchronous puts.

    Raises:
      StoreError: as `flush`, or the directory cannot be written.
    """
    store.flush()
    return write_snapshot(store.tenant_disk.disk, store.tenant_disk.names, directory, copy=copy)


def write_snapshot(
    disk: Disk, names: ObjectNames | None, directory: str, *, copy: bool = False, progress: Progress | None = None
) -> Summary:
    """Fills an empty directory durably with the objects and libraries of a tenant or of all tenants.

    Objects that are evicted or replaced in the meantime are either saved whole or left out. Headers are verified, and
    with `copy` every byte. Damaged objects are moved to quarantine and left out, as are objects of another version
    of the format. Libraries are saved first, in a consistent state: changes wait until their entries are saved.
    So the chunks of entries are saved too.

    Raises:
      StoreFullError, StoreReadOnlyError, StoreIOError: the directory is no snapshot, because it has no manifest.
    """
    libraries, space = ("lib", "obj") if names is None else (names.libraries, names.space)
    with typed_errors(f"snapshot {directory}: write"):
        os.chmod(directory, 0o700)  # the caller may have created it

        # Libraries first, so that the chunks of their entries are listed afterwards.
        with unchanged_libraries(disk.root, libraries):
            saved, skipped, damaged = _save_all(disk, libraries, directory, copy, None)
        chunks, skipped_chunks, damaged_chunks = _save_all(disk, space, directory, copy, progress)
        saved += chunks

        # Written last: a directory without it is no snapshot.
        manifest: dict[str, Any] = {"version": 1, "scope": "store" if names is None else "tenant"}
        manifest["objects"] = [[entry.path, entry.size, f"{entry.crc:08x}"] for entry in saved]
        if names is None:
            manifest["secret"] = _save_secret(disk.root, directory)
        write_list(f"{directory}/{MANIFEST}", manifest)
        for path, _, _ in os.walk(directory):
            sync_directory(path)

    nbytes = sum(entry.size for entry in saved)
    return Summary(len(saved), nbytes, skipped + skipped_chunks, damaged + damaged_chunks)


@contextlib.contextmanager
def unchanged_libraries(root: str, below: str) -> Iterator[None]:
    """Locks the libraries below a folder against changes. Works on a read-only root too."""
    spaces = [f"{below}/{space}" for space in _listed(root, below)] if below == "lib" else [below]
    locks: list[str] = []
    for space in spaces:
        locks += [f"{space}/{library}/lock" for library in _listed(root, space)]

    with contextlib.ExitStack() as held:
        for path in sorted(locks):  # all processes lock in this order, so that none waits for another in a circle
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the tenant was deleted
                fcntl.flock(held.enter_context(open_regular(root, path)), fcntl.LOCK_SH)
        yield


def _listed(root: str, below: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, below) as fd:
        return os.listdir(fd)
    return []


def _save_all(
    disk: Disk, below: str, directory: str, copy: bool, progress: Progress | None
) -> tuple[list[ManifestEntry], int, int]:
    """Saves all objects below a folder. Returns their entries, and how many were skipped and damaged."""
    entries = sorted(disk.scan(below), key=lambda entry: entry.path)
    total, done, damaged = sum(entry.size for entry in entries), 0, 0
    saved: list[ManifestEntry] = []
    for entry in entries:
        try:
            found = _save(disk, entry, directory, copy)
            saved += [] if found is None else [found]
        except StoreCorruptError:
            disk.examine(name_at(entry.path))  # reads it again, because the link has changed its file's identity
            damaged += 1
        done += entry.size
        if progress is not None:
            progress(done, total)
    return saved, len(entries) - len(saved) - damaged, damaged


def _save_secret(root: str, directory: str) -> str | None:
    """Saves the secret of a root, if it has one. Returns its digest. Raises StoreCorruptError if it is damaged."""
    secret = find_secret(root)
    if secret is None:
        return None
    for name in SECRETS:
        with open_regular(directory, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, [secret_text(secret)], 0)
            os.fsync(fd)
    return secret_digest(secret)


def _save(disk: Disk, entry: DirectoryEntry, directory: str, copy: bool) -> ManifestEntry | None:
    """Links or copies one object, and verifies the result. None if it vanished in the meantime, or has expired."""
    above, _, file = entry.path.rpartition("/")

    good = False
    try:
        with folder(disk.root, above) as source, folder(directory, above, make=True) as target:
            if copy or not link(source, file, target, file):
                expect_memory(entry.size)  # an object that cannot be verified is not copied
                with open_regular_in(target, file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                    copy_into(fd, disk.root, entry.path)
                    os.fsync(fd)

        # The result is verified and not the source: the name may have got another file in between.
        with reading(directory, entry.path) as (fd, header):
            if header.expires is not None and disk.clock() >= header.expires:
                return None
            if copy:  # a link shares the store's bytes, which are verified when they are read
                read_leaves(fd, header, list(header.leaves), disk.buffers)
            found = ManifestEntry(entry.path, header.size, header_crc(fd))
        good = True
        return found
    except (FileNotFoundError, NotADirectoryError, NotRegularError, StoreVersionError):  # it vanished, or is no object
        return None
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None
    finally:
        if not good:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{entry.path}")
