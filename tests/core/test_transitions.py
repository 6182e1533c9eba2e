"""Transitions of hybrid models compose as matrices do, in any grouping, batch and context, and are checked.

The oracle is NumPy in float64, head by head (`tests.shared.transition_cases.composed`).
"""
# pyright: reportArgumentType=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import joined
from kvpatch_jax.core import check_parts, compose, fold, identity, to_engine
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from tests.shared.transition_cases import LAYOUT, LAYOUTS, LINEAR, PARTS, PLAIN, close, composed, drawn


def stretch(length: int, seed: int, batch: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """The transition of some tokens; the tail of fewer than its convolution reads begins with zeros."""
    parts = {name: value for name, value in drawn(seed=seed, batch=batch).items() if name in PARTS}
    rows = parts["tail"].shape[-3]
    parts["tail"][..., : rows - min(length, rows), :, :] = 0
    return parts


def test_stretches_are_composed_as_matrices_are():
    """Stretches of fewer tokens than the convolution reads among them, and one of none."""
    lengths = [4, 1, 0, 2, 7]
    stretches = [stretch(length, seed) for seed, length in enumerate(lengths)]
    for count in range(1, len(lengths) + 1):
        close(fold(stretches[:count], lengths[:count]), composed(stretches[:count], lengths[:count]), 1e-5)
    # Composition is associative.
    front, behind = fold(stretches[:2], lengths[:2]), fold(stretches[2:], lengths[2:])
    close(compose(front, behind, sum(lengths[2:])), composed(stretches, lengths), 1e-5)


def test_rows_of_a_batch_may_have_lengths_of_their_own():
    lengths, batch = (1, 2, 5), (3,)
    first, second = stretch(9, 0, batch), stretch(9, 1, batch)
    found = compose(first, second, jnp.array(lengths))
    for row, length in enumerate(lengths):
        pieces = [{name: value[:, row] for name, value in parts.items()} for parts in (first, second)]
        close({name: np.asarray(value)[:, row] for name, value in found.items()}, composed(pieces, [9, length]), 1e-5)


def test_no_tokens_change_nothing():
    parts = stretch(5, 0, (2,))
    nothing = identity(LAYOUT, (2,))
    check_parts(LAYOUT, nothing, "nothing", (2,))
    for found in (compose(nothing, parts, 5), compose(parts, nothing, 0)):
        close(found, {name: value.astype(np.float64) for name, value in parts.items()}, 1e-6)
    assert identity(PLAIN) == {}
    assert identity(LAYOUT, tail_dtype=jnp.bfloat16)["tail"].dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_has_rows_side_by_side_and_transitions_composed(name: str):
    layout, counts = LAYOUTS[name], (2, 1, 5)
    pieces = [drawn(layout, seed, tokens) for seed, tokens in enumerate(counts)]
    placed = [to_engine(layout, kv, np.arange(n, dtype=np.float32), 9) for kv, n in zip(pieces, counts, strict=True)]
    context = joined(*placed)
    layout.check(context)
    wanted = composed(pieces, list(counts))
    close({part: np.asarray(context[part])[:, 0] for part in wanted}, wanted)
    for row in "kv":
        assert (np.asarray(context[row])[:, 0] == np.concatenate([np.asarray(kv[row]) for kv in placed], axis=1)).all()
    # With the true lengths of padded pieces.
    short = joined(*placed, lengths=[2, 1, 1])
    wanted = composed(pieces, [2, 1, 1])
    close({part: np.asarray(short[part])[:, 0] for part in wanted}, wanted)


# ------------------------------------------------------------------------------------------------------- refusals


def test_parts_that_make_no_context_are_refused(unchecked):
    kv, other = drawn(), drawn(PLAIN.with_transitions(LINEAR, 3, 5, 4, tail=(3, 10)))
    for parts, error in (
        ((kv, other), ShapeError),
        (({name: value for name, value in kv.items() if name != "state"},), LayoutError),
    ):
        with pytest.raises(error, match="joined"):
            joined(*parts)
    with pytest.raises(InputError, match="joined: got 1 lengths of 2 parts"):
        joined(kv, kv, lengths=[3])


def test_parts_that_are_wrong_are_named(unchecked):
    parts: dict[str, Any] = stretch(5, 0, (3,))
    check_parts(LAYOUT, parts, "parts", (3,))
    check_parts(PLAIN, None, "parts", (3,))
    for layout, wrong, error, message in (
        (LAYOUT, None, LayoutError, "parts: got a NoneType"),
        (LAYOUT, {name: parts[name] for name in ("map", "state")}, LayoutError, r"got \['map', 'state'\]"),
        (LAYOUT, parts | {"tail": parts["tail"][:, :, :1]}, ShapeError, "tail"),
        (LAYOUT, parts | {"state": parts["state"].astype(int)}, ShapeError, "state"),
        (LAYOUT, {name: value[:, :2] for name, value in parts.items()}, ShapeError, "map"),
        (PLAIN, parts, LayoutError, "without transitions"),
    ):
        with pytest.raises(error, match=message):
            check_parts(layout, wrong, "parts", (3,))
