"""What a store returns is what was put, bit for bit: chunks, patches and encoder outputs of every form.

From the queue, from the disk, and from a snapshot in another tenant's root.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

import kvpatch_jax as kvp
from kvpatch_jax.cache import Member, identity
from kvpatch_jax.core import Channel, RaggedFactors
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.store import ChunkStore
from tests.shared.arrays import placed
from tests.store.store_cases import KEY, LAYOUT, MODEL, chunk_of, file_of, locked_index, patch_for, same, same_chunk

ROPE = kvp.Rope(1e4, 16)
YARN = kvp.core.rope.Scaling("yarn", factor=4, original=64)
LONG = kvp.core.rope.Scaling("longrope", 2.0, 64, short_factor=(1.0,) * 8, long_factor=(2.5,) * 8, regime="long")
LOCAL = kvp.Rope(30.0, 4, cached="pairs", width=6, scaling=kvp.core.rope.Scaling("linear", factor=2.0))
UNLIKE = Channel("k", 1, 16, 16, layers=(1,)), Channel("k_local", 2, 6, 4, LOCAL, (0, 2)), Channel("v", 2, 6)
LAYOUTS = {
    "gqa": LAYOUT,
    "mla": kvp.KVLayout.mla(2, 32, 16, rope=dataclasses.replace(ROPE, scaling=YARN)),
    "three axes": kvp.KVLayout.gqa(2, 2, 16, dataclasses.replace(ROPE, sections=(2, 3, 3))),
    "longrope": kvp.KVLayout.mha(2, 2, 16, dataclasses.replace(ROPE, scaling=LONG, angles="float32")),
    "hybrid": kvp.KVLayout.gqa(5, 2, 16, ROPE).with_transitions((0, 1, 3), 3, 6, 4, tail=(3, 10)),
    "unlike layers": kvp.KVLayout("gqa", 3, UNLIKE, ROPE),
}
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.fixture(scope="module")
def store(module_folder: Path) -> Iterator[ChunkStore]:
    with ChunkStore(module_folder / "root", memory=0) as store:
        yield store


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_every_layout_and_dtype(store: ChunkStore, layout: str):
    words: dict[str, Any] = {"lead": "a lead", "content": "what it shows"}
    dtypes = DTYPES if layout == "gqa" else DTYPES[:1]
    own = None if layout == "gqa" else "what it shows"
    chunks = [chunk_of(f"{layout} {dtype}", dtype=dtype, layout=LAYOUTS[layout], content=own) for dtype in dtypes]
    chunks += [chunk_of(np.str_("é \U0001f600"), 1, layout=LAYOUTS[layout], **words)]
    with locked_index(store.objects.root):
        acks = [store.put_async(chunk) for chunk in chunks]
        queued = [store.get(chunk.id, MODEL, lead=chunk.lead) for chunk in chunks]
    assert all(ack.result() for ack in acks)
    stored = [store.get(chunk.id, MODEL, lead=chunk.lead) for chunk in chunks]
    for back, chunk in zip([*queued, *stored], chunks * 2, strict=True):
        assert same_chunk(back, chunk)
        assert back is not None
        assert list(back.kv) == list(chunk.layout.names)
        assert not any(leaf.flags.writeable for leaf in jax.tree.leaves([dict(back.kv), back.local]))
    assert store.get(chunks[-1].id, MODEL) is None  # without its lead it is another


@pytest.mark.parametrize(
    ("layout", "word"), [("gqa", "k3v5gall"), ("hybrid", "k4v4g32"), ("unlike layers", "k7v1g99999")]
)
def test_few_bits_as_they_were_packed(store: ChunkStore, layout: str, word: str):
    chunk = chunk_of(f"few bits, {layout}", tokens=41, layout=LAYOUTS[layout], lead="a lead")
    packed = kvp.encode_chunk(chunk, word)
    for source, encoding in ((chunk, word), (packed, None), (packed, word)):
        store.put(source, encoding=encoding)
        assert same_chunk(store.get(chunk.id, MODEL, encoding=word, lead="a lead"), packed)
    assert not store.contains(chunk.id, MODEL, lead="a lead")  # the chunk as it was prefilled is another object
    padded = packed.pad(50)
    store.put(padded)
    back = store.get(chunk.id, MODEL, encoding=word, lead="a lead")
    assert back is not None
    assert same(dict(kvp.cache.decode_chunk(back).kv), dict(kvp.cache.decode_chunk(padded).kv))
    assert (back.length, back.tokens, back.encoding) == (40, 50, word)


# ---------------------------------------------------------------------------------------------------------- patches


def ragged(chunk: kvp.Chunk) -> kvp.Patch:
    """Ranks 3, 0 and 1 of the three layers, their directions in an order of their own."""
    rng, factors = np.random.default_rng(0), dict[str, Any]()
    for channel in chunk.layout.channels:
        u, v = (placed(rng.standard_normal((4, size)), np.float32) for size in (chunk.tokens, channel.features))
        factors[channel.name] = RaggedFactors(u, v, placed([[2, 0, 3], [4, 4, 4], [1, 4, 4]], np.int32))
    return kvp.Patch(factors, patch_for(chunk=chunk).metadata)


def patches() -> dict[str, kvp.Patch]:
    chunk, one, blind = chunk_of("page", tokens=40), Member("A", "one"), identity("A", "bare")
    patch, metadata = patch_for(chunk=chunk, rank=5), patch_for(chunk=chunk).metadata
    return {
        **{dtype: kvp.quantise(patch, dtype) for dtype in ("bfloat16", "int8", "float8_e4m3fn", "int3g16")},
        "dense": kvp.Patch({"v": placed(np.ones((3, 40, 2, 16)), np.float32)}, metadata),
        "no factors": kvp.Patch({}, metadata),
        "ragged": ragged(chunk),
        "ragged, int8": kvp.quantise(ragged(chunk), "int8"),
        "ragged, few bits": kvp.quantise(ragged(kvp.encode_chunk(chunk, "k4v4")), "int4"),
        "some layers": kvp.keep_layers(kvp.quantise(ragged(chunk), "int4"), [0, 2]),
        "padded": kvp.quantise(patch, "int8").pad(50),
        "hybrid": patch_for(chunk=chunk_of("page", layout=LAYOUTS["hybrid"])),
        "three axes": patch_for(chunk=chunk_of("page", layout=LAYOUTS["three axes"])),
        "orbit": patch_for([one, Member("B")], chunk=chunk, orbit=True, lead="a lead"),
        "blind": patch_for([Member("A", "one", blind), Member("C", None, blind)], chunk=chunk, places="ab" * 8),
        "removal": patch_for(chunk=chunk, base="conditioned", base_antecedent=[one]),
        "correction": patch_for(chunk=chunk, corrects="d" * 32, content="what it shows"),
    }


def same_patch(first: kvp.Patch, second: kvp.Patch) -> bool:
    sizes = [(patch.ranks, patch.nbytes, patch.tokens) for patch in (first, second)]
    return first.metadata == second.metadata and same(first.factors, second.factors) and sizes[0] == sizes[1]


def test_patches_of_every_form(store: ChunkStore):
    for case, patch in patches().items():
        store.delete("page", MODEL)
        with locked_index(store.objects.root):
            ack = store.put_patch_async(patch)
            (queued,) = store.get_patches(patch.metadata)
        assert ack.result()
        (stored,) = store.get_patches(patch.metadata)
        assert same_patch(queued, patch), case
        assert same_patch(stored, patch), case


def test_every_form_keeps_its_name_in_another_root(folder: Path):
    """A snapshot says itself under which names each object belongs; another secret and tenant give others."""
    with (
        ChunkStore(folder / "root", tenant="one") as store,
        ChunkStore(folder / "other", tenant="two", key=KEY) as other,
    ):
        forms, chunk = patches(), chunk_of("page", tokens=40, lead="a lead")
        del forms["padded"]  # it has the name of the one that was padded
        store.put_patches(list(forms.values()))
        store.put(chunk, encoding="k4v4")
        store.put_encoder("page", MODEL, np.ones(3))
        store.save(folder / "snapshot")
        assert other.restore(folder / "snapshot").objects == len(forms) + 2
        for case, patch in forms.items():
            assert any(same_patch(back, patch) for back in other.get_patches(patch.metadata)), case
        assert same_chunk(other.get("page", MODEL, encoding="k4v4", lead="a lead"), kvp.encode_chunk(chunk, "k4v4"))
        assert same(other.get_encoder("page", MODEL), np.ones(3))


# --------------------------------------------------------------------------------------- encoder outputs, and readers


def test_encoder_outputs_of_any_shape(store: ChunkStore):
    for shape in ((5, 3), (), (0, 4), (2, 3, 4, 5)):
        output = np.full(shape, 0.7).astype(ml_dtypes.bfloat16)
        store.put_encoder("page", MODEL, output)
        assert same(store.get_encoder("page", MODEL), output)
    store.put(chunk_of("with output", encoder=output))
    back = store.get("with output", MODEL, encoder=True)
    assert back is not None
    assert same(back.encoder, output)
    store.amend_encoder("page", MODEL, lambda outputs: np.concatenate([*outputs, *outputs]))
    assert same(store.get_encoder("page", MODEL), np.concatenate([output, output]))
    store.delete("page", MODEL)
    assert store.get_encoder("page", MODEL) is None


@pytest.mark.parametrize("size", [1000, 3 << 18])  # read, and mapped
@pytest.mark.parametrize("key", [None, KEY])
def test_jax_takes_arrays_without_a_copy_and_they_outlive_their_object(folder: Path, size: int, key: bytes | None):
    with ChunkStore(folder / "root", key=key, memory=0) as store:
        output = np.arange(size, dtype=np.float32)
        store.put_encoder("page", MODEL, output)
        array = store.get_encoder("page", MODEL)
        assert array is not None
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
        taken = jax.device_put(array)
        assert taken.unsafe_buffer_pointer() == array.ctypes.data
        store.delete("page", MODEL)
        np.testing.assert_array_equal(taken, output)


def test_several_chunks_are_read_at_once_and_ahead(store: ChunkStore):
    store.put_many([chunk_of(f"c{seed}", seed) for seed in range(5)])
    chunks = store.get_many(["c3", "unknown", "c0", "c3"], MODEL, placement=jax.devices()[0])
    assert chunks[1] is None
    for chunk, seed in zip([chunks[0], *chunks[2:]], (3, 0, 3), strict=True):
        assert same_chunk(chunk, chunk_of(f"c{seed}", seed))
        assert chunk is not None
        assert isinstance(chunk.kv["k"], jax.Array)
    assert store.prefetch(["c1", "unknown", "c2", "c1"], MODEL).result() == 2
    assert store.prefetch([], MODEL).result() == 0


def test_any_reader_of_safetensors_finds_the_arrays(store: ChunkStore):
    chunk = chunk_of("other readers", tokens=40)
    packed = kvp.encode_chunk(chunk, "k4v4")
    store.put_many([chunk, packed])
    files = [file_of(store.objects, store.names.canonical(MODEL, chunk.id, word)) for word in (None, "k4v4")]
    leaves, few = (dict(safetensors.deserialize(file.read_bytes())) for file in files)
    assert {name for name in leaves if "pad" not in name} == {"local", "k", "v"}
    assert leaves["k"] == {"shape": [3, 40, 2, 16], "dtype": "F32", "data": np.asarray(chunk.kv["k"]).tobytes()}
    assert {name for name in few if name.startswith("k.")} == {"k.plane4", "k.scale", "k.least"}
    # Byte j of a row has the codes of columns j and j + 16, the second in its upper half.
    plane = np.frombuffer(few["k.plane4"]["data"], np.uint8).reshape(3, 40, 16)
    codes = np.concatenate([plane & 15, plane >> 4], -1).astype(np.float32)
    steps = {}
    for leaf in ("scale", "least"):
        values = np.frombuffer(few[f"k.{leaf}"]["data"], ml_dtypes.bfloat16).reshape(3, 2, 32).astype(np.float32)
        steps[leaf] = np.repeat(values, 32, axis=1)[:, :40]
    numbers = steps["least"] + steps["scale"] * codes
    assert np.allclose(numbers, np.asarray(packed.kv["k"], np.float32).reshape(3, 40, 32), rtol=1e-6)


# --------------------------------------------------------------------------------------------------- what is refused


def test_what_no_object_can_hold_is_refused(store: ChunkStore):
    chunk = chunk_of("refused", tokens=40)
    packed = kvp.encode_chunk(chunk, "k4v4")
    kv = {name: np.ones((3, 2, 9, 2, 16), np.float32) for name in "kv"}
    batch = kvp.Chunk(kv, np.arange(9.0), 9, 9, "refused", LAYOUT, MODEL, content="given")
    cases: list[tuple[kvp.Chunk, str | None, type[Exception]]] = [
        (packed, "k8v8", InputError),
        (dataclasses.replace(packed, encoding="k8v8g32"), None, InputError),
        (batch, None, ShapeError),
    ]
    for refused, encoding, error in cases:
        with pytest.raises(error):
            store.put_many([chunk, refused], encoding=encoding)
    with pytest.raises(ShapeError, match="dtype complex64"):
        store.put_encoder("refused", MODEL, np.ones(3, np.complex64))
    assert not store.contains("refused", MODEL)  # all or none


@pytest.mark.usefixtures("unchecked")
def test_stores_that_cannot_be_are_refused_before_their_folder_is_made(folder: Path):
    refused: list[Any] = [{"tenant": ""}, {"secret": b"short"}, {"key": b"short"}, {"ttl": 0}]
    refused += [{option: float("nan")} for option in ("ttl", "root_budget", "share", "memory")]
    for options in refused:
        with pytest.raises(InputError, match=rf"{next(iter(options))}.*expected"):
            ChunkStore(folder / "refused", **options)
    assert not (folder / "refused").exists()
