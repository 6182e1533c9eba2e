"""Chunks, patches and encoder outputs come back from their files bit for bit; other files' contents are refused."""

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, ChunkKey, Member, PatchMetadata, antecedent_of, identity
from kvpatch_jax.core import Channel, RaggedFactors
from kvpatch_jax.errors import InputError, ShapeError, StoreCorruptError
from kvpatch_jax.store import ChunkStore, codec
from kvpatch_jax.store.files import Encoded, Header, Stored, object_parts, parse_object
from kvpatch_jax.store.names import Names

ROPE = kvp.Rope(1e4, 16)
YARN = kvp.core.rope.Scaling("yarn", factor=4, original=64)
LONG = kvp.core.rope.Scaling("longrope", 2.0, 64, short_factor=(1.0,) * 8, long_factor=(2.5,) * 8, regime="long")
LOCAL = kvp.Rope(30.0, 4, cached="pairs", width=6, scaling=kvp.core.rope.Scaling("linear", factor=2.0))
UNLIKE = Channel("k", 1, 16, 16, layers=(1,)), Channel("k_local", 2, 6, 4, LOCAL, (0, 2)), Channel("v", 2, 6)
GQA = kvp.KVLayout.gqa(3, 2, 16, ROPE)
LAYOUTS = {
    "gqa": GQA,
    "mla": kvp.KVLayout.mla(2, 32, 16, rope=dataclasses.replace(ROPE, scaling=YARN)),
    "three axes": kvp.KVLayout.gqa(2, 2, 16, dataclasses.replace(ROPE, sections=(2, 3, 3))),
    "longrope": kvp.KVLayout.mha(2, 2, 16, dataclasses.replace(ROPE, scaling=LONG, angles="float32")),
    "hybrid": kvp.KVLayout.gqa(5, 2, 16, ROPE).with_transitions((0, 1, 3), 3, 6, 4, tail=(3, 10)),
    "unlike layers": kvp.KVLayout("gqa", 3, UNLIKE, ROPE),
}
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8": ml_dtypes.float8_e4m3fn}
HEADER = Header("a tenant", "a name", 3)


def chunk_of(layout: kvp.KVLayout = GQA, tokens: int = 9, dtype: Any = np.float32, **options: Any) -> kvp.Chunk:
    rng, kv = np.random.default_rng(tokens), {}
    for channel in layout.channels:
        shape = (layout.depth(channel.name), channel.rows_for(tokens), channel.heads, channel.width)
        kv[channel.name] = rng.standard_normal(shape).astype(dtype if channel.rows is None else np.float32)
    local = np.arange(tokens, dtype=np.float32)
    local = local if layout.rope.axes is None else np.stack([local * 0, local, local / 2], -1)
    return kvp.Chunk(kv, local, tokens, tokens - 1, options.pop("id", "page"), layout, "tiny", **options)


def patch_for(chunk: kvp.Chunk, rank: int = 2, dtype: str | None = None, **fields: Any) -> kvp.Patch:
    rng, factors = np.random.default_rng(rank), {}
    for channel in chunk.layout.channels:
        depth, rows = chunk.layout.depth(channel.name), channel.rows_for(chunk.tokens)
        shapes = (depth, rows, rank), (depth, rank, channel.features)
        factors[channel.name] = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    behind = antecedent_of(fields.pop("antecedent", ("A",)))
    own = {name: fields.pop(name) for name in list(fields) if name in ("lead", "places", "content")}
    key = ChunkKey(chunk.id, "tiny", chunk.layout, encoding=chunk.encoding, **own)
    patch = kvp.Patch(factors, PatchMetadata(key, behind, tuple(range(chunk.layout.layers)), **fields))
    return patch if dtype is None else kvp.quantise(patch, dtype)


def ragged(chunk: kvp.Chunk, dtype: str | None = None) -> kvp.Patch:
    """Ranks 3, 0 and 1 of the three layers, their directions in an order of their own."""
    rng, factors = np.random.default_rng(0), dict[str, Any]()
    for channel in chunk.layout.channels:
        u, v = (jnp.asarray(rng.standard_normal((4, size)), jnp.float32) for size in (chunk.tokens, channel.features))
        factors[channel.name] = RaggedFactors(u, v, jnp.asarray([[2, 0, 3], [4, 4, 4], [1, 4, 4]], jnp.int32))
    patch = kvp.Patch(factors, patch_for(chunk).metadata)
    return patch if dtype is None else kvp.quantise(patch, dtype)


def through_a_file(encoded: Encoded) -> Stored:
    return parse_object(np.frombuffer(b"".join(object_parts(encoded, HEADER)), np.uint8))[1]


def same(first: Any, second: Any) -> bool:
    """Bit for bit, with dtypes, shapes and all that says how packed arrays are read."""
    (leaves, form), (others, other_form) = jax.tree.flatten(first), jax.tree.flatten(second)
    is_alike = form == other_form
    for leaf, other in zip(leaves, others, strict=True):
        leaf, other = np.asarray(leaf), np.asarray(other)
        is_alike &= (leaf.dtype, leaf.shape, leaf.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return is_alike


def same_chunk(first: kvp.Chunk, second: kvp.Chunk) -> bool:
    arrays = ("kv", "local")
    fields = [field.name for field in dataclasses.fields(kvp.Chunk) if field.name not in arrays]
    is_alike = all(getattr(first, field) == getattr(second, field) for field in fields)
    return is_alike and all(same(getattr(first, name), getattr(second, name)) for name in arrays)


# ------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_come_back_bit_for_bit(layout, dtype):
    words = {"lead": "a lead", "content": "what it shows", "id": np.str_("é \U0001f600 \ud800")}
    for options in ({}, words):
        chunk = chunk_of(LAYOUTS[layout], dtype=DTYPES[dtype], **options)
        encoded = codec.encode_chunk_object(chunk)
        for stored in (through_a_file(encoded), Stored(*encoded)):  # from the disk, and from the queue
            back = codec.decode_chunk_object(stored)
            assert same_chunk(back, chunk)
            assert list(back.kv) == list(chunk.layout.names)
            assert not any(leaf.flags.writeable for leaf in jax.tree.leaves([back.kv, back.local]))


@pytest.mark.parametrize("layout", ["gqa", "hybrid", "unlike layers"])
def test_few_bits_come_back_as_they_were_packed(layout):
    word = {"gqa": "k3v5gall", "hybrid": "k4v4g32", "unlike layers": "k7v1g99999"}[layout]
    chunk = chunk_of(LAYOUTS[layout], tokens=41, lead="a lead")
    packed = kvp.encode_chunk(chunk, word)
    for source, encoding in ((chunk, word), (packed, None), (packed, word)):
        encoded = codec.encode_chunk_object(source, encoding)
        assert same_chunk(codec.decode_chunk_object(through_a_file(encoded)), packed)
    padded = packed.pad(50)
    back = codec.decode_chunk_object(through_a_file(codec.encode_chunk_object(padded)))
    assert same(kvp.cache.decode_chunk(back).kv, kvp.cache.decode_chunk(padded).kv)
    assert (back.length, back.tokens, back.content, back.encoding) == (40, 50, chunk.content, word)


CHUNK = chunk_of(tokens=40)
PACKED = kvp.encode_chunk(CHUNK, "k4v4")
BLIND = identity("A", "bare")
PATCHES = {
    **{dtype: patch_for(CHUNK, 5, dtype) for dtype in ("bfloat16", "int8", "float8_e4m3fn", "int3g16")},
    "dense": kvp.Patch({"v": jnp.ones((3, 40, 2, 16))}, patch_for(CHUNK).metadata),
    "no factors": kvp.Patch({}, patch_for(CHUNK).metadata),
    "ragged": ragged(CHUNK),
    "ragged, int8": ragged(CHUNK, "int8"),
    "ragged, few bits": ragged(PACKED, "int4"),
    "some layers": kvp.keep_layers(ragged(CHUNK, "int4"), [0, 2]),
    "padded": patch_for(CHUNK, 5, dtype="int8").pad(50),
    "hybrid": patch_for(chunk_of(LAYOUTS["hybrid"]), dtype="int8"),
    "three axes": patch_for(chunk_of(LAYOUTS["three axes"])),
    "orbit": patch_for(CHUNK, antecedent=[Member("A", "one"), Member("B")], orbit=True, lead="a lead"),
    "blind": patch_for(CHUNK, antecedent=[Member("A", "one", BLIND), Member("C", None, BLIND)], places="ab" * 8),
    "removal": patch_for(CHUNK, base="conditioned", base_antecedent=Antecedent.of(Member("A", "one"))),
    "correction": patch_for(CHUNK, corrects="d" * 32, content="what it shows"),
}


@pytest.mark.parametrize("case", PATCHES)
def test_patches_come_back_bit_for_bit(case):
    patch = PATCHES[case]
    encoded = codec.encode_patch_object(patch)
    for stored in (through_a_file(encoded), Stored(*encoded)):  # from the disk, and from the queue
        back = codec.patch_of(codec.decode_patch_parts(stored))
        assert back.metadata == patch.metadata
        assert same(back.factors, patch.factors)
        assert (back.ranks, back.nbytes, back.tokens) == (patch.ranks, patch.nbytes, patch.tokens)


def test_encoder_outputs_of_any_shape_come_back():
    for shape in ((5, 3), (), (0, 4), (2, 3, 4, 5)):
        output = np.full(shape, 0.7).astype(ml_dtypes.bfloat16)
        assert same(codec.decode_encoder(through_a_file(codec.encode_encoder("page", "tiny", output))), output)


def test_any_reader_of_safetensors_finds_the_arrays():
    encoded = codec.encode_chunk_object(chunk_of())
    leaves = dict(safetensors.deserialize(b"".join(object_parts(encoded, HEADER))))
    assert {name for name in leaves if "pad" not in name} == {"local", "k", "v"}
    assert leaves["k"] == {"shape": [3, 9, 2, 16], "dtype": "F32", "data": encoded.arrays["k"].tobytes()}
    packed = dict(safetensors.deserialize(b"".join(object_parts(codec.encode_chunk_object(PACKED), HEADER))))
    assert {name for name in packed if name.startswith("k.")} == {"k.plane4", "k.scale", "k.least"}
    # Byte j of a row has the codes of columns j and j + 16, the second in its upper half.
    plane = np.frombuffer(packed["k.plane4"]["data"], np.uint8).reshape(3, 40, 16)
    codes = np.concatenate([plane & 15, plane >> 4], -1).astype(np.float32)
    steps = {}
    for leaf in ("scale", "least"):
        values = np.frombuffer(packed[f"k.{leaf}"]["data"], ml_dtypes.bfloat16).reshape(3, 2, 32).astype(np.float32)
        steps[leaf] = np.repeat(values, 32, axis=1)[:, :40]
    numbers = steps["least"] + steps["scale"] * codes
    assert np.allclose(numbers, np.asarray(PACKED.kv["k"], np.float32).reshape(3, 40, 32), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------- what is refused

ODD = kvp.KVLayout("gqa", 3, (Channel("k", 2, 16, 16), Channel("local", 2, 16)), ROPE)


def test_chunks_that_no_object_can_hold_are_refused(tmp_path: Path):
    kv, decoded = {name: np.ones((3, 2, 9, 2, 16), np.float32) for name in "kv"}, kvp.cache.decode_chunk(PACKED)
    batch = kvp.Chunk(kv, np.arange(9.0), 9, 9, "B", GQA, "tiny")
    for chunk, encoding in (
        *((CHUNK, "k9v4"), (PACKED, "k8v8"), (decoded, None), (chunk_of(ODD), None)),
        (dataclasses.replace(PACKED, encoding="k8v8g32"), None),
    ):
        with pytest.raises(InputError):
            codec.encode_chunk_object(chunk, encoding)
    with pytest.raises(ShapeError, match="batch of 2"):
        codec.encode_chunk_object(batch)
    with ChunkStore(tmp_path) as store, pytest.raises(ShapeError, match="dtype complex64"):
        store.put_encoder("page", "tiny", np.ones(3, np.complex64))


def forged(encoded: Encoded, path: str, value: Any) -> Encoded:
    """An object with another value at a path through its body; None deletes it."""
    body = copy.deepcopy(dict(encoded.body))
    *above, last = path.split("/")
    table: Any = body
    for word in above:
        table = table[word]
    table.pop(last) if value is None else table.update({last: value})
    return encoded._replace(body=body)


SECRET = "an id that nobody may read"
BEHIND = [Member(SECRET, "one")]
PAGE = chunk_of(id=SECRET)
OBJECTS = {
    "chunk": (codec.encode_chunk_object(PAGE), codec.decode_chunk_object),
    "packed": (codec.encode_chunk_object(PAGE, "k4v4"), codec.decode_chunk_object),
    "patch": (codec.encode_patch_object(patch_for(PAGE, 2, "int4", antecedent=BEHIND)), codec.decode_patch_parts),
    "ragged": (codec.encode_patch_object(ragged(PAGE, "int8")), codec.decode_patch_parts),
    "encoder": (codec.encode_encoder(SECRET, "tiny", np.ones(3)), codec.decode_encoder),
}
LATER = [
    *(("chunk", "quality", 1), ("packed", "encoding", "k4v4g32x2"), ("packed", "packed/k/dtype", "float4")),
    *(("patch", f"metadata/{field}", "new") for field in ("base", "frame", "mask", "encoding")),
    *(("packed", "packed/k/zero", 3), ("patch", "forms/k", ["u", "v", "core"]), ("encoder", "quality", 1)),
]


def test_words_of_later_versions_are_told_from_damage():
    encoded, _ = OBJECTS["chunk"]
    layout: str = encoded.body["layout"]
    attempts = [(forged(OBJECTS[kind][0], path, value), OBJECTS[kind][1]) for kind, path, value in LATER]
    for old, new in (('"gqa"', '"sparse"'), ('"half"', '"thirds"'), ('"theta"', '"base"')):
        attempts.append((forged(encoded, "layout", layout.replace(old, new)), codec.decode_chunk_object))
    attempts.append((encoded._replace(arrays={**encoded.arrays, "k.zero": np.ones(3)}), codec.decode_chunk_object))
    for attempt, decode in attempts:
        with pytest.raises(StoreCorruptError) as refused:
            decode(Stored(*attempt))
        assert refused.value.other_format


@pytest.mark.parametrize("kind", OBJECTS)
def test_whatever_a_malformed_body_holds_is_damage_without_ids(kind):
    """Any value in any place of the body, and any leaf of another shape or dtype: an error of the store, or a value."""
    encoded, decode = OBJECTS[kind]
    values: list[Any] = [None, 0, -1, 1 << 62, 2.5, True, "", "x", [], [1], {}, [["x", None, "y"]], float("nan")]
    paths = [f"{key}" for key in encoded.body]
    paths += [f"{key}/{name}" for key, table in encoded.body.items() if isinstance(table, dict) for name in table]
    paths += [f"packed/{name}/{word}" for name, form in encoded.body.get("packed", {}).items() for word in form]
    attempts = [forged(encoded, path, value) for path in paths for value in values]
    for name, array in encoded.arrays.items():
        others = [array[..., :1], array.astype(np.float64), array[None], array.reshape(-1), np.zeros(0, np.uint8)]
        attempts += [encoded._replace(arrays={**encoded.arrays, name: other}) for other in others]
        attempts.append(encoded._replace(arrays={key: encoded.arrays[key] for key in encoded.arrays if key != name}))
    refusals = []
    for attempt in random.Random(0).sample(attempts, min(len(attempts), 400)):
        try:
            decode(Stored(*attempt))
        except StoreCorruptError as error:
            refusals.append(error)
    assert refusals
    for error in refusals:
        assert SECRET not in str(error)
        assert error.__suppress_context__ or error.__context__ is None


# ------------------------------------------------------------------------------------------------------------- names


def test_an_object_names_itself_under_other_keys():
    one, other = Names("one", b"s" * 32), Names("other", b"t" * 32)
    chunk, output = chunk_of(lead="a lead"), codec.encode_encoder("page", "tiny", np.ones(3))
    encoded = codec.encode_chunk_object(chunk, "k4v4")
    for names in (one, other):
        assert codec.name_of(names, encoded) == names.canonical("tiny", "page", "k4v4", "a lead")
        assert codec.name_of(names, through_a_file(output)) == names.encoder("tiny", "page")
        for patch in PATCHES.values():
            assert codec.name_of(names, through_a_file(codec.encode_patch_object(patch))) == names.patch(patch)
    assert one.chunk("tiny", "page") != other.chunk("tiny", "page")
    assert one.tenant != other.tenant


@pytest.mark.usefixtures("unchecked")
def test_names_of_other_types_are_refused():
    names = Names("one", b"s" * 32)
    wrong: list[Any] = [("tiny", ["page"]), ("tiny", 3), (["tiny"], "page"), ("", "page"), ("tiny", "page", ["k4v4"])]
    for arguments in [*wrong, ("tiny", "page", None, 3)]:
        with pytest.raises(InputError):
            names.canonical(*arguments)
    for tenant, secret in (("", b"s" * 32), (3, b"s" * 32), ("one", b"short"), ("one", "s" * 32)):
        with pytest.raises(InputError):
            Names(tenant, secret)  # pyright: ignore[reportArgumentType]
