"""Stored patches of one tenant, and the bases that they share."""

from collections.abc import Sequence

import numpy as np

from ..cache import Patch, PatchMetadata
from ..core import KVLayout
from ..errors import InputError
from ..patching import Basis, check_in_basis
from .antecedent_match import match_antecedents
from .disk.tenant_disk import TenantDisk
from .format.bases import basis_blobs, basis_id, basis_of, completed
from .format.codec import encoder_of
from .format.expiry import is_before, later
from .format.naming import Name, PatchKey
from .format.objects import Blob
from .format.patch_codec import patch_parts
from .tiers.memory import DERIVED, ENCODER, CacheEntry
from .tiers.reader import TieredReader


class PatchObjects:
    """Lookup of a tenant's patches, and of the bases that patches are expressed in.

    Args:
      tenant_disk: names and lists the objects.
      reader: reads them.
    """

    def __init__(self, tenant_disk: TenantDisk, reader: TieredReader):
        self._disk, self._names, self._clock = tenant_disk.disk, tenant_disk.names, tenant_disk.clock
        self._reader = reader

    def find(self, key: PatchKey | PatchMetadata) -> list[Patch]:
        """Returns every stored patch that serves a chunk behind an antecedent, as `ChunkStore.get_patches`."""
        found = []
        for name in self._reader.names_beginning(self._names.patches(key)):
            entry = self._reader.load(name, patch_parts, DERIVED)
            if entry is not None:
                found.append(entry.value)

        # Names leave out the contents of antecedents: these are compared where both are known.
        def contents(id: str) -> set[str | None]:
            return self._reader.contents(self._names.canonical(key.backbone, id, lead=key.lead))

        matches = match_antecedents([metadata for _, metadata in found], key, contents)
        found = [parts for parts, match in zip(found, matches, strict=True) if match]

        # A canonical that does not state its content may have any: the patch is then checked when it is applied.
        if any(metadata.content is not None for _, metadata in found):
            wanted = contents(key.chunk) if key.content is None else {key.content}
            if wanted and None not in wanted:
                found = [(factors, own) for factors, own in found if own.content in (None, *wanted)]
        return sorted(completed(found, self.basis), key=lambda patch: -patch.nbytes)

    def count(self, id: str, backbone: str) -> int:
        """Counts a chunk's patches on the disk, behind any antecedent."""
        return len(self._disk.of_chunk(self._names.canonical(backbone, id), "p."))

    # ------------------------------------------------------------------------------------------------- bases

    def basis(self, digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        """Returns a stored basis; None if there is none, or its content does not match the digest."""
        outputs: dict[str, np.ndarray | None] = {}
        for channel in layout.names:
            entry = self._directions(digest, channel, backbone)
            outputs[channel] = None if entry is None else entry.value
        return basis_of(digest, layout, backbone, outputs)

    def basis_objects(self, basis: Basis, expires: float | None) -> list[tuple[Name, Blob]]:
        """Encodes a basis, one object per channel, that expires no earlier than the stored one."""
        expires = later(expires, self._basis_expires(basis))
        return [(self._names.encoder(basis.backbone, id), blob) for id, blob in basis_blobs(basis, expires)]

    def bases_to_extend(self, patches: Sequence[Patch], expires: float | None) -> list[tuple[Name, Blob]]:
        """Checks that the bases of patches are stored, and encodes again those that would expire before the patches.

        Raises:
          InputError: a basis is not stored, or a patch is not in the basis that it names.
        """
        bases: dict[str, Basis] = {}
        for patch in patches:
            metadata = patch.metadata
            if metadata.basis is None:
                continue
            basis = self.basis(metadata.basis, metadata.layout, metadata.backbone)
            if basis is None:
                raise InputError(
                    f"store: got a patch in basis {metadata.basis}; expected it stored first, by put_basis"
                )
            check_in_basis(patch, basis)
            bases[basis.digest] = basis

        # An eighth longer than needed, or of many patches with the same ttl each would write its basis again.
        until = None if expires is None else expires + (expires - self._clock()) / 8
        objects = []
        for basis in bases.values():
            if is_before(self._basis_expires(basis), expires):
                objects += self.basis_objects(basis, until)
        return objects

    def _basis_expires(self, basis: Basis) -> float | None:
        """Returns when the first of a basis's objects expires; 0 if one is missing."""
        first: float | None = None
        for channel in basis.directions:
            entry = self._directions(basis.digest, channel, basis.backbone)
            expires = 0.0 if entry is None else entry.expires
            first = expires if is_before(expires, first) else first
        return first

    def _directions(self, digest: str, channel: str, backbone: str) -> CacheEntry[np.ndarray] | None:
        """Reads the object of a channel's directions."""
        return self._reader.load(self._names.encoder(backbone, basis_id(digest, channel)), encoder_of, ENCODER)
