"""Transitions: composed in windows, and checked. The oracle is NumPy in float64."""
# pyright: reportArgumentType=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import (
    KVLayout,
    Rope,
    check_parts,
    compose,
    fold,
    identity,
)
from kvpatch_jax.errors import KVPatchError, LayoutError, ShapeError

LAYERS, BATCH, HEADS, KEY, VALUE, ROWS, WIDTH = 2, 3, 2, 8, 6, 3, 10
PLAIN = KVLayout.gqa(3, 2, 8, Rope(1e4, 8))
LAYOUT = PLAIN.with_transitions([0, 2], HEADS, KEY, VALUE, tail=(ROWS, WIDTH))


def drawn(length: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A transition [L, B, R, K, W] of `length` tokens, and the inputs of its convolution, [L, B, length, 1, C]."""
    rng = np.random.default_rng(seed)
    map_ = rng.uniform(size=(LAYERS, BATCH, KEY, HEADS, KEY)) / KEY**0.5
    inputs = rng.normal(size=(LAYERS, BATCH, length, 1, WIDTH))
    behind = np.concatenate((np.zeros((LAYERS, BATCH, ROWS, 1, WIDTH)), inputs), 2)[:, :, -ROWS:]
    state = rng.normal(size=(LAYERS, BATCH, KEY, HEADS, VALUE))
    parts = {"map": map_, "state": state, "tail": behind}
    return {name: array.astype(np.float32) for name, array in parts.items()}, inputs.astype(np.float32)


def matrices(map_: Any) -> np.ndarray:
    """Maps as matrices, [..., K, Dk, Dk] in float64."""
    return np.moveaxis(np.asarray(map_, np.float64), -2, -3)


def close(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert set(got) == set(expected)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_stretches_are_composed_as_matrices_are():
    """Stretches of fewer tokens than the convolution reads among them, and one of none."""
    lengths = [4, 1, 0, 2, 7]
    stretches, inputs = zip(*(drawn(length, seed) for seed, length in enumerate(lengths)), strict=True)
    matrix, state = np.eye(KEY), np.zeros((LAYERS, BATCH, HEADS, KEY, VALUE))
    for index, stretch in enumerate(stretches):
        step = matrices(stretch["map"])
        matrix, state = step @ matrix, step @ state + np.moveaxis(stretch["state"].astype(np.float64), -2, -3)
        tail = np.concatenate([np.zeros((LAYERS, BATCH, ROWS, 1, WIDTH)), *inputs[: index + 1]], 2)[:, :, -ROWS:]
        got = fold(stretches[: index + 1], lengths[: index + 1])
        np.testing.assert_allclose(matrices(got["map"]), matrix, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.moveaxis(got["state"], -2, -3), state, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got["tail"], tail)


def test_each_row_of_a_batch_may_have_lengths_of_its_own():
    pieces = [[drawn(length, 10 * index + length)[0] for length in (1, 2, 5)] for index in range(2)]
    rows = [
        {name: np.stack([row[name][0, 0] for row in piece])[None] for name in piece[0]} for piece in pieces
    ]  # [1, B, R, K, W]
    got = compose(rows[0], rows[1], jnp.array([[1, 2, 5]]))
    for index, length in enumerate((1, 2, 5)):
        first, second = ({name: value[:, index] for name, value in row.items()} for row in rows)
        apart = compose(first, second, length)
        close({name: value[:, index] for name, value in got.items()}, apart)


def test_no_tokens_change_nothing():
    layout, (own, _) = LAYOUT, drawn(5, 0)
    nothing = identity(layout, (BATCH,))
    check_parts(layout, nothing, "nothing", (BATCH,))
    close(compose(nothing, own, 5), own, 1e-6)
    close(compose(own, nothing, 0), own, 1e-6)
    assert identity(PLAIN) == {}
    assert identity(layout, tail_dtype=jnp.bfloat16)["tail"].dtype == jnp.bfloat16


@pytest.mark.usefixtures("unchecked")
def test_parts_that_are_wrong_are_named():
    layout, (own, _) = LAYOUT, drawn(5, 0)
    check_parts(layout, own, "parts", (BATCH,))
    check_parts(PLAIN, None, "parts", (BATCH,))

    def changed(name: str, value: Any) -> dict[str, Any]:
        return {**own, name: value}

    rows = {name: np.zeros((1, 4, 2, 8), np.float32) for name in ("k", "v")}
    cases: list[tuple[Any, type[KVPatchError], str]] = [
        (rows, LayoutError, r"parts: got \['k', 'v'\]; expected parts of a transition, map, state, tail"),
        (None, LayoutError, "parts: got a NoneType"),
        (own["map"], LayoutError, "parts: got a ndarray"),
        ({name: own[name] for name in ("map", "state")}, LayoutError, r"got \['map', 'state'\]"),
        (
            changed("state", own["state"][..., :1, :]),
            ShapeError,
            r"parts\['state'\]: got float32 .* expected floating-point \(2, 3, 8",
        ),
        (changed("state", own["state"][:1]), ShapeError, "state"),
        (changed("tail", own["tail"][:, :, :1]), ShapeError, "tail"),
        (changed("map", own["map"][:, 0]), ShapeError, "map"),
        (changed("state", own["state"].astype(int)), ShapeError, "state"),
        (changed("state", None), ShapeError, r"parts\['state'\]: got NoneType"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            check_parts(layout, wrong, "parts", (BATCH,))
    with pytest.raises(ShapeError, match="map"):
        check_parts(layout, own, "parts", (BATCH + 1,))
    with pytest.raises(LayoutError, match="without transitions"):
        check_parts(PLAIN, own, "parts", (BATCH,))
    with pytest.raises(LayoutError, match="expected"):
        layout.check(own, "kv")
