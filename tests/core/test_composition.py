"""Readouts and transitions of segments merge to those of their union, and a deficit's statistics are NumPy's."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import joined
from kvpatch_jax.core import (
    attention_with_lse,
    check_parts,
    compose,
    deficit,
    fold,
    identity,
    merge_readouts,
    to_engine,
)
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from tests.shared.arrays import placed
from tests.shared.transition_cases import LAYOUT, LAYOUTS, LINEAR, PARTS, PLAIN, close, composed, drawn

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)))
COMPOSE = jax.jit(compose)
GRADIENTS = jax.jit(jax.grad(lambda q, k, v, mask: attention_with_lse(q, k, v, mask)[0].sum(), argnums=(0, 1, 2)))


def changed(value: np.ndarray, place: tuple, number: float) -> np.ndarray:
    """A copy with one number changed."""
    copy = value.copy()
    copy[place] = number
    return copy


def empty_readout(width: int, o: float = 0.0, lse: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """The readout of a segment that nothing reads."""
    return np.full((2, 5, 4, width), o, np.float32), np.full((2, 5, 4), lse, np.float32)


def softmax_attention(mask: np.ndarray, scale: float = 8**-0.5) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (K, V))
    scores = np.einsum("btnh,bsnh->btns", Q.astype(np.float64), keys) * scale
    weights = np.exp(scores) * mask[:, :, None]
    lse = np.log(weights.sum(-1))
    return np.einsum("btns,bsne->btne", weights / weights.sum(-1, keepdims=True), values), lse


def expect_close(found, wanted, atol: float = 2e-6) -> None:
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, atol=atol)


@pytest.mark.parametrize("shape", [(12,), (2, 1, 12), (2, 5, 12)])
def test_a_readout_is_softmax_attention_with_any_mask(shape: tuple[int, ...]):
    mask = np.random.default_rng(3).random(shape) > 0.4
    expected = np.broadcast_to(mask, (2, 5, 12))
    expect_close(attention_with_lse(Q, K, V, placed(mask)), softmax_attention(expected))


def test_a_readout_without_a_mask_reads_all_by_a_scale_that_may_be_traced():
    everything = np.ones((2, 5, 12), bool)
    expect_close(attention_with_lse(Q, K, V), softmax_attention(everything))
    scaled = jax.jit(lambda scale: attention_with_lse(Q, K, V, scale=scale))(0.3)
    expect_close(scaled, softmax_attention(everything, 0.3))


@pytest.mark.parametrize("cuts", [(4,), (8,), (4, 8)])
def test_merging_a_split_is_the_union(cuts: tuple[int, ...]):
    """Of segments of few lengths, because each is compiled."""
    mask = np.random.default_rng(1).random((2, 5, 12)) > 0.4
    edges = [0, *cuts, 12]
    parts = [attention_with_lse(Q, K[:, a:b], V[:, a:b], placed(mask[..., a:b])) for a, b in itertools.pairwise(edges)]
    o, lse = merge_readouts(*reversed(parts), empty_readout(6))
    whole, whole_lse = attention_with_lse(Q, K, V, placed(mask))
    np.testing.assert_allclose(o, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)


@pytest.mark.parametrize(("lse", "o"), [(np.inf, np.nan), (-np.inf, 0.0)])
def test_empty_readouts_of_any_engine_add_nothing(lse: float, o: float):
    readout, nothing = attention_with_lse(Q, K, V), empty_readout(6, o, lse)
    for order in ((readout, nothing), (nothing, readout), (nothing, readout, nothing)):
        expect_close(merge_readouts(*order), readout, 1e-6)
    value, mass = merge_readouts(nothing, nothing)
    assert not value.any()
    assert (mass == -jnp.inf).all()
    gradient = jax.grad(lambda x: merge_readouts((x, readout[1]), nothing)[0].sum())(readout[0])
    np.testing.assert_allclose(gradient, 1.0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_masked_does_not_reach_a_readout_nor_its_derivative(bad: float):
    mask, k, v = np.arange(12) < 7, changed(K, (slice(None), 9), bad), changed(V, (slice(None), 9), bad)
    expect_close(attention_with_lse(Q, k, v, placed(mask)), softmax_attention(np.broadcast_to(mask, (2, 5, 12))))
    assert all(np.isfinite(gradient).all() for gradient in GRADIENTS(Q, k, v, placed(mask)))
    # A bad slot reaches those queries that read it: query heads 2 and 3 read KV head 1.
    causal, spoilt = np.arange(12) <= np.array([3, 11, 8, 9, 0])[:, None], np.zeros((2, 5, 4), bool)
    spoilt[0, [1, 3], 2:] = True
    o, lse = attention_with_lse(Q, K, changed(V, (0, 9, 1), bad), placed(np.broadcast_to(causal, (2, 5, 12))))
    for found in (np.isnan(o).all(-1), np.isnan(o).any(-1), np.isnan(lse)):
        np.testing.assert_array_equal(found, spoilt)
    # A query that reads nothing is empty_readout.
    mask = placed(np.zeros(12, bool))
    o, lse = attention_with_lse(Q, K, V, mask)
    assert not o.any()
    assert (lse == -jnp.inf).all()
    assert all(np.isfinite(gradient).all() for gradient in GRADIENTS(Q, K, V, mask))


def test_readouts_that_do_not_fit_are_refused(unchecked):
    for message, call in (
        ("multiple of query heads", lambda: attention_with_lse(Q[:, :, :3], K, V)),
        ("mask: got float32; expected an array of bool", lambda: attention_with_lse(Q, K, V, np.zeros(12, "f4"))),
        ("expected", lambda: merge_readouts(empty_readout(6), empty_readout(7))),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


# ------------------------------------------------------------------------------------------------------- transitions


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
    for count in (2, 3, 5):
        close(fold(stretches[:count], lengths[:count]), composed(stretches[:count], lengths[:count]), 1e-5)
    # Composition is associative.
    front, behind = fold(stretches[:2], lengths[:2]), fold(stretches[2:], lengths[2:])
    close(compose(front, behind, sum(lengths[2:])), composed(stretches, lengths), 1e-5)


def test_rows_of_a_batch_may_have_lengths_of_their_own():
    lengths, batch = (1, 2, 5), (3,)
    first, second = stretch(9, 0, batch), stretch(9, 1, batch)
    joint = COMPOSE(first, second, np.array(lengths))
    for row, length in enumerate(lengths):
        pieces = [{name: value[:, row] for name, value in parts.items()} for parts in (first, second)]
        close({name: np.asarray(value)[:, row] for name, value in joint.items()}, composed(pieces, [9, length]), 1e-5)


def test_no_tokens_change_nothing():
    parts = stretch(5, 0, (2,))
    nothing = identity(LAYOUT, (2,))
    check_parts(LAYOUT, nothing, "nothing", (2,))
    for joint in (COMPOSE(nothing, parts, 5), COMPOSE(parts, nothing, 0)):
        close(joint, {name: value.astype(np.float64) for name, value in parts.items()}, 1e-6)
    assert identity(PLAIN) == {}
    assert identity(LAYOUT, tail_dtype=jnp.bfloat16)["tail"].dtype == jnp.bfloat16


# ---------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_has_rows_side_by_side_and_transitions_composed(name: str):
    layout, counts = LAYOUTS[name], (2, 1, 5)
    pieces = [drawn(layout, seed, tokens) for seed, tokens in enumerate(counts)]
    parts = [to_engine(layout, kv, np.arange(n, dtype=np.float32), 9) for kv, n in zip(pieces, counts, strict=True)]
    context = joined(*parts)
    layout.check(context)
    wanted = composed(pieces, list(counts))
    close({part: np.asarray(context[part])[:, 0] for part in wanted}, wanted)
    for row in "kv":
        assert (np.asarray(context[row])[:, 0] == np.concatenate([np.asarray(kv[row]) for kv in parts], axis=1)).all()
    # With the true lengths of padded pieces.
    short = joined(*parts, lengths=[2, 1, 1])
    wanted = composed(pieces, [2, 1, 1])
    close({part: np.asarray(short[part])[:, 0] for part in wanted}, wanted)


# ---------------------------------------------------------------------------------------------------------- refusals


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


# ---------------------------------------------------------------------------------------------------------- deficits


LENGTH = 6


def test_statistics_are_numpys_of_the_tokens_that_are_no_padding():
    rng = np.random.default_rng(0)
    value, reference = (rng.standard_normal((3, 8, 2, 4)).astype(np.float32) for _ in range(2))
    # The first layer absorbed nothing; padding may hold anything.
    value[0, :LENGTH], value[:, LENGTH:] = 0, 1e3
    delta = {"k": placed(value)}
    live, other = (array[:, :LENGTH].astype(np.float64) for array in (value, reference))

    norms = [np.sqrt(np.square(array).sum((1, 2, 3))) for array in (live, other)]
    found = deficit.relative_norm(delta, {"k": placed(reference)}, LENGTH)["k"]
    np.testing.assert_allclose(found, norms[0] / norms[1], rtol=1e-5)

    energy = np.square(np.linalg.svd(live[1:].reshape(2, LENGTH, 8), compute_uv=False))
    curve = np.cumsum(energy, -1) / energy.sum(-1, keepdims=True)
    found = np.asarray(deficit.energy_curve(delta, LENGTH)["k"])
    np.testing.assert_allclose(found[1:, :LENGTH], curve, atol=1e-5)
    assert not found[0].any()
    for share, counted in ((0.9, deficit.e90(delta, LENGTH)), (0.5, deficit.e90(delta, LENGTH, 0.5))):
        assert counted["k"].tolist() == [0, *((curve < share).sum(-1) + 1)]

    tokens = np.sort(np.square(live[1:]).sum((2, 3)))[:, ::-1]
    # The parts of a transition have no tokens.
    spread = deficit.token_spread({**delta, "state": delta["k"]}, LENGTH)
    assert list(spread) == ["k"]
    reached = np.cumsum(tokens, -1) / tokens.sum(-1, keepdims=True) < 0.9
    np.testing.assert_allclose(spread["k"], [0, *((reached.sum(-1) + 1) / LENGTH)])
