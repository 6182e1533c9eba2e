"""Chunks, patches, bases and encoder outputs as objects: a body of JSON's types, and one leaf per array.

| kind | leaves |
|---|---|
| chunk | `local`; each channel [L, T, K, H], of a transition's part [L, R, K, W] |
| patch | `<channel>.u`, `.v` with layers stacked, or `.dense`; `.rows` of ranks by layer; `.scale` if quantised |
| encoder | `output`: a tower's output, or a channel's directions of a basis |

A packed array, such as a channel in few bits, has the leaves `.plane<width>`, `.scale` and `.least` behind its name.
"""

import contextlib
import dataclasses
import functools
import json
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import (
    Chunk,
    ChunkKey,
    Member,
    Patch,
    PatchMetadata,
    antecedent_of,
    check_factors,
    encode_chunk,
    trusted_patch,
)
from ..core import (
    BITS,
    AnyArray,
    KVEncoding,
    KVLayout,
    PackedArray,
    PhaseFreeKV,
    RaggedFactors,
    is_low_rank,
    is_packed,
    on_device,
    plane_widths,
)
from ..errors import InputError, KVPatchError, ShapeError, StoreCorruptError
from .files import DTYPES, Encoded, Stored
from .names import Encoding, Names, encoding_word

_FLOATS = {str(dtype): dtype for dtype in DTYPES.values() if jnp.issubdtype(dtype, jnp.floating)}
_SCALED = [dtype for dtype in DTYPES.values() if dtype.itemsize == 1 and dtype not in (np.uint8, np.bool_)]
_WORD = (str, type(None))
_CHUNK_FIELDS: Mapping[str, tuple[type, ...]] = {
    **{"id": (str,), "backbone": (str,), "span": (int,), "length": (int,)},
    **{"content": _WORD, "lead": _WORD, "encoding": _WORD},
}
"""Fields of a chunk that its body holds as they are, with their types; beside them `layout` and `packed`."""


@contextlib.contextmanager
def decoding(kind: str) -> Iterator[None]:
    """Raises StoreCorruptError in place of whatever a malformed body causes; no message holds an id."""
    try:
        yield
    except StoreCorruptError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, KVPatchError) as error:
        cause = "it contradicts itself" if isinstance(error, KVPatchError) else type(error).__name__
        raise StoreCorruptError(f"object: got a body that is no valid {kind} ({cause}); expected a valid one") from None


def _expect_known(names: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raises StoreCorruptError for names of fields, leaves or words that are not known."""
    if unknown := set(names).difference(known):
        # A later version of the format may have it.
        found = sorted(unknown)[0][:40]
        raise StoreCorruptError(f"object: got {found!r}; expected fields and words of the format", other_format=True)


# --------------------------------------------------------------------------------------------- values of type hints


def _instance[T](kind: type[T], fields: Mapping[str, Any]) -> T:
    """Makes an instance of a dataclass from fields as JSON holds them, by its type hints.

    Raises:
      StoreCorruptError: a field or word that it does not have. KeyError, TypeError, ValueError: it is malformed.
    """
    hints = _hints_of(kind)
    _expect_known(fields, hints)
    return kind(**{name: _value_of(hint, fields[name]) for name, hint in hints.items()})


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = Member._fields if kind is Member else [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}


def _value_of(hint: Any, value: Any) -> Any:
    """Converts a value as JSON holds it to a type hint: of words, numbers, tuples, dataclasses, or one of several."""
    if type(value) is hint:
        return value
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in options:
            return options[options.index(value)]
        if isinstance(value, str):
            _expect_known([value])
    elif origin in (Union, types.UnionType):
        if type(value) in options:
            return value
        (other,) = [option for option in options if option not in (int, float, type(None))]
        return _value_of(other, value)
    elif origin is tuple and isinstance(value, list | tuple):
        hints = [options[0]] * len(value) if options[-1] is Ellipsis else options
        return tuple([_value_of(*pair) for pair in zip(hints, value, strict=True)])
    elif hint is Member:
        return Member(*[_value_of(*pair) for pair in zip(_hints_of(Member).values(), value, strict=True)])
    elif dataclasses.is_dataclass(hint):
        return _instance(hint, value)  # pyright: ignore[reportArgumentType]
    elif isinstance(value, hint) and not isinstance(value, bool):  # NumPy's words, of what was not written yet
        return value
    raise TypeError(f"got a {type(value).__name__}; expected {hint}")


# --------------------------------------------------------------------------------------------------------- chunks


def encode_chunk_object(chunk: Chunk, encoding: Encoding | None = None) -> Encoded:
    """Encodes a canonical. An encoding packs kv that are not packed yet.

    Raises:
      ShapeError: objects cannot hold a dtype; the chunk is a batch.
      InputError: the encoding is unknown, or the chunk has another one, or was decoded, so that its codes are lost.
    """
    word = encoding_word(encoding)
    if chunk.batch is not None:
        raise ShapeError(f"store: got a batch of {chunk.batch} chunks; expected one chunk per object")
    if chunk.encoding is not None and word not in (None, chunk.encoding):
        raise InputError(f"store: got a chunk encoded as {chunk.encoding}; expected {word}")
    if chunk.encoding is None and word is not None:
        chunk = encode_chunk(chunk, word)
    if encoding_word(chunk.encoding) != chunk.encoding or (chunk.encoding is not None and not _has_encoding(chunk)):
        raise InputError(
            f"store: got a chunk decoded from {chunk.encoding}, or of other bits; expected packed kv "
            "as `encode_chunk` makes them, or the chunk as it was prefilled"
        )
    if any(name == "local" or "." in name for name in chunk.layout.names):
        raise InputError(f"store: got channels {chunk.layout.names}; expected none called local, and no dots")

    body: dict[str, Any] = {field: getattr(chunk, field) for field in _CHUNK_FIELDS}
    body |= {"span": int(chunk.span), "length": int(chunk.length), "layout": _layout_text(chunk.layout), "packed": {}}
    arrays = {"local": np.asarray(chunk.local)}
    for name in chunk.layout.names:
        _add_array(arrays, body["packed"], name, chunk.kv[name])
    return Encoded("chunk", body, arrays)


def decode_chunk_object(stored: Stored) -> Chunk:
    """Decodes a canonical; its arrays are views. Numbers are not examined: the checksums say that they are as put.

    Raises:
      StoreCorruptError: the body does not match its arrays; a later version's.
    """
    with decoding("chunk"):
        body, leaves = dict(stored.body), dict(stored.arrays)
        layout, packed = _layout_of(body.pop("layout")), body.pop("packed")
        fields = {name: body.pop(name) for name in _CHUNK_FIELDS}
        for name, value in fields.items():
            if not isinstance(value, _CHUNK_FIELDS[name]) or isinstance(value, bool):
                raise StoreCorruptError(f"object: got a chunk's {name} of another type; expected a word or number")
        kv, local = {name: _take_array(leaves, packed, name) for name in layout.names}, leaves.pop("local")
        _expect_known([*body, *leaves])

        chunk = object.__new__(Chunk)
        fields |= {"kv": PhaseFreeKV(kv), "local": local, "layout": layout, "encoder": None}
        vars(chunk).update(fields)
        layout.check(kv, "chunk")
        axes = () if layout.rope.axes is None else (layout.rope.axes,)
        if chunk.batch is not None or local.shape != (chunk.tokens, *axes):
            raise StoreCorruptError("object: got local positions of another shape; expected one for each token")
        if not 1 <= chunk.length <= chunk.tokens or chunk.span < 0 or "" in (chunk.id, chunk.content, chunk.lead):
            raise StoreCorruptError(f"object: got length {chunk.length}, span {chunk.span}; expected them within kv")
        if (packed or chunk.encoding is not None) and not _has_encoding(chunk):
            raise StoreCorruptError("object: got packed kv of another encoding; expected that of the chunk")
        return chunk


def _has_encoding(chunk: Chunk) -> bool:
    """Returns whether kv are packed in the bits of the chunk's encoding, all rows of tokens and nothing else."""
    if chunk.encoding is None:
        return False
    encoding = _encoding_of(chunk.encoding)
    for channel in chunk.layout.channels:
        value: Any = chunk.kv[channel.name]
        if is_packed(value) != (channel.rows is None):
            return False
        if is_packed(value) and (value.bits, value.axis) != encoding.of_channel(channel):
            return False
    return True


@functools.cache
def _encoding_of(word: str) -> KVEncoding:
    """Returns the encoding of a word in an object. Raises StoreCorruptError."""
    try:
        encoding = KVEncoding.of(word)
    except InputError:
        encoding = None
    if encoding is None or str(encoding) != word:
        raise StoreCorruptError(
            f"object: got encoding {word[:40]!r}; expected a word such as 'k4v4g32'", other_format=True
        )
    return encoding


@functools.lru_cache(maxsize=64)
def _layout_text(layout: KVLayout) -> str:
    return json.dumps(dataclasses.asdict(layout))


@functools.lru_cache(maxsize=64)
def _layout_of(text: str) -> KVLayout:
    """Decodes a layout. Building and checking one takes longer than reading a small object, so the last are kept."""
    return _instance(KVLayout, json.loads(text))


# -------------------------------------------------------------------------------------------------- packed arrays


@dataclasses.dataclass(frozen=True)
class _PackedForm:
    """How to read the leaves of a packed array: the fields of `PackedArray` that are no arrays."""

    bits: int
    group: int
    axis: Literal[-1, -2]
    columns: int
    heads: int | None
    dtype: str


def _add_array(arrays: dict[str, np.ndarray], packed: dict[str, Any], name: str, value: Any) -> None:
    """Adds an array's leaf, or the leaves of a packed one, whose form is noted in `packed`."""
    if not is_packed(value):
        arrays[name] = np.asarray(value)
        return
    rows = value.planes[0].shape[-2]
    # A cut array may have groups that end beyond it; they decode to the same numbers when they end with it.
    group = min(value.group, rows if value.axis == -2 else value.columns)
    form = _PackedForm(value.bits, group, value.axis, value.columns, value.heads, str(value.dtype))  # pyright: ignore
    packed[name] = dataclasses.asdict(form)
    for width, plane in zip(plane_widths(value.bits), value.planes, strict=True):
        arrays[f"{name}.plane{width}"] = np.asarray(plane)
    arrays[f"{name}.scale"] = np.asarray(value.scale)
    if value.least is not None:
        arrays[f"{name}.least"] = np.asarray(value.least)


def _take_array(leaves: dict[str, np.ndarray], packed: Mapping[str, Any], name: str) -> Any:
    """Takes an array's leaf out of `leaves`, or makes a packed one of several.

    Shapes are checked, because decoding allocates for them.
    """
    if name not in packed:
        return leaves.pop(name)
    form = _instance(_PackedForm, packed[name])
    _expect_known([form.dtype], _FLOATS)
    scale, least = leaves.pop(f"{name}.scale"), leaves.pop(f"{name}.least", None)
    heads = 1 if form.heads is None else form.heads
    # Codes about zero have no single bit.
    if form.bits not in BITS[least is None :] or min(form.group, form.columns, heads) < 1 or form.columns % heads:
        raise StoreCorruptError("object: got a packed array of an impossible form; expected that of its codes")

    widths = plane_widths(form.bits)
    planes = tuple([leaves.pop(f"{name}.plane{width}") for width in widths])
    *leading, rows, _ = planes[0].shape
    along = rows if form.axis == -2 else form.columns
    groups = -(-along // form.group)
    shapes = [(*leading, rows, -(-form.columns * width // 8)) for width in widths]
    expected = (*leading, groups, form.columns) if form.axis == -2 else (*leading, rows, groups)
    # Codes of 8 bits may be numbers with a float32 scale for each slice (`PackedArray.scaled`).
    codes, kind = planes[0].dtype, jnp.bfloat16
    if form.bits == 8 and form.group == along and least is None and codes in _SCALED:
        kind = np.float32
    is_fit = [plane.shape for plane in planes] == shapes
    is_fit = is_fit and all(plane.dtype == (np.uint8 if kind == jnp.bfloat16 else codes) for plane in planes)
    for value in (scale,) if least is None else (scale, least):
        is_fit = is_fit and value.shape == expected and value.dtype == kind
    if not is_fit or form.group > along:
        raise StoreCorruptError("object: got a packed array whose leaves do not fit its form; expected them to")
    options = (form.bits, form.group, form.axis, form.columns, form.heads, _FLOATS[form.dtype])
    return PackedArray(planes, scale, least, *options)


# -------------------------------------------------------------------------------------------------------- patches


def encode_patch_object(patch: Patch) -> Encoded:
    """Encodes a patch. Of one in a shared basis only the coefficients: the directions are stored once, with the basis.

    Raises:
      ShapeError: objects cannot hold a dtype; the patch is of a batch of chunks.
    """
    metadata = patch.metadata
    if patch.batch is not None:
        raise ShapeError(f"store: got a batch of {patch.batch} patches; expected one per object")
    arrays, forms, packed = dict[str, np.ndarray](), dict[str, list[str]](), dict[str, Any]()
    for name, factors in patch.factors.items():
        if isinstance(factors, RaggedFactors):
            parts: dict[str, Any] = {"u": factors.u, "v": factors.v, "rows": np.asarray(factors.rows, np.int32)}
        elif is_low_rank(factors):
            parts = dict(zip(("u", "v"), factors, strict=True))
            if metadata.basis is not None:
                del parts["v"]
        else:
            parts = {"dense": factors}
        forms[name] = list(parts)
        for part, value in parts.items():
            _add_array(arrays, packed, f"{name}.{part}", value)

    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(PatchMetadata)}
    chunk = {field.name: getattr(metadata.chunk, field.name) for field in dataclasses.fields(ChunkKey)}
    fields["chunk"] = {**chunk, "layout": _layout_text(metadata.chunk.layout)}
    for word in ("antecedent", "base_antecedent"):
        fields[word] = None if fields[word] is None else {"members": fields[word].members}
    return Encoded("patch", {"metadata": fields, "forms": forms, "packed": packed}, arrays)


type PatchParts = tuple[dict[str, Any], PatchMetadata]


def decode_patch_parts(stored: Stored) -> PatchParts:
    """Decodes a patch's factors, on the host, and its metadata.

    The directions of a patch in a shared basis are NaN until `patching.with_basis` inserts them.

    Raises:
      StoreCorruptError: the body does not match its arrays; a later version's.
    """
    with decoding("patch"):
        body, leaves = dict(stored.body), dict(stored.arrays)
        fields, forms, packed = body.pop("metadata"), body.pop("forms"), body.pop("packed")
        chunk = {**fields["chunk"], "layout": _layout_of(fields["chunk"]["layout"])}
        metadata = _instance(PatchMetadata, {**fields, "chunk": chunk})
        for antecedent in (metadata.antecedent, metadata.base_antecedent or metadata.antecedent):
            antecedent_of(antecedent.members)
        if metadata.chunk.encoding is not None:
            _encoding_of(metadata.chunk.encoding)
        factors: dict[str, Any] = {}
        for name, parts in forms.items():
            _expect_known(parts, ("u", "v", "rows", "dense"))
            values = {}
            for part in parts:
                values[part] = _take_array(leaves, packed, f"{name}.{part}")
            factors[name] = _factors_of(name, values, metadata)
        _expect_known([*body, *leaves])
        check_factors(factors, metadata)
        return factors, metadata


def patch_of(parts: PatchParts) -> Patch:
    """Makes a patch of its parts, the factors on the default device."""
    factors, metadata = parts
    return trusted_patch(jax.tree.map(on_device, factors), metadata)


def _factors_of(name: str, parts: dict[str, Any], metadata: PatchMetadata) -> Any:
    """Makes a channel's factors of their parts."""
    if set(parts) == {"u", "v", "rows"}:
        u, v, rows = parts["u"], parts["v"], parts["rows"]
        count = v.shape[0]
        # More directions of a layer than there are would take far more memory than the file.
        is_fit = rows.dtype == np.int32 and rows.ndim == 2 and rows.shape[1] <= max(count, 1)
        if not is_fit or (rows.size and not 0 <= rows.min() <= rows.max() <= count):
            raise StoreCorruptError(f"object: got rows of {count} directions; expected int32 [L, M], each 0 to {count}")
        return RaggedFactors(u, v, rows)
    if set(parts) == {"u", "v"}:
        return parts["u"], parts["v"]
    if set(parts) == {"dense"}:
        return parts["dense"]
    if set(parts) != {"u"} or metadata.basis is None:
        raise StoreCorruptError(f"object: got factors {sorted(parts)[:4]}; expected u and v, with rows, or dense")
    form = (len(metadata.layers), parts["u"].shape[-1], metadata.chunk.layout.channel(name).features)
    return parts["u"], np.broadcast_to(np.float32(np.nan), form)


# ----------------------------------------------------------------------------------------- encoder outputs


def encode_encoder(id: str, backbone: str, output: AnyArray) -> Encoded:
    """Encodes an encoder output, [T, D] or any other shape."""
    return Encoded("encoder", {"id": id, "backbone": backbone}, {"output": np.asarray(output)})


def decode_encoder(stored: Stored) -> np.ndarray:
    """Decodes an encoder output. Raises StoreCorruptError."""
    with decoding("encoder output"):
        _expect_known([*stored.body, *stored.arrays], ("id", "backbone", "output"))
        return stored.arrays["output"]


def is_of(stored: Stored | Encoded, ids: Collection[str] | None) -> bool:
    """Returns whether an object is a canonical, an encoder output or a patch of one of these chunks; None: of any."""
    if ids is None:
        return True
    return (stored.body["metadata"]["chunk"] if stored.kind == "patch" else stored.body).get("id") in ids


def name_of(names: Names, stored: Stored | Encoded) -> str:
    """Names an object under a tenant's keys from what it says of itself, as for a root of another secret.

    Raises:
      StoreCorruptError: its body is malformed.
    """
    body = stored.body
    with decoding(stored.kind):
        if stored.kind == "chunk":
            return names.canonical(body["backbone"], body["id"], body["encoding"], body["lead"])
        if stored.kind == "encoder":
            return names.encoder(body["backbone"], body["id"])
        if stored.kind == "entry":
            return names.entry(body["library"], *body["fields"], version=body["version"])
        factors, metadata = decode_patch_parts(Stored(stored.kind, body, stored.arrays))
        # Of host arrays or their shapes, which were checked: names need no factors on a device.
        patch = object.__new__(Patch)
        vars(patch).update(factors=factors, metadata=metadata)
        return names.patch(patch)
