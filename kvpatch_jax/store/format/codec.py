"""Encoding of chunks and encoder outputs as objects, and decoding. Each layer's leaves are adjacent."""

import contextlib
import functools
import marshal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...cache import Chunk, brief, encode_chunk, trusted
from ...core import PART_DTYPE, Channel, KVLayout, PackedArray, PhaseFreeKV, is_packed
from ...errors import InputError, KVPatchError, ShapeError, StoreCorruptError
from .header import DTYPES, MALFORMED, dtype_word
from .known_words import expect_known
from .layout_codec import content_of_values, kept_by_layer, layout_body, layout_of
from .naming import Encoding, encoding_in, encoding_word, few_bits
from .objects import Arrays, Blob, Leaves, stack_layers
from .packed import (
    SUFFIXES,
    PackedForm,
    form_of,
    kv_encoding,
    kv_forms,
    leaves_of,
    packed_of,
)

CHUNK_FIELDS = ("lead", "id", "backbone", "span", "length", "layout", "dtypes", "hidden", "content")
"""Fields of a canonical's body. `lead` is absent from canonicals that were prefilled alone."""
PACKED_FIELDS = (*CHUNK_FIELDS, "encoding", "groups")
"""Fields of the body of a canonical with packed kv: the encoding's word too, and each channel's group."""

_KNOWN_LEAVES = 4096
"""Leaves of the largest canonical whose names are remembered."""
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}

_LARGEST = {
    "int8": 127.0,
    "float8_e4m3fn": float(jnp.finfo(jnp.float8_e4m3fn).max),
    "float8_e5m2": float(jnp.finfo(jnp.float8_e5m2).max),
}


# ------------------------------------------------------------------------------------------- smaller encodings


def encode(value: np.ndarray, encoding: str | None) -> tuple[np.ndarray, np.ndarray | None]:
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


def dtype_for(channel: Channel, word: str | None) -> str | None:
    """Returns the smaller dtype that a channel is stored in, if a canonical's is `word`; None: the channel's own.

    The parts of a transition have bfloat16 at least: each number is within 2⁻⁸ of its magnitude.
    """
    return word if channel.rows is None or word is None else PART_DTYPE.name


# -------------------------------------------------------------------------------------------------------- chunks


def chunk_blob(chunk: Chunk, encoding: Encoding | None = None, expires: float | None = None) -> Blob:
    """Encodes a canonical as an object: local positions, every channel [T, K, H] of each layer, then residuals.

    Packed kv are stored as they are; a few-bit encoding packs kv that are not. The parts of a transition are channels
    like others, [R, K, W], which an encoding rounds to bfloat16.

    Raises:
      DtypeError: objects cannot hold a dtype.
      ShapeError: the chunk is a batch.
      InputError: as `chunk_body`.
    """
    word = None if encoding is None else encoding_word(encoding)
    if word is not None and few_bits(word) is not None and chunk.encoding is None and chunk.batch is None:
        chunk = encode_chunk(chunk, word)
    body = chunk_body(chunk)
    kv: dict[str, Any] = {}
    for name in chunk.layout.names:
        value: Any = chunk.kv[name]
        kv[name] = jax.tree.map(np.asarray, value)
    arrays: dict[str, np.ndarray] = {"local": np.asarray(chunk.local)}

    for layer, name, row in kept_by_layer(chunk.layout):
        value = kv[name]
        if not isinstance(value, np.ndarray):
            arrays |= {leaf: part[row] for leaf, part in leaves_of(value, f"layer.{layer}.{name}").items()}
        elif word is None:
            arrays[f"layer.{layer}.{name}"] = value[row]
        else:
            stored, scale = encode(value[row], dtype_for(chunk.layout.channel(name), word))
            arrays[f"layer.{layer}.{name}"] = stored
            if scale is not None:
                arrays[f"layer.{layer}.{name}.scale"] = scale

    for layer, states in sorted((chunk.hidden or {}).items()):
        arrays[f"hidden.{layer}"] = np.asarray(states)
    return checked_blob(Blob("kv", body, arrays, expires))


def chunk_body(chunk: Chunk) -> dict[str, Any]:
    """Returns the JSON description of a canonical, for its header.

    Raises:
      ShapeError: the chunk is a batch. InputError: its kv were decoded, or are packed in another encoding than it says.
    """
    if chunk.batch is not None:
        raise ShapeError(f"store: chunk {chunk.id!r}: got a batch of {chunk.batch}; expected one chunk per object")

    optional: dict[str, Any] = {} if chunk.lead is None else {"lead": chunk.lead}
    body = optional | {
        "id": chunk.id,
        "backbone": chunk.backbone,
        "span": int(chunk.span),
        "length": int(chunk.length),
        "layout": layout_body(chunk.layout),
        "dtypes": {name: str(chunk.kv[name].dtype) for name in chunk.layout.names},
        "hidden": None if chunk.hidden is None else sorted(int(layer) for layer in chunk.hidden),
        "content": chunk.content,
    }
    return body if chunk.encoding is None else body | _packed_fields(chunk, body)


def _packed_fields(chunk: Chunk, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that only the body of a canonical with packed kv has. Raises InputError as `chunk_body`."""
    forms: dict[str, PackedForm] = {}
    value: Any
    names = [channel.name for channel in chunk.layout.token_channels]
    for name in names:
        value = chunk.kv[name]
        if not is_packed(value):
            raise InputError(
                f"store: got chunk {brief(chunk.id)!r} decoded from {chunk.encoding}; expected its packed kv, or "
                "the chunk as it was prefilled"
            )
        forms[name] = form_of(value)
    fields = {"encoding": chunk.encoding, "groups": {name: forms[name].group for name in names}}
    encoding, expected = few_bits(chunk.encoding), None
    with contextlib.suppress(StoreCorruptError):  # groups that the encoding cannot have
        expected = None if encoding is None else kv_forms({**body, **fields}, chunk.layout, encoding)
    if expected != forms:
        raise InputError(
            f"store: got chunk {brief(chunk.id)!r} whose codes are not those of {chunk.encoding!r:.40}; expected kv "
            "that `encode_chunk` made"
        )
    return fields


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
    """Decodes a canonical's layout, and checks its fields and leaves against those of the format.

    Raises:
      StoreCorruptError: it has other fields or leaves. Any of `MALFORMED` for a malformed body.
    """
    return _layout_and_scales(body, leaves)[0]


def _layout_and_scales(body: Mapping[str, Any], leaves: Iterable[str]) -> tuple[KVLayout, bool]:
    """Returns the layout as `chunk_layout`, and whether a leaf holds the scales of a smaller dtype.

    The canonicals of a model are alike, so the last answers are remembered, by all that they depend on.
    """
    leaves = tuple(leaves)
    content = content_of_values(list(body), *map(body.get, ("dtypes", "layout", "hidden", "encoding")))
    check = _checked_layout if len(leaves) <= _KNOWN_LEAVES else _checked_layout.__wrapped__
    return check(content, leaves)


@functools.lru_cache(maxsize=64)
def _checked_layout(content: bytes, leaves: tuple[str, ...]) -> tuple[KVLayout, bool]:
    fields, dtypes, layout_fields, hidden, encoding = marshal.loads(content)
    body = dict.fromkeys(fields) | {"dtypes": dtypes, "layout": layout_fields}
    body |= {} if encoding is None else {"encoding": encoding}
    layout = body_layout(body)
    suffixes = ("scale",) if encoding is None else SUFFIXES
    parts: dict[str, Collection[int]] = {}
    for channel in layout.channels:
        kept = range(layout.layers) if channel.layers is None else frozenset(channel.layers)
        own = suffixes if channel.rows is None else ()
        names = (channel.name, *(f"{channel.name}.{suffix}" for suffix in own))
        parts |= dict.fromkeys(names, kept)

    # Goes through the leaves and not through the layers: a forged header may claim any number of layers.
    others: list[str] = []
    for leaf in leaves:
        word, _, rest = leaf.partition(".")
        number, _, part = rest.partition(".")
        if word != "layer" or part not in parts or not number.isdecimal() or int(number) not in parts[part]:
            others.append(leaf)

    expect_known("canonical with a leaf", others, ("local", *(f"hidden.{layer}" for layer in hidden or ())))
    return layout, any(leaf.endswith(".scale") for leaf in leaves)


def body_layout(body: Mapping[str, Any]) -> KVLayout:
    """Decodes a canonical's layout, and checks its fields. Raises as `chunk_layout`."""
    packed = kv_encoding(body) is not None
    expect_known("canonical with a field", body, PACKED_FIELDS if packed else CHUNK_FIELDS)
    expect_known("canonical of dtype", body["dtypes"].values(), _DTYPES)
    return layout_of(body["layout"])


def expect_part(body: Mapping[str, Any], part: str) -> None:
    """Checks that a canonical's body has the encoding that its part (`naming.part_of`) names.

    Raises:
      StoreCorruptError: it has another encoding.
    """
    named, own = few_bits(encoding_in(part)), kv_encoding(body)
    if named != own:
        raise StoreCorruptError(f"object: got encoding {own} in one named {part[-40:]}; expected the same")


def layer_names(layer: int, names: Iterable[str]) -> list[str]:
    """Returns the names of one layer's leaves, in the order of the file."""
    return [name for name in names if name.startswith(f"layer.{layer}.")]


def layer_of(body: Mapping[str, Any], layer: int, arrays: Arrays) -> dict[str, Any]:
    """Decodes one layer, {channel: [T, K, H]}, in its original dtype; packed channels stay packed.

    Raises:
      StoreCorruptError: the body does not match its arrays.
    """
    with decoding("layer"):
        values: dict[str, Any] = {}
        kept = _kept_at(body, layer)
        if (encoding := kv_encoding(body)) is not None:
            layout = layout_of(body["layout"])
            forms = kv_forms(body, layout, encoding)
            values = _packed_layer({name: forms[name] for name in kept if name in forms}, layer, arrays)
        for name in [name for name in kept if name not in values]:
            leaf, dtype = f"layer.{layer}.{name}", np.dtype(jnp.dtype(body["dtypes"][name]))
            values[name] = decode(arrays[leaf], arrays.get(f"{leaf}.scale"), dtype)
        return values


def _kept_at(body: Mapping[str, Any], layer: int) -> list[str]:
    """Returns the channels that a layer keeps."""
    kept = [(channel["name"], channel.get("layers")) for channel in body["layout"]["channels"]]
    return [name for name, layers in kept if layers is None or layer in layers]


def _packed_layer(forms: Mapping[str, PackedForm], layer: int, arrays: Arrays) -> dict[str, PackedArray]:
    """Returns the packed channels of one layer, [T, K, H] each."""
    values = {}
    for name, form in forms.items():
        values[name] = packed_of(arrays, f"layer.{layer}.{name}", form)
        if values[name].ndim != 3:
            raise ShapeError(f"object: got {name} of shape {values[name].shape}; expected [T, K, H]")
    return values


class _Form(NamedTuple):
    """What says that the kv of a chunk are views into the block of its leaves, and which ones.

    Objects of one form share it. It holds for the fields of the body that it was made from, and for leaves in the same
    places.
    """

    content: bytes
    part: str | None
    places: Mapping[str, int]
    layout: KVLayout
    views: Mapping[str, tuple[tuple[int, ...], np.dtype, int, tuple[int, ...]]]


def chunk_of(body: Mapping[str, Any], arrays: Arrays, part: str | None = None) -> Chunk:
    """Decodes a chunk that `chunk_blob` encoded, its arrays on the host.

    If the layers are evenly spaced in one buffer, kv are views into it. Values are not checked for NaN again: that was
    done when the chunk was made, and the checksums prove that they have not changed since.

    Args:
      part: the object's part (`naming.part_of`), whose encoding the chunk must have; None: any.

    Raises:
      StoreCorruptError: the body does not match its arrays, or `part`.
    """
    try:
        content = content_of_values(list(body), *map(body.get, ("dtypes", "layout", "hidden", "encoding")))
        form: _Form | None = arrays.memo.get("chunk") if isinstance(arrays, Leaves) else None
        # As the last object of this form: its layout, its leaves and their places were checked.
        if isinstance(arrays, Leaves) and form is not None and form[:3] == (content, part, arrays.places):
            kv: dict[str, Any] = {}
            for name, (shape, dtype, at, strides) in form.views.items():
                kv[name] = np.ndarray(shape, dtype, arrays.block, at, strides)
            return _assembled(body, form.layout, kv, arrays, of_form=True)
    except MALFORMED as error:
        raise malformed("chunk", error) from None
    return _decoded(body, arrays, part, content)


def _assembled(
    body: Mapping[str, Any], layout: KVLayout, kv: Mapping[str, Any], rest: Arrays, *, of_form: bool = False
) -> Chunk:
    """Makes the chunk of decoded kv, with the other fields of its body and its other leaves."""
    hidden, content, lead = body["hidden"], body.get("content"), body.get("lead")
    if not (content and type(content) is str and lead is None):
        content, lead = digest_in(body, "content"), digest_in(body, "lead")
    return unchecked_chunk(
        of_form=of_form,
        kv=kv,
        local=rest["local"],
        span=body["span"],
        length=body["length"],
        id=body["id"],
        layout=layout,
        backbone=body["backbone"],
        encoder=None,
        hidden=None if hidden is None else {layer: rest[f"hidden.{layer}"] for layer in hidden},
        content=content,
        lead=lead,
        encoding=body.get("encoding"),
    )


def _decoded(body: Mapping[str, Any], arrays: Arrays, part: str | None, content: bytes) -> Chunk:
    """Decodes a chunk as `chunk_of`, and notes its form if other objects may have the same."""
    if part is not None:
        expect_part(body, part)
    with decoding("chunk"):
        layout, reduced = _layout_and_scales(body, arrays)
        encoding = kv_encoding(body)
        for name, dtype in body["dtypes"].items() if encoding is None else ():
            first = layout.layers_of(name)[0]
            reduced = reduced or arrays[f"layer.{first}.{name}"].dtype != _DTYPES.get(dtype)

        rest, kv = arrays, dict[str, Any]()
        if encoding is not None:
            for channel in layout.parts:
                value = stack_layers(arrays, layout.layers_of(channel.name), channel.name)
                kv[channel.name] = decode(value, None, np.dtype(jnp.dtype(body["dtypes"][channel.name])))
            forms = kv_forms(body, layout, encoding)
            for name, form in forms.items():
                parts: dict[str, np.ndarray] = {}
                for leaf in form.leaves:
                    parts[f"{name}.{leaf}"] = stack_layers(arrays, layout.layers_of(name), f"{name}.{leaf}")
                kv[name] = packed_of(parts, name, form)
                if kv[name].ndim != 4:
                    raise ShapeError(f"object: got {name} of shape {kv[name].shape}; expected [L, T, K, H]")
        elif reduced:
            values = [layer_of(body, layer, arrays) for layer in range(layout.layers)]
            kv = {name: np.stack([values[layer][name] for layer in layout.layers_of(name)]) for name in layout.names}
            # Copied, because these few small views would keep the whole buffer alive.
            rest = {name: value.copy() for name, value in arrays.items() if not name.startswith("layer.")}
            for value in rest.values():
                value.flags.writeable = False
        else:
            for name in layout.names:
                kv[name] = stack_layers(arrays, layout.layers_of(name), name)

        chunk = _assembled(body, layout, kv, rest)
        if rest is arrays and isinstance(arrays, Leaves) and encoding is None:
            views = {}
            for name, value in kv.items():
                if value.base is arrays.block:
                    first = f"layer.{layout.layers_of(name)[0]}.{name}"
                    views[name] = value.shape, value.dtype, arrays.places[first], value.strides
            if len(views) == len(kv):
                arrays.memo["chunk"] = _Form(content, part, arrays.places, layout, views)
        return chunk


@functools.lru_cache(maxsize=64)
def canonical_of(part: str) -> Callable[[Mapping[str, Any], Arrays], Chunk]:
    """Returns a function that decodes as `chunk_of`, and refuses a chunk of another encoding than the part names."""
    return functools.partial(chunk_of, part=part)


def unchecked_chunk(*, of_form: bool = False, **fields: Any) -> Chunk:
    """Makes a chunk with checks of its shapes and not of its values, which would take a pass over them.

    Args:
      of_form: whether another chunk with kv of these shapes was made of the same layout.
    """
    chunk = object.__new__(Chunk)
    vars(chunk).update(fields, kv=PhaseFreeKV(fields["kv"]))
    if not of_form:
        fields["layout"].check(fields["kv"], "chunk")
        of_form = chunk.batch is None
    tokens = fields["kv"][fields["layout"].names[0]].shape[-3]
    if not of_form or len(chunk.local) != tokens or not 1 <= chunk.length <= tokens or chunk.span < 0:
        raise StoreCorruptError(f"chunk: got length {chunk.length}, span {chunk.span}; expected them within its kv")
    return chunk


def with_encoder(chunk: Chunk, output: np.ndarray | None) -> Chunk:
    """Returns the chunk with its encoder output, or without one."""
    return trusted(chunk, encoder=output)


# ------------------------------------------------------------------------------------------------ encoder outputs


def encoder_blob(id: str, backbone: str, output: np.ndarray | jax.Array, expires: float | None = None) -> Blob:
    """Encodes an encoder output, [T, D] or any other shape, as an object."""
    return checked_blob(Blob("encoder", {"id": id, "backbone": backbone}, {"encoder": np.asarray(output)}, expires))


def encoder_of(body: Mapping[str, Any], arrays: Arrays) -> np.ndarray:
    """Decodes an encoder output. Raises StoreCorruptError."""
    expect_known("encoder output with a field", body, ("id", "backbone"))
    expect_known("encoder output with a leaf", arrays, ("encoder",))
    if "encoder" not in arrays:
        raise StoreCorruptError("object: got no leaf 'encoder'; expected one")
    return arrays["encoder"]


# -------------------------------------------------------------------------------------------------------- checks


def checked_blob(blob: Blob) -> Blob:
    """Returns an object whose leaves have dtypes that objects can hold; else raises DtypeError."""
    for dtype in {array.dtype for array in blob.arrays.values()}:
        dtype_word(dtype)
    return blob


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raises StoreCorruptError in place of whatever a malformed body causes."""
    try:
        yield
    except MALFORMED as error:
        raise malformed(what, error) from None


def malformed(what: str, error: Exception) -> StoreCorruptError:
    """Returns the error for a body that is malformed. The cause may contain ids, so it is not part of the message."""
    kind = "it contradicts itself" if isinstance(error, KVPatchError) else type(error).__name__
    return StoreCorruptError(f"object: got a body that is no valid {what} ({kind}); expected a valid one")
