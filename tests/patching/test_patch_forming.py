"""A patch of rank m is the best of that rank; one of full rank restores the conditioned KV at every start."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, ShapeError
from tests.shared.arrays import placed
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of, placed_in_float64

A = ("A1", "A2")


def error(found: dict, expected: dict, length: int | None = None) -> float:
    return max(
        float(np.abs(np.asarray(found[name]).astype(np.float64) - expected[name])[:, :length].max())
        for name in expected
    )


def with_noise_behind(chunk: kvp.Chunk, conditioned: dict) -> dict:
    """Conditioned KV whose padding holds large numbers, which are no part of the deficit."""
    live = np.arange(chunk.tokens)[:, None, None] < chunk.length
    return {name: placed(np.where(live, value, 1e3), np.float32) for name, value in conditioned.items()}


@pytest.mark.parametrize("name", LAYOUTS)
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
    patch = kvp.form_patch(chunk, conditioned, 5, A, method=method, dense=False)
    for channel, (u, v) in patch.factors.items():
        u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
        delta = np.asarray(conditioned[channel], np.float64) - np.asarray(chunk.kv[channel], np.float64)
        delta = delta[:, :20].reshape(len(delta), 20, -1)
        least = (np.linalg.svd(delta, compute_uv=False)[:, 5:] ** 2).sum(-1)
        left = np.square(delta - (u @ v)[:, :20]).sum((1, 2))
        assert (left >= least * (1 - 1e-4)).all()
        assert (left <= least * share * (1 + 1e-4)).all()
        np.testing.assert_allclose(v @ np.swapaxes(v, 1, 2), np.broadcast_to(np.eye(5), (len(v), 5, 5)), atol=1e-5)
        assert (np.diff(np.linalg.norm(u, axis=1)) <= 1e-5).all()
        assert not u[:, 20:].any()


def test_a_rank_beyond_the_chunk_is_capped_and_restores_everything():
    """As the deficit itself where factors would not be smaller."""
    chunk = chunk_of("gqa", length=20)
    conditioned = with_noise_behind(chunk, kv_of(chunk.layout, 24, seed=7))
    for dense, rank in ((True, None), (False, 20)):
        patch = kvp.form_patch(chunk, conditioned, 99, A, dense=dense)
        assert patch.ranks == {"k": rank, "v": rank}
        found = kvp.apply_patch(chunk, patch, 5, A)
        assert error(found, placed_in_float64(chunk.layout, conditioned, chunk.local, 5), 20) < 3e-5
        np.testing.assert_array_equal(found["v"][:, 20:], chunk.kv["v"][:, 20:])
    latent = chunk_of("mla", tokens=40)
    assert kvp.form_patch(latent, conditioned_of(latent), 24, A, dense=False).ranks == {"ckv": 24, "kpe": 16}


def test_channels_may_have_ranks_of_their_own_or_none():
    chunk = chunk_of("mla")
    conditioned = conditioned_of(chunk)
    expected = placed_in_float64(chunk.layout, conditioned, chunk.local, 5)
    patch = kvp.form_patch(chunk, conditioned, {"ckv": 4, "kpe": 16}, A)
    assert patch.ranks == {"ckv": 4, "kpe": None}
    assert error(kvp.apply_patch(chunk, patch, 5, A), expected) < 2e-5
    only = kvp.form_patch(chunk, conditioned, {"kpe": 4, "ckv": 0}, A)
    assert only.ranks == {"ckv": 0, "kpe": 4}
    found = kvp.apply_patch(chunk, only, 5, A)
    assert (found["ckv"] == chunk.kv["ckv"]).all()
    assert error({"kpe": found["kpe"]}, {"kpe": expected["kpe"]}) < 2e-5


def test_a_patch_is_padded_with_its_chunk():
    chunk = chunk_of("gqa")
    narrow, dense = (kvp.form_patch(chunk, conditioned_of(chunk), rank, A) for rank in (4, 24))
    for patch in (narrow, kvp.quantise(dense, jnp.int8)):
        wide, own = kvp.apply_patch(chunk.pad(32), patch.pad(32), 3, A), kvp.apply_patch(chunk, patch, 3, A)
        for name in own:
            np.testing.assert_allclose(wide[name][:, :24], own[name], atol=1e-6)
            assert not wide[name][:, 24:].any()
        assert patch.pad(24).ranks == patch.ranks
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
    (u, v), metadata = patch.factors["v"], patch.metadata
    for kind, message, factors in (
        (NotFiniteError, r"'v'\]: got 1 values that are NaN", {**patch.factors, "v": (u, v.at[0, 0, 0].set(jnp.inf))}),
    ):
        with pytest.raises(kind, match=message):
            kvp.Patch(factors, metadata)
