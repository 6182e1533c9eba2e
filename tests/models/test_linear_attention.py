"""Linear attention in blocks equals its rule token by token in float64, and what it keeps of tokens composes."""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, Buckets, EngineKV, compose, to_engine, transition_of
from kvpatch_jax.errors import InputError
from kvpatch_jax.models.decoder.delta_rule import delta_rule
from tests.shared.examples import examples
from tests.shared.tolerances import assert_close_to_largest

HEADS, KEY, VALUE = 2, 8, 6
ROWS, LENGTH = 2, 150
"""Two blocks and some of a third."""
FAMILY, T = "qwen3_5", 90
IDS = ((np.arange(T)[None] * 37 + 11) % 290 + 3).astype(np.int32)

pytestmark = pytest.mark.usefixtures("highest_precision")


class Inputs(NamedTuple):
    """Inputs of a rule, [B, T, K, ·]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray


def drawn(rng: np.random.Generator, decays: tuple[float, float] = (-6, 1.4), tokens: int = LENGTH) -> Inputs:
    """Draws tokens; the log decay of each is −10ᵘ, u within `decays`."""
    leading = (ROWS, tokens, HEADS)

    def unit(width: int) -> np.ndarray:
        x = rng.normal(size=(*leading, width))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    rate = -(10.0 ** rng.uniform(*decays, size=leading))
    beta = rng.uniform(0.01, 1, size=leading).astype(np.float32)
    value = rng.normal(size=(*leading, VALUE)).astype(np.float32)
    return Inputs(unit(KEY), unit(KEY), value, rate.astype(np.float32), beta)


def by_token(inputs: Inputs, state: np.ndarray | None = None, counted: np.ndarray | None = None) -> dict[str, Any]:
    """The rule as it is written, in float64: outputs, M as a matrix, B and what becomes of a state [B, Dk, K, Dv]."""
    query, key, value, rate = (array.astype(np.float64) for array in inputs[:4])
    batch, tokens = key.shape[:2]
    width, columns = key.shape[-1], value.shape[-1]
    after = np.zeros((batch, HEADS, width, columns)) if state is None else state.astype(np.float64).swapaxes(1, 2)
    alone, matrix = np.zeros_like(after), np.broadcast_to(np.eye(width), (batch, HEADS, width, width))
    output = np.zeros((batch, tokens, HEADS, columns))
    for t in range(tokens):
        k, strength = key[:, t, :, :, None], inputs.beta[:, t, :, None, None].astype(np.float64)
        step = np.eye(width) * np.exp(rate[:, t])[..., None, None]
        step = step - strength * k @ (k.swapaxes(-1, -2) @ step)
        written = strength * k @ value[:, t, :, None]
        if counted is not None:
            there = counted[:, t, None, None, None]
            step, written = np.where(there, step, np.eye(width)), np.where(there, written, 0.0)
        after, alone, matrix = step @ after + written, step @ alone + written, step @ matrix
        output[:, t] = np.einsum("bkdv,bkd->bkv", after, query[:, t])
    back = {"map": matrix, "state": alone, "after": after}
    return {"output": output} | {name: array.swapaxes(1, 2) for name, array in back.items()}


def difference(value: Any, expected: Any) -> float:
    """The norm of what differs by the norm of what was expected, of the worst head of [..., R, K, W]."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    norms = np.linalg.norm(expected, axis=(-3, -1))
    return float((np.linalg.norm(value - expected, axis=(-3, -1)) / np.maximum(norms, 1e-30)).max())


rule = jax.jit(delta_rule)


def assert_rule(inputs: Inputs, state: np.ndarray, counted: np.ndarray, bar: float) -> Any:
    """Asserts what the blocks make of tokens, and that their two rows compose to those of both one behind the other."""
    ran, expected = rule(*inputs, state, counted=counted), by_token(inputs, state, counted)
    output = np.where(counted[..., None, None], ran.output, expected["output"])
    assert difference(output, expected["output"]) < bar
    assert difference(ran.state, expected["state"]) < bar
    assert difference(ran.after, expected["after"]) < bar
    assert np.abs(np.asarray(ran.map) - expected["map"]).max() < bar

    joined = by_token(
        Inputs(*(array.reshape(1, -1, *array.shape[2:]) for array in inputs)), None, counted.reshape(1, -1)
    )
    maps, states = (np.asarray(part, np.float64).transpose(0, 2, 1, 3) for part in (ran.map, ran.state))
    composed = (maps[1] @ states[0] + states[1]).swapaxes(0, 1)
    assert difference(composed[None], joined["state"]) < bar
    assert np.abs((maps[1] @ maps[0]).swapaxes(0, 1) - joined["map"][0]).max() < bar
    return ran


@examples(4)
@hypothesis.given(seed=st.integers(0, 2**31), low=st.floats(-6, 1.4), high=st.floats(-6, 1.4), share=st.floats(0.02, 1))
def test_blocks_equal_the_rule_and_compose(seed, low, high, share):
    """Of tokens among padding; the state in front is large, and seen by no B."""
    rng = np.random.default_rng(seed)
    inputs = drawn(rng, (min(low, high), max(low, high)))
    state = 30 * rng.normal(size=(ROWS, KEY, HEADS, VALUE)).astype(np.float32)
    assert_rule(inputs, state, rng.uniform(size=(ROWS, LENGTH)) < share, 5e-6)


@pytest.mark.parametrize("hard", ["weak decays behind strong ones", "keys alike"])
def test_hard_numbers_stay_exact(hard):
    """Differences of two sums of log decays would be off by 1e-4; powers of the inverted matrix would reach 1e18."""
    rng = np.random.default_rng(2)
    if hard == "keys alike":
        inputs = drawn(rng, (-6, -5))
        inputs.key[:], inputs.beta[:] = inputs.key[:, :1], 0.99
    else:
        inputs = drawn(rng, (-3, -2))
        inputs.log_decay[:, :40] = -30
    state, every = np.zeros((ROWS, KEY, HEADS, VALUE), np.float32), np.ones((ROWS, LENGTH), bool)
    assert_rule(inputs, state, every, 5e-6)
    assert np.isfinite(rule(*inputs._replace(log_decay=inputs.log_decay * 1e4), state, counted=every).output).all()


def test_tokens_in_turn_equal_all_at_once():
    """As an answer is decoded: each token behind the state that the last one left."""
    rng = np.random.default_rng(1)
    inputs, state = drawn(rng, (-3, 0), 5), rng.normal(size=(ROWS, KEY, HEADS, VALUE)).astype(np.float32)
    expected, reached = by_token(inputs, state), state
    for t in range(5):
        ran = rule(*(array[:, t : t + 1] for array in inputs), reached)
        assert difference(ran.output[:, 0, None], expected["output"][:, t, None]) < 1e-6
        mapped = np.einsum("bikj,bjkv->bikv", np.asarray(ran.map), reached)
        assert difference(ran.after, np.asarray(ran.state) + mapped) < 1e-6
        reached = np.asarray(ran.after)
    assert difference(reached, expected["after"]) < 1e-6


close = functools.partial(assert_close_to_largest, bar=2e-5)


@pytest.fixture(scope="module")
def backbone(tiny):
    return tiny(FAMILY)


@pytest.fixture(scope="module")
def tokens(backbone):
    """More than a block of the rule, and no multiple of one."""
    return backbone.embed(IDS).on_host()


@pytest.fixture(scope="module")
def full(backbone, tokens):
    return prefill(backbone, tokens)


def prefill(backbone, tokens, length=T):
    """Of so many of the tokens: all numbers run one program."""
    return jax.device_get(backbone.prefill(tokens, logits="all", lengths=np.array([length])))


def engine(backbone, out, tokens, length=T):
    cache = jax.device_get(to_engine(backbone.layout, out.kv, tokens.positions, 0))
    return EngineKV({name: value if name in PARTS else value[:, :, :length] for name, value in cache.items()})


def close_kv(kv, expected, name):
    for part, value in expected.items():
        close(kv[part], value, f"{name}: {part}")


@pytest.mark.parametrize(
    ("cut", "chunk"), [(84, 5), *(pytest.param(*row, marks=pytest.mark.nightly) for row in ((70, None), (2, 40)))]
)
def test_two_prefills_equal_one(backbone, tokens, full, cut, chunk):
    """The second, in chunks or padded to a bucket, reads state and tail of the first, also where that is shorter than
    the convolution reads; a chunk that does not fit is padded: no token passes a state twice.
    """
    backbone = backbone if chunk else backbone.with_buckets(Buckets(smallest=64))
    before = prefill(backbone, tokens, cut)
    cache = engine(backbone, before, tokens, cut)
    after = backbone.prefill(tokens.take(cut, T), cache, logits="all", chunk=chunk)
    close(after.logits, full.logits[:, cut:], "logits")
    composed = jax.jit(compose)(transition_of(before.kv), transition_of(after.kv), T - cut)
    close_kv(composed, transition_of(full.kv), "composed")


def test_steps_and_answers_equal_prefill(backbone, tokens, full):
    """The cache comes back with the transition of all its tokens, the map too."""
    cache = engine(backbone, prefill(backbone, tokens, 84), tokens, 84)
    answer = backbone.generate(tokens.take(84, 86), 4, cache, stop=())
    whole = backbone.embed(np.concatenate([IDS[:, :86], answer], axis=1)).on_host()
    assert np.array_equal(answer, np.argmax(prefill(backbone, whole).logits, axis=-1)[:, 85:89])

    room = ((0, 0), (0, 0), (0, T - 84), (0, 0), (0, 0))
    cache = EngineKV({name: value if name in PARTS else np.pad(value, room) for name, value in cache.items()})
    for place in range(84, T, 2):
        step = backbone.decode(tokens.take(place, place + 2), cache, np.array([[place, place + 1]]), logits="all")
        close(step.logits, full.logits[:, place : place + 2], f"logits from {place}")
        cache = step.cache
    assert type(cache) is EngineKV
    close_kv(transition_of(step.cache), transition_of(full.kv), "decoded")
    close(step.cache["k"], engine(backbone, full, tokens)["k"], "keys")


@pytest.mark.nightly
def test_a_mask_of_padding_leaves_it_out(backbone, tokens, full):
    """Padding in front and in the middle, which a mask hides."""
    places = np.r_[3:33, 40:100]
    counted = np.isin(np.arange(100), places)
    rows = np.full((1, 100, tokens.embeddings.shape[2]), 7, np.float32)
    positions = np.zeros((1, 100, 3), np.int32)
    rows[:, places], positions[:, places] = tokens.embeddings, tokens.positions
    mask = (np.tril(np.ones((100, 100), bool)) & counted)[None, None]
    out = backbone.prefill(Tokens(jnp.asarray(rows), positions), mask=mask, logits="all")
    close(out.logits[:, places], full.logits, "logits")
    close_kv(transition_of(out.kv), transition_of(full.kv), "padded")


def test_what_a_state_cannot_undo_is_refused(backbone, tokens, full):
    count = tokens.embeddings.shape[1]
    with pytest.raises(InputError, match="linear attention knows of no mask"):
        backbone.prefill(tokens, mask=(np.tri(count, dtype=bool) & ~np.tri(count, k=-30, dtype=bool))[None, None])
    cache, few, slots = engine(backbone, full, tokens), tokens.take(10, 12), np.array([[10, 11]])
    with pytest.raises(InputError, match=r"recompute: got .* of a model with linear attention"):
        backbone.recompute(few, cache, slots)
    with pytest.raises(InputError, match="some layers or sets of tokens"):
        backbone.recompute(few, cache, slots, keep=np.ones((4, 1, 2), bool))
    with pytest.raises(InputError, match="linear attention, which compares no keys"):
        backbone.attention(few, cache, layers=(1,), reduce=lambda seen: seen.query, slots=slots)
