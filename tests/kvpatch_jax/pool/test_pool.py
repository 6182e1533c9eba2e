"""The paged pool: splicing, books of slots, compaction, engines' page layouts, and attention over spliced pages."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, local_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import (
    DtypeError,
    InputError,
    KernelDtypeError,
    KernelSlotError,
    LayoutError,
    PatchMismatchError,
    PoolError,
    ShapeError,
    StalePatchError,
)
from pallas_kernels import targeting
from tests.arrays import placed
from tests.compilations import compilations

PAGES, PAGE_SIZE = 6, 8


def pool_of(layout: kvp.KVLayout, dtype=jnp.float32, seed: int = 5, padded: bool = False) -> dict:
    rng = np.random.default_rng(seed)
    return {
        name: placed(rng.standard_normal(value.shape), dtype)
        for name, value in kvp.pool.make_pool(layout, PAGES, PAGE_SIZE, padded=padded).items()
    }


def bits(value) -> np.ndarray:
    array = np.asarray(value)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def slots_of(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(PAGES * PAGE_SIZE)[:tokens].astype(np.int32)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("gqa", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("yarn", "interleaved")),
        ("mla", True),
    ],
)
def test_splice_is_apply_patch_with_pages_for_a_destination(name: str, padded: bool):
    chunk = chunk_of(name, length=19)
    layout = chunk.layout
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
    slots = slots_of(chunk.tokens)
    slots[chunk.length :] = -1
    pool = pool_of(layout, padded=padded)
    before = {channel: bits(value).copy() for channel, value in pool.items()}
    made = kvp.apply_patch(kvp.Placed(chunk, patch, 11, ("A",)))
    pool = kvp.pool.splice(pool, slots, kvp.Placed(chunk, patch, 11, ("A",)))
    kept = slots[: chunk.length]
    others = np.setdiff1d(np.arange(PAGES * PAGE_SIZE), kept)
    for channel, value in kvp.pool.read_slots(pool, kept).items():
        width = layout.channel(channel).width
        np.testing.assert_allclose(value[..., :width], made[channel][:, : chunk.length], rtol=1e-6, atol=1e-6)
        assert value.shape[-1] == (128 if padded else width)
        assert not bits(value[..., width:]).any()
        flat = bits(pool[channel]).reshape(layout.layers, -1, *value.shape[2:])
        assert (flat[:, others] == before[channel].reshape(flat.shape)[:, others]).all()


@pytest.mark.parametrize("padded", [False])
def test_blind_and_kept_layers_and_engine_frame(padded: bool):
    chunk = chunk_of("gqa")
    layout, slots = chunk.layout, slots_of(24)
    conditioned = conditioned_of(chunk)
    for patch in (
        None,
        kvp.form_patch(chunk, conditioned, 3, ("A",), layers=(1,)),
        kvp.form_patch(chunk, conditioned, 3, ("A",), frame="engine", start=4),
    ):
        pool = kvp.pool.splice(pool_of(layout, padded=padded), slots, kvp.Placed(chunk, patch, 4, ("A",)))
        made = kvp.apply_patch(kvp.Placed(chunk, patch, 4, ("A",)))
        for channel, value in kvp.pool.read_slots(pool, slots, layout).items():
            np.testing.assert_allclose(value, made[channel], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_splicing_compiles_once_and_donates():
    counts = []
    for seed, length in ((0, 24), (1, 20)):
        chunk = chunk_of("mla", seed=seed, length=length)
        patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
        for start in (0, 9):
            pool = pool_of(chunk.layout)
            with compilations() as compiled:
                kvp.pool.splice(pool, slots_of(24, seed + start), kvp.Placed(chunk, patch, start, ("A",)))
            assert all(value.is_deleted() for value in pool.values())
            counts.append(len(compiled))
    assert counts[1:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slots": np.zeros(24, np.int32)}, KernelSlotError, "named twice"),
        ({"slots": np.arange(24, dtype=np.int32) + 25}, KernelSlotError, "slot 48"),
        ({"slots": np.arange(23, dtype=np.int32)}, ShapeError, r"\(23,\)"),
        ({"start": np.array([1, 2, 3])}, InputError, "start"),
        ({"start": np.nan}, InputError, "nan"),
        ({"antecedent": ("C",)}, StalePatchError, "'C'"),
        ({"chunk": chunk_of("gqa", seed=3)}, PatchMismatchError, "'B3'"),
        ({"chunk": chunk_of("gqa", dtype=jnp.bfloat16), "patch": None}, DtypeError, "bfloat16"),
        ({"chunk": chunk_of("mha"), "patch": None}, ShapeError, r"expected \[2, P, O, 4, 16 or"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16))}}, LayoutError, "pool"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 18)) for name in "kv"}}, ShapeError, "pool"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 127)) for name in "kv"}}, ShapeError, "2, 16 or 128"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 16), jnp.int8) for name in "kv"}}, DtypeError, "int8"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16)), "v": jnp.zeros((3, 5, 8, 2, 16))}}, ShapeError, "pages"),
    ],
)
def test_refuses_before_it_writes(unchecked, change, error, words):
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
    given = {"chunk": chunk, "patch": patch, "start": 4, "antecedent": ("A",)} | change
    pool, slots = given.pop("pool", pool_of(chunk.layout)), given.pop("slots", slots_of(24))
    with pytest.raises(error, match=words):
        kvp.pool.splice(pool, slots, kvp.Placed(**given))
    assert not any(value.is_deleted() for value in pool.values())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_owners_of_slots_are_counted_through_any_operations(data):
    """Any order of allocate, share, release, compact: counts are what a dictionary of owners says, vectors follow."""
    books = kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
    content = np.full(PAGES * PAGE_SIZE, -1)
    held: list[list] = []  # [slots, owners, aligned, values]
    for step in range(data.draw(st.integers(1, 12))):
        word = data.draw(st.sampled_from(("allocate", "share", "release", "compact")))
        if word == "allocate":
            tokens, aligned = data.draw(st.integers(1, 20)), data.draw(st.booleans())
            room = books.free_pages * PAGE_SIZE if aligned else books.free
            if tokens > room:
                with pytest.raises(PoolError, match="free"):
                    books.allocate(tokens, aligned=aligned)
                continue
            slots = books.allocate(tokens, aligned=aligned)
            content[slots] = 1000 * step + np.arange(tokens)
            held.append([slots, 1, aligned, content[slots].copy()])
        elif word == "compact":
            mapping = books.compact()
            old, new = kvp.pool.compaction_moves(mapping)
            content[new] = content[old]
            for entry in held:
                entry[0] = mapping[entry[0]]
            live = np.flatnonzero(books.counts)
            bound = sum(-(-len(entry[0]) // PAGE_SIZE) * PAGE_SIZE if entry[2] else len(entry[0]) for entry in held)
            assert live.size == 0 or live.max() < bound
        elif held:
            entry = held[data.draw(st.integers(0, len(held) - 1))]
            if word == "share":
                books.share(entry[0])
                entry[1] += 1
            else:
                books.release(entry[0])
                entry[1] -= 1
        held = [entry for entry in held if entry[1]]
        counts = np.zeros(PAGES * PAGE_SIZE, int)
        for slots, owners, aligned, values in held:
            assert (counts[slots] == 0).all()
            counts[slots] = owners
            assert (content[slots] == values).all()
            if aligned:
                kvp.pool.pages_of(slots, PAGE_SIZE)
                pages = np.unique(slots // PAGE_SIZE)
                strangers = [other for other in held if other[0] is not slots]
                assert not any(np.isin(other[0] // PAGE_SIZE, pages).any() for other in strangers)
        assert (books.counts == counts).all()


def test_slots_that_are_not_owned_are_refused():
    books = kvp.pool.SlotAllocator(2, 4)
    slots = books.allocate(3)
    for bad, words in (
        (np.array([5]), "slot 5 without an owner"),
        (np.array([0, 0]), "distinct"),
        (np.array([8]), "0 to 7"),
    ):
        with pytest.raises(PoolError, match=words):
            books.release(bad)
    with pytest.raises(PoolError, match="0 tokens"):
        books.allocate(0)
    with pytest.raises(PoolError, match="2 whole pages; expected at most the 1 of 2"):
        books.allocate(5, aligned=True)
    with pytest.raises(PoolError, match="pages 0"):
        kvp.pool.SlotAllocator(0, 4)
    with pytest.raises(PoolError, match="page_size 0"):
        kvp.pool.make_pool(LAYOUTS["gqa"], 1, 0)
    assert (books.counts[slots] == 1).all()
    assert books.counts.sum() == 3


def test_a_masked_tail_is_given_back_with_its_page():
    books = kvp.pool.SlotAllocator(3, 4)
    slots = books.allocate(6, aligned=True)
    assert books.free == 4
    mask = kvp.pool.slot_mask(slots, kvp.pool.pages_of(slots, 4), 4)
    assert mask.tolist() == [True] * 6 + [False] * 2
    books.release(slots[4:])
    assert books.free == 8
    books.release(slots[:4])
    assert books.free == 12


@pytest.mark.parametrize("padded", [False, True])
def test_compaction_moves_vectors_unchanged(unchecked, padded: bool):
    layout = LAYOUTS["gqa"]
    books = kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
    first, second, third = books.allocate(5), books.allocate(9), books.allocate(11, aligned=True)
    pool = pool_of(layout, padded=padded)
    before = [kvp.pool.read_slots(pool, slots) for slots in (second, third)]
    books.release(first)
    mapping = books.compact()
    pool = kvp.pool.move_slots(pool, *kvp.pool.compaction_moves(mapping))
    for slots, old in zip((second, third), before, strict=True):
        for name, value in kvp.pool.read_slots(pool, mapping[slots]).items():
            assert (bits(value) == bits(old[name])).all()
    assert np.flatnonzero(books.counts).max() == 2 * PAGE_SIZE + 8
    assert kvp.pool.compaction_moves(books.compact())[0].size == 0
    with pytest.raises(KernelSlotError, match="named twice"):
        kvp.pool.move_slots(pool, np.array([1, 2]), np.array([3, 3]))
    with pytest.raises(ShapeError, match="2 slots to 1"):
        kvp.pool.move_slots(pool, np.array([1, 2]), np.array([3]))


def test_page_tables_refuse_what_they_cannot_express():
    assert kvp.pool.pages_of(np.array([12, 13, 14, 15, 0, 1]), 4).tolist() == [3, 0]
    with pytest.raises(PoolError, match="token 0 at slot 1"):
        kvp.pool.pages_of(np.array([1, 2]), 4)
    with pytest.raises(PoolError, match="token 5 at slot 2"):
        kvp.pool.pages_of(np.array([12, 13, 14, 15, 0, 2]), 4)


@given(heads=st.integers(1, 5), width=st.sampled_from((1, 8, 63, 64, 65)), wide=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_round_trips_of_keys_and_values_keep_every_bit(heads: int, width: int, wide: bool, seed: int):
    layout = kvp.KVLayout.gqa(2, heads, 2 * width, kvp.Rope(1e4, 2 * width))
    pool = pool_of(layout, jnp.float32 if wide else jnp.bfloat16, seed)
    k, v = kvp.engines.to_paged_attention(layout, pool)
    assert k.shape == (2, heads, PAGES, PAGE_SIZE, 2 * width)
    pages = kvp.engines.to_ragged_paged_attention(layout, pool)
    assert pages.shape == (2, PAGES, PAGE_SIZE, 2 * heads, -(-2 * width // 128) * 128)
    assert (pages[..., 2 * heads - 1, : 2 * width] == pool["v"][..., heads - 1, :]).all()
    packed = kvp.engines.to_ragged_paged_attention(layout, pool, packing=2)
    for back in (
        kvp.engines.from_paged_attention(layout, k, v),
        kvp.engines.from_ragged_paged_attention(layout, pages),
        kvp.engines.from_ragged_paged_attention(layout, packed, packed=True),
    ):
        for name in pool:
            assert back[name].dtype == pool[name].dtype
            assert (bits(back[name]) == bits(pool[name])).all()


def widened(pool: dict) -> dict:
    """The pool with zeros behind every vector, up to 128 or 256 numbers."""
    pads = {name: [(0, 0)] * 4 + [(0, -value.shape[-1] % 128)] for name, value in pool.items()}
    return {name: jnp.pad(value, pads[name]) for name, value in pool.items()}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_padded_pool_gives_the_same_pages_and_comes_back(kind: str):
    layout = {"gqa": LAYOUTS["gqa"], "mla": kvp.KVLayout.mla(2, 130, 64, rope=kvp.Rope(1e4, 64))}[kind]
    plain = pool_of(layout, jnp.bfloat16)
    padded = widened(plain)
    dirty = {name: jnp.where(padded[name] == 0, jnp.nan, padded[name]).astype(jnp.bfloat16) for name in padded}
    shapes = {name: value.shape for name, value in kvp.pool.make_pool(layout, PAGES, PAGE_SIZE, padded=True).items()}
    assert {name: value.shape for name, value in padded.items()} == shapes
    if kind == "gqa":
        pairs = [
            (
                kvp.engines.to_paged_attention,
                lambda layout, pages, **how: kvp.engines.from_paged_attention(layout, *pages, **how),
            )
        ]
        pairs += [(kvp.engines.to_ragged_paged_attention, kvp.engines.from_ragged_paged_attention)]
    else:
        pairs = [(kvp.engines.to_latent_rows, kvp.engines.from_latent_rows)]
    for there, back in pairs:
        pages = there(layout, plain)
        for pool in (padded, dirty):  # what lies in the padding reaches no engine
            for left, right in zip(jax.tree.leaves(pages), jax.tree.leaves(there(layout, pool)), strict=True):
                assert (bits(left) == bits(right)).all()
        for name, value in back(layout, pages, padded=True).items():
            assert (bits(value) == bits(padded[name])).all()


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "pages"), [("xla", 9), ("tpu", 10)])
def test_a_padded_pool_of_latents_by_every_implementation(implementation: str, pages: int):
    """A padded pool of whole tiles, not a number everywhere. Each in a shape of its own: programs stay as compiled."""
    chunk = chunk_of("mla", length=19)
    layout = chunk.layout
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
    slots = np.arange(5, 5 + chunk.tokens, dtype=np.int32)
    made = kvp.apply_patch(kvp.Placed(chunk, patch, 11, ("A",)))
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    empty = kvp.pool.make_pool(layout, pages, 8, jnp.float32, padded=True)
    splice = lambda pool: kvp.pool.splice(pool, slots, kvp.Placed(chunk, patch, 11, ("A",)))
    with targeting(implementation.replace("xla", "cpu"), interpret):
        assert ("pallas_call" in str(jax.make_jaxpr(splice)(empty))) == (implementation == "tpu")
        pool = splice({name: value * jnp.nan for name, value in empty.items()})
    kept = slots[: chunk.length]
    for name, value in kvp.pool.read_slots(pool, kept, layout).items():
        np.testing.assert_allclose(value, made[name][:, : chunk.length], atol=2e-5)
    others = np.setdiff1d(np.arange(pages * 8), kept)
    for name, value in pool.items():
        flat = np.asarray(value).reshape(layout.layers, -1, 128)
        assert not bits(flat[:, kept, layout.channel(name).width :]).any()
        assert np.isnan(flat[:, others]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (32, 16), (130, 128)])
def test_round_trip_of_latent_rows_keeps_every_bit(latent: int, rope: int, dtype):
    layout = kvp.KVLayout.mla(2, latent, rope, rope=kvp.Rope(1e4, rope))
    pool = pool_of(layout, dtype)
    rows = kvp.engines.to_latent_rows(layout, pool)
    packing = 4 // jnp.dtype(dtype).itemsize
    columns = -(-latent // 128) * 128 + -(-rope // 128) * 128
    assert rows.shape == (2, PAGES, PAGE_SIZE // packing, packing, columns)
    back = kvp.engines.from_latent_rows(layout, rows)
    for name in pool:
        assert (bits(back[name]) == bits(pool[name])).all()


def test_pools_that_do_not_fit_an_engine_are_refused(unchecked):
    gqa, mla = LAYOUTS["gqa"], LAYOUTS["mla"]
    with pytest.raises(LayoutError, match="to_paged_attention"):
        kvp.engines.to_paged_attention(mla, pool_of(mla))
    with pytest.raises(LayoutError, match="to_latent_rows"):
        kvp.engines.to_latent_rows(gqa, pool_of(gqa))
    with pytest.raises(ShapeError, match="packing 3"):
        kvp.engines.to_ragged_paged_attention(gqa, pool_of(gqa), packing=3)
    with pytest.raises(ShapeError, match="packing 3"):
        kvp.engines.to_latent_rows(mla, pool_of(mla), packing=3)
    with pytest.raises(ShapeError, match="expected 4 heads"):
        kvp.engines.from_ragged_paged_attention(gqa, jnp.zeros((3, 6, 8, 6, 128)))
    with pytest.raises(ShapeError, match=r"expected \[3, P, O, 2, 16\]"):
        kvp.engines.from_paged_attention(gqa, *[jnp.zeros((3, 2, 6, 8, 128))] * 2)
    with pytest.raises(ShapeError, match="127"):
        kvp.pool.read_slots({name: jnp.zeros((3, 6, 8, 2, 127)) for name in "kv"}, np.array([1]), gqa)
    with pytest.raises(ShapeError, match="rows of 128"):
        kvp.engines.from_latent_rows(mla, jnp.zeros((2, 6, 8, 1, 128)))


def spliced_sequence(layout: kvp.KVLayout, sizes: tuple[int, ...], rank: int) -> tuple[dict, np.ndarray, dict]:
    """Chunks of `sizes` tokens one behind the other in pages [4, 1, 5, 0]; and the same KV made directly."""
    table = np.array([4, 1, 5, 0])
    places = (table[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel().astype(np.int32)
    pool, start, parts, ids = pool_of(layout), 0, [], ()
    for seed, tokens in enumerate(sizes):
        given = {"kv": kv_of(layout, tokens, seed), "local": local_of(layout, tokens), "span": tokens}
        chunk = kvp.Chunk(**given, length=tokens, id=f"B{seed}", layout=layout, backbone="tiny")
        conditioned = conditioned_of(chunk, rank, seed)
        patch = kvp.form_patch(chunk, conditioned, rank, ids, method="exact") if seed else None
        pool = kvp.pool.splice(pool, places[start : start + tokens], kvp.Placed(chunk, patch, start, ids))
        parts.append(kvp.to_engine(layout, conditioned if seed else chunk.kv, chunk.local, start))
        start, ids = start + tokens, (*ids, chunk.id)
    whole = {name: jnp.concatenate([part[name] for part in parts], axis=1) for name in layout.names}
    return pool, places[:start], whole


@pytest.mark.slow
def test_jaxs_ragged_paged_attention_over_spliced_pages_equals_attention_over_recomputed_kv(monkeypatch):
    layout = kvp.KVLayout.gqa(1, 2, 128, kvp.Rope(1e6, 128))
    pool, slots, recomputed = spliced_sequence(layout, (5, 9, 12), 3)
    pages = kvp.engines.to_ragged_paged_attention(layout, pool)[0]
    queries = placed(np.random.default_rng(2).standard_normal((3, 8, 128)), jnp.float32)
    table = placed(kvp.pool.pages_of(slots, PAGE_SIZE))[None]
    lengths = [placed(values, jnp.int32) for values in ([slots.size], [0, 3], [1])]
    # The interpreter cannot read through a reshaped reference: the kernel gets the loaded pages instead. Nor does it
    # take masked stores whose first axis is the longest: as many query heads to a KV head as queries to a block.
    wait = kernel.MultiPageAsyncCopyDescriptor.wait
    monkeypatch.setattr(kernel.MultiPageAsyncCopyDescriptor, "wait", lambda self: wait(self)[...])
    blocks = {"sm_scale": 128**-0.5, "num_kv_pages_per_block": 2, "num_queries_per_block": 4}
    with pltpu.force_tpu_interpret_mode():
        found = kernel.ragged_paged_attention(queries, pages, lengths[0], table, *lengths[1:], **blocks)
    k, v = (np.repeat(np.asarray(recomputed[name][0], np.float64), 4, axis=1) for name in ("k", "v"))
    scores = np.einsum("qnh,snh->nqs", np.asarray(queries, np.float64), k) * 128**-0.5
    seen = np.arange(slots.size)[None] <= slots.size - 3 + np.arange(3)[:, None]
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("nqs,snh->qnh", weights, v), atol=2e-5)


@pytest.mark.slow
def test_masked_tails_do_not_reach_an_attention():
    layout = LAYOUTS["gqa"]
    books = kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
    chunk = chunk_of("gqa", tokens=11)
    slots = books.allocate(11, aligned=True)
    pool = kvp.pool.splice(pool_of(layout), slots, kvp.Placed(chunk, None, 3))
    pages = kvp.pool.pages_of(slots, PAGE_SIZE)
    mask = placed(kvp.pool.slot_mask(slots, pages, PAGE_SIZE))
    whole = {name: value[0, pages].reshape(-1, 2, 16) for name, value in pool.items()}
    exact = kvp.to_engine(layout, chunk.kv, chunk.local, 3)
    query = placed(np.random.default_rng(2).standard_normal((1, 2, 16)), jnp.float32)
    attend = lambda k, v, mask: jax.nn.dot_product_attention(query[None], k[None], v[None], mask=mask)
    masked = attend(whole["k"], whole["v"], mask[None, None, None])
    np.testing.assert_allclose(masked, attend(exact["k"][0], exact["v"][0], None), atol=1e-6)


def test_a_donated_pool_is_refused_by_name():
    chunk = chunk_of("gqa")
    layout, slots = chunk.layout, slots_of(24)
    pool = pool_of(layout)
    after = kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4))
    for use in (
        lambda: kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4)),
        lambda: kvp.pool.read_slots(pool, slots),
        lambda: kvp.pool.read_slots(pool, slots, layout),
        lambda: kvp.pool.move_slots(pool, np.array([1]), np.array([2])),
        lambda: kvp.engines.to_paged_attention(layout, pool),
    ):
        with pytest.raises(PoolError, match=r"donated.*expected the pool that"):
            use()
    kvp.pool.read_slots(after, slots)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"pool": np.zeros((3, 6, 8, 2, 16), np.float32)}, LayoutError, "ndarray"),
        ({"pool": {"k": [[0.0]], "v": [[0.0]]}}, DtypeError, "list"),
        ({"chunk": kv_of(LAYOUTS["gqa"], 24)}, InputError, "dict; expected a Chunk"),
        ({"chunk": kv_of(LAYOUTS["gqa"], 24)["k"]}, InputError, "expected a Chunk"),
        ({"slots": np.linspace(0, 1, 24)}, KernelDtypeError, "float64"),
        ({"slots": None}, KernelDtypeError, "object"),
    ],
)
def test_refuses_foreign_arrays(unchecked, change, error, words):
    chunk = chunk_of("gqa")
    given = {"pool": pool_of(chunk.layout), "slots": slots_of(24), "chunk": chunk} | change
    with pytest.raises(error, match=words):
        kvp.pool.splice(given["pool"], given["slots"], kvp.Placed(given["chunk"], None, 4))


def test_shared_slots_are_not_overwritten():
    chunk = chunk_of("gqa")
    layout, books = chunk.layout, kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
    pool, slots = pool_of(layout), books.allocate(24)
    put = lambda: kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4), allocator=books)
    books.share(slots[5:6])  # a fork reads it too
    with pytest.raises(PoolError, match=f"slot {slots[5]} with 2 owners; expected 1"):
        put()
    books.release(slots[5:6])
    books.release(slots[23:])
    with pytest.raises(PoolError, match=f"slot {slots[23]} with 0 owners; expected 1"):
        put()
    with pytest.raises(PoolError, match=r"6 pages of 8.*expected 5 pages of 8"):
        kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4), allocator=kvp.pool.SlotAllocator(5, 8))
    assert not any(value.is_deleted() for value in pool.values())
    short = chunk_of("gqa", length=23)
    after = kvp.pool.splice(pool, slots, kvp.Placed(short, None, 4), allocator=books)  # the padding's slot is nobody's
    assert set(after) == set(pool)


def test_books_of_no_slots(unchecked):
    books = kvp.pool.SlotAllocator(2, 4)
    slots = books.allocate(3, aligned=True)
    for none in ([], np.array([]), np.array([], np.int32), slots[:0]):
        books.release(none)
        books.share(none)
    assert (books.counts[slots] == 1).all()
    for bad in (np.array([0.0]), np.array([True]), np.array([[0]])):
        with pytest.raises(PoolError, match="expected distinct"):
            books.release(bad)
    assert books.free_pages == 1
