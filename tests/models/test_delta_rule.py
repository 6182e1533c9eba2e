"""The delta rule in blocks against the rule as it is written, token by token in float64, and windows of chunks.

Windows are drawn with chunks of many lengths, padded to a few shapes so that few programs are compiled.
"""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import fold
from kvpatch_jax.models.decoder.delta_rule import RuleOutput, delta_rule
from tests.shared.examples import examples

HEADS, KEY, VALUE = 2, 8, 6


class Drawn(NamedTuple):
    """Inputs of a rule, [B, T, K, ·]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray


def drawn(rng: np.random.Generator, batch: int, tokens: int, decays: tuple[float, float] = (-6, 1.4)) -> Drawn:
    """Draws tokens; the log decay of each is −10ᵘ, u within `decays`."""
    leading = (batch, tokens, HEADS)

    def unit(width: int) -> np.ndarray:
        x = rng.normal(size=(*leading, width))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    rate = -(10.0 ** rng.uniform(*decays, size=leading))
    beta = rng.uniform(0.01, 1, size=leading).astype(np.float32)
    value = rng.normal(size=(*leading, VALUE)).astype(np.float32)
    return Drawn(unit(KEY), unit(KEY), value, rate.astype(np.float32), beta)


def by_token(inputs: Drawn, state: np.ndarray | None = None, counted: np.ndarray | None = None) -> dict[str, Any]:
    """The rule as it is written, in float64: outputs, M as a matrix, B and what becomes of a state [B, Dk, K, Dv]."""
    query, key, value, rate = (array.astype(np.float64) for array in inputs[:4])
    batch, tokens = key.shape[:2]
    width, columns = key.shape[-1], value.shape[-1]
    after = np.zeros((batch, HEADS, width, columns)) if state is None else state.astype(np.float64).swapaxes(1, 2)
    own, matrix = np.zeros_like(after), np.broadcast_to(np.eye(width), (batch, HEADS, width, width))
    output = np.zeros((batch, tokens, HEADS, columns))
    for t in range(tokens):
        k, strength = key[:, t, :, :, None], inputs.beta[:, t, :, None, None].astype(np.float64)
        step = np.eye(width) * np.exp(rate[:, t])[..., None, None]
        step = step - strength * k @ (k.swapaxes(-1, -2) @ step)
        written = strength * k @ value[:, t, :, None]
        if counted is not None:
            there = counted[:, t, None, None, None]
            step, written = np.where(there, step, np.eye(width)), np.where(there, written, 0.0)
        after, own, matrix = step @ after + written, step @ own + written, step @ matrix
        output[:, t] = np.einsum("bkdv,bkd->bkv", after, query[:, t])
    back = {"map": matrix, "state": own, "after": after}
    return {"output": output} | {name: array.swapaxes(1, 2) for name, array in back.items()}


def difference(got: Any, expected: Any) -> float:
    """The norm of what differs by the norm of what was expected, of the worst head of [..., R, K, W]."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    norms = np.linalg.norm(expected, axis=(-3, -1))
    return float((np.linalg.norm(got - expected, axis=(-3, -1)) / np.maximum(norms, 1e-30)).max())


rule = jax.jit(delta_rule, static_argnames="with_map")


def test_blocks_equal_the_rule_as_it_is_written():
    """150 tokens are two blocks and some of a third; the state in front is large, and seen by no B."""
    rng = np.random.default_rng(0)
    inputs = drawn(rng, 2, 150)
    state = 30 * rng.normal(size=(2, KEY, HEADS, VALUE)).astype(np.float32)
    counted = rng.uniform(size=(2, 150)) < 0.8
    got = rule(*inputs, state, counted=counted)
    expected = by_token(inputs, state, counted)
    assert difference(np.where(counted[..., None, None], got.output, expected["output"]), expected["output"]) < 2e-6
    assert difference(got.state, expected["state"]) < 2e-6
    assert difference(got.after, expected["after"]) < 2e-6
    assert np.abs(np.asarray(got.map) - expected["map"]).max() < 2e-6


def test_tokens_one_by_one_equal_all_at_once():
    """As an answer is decoded: each token behind the state that the last one left."""
    rng = np.random.default_rng(1)
    inputs = drawn(rng, 2, 5, (-3, 0))
    state = rng.normal(size=(2, KEY, HEADS, VALUE)).astype(np.float32)
    expected, held, maps = by_token(inputs, state), jnp.asarray(state), np.eye(KEY)
    for t in range(5):
        got = rule(*(array[:, t : t + 1] for array in inputs), held)
        assert difference(got.output[:, 0, None], expected["output"][:, t, None]) < 1e-6
        assert difference(got.after, got.state + np.einsum("bikj,bjkv->bikv", np.asarray(got.map), held)) < 1e-6
        held = got.after
        maps = np.einsum("bikj,bkjl->bkil", np.asarray(got.map), np.broadcast_to(maps, (2, HEADS, KEY, KEY)))
    assert difference(held, expected["after"]) < 1e-6
    assert difference(maps.swapaxes(1, 2), expected["map"]) < 1e-6


@pytest.mark.nightly
def test_weak_decays_behind_strong_ones_stay_exact():
    """Differences of two sums of log decays would be off by 1e-4 here."""
    rng = np.random.default_rng(2)
    inputs = drawn(rng, 1, 64, (-3, -2))
    inputs.log_decay[:, :40] = -30
    got, expected = rule(*inputs), by_token(inputs)
    assert difference(got.output[0, :, None], expected["output"][0, :, None]) < 5e-6
    assert difference(got.state, expected["state"]) < 5e-6
    assert np.isfinite(np.asarray(rule(*inputs._replace(log_decay=inputs.log_decay * 1e4)).output)).all()


@pytest.mark.nightly
def test_keys_alike_stay_exact():
    """One key, written again and again: powers of the matrix that is inverted reach 1e18."""
    rng = np.random.default_rng(3)
    inputs = drawn(rng, 1, 64, (-6, -5))
    inputs.key[:] = inputs.key[:, :1]
    inputs.beta[:] = 0.99
    got, expected = rule(*inputs), by_token(inputs)
    assert difference(got.output[0, :, None], expected["output"][0, :, None]) < 5e-6
    assert difference(got.state, expected["state"]) < 5e-6


@pytest.mark.nightly
def test_padding_changes_nothing_bit_by_bit():
    """Whatever the padding holds, and wherever it is; and padding alone is the transition of no tokens."""
    rng = np.random.default_rng(4)
    inputs = drawn(rng, 2, 150)
    state = rng.normal(size=(2, KEY, HEADS, VALUE)).astype(np.float32)
    counted = rng.uniform(size=(2, 150)) < 0.7
    counted[1] = False
    spoilt = [np.where(counted.reshape(2, 150, *[1] * (array.ndim - 2)), array, np.nan) for array in inputs]
    first, second = rule(*inputs, state, counted=counted), rule(*spoilt, state, counted=counted)
    for name in ("map", "state", "after"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    np.testing.assert_array_equal(first.output[counted], second.output[counted])
    assert np.isfinite(second.output[counted]).all()
    np.testing.assert_array_equal(first.after[1], state[1])
    np.testing.assert_array_equal(first.state[1], 0)
    np.testing.assert_array_equal(np.asarray(first.map)[1], np.broadcast_to(np.eye(KEY)[:, None], (KEY, HEADS, KEY)))


def test_what_is_not_asked_for_is_not_there():
    inputs = drawn(np.random.default_rng(5), 2, 150)
    got, asked = rule(*inputs, with_map=False), rule(*inputs)
    assert got.map is None
    np.testing.assert_allclose(got.output, asked.output, atol=1e-6)
    np.testing.assert_array_equal(got.state, got.after)


# Windows: chunks are rows of a batch, each padded to `room`; the whole is the same tokens in one row.


@jax.jit
def transitions_of(inputs: Drawn, counted: jax.Array, order: jax.Array) -> dict[str, jax.Array]:
    """The transition of a window's chunks in an order, composed from their own."""
    own: RuleOutput = delta_rule(*inputs, counted=counted)
    return fold([{"map": own.map[place], "state": own.state[place]} for place in order])  # pyright: ignore[reportOptionalSubscript]


def in_one(inputs: Drawn, order: Any) -> Drawn:
    """Chunks [N, T, ...] in an order as one row of tokens [1, N·T, ...]."""
    return jax.tree.map(lambda array: array[order].reshape(1, -1, *array.shape[2:]), inputs)


@jax.jit
def whole_of(inputs: Drawn, counted: jax.Array, order: jax.Array) -> dict[str, jax.Array]:
    """The transition of the same tokens in one row."""
    got: RuleOutput = delta_rule(*in_one(inputs, order), counted=counted[order].reshape(1, -1))
    return {"map": got.map[0], "state": got.state[0]}  # pyright: ignore[reportOptionalSubscript]


decays = st.floats(-6, 1.477)


@pytest.mark.nightly
@examples(12)
@hypothesis.given(
    seed=st.integers(0, 2**31), lengths=st.lists(st.integers(1, 300), min_size=3, max_size=3), low=decays, high=decays
)
def test_windows_compose_to_the_whole(seed: int, lengths: list[int], low: float, high: float):
    """Transitions composed in a drawn order, and the rule over all of it, against the oracle."""
    rng = np.random.default_rng(seed)
    inputs = drawn(rng, len(lengths), 320, (min(low, high), max(low, high)))
    counted = np.arange(320) < np.array(lengths)[:, None]
    order = rng.permutation(len(lengths))
    expected = by_token(jax.tree.map(lambda array: array[order][counted[order]][None], inputs))
    for got in (transitions_of(inputs, counted, order), whole_of(inputs, counted, order)):
        assert difference(got["state"], expected["state"][0]) < 1e-5
        assert np.abs(np.asarray(got["map"][None]) - expected["map"]).max() < 1e-5


@pytest.mark.nightly
def test_gradients_compose_to_the_whole():
    """Of a scalar of the composed state, against the whole's."""
    rng = np.random.default_rng(6)
    inputs = drawn(rng, 3, 70, (-3, 0))
    counted, order = np.arange(70) < np.array([[70], [33], [1]]), np.array([2, 0, 1])
    weight = rng.normal(size=(KEY, HEADS, VALUE)).astype(np.float32)

    def scalar(inputs: Drawn, of: Any) -> jax.Array:
        return (of(inputs, counted, order)["state"] * weight).sum()

    gradients = []
    for of in (transitions_of, whole_of):
        gradient = jax.jit(jax.grad(functools.partial(scalar, of=of)))(inputs)
        gradients.append(jax.tree.map(lambda array: np.asarray(array, np.float64), gradient))
    composed, whole = gradients
    for name in ("key", "value", "log_decay", "beta"):
        got, expected = getattr(composed, name), getattr(whole, name)
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.nightly
def test_memory_grows_with_tokens_alone():
    """At a layer of Qwen3.5-9B, 32 heads of 128 · 128, forwards and backwards: nothing of [T, T]."""

    def compiled(tokens: int, backwards: bool) -> int:
        shape = jax.ShapeDtypeStruct
        heads = (1, tokens, 32)
        arrays = [shape((*heads, 128), jnp.float32)] * 3 + [shape(heads, jnp.float32)] * 2
        run = lambda *arrays: delta_rule(*arrays)
        total = lambda *arrays: sum(part.sum() for part in delta_rule(*arrays) if part is not None)
        program = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4)) if backwards else run)
        return program.lower(*arrays).compile().memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]

    for backwards in (False, True):
        short, long = compiled(1024, backwards), compiled(4096, backwards)
        assert long < 4.2 * short
        inputs = 4096 * 32 * 128 * 4 * 4
        assert long < (8 if backwards else 3) * inputs
