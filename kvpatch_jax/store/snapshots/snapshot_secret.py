"""Secret of a snapshot's names, and the check that it matches the target root."""

import os

from ...errors import StoreCorruptError, StoreSnapshotError
from ..disk.disk import Disk
from ..disk.root_config import SECRETS, find_secret, holds_objects, put_secret, secret_digest
from ..format.naming import ObjectNames, name_at
from .manifest import MANIFEST, UNTOLD, Manifest


def snapshot_secret(directory: str, manifest: Manifest, given: bytes | None) -> bytes | None:
    """Returns the secret in a snapshot of the whole store; None if its names have the secret `given` from outside.

    Raises:
      StoreSnapshotError: it is damaged, missing, or not the one of the snapshot's manifest.
    """
    try:
        kept = find_secret(directory, mend=False)
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"snapshot {directory}: {error}") from error
    if manifest.secret in (None, UNTOLD):
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


def of_tenant(directory: str, manifest: Manifest, tenant: str, given: bytes | None) -> Manifest:
    """Returns the part of a manifest with the objects of one tenant."""
    if manifest.scope == "tenant":
        return manifest
    secret = snapshot_secret(directory, manifest, given) or given
    assert secret is not None
    names = ObjectNames(tenant, secret)
    own = (f"{names.space}/", f"{names.libraries}/")
    return Manifest("tenant", tuple(entry for entry in manifest.objects if entry.path.startswith(own)))


def check_secret(directory: str, manifest: Manifest, root: str, secret: bytes | None) -> None:
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


def adopt_secret(root: str, secret: bytes | None) -> None:
    """Writes the secret of a snapshot to a root that has none."""
    if secret is not None and _readable_secret(root) is None:
        Disk(root)  # creates its folders
        put_secret(root, secret)


def _readable_secret(root: str) -> bytes | None:
    try:
        return find_secret(root)
    except StoreCorruptError:
        return None
