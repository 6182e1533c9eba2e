"""Encoding of patches as objects, and decoding: one leaf per factor with the layers stacked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cache import Member, Patch, PatchMetadata, check_factors
from ...core import Quantised, RaggedFactors, is_low_rank, is_packed
from ...errors import ShapeError, StoreCorruptError
from .codec import checked_blob, decoding
from .known_words import expect_fields, expect_known
from .layout_codec import layout_body, layout_of
from .objects import Arrays, Blob
from .packed import SUFFIXES, PackedForm, form_of, kv_encoding, leaves_of, packed_of


def patch_blob(patch: Patch, expires: float | None = None) -> Blob:
    """Encodes a patch as an object: one leaf per factor with the layers stacked.

    Raises:
      DtypeError: objects cannot hold a dtype.
      ShapeError: the patch is of a batch of chunks.
    """
    if patch.batch is not None:
        raise ShapeError(
            f"store: patch of chunk {patch.metadata.chunk!r}: got a batch of {patch.batch}; expected one per object"
        )

    arrays: dict[str, np.ndarray] = {}
    forms: dict[str, list[str]] = {}
    packed: dict[str, dict[str, Any]] = {}
    for name, factors in patch.factors.items():
        parts = _parts_of(factors)
        if is_low_rank(factors) and patch.metadata.basis is not None:
            del parts["v"]  # the directions are stored once for all patches, under the basis's digest
        forms[name] = list(parts)
        for part, factor in parts.items():
            leaf = f"{name}.{part}"
            if is_packed(factor):
                packed[leaf] = dataclasses.asdict(form_of(factor))
                arrays |= {own: np.asarray(value) for own, value in leaves_of(factor, leaf).items()}
                continue
            arrays[leaf] = np.asarray(factor.values if isinstance(factor, Quantised) else factor)
            if isinstance(factor, Quantised):
                arrays[f"{leaf}.scale"] = np.asarray(factor.scale)

    metadata = {field.name: getattr(patch.metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    metadata = {name: value for name, value in metadata.items() if name in _ALWAYS or value is not None}
    metadata["layout"] = layout_body(patch.metadata.layout)
    body = {"stamp": metadata, "forms": forms} | ({"packed": packed} if packed else {})
    return checked_blob(Blob("patch", body, arrays, expires))


def _parts_of(factors: Any) -> dict[str, Any]:
    """Returns the factors of a channel by the names of their leaves."""
    if isinstance(factors, RaggedFactors):
        # Patches hold them in 16 bits where these suffice; objects do not.
        return {"u": factors.u, "v": factors.v, "rows": np.asarray(factors.rows, np.int32)}
    return dict(zip(("u", "v"), factors, strict=True)) if is_low_rank(factors) else {"dense": factors}


_ALWAYS = (
    *("chunk", "base", "antecedent", "backbone", "layout", "layers", "orbit", "frame", "start"),
    *("base_antecedent", "content", "local", "corrects", "asked", "members", "base_members", "lead", "basis"),
)
"""Fields of metadata that are written even where they are None. Others, which versions before lack, are not: so those
read whatever patches do without them."""

type Parts = tuple[dict[str, Any], PatchMetadata]


def patch_of(parts: Parts) -> Patch:
    """Makes a patch from the result of `patch_parts`, its factors on the default device."""
    factors, metadata = parts
    return Patch(jax.tree.map(jnp.asarray, factors), metadata)


def patch_parts(body: Mapping[str, Any], arrays: Arrays) -> Parts:
    """Decodes the factors and the metadata that `patch_blob` encoded, the factors on the host.

    The directions of a patch in a shared basis are NaN until `basis.with_basis` inserts them.

    Raises:
      StoreCorruptError: the body does not match its arrays.
    """
    with decoding("patch"):
        expect_known("patch with a field", body, ("stamp", "forms", "packed"))
        expect_fields("patch", body["stamp"], PatchMetadata)
        forms = {leaf: _form(fields) for leaf, fields in body.get("packed", {}).items()}
        leaves: set[str] = set()
        for name, parts in body["forms"].items():
            expect_known("patch with a factor", parts, ("u", "v", "dense", "rows"))
            leaves |= {f"{name}.{part}" for part in parts}
        known = set(leaves)
        for leaf in leaves:
            known |= {f"{leaf}.{suffix}" for suffix in (SUFFIXES if leaf in forms else ("scale",))}
        expect_known("patch with a leaf", arrays, known)

        fields = _metadata_fields(body["stamp"])
        factors: dict[str, Any] = {}
        for name, parts in body["forms"].items():
            own: dict[str, Any] = {}
            for part in parts:
                leaf = f"{name}.{part}"
                if leaf in forms:
                    own[part] = packed_of(arrays, leaf, forms[leaf])
                    continue
                scale = arrays.get(f"{leaf}.scale")
                own[part] = arrays[leaf] if scale is None else Quantised(arrays[leaf], scale)  # pyright: ignore
            factors[name] = _factors_of(name, own, fields)

        metadata = PatchMetadata(**fields)
        check_factors(factors, metadata, batched=False)
        return factors, metadata


def _form(fields: Mapping[str, Any]) -> PackedForm:
    """Decodes the form of a packed factor."""
    expect_fields("packed factor", fields, PackedForm)
    return PackedForm(**fields)


def _factors_of(name: str, parts: dict[str, Any], fields: Mapping[str, Any]) -> Any:
    """Makes a channel's factors of their parts by name.

    Raises:
      StoreCorruptError: parts that belong to no factors.
    """
    if set(parts) == {"u", "v", "rows"}:
        return _ragged(parts["u"], parts["v"], parts["rows"])
    if set(parts) == {"u", "v"}:
        return parts["u"], parts["v"]
    if set(parts) == {"dense"}:
        return parts["dense"]
    if set(parts) != {"u"} or fields.get("basis") is None:
        raise StoreCorruptError(f"object: got factors {sorted(parts)[:4]}; expected u and v, with rows, or dense")

    # NaN in place of the basis's rows: they take no memory, and spoil any use of the patch without a basis.
    u = parts["u"].values if isinstance(parts["u"], Quantised) else parts["u"]
    form = (len(fields["layers"]), u.shape[-1], fields["layout"].channel(name).features)
    return parts["u"], np.broadcast_to(np.float32(np.nan), form)


def _ragged(u: Any, v: Any, rows: Any) -> RaggedFactors:
    """Makes factors with a rank for each layer.

    Raises:
      StoreCorruptError: rows that are no indices of directions, or more of a layer than there are: to decode them would
      take far more memory than the file.
    """
    count = (v.values if isinstance(v, Quantised) else v).shape[0]
    whole = (
        isinstance(rows, np.ndarray) and rows.dtype == np.int32 and rows.ndim == 2 and rows.shape[1] <= max(count, 1)
    )
    if not whole or (rows.size and not 0 <= rows.min() <= rows.max() <= count):
        raise StoreCorruptError(f"object: got rows of {count} directions; expected int32 [L, M], each 0 to {count}")
    return RaggedFactors(u, v, rows)  # pyright: ignore[reportArgumentType]


def _metadata_fields(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a patch's metadata from JSON."""
    fields = dict(stamp)
    fields["layout"] = layout_of(fields["layout"])
    for name in ("antecedent", "layers", "start", "base_antecedent"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    if fields.get("asked") is not None:
        fields["asked"] = tuple((name, rank) for name, rank in fields["asked"])
    for name in ("members", "base_members"):
        if fields.get(name) is None:
            continue
        members = []
        for values in fields[name]:
            if len(values) > len(Member._fields):
                raise StoreCorruptError(
                    f"object: got a member of {len(values)} fields; expected at most {len(Member._fields)}"
                )
            members.append(Member(*values))
        fields[name] = tuple(members)
    kv_encoding(fields)  # refuses unknown words
    return fields
