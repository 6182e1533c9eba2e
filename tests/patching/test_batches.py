"""Batches: chunks that share an id, positions and layout are patched and placed together, as each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import ops
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, local_of

A = ("A1", "A2")
B = 3
PLAN_OPTIONS = {
    "plain": {},
    "layers": {"layers": (1,)},
}


def batch_of(name: str, seed: int = 0, **more) -> kvp.Chunk:
    return chunk_of(name, kv=kv_of(LAYOUTS[name], 24, seed, batch=(B,)), **more)


def conditioned_batch(batch: kvp.Chunk, seed: int = 9) -> dict:
    items = [conditioned_of(item, seed=seed + number) for number, item in enumerate(items_of(batch))]
    return {name: placed(np.stack([item[name] for item in items], axis=1)) for name in batch.kv}


def items_of(batch: kvp.Chunk) -> list[kvp.Chunk]:
    fields = {word: getattr(batch, word) for word in ("local", "span", "length", "id", "layout", "backbone")}
    return [kvp.Chunk(kv=item(batch.kv, number), **fields) for number in range(batch.batch or 0)]


def item(kv, number: int) -> dict:
    return {name: placed(np.asarray(value)[:, number]) for name, value in kv.items()}


def assert_same(found, expected, tolerance: float = 2e-5):
    for name in expected:
        size = float(np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(("name", "form"), [("blocked", "plain"), ("mla", "plain"), ("gqa", "layers")])
def test_a_batch_is_patched_as_each_of_its_chunks(name: str, form: str):
    options = PLAN_OPTIONS[form]
    batch = batch_of(name, length=20)
    conditioned = conditioned_batch(batch)
    patch = kvp.form_patch(batch, conditioned, 4, A, method="exact", **options)
    assert (batch.batch, patch.batch, patch.tokens) == (B, B, 24)
    found = kvp.apply_patch(batch, patch, 7, A)
    for number, one in enumerate(items_of(batch)):
        own = kvp.form_patch(one, item(conditioned, number), 4, A, method="exact", **options)
        assert_same(item(found, number), kvp.apply_patch(one, own, 7, A))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["interleaved", "mla"])
def test_a_batch_is_what_the_mapped_core_gives(name: str):
    """Applying given factors is bit for bit the vmapped core; factors are its own to rounding."""
    batch = batch_of(name)
    conditioned = conditioned_batch(batch)
    patch = kvp.form_patch(batch, conditioned, 4, A)
    plan = ops.FormPlan(ranks=tuple((name, patch.ranks[name]) for name in batch.layout.names))
    form = lambda conditioned, base: ops.form(conditioned, base, batch.length, jax.random.key(0), plan=plan)
    mapped = jax.jit(jax.vmap(form, in_axes=1, out_axes=1))(dict(conditioned), dict(batch.kv))
    dense = lambda factors: ops.correction(batch.layout, factors)
    assert_same(dense(dict(patch.factors)), dense(mapped))

    starts = np.arange(B, dtype=np.int32) * 100
    if batch.layout.rope.axes is not None:
        starts = np.stack([starts, starts + 1, starts + 2], axis=-1)
    place = jax.vmap(
        lambda kv, factors, start: ops.apply(batch.layout, kv, factors, batch.local, start),
        in_axes=(1, 1, 0),
        out_axes=1,
    )
    found = kvp.apply_patch(batch, patch, starts, A)
    expected = jax.jit(place)(dict(batch.kv), dict(patch.factors), jnp.asarray(starts))
    assert_same(found, expected, 2e-6)
    for number, one in enumerate(items_of(batch)):
        factors = jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[:, number], dict(patch.factors))
        alone = ops.jitted_apply(batch.layout, dict(one.kv), factors, batch.local, starts[number])
        assert_same(item(found, number), alone, 2e-6)


@pytest.mark.nightly
def test_every_form_of_patch_takes_a_batch():
    batch = batch_of("gqa")
    first, second = conditioned_batch(batch, 9), conditioned_batch(batch, 40)
    running = kvp.accumulate(kvp.accumulate(None, first, batch, A), second, batch, A[::-1])
    orbit = kvp.apply_patch(batch, kvp.orbit_patch(running, 8), 3, A[::-1])
    removal = kvp.removal_patch(batch, second, first, 8, A[1:], A)
    kept = kvp.apply_patch(batch, removal, 3, A[1:], base=first, base_antecedent=A)
    patch = kvp.form_patch(batch, first, 4, A)
    updated = kvp.update_patch(patch, kvp.correction_patch(batch, patch, second, 8, ("C",)))
    fresh = kvp.apply_patch(batch, updated, 3, ("C",))
    for number, one in enumerate(items_of(batch)):
        own, other = item(first, number), item(second, number)
        running = kvp.accumulate(kvp.accumulate(None, own, one, A), other, one, A[::-1])
        assert_same(item(orbit, number), kvp.apply_patch(one, kvp.orbit_patch(running, 8), 3, A[::-1]))
        gone = kvp.removal_patch(one, other, own, 8, A[1:], A)
        assert_same(item(kept, number), kvp.apply_patch(one, gone, 3, A[1:], base=own, base_antecedent=A))
        small = kvp.form_patch(one, own, 4, A)
        small = kvp.update_patch(small, kvp.correction_patch(one, small, other, 8, ("C",)))
        assert_same(item(fresh, number), kvp.apply_patch(one, small, 3, ("C",)))
    for smaller in (
        kvp.truncate(patch, 2),
        kvp.keep_layers(patch, (1,)),
        kvp.quantise(patch, jnp.int8),
        kvp.form_patch(batch, first, 16, A),  # dense
    ):
        assert smaller.batch == B
        kvp.apply_patch(batch, smaller, 3, A)
        kvp.apply_patch(batch.pad(30), smaller.pad(30), 3, A)


def test_factors_are_kept_where_dense_is_not_wanted():
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk)
    assert kvp.form_patch(chunk, conditioned, 16, A).ranks == {"k": None, "v": None}
    whole = kvp.form_patch(chunk, conditioned, 16, A, method="exact", dense=False)
    assert whole.ranks == {"k": 16, "v": 16}
    own = kvp.apply_patch(chunk, kvp.form_patch(chunk, conditioned, 3, A, method="exact"), 3, A)
    assert_same(kvp.apply_patch(chunk, kvp.truncate(whole, 3), 3, A), own)


def test_blind_reuse_of_a_batch_is_one_rotation():
    batch = batch_of("mla")
    found = kvp.apply_patch(batch, None, np.array([0, 5, 1000]))
    expected = kvp.to_engine(batch.layout, batch.kv, batch.local, np.array([0, 5, 1000]))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_batch_has_a_content_of_its_own():
    batch = batch_of("gqa")
    again, other = batch_of("gqa"), batch_of("gqa", seed=1)
    assert batch.content == again.content == batch.pad(32).content
    patch = kvp.form_patch(batch, conditioned_batch(batch), 4, A)
    for wrong in (other, *items_of(batch)):
        assert wrong.content != batch.content
        with pytest.raises(PatchMismatchError, match="content"):
            kvp.apply_patch(wrong, patch, 3, A)


def test_refuses_what_is_of_another_batch(unchecked, tmp_path):
    batch = batch_of("gqa", content="given")
    conditioned = conditioned_batch(batch)
    patch = kvp.form_patch(batch, conditioned, 4, A)
    one = chunk_of("gqa", content="given")
    with pytest.raises(ShapeError, match="batch 3; expected the chunk's 24, batch None"):
        kvp.apply_patch(one, patch, 3, A)
    with pytest.raises(ShapeError, match="expected the chunk's"):
        kvp.form_patch(batch, conditioned_of(one), 4, A)
    with pytest.raises(InputError, match="each of 3 chunks"):
        kvp.apply_patch(batch, patch, np.array([1, 2]), A)
    with pytest.raises(ShapeError, match=r"expected \[L, T, K, H\] or"):
        chunk_of("gqa", kv=kv_of(LAYOUTS["gqa"], 24, batch=(2, 3)))
    with pytest.raises(ShapeError, match="batch 3; expected those of the chunk before"):
        kvp.accumulate(kvp.accumulate(None, conditioned_of(one), one, A), conditioned, batch, A)
    pool = kvp.pool.make_pool(batch.layout, 6, 8, jnp.float32)
    with pytest.raises(ShapeError, match="a batch of 3; expected one chunk"):
        kvp.pool.splice(pool, np.arange(24, dtype=np.int32), kvp.Placed(batch, patch, 3, A))
    with kvp.ChunkStore(tmp_path) as store:
        with pytest.raises(ShapeError, match="a batch of 3 chunks; expected one chunk per object"):
            store.put(batch)
        with pytest.raises(ShapeError, match="a batch of 3 patches; expected one per object"):
            store.put_patches([patch])


def test_moving_a_batch_compiles_once():
    batch = batch_of("gqa")
    patch = kvp.form_patch(batch, conditioned_batch(batch), 4, A)
    apply = lambda start: kvp.apply_patch(batch, patch, start, A)
    apply(0)
    apply(np.arange(B))
    with compilations() as compiled:
        for start in (7, 100, np.arange(B) + 50, np.arange(B) * 9):
            apply(start)
    assert not compiled
    assert local_of(batch.layout, 24).shape == batch.local.shape
