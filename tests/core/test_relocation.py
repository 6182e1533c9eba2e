"""A key rotated or relocated up to position 10⁶ is the one computed there, within one rounding, for every rope.

The oracle is complex multiplication in float64.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.core import Scaling, check_positions, end_position, relocation_tables, rope_tables, rotate
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from tests.shared.compilations import compilations
from tests.shared.examples import examples
from tests.shared.operator_cases import LAYOUTS, assert_one_rounding, kv_of, local_of, placed_in_float64, turned

BAR = 2e-6
TABLES = jax.jit(rope_tables, static_argnums=0)
RELOCATION = jax.jit(relocation_tables, static_argnums=0)
ROPES = {
    "half": kvp.Rope(1e6, 128),
    "pairs": kvp.Rope(1e4, 64, cached="pairs", width=128),
    "blocked": kvp.Rope(1e6, 128, sections=(16, 24, 24)),
    "interleaved": kvp.Rope(5e6, 128, sections=(24, 20, 20), order="interleaved"),
    "pairs_sections": kvp.Rope(1e4, 32, cached="pairs", sections=(4, 6, 6)),
    "yarn": kvp.Rope(1e4, 64, scaling=Scaling("yarn", factor=4, original=4096)),
    "llama3": kvp.Rope(5e5, 64, scaling=Scaling("llama3", factor=8, original=8192)),
}
FLOAT32 = dataclasses.replace(ROPES["half"], angles="float32")
positions = st.integers(-1_000_000, 1_000_000)


def pair_error(rope: kvp.Rope, found: np.ndarray, expected: np.ndarray) -> float:
    """Largest error over the norm of its rotary pair."""
    half = rope.dim // 2
    order = np.arange(rope.dim).reshape(2, half).T if rope.cached == "half" else np.arange(rope.dim).reshape(half, 2)
    error = np.linalg.norm((found - expected)[..., order], axis=-1)
    assert np.array_equal(found[..., rope.dim :], expected[..., rope.dim :])
    return float((error / np.linalg.norm(expected[..., order], axis=-1)).max())


def keys(rope: kvp.Rope, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((tokens, 2, rope.head_width)).astype(np.float32)


def local_positions(rope: kvp.Rope, tokens: int, fraction: float = 0.0) -> np.ndarray:
    base = np.arange(tokens, dtype=np.float32) + np.float32(fraction)
    return base if rope.axes is None else np.stack([base, base * 2, base[::-1]], -1)


def starts(layout: kvp.KVLayout, base: int):
    return base if layout.rope.axes is None else np.array([base, base + 3, base - 5], np.int32)


@pytest.mark.parametrize("name", ROPES)
@examples(6)
@given(first=positions, second=positions, third=positions, fraction=st.sampled_from([0.0, 0.25, 1 / 3]))
def test_a_rotation_is_that_of_its_position_and_a_relocation_that_of_the_difference(
    name: str, first: int, second: int, third: int, fraction: float
):
    rope = ROPES[name]
    x, local = keys(rope, 5), local_positions(rope, 5, fraction)
    start = np.int32(first) if rope.axes is None else np.array([first, second, third], np.int32)
    found = np.asarray(rotate(jnp.asarray(x), *TABLES(rope, local, start), rope.cached))
    assert pair_error(rope, found, turned(rope, x, local.astype(np.float64) + start)) < BAR

    # Whole positions: fractions of a float32 are lost so far out.
    old = local_positions(rope, 5) + (first if rope.axes is None else np.array([first, first, third]))
    new = local_positions(rope, 5) + (second if rope.axes is None else np.array([second, third, first]))
    moved = rotate(jnp.asarray(x), *RELOCATION(rope, old.astype(np.float32), new.astype(np.float32)), rope.cached)
    assert pair_error(rope, np.asarray(moved), turned(rope, x, new.astype(np.float64) - old)) < BAR


@pytest.mark.parametrize("name", ["half", "pairs"])
def test_cosines_of_far_positions_are_exact_to_float32(name: str):
    rope = ROPES[name]
    grid = np.array([-(2**20), -1_000_000, -1, 0, 1, 1023, 4095, 131_072, 999_999, 2_000_000, 2**30 - 1])
    angle = grid[:, None] * rope.inverse_frequencies
    cos, sin = TABLES(rope, grid.astype(np.int32))
    assert np.abs(cos - np.cos(angle)).max() < 2e-7
    assert np.abs(sin - np.sin(angle)).max() < 2e-7


@pytest.mark.parametrize("name", ["gqa", "mha", "blocked", "yarn"])
def test_frames_invert_and_relocation_is_the_engine_frame_at_the_new_place(name: str):
    layout = LAYOUTS[name]
    kv, local, old = kv_of(layout, 24), local_of(layout, 24), starts(layout, 999_000)
    engine, there = (kvp.to_engine(layout, kv, local, start) for start in (old, 17))
    expected = placed_in_float64(layout, kv, local, old)
    back, moved = kvp.to_phase_free(layout, engine, local, old), kvp.relocate(layout, engine, old, 17)
    full = kvp.relocate(layout, engine, local + np.float32(old), local + np.float32(17))
    near = kvp.to_phase_free(layout, kvp.core.to_local(layout, kv, local), local)
    for channel in layout.channels:
        name = channel.name
        assert_one_rounding(engine[name], expected[name], jnp.float32)
        for found, wanted in ((back, kv), (near, kv), (moved, there), (full, there)):
            np.testing.assert_allclose(found[name], wanted[name], atol=6e-6)
        if not channel.rotates:
            assert engine[name] is kv[name]


@pytest.mark.parametrize("name", ["gqa", "mha", "yarn"])
def test_bfloat16_is_rounded_once(name: str):
    """Of the stored numbers, and of another engine's keys, which are turned by the difference alone."""
    layout = LAYOUTS[name]
    kv, local = kv_of(layout, 24, dtype=jnp.bfloat16), local_of(layout, 24)
    engine = kvp.to_engine(layout, kv, local, 100_000)
    assert_one_rounding(engine["k"], placed_in_float64(layout, kv, local, 100_000)["k"])
    moved = kvp.relocate(layout, engine, 100_000, 31)
    assert_one_rounding(moved["k"], turned(layout.rope, np.asarray(engine["k"]), np.full(24, 31 - 100_000)))
    assert moved["v"] is engine["v"] is kv["v"]


def test_relocating_compiles_one_program():
    layout = LAYOUTS["blocked"]
    kv, local = kv_of(layout, 24), local_of(layout, 24)
    engine = kvp.to_engine(layout, kv, local, 3)
    jax.block_until_ready(engine)
    with compilations() as compiled:
        for old, new in ((3, 900), (900, 4), (np.int32(4), np.int64(70_000))):
            kvp.relocate(layout, engine, old, new)
    assert len(compiled) <= 1


# ------------------------------------------------------------------------------------------------------- frequencies


def engines_frequencies(theta: int, dim: int) -> np.ndarray:
    """The recipe's three roundings to float32, the power in decimals."""
    decimal.getcontext().prec = 60
    result = []
    for index in range(0, dim, 2):
        exponent = np.float32(index) / np.float32(dim)
        power = np.float32(float(decimal.Decimal(theta) ** decimal.Decimal(float(exponent))))
        result.append(np.float32(1) / power)
    return np.asarray(result, np.float32)


@pytest.mark.parametrize(("theta", "dim"), [(10_000, 64), (1_000_000, 128)])
def test_float32_frequencies_are_the_engines_bit_for_bit(theta: int, dim: int):
    """At the last position, every frequency turns so far that its last bit moves the angle by more than the bound."""
    rope, places = kvp.Rope(theta, dim, angles="float32"), (1, 99_991, 2**24 - 1)
    cos, sin = rope_tables(rope, np.asarray(places, np.int32))
    for row, position in enumerate(places):
        angle = (np.float32(position) * engines_frequencies(theta, dim)).astype(np.float64)
        np.testing.assert_allclose(cos[row], np.cos(angle), atol=3e-7)
        np.testing.assert_allclose(sin[row], np.sin(angle), atol=3e-7)
    exact = rope_tables(kvp.Rope(theta, dim), np.asarray(places, np.int32))[0]
    assert np.abs(cos[1] - exact[1]).max() > 1e-3


def test_float32_relocation_turns_by_the_difference_of_the_engines_angles():
    x = jnp.asarray(keys(FLOAT32, 4))
    old, new = np.arange(4, dtype=np.float32) + 1000, np.arange(4, dtype=np.float32) + 31_037
    moved = rotate(rotate(x, *TABLES(FLOAT32, old)), *RELOCATION(FLOAT32, old, new))
    np.testing.assert_allclose(moved, rotate(x, *TABLES(FLOAT32, new)), atol=3e-6)


def llama3(frequency: float) -> float:
    """Transformers' rule for factor 4, an original context of 4096 and frequency factors of 1 and 4."""
    turns = 4096 * frequency / (2 * np.pi)
    if not 1 <= turns <= 4:
        return frequency if turns > 4 else frequency / 4
    smooth = (turns - 1) / (4 - 1)
    return (1 - smooth) * frequency / 4 + smooth * frequency


def yarn(index: int, frequency: float) -> float:
    """NTK by parts: plain up to the frequency of 32 turns over the original context, a fourth from that of one on."""
    low, high = (64 * np.log(4096 / (turns * 2 * np.pi)) / (2 * np.log(1e4)) for turns in (32, 1))
    ramp = np.clip((index - np.floor(low)) / (np.ceil(high) - np.floor(low)), 0, 1)
    return frequency / 4 * ramp + frequency * (1 - ramp)


def test_scaled_frequencies_follow_their_definitions():
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    short, long = (tuple(float(number + first) for number in range(32)) for first in (1, 9))
    longrope = {"factor": 32, "original": 4096, "short_factor": short, "long_factor": long}
    definitions = [
        (None, plain, 1),
        (Scaling("linear", factor=2), plain / 2, 1),
        (Scaling("llama3", factor=4, original=4096), [llama3(own) for own in plain], 1),
        (Scaling("yarn", factor=4, original=4096), [yarn(*pair) for pair in enumerate(plain)], 1 + 0.1 * np.log(4)),
        (Scaling("longrope", regime="short", **longrope), plain / short, 1.190238),
        (Scaling("longrope", regime="long", **longrope), plain / long, 1.190238),
        (Scaling("dynamic", factor=2, original=1000, length=2000), (1e4 * 3 ** (64 / 62)) ** -(np.arange(32) / 32), 1),
        (Scaling("dynamic", factor=2, original=1000, length=900), plain, 1),
        (Scaling("proportional", factor=2, share=0.5), np.where(np.arange(32) < 16, plain / 2, 0), 1),
    ]
    for scaling, frequencies, attention in definitions:
        rope = kvp.Rope(1e4, 64, scaling=scaling)
        np.testing.assert_allclose(rope.inverse_frequencies, frequencies, rtol=1e-12, err_msg=str(scaling))
        assert rope.attention_scaling == pytest.approx(attention, rel=1e-6)
    weighed = Scaling("yarn", factor=4, original=4096, mscale=0.7, mscale_all_dim=0.5)
    assert weighed.attention_scaling == pytest.approx((0.07 * np.log(4) + 1) / (0.05 * np.log(4) + 1))


def test_what_follows_begins_behind_the_last_position():
    assert end_position(np.array([[0, 7, 3], [1, 2, 2]])).tolist() == [7, 2]
    # A text ends where its axes are equal; a grid, whose axes differ at its last token, at its largest extent.
    text, grid = [[0, 9, 0], [4, 4, 4]], [[0, 0, 0], [2, 5, 3]]
    assert end_position(np.array([text, grid])).tolist() == [4, 5]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_ropes_that_define_no_angle_are_refused():
    for error, message, options in (
        (LayoutError, "63", {"sections": (16, 24, 23)}),
        (LayoutError, "width 64", {"width": 64}),
        (InputError, "longrope", {"scaling": Scaling("longrope", factor=2, original=4096)}),
    ):
        with pytest.raises(error, match=message):
            kvp.Rope(**{"theta": 1e4, "dim": 128, **options})


def test_positions_beyond_a_ropes_reach_are_refused():
    half = ROPES["half"]
    short = Scaling("longrope", factor=2, original=64, short_factor=(1.0,) * 32, regime="short")
    dynamic = Scaling("dynamic", factor=2, original=64, length=100)
    for rope, position, message in (
        (half, 2**30, str(2**30)),
        (half, np.nan, "finite"),
        (kvp.Rope(1e4, 64, scaling=short), 64, "position 64"),
        (kvp.Rope(1e4, 64, scaling=dynamic), 100, "position 100"),
    ):
        with pytest.raises(InputError, match=message):
            check_positions(rope, np.array([0, position]), np.array(0))
    check_positions(half, np.array([2**30 - 1]), np.array(0))
    check_positions(kvp.Rope(1e4, 64, scaling=short), np.array([-70, 63]), np.array(0))
    check_positions(kvp.Rope(1e4, 64, scaling=dynamic), np.array([99]), np.array(0))


def test_positions_beyond_int32_are_refused_not_wrapped(unchecked):
    layout, far = LAYOUTS["gqa"], 2**31
    kv, local = kv_of(layout, 12), local_of(layout, 12)
    for call in (
        lambda: kvp.relocate(layout, kv, far, 3),
        lambda: kvp.relocate(layout, kv, 3, np.full(12, -far - 1)),
        lambda: kvp.to_engine(layout, kv, local, 2**70),
        lambda: kvp.to_engine(layout, kv, local, jnp.asarray(far, jnp.uint32)),
        lambda: rope_tables(layout.rope, np.full(12, far)),
    ):
        with pytest.raises(InputError, match="expected"):
            call()


def test_what_would_broadcast_or_round_is_refused(unchecked):
    layout = LAYOUTS["gqa"]
    kv, local = kv_of(layout, 24), local_of(layout, 24)
    engine, batch = kvp.to_engine(layout, kv, local, 0), kv_of(layout, 5, batch=(2,))
    for error, call in (
        (InputError, lambda: kvp.to_engine(layout, batch, np.arange(5), np.zeros(3, np.int32))),
        (InputError, lambda: kvp.to_engine(layout, kv, local + 16777217.0, 0)),
        (InputError, lambda: kvp.relocate(layout, engine, 0, 16777217.0)),
        (InputError, lambda: kvp.to_engine(layout, kv, local, 1.5)),
        (InputError, lambda: kvp.to_engine(layout, kv, local[:1], 0)),
        (LayoutError, lambda: kvp.to_engine(layout, {"k": kv["k"]}, local, 0)),
        (LayoutError, lambda: kvp.to_engine(layout, engine, local, 0)),
        (LayoutError, lambda: kvp.to_phase_free(layout, kvp.core.PhaseFreeKV(kv), local, 0)),
        (ShapeError, lambda: kvp.to_engine(layout, kv | {"v": kv["v"][:, :5]}, local, 0)),
        (ShapeError, lambda: kvp.to_engine(layout, kv | {"v": kv["v"].astype(jnp.int32)}, local, 0)),
    ):
        with pytest.raises(error, match=r"got .*expected"):
            call()
    kvp.relocate(layout, engine, 0, 16777217)
