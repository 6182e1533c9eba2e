"""Restoring of snapshots into stores: verified, all or nothing.

Names depend on the secret of a root. A tenant's snapshot can be restored into any root: if the secret differs, its
objects are renamed by their content and written again. A snapshot of a whole store can be restored into a root with the
same secret, or into a new one, which adopts the secret.
"""

import dataclasses
import functools
import os
import re
import time

from ...errors import InputError, StoreCorruptError, StoreSnapshotError, StoreVersionError
from ...utils.atomic_files import path_of
from ...utils.sizes import Size
from ..disk.budget import Budget, budget_of
from ..disk.directory import reading
from ..disk.disk import Disk
from ..disk.object_writer import LinkSource
from ..disk.root_config import SECRETS, find_secret, holds_objects, put_secret, secret_digest
from ..disk.tenant_disk import TenantDisk
from ..format.buffers import Buffers
from ..format.encryption import decrypted, is_sealed
from ..format.header import Header
from ..format.naming import Name, ObjectNames, name_at, part_of
from ..format.objects import Arrays, Blob, blob_of, read_leaves
from ..io.files import open_regular, typed_errors
from ..libraries.entries import check_resource
from .import_rules import ImportCandidate, import_objects, is_counted, library_bytes, name_of
from .manifest import (
    EXPORT,
    MANIFEST,
    Manifest,
    ManifestEntry,
    Progress,
    Summary,
    header_crc,
    read_manifest,
)


def load_snapshot(
    directory: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    secret: bytes | None = None,
    key: bytes | None = None,
    budget: Budget | Size | None = None,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Adds a snapshot to a new or existing store. Every byte is verified first; existing objects stay.

    The same holds for libraries: see `import_rules` about versions.

    Args:
      directory: the snapshot: of `save_snapshot`, of a `StoreItem` in an Orbax checkpoint ("chunk_store", or the
        item's own directory), or arrays.
      root: the store's directory.
      tenant: the tenant; required for a tenant's snapshot, and selects one from a snapshot of the whole store.
      secret: secret of the root's names if it does not store it, or of a snapshot of the whole store that has lost it.
      key: encryption key of the tenant. Encrypted objects that keep their names need none.
      budget: budget of the disk, with eviction as for a put, and of the tenant's static library (`Budget.library`). A
        size alone is the disk's.
      copy: copies the files; otherwise they are linked if possible.
      skip_damaged: leaves out damaged objects instead of refusing the snapshot. Arrays are always loaded whole.
      progress: called with the processed and the total number of bytes.

    Raises:
      StoreSnapshotError: it is no snapshot, has another secret or none, or is damaged (`bad` lists the objects).
      InputError: `tenant` is missing.
      LibraryFullError: it exceeds `Budget.library`.
      StoreKeyError: encrypted entries have to be counted for `Budget.library`, and there is no key.
      StoreFullError, StoreReadOnlyError, StoreIOError: it could not be written. Nothing was added in any case.
    """
    budget = None if budget is None else budget_of(budget, "snapshot: budget")
    root = str(path_of(root, "snapshot: root", InputError, "a directory's name"))
    directory = str(path_of(directory, "snapshot: directory", InputError, "a directory's name"))
    if not os.path.lexists(f"{directory}/{MANIFEST}") and os.path.isdir(f"{directory}/chunk_store"):
        directory += "/chunk_store"  # an item of a checkpoint
    manifest = None if holds_arrays(directory) else read_manifest(directory)
    if tenant is not None:
        manifest = None if manifest is None else _of_tenant(directory, manifest, tenant, secret)
        tenant_disk = TenantDisk(root, tenant, secret=secret, key=key, budget=budget)
        return load_objects(tenant_disk, directory, manifest, copy=copy, skip_damaged=skip_damaged, progress=progress)

    if manifest is None or manifest.scope != "store":
        raise InputError(f"snapshot {directory}: got tenant None; expected the tenant whose snapshot it is")
    if budget is not None and budget.library is not None:
        raise InputError(
            "snapshot of a whole store: got a budget of a library; expected none, or one tenant after the other"
        )

    # The root adopts the secret only after every byte was verified: a refused snapshot leaves it unchanged.
    own = _snapshot_secret(directory, manifest, secret)
    _check_secret(directory, manifest, root, own)
    coming, damaged = _verified(directory, manifest, None, skip_damaged, progress)
    if own is not None and _readable_secret(root) is None:
        Disk(root)  # creates its folders
        put_secret(root, own)
    tenant_disk = TenantDisk(root, secret=secret, budget=budget, whole_root=True)
    return _added(tenant_disk, coming, manifest, damaged, copy)


def load_objects(
    tenant_disk: TenantDisk,
    directory: str,
    manifest: Manifest | None = None,
    *,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Adds a tenant's snapshot or arrays to an open store, under the store's names, as `load_snapshot`.

    Args:
      manifest: the part of a snapshot of a whole store that is the tenant's.
    """
    if manifest is None and holds_arrays(directory):
        from .arrays import array_candidates  # Orbax takes a second to import

        batches, total = array_candidates(directory, tenant_disk)
        added, nbytes = import_objects(tenant_disk, batches, copy=copy, progress=progress)
        return Summary(added, nbytes, total - added)

    manifest = read_manifest(directory) if manifest is None else manifest
    if manifest.scope != "tenant":
        raise StoreSnapshotError(
            f"snapshot {directory}: got one of a whole store; expected a tenant's (load_snapshot takes both)"
        )
    coming, damaged = _verified(directory, manifest, tenant_disk, skip_damaged, progress)
    return _added(tenant_disk, coming, manifest, damaged, copy)


def holds_arrays(directory: str) -> bool:
    """Returns whether a directory holds arrays in place of a snapshot."""
    names = () if os.path.lexists(f"{directory}/{MANIFEST}") else (EXPORT, "objects")
    return any(os.path.lexists(f"{directory}/{name}") for name in names)


def _added(
    tenant_disk: TenantDisk, coming: list[ImportCandidate], manifest: Manifest, damaged: int, copy: bool
) -> Summary:
    """Adds verified objects. `damaged` is the number of damaged ones, which are left out."""
    added, nbytes = import_objects(tenant_disk, [coming], copy=copy)
    return Summary(added, nbytes, len(manifest.objects) - damaged - added, damaged)


def _verified(
    directory: str,
    manifest: Manifest,
    tenant_disk: TenantDisk | None,
    skip_damaged: bool,
    progress: Progress | None,
) -> tuple[list[ImportCandidate], int]:
    """Verifies every byte of a snapshot. Returns the objects that may be added, and how many are damaged.

    Args:
      tenant_disk: the target. None keeps all names, and decrypts nothing.
    """
    buffers = Buffers()
    coming: list[ImportCandidate] = []
    bad: list[str] = []
    total, done = sum(entry.size for entry in manifest.objects), 0

    for entry in manifest.objects:
        try:
            found = _incoming(directory, entry, tenant_disk, buffers)
            coming += [] if found is None else [found]
        except (StoreCorruptError, StoreVersionError, OSError) as error:
            bad.append(f"{entry.path}: {error}")
        done += entry.size
        if progress is not None:
            progress(done, total)

    if bad and not skip_damaged:
        raise StoreSnapshotError(
            f"snapshot {directory}: got {len(bad)} of {len(manifest.objects)} objects that do not verify, the first is "
            f"{bad[0][:300]}; expected all to (skip_damaged takes the others)",
            tuple(bad),
        )
    return coming, len(bad)


def _incoming(
    directory: str, entry: ManifestEntry, tenant_disk: TenantDisk | None, buffers: Buffers
) -> ImportCandidate | None:
    """Verifies one object and derives its name in the store. None if it has expired.

    Raises:
      StoreVersionError: it is of another version of the format.
      StoreCorruptError: it differs from what was saved.
    """
    source = LinkSource(directory, entry.path)
    unchanged = ImportCandidate(name_at(entry.path), entry.size, lambda: source, source)
    with open_regular(source.root, source.path, noatime=True) as fd:
        if os.fstat(fd).st_size != entry.size or entry.crc != header_crc(fd):
            raise StoreCorruptError(f"object: got other bytes than {MANIFEST} lists; expected checksum {entry.crc:08x}")
    with reading(source.root, source.path) as (fd, header):
        arrays = read_leaves(fd, header, list(header.leaves), buffers)
    clock = time.time if tenant_disk is None else tenant_disk.clock
    if header.expires is not None and clock() >= header.expires:
        return None
    unchanged = dataclasses.replace(unchanged, key_check=_key_check(header))
    return unchanged if tenant_disk is None else _renamed(unchanged, header, arrays, tenant_disk)


def _keeps_name(name: Name, tenant_disk: TenantDisk) -> bool:
    """Returns whether a file may come in unread: it is the tenant's, and not in a library that counts."""
    names = tenant_disk.names
    own = name.path.startswith((f"{names.space}/", f"{names.libraries}/"))
    return own and not is_counted(tenant_disk, name)


def _renamed(unchanged: ImportCandidate, header: Header, arrays: Arrays, tenant_disk: TenantDisk) -> ImportCandidate:
    """Returns a verified object under its name in the store: its file, or its content that is written again."""
    names, encryption, source = tenant_disk.names, tenant_disk.disk.encryption, unchanged.source
    keyed = encryption.check is not None
    assert source is not None
    if is_sealed(header) and not keyed and _keeps_name(unchanged.name, tenant_disk):
        return unchanged  # an encrypted object that keeps its name needs no key

    plain, arrays = decrypted(header, arrays, encryption)
    if plain.kind == "entry":
        check_resource(plain.body, arrays, plain.expires)
    name = name_of(names, plain.kind, part_of(plain.name), plain.body, arrays)
    blob = blob_of(plain, arrays)
    if name.path == unchanged.name.path and is_sealed(header) == keyed:
        return dataclasses.replace(unchanged, library_bytes=library_bytes(tenant_disk, name, blob, unchanged.nbytes))
    counted = library_bytes(tenant_disk, name, blob)
    again = functools.partial(_read_again, tenant_disk.disk, source)
    return ImportCandidate(name, unchanged.nbytes, again, source, library_bytes=counted)


def _key_check(header: Header) -> str | None:
    """Returns the check value of the key with which an object is encrypted; None if it is not."""
    check = header.body.get("check") if is_sealed(header) else None
    if check is not None and not (isinstance(check, str) and re.fullmatch("[0-9a-f]{1,64}", check)):
        raise StoreCorruptError("object: got an invalid check value of a key; expected hexadecimal digits")
    return check


def _read_again(disk: Disk, source: LinkSource) -> Blob:
    """Reads an object with a new name or encryption when it is written, so that not all are in memory at once."""
    try:
        with typed_errors("snapshot: read"), reading(source.root, source.path) as (fd, header):
            arrays = read_leaves(fd, header, list(header.leaves), disk.buffers)
        return blob_of(*decrypted(header, arrays, disk.encryption))
    except (StoreCorruptError, StoreVersionError) as error:
        raise StoreSnapshotError(
            f"snapshot: got a change of {source.path} while it was read ({error}); expected none"
        ) from error


def _snapshot_secret(directory: str, manifest: Manifest, given: bytes | None) -> bytes | None:
    """Returns the secret in a snapshot of the whole store; None if its names have the secret `given` from outside.

    Raises:
      StoreSnapshotError: it is damaged, missing, or not the one of the snapshot's manifest.
    """
    try:
        kept = find_secret(directory, mend=False)
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"snapshot {directory}: {error}") from error
    if manifest.secret is None:
        if kept is None and given is None:
            raise StoreSnapshotError(
                f"snapshot {directory}: got neither {SECRETS[0]} nor a secret; expected one of them"
            )
        return kept
    kept = given if kept is None else kept
    if kept is None or secret_digest(kept) != manifest.secret:
        what = "no" if kept is None else "another"
        raise StoreSnapshotError(
            f"snapshot {directory}: got {what} {SECRETS[0]}; expected the one of its {MANIFEST}, or its secret"
        )
    return kept


def _of_tenant(directory: str, manifest: Manifest, tenant: str, given: bytes | None) -> Manifest:
    """Returns the part of a manifest with the objects of one tenant."""
    if manifest.scope == "tenant":
        return manifest
    secret = _snapshot_secret(directory, manifest, given) or given
    assert secret is not None
    names = ObjectNames(tenant, secret)
    own = (f"{names.space}/", f"{names.libraries}/")
    return Manifest("tenant", tuple(entry for entry in manifest.objects if entry.path.startswith(own)))


def _check_secret(directory: str, manifest: Manifest, root: str, secret: bytes | None) -> None:
    """Raises for a snapshot of a whole store whose names could not be found in a root.

    A root with objects that has lost its secret may adopt a snapshot's if they have a tenant in common: a tenant's name
    is a digest of 128 bits with the secret.

    Raises:
      StoreSnapshotError: the secrets differ.
    """
    found = _readable_secret(root)
    if found == secret or (found is None and not holds_objects(root)):
        return
    tenants = {name_at(entry.path).tenant for entry in manifest.objects}
    shared = any(os.path.isdir(f"{root}/obj/{tenant}") or os.path.isdir(f"{root}/lib/{tenant}") for tenant in tenants)
    if found is not None or not shared:
        raise StoreSnapshotError(
            f"snapshot {directory}: got another secret than {root}; expected the same, or a new root, or one tenant "
            "after the other"
        )


def _readable_secret(root: str) -> bytes | None:
    try:
        return find_secret(root)
    except StoreCorruptError:
        return None
