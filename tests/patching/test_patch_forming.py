"""A patch of rank m is the best of that rank, alone and in a batch; one of full rank restores the conditioned KV."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportOptionalOperand=false, reportOptionalSubscript=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import PackedArray, ops
from kvpatch_jax.errors import (
    InputError,
    LayoutError,
    NotFiniteError,
    PatchMismatchError,
    ShapeError,
    WorseThanBlindError,
)
from kvpatch_jax.patching import ByteBudget
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, deficit_of, kv_of, placed_in_float64

A = ("A1", "A2")


def error(found: dict, expected: dict, length: int | None = None) -> float:
    return max(
        float(np.abs(np.asarray(found[name], np.float64) - np.asarray(expected[name]))[:, :length].max())
        for name in expected
    )


def with_noise_behind(chunk: kvp.Chunk, conditioned: dict) -> dict:
    """Conditioned KV whose padding holds large numbers, which are no part of the deficit."""
    live = np.arange(chunk.tokens)[:, None, None] < chunk.length
    return {name: placed(np.where(live, value, 1e3), np.float32) for name, value in conditioned.items()}


@pytest.mark.parametrize("name", ["gqa", "mla", pytest.param("blocked", marks=pytest.mark.nightly)])
def test_a_deficit_of_low_rank_is_restored_at_every_start(name: str):
    chunk = chunk_of(name)
    conditioned = conditioned_of(chunk)
    patch = kvp.form_patch(chunk, conditioned, 4, A)
    assert all(rank == 4 for rank in patch.ranks.values())
    for start in (0, 20):
        found = kvp.apply_patch(chunk, patch, start, A)
        assert error(found, placed_in_float64(chunk.layout, conditioned, chunk.local, start)) < 2e-5


@pytest.mark.parametrize(
    ("name", "method", "share"), [("gqa", "exact", 1.0), ("gqa", "randomised", 1.2), ("mla", "exact", 1.0)]
)
def test_what_a_rank_leaves_is_what_the_singular_values_leave(name: str, method, share: float):
    """Against NumPy, layer by layer; directions are orthonormal, the strongest first, and padding has none."""
    chunk = chunk_of(name, length=20)
    conditioned = with_noise_behind(chunk, conditioned_of(chunk, rank=12))
    patch = kvp.form_patch(chunk, conditioned, 4, A, method=method, dense=False)
    for channel, (u, v) in patch.factors.items():
        u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
        delta = deficit_of(chunk, conditioned)[channel]
        least = (np.linalg.svd(delta, compute_uv=False)[:, 4:] ** 2).sum(-1)
        left = np.square(delta - (u @ v)[:, :20]).sum((1, 2))
        assert (left >= least * (1 - 1e-4)).all()
        assert (left <= least * share * (1 + 1e-4)).all()
        np.testing.assert_allclose(v @ np.swapaxes(v, 1, 2), np.broadcast_to(np.eye(4), (len(v), 4, 4)), atol=1e-5)
        assert (np.diff(np.linalg.norm(u, axis=1)) <= 1e-5).all()
        assert not u[:, 20:].any()


def test_a_rank_beyond_the_chunk_is_capped_and_restores_everything():
    """By its tokens or its features; as the deficit itself where factors would not be smaller."""
    for name, still, dense, ranks in (("gqa", "v", True, (None, None)), ("mla", "ckv", False, (20, 16))):
        chunk = chunk_of(name, length=20)
        conditioned = with_noise_behind(chunk, kv_of(chunk.layout, 24, seed=7))
        patch = kvp.form_patch(chunk, conditioned, 99, A, method="exact", dense=dense)
        assert tuple(patch.ranks.values()) == ranks
        found = kvp.apply_patch(chunk, patch, 5, A)
        assert error(found, placed_in_float64(chunk.layout, conditioned, chunk.local, 5), 20) < 3e-5
        np.testing.assert_array_equal(found[still][:, 20:], chunk.kv[still][:, 20:])


def test_channels_may_have_ranks_of_their_own_or_none():
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    expected = placed_in_float64(chunk.layout, conditioned, chunk.local, 5)
    only = kvp.form_patch(chunk, conditioned, {"v": 0, "k": 4}, A, method="exact")
    assert only.ranks == {"k": 4, "v": 0}
    found = kvp.apply_patch(chunk, only, 5, A)
    assert (found["v"] == chunk.kv["v"]).all()
    assert error({"k": found["k"]}, {"k": expected["k"]}) < 2e-5


def test_a_patch_is_padded_with_its_chunk():
    chunk = chunk_of("gqa")
    narrow, dense = (kvp.form_patch(chunk, conditioned_of(chunk), rank, A) for rank in (4, 24))
    few = kvp.quantise(dense, jnp.int8)
    served = kvp.apply_patch(chunk.pad(32), narrow.pad(32), 3, A), kvp.apply_patch(chunk, narrow, 3, A)
    for wide, narrower in (served, (few.pad(32).factors, few.factors)):
        for name in "kv":
            value = np.asarray(wide[name])
            np.testing.assert_allclose(value[:, :24], np.asarray(narrower[name]), atol=1e-6)
            assert not value[:, 24:].any()
    assert [patch.pad(24).ranks for patch in (narrow, few)] == [narrow.ranks, few.ranks]
    with pytest.raises(ShapeError, match="at least 24"):
        narrow.pad(12)
    with pytest.raises(ShapeError, match="24 tokens, batch None; expected the chunk's 32"):
        kvp.apply_patch(chunk.pad(32), narrow, 3, A)


def test_what_forms_no_patch_is_refused(unchecked):
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    spoilt = np.asarray(conditioned["v"]).copy()
    spoilt[0, 0, 0, 0] = np.nan
    short = {name: value[:, :9] for name, value in conditioned.items()}
    engine = kvp.to_engine(chunk.layout, conditioned, chunk.local, 3)
    form = lambda rank=4, conditioned=conditioned, **more: kvp.form_patch(chunk, conditioned, rank, A, **more)
    cases = [(InputError, "expected at least 1", {"rank": rank}) for rank in (0, {"k": -1})]
    cases += [(InputError, "rank", {"rank": size}) for size in ("twelve kB", "0 %", 2.5)]
    cases += [
        (InputError, "int9", {"dtype": "int9"}),
        (InputError, "layers", {"layers": (3,)}),
        (InputError, "method", {"method": "svd"}),
        (LayoutError, "'q'", {"rank": {"q": 2}}),
        (LayoutError, "phase-free", {"conditioned": engine}),
        (NotFiniteError, "'v'", {"conditioned": conditioned | {"v": spoilt}}),
        (ShapeError, "expected the chunk's", {"conditioned": short}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            form(**options)
    patch = form()
    u, v = patch.factors["v"]
    with pytest.raises(NotFiniteError, match=r"'v'\]: got 1 values that are NaN"):
        kvp.Patch({**patch.factors, "v": (u, v.at[0, 0, 0].set(jnp.inf))}, patch.metadata)


# ---------------------------------------------------------------------------------- what it leaves of the readout error


def read(kv: dict, kind: str, queries: np.ndarray, length: int) -> np.ndarray:
    """Attention of queries [P,K,H] over one layer's keys and values, in float64."""
    keys = np.concatenate([kv["ckv"], kv["kpe"]], -1) if kind == "mla" else kv["k"]
    values = kv["ckv"] if kind == "mla" else kv["v"]
    scores = np.einsum("pkh,skh->kps", queries, keys[:length]) / np.sqrt(keys.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kps,ske->pke", weights, values[:length])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_errors_are_those_of_attention_by_the_chunks_own_keys(kind: str):
    """Against NumPy, layer by layer: patched and blind readouts, relative to those of the conditioned KV."""
    chunk = chunk_of(kind, length=20)
    conditioned = conditioned_of(chunk, rank=9)
    patch = kvp.form_patch(chunk, conditioned, 4, A)

    corrected = ops.correction(chunk.layout, dict(patch.factors))
    expected = np.zeros(2)
    for layer in range(chunk.layout.layers):
        truth = {name: np.asarray(value[layer], np.float64) for name, value in conditioned.items()}
        base = {name: np.asarray(value[layer], np.float64) for name, value in chunk.kv.items()}
        patched = {name: base[name] + np.asarray(corrected[name][layer], np.float64) for name in base}
        keys = np.concatenate([truth["ckv"], truth["kpe"]], -1) if kind == "mla" else truth["k"]
        queries = keys[np.arange(64) % 20]  # 64 of them read, of a shorter chunk some again
        own = read(truth, kind, queries, chunk.length)
        for place, kv in enumerate((patched, base)):
            expected[place] += np.linalg.norm(read(kv, kind, queries, chunk.length) - own) / np.linalg.norm(own)
    expected /= chunk.layout.layers
    np.testing.assert_allclose(patch.metadata.errors, expected, rtol=1e-4)
    assert patch.predicted == pytest.approx((patch.metadata.errors[0] / patch.metadata.errors[1]) ** 2)


def test_larger_patches_are_predicted_to_leave_less_and_padding_plays_no_part():
    chunk = chunk_of("gqa", length=20)
    conditioned = conditioned_of(chunk, rank=12)
    form = lambda rank, kv=conditioned: kvp.form_patch(chunk, kv, rank, A)
    left = [form(rank).predicted for rank in (4, 24)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-6 < left[0]
    patch = form(4)
    assert form(4, with_noise_behind(chunk, conditioned)).metadata.errors == pytest.approx(patch.metadata.errors)
    for changed in (kvp.truncate(patch, 2), kvp.quantise(patch, "int8"), kvp.patching.keep_layers(patch, (1,))):
        assert changed.predicted is None


def test_a_patch_that_would_not_help_is_refused():
    """Attention reads the same of tokens in another order, though their deficit is large: few directions only harm."""
    chunk = chunk_of("gqa", length=24)
    moved = {name: np.roll(np.asarray(value), 1, axis=1) for name, value in chunk.kv.items()}
    moved["v"] = moved["v"] + 1e-3
    forced = kvp.form_patch(chunk, moved, {"k": 4}, A, method="exact", force=True)
    assert forced.predicted > 1
    with pytest.raises(WorseThanBlindError, match="force=True"):
        kvp.form_patch(chunk, moved, {"k": 4}, A, method="exact")
    # Nothing was absorbed, so nothing is refused: there is nothing to lose.
    assert kvp.form_patch(chunk, dict(chunk.kv), 4, A).predicted == 0


def test_few_bits_of_the_deficit_are_kept_where_they_are_smaller_and_closer():
    """A deficit of full rank and many bytes; a thin one stays thin."""
    chunk = chunk_of("gqa", length=24)
    full = kv_of(chunk.layout, chunk.tokens, seed=7)
    packed = kvp.form_patch(chunk, full, "45 %", A)
    factors = kvp.form_patch(chunk, full, "45 %", A, dense=False)
    assert all(isinstance(own, PackedArray) for own in packed.factors.values())
    assert packed.predicted < factors.predicted
    thin = kvp.form_patch(chunk, conditioned_of(chunk, rank=2), "45 %", A)
    assert not any(isinstance(own, PackedArray) for own in thin.factors.values())


# -------------------------------------------------------------------------------------------------------------- batches


B = 3


def batch_of(name: str, seed: int = 0, **more) -> kvp.Chunk:
    return chunk_of(name, kv=kv_of(LAYOUTS[name], 24, seed, batch=(B,)), **more)


def item(kv, number: int) -> dict:
    return {name: placed(np.asarray(value)[:, number]) for name, value in kv.items()}


def items_of(batch: kvp.Chunk) -> list[kvp.Chunk]:
    return [dataclasses.replace(batch, kv=item(batch.kv, number)) for number in range(B)]


def conditioned_batch(batch: kvp.Chunk, seed: int = 9) -> dict:
    items = [conditioned_of(own, seed=seed + number) for number, own in enumerate(items_of(batch))]
    return {name: placed(np.stack([own[name] for own in items], axis=1)) for name in batch.kv}


@pytest.mark.parametrize("name", ["blocked", pytest.param("gqa", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", [{"layers": (1,)}, pytest.param({}, marks=pytest.mark.nightly)])
def test_a_batch_is_patched_as_each_of_its_chunks(name: str, options: dict):
    """At one start, and at one for each."""
    batch = batch_of(name, length=20)
    conditioned = conditioned_batch(batch)
    patch = kvp.form_patch(batch, conditioned, 4, A, method="exact", **options)
    assert (batch.batch, patch.batch, patch.tokens) == (B, B, 24)
    starts = np.arange(B, dtype=np.int32) * 100
    starts = starts if batch.layout.rope.axes is None else np.stack([starts, starts + 1, starts + 2], axis=-1)
    together, apart = (kvp.apply_patch(batch, patch, start, A) for start in (7, starts))
    for number, chunk in enumerate(items_of(batch)):
        own = kvp.form_patch(chunk, item(conditioned, number), 4, A, method="exact", **options)
        assert error(item(together, number), kvp.apply_patch(chunk, own, 7, A)) < 2e-5
        assert error(item(apart, number), kvp.apply_patch(chunk, own, starts[number], A)) < 2e-5


def test_a_batch_has_a_content_of_its_own():
    batch = batch_of("gqa")
    again, other = batch_of("gqa"), batch_of("gqa", seed=1)
    assert batch.content == again.content == batch.pad(32).content
    patch = kvp.form_patch(batch, conditioned_batch(batch), 4, A, method="exact")
    for wrong in (other, *items_of(batch)):
        assert wrong.content != batch.content
        with pytest.raises(PatchMismatchError, match="content"):
            kvp.apply_patch(wrong, patch, 3, A)


def test_refuses_what_is_of_another_batch(unchecked, tmp_path):
    batch = batch_of("gqa", content="given")
    conditioned = conditioned_batch(batch)
    patch = kvp.form_patch(batch, conditioned, 4, A, method="exact")
    one, pool = chunk_of("gqa", content="given"), kvp.pool.make_pool(batch.layout, 6, 8, np.float32)
    sums, slots = kvp.accumulate(None, conditioned_of(one), one, A), np.arange(24, dtype=np.int32)
    with kvp.ChunkStore(tmp_path) as store:
        for error, message, call in (
            (ShapeError, "batch 3; expected the chunk's 24, batch None", lambda: kvp.apply_patch(one, patch, 3, A)),
            (InputError, "each of 3 chunks", lambda: kvp.apply_patch(batch, patch, np.array([1, 2]), A)),
            (ShapeError, "batch 3; expected those of the chunk", lambda: kvp.accumulate(sums, conditioned, batch, A)),
            (ShapeError, "a batch of 3", lambda: kvp.pool.splice(pool, slots, kvp.Placed(batch, patch, 3, A))),
            (ShapeError, "a batch of 3 chunks; expected one chunk per object", lambda: store.put(batch)),
        ):
            with pytest.raises(error, match=message):
                call()


# ------------------------------------------------------------------------------------------------------------- programs


def test_forming_and_applying_compile_once():
    """One program each for every chunk, length of its bucket, antecedent and place."""
    counts = []
    for seed, length in ((0, 24), (1, 24), (2, 19)):
        chunk = chunk_of("gqa", seed=seed, length=length)
        for antecedent in (("A",), ("A", "C")):
            conditioned = conditioned_of(chunk, seed=seed + len(antecedent))
            with compilations() as compiled:
                patch = kvp.form_patch(chunk, conditioned, 4, antecedent, key=jax.random.key(seed))
                for start in (seed, 7 + seed, np.int32(60 + seed)):
                    kvp.apply_patch(chunk, patch, start, antecedent)
            counts.append((compiled.count("jit(factorise_deficit)"), compiled.count("jit(apply)"), len(compiled)))
    assert max(form for form, _, _ in counts) <= 1
    assert max(apply for _, apply, _ in counts) <= 1
    assert [total for _, _, total in counts[1:]] == [0] * 5


def test_orders_updates_budgets_and_batches_compile_once():
    programs = []
    for seed in range(2):
        chunk, batch = chunk_of("gqa", seed=seed), batch_of("gqa", seed)
        orders = [conditioned_of(chunk, seed=ordering) for ordering in range(3)]
        thick, behind = kv_of(chunk.layout, 24, seed=seed + 7), conditioned_batch(batch)
        with compilations() as compiled:
            acc = None
            for conditioned in orders:
                acc = kvp.accumulate(acc, conditioned, chunk, ("A", "C"))
            patch = kvp.form_patch(chunk, orders[0], 4, ("A",))
            kvp.update_patch(patch, kvp.correction_patch(chunk, patch, orders[2], 4, ("C",)))
            small = kvp.form_patch(chunk, thick, ByteBudget(1200 + 100 * seed), A, dense=False)
            kvp.apply_patch(chunk, small, seed, A)
            patch = kvp.form_patch(batch, behind, 4, A, method="exact")
            for start in (seed, np.arange(B) + 50 * seed):
                kvp.apply_patch(batch, patch, start, A)
        programs.append((compiled, small.factors["k"].ranks))
    assert programs[0][0].count("jit(accumulate)") <= 1  # of three orders
    assert programs[0][1] != programs[1][1]
    assert not programs[1][0]
