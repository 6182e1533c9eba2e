"""Encoding of chunks, patches and encoder outputs as objects, and decoding. Each layer's leaves are adjacent."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...cache import Chunk, Member, Patch, PatchMetadata, check_factors, trusted
from ...core import Channel, KVLayout, PhaseFreeKV, Quantised, Rope, Scaling, is_low_rank
from ...errors import KVPatchError, ShapeError, StoreCorruptError, StoreVersionError
from .compatibility import expect_fields, expect_known
from .header import DTYPES, MALFORMED, dtype_word
from .naming import Encoding
from .objects import Arrays, Blob

CHUNK_FIELDS = ("lead", "id", "backbone", "span", "length", "layout", "dtypes", "hidden", "content")
"""Fields of a canonical's body. `lead` is absent from canonicals that were prefilled alone."""

_DTYPES = frozenset(str(dtype) for dtype in DTYPES.values())

_LARGEST = {
    "int8": 127.0,
    "float8_e4m3fn": float(jnp.finfo(jnp.float8_e4m3fn).max),
    "float8_e5m2": float(jnp.finfo(jnp.float8_e5m2).max),
}


# ------------------------------------------------------------------------------------------------------- layouts


@functools.lru_cache(maxsize=64)
def layout_body(layout: KVLayout) -> Mapping[str, Any]:
    """Returns a layout as JSON. Cached, because all objects of a model share it: do not modify it."""
    return dataclasses.asdict(layout)


def layout_of(body: Mapping[str, Any]) -> KVLayout:
    """Decodes a layout that `layout_body` encoded.

    Raises:
      StoreVersionError: a later version wrote it.
      StoreCorruptError, ValueError, TypeError, LookupError: it is malformed.
    """
    # Decoded once per text: building and checking a layout takes longer than reading a small object.
    return _layout_of_text(json.dumps(body))


@functools.lru_cache(maxsize=64)
def _layout_of_text(text: str) -> KVLayout:
    body = json.loads(text)
    expect_fields("layout", body, KVLayout)
    expect_fields("rope", body["rope"], Rope)
    expect_fields("scaling", body["rope"]["scaling"], Scaling)
    for channel in body["channels"]:
        expect_fields("channel", channel, Channel)
    if type(body["layers"]) is not int:  # `isinstance` would accept true
        raise StoreCorruptError(f"object: got {str(body['layers'])[:40]} layers; expected a number")

    rope = dict(body["rope"])
    if rope["scaling"] is not None:
        scaling: dict[str, Any] = {}
        for name, value in rope["scaling"].items():
            scaling[name] = tuple(value) if isinstance(value, list) else value
        rope["scaling"] = Scaling(**scaling)

    rope["sections"] = None if rope["sections"] is None else tuple(rope["sections"])
    channels = tuple(Channel(**channel) for channel in body["channels"])
    return KVLayout(body["kind"], body["layers"], channels, Rope(**rope))


# ------------------------------------------------------------------------------------------- smaller encodings


def encode(value: np.ndarray, encoding: Encoding | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Converts one layer's channel [T, K, H] to a smaller dtype; for int8 and float8 with float32 scales [1, K, H].

    There is one scale per feature over the tokens, because keys have a few large features.
    """
    if encoding is None:
        return value, None

    dtype = np.dtype(jnp.dtype(encoding))
    if encoding not in _LARGEST:
        return value.astype(dtype), None

    wide = value.astype(np.float32)
    scale = np.abs(wide).max(axis=0, keepdims=True) / np.float32(_LARGEST[encoding])
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    scaled = wide / scale
    return (np.rint(scaled) if encoding == "int8" else scaled).astype(dtype), scale


def decode(value: Any, scale: Any, dtype: np.dtype) -> Any:
    """Converts encoded values, NumPy or JAX, one layer or all, back to their original dtype.

    Raises:
      DtypeError: objects cannot hold the dtype.
      ShapeError: the scales are not one per feature.
    """
    dtype_word(dtype)
    if scale is None:
        return value if value.dtype == dtype else value.astype(dtype)
    expected = (*value.shape[:-3], 1, *value.shape[-2:])
    if scale.shape != expected:  # other shapes could broadcast to an array far larger than the file
        raise ShapeError(f"object: got scales {scale.shape} of values {value.shape}; expected {expected}")
    return (value.astype(np.float32) * scale).astype(dtype)


# -------------------------------------------------------------------------------------------------------- chunks


def chunk_blob(chunk: Chunk, encoding: Encoding | None = None, expires: float | None = None) -> Blob:
    """Encodes a canonical as an object: local positions, every channel [T, K, H] of each layer, then residuals.

    Raises:
      DtypeError: objects cannot hold a dtype.
      ShapeError: the chunk is a batch.
    """
    kv = {name: np.asarray(chunk.kv[name]) for name in chunk.layout.names}
    arrays: dict[str, np.ndarray] = {"local": np.asarray(chunk.local)}

    for layer in range(chunk.layout.layers):
        for name, value in kv.items():
            stored, scale = encode(value[layer], encoding)
            arrays[f"layer.{layer}.{name}"] = stored
            if scale is not None:
                arrays[f"layer.{layer}.{name}.scale"] = scale

    for layer, states in sorted((chunk.hidden or {}).items()):
        arrays[f"hidden.{layer}"] = np.asarray(states)
    return _checked(Blob("kv", chunk_body(chunk), arrays, expires))


def chunk_body(chunk: Chunk) -> dict[str, Any]:
    """Returns the JSON description of a canonical, for its header.

    Raises:
      ShapeError: the chunk is a batch.
    """
    if chunk.batch is not None:
        raise ShapeError(f"store: chunk {chunk.id!r}: got a batch of {chunk.batch}; expected one chunk per object")

    lead = {} if chunk.lead is None else {"lead": chunk.lead}
    return lead | {
        "id": chunk.id,
        "backbone": chunk.backbone,
        "span": int(chunk.span),
        "length": int(chunk.length),
        "layout": layout_body(chunk.layout),
        "dtypes": {name: str(chunk.kv[name].dtype) for name in chunk.layout.names},
        "hidden": None if chunk.hidden is None else sorted(int(layer) for layer in chunk.hidden),
        "content": chunk.content,
    }


def digest_in(body: Mapping[str, Any], field: Literal["content", "lead"]) -> str | None:
    """Returns a digest from a canonical's header.

    None for the content in files of earlier versions, and for the lead of a canonical that was prefilled alone.

    Raises:
      StoreCorruptError: it is not a string.
    """
    digest = body.get(field)
    if digest is not None and (not isinstance(digest, str) or not digest):
        raise StoreCorruptError(f"object: got {field} of type {type(digest).__name__}; expected a digest")
    return digest


def chunk_layout(body: Mapping[str, Any], leaves: Iterable[str]) -> KVLayout:
    """Decodes a canonical's layout, and checks its fields and leaves against those that this version knows.

    Raises:
      StoreVersionError: a later version wrote it. Any of `MALFORMED` for a malformed body.
    """
    expect_known("canonical with a field", body, CHUNK_FIELDS)
    expect_known("canonical of dtype", body["dtypes"].values(), _DTYPES)
    layout = layout_of(body["layout"])
    parts = {*layout.names, *(f"{name}.scale" for name in layout.names)}

    # Goes through the leaves and not through the layers: a forged header may claim any number of layers.
    others: list[str] = []
    for leaf in leaves:
        word, _, rest = leaf.partition(".")
        number, _, part = rest.partition(".")
        if word != "layer" or part not in parts or not number.isdecimal() or int(number) >= layout.layers:
            others.append(leaf)

    expect_known("canonical with a leaf", others, ("local", *(f"hidden.{layer}" for layer in body["hidden"] or ())))
    return layout


def layer_names(layout: KVLayout, layer: int, names: Iterable[str]) -> list[str]:
    """Returns the names of one layer's leaves, in the order of the file."""
    present = set(names)
    found = []
    for channel in layout.names:
        for name in (f"layer.{layer}.{channel}", f"layer.{layer}.{channel}.scale"):
            if name in present:
                found.append(name)
    return found


def layer_of(body: Mapping[str, Any], layer: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """Decodes one layer, {channel: [T, K, H]}, in its original dtype.

    Raises:
      StoreCorruptError: the body does not match its arrays.
      StoreVersionError: a later version wrote it.
    """
    with _decoding("layer"):
        values = {}
        for channel in body["layout"]["channels"]:
            name = channel["name"]
            leaf, dtype = f"layer.{layer}.{name}", np.dtype(jnp.dtype(body["dtypes"][name]))
            values[name] = decode(arrays[leaf], arrays.get(f"{leaf}.scale"), dtype)
        return values


def chunk_of(body: Mapping[str, Any], arrays: Arrays) -> Chunk:
    """Decodes a chunk that `chunk_blob` encoded, its arrays on the host.

    If the layers are evenly spaced in one buffer, kv are views into it. Values are not checked for NaN again: that was
    done when the chunk was made, and the checksums prove that they have not changed since.

    Raises:
      StoreCorruptError: the body does not match its arrays.
      StoreVersionError: a later version wrote it.
    """
    with _decoding("chunk"):
        layout = chunk_layout(body, arrays)
        layers = range(layout.layers)
        encoded = any(name.endswith(".scale") for name in arrays)
        for name, dtype in body["dtypes"].items():
            encoded = encoded or str(arrays[f"layer.0.{name}"].dtype) != dtype

        if encoded:
            values = [layer_of(body, layer, arrays) for layer in layers]
            kv = {name: np.stack([value[name] for value in values]) for name in layout.names}
            # Copied, because these few small views would keep the whole buffer alive.
            rest = {name: value.copy() for name, value in arrays.items() if not name.startswith("layer.")}
            for value in rest.values():
                value.flags.writeable = False
        else:
            rest, kv = arrays, {}
            for name in layout.names:
                kv[name] = stack_views([arrays[f"layer.{layer}.{name}"] for layer in layers])

        hidden = body["hidden"]
        return unchecked_chunk(
            kv=kv,
            local=rest["local"],
            span=body["span"],
            length=body["length"],
            id=body["id"],
            layout=layout,
            backbone=body["backbone"],
            encoder=None,
            hidden=None if hidden is None else {layer: rest[f"hidden.{layer}"] for layer in hidden},
            content=digest_in(body, "content"),
            lead=digest_in(body, "lead"),
        )


def unchecked_chunk(**fields: Any) -> Chunk:
    """Makes a chunk with checks of its shapes and not of its values, which would take a pass over them."""
    fields["layout"].check(fields["kv"], "chunk")
    chunk = object.__new__(Chunk)
    for name, value in (fields | {"kv": PhaseFreeKV(fields["kv"])}).items():
        object.__setattr__(chunk, name, value)
    is_one = chunk.batch is None and len(chunk.local) == chunk.tokens
    if not is_one or not 1 <= chunk.length <= chunk.tokens or chunk.span < 0:
        raise StoreCorruptError(f"chunk: got length {chunk.length}, span {chunk.span}; expected them within its kv")
    return chunk


def memory_of(value: Any) -> int:
    """Counts the host bytes that a chunk, the parts of a patch or an array keep alive: whole buffers, each once."""
    arrays = value
    if isinstance(value, Chunk):
        arrays = (dict(value.kv), value.local, value.encoder, dict(value.hidden or {}))
    blocks = (_block(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, np.ndarray))
    return sum({id(block): block.nbytes for block in blocks}.values())


def _block(array: np.ndarray) -> np.ndarray:
    """Returns the array that owns a view's memory."""
    while True:
        owner = array.base
        if not isinstance(owner, np.ndarray):
            owner = getattr(owner, "base", None)  # the base of a strided view is an intermediate object
        if not isinstance(owner, np.ndarray):
            return array
        array = owner


def with_encoder(chunk: Chunk, output: np.ndarray | None) -> Chunk:
    """Returns the chunk with its encoder output, or without one."""
    return trusted(chunk, encoder=output)


def stack_views(parts: list[np.ndarray]) -> np.ndarray:
    """Stacks L arrays of one shape; as a view if they are evenly spaced in one buffer."""
    first = parts[0]
    addresses = [part.ctypes.data for part in parts]
    steps = set(np.diff(addresses).tolist())
    base = first.base
    even = len(steps) == 1 and min(steps) >= first.nbytes and all(part.base is base for part in parts)
    if base is None or not even or any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        return np.stack(parts)

    raw = first.view(np.uint8)  # NumPy's stride tricks do not support every dtype, bfloat16 for one
    shape, strides = (len(parts), *raw.shape), (steps.pop(), *raw.strides)
    return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False).view(first.dtype)


# -------------------------------------------------------------------------------------- encoder outputs, patches


def encoder_blob(id: str, backbone: str, output: np.ndarray | jax.Array, expires: float | None = None) -> Blob:
    """Encodes an encoder output, [T, D] or any other shape, as an object."""
    return _checked(Blob("encoder", {"id": id, "backbone": backbone}, {"encoder": np.asarray(output)}, expires))


def patch_blob(patch: Patch, expires: float | None = None) -> Blob:
    """Encodes a patch as an object: one leaf per factor with the layers stacked; a shared left factor only once.

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
    for name, factors in patch.factors.items():
        is_pair = is_low_rank(factors)
        forms[name] = ["u", "v"] if is_pair else ["dense"]
        if is_pair and patch.metadata.basis is not None:
            forms[name] = ["u"]  # the directions are stored once for all patches, under the basis's digest
        for part, factor in zip(forms[name], factors if is_pair else (factors,), strict=False):  # pyright: ignore
            leaf = "shared.u" if part == "u" and patch.metadata.shared_left else f"{name}.{part}"
            arrays[leaf] = np.asarray(factor.values if isinstance(factor, Quantised) else factor)
            if isinstance(factor, Quantised):
                arrays[f"{leaf}.scale"] = np.asarray(factor.scale)

    metadata = {field.name: getattr(patch.metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    metadata["layout"] = layout_body(patch.metadata.layout)
    return _checked(Blob("patch", {"stamp": metadata, "forms": forms}, arrays, expires))


def encoder_of(body: Mapping[str, Any], arrays: Arrays) -> np.ndarray:
    """Decodes an encoder output. Raises StoreVersionError, StoreCorruptError."""
    expect_known("encoder output with a field", body, ("id", "backbone"))
    expect_known("encoder output with a leaf", arrays, ("encoder",))
    if "encoder" not in arrays:
        raise StoreCorruptError("object: got no leaf 'encoder'; expected one")
    return arrays["encoder"]


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
      StoreVersionError: a later version wrote it.
    """
    with _decoding("patch"):
        expect_known("patch with a field", body, ("stamp", "forms"))
        expect_fields("patch", body["stamp"], PatchMetadata)
        leaves = {"shared.u"}
        for name, parts in body["forms"].items():
            expect_known("patch with a factor", parts, ("u", "v", "dense"))
            leaves |= {f"{name}.{part}" for part in parts}
        expect_known("patch with a leaf", arrays, {*leaves, *(f"{leaf}.scale" for leaf in leaves)})

        fields = _metadata_fields(body["stamp"])
        factors: dict[str, Any] = {}
        for name, parts in body["forms"].items():
            pair = []
            for part in parts:
                leaf = "shared.u" if part == "u" and fields["shared_left"] else f"{name}.{part}"
                scale = arrays.get(f"{leaf}.scale")
                pair.append(arrays[leaf] if scale is None else Quantised(arrays[leaf], scale))  # pyright: ignore
            if fields.get("basis") is not None:
                # NaN in place of the basis's rows: they take no memory, and spoil any use of the patch without a basis.
                u = pair[0].values if isinstance(pair[0], Quantised) else pair[0]
                form = (len(fields["layers"]), u.shape[-1], fields["layout"].channel(name).features)
                pair = [pair[0], np.broadcast_to(np.float32(np.nan), form)]
            factors[name] = tuple(pair) if len(pair) == 2 else pair[0]

        metadata = PatchMetadata(**fields)
        check_factors(factors, metadata, batched=False)
        return factors, metadata


def _metadata_fields(stamp: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a patch's metadata from JSON. Fields that files of earlier versions lack may be absent."""
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
                raise StoreVersionError(
                    f"object: got a member of {len(values)} fields; expected at most {len(Member._fields)}"
                )
            members.append(Member(*values))
        fields[name] = tuple(members)
    return fields


def _checked(blob: Blob) -> Blob:
    for array in blob.arrays.values():
        dtype_word(array.dtype)
    return blob


@contextlib.contextmanager
def _decoding(what: str) -> Iterator[None]:
    """Raises StoreCorruptError in place of whatever a malformed body causes."""
    try:
        yield
    except StoreVersionError:
        raise
    except MALFORMED as error:
        # The cause may contain ids, so it is not part of the message.
        kind = "it contradicts itself" if isinstance(error, KVPatchError) else type(error).__name__
        raise StoreCorruptError(f"object: got a body that is no valid {what} ({kind}); expected a valid one") from None
