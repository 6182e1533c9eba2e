"""Encoding of shared bases as objects: one per channel, under the basis's digest."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...cache import Patch
from ...core import KVLayout
from ...errors import KVPatchError
from ...patching import Basis, coefficients, with_basis
from .codec import encoder_blob
from .objects import Blob
from .patch_codec import Parts, patch_of


def basis_id(digest: str, channel: str) -> str:
    """Returns the id under which a channel's directions of a basis are stored."""
    return f"basis {digest} {channel}"


def basis_blobs(basis: Basis, expires: float | None) -> list[tuple[str, Blob]]:
    """Encodes a basis. Returns an id and an object for each channel."""
    blobs = []
    for name, directions in basis.directions.items():
        id = basis_id(basis.digest, name)
        blobs.append((id, encoder_blob(id, basis.backbone, np.asarray(directions), expires)))
    return blobs


def basis_of(digest: str, layout: KVLayout, backbone: str, found: Mapping[str, np.ndarray | None]) -> Basis | None:
    """Returns the basis of the directions read for each channel; None if it does not match the digest."""
    try:
        basis = Basis({name: value for name, value in found.items() if value is not None}, layout, backbone)
        return basis if basis.digest == digest else None
    except KVPatchError:
        return None


def completed(found: Sequence[Parts], read: Callable[[str, KVLayout, str], Basis | None]) -> list[Patch]:
    """Makes patches from their parts and inserts their bases. Leaves out patches whose basis is not stored.

    Args:
      read: returns a basis by its digest, layout and backbone.
    """
    patches, known = [], dict[str, Basis | None]()
    for parts in found:
        patch = patch_of(parts)
        digest = patch.metadata.basis
        if digest is None:
            patches.append(patch)
            continue
        if digest not in known:
            known[digest] = read(digest, patch.metadata.layout, patch.metadata.backbone)
        if (basis := known[digest]) is not None:
            patches.append(with_basis(coefficients(patch), patch.metadata, basis))
    return patches
