"""Snapshots of stores by their roots: saving one, and taking one over, verified, all of it or nothing.

Names depend on the secret of a root. A tenant's snapshot goes into any root: where the secret is another, its objects
get new names (they say what they are) and are written again. A whole store goes into a root of the same secret, or into
a new one, which then has that secret.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import InputError, StoreCorruptError, StoreIOError, StoreSnapshotError
from ..disk.budget import Budget
from ..disk.directory import reading
from ..disk.disk import Disk
from ..disk.root_config import SECRETS, check_key, find_secret, holds_objects, put_secret, read_secret, secret_digest
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..disk.unfinished import WHOLE, new_directory
from ..disk.writing import Elsewhere
from ..format.buffers import Buffers
from ..format.codec import patch_of, patch_parts
from ..format.encryption import Encryption, Plain, is_sealed
from ..format.header import MALFORMED, Header
from ..format.naming import Name, Names, name_at
from ..format.objects import Blob, file_size
from ..io.files import typed_errors
from ..libraries.entries import check_resource, chunk_bytes, entry_name
from .import_rules import changing_libraries, check_library, entries_last, is_entry, is_there
from .manifest import (
    MANIFEST,
    UNTOLD,
    Manifest,
    ManifestEntry,
    Progress,
    Summary,
    header_crc,
    read_manifest,
    read_whole,
    write_snapshot,
)

_GROUP, _GROUP_BYTES = 64, 64 << 20


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
    root, directory = os.fspath(root), os.fspath(directory)
    _expect_store(root)
    names = None if tenant is None else Names(tenant, read_secret(root) if secret is None else secret)
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


def load_snapshot(
    directory: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    secret: bytes | None = None,
    key: bytes | None = None,
    budget: Budget | None = None,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Puts a snapshot into a store, new or not. Every byte is verified first; what is there already stays.

    Of libraries too: `arrivals` says what that means for versions.

    Args:
      tenant: whose; needed for a tenant's snapshot, and takes only that one out of a snapshot of the whole store.
      secret: of the root's names, where it does not keep it; of those in a snapshot of the whole store, where that does
        not, or has lost it.
      key: of the tenant's encryption. Encrypted objects that keep their names need none.
      budget: of the disk, for which room is made as for a put; and of the tenant's static library (`Budget.library`).
      copy: copies the files; else they are linked where that can be.
      skip_damaged: leaves out what does not verify, instead of refusing all of it.

    Raises:
      StoreSnapshotError: not a snapshot, of another secret or without it, or damaged (`bad` lists what). InputError:
        no `tenant`.
      LibraryFullError: beyond `Budget.library`. StoreKeyError: that would have to be counted, in encrypted entries.
      StoreFullError, StoreReadOnlyError, StoreIOError. Nothing was added then.
    """
    directory, root = os.fspath(directory), os.fspath(root)
    manifest = read_manifest(directory)
    verify = functools.partial(_verify, directory, skip_damaged=skip_damaged, progress=progress)
    if tenant is not None:
        manifest = _of_tenant(directory, manifest, tenant, secret)
        tenant_disk = TenantDisk(root, tenant, secret=secret, key=key, budget=budget)
        return _add(tenant_disk, directory, verify(manifest, _into(tenant_disk)), copy)
    if manifest.scope != "store":
        raise InputError(f"snapshot {directory}: tenant None; expected the tenant whose snapshot it is")
    if budget is not None and budget.library is not None:
        raise InputError(
            "snapshot of a whole store: a budget of a library; expected none, or one tenant after the other"
        )
    own = _secret_of(directory, manifest, secret)
    _check_secret(directory, manifest, root, own)
    verified = verify(manifest, _Into(None, Plain()))
    _adopt_secret(root, own)
    return _add(TenantDisk(root, secret=secret, budget=budget), directory, verified, copy)


def load_objects(
    tenant_disk: TenantDisk,
    directory: str,
    *,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Puts a tenant's snapshot onto its disk, under its names. As `load_snapshot`."""
    manifest = read_manifest(directory)
    if manifest.scope != "tenant":
        raise StoreSnapshotError(
            f"snapshot {directory}: of a whole store; expected a tenant's (load_snapshot takes both)"
        )
    verified = _verify(directory, manifest, _into(tenant_disk), skip_damaged, progress)
    return _add(tenant_disk, directory, verified, copy)


# --------------------------------------------------------------------------------------------------- the objects


@dataclasses.dataclass(frozen=True)
class _Incoming:
    """One object on its way in: where it is in the snapshot, its name in the store, whether the file stays as it is.

    `check`: of the key that it is encrypted under, None where it is not. `counts`: bytes that it counts for in a static
    library, its chunk included; 0 where there is no bound on them.
    """

    kept: ManifestEntry
    name: Name
    as_it_is: bool
    check: str | None
    counts: int = 0


@dataclasses.dataclass(frozen=True)
class _Into:
    """What a snapshot goes into.

    Attributes:
      names: of the tenant; None keeps all names, and opens nothing.
      bounded: whether there is a bound on its static library.
    """

    names: Names | None
    seal: Encryption
    clock: Callable[[], float] = time.time
    bounded: bool = False


def _into(tenant_disk: TenantDisk) -> _Into:
    bounded = tenant_disk.budget.library is not None
    return _Into(tenant_disk.names, tenant_disk.disk.seal, tenant_disk.clock, bounded)


@dataclasses.dataclass(frozen=True)
class _Verified:
    """What of a snapshot may be added; how many are expired, how many did not verify."""

    coming: tuple[_Incoming, ...]
    expired: int
    damaged: int


def _verify(
    directory: str, manifest: Manifest, into: _Into, skip_damaged: bool, progress: Progress | None
) -> _Verified:
    """Looks at every byte."""
    buffers = Buffers()
    coming: list[_Incoming] = []
    bad: list[str] = []
    total, done = sum(kept.size for kept in manifest.objects), 0
    for kept in manifest.objects:
        try:
            found = _incoming(directory, kept, into, buffers)
            coming += [] if found is None else [found]
        except (StoreCorruptError, OSError) as error:
            bad.append(f"{kept.path}: {error}")
        done += kept.size
        if progress is not None:
            progress(done, total)
    if bad and not skip_damaged:
        raise StoreSnapshotError(
            f"snapshot {directory}: {len(bad)} of {len(manifest.objects)} objects do not verify, the first is "
            f"{bad[0][:300]}; expected all to (skip_damaged takes the others)",
            tuple(bad),
        )
    return _Verified(tuple(coming), len(manifest.objects) - len(coming) - len(bad), len(bad))


def _incoming(directory: str, kept: ManifestEntry, into: _Into, buffers: Buffers) -> _Incoming | None:
    """An object with its name in the store, after every byte of it was verified. None: it is expired."""
    with reading(directory, kept.path) as (fd, header):
        if header.size != kept.size or header_crc(fd, header) != kept.crc:
            raise StoreCorruptError(f"object: header of other bytes than {MANIFEST} says; expected {kept.crc:08x}")
        arrays = read_whole(fd, header, buffers)
    name, keyed = name_at(kept.path), into.seal.check is not None
    if header.expires is not None and into.clock() >= header.expires:
        return None
    own = into.names is None or kept.path.startswith((f"{into.names.space}/", f"{into.names.libraries}/"))
    counted = into.bounded and part_of(name.file) == "entry"
    check = _check_of(header)
    if into.names is None or (own and is_sealed(header) and not keyed and not counted):
        return _Incoming(kept, name, True, check)
    plain, arrays = _unsealed(header, arrays, into.seal)
    if plain.kind == "entry":
        check_resource(plain.body, arrays, plain.expires)
    name = name_of(into.names, plain.kind, part_of(plain.name), plain.body, arrays)
    as_it_is = name.path == kept.path and is_sealed(header) == keyed
    if not counted:
        return _Incoming(kept, name, as_it_is, check)
    size = kept.size if as_it_is else file_size(into.seal.sealed(blob_of(plain, arrays), name.file), name.file)
    return _Incoming(kept, name, as_it_is, check, size + chunk_bytes(plain.body))


def _check_of(header: Header) -> str | None:
    """What an encrypted object says of its key."""
    check = header.body.get("check") if is_sealed(header) else None
    if check is not None and not (isinstance(check, str) and re.fullmatch("[0-9a-f]{1,64}", check)):
        raise StoreCorruptError("object: encrypted under no key that there is; expected hexadecimal digits")
    return check


def _unsealed(
    header: Header, arrays: Mapping[str, np.ndarray], seal: Encryption
) -> tuple[Header, Mapping[str, np.ndarray]]:
    """What is inside. Raises StoreKeyError, StoreCorruptError as `Encryption.opened`."""
    if not is_sealed(header):
        return header, arrays
    found = seal.opened(header, lambda leaves: {leaf: arrays[leaf] for leaf in leaves})
    assert found is not None
    plain, read = found
    return plain, read(list(plain.leaves))


def _add(tenant_disk: TenantDisk, directory: str, verified: _Verified, copy: bool) -> Summary:
    """Adds what the store does not have, its libraries held meanwhile."""
    with changing_libraries(tenant_disk.disk, [each.name for each in verified.coming]) as has:

        def lacks(each: _Incoming) -> bool:
            source = Elsewhere(directory, each.kept.path)
            return not (has(each.name) if is_entry(each.name) else is_there(tenant_disk.disk, each.name, source))

        coming = entries_last(filter(lacks, verified.coming), lambda each: each.name)
        check_library(tenant_disk, sum(each.counts for each in coming))
        for tenant, check in sorted(
            {(each.name.tenant, each.check) for each in coming if each.as_it_is and each.check}
        ):
            check_key(tenant_disk.disk.root, f"obj/{tenant}", check, note=True)
        need = sum(each.kept.size for each in coming if not is_entry(each.name))
        added = tenant_disk.add(_groups(tenant_disk.disk, directory, coming), need, copy=copy)
    nbytes = sum(each.kept.size for each in coming)
    return Summary(added, nbytes, verified.expired + len(verified.coming) - added, verified.damaged)


def part_of(file: str) -> str:
    """What of a chunk a file is: "kv", "kv.int8", "enc", "p.…"."""
    return file.removesuffix(".safetensors").partition(".")[2]


def name_of(names: Names, kind: str, part: str, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Name:
    """The name that a tenant's object has by what it says about itself.

    Args:
      part: as `part_of`.
      arrays: of a patch only the dtypes and shapes count.

    Raises:
      StoreCorruptError: it does not say enough.
    """
    if kind == "entry":
        return entry_name(names, body)
    try:
        if kind == "kv":
            return names.canonical(body["backbone"], body["id"], part.partition(".")[2] or None)
        if kind == "encoder":
            return names.encoder(body["backbone"], body["id"])
        return names.patch(patch_of(patch_parts(body, arrays)))
    except MALFORMED as error:
        raise StoreCorruptError(
            f"object: {kind} without a name of its own ({type(error).__name__}); expected one"
        ) from None


def _groups(disk: Disk, directory: str, coming: Sequence[_Incoming]) -> Iterator[list[tuple[Name, Blob | Elsewhere]]]:
    """What goes in together: linked or copied where the name stays, else read and written again."""
    group: list[tuple[Name, Blob | Elsewhere]] = []
    nbytes = 0
    for each in coming:
        file = Elsewhere(directory, each.kept.path)
        group.append((each.name, file if each.as_it_is else _blob(disk, file)))
        nbytes += each.kept.size
        if len(group) == _GROUP or nbytes >= _GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def blob_of(header: Header, arrays: Mapping[str, np.ndarray]) -> Blob:
    """An object that was read, ready to be written."""
    return Blob(header.kind, header.body, arrays, header.expires)  # pyright: ignore[reportArgumentType]


def _blob(disk: Disk, file: Elsewhere) -> Blob:
    try:
        with typed_errors("snapshot: read"), reading(*file) as (fd, header):
            return blob_of(*_unsealed(header, read_whole(fd, header, disk.buffers), disk.seal))
    except StoreCorruptError as error:
        raise StoreSnapshotError(
            f"snapshot: {file.path} changed while it was read ({error}); expected it not to"
        ) from error


# -------------------------------------------------------------------------------------------------- the secret


def _expect_store(root: str) -> None:
    if not os.path.isdir(f"{root}/obj"):
        raise StoreIOError(f"store {root}: no objects there; expected a store")


def _secret_of(directory: str, manifest: Manifest, given: bytes | None) -> bytes | None:
    """The secret that a snapshot of the whole store holds; None where `given` is the one of its names, kept outside.

    Raises:
      StoreSnapshotError: it is damaged, gone, or another than the snapshot's list says.
    """
    try:
        kept = find_secret(directory, mend=False)
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"snapshot {directory}: {error}") from error
    if manifest.secret in (None, UNTOLD):
        if kept is None and given is None:
            raise StoreSnapshotError(
                f"snapshot {directory}: no {SECRETS[0]}, and no secret given; expected one of them"
            )
        return kept
    kept = given if kept is None else kept
    if kept is None or secret_digest(kept) != manifest.secret:
        what = "no" if kept is None else "another"
        raise StoreSnapshotError(
            f"snapshot {directory}: {what} {SECRETS[0]}; expected the one that its {MANIFEST} tells of, or its secret"
        )
    return kept


def _of_tenant(directory: str, manifest: Manifest, tenant: str, given: bytes | None) -> Manifest:
    """What of a snapshot is this tenant's."""
    if manifest.scope == "tenant":
        return manifest
    secret = _secret_of(directory, manifest, given) or given
    assert secret is not None
    names = Names(tenant, secret)
    own = (f"{names.space}/", f"{names.libraries}/")
    return Manifest("tenant", tuple(kept for kept in manifest.objects if kept.path.startswith(own)))


def _check_secret(directory: str, manifest: Manifest, root: str, secret: bytes | None) -> None:
    """Raises StoreSnapshotError where a whole store's names would not be found in the root.

    A root that holds objects and has lost its secret takes a snapshot's if both have a tenant in common: a tenant's
    name is a digest of 128 bits under the secret.
    """
    found = _readable_secret(root)
    if found == secret or (found is None and not holds_objects(root)):
        return
    tenants = {name_at(kept.path).tenant for kept in manifest.objects}
    if found is not None or not any(os.path.isdir(f"{root}/{top}/{t}") for top in ("obj", "lib") for t in tenants):
        raise StoreSnapshotError(
            f"snapshot {directory}: of another secret than {root}; expected the same, or a new root, or one tenant "
            "after the other"
        )


def _readable_secret(root: str) -> bytes | None:
    try:
        return find_secret(root)
    except StoreCorruptError:
        return None


def _adopt_secret(root: str, secret: bytes | None) -> None:
    """Gives a root the secret of a snapshot, if it needs one."""
    if secret is not None and _readable_secret(root) is None:
        Disk(root)  # makes its folders
        put_secret(root, secret)
