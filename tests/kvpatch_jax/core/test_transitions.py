"""Transitions: composed in windows, checked, and truncated within a bound. The oracle is NumPy in float64."""
# pyright: reportArgumentType=false

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import (
    KVLayout,
    Rope,
    check_parts,
    compose,
    compose_all,
    dropped,
    fold,
    identity,
    map_bound,
    truncated_map,
)
from kvpatch_jax.errors import DtypeError, InputError, KVPatchError, LayoutError, NotFiniteError, ShapeError

LAYERS, BATCH, HEADS, KEY, VALUE, ROWS, WIDTH = 2, 3, 2, 8, 6, 3, 10
Form = Literal["matrix", "row", "scalar"]
FORMS: list[Form] = ["matrix", "row", "scalar"]
PLAIN = KVLayout.gqa(3, 2, 8, Rope(1e4, 8))


def layout_of(form: Form) -> KVLayout:
    return PLAIN.with_transitions([0, 2], HEADS, KEY, VALUE, decay=form, tail=(ROWS, WIDTH))


def drawn(form: Form, length: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A transition [L, B, R, K, W] of `length` tokens, and the inputs of its convolution, [L, B, length, 1, C]."""
    rng = np.random.default_rng(seed)
    shape = {"matrix": (KEY, HEADS, KEY), "row": (KEY, HEADS, 1), "scalar": (1, HEADS, 1)}[form]
    map_ = rng.uniform(size=(LAYERS, BATCH, *shape)) / (KEY**0.5 if form == "matrix" else 1)
    inputs = rng.normal(size=(LAYERS, BATCH, length, 1, WIDTH))
    behind = np.concatenate((np.zeros((LAYERS, BATCH, ROWS, 1, WIDTH)), inputs), 2)[:, :, -ROWS:]
    state = rng.normal(size=(LAYERS, BATCH, KEY, HEADS, VALUE))
    parts = {"map": map_, "state": state, "tail": behind}
    return {name: array.astype(np.float32) for name, array in parts.items()}, inputs.astype(np.float32)


def matrices(map_: Any) -> np.ndarray:
    """Maps of any form as matrices, [..., K, Dk, Dk] in float64."""
    heads = np.moveaxis(np.asarray(map_, np.float64), -2, -3)
    return heads if heads.shape[-1] > 1 else heads * np.eye(KEY)


def close(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert set(got) == set(expected)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_a_scan_over_a_window_equals_what_is_composed_one_by_one(form: Form):
    """Stretches of fewer tokens than the convolution reads among them, and one of none."""
    lengths = [4, 1, 0, 2, 7]
    stretches, inputs = zip(*(drawn(form, length, seed) for seed, length in enumerate(lengths)), strict=True)
    stacked = {name: np.stack([stretch[name] for stretch in stretches]) for name in stretches[0]}
    prefixes, whole = jax.jit(compose_all)(stacked, np.array(lengths))
    close(whole, fold(stretches, lengths))

    matrix, state = np.eye(KEY), np.zeros((LAYERS, BATCH, HEADS, KEY, VALUE))
    for index, stretch in enumerate(stretches):
        step = matrices(stretch["map"])
        matrix, state = step @ matrix, step @ state + np.moveaxis(stretch["state"].astype(np.float64), -2, -3)
        tail = np.concatenate([np.zeros((LAYERS, BATCH, ROWS, 1, WIDTH)), *inputs[: index + 1]], 2)[:, :, -ROWS:]
        got = {name: array[index] for name, array in prefixes.items()}
        np.testing.assert_allclose(matrices(got["map"]), matrix, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.moveaxis(got["state"], -2, -3), state, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got["tail"], tail)


def test_a_window_without_lengths_has_the_last_tail():
    stretches = [drawn("scalar", 5, seed)[0] for seed in range(3)]
    stacked = {name: np.stack([stretch[name] for stretch in stretches]) for name in stretches[0]}
    close(compose_all(stacked)[1], fold(stretches))
    no_tail = {name: value for name, value in stacked.items() if name != "tail"}
    assert set(compose_all(no_tail, [5, 5, 5])[1]) == {"map", "state"}


def test_each_row_of_a_batch_may_have_lengths_of_its_own():
    pieces = [[drawn("scalar", length, 10 * index + length)[0] for length in (1, 2, 5)] for index in range(2)]
    rows = [
        {name: np.stack([row[name][0, 0] for row in piece])[None] for name in piece[0]} for piece in pieces
    ]  # [1, B, R, K, W]
    counts = np.array([[[1, 2, 5]], [[1, 2, 5]]])
    got = compose_all({name: np.stack([row[name] for row in rows]) for name in rows[0]}, counts)[1]
    for index, length in enumerate((1, 2, 5)):
        first, second = ({name: value[:, index] for name, value in row.items()} for row in rows)
        apart = compose(first, second, length)
        close({name: value[:, index] for name, value in got.items()}, apart)


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_change_nothing(form: Form):
    layout, (own, _) = layout_of(form), drawn(form, 5, 0)
    nothing = identity(layout, (BATCH,))
    check_parts(layout, nothing, "nothing", batch=(BATCH,))
    close(compose(nothing, own, 5), own, 1e-6)
    close(compose(own, nothing, 0), own, 1e-6)
    assert identity(PLAIN) == {}
    assert identity(layout, tail_dtype=jnp.bfloat16)["tail"].dtype == jnp.bfloat16


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_wrong_are_named(form: Form):
    layout, (own, _) = layout_of(form), drawn(form, 5, 0)
    check_parts(layout, own, "parts")
    check_parts(PLAIN, None, "parts")

    def changed(name: str, value: Any) -> dict[str, Any]:
        return {**own, name: value}

    broken = own["state"].copy()
    broken[1, 2, 3, 1, 4] = np.nan
    rows = {name: np.zeros((1, 4, 2, 8), np.float32) for name in ("k", "v")}
    cases: list[tuple[Any, type[KVPatchError], str]] = [
        (rows, LayoutError, r"parts: got \['k', 'v'\]; expected parts of a transition, map, state, tail"),
        (None, LayoutError, "parts: got a NoneType"),
        (own["map"], LayoutError, "parts: got a ndarray"),
        ({name: own[name] for name in ("map", "state")}, LayoutError, r"got \['map', 'state'\]"),
        (changed("state", own["state"][..., :1, :]), ShapeError, r"parts\['state'\]: got shape .* expected \(2, 3, 8"),
        (changed("state", own["state"][:1]), ShapeError, "state"),
        (changed("tail", own["tail"][:, :, :1]), ShapeError, "tail"),
        (changed("map", own["map"][:, 0]), ShapeError, "state"),
        (changed("state", own["state"].astype(int)), DtypeError, "state"),
        (changed("state", None), DtypeError, r"parts\['state'\]: got NoneType"),
        (changed("state", broken), NotFiniteError, r"parts\['state'\]: got nan"),
        (changed("tail", own["tail"] * np.inf), NotFiniteError, r"parts\['tail'\]"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            check_parts(layout, wrong, "parts")
    with pytest.raises(ShapeError, match="map"):
        check_parts(layout, own, "parts", batch=(BATCH + 1,))
    with pytest.raises(LayoutError, match="without transitions"):
        check_parts(PLAIN, own, "parts")
    with pytest.raises(LayoutError, match="expected"):
        layout.check(own, "kv")
    check_parts(layout, changed("state", broken), "parts", values=False)
    if form != "matrix":
        for wrong, value in ((1.5, "1.5"), (-0.25, "-0.25")):
            with pytest.raises(InputError, match=rf"parts\['map'\]: got a decay of {value}; expected 0 to 1"):
                check_parts(layout, changed("map", np.full_like(own["map"], wrong)), "parts")


def decaying(seed: int, per_token: float, tokens: int) -> np.ndarray:
    """Π α (I − β k kᵀ) of random tokens, [Dk, K, Dk] with 16 channels."""
    rng = np.random.default_rng(seed)
    product = np.broadcast_to(np.eye(16), (HEADS, 16, 16))
    for _ in range(tokens):
        key = rng.normal(size=(HEADS, 16, 1))
        key /= np.linalg.norm(key, axis=1, keepdims=True)
        step = np.eye(16) - rng.uniform(size=(HEADS, 1, 1)) * key @ key.swapaxes(1, 2)
        product = np.exp(-per_token) * step @ product
    return np.moveaxis(product, 0, 1).astype(np.float32)


truncate = jax.jit(truncated_map)


@pytest.mark.parametrize("error", [0.3, 1e-2, 1e-4])
def test_a_truncated_map_stays_within_its_bound(error: float):
    """For the worst state too, and with no direction more than it takes."""
    maps = np.stack([decaying(seed, *case) for seed, case in enumerate([(0.0, 8), (0.01, 40), (0.05, 100), (1.0, 50)])])
    got = truncate(maps, error)
    exact = matrices(maps)
    left = exact - matrices(got.map)
    assert (np.linalg.norm(left, 2, axis=(-2, -1)) <= got.bound).all()
    assert (np.asarray(got.bound) <= error).all()
    state = np.random.default_rng(0).normal(size=(16, VALUE))
    assert (np.linalg.norm(left @ state, axis=(-2, -1)) <= np.asarray(got.bound) * np.linalg.norm(state)).all()

    sizes = np.linalg.svd(exact, compute_uv=False)
    np.testing.assert_array_equal(got.rank, (sizes > error).sum(-1))
    np.testing.assert_array_equal(dropped(maps, error), sizes[..., 0] <= error)
    bound = np.asarray(map_bound(maps))
    assert (sizes[..., 0] <= bound).all()
    assert (bound <= 1.0001 * sizes[..., 0] + 1e-30).all()
    assert np.asarray(got.rank).min() == 0
    assert np.asarray(got.map)[np.asarray(got.rank).max(-1) == 0].any() == False  # noqa: E712


def test_a_map_that_needs_every_direction_stays_as_it_is():
    maps = decaying(0, 0.01, 8)
    got = truncate(maps, 0.0)
    np.testing.assert_array_equal(got.map, maps)
    np.testing.assert_array_equal(got.bound, 0)
    np.testing.assert_array_equal(got.rank, 16)


@pytest.mark.parametrize("form", FORMS[1:])
def test_decays_below_the_error_are_dropped(form: Form):
    map_ = drawn(form, 5, 3)[0]["map"]
    limits = np.array([0.4, 0.9], np.float32)
    for error in (0.4, limits):
        got = truncate(map_, error)
        kept = map_[..., 0] > np.broadcast_to(error, HEADS)
        np.testing.assert_array_equal(got.map[..., 0], np.where(kept, map_[..., 0], 0))
        np.testing.assert_array_equal(got.rank, kept.sum(-2))
        np.testing.assert_array_equal(got.bound, np.where(kept, 0, map_[..., 0]).max(-2))
        np.testing.assert_array_equal(dropped(map_, error), ~kept.any(-2))
    np.testing.assert_array_equal(map_bound(map_), map_[..., 0].max(-2))
