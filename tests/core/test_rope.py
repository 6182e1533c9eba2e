"""Rope: angles right at far positions, sections, layouts, scaling, the group law, and what it refuses."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.core import check_positions, relocation_tables
from kvpatch_jax.errors import InputError, LayoutError
from tests.shared.examples import examples

BAR = 2e-6
TABLES = jax.jit(kvp.core.rope.rope_tables, static_argnums=0)
RELOCATION = jax.jit(relocation_tables, static_argnums=0)
ROPES = {
    "half": kvp.Rope(1e6, 128),
    "pairs": kvp.Rope(1e4, 64, cached="pairs", width=128),
    "blocked": kvp.Rope(1e6, 128, sections=(16, 24, 24)),
    "interleaved": kvp.Rope(5e6, 128, sections=(24, 20, 20), order="interleaved"),
    "pairs_sections": kvp.Rope(1e4, 32, cached="pairs", sections=(4, 6, 6)),
    "yarn": kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling("yarn", factor=4, original=4096)),
    "llama3": kvp.Rope(5e5, 64, scaling=kvp.core.rope.Scaling("llama3", factor=8, original=8192)),
}
positions = st.integers(-1_000_000, 1_000_000)


def rotated_in_float64(rope: kvp.Rope, x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """x [T, K, H] turned at absolute float64 positions [T] or [T, A]."""
    axis = rope.axis_of_frequency
    chosen = position[:, None] if rope.axes is None else position[:, axis]
    angle = (chosen * rope.inverse_frequencies)[:, None, :]
    x = x.astype(np.float64)
    half = rope.dim // 2
    a, b = (
        (slice(0, half), slice(half, rope.dim))
        if rope.cached == "half"
        else (slice(0, rope.dim, 2), slice(1, rope.dim, 2))
    )
    result = x.copy()
    result[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    result[..., b] = x[..., b] * np.cos(angle) + x[..., a] * np.sin(angle)
    return result


def pair_error(rope: kvp.Rope, found: np.ndarray, expected: np.ndarray) -> float:
    """Largest error over the norm of its rotary pair."""
    half = rope.dim // 2
    order = np.arange(rope.dim).reshape(2, half).T if rope.cached == "half" else np.arange(rope.dim).reshape(half, 2)
    error = np.linalg.norm((found - expected)[..., order], axis=-1)
    return float((error / np.linalg.norm(expected[..., order], axis=-1)).max())


def keys(rope: kvp.Rope, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((tokens, 2, rope.head_width)).astype(np.float32)


def local_of(rope: kvp.Rope, tokens: int, fraction: float = 0.0) -> np.ndarray:
    base = np.arange(tokens, dtype=np.float32) + np.float32(fraction)
    return base if rope.axes is None else np.stack([base, base * 2, base[::-1]], -1)


@pytest.mark.parametrize("name", ROPES)
@examples(6)
@given(start=positions, offset=positions, fraction=st.sampled_from([0.0, 0.25, 1 / 3]))
def test_exact_angles_meet_the_bar(name: str, start: int, offset: int, fraction: float):
    rope = ROPES[name]
    x, local = keys(rope, 5), local_of(rope, 5, fraction)
    whole = start + offset
    begin = np.int32(whole) if rope.axes is None else np.array([whole, start, offset], np.int32)
    cos, sin = TABLES(rope, local, begin)
    found = np.asarray(kvp.core.rope.rotate(jnp.asarray(x), cos, sin, rope.cached))
    expected = rotated_in_float64(rope, x, local.astype(np.float64) + np.asarray(begin, np.float64))
    assert pair_error(rope, found, expected) < BAR


@pytest.mark.parametrize("name", ROPES)
@examples(6)
@given(old=positions, new=positions, other=positions)
def test_relocation_meets_the_bar(name: str, old: int, new: int, other: int):
    rope = ROPES[name]
    x, local = keys(rope, 5), local_of(rope, 5)
    before = np.float64(local) + (old if rope.axes is None else np.array([old, old, other]))
    after = np.float64(local) + (new if rope.axes is None else np.array([new, other, old]))
    cos, sin = RELOCATION(rope, before.astype(np.float32), after.astype(np.float32))
    found = np.asarray(kvp.core.rope.rotate(jnp.asarray(x), cos, sin, rope.cached))
    assert pair_error(rope, found, rotated_in_float64(rope, x, after - before)) < BAR


def test_grid_of_far_positions():
    for rope in (ROPES["half"], ROPES["pairs"]):
        grid = np.array([-(2**20), -1_000_000, -1, 0, 1, 1023, 1024, 4095, 131_072, 999_999, 1_000_000, 2_000_000])
        angle = grid[:, None] * rope.inverse_frequencies
        cos, sin = jax.jit(kvp.core.rope.rope_tables, static_argnums=0)(rope, grid.astype(np.int32))
        assert np.abs(cos - np.cos(angle)).max() < 2e-7
        assert np.abs(sin - np.sin(angle)).max() < 2e-7


@examples(5)
@given(first=positions, second=positions)
def test_two_rotations_are_one_and_an_opposite_one_undoes_it(first: int, second: int):
    rope = ROPES["half"]
    x = jnp.asarray(keys(rope, 1))
    turn = lambda x, p: kvp.core.rope.rotate(x, *kvp.core.rope.rope_tables(rope, np.array([p], np.int32)))
    np.testing.assert_allclose(turn(turn(x, first), second), turn(x, first + second), atol=4e-6)
    np.testing.assert_allclose(turn(turn(x, first), -first), x, atol=4e-6)


def test_float32_angles_are_the_engines():
    rope = dataclasses.replace(ROPES["half"], angles="float32")
    cos, _ = kvp.core.rope.rope_tables(rope, np.arange(3, dtype=np.float32), 1_000_000)
    frequency = (np.float32(1) / (1e6 ** (np.arange(0, 128, 2) / 128)).astype(np.float32)).astype(np.float32)
    angle = (np.arange(3, dtype=np.float32) + np.float32(1_000_000))[:, None] * frequency
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=3e-7)
    exact, _ = kvp.core.rope.rope_tables(ROPES["half"], np.arange(3, dtype=np.float32), 1_000_000)
    assert np.abs(cos - exact).max() > 0.01


def test_float32_relocation_turns_by_the_difference_of_the_engines_angles():
    rope = dataclasses.replace(ROPES["half"], angles="float32")
    x = jnp.asarray(keys(rope, 4))
    old, new = np.arange(4, dtype=np.float32) + 1000, np.arange(4, dtype=np.float32) + 31_037
    placed = kvp.core.rope.rotate(x, *kvp.core.rope.rope_tables(rope, old))
    moved = kvp.core.rope.rotate(placed, *relocation_tables(rope, old, new))
    np.testing.assert_allclose(moved, kvp.core.rope.rotate(x, *kvp.core.rope.rope_tables(rope, new)), atol=3e-6)


def test_frequencies_follow_the_sections_axes():
    blocked = ROPES["blocked"].axis_of_frequency
    assert blocked.tolist() == [0] * 16 + [1] * 24 + [2] * 24
    interleaved = ROPES["interleaved"].axis_of_frequency
    assert interleaved.tolist() == [0, 1, 2] * 20 + [0] * 4


def test_equal_axes_are_one_axis():
    plain = dataclasses.replace(ROPES["blocked"], sections=None)
    local = np.arange(6, dtype=np.float32)
    for rope in (ROPES["blocked"], dataclasses.replace(ROPES["blocked"], order="interleaved")):
        three = kvp.core.rope.rope_tables(rope, np.stack([local] * 3, -1), np.full(3, 77, np.int32))
        np.testing.assert_array_equal(three[0], kvp.core.rope.rope_tables(plain, local, 77)[0])


def test_batched_starts_and_positions():
    rope = ROPES["half"]
    local = np.arange(4, dtype=np.float32)
    cos, _ = kvp.core.rope.rope_tables(rope, np.stack([local, local]), np.array([5, 9], np.int32))
    assert cos.shape == (2, 4, 64)
    np.testing.assert_array_equal(cos[1], kvp.core.rope.rope_tables(rope, local, 9)[0])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3, 128)), jnp.float32)
    assert kvp.core.rope.rotate(x, cos, cos).shape == x.shape


def test_starts_in_a_tuple(unchecked):
    rope, local = ROPES["blocked"], np.zeros((4, 3), np.float32)
    for found, wanted in zip(
        *(kvp.core.rope.rope_tables(rope, local, start) for start in ((1, 2, 3), np.r_[1:4])), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_scaled_frequencies_follow_their_definitions():
    plain = kvp.Rope(1e4, 64).inverse_frequencies
    linear = kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling("linear", factor=2)).inverse_frequencies
    np.testing.assert_allclose(linear, plain / 2)
    for kind in ("yarn", "llama3"):
        scaled = kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling(kind, factor=4, original=4096)).inverse_frequencies
        np.testing.assert_allclose(scaled[0], plain[0])
        np.testing.assert_allclose(scaled[-1], plain[-1] / 4)
    assert ROPES["yarn"].attention_scaling == pytest.approx(0.1 * np.log(4) + 1)
    factors = tuple(float(i + 1) for i in range(32))
    long = kvp.core.rope.Scaling(
        "longrope", factor=32, original=4096, short_factor=factors, long_factor=factors, regime="long"
    )
    assert kvp.Rope(1e4, 64, scaling=long).attention_scaling == pytest.approx(1.190238)
    np.testing.assert_allclose(kvp.Rope(1e4, 64, scaling=long).inverse_frequencies, plain / np.array(factors))
    dynamic = kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling("dynamic", factor=2, original=1000, length=2000))
    assert dynamic.inverse_frequencies[-1] < plain[-1]


def test_refuses_bad_ropes():
    with pytest.raises(LayoutError, match="63"):
        kvp.Rope(1e4, 128, sections=(16, 24, 23))
    with pytest.raises(LayoutError, match="127"):
        kvp.Rope(1e4, 127)
    with pytest.raises(LayoutError, match="width 64"):
        kvp.Rope(1e4, 128, width=64)
    with pytest.raises(InputError, match="longrope"):
        kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling("longrope", factor=2, original=4096))
    with pytest.raises(InputError, match="dynamic"):
        kvp.Rope(1e4, 64, scaling=kvp.core.rope.Scaling("dynamic", factor=2, original=4096))


def test_positions_beyond_a_ropes_reach_are_refused():
    with pytest.raises(InputError, match="axes"):
        kvp.core.rope.rope_tables(ROPES["blocked"], np.zeros(5, np.float32))
    with pytest.raises(InputError, match="2147483640"):
        check_positions(ROPES["half"], np.array([2147483640]), np.array(0))
    with pytest.raises(InputError, match="finite"):
        check_positions(ROPES["half"], np.array([np.nan]), np.array(0))
    short = kvp.core.rope.Scaling("longrope", factor=2, original=64, short_factor=(1.0,) * 32, regime="short")
    with pytest.raises(InputError, match="position 70"):
        check_positions(kvp.Rope(1e4, 64, scaling=short), np.array([0, 70]), np.array(0))
