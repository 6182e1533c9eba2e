"""What a patch belongs to: the same id with other content, other positions, other factors, another base."""
# pyright: reportArgumentType=false, reportCallIssue=false

import copy
import dataclasses
import hashlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, local_of

A = ("A1", "A2")


def pages(**more) -> tuple[kvp.Chunk, kvp.Chunk]:
    """Two versions of a page under one id."""
    first, second = (chunk_of("gqa", seed=seed, id="page", **more) for seed in (0, 1))
    return first, second


def form(chunk: kvp.Chunk, seed: int = 9, rank: int = 4, **more) -> kvp.Patch:
    return kvp.form_patch(chunk, conditioned_of(chunk, seed=seed), rank, A, **more)


# --------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("given", [{}, {"content": True}])
def test_a_patch_of_one_version_of_a_page_is_refused_for_the_next(given: dict):
    chunks = pages()
    if given:
        chunks = tuple(dataclasses.replace(chunk, content=f"v{n}") for n, chunk in enumerate(chunks))
    first, second = chunks
    patch = form(first)
    for allow_stale in (False, True):
        with pytest.raises(PatchMismatchError, match=r"content .*expected"):
            kvp.apply_patch(second, patch, 3, A, allow_stale=allow_stale)
    pool = kvp.pool.make_pool(first.layout, 6, 8, jnp.float32)
    with pytest.raises(PatchMismatchError, match="content"):
        kvp.pool.splice(pool, np.arange(24, dtype=np.int32), kvp.Placed(second, patch, 3, A))
    with pytest.raises(PatchMismatchError, match="content"):
        kvp.correction_patch(second, patch, conditioned_of(second), 4, A)
    acc = kvp.accumulate(None, conditioned_of(first), first, A)
    with pytest.raises(PatchMismatchError, match="content"):
        kvp.accumulate(acc, conditioned_of(second), second, A)
    kvp.apply_patch(first, patch, 3, A)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_any_one_number_makes_another_content(dtype):
    chunk = chunk_of("gqa", dtype=dtype, length=20)
    seen = {chunk.content}
    rng = np.random.default_rng(0)
    for name in ("k", "v"):
        for _ in range(8):
            at = tuple(int(rng.integers(size)) for size in (3, 20, 2, 16))
            value = np.array(chunk.kv[name])
            value[at] = -value[at]
            other = dataclasses.replace(chunk, kv={**chunk.kv, name: value})
            seen.add(other.content)
    assert len(seen) == 17
    for change in (
        {name: -value for name, value in chunk.kv.items()},
        {name: value[:, ::-1] for name, value in chunk.kv.items()},
        {name: value[::-1] for name, value in chunk.kv.items()},
        {name: value[..., ::-1] for name, value in chunk.kv.items()},
        {"k": chunk.kv["v"], "v": chunk.kv["k"]},
    ):
        seen.add(dataclasses.replace(chunk, kv=change).content)
    assert len(seen) == 22


def test_the_same_kv_is_the_same_content_wherever_it_lies():
    chunk = chunk_of("gqa", length=20)
    kept = {chunk.content}
    kept.add(dataclasses.replace(chunk, kv={name: np.asarray(value) for name, value in chunk.kv.items()}).content)
    kept.add(chunk.pad(32).content)
    kept.add(dataclasses.replace(chunk.pad(32), span=30).content)  # computed again, padding and all
    kept.add(dataclasses.replace(chunk).content)
    kept.add(pickle.loads(pickle.dumps(chunk)).content)
    kept.add(copy.deepcopy(chunk).content)
    noise = {name: jnp.asarray(value).at[:, 20:].set(7) for name, value in chunk.kv.items()}
    kept.add(dataclasses.replace(chunk, kv=noise).content)  # padding is nobody's content
    assert len(kept) == 1


def test_content_that_was_given_stays():
    chunk = chunk_of("gqa", content="digest of the pixels")
    small = dataclasses.replace(chunk, kv={name: value.astype(jnp.bfloat16) for name, value in chunk.kv.items()})
    assert small.content == chunk.content == chunk.pad(32).content == "digest of the pixels"
    kvp.apply_patch(small, form(chunk), 3, A)
    with pytest.raises(InputError, match="content ''"):
        chunk_of("gqa", content="")


def test_content_costs_no_pass_where_it_was_given(monkeypatch):
    """And applying never computes it: what is not known is not asked for."""
    chunk = chunk_of("gqa")
    patch = form(chunk)
    monkeypatch.setattr(hashlib, "blake2b", lambda *_, **__: pytest.fail("a digest of kv"))
    kvp.apply_patch(chunk, patch, 3, A)


def test_a_replaced_local_is_another_chunk():
    for chunk in (chunk_of("gqa"), chunk_of("blocked"), chunk_of("gqa", content="given")):
        patch = form(chunk)
        moved = dataclasses.replace(chunk, local=np.asarray(chunk.local) * 2, span=2 * chunk.span)
        with pytest.raises(PatchMismatchError, match="local positions"):
            kvp.apply_patch(moved, patch, 3, A)
        same = dataclasses.replace(chunk, local=jnp.asarray(chunk.local).astype(jnp.int32))
        kvp.apply_patch(same, patch, 3, A)


def test_numpy_arrays_that_change_later_change_no_chunk():
    layout = LAYOUTS["gqa"]
    kv = {name: np.array(value) for name, value in kv_of(layout, 24).items()}
    local, encoder = local_of(layout, 24), np.ones((4, 6), np.float32)
    chunk = chunk_of("gqa", kv=kv, local=local, encoder=encoder)
    before = kvp.to_engine(layout, chunk.kv, chunk.local, 3)
    view = local[:]
    view.flags.writeable = False  # whoever has what it is a view of can write all the same
    seen = chunk_of("gqa", kv=kv, local=view)
    kv["k"][:] = 0
    kv["v"] = kv["k"]
    local[:] = 5
    encoder[:] = 5
    after = kvp.to_engine(layout, chunk.kv, chunk.local, 3)
    for name in layout.names:
        np.testing.assert_array_equal(before[name], after[name])
    assert (np.asarray(chunk.encoder) == 1).all()
    assert np.asarray(seen.local)[-1] == 23
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(chunk.kv["k"])[:] = 1


# ------------------------------------------------------------------------------------------ antecedents, starts


def test_allow_stale_does_not_reach_the_base():
    chunk = chunk_of("gqa")
    conditioned, target = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    patch = kvp.removal_patch(chunk, target, conditioned, 4, ("A2",), A)
    apply = lambda antecedent, base: kvp.apply_patch(
        chunk, patch, 3, antecedent, base=conditioned, base_antecedent=base, allow_stale=True
    )
    apply(("A9",), A)
    with pytest.raises(StalePatchError, match="got a base conditioned on"):
        apply(("A2",), ("A9",))


def test_a_removal_patch_of_the_canonical_is_recognised():
    """Conditioned on nothing it is an ordinary patch; said to be conditioned on something it is a mistake."""
    chunk = chunk_of("gqa")
    target = conditioned_of(chunk, 2, 2)
    alone = {name: np.array(value) for name, value in chunk.kv.items()}
    patch = kvp.removal_patch(chunk, target, alone, 4, A, ())
    plain = kvp.form_patch(chunk, target, 4, A)
    assert (patch.metadata.base, patch.metadata.base_antecedent) == ("canonical", None)
    served = [kvp.apply_patch(chunk, each, 3, A) for each in (patch, plain)]
    for name, value in served[0].items():
        np.testing.assert_allclose(value, served[1][name], atol=1e-5)
    with pytest.raises(InputError, match=r"removal_patch: got the canonical of .* as its KV behind \('A1', 'A2'\)"):
        kvp.removal_patch(chunk, target, alone, 4, ("A2",), A)
    other = {**alone, "k": alone["k"] + 1}
    assert kvp.removal_patch(chunk, target, other, 4, ("A2",), A).metadata.base == "conditioned"


def test_one_start_per_chunk_and_not_one_per_layer(unchecked):
    chunk = chunk_of("gqa")
    patch = form(chunk)
    for start in ((10, 500, 9000), np.array([10, 500, 9000]), jnp.array([[10]]), (7,)):
        for own in (None, patch):
            with pytest.raises(InputError, match=r"start of shape .*expected a scalar"):
                kvp.apply_patch(chunk, own, start, A)
    for start in ((10, 500, 9000), jnp.array([10, 500, 9000])):
        with pytest.raises(InputError, match=r"one for each of \(\) sequences"):
            kvp.to_engine(chunk.layout, chunk.kv, chunk.local, start)
        with pytest.raises(InputError, match="sequences"):
            kvp.to_phase_free(chunk.layout, dict(chunk.kv), chunk.local, start)
    blocked = chunk_of("blocked")
    with pytest.raises(InputError, match="start of shape"):
        kvp.apply_patch(blocked, None, np.array([[1, 2, 3], [4, 5, 6]]))
    batch = kv_of(chunk.layout, 6, batch=(3,))
    kvp.to_engine(chunk.layout, batch, local_of(chunk.layout, 6), np.array([10, 500, 9000]))


def test_positions_are_one_per_token(unchecked):
    chunk = chunk_of("gqa")
    one = {name: value[:, :1] for name, value in chunk.kv.items()}
    for kv, local in ((chunk.kv, chunk.local[:1]), (one, chunk.local)):
        with pytest.raises((InputError, ShapeError), match="tokens"):
            kvp.to_engine(chunk.layout, kv, local, 3)


# ---------------------------------------------------------------------------------------------- corrections


def others(chunk: kvp.Chunk, patch: kvp.Patch) -> dict[str, kvp.Patch]:
    """Patches of the same ids that are not `patch`."""
    conditioned = conditioned_of(chunk, seed=3)
    acc = kvp.accumulate(kvp.accumulate(None, conditioned, chunk, A), conditioned_of(chunk, seed=4), chunk, A[::-1])
    return {
        "formed again": form(chunk, seed=5),
        "truncated": kvp.truncate(patch, 2),
        "quantised": kvp.quantise(patch, jnp.bfloat16),
        "orbit": kvp.orbit_patch(acc, 4),
        "removal": kvp.removal_patch(chunk, conditioned, conditioned_of(chunk, seed=4), 4, A, ("A0", *A)),
        "fewer layers": kvp.keep_layers(patch, (1, 2)),
        "stamped anew": kvp.Patch(patch.factors, dataclasses.replace(patch.metadata, orbit=True)),
    }


def test_a_correction_is_folded_into_the_patch_it_corrects_and_no_other():
    chunk = chunk_of("gqa")
    patch = form(chunk)
    correct = lambda patch: kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), 4, ("A1", "A3"))
    correction = correct(patch)
    for other in others(chunk, patch).values():
        with pytest.raises(PatchMismatchError, match=r"(?s)update.*expected"):
            kvp.update_patch(other, correction)
    kvp.update_patch(pickle.loads(pickle.dumps(patch)), correction)
    updated = kvp.update_patch(patch, correction)
    assert (updated.metadata.corrects, updated.metadata.chunk.content) == (None, chunk.content)
    legacy = kvp.Patch(correction.factors, dataclasses.replace(correction.metadata, corrects=None))
    with pytest.raises(PatchMismatchError, match="None"):
        kvp.update_patch(patch, legacy)


@pytest.mark.nightly
def test_corrections_are_formed_of_what_an_update_takes():
    chunk = chunk_of("gqa")
    patch = form(chunk)
    for kind, other in others(chunk, patch).items():
        try:
            correction = kvp.correction_patch(chunk, other, conditioned_of(chunk, seed=2), 4, ("A1", "A3"))
        except PatchMismatchError:
            assert kind in ("removal", "fewer layers")
            continue
        assert kind in ("formed again", "truncated", "quantised", "orbit", "stamped anew")
        updated = kvp.update_patch(other, correction)
        found = kvp.apply_patch(chunk, updated, 0, ("A1", "A3"))
        wanted = kvp.to_engine(chunk.layout, conditioned_of(chunk, seed=2), chunk.local, 0)
        worst = max(float(np.abs(np.asarray(found[name]) - np.asarray(wanted[name])).max()) for name in wanted)
        assert worst < 3.5  # rank 4 of a change of rank 8: near, and never the wrong patch's


def test_the_content_is_the_same_over_any_sharding():
    """Explicit and automatic meshes of one device: the pass keeps to the shardings that it is given."""
    chunk = chunk_of("gqa")
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(kind,))
        for axes in (("x",), (None, "x"), (None, None, "x")):
            place = jax.NamedSharding(mesh, jax.P(*axes))
            kv = {name: jax.device_put(value, place) for name, value in chunk.kv.items()}
            assert dataclasses.replace(chunk, kv=kv).content == chunk.content
