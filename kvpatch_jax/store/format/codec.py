"""Encodes chunks, patches and encoder outputs as objects, and decodes them. Layer-major: one layer lies together."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
"""Fields of a canonical's body."""

_DTYPES = frozenset(str(dtype) for dtype in DTYPES.values())

_LARGEST = {
    "int8": 127.0,
    "float8_e4m3fn": float(jnp.finfo(jnp.float8_e4m3fn).max),
    "float8_e5m2": float(jnp.finfo(jnp.float8_e5m2).max),
}


# ------------------------------------------------------------------------------------------------------- layouts


@functools.lru_cache(maxsize=64)
def layout_body(layout: KVLayout) -> Mapping[str, Any]:
    """Encodes a layout as JSON. Cached, since all objects of a model share it: not to be changed."""
    return dataclasses.asdict(layout)


def layout_of(body: Mapping[str, Any]) -> KVLayout:
    """Decodes a layout that `layout_body` encoded. Raises StoreVersionError where a later version wrote it."""
    expect_fields("layout", body, KVLayout)
    expect_fields("rope", body["rope"], Rope)
    expect_fields("scaling", body["rope"]["scaling"], Scaling)
    for channel in body["channels"]:
        expect_fields("channel", channel, Channel)
    if type(body["layers"]) is not int:
        raise StoreCorruptError(f"object: {str(body['layers'])[:40]} layers; expected a count")
    rope = dict(body["rope"])
    if rope["scaling"] is not None:
        scaling: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in rope["scaling"].items()}
        rope["scaling"] = Scaling(**scaling)
    rope["sections"] = None if rope["sections"] is None else tuple(rope["sections"])
    channels = tuple(Channel(**channel) for channel in body["channels"])
    return KVLayout(body["kind"], body["layers"], channels, Rope(**rope))


# ------------------------------------------------------------------------------------------- smaller encodings


def encode(value: np.ndarray, encoding: Encoding | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Converts one layer's channel [T, K, H] to a smaller dtype, with float32 scales [1, K, H] where it is narrow.

    int8 and the float8 types get one scale per feature over the tokens, since keys have a few large features.
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
    """Converts encoded numbers back to the dtype they had: NumPy or jax arrays, one layer or all.

    Raises:
      DtypeError: a dtype that objects do not hold. ShapeError: scales that are not one per feature.
    """
    dtype_word(dtype)
    if scale is None:
        return value if value.dtype == dtype else value.astype(dtype)
    expected = (*value.shape[:-3], 1, *value.shape[-2:])
    if scale.shape != expected:  # other shapes could broadcast to an array far larger than the file
        raise ShapeError(f"scales {scale.shape} of values {value.shape}; expected {expected}")
    return (value.astype(np.float32) * scale).astype(dtype)


# -------------------------------------------------------------------------------------------------------- chunks


def chunk_blob(chunk: Chunk, encoding: Encoding | None = None, expires: float | None = None) -> Blob:
    """Encodes a canonical as an object: local positions, then layer by layer every channel [T, K, H], then residuals.

    Raises:
      DtypeError: a dtype that objects do not hold. ShapeError: a batch of chunks.
    """
    kv = {name: np.asarray(chunk.kv[name]) for name in chunk.layout.names}
    arrays: dict[str, np.ndarray] = {"local": np.asarray(chunk.local)}
    for layer in range(chunk.layout.layers):
        for name, value in kv.items():
            stored, scale = encode(value[layer], encoding)
            arrays[f"layer.{layer}.{name}"] = stored
            if scale is not None:
                arrays[f"layer.{layer}.{name}.scale"] = scale
    hidden = {} if chunk.hidden is None else chunk.hidden
    arrays |= {f"hidden.{layer}": np.asarray(hidden[layer]) for layer in sorted(hidden)}
    return _checked(Blob("kv", chunk_body(chunk), arrays, expires))


def chunk_body(chunk: Chunk) -> dict[str, Any]:
    """Describes a canonical in JSON, for its header.

    Raises:
      ShapeError: a batch of chunks.
    """
    if chunk.batch is not None:
        raise ShapeError(f"store: chunk {chunk.id!r} is a batch of {chunk.batch}; expected one chunk per object")
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


def content_in(body: Mapping[str, Any]) -> str | None:
    """Reads a canonical's content digest from its header; None in files of earlier versions.

    Raises:
      StoreCorruptError: it is no text.
    """
    return _digest_in(body, "content")


def lead_in(body: Mapping[str, Any]) -> str | None:
    """Reads from a canonical's header the digest of what it was prefilled behind; None where that was nothing.

    Raises:
      StoreCorruptError: it is no text.
    """
    return _digest_in(body, "lead")


def _digest_in(body: Mapping[str, Any], word: str) -> str | None:
    digest = body.get(word)
    if digest is not None and (not isinstance(digest, str) or not digest):
        raise StoreCorruptError(f"object: {word} of type {type(digest).__name__}; expected a digest")
    return digest


def chunk_layout(body: Mapping[str, Any], leaves: Iterable[str]) -> KVLayout:
    """Decodes a canonical's layout, and refuses one that says or has more than this version knows.

    Raises:
      StoreVersionError. What `_rebuilt` takes for a malformed body.
    """
    expect_known("canonical with a field", body, CHUNK_FIELDS)
    expect_known("canonical of dtype", body["dtypes"].values(), _DTYPES)
    layout = layout_of(body["layout"])
    parts = {f"{name}{part}" for name in layout.names for part in ("", ".scale")}
    others: list[str] = []
    for leaf in leaves:  # not the other way round: a forged header may claim any number of layers
        word, _, rest = leaf.partition(".")
        number, _, part = rest.partition(".")
        if word != "layer" or part not in parts or not number.isdecimal() or int(number) >= layout.layers:
            others.append(leaf)
    expect_known("canonical with a leaf", others, ("local", *(f"hidden.{layer}" for layer in body["hidden"] or ())))
    return layout


def layer_names(layout: KVLayout, layer: int, names: Iterable[str]) -> list[str]:
    """Lists the leaves of one layer, in the order of the file."""
    wanted = [f"layer.{layer}.{name}{part}" for name in layout.names for part in ("", ".scale")]
    present = set(names)
    return [name for name in wanted if name in present]


def layer_of(body: Mapping[str, Any], layer: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """Decodes one layer, {channel: [T, K, H]}, in the dtype it had.

    Raises:
      StoreCorruptError: a body that does not fit its arrays. StoreVersionError: a later version wrote it.
    """
    leaf = lambda name: f"layer.{layer}.{name}"
    dtype = lambda name: np.dtype(jnp.dtype(body["dtypes"][name]))

    def build() -> dict[str, np.ndarray]:
        names = [channel["name"] for channel in body["layout"]["channels"]]
        return {name: decode(arrays[leaf(name)], arrays.get(f"{leaf(name)}.scale"), dtype(name)) for name in names}

    return _rebuilt(build, "layer")


def chunk_of(body: Mapping[str, Any], arrays: Arrays) -> Chunk:
    """Decodes a chunk that `chunk_blob` encoded, its arrays on the host.

    Where layers lie evenly in one buffer, kv are views into it. Values are not looked at again for NaN: they were when
    the chunk was made, and the checksums say that they have not changed since.

    Raises:
      StoreCorruptError: a body that does not fit its arrays. StoreVersionError: a later version wrote it.
    """

    def build() -> Chunk:
        layout = chunk_layout(body, arrays)
        layers = range(layout.layers)
        if any(name.endswith(".scale") for name in arrays) or not _as_made(body, arrays):
            each = [layer_of(body, layer, arrays) for layer in layers]
            kv = {name: np.stack([values[name] for values in each]) for name in layout.names}
            rest = {name: value.copy() for name, value in arrays.items() if not name.startswith("layer.")}
            for value in rest.values():  # so that what was read is let go, of which these few would keep all
                value.flags.writeable = False
        else:
            rest = arrays
            kv = {name: stack_views([arrays[f"layer.{layer}.{name}"] for layer in layers]) for name in layout.names}
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
            content=content_in(body),
            lead=lead_in(body),
        )

    return _rebuilt(build, "chunk")


def _as_made(body: Mapping[str, Any], arrays: Arrays) -> bool:
    return all(str(arrays[f"layer.0.{name}"].dtype) == dtype for name, dtype in body["dtypes"].items())


def unchecked_chunk(**fields: Any) -> Chunk:
    """Makes a chunk, checking shapes but not values, so that reading does not cost a pass over them."""
    fields["layout"].check(fields["kv"], "chunk")
    chunk = object.__new__(Chunk)
    for name, value in (fields | {"kv": PhaseFreeKV(fields["kv"])}).items():
        object.__setattr__(chunk, name, value)
    one = chunk.batch is None and len(chunk.local) == chunk.tokens
    if not one or not 1 <= chunk.length <= chunk.tokens or chunk.span < 0:
        raise StoreCorruptError(f"chunk: length {chunk.length}, span {chunk.span}; expected within its kv")
    return chunk


def memory_of(value: Any) -> int:
    """Counts the host bytes that a chunk, the parts of a patch or an array keep alive: of whole blocks, each once."""
    arrays = value
    if isinstance(value, Chunk):
        arrays = (dict(value.kv), value.local, value.encoder, dict(value.hidden or {}))
    blocks = (_block(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, np.ndarray))
    return sum({id(block): block.nbytes for block in blocks}.values())


def _block(array: np.ndarray) -> np.ndarray:
    """Finds the array that owns the memory of a view."""
    while True:
        owner = array.base
        if not isinstance(owner, np.ndarray):
            owner = getattr(owner, "base", None)  # strided views have a base between
        if not isinstance(owner, np.ndarray):
            return array
        array = owner


def with_encoder(chunk: Chunk, output: np.ndarray | None) -> Chunk:
    """Returns the same chunk with a tower's output."""
    return trusted(chunk, encoder=output)


def stack_views(parts: list[np.ndarray]) -> np.ndarray:
    """Stacks L arrays of one shape: as a view where they lie at even steps in one buffer."""
    first = parts[0]
    addresses = [part.ctypes.data for part in parts]
    steps = set(np.diff(addresses).tolist())
    base = first.base
    even = len(steps) == 1 and min(steps) >= first.nbytes and all(part.base is base for part in parts)
    if base is None or not even or any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        return np.stack(parts)
    raw = first.view(np.uint8)  # numpy's stride tricks do not know every dtype of ours
    shape, strides = (len(parts), *raw.shape), (steps.pop(), *raw.strides)
    return np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False).view(first.dtype)


# -------------------------------------------------------------------------------------- encoder outputs, patches


def encoder_blob(id: str, backbone: str, output: np.ndarray | jax.Array, expires: float | None = None) -> Blob:
    """Encodes a tower's output, [T, D] or any other shape, as an object."""
    return _checked(Blob("encoder", {"id": id, "backbone": backbone}, {"encoder": np.asarray(output)}, expires))


def patch_blob(patch: Patch, expires: float | None = None) -> Blob:
    """Encodes a patch as an object: a few leaves, layers stacked in each; a shared left factor once.

    Raises:
      DtypeError: a dtype that objects do not hold. ShapeError: the patches of a batch of chunks.
    """
    if patch.batch is not None:
        raise ShapeError(
            f"store: the patch of chunk {patch.metadata.chunk!r} is a batch of {patch.batch}; expected one per object"
        )
    arrays: dict[str, np.ndarray] = {}
    forms: dict[str, list[str]] = {}
    for name, factors in patch.factors.items():
        pair = is_low_rank(factors)
        forms[name] = ["u", "v"] if pair else ["dense"]
        if pair and patch.metadata.basis is not None:  # whose directions are stored once, under its digest
            forms[name] = ["u"]
        for part, leaf in zip(forms[name], factors if pair else (factors,), strict=False):  # pyright: ignore
            own = "shared.u" if part == "u" and patch.metadata.shared_left else f"{name}.{part}"
            values = leaf.values if isinstance(leaf, Quantised) else leaf
            arrays[own] = np.asarray(values)
            if isinstance(leaf, Quantised):
                arrays[f"{own}.scale"] = np.asarray(leaf.scale)
    metadata = {field.name: getattr(patch.metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    metadata["layout"] = layout_body(patch.metadata.layout)
    return _checked(Blob("patch", {"stamp": metadata, "forms": forms}, arrays, expires))


def encoder_of(body: Mapping[str, Any], arrays: Arrays) -> np.ndarray:
    """Decodes a tower's output. Raises StoreVersionError, StoreCorruptError."""
    expect_known("encoder output with a field", body, ("id", "backbone"))
    expect_known("encoder output with a leaf", arrays, ("encoder",))
    if "encoder" not in arrays:
        raise StoreCorruptError("object: no leaf encoder; expected one")
    return arrays["encoder"]


type Parts = tuple[dict[str, Any], PatchMetadata]


def patch_of(parts: Parts) -> Patch:
    """Makes the patch of `patch_parts`, its factors on the default device."""
    factors, metadata = parts
    return Patch(jax.tree.map(jnp.asarray, factors), metadata)


def patch_parts(body: Mapping[str, Any], arrays: Arrays) -> Parts:
    """Decodes the factors and the metadata that `patch_blob` encoded, the factors on the host.

    The directions of a patch in a shared basis are NaN until they are put in (`basis.with_basis`).

    Raises:
      StoreCorruptError: a body that does not fit its arrays. StoreVersionError: a later version wrote it.
    """

    def leaf(name: str, part: str, shared: bool) -> Any:
        own = "shared.u" if part == "u" and shared else f"{name}.{part}"
        scale = arrays.get(f"{own}.scale")
        return arrays[own] if scale is None else Quantised(arrays[own], scale)  # pyright: ignore

    def build() -> Parts:
        metadata = dict(body["stamp"])
        expect_known("patch with a field", body, ("stamp", "forms"))
        expect_fields("patch", metadata, PatchMetadata)
        for parts in body["forms"].values():
            expect_known("patch with a factor", parts, ("u", "v", "dense"))
        owns = {"shared.u", *(f"{name}.{part}" for name, parts in body["forms"].items() for part in parts)}
        expect_known("patch with a leaf", arrays, {*owns, *(f"{own}.scale" for own in owns)})
        shared = bool(metadata["shared_left"])
        metadata["layout"] = layout_of(metadata["layout"])
        for name in ("antecedent", "layers", "start", "base_antecedent"):
            metadata[name] = None if metadata[name] is None else tuple(metadata[name])
        # What follows is not there in files of earlier versions, as some texts are not.
        if metadata.get("asked") is not None:
            metadata["asked"] = tuple((name, rank) for name, rank in metadata["asked"])
        for name in ("members", "base_members"):
            if metadata.get(name) is not None:
                metadata[name] = tuple(_member(fields) for fields in metadata[name])
        factors: dict[str, Any] = {}
        for name, parts in body["forms"].items():
            leaves = tuple(leaf(name, part, shared) for part in parts)
            if metadata.get("basis") is not None:
                leaves = (leaves[0], _absent(leaves[0], metadata, name))
            factors[name] = leaves if len(leaves) == 2 else leaves[0]
        made = PatchMetadata(**metadata)
        check_factors(factors, made, batched=False)
        return factors, made

    return _rebuilt(build, "patch")


def _member(fields: Sequence[Any]) -> Member:
    if len(fields) > len(Member._fields):
        raise StoreVersionError(f"object: a member of {len(fields)} fields; expected at most {len(Member._fields)}")
    return Member(*fields)


def _absent(u: Any, metadata: Mapping[str, Any], name: str) -> np.ndarray:
    """Stands in for a channel's rows of a basis, in no memory, and spoils what is computed with it."""
    rank, features = (u.values if isinstance(u, Quantised) else u).shape[-1], metadata["layout"].channel(name).features
    return np.broadcast_to(np.float32(np.nan), (len(metadata["layers"]), rank, features))


def _checked(blob: Blob) -> Blob:
    for array in blob.arrays.values():
        dtype_word(array.dtype)
    return blob


def _rebuilt[T](build: Callable[[], T], what: str) -> T:
    try:
        return build()
    except StoreVersionError:
        raise
    except MALFORMED as error:
        # The cause may name ids, so it is not said.
        kind = type(error).__name__ if not isinstance(error, KVPatchError) else "it contradicts itself"
        raise StoreCorruptError(f"object: the body does not make a {what} ({kind}); expected one that does") from None
