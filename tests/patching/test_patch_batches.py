"""A batch is patched and placed as each of its chunks alone, and another chunk, patch or start compiles nothing."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import dataclasses

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import ByteBudget
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

A = ("A1", "A2")
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


def assert_same(found, expected, tolerance: float = 2e-5):
    for name in expected:
        size = float(np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance * size)


@pytest.mark.parametrize(("name", "options"), [("blocked", {}), ("mla", {}), ("gqa", {"layers": (1,)})])
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
        assert_same(item(together, number), kvp.apply_patch(chunk, own, 7, A))
        assert_same(item(apart, number), kvp.apply_patch(chunk, own, starts[number], A))


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


# -------------------------------------------------------------------------------------------------------- programs


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
            patch = kvp.form_patch(batch, behind, 4, A)
            for start in (seed, np.arange(B) + 50 * seed):
                kvp.apply_patch(batch, patch, start, A)
        programs.append((compiled, small.factors["k"].ranks))
    assert programs[0][0].count("jit(accumulate)") <= 1  # of three orders
    assert programs[0][1] != programs[1][1]
    assert not programs[1][0]
