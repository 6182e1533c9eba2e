"""The paged pool: splicing, moving and reading in place, refusals, and attention over spliced pages."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from pool_cases import PAGE_SIZE, TOTAL, bits, pool_of, same, slots_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import (
    InputError,
    KernelError,
    LayoutError,
    PatchMismatchError,
    PoolError,
    ShapeError,
    StalePatchError,
)
from pallas_kernels import targeting
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, local_of


def patches_of(chunk: kvp.Chunk) -> dict[str, kvp.Patch | None]:
    conditioned = conditioned_of(chunk)
    return {
        "blind": None,
        "joint": kvp.form_patch(chunk, conditioned, 4, ("A",)),
        "a layer": kvp.form_patch(chunk, conditioned, 3, ("A",), layers=(1,)),
    }


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("gqa", False),
        *(pytest.param(name, False, marks=pytest.mark.nightly) for name in ("yarn", "interleaved")),
        ("mla", True),
    ],
)
def test_splice_is_apply_patch_with_pages_for_a_destination(name: str, padded: bool):
    chunk = chunk_of(name, length=19)
    layout, slots = chunk.layout, slots_of(chunk.tokens)
    slots[chunk.length :] = -1
    kept = slots[: chunk.length]
    others = np.setdiff1d(np.arange(TOTAL), kept)
    for patch in patches_of(chunk).values():
        there = kvp.Placed(chunk, patch, 11, ("A",))
        pool = kvp.pool.splice(pool_of(layout, padded=padded), slots, there)
        expected = there.apply()
        for channel, value in kvp.pool.read_slots(pool, kept).items():
            width = layout.channel(channel).width
            np.testing.assert_allclose(value[..., :width], expected[channel][:, :19], rtol=1e-6, atol=1e-6)
            assert value.shape[-1] == (128 if padded else width)
            assert not bits(value[..., width:]).any()
        before = kvp.pool.read_slots(pool_of(layout, padded=padded), others)
        assert same(kvp.pool.read_slots(pool, others), before)


@pytest.mark.nightly
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
        ({"slots": np.zeros(24, np.int32)}, KernelError, "named twice"),
        ({"slots": np.arange(24, dtype=np.int32) + 25}, KernelError, "slot 48"),
        ({"slots": np.arange(23, dtype=np.int32)}, ShapeError, r"\(23,\)"),
        ({"start": np.array([1, 2, 3])}, InputError, "start"),
        ({"start": np.nan}, InputError, "nan"),
        ({"antecedent": ("C",)}, StalePatchError, "'C'"),
        ({"chunk": chunk_of("gqa", seed=3)}, PatchMismatchError, "'B3'"),
        ({"chunk": chunk_of("gqa", dtype=jnp.bfloat16), "patch": None}, ShapeError, "bfloat16"),
        ({"chunk": chunk_of("mha"), "patch": None}, ShapeError, r"expected \[2, P, O, 4, 16\]"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16))}}, LayoutError, "pool"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 18)) for name in "kv"}}, ShapeError, "pool"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 127)) for name in "kv"}}, ShapeError, "2, 16 or 128"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 16), jnp.int8) for name in "kv"}}, ShapeError, "int8"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16)), "v": jnp.zeros((3, 5, 8, 2, 16))}}, ShapeError, "pages"),
        ({"pool": np.zeros((3, 6, 8, 2, 16), np.float32)}, LayoutError, "ndarray"),
        ({"pool": {"k": [[0.0]], "v": [[0.0]]}}, ShapeError, "list"),
        ({"chunk": kv_of(LAYOUTS["gqa"], 24), "patch": None}, InputError, "dict; expected a Chunk"),
        ({"slots": np.linspace(0, 1, 24)}, KernelError, "float64"),
        ({"slots": None}, KernelError, "object"),
    ],
)
def test_refuses_before_it_writes(unchecked, change, error, words):
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
    given = {"chunk": chunk, "patch": patch, "start": 4, "antecedent": ("A",)} | change
    pool, slots = given.pop("pool", pool_of(chunk.layout)), given.pop("slots", slots_of(24))
    with pytest.raises(error, match=words):
        kvp.pool.splice(pool, slots, kvp.Placed(**given))
    arrays = [leaf for leaf in jax.tree.leaves(pool) if isinstance(leaf, jax.Array)]
    assert not any(value.is_deleted() for value in arrays)


@pytest.mark.parametrize("padded", [False, True])
def test_moved_vectors_keep_their_bits(unchecked, padded: bool):
    """Slots may be read and written in one move, and one vector may go to several."""
    layout = LAYOUTS["gqa"]
    old, new = np.array([3, 9, 9, 20, 21]), np.array([9, 40, 3, 21, 5])
    before = kvp.pool.read_slots(pool_of(layout, padded=padded), old)
    pool = kvp.pool.move_slots(pool_of(layout, padded=padded), old, new)
    for name, value in kvp.pool.read_slots(pool, new).items():
        assert (bits(value) == bits(before[name])).all()
    none = kvp.pool.move_slots(pool, old[:0], new[:0])
    for given, error, words in (
        ((np.array([1, 2]), np.array([3, 3])), KernelError, "named twice"),
        ((np.array([1, 48]), np.array([3, 4])), KernelError, "slot 48"),
        ((np.array([1, 2]), np.array([3])), ShapeError, "2 slots to 1"),
    ):
        with pytest.raises(error, match=words):
            kvp.pool.move_slots(none, *given)
    with pytest.raises(ShapeError, match="127"):
        kvp.pool.read_slots({name: jnp.zeros((3, 6, 8, 2, 127)) for name in "kv"}, np.array([1]), layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("implementation", "pages"), [("xla", 4), ("tpu", 5)])
def test_a_padded_pool_of_latents_by_every_implementation(implementation: str, pages: int):
    """A padded pool of whole tiles, not a number everywhere. Each in a shape of its own: programs stay as compiled."""
    chunk = chunk_of("mla", length=19, dtype=jnp.bfloat16)
    layout = chunk.layout
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
    slots = np.arange(5, 5 + chunk.tokens, dtype=np.int32)
    made = kvp.apply_patch(chunk, patch, 11, ("A",))
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    empty = kvp.pool.make_pool(layout, pages, 16, jnp.bfloat16, padded=True)
    splice = lambda pool: kvp.pool.splice(pool, slots, kvp.Placed(chunk, patch, 11, ("A",)))
    with targeting(implementation.replace("xla", "cpu"), interpret):
        assert ("pallas_call" in str(jax.make_jaxpr(splice)(empty))) == (implementation == "tpu")
        pool = splice({name: value * jnp.nan for name, value in empty.items()})
    kept = slots[: chunk.length]
    for name, value in kvp.pool.read_slots(pool, kept, layout).items():
        found, wanted = (np.asarray(leaf, np.float32) for leaf in (value, made[name][:, : chunk.length]))
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-9)
    others = np.setdiff1d(np.arange(pages * 16), kept)
    for name, value in pool.items():
        flat = np.asarray(value).reshape(layout.layers, -1, 128)
        assert not bits(flat[:, kept, layout.channel(name).width :]).any()
        assert np.isnan(flat[:, others]).all()


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


@pytest.mark.nightly
def test_jaxs_ragged_paged_attention_over_spliced_pages_equals_attention_over_recomputed_kv(monkeypatch):
    layout = kvp.KVLayout.gqa(1, 2, 128, kvp.Rope(1e6, 128))
    pool, slots, recomputed = spliced_sequence(layout, (5, 9, 12), 3)
    pages = kvp.pool.RAGGED.to_pages(layout, pool)[0]
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
        lambda: kvp.pool.RAGGED.to_pages(layout, pool),
    ):
        with pytest.raises(PoolError, match=r"donated.*expected the pool that"):
            use()
    kvp.pool.read_slots(after, slots)


def test_slots_that_are_read_are_checked(unchecked):
    pool = pool_of(LAYOUTS["gqa"])
    total = pool["k"].shape[1] * pool["k"].shape[2]
    for slots in (np.array([0, total]), np.array([-1]), np.array([0.5])):
        with pytest.raises(KernelError, match=r"expected (0 to|int32)"):
            kvp.pool.read_slots(pool, slots)
    with pytest.raises(ShapeError, match=r"slots of shape \(1, 2\); expected \[T\]"):
        kvp.pool.read_slots(pool, np.array([[0, 1]]))
    assert kvp.pool.read_slots(pool, np.array([1, 1]))["k"].shape[1] == 2
