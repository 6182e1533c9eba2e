"""Stored patches of one tenant: which of them serve a chunk, and the bases that they share."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cache import Antecedent, Patch, PatchMetadata
from ..core import KVLayout
from ..errors import InputError, KVPatchError
from ..patching import Basis, check_in_basis, with_basis
from .codec import (
    PatchParts,
    decode_chunk_object,
    decode_encoder,
    decode_patch_parts,
    encode_encoder,
    patch_of,
)
from .files import Encoded
from .names import PatchKey
from .objects import Objects


def find_patches(objects: Objects, key: PatchKey) -> list[Patch]:
    """Returns all stored patches that serve a chunk behind an antecedent, largest first: `ChunkStore.get_patches`."""
    parts = list[PatchParts]()
    for name in objects.with_prefix(objects.names.patches(key)):
        if (patch_parts := objects.get(name, decode_patch_parts)) is not None:
            parts.append(patch_parts)

    # Names leave out the contents of antecedents: these are compared where both are known.
    def contents(id: str) -> set[str | None]:
        return stored_contents(objects, id, key.backbone, key.lead)

    matches = _matches([metadata for _, metadata in parts], key, contents)
    parts = [patch_parts for patch_parts, match in zip(parts, matches, strict=True) if match]

    # A canonical that does not state its content may have any: the patch is then checked when it is applied.
    if any(metadata.chunk.content is not None for _, metadata in parts):
        known = contents(key.chunk) if key.content is None else {key.content}
        if known and None not in known:
            parts = [(factors, metadata) for factors, metadata in parts if metadata.chunk.content in (None, *known)]
    return sorted(_completed(objects, parts), key=lambda patch: -patch.nbytes)


def stored_contents(objects: Objects, id: str, backbone: str, lead: str | None) -> set[str | None]:
    """Returns the contents that a chunk's canonicals behind a lead state, in any encoding, on this machine.

    A patch of another content than a remote canonical's is refused where it is applied; to look is to transfer all KV.
    """
    canonical = objects.names.canonical(backbone, id, None, lead)
    contents = set[str | None]()
    for name in objects.with_prefix(canonical, remote=False):
        # "kv" is also the beginning of the names behind other leads.
        if name == canonical or not name.removeprefix(canonical).startswith(".b"):
            chunk = objects.get(name, decode_chunk_object, remote=False)
            if chunk is not None:
                contents.add(chunk.content)
    return contents


def _completed(objects: Objects, parts: Sequence[PatchParts]) -> list[Patch]:
    """Makes patches of their parts and inserts their bases. Leaves out patches whose basis is not stored."""
    patches, bases = list[Patch](), dict[str, Basis | None]()
    for patch_parts in parts:
        patch = patch_of(patch_parts)
        digest = patch.metadata.basis
        if digest is None:
            patches.append(patch)
            continue
        if digest not in bases:
            bases[digest] = find_basis(objects, digest, patch.metadata.chunk.layout, patch.metadata.chunk.backbone)
        if (basis := bases[digest]) is not None:
            patches.append(with_basis(patch, basis))
    return patches


def find_basis(objects: Objects, digest: str, layout: KVLayout, backbone: str) -> Basis | None:
    """Reads a basis; None if there is none, or its content does not match the digest."""
    directions = dict[str, np.ndarray]()
    for channel in layout.names:
        value = objects.get(_basis_name(objects, backbone, digest, channel), decode_encoder)
        if value is not None:
            directions[channel] = value
    try:
        basis = Basis(directions, layout, backbone)
        return basis if basis.digest == digest else None
    except KVPatchError:
        return None


def put_basis(objects: Objects, basis: Basis, expires: float | int | None) -> None:
    """Stores a basis, an object for each channel; it expires no earlier than those that are stored."""
    writes, ends = list[tuple[str, Encoded]](), [expires, *_expiries(objects, basis)]
    for channel, directions in basis.directions.items():
        encoded = encode_encoder(_basis_id(basis.digest, channel), basis.backbone, np.asarray(directions))
        writes.append((_basis_name(objects, basis.backbone, basis.digest, channel), encoded))
    objects.put(writes, expires=None if None in ends else max(ends))  # pyright: ignore[reportArgumentType]


def _basis_id(digest: str, channel: str) -> str:
    """Returns the id under which a channel's directions of a basis are stored, as an encoder output."""
    return f"basis {digest} {channel}"


def _basis_name(objects: Objects, backbone: str, digest: str, channel: str) -> str:
    return objects.names.encoder(backbone, _basis_id(digest, channel))


def _expiries(objects: Objects, basis: Basis) -> list[float | None]:
    """Returns when the objects of a basis that are on this machine expire."""
    query, ends = "SELECT expires FROM objects WHERE tenant = ? AND name = ?", list[float | None]()
    for channel in basis.directions:
        name = _basis_name(objects, basis.backbone, basis.digest, channel)
        ends += [end for (end,) in objects.index.rows(query, objects.tenant, name)]
    return ends


def extend_bases(objects: Objects, patches: Sequence[Patch], expires: float | int | None) -> None:
    """Checks that the bases of patches are stored, and extends the life of those that would expire before the patches.

    Raises:
      InputError: a basis is not stored, or a patch is not in the basis that it names. StoreError: as `Objects.put`.
    """
    bases = dict[str, Basis]()
    for patch in patches:
        metadata = patch.metadata
        if metadata.basis is None:
            continue
        basis = bases.get(metadata.basis)
        if basis is None:
            basis = find_basis(objects, metadata.basis, metadata.chunk.layout, metadata.chunk.backbone)
        if basis is None:
            raise InputError(f"store: got a patch in basis {metadata.basis}; expected it stored first, by put_basis")
        check_in_basis(patch, basis)
        bases[metadata.basis] = basis

    # An eighth longer than needed, or of many patches with the same ttl each would write its basis again.
    until = None if expires is None else expires + (expires - time.time()) / 8
    for basis in bases.values():
        ends = [end for end in _expiries(objects, basis) if end is not None]
        if ends and (expires is None or min(ends) < expires):
            put_basis(objects, basis, until)


def _matches(stored: Sequence[PatchMetadata], key: PatchKey, contents: Callable[[str], set[str | None]]) -> list[bool]:
    """Returns for each stored patch whether its antecedents are those of the key, as far as contents are known.

    If the key does not state the content of an id, that of the id's stored canonical counts; if there is none, the
    content that the patches agree on. If they disagree, no patch that states one matches: it is unknown which is meant.

    Args:
      stored: metadata of patches with one name (`Names.patches`).
      contents: returns the contents that an id's stored canonicals state.
    """
    served, formed = _antecedents(key), [_antecedents(metadata) for metadata in stored]

    # Collect what the patches state of members whose content the key leaves open.
    unknown = set[str]()
    for antecedent in served:
        unknown |= {member.id for member in antecedent.members if member.content is None}
    stated: dict[str, set[str]] = {}
    for antecedents in formed:
        for antecedent in antecedents:
            for member in antecedent.members:
                if member.id in unknown and member.content is not None:
                    stated.setdefault(member.id, set()).add(member.content)

    # Decide on one content per member, None where several are possible.
    meant: dict[str, str | None] = {}
    for id, alternatives in stated.items():
        candidates = {content for content in contents(id) if content is not None} or alternatives
        meant[id] = next(iter(candidates)) if len(candidates) == 1 else None
    served = [_with_contents(antecedent, meant) for antecedent in served]

    matches = []
    for metadata, antecedents in zip(stored, formed, strict=True):
        match = len(antecedents) == len(served)
        for index, (behind, other) in enumerate(zip(antecedents, served, strict=False)):
            undecided = any(
                meant.get(member.id, "") is None and member.content is not None for member in behind.members
            )
            # The order of the antecedent does not matter to an orbit patch; that of its base's does.
            match = match and not undecided and behind.difference(other, metadata.orbit and index == 0) is None
        matches.append(match)
    return matches


def _antecedents(key: PatchKey | PatchMetadata) -> list[Any]:
    """Returns the antecedent, and that of the base if it is conditioned."""
    return [key.antecedent] if key.base_antecedent is None else [key.antecedent, key.base_antecedent]


def _with_contents(antecedent: Antecedent, contents: dict[str, str | None]) -> Antecedent:
    members = []
    for member in antecedent.members:
        if member.content is None and member.id in contents:
            member = member._replace(content=contents[member.id])
        members.append(member)
    return Antecedent(tuple(members))
