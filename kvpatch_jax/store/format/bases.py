"""Bases that patches share, kept as objects of arrays: one for each channel, under the basis's digest."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...cache import Patch
from ...core import KVLayout
from ...errors import KVPatchError
from ...patching import Basis, coefficients, with_basis
from .codec import Parts, encoder_blob, patch_of
from .objects import Blob


def basis_id(digest: str, channel: str) -> str:
    """The id that a channel's directions of a basis are kept under."""
    return f"basis {digest} {channel}"


def basis_blobs(basis: Basis, expires: float | None) -> list[tuple[str, Blob]]:
    """Encodes a basis: an id and an object for each channel."""
    each = [(basis_id(basis.digest, name), np.asarray(value)) for name, value in basis.directions.items()]
    return [(id, encoder_blob(id, basis.backbone, value, expires)) for id, value in each]


def basis_of(digest: str, layout: KVLayout, backbone: str, found: Mapping[str, np.ndarray | None]) -> Basis | None:
    """Makes the basis of what was read by channel; None where that is not the basis of this digest."""
    try:
        basis = Basis({name: value for name, value in found.items() if value is not None}, layout, backbone)
        return basis if basis.digest == digest else None
    except KVPatchError:
        return None


def completed(found: Sequence[Parts], read: Callable[[str, KVLayout, str], Basis | None]) -> list[Patch]:
    """Makes patches of what was read, and puts the bases in that they name; those whose basis is not there stay out.

    Args:
      read: gives a basis by its digest, layout and backbone.
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
