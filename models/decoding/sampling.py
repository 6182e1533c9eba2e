"""Choosing the next token of each row from its logits: greedily, or drawn at a temperature among the likeliest.

Everything about a draw is traced, so that another temperature, share, number or key runs the same program.

Axis letters: B batch, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from kvpatch_jax.answers import Draws, Sampling
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.kinds import expect_kind

REFUSED = -1
"""The token of a row whose logits say nothing: one of them NaN or +infinity, or all of them -infinity."""
ALL_TOKENS = np.iinfo(np.int32).max
"""A `top_k` beyond every vocabulary."""
STOPS = 8
"""Stop tokens that a program has room for (twice, four times … as many where there are more)."""


class Draw(NamedTuple):
    """A `Sampling` with its key and stop tokens, as arrays: what programs take."""

    temperature: Array | np.float32
    top_p: Array | np.float32
    top_k: Array | np.int32
    key: PRNGKeyArray
    stop: Int[Array | np.ndarray, " stops"]


def draw_of(sampling: Sampling, key: PRNGKeyArray | int | None, stop: Sequence[int]) -> Draw:
    """Makes the arrays of a draw.

    Raises:
      InputError: a temperature above 0 without a key, or a number that no key is made of.
    """
    expect_kind(sampling, Sampling, "sampling", "a Sampling, or None")
    # Below this, float32 quotients of logits are infinite or 0 alone: the likeliest token, which greedy takes.
    temperature = sampling.temperature if sampling.temperature > 1e-30 else 0.0
    if key is None and temperature > 0:
        raise InputError(
            f"temperature: got {temperature} without a key; expected key=jax.random.key(0), or another number"
        )

    if key is None:
        key = _unused_key()
    elif isinstance(key, int | np.integer):
        if not -(2**63) <= key < 2**63:
            raise InputError(f"key: got {key}; expected a number of at most 64 bits, or a jax.random.key")
        key = jax.random.key(int(key))
    elif not isinstance(key, jax.Array | np.ndarray):
        raise InputError(f"key: got {key!r:.80}; expected a number, or a jax.random.key")

    # Few sizes, so that another number of stop tokens seldom compiles.
    room = STOPS
    while room < len(stop):
        room *= 2
    stops = np.full(room, REFUSED, np.int32)
    stops[: len(stop)] = stop
    return Draw(
        np.float32(temperature),
        np.float32(sampling.top_p),
        np.int32(min(ALL_TOKENS if sampling.top_k is None else sampling.top_k, ALL_TOKENS)),
        key,
        stops,
    )


@functools.cache
def _unused_key() -> PRNGKeyArray:
    """Makes a key for what draws nothing, from zeros: `jax.random.key` would compile two programs."""
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return jax.random.wrap_key_data(jax.device_put(np.zeros(data.shape, np.uint32)))


def choose(logits: Float[Array, "B V"], draw: Draw, index: Int[Array, ""] | int) -> Int[Array, " B"]:
    """Chooses each row's next token, or `REFUSED` where its logits say nothing.

    A draw depends on the key, the row's number, `index` and the row's own logits, and on nothing else: neither on the
    rows beside it nor on how many tokens a program makes.

    Args:
      index: how many tokens were chosen before.
    """
    top = jnp.max(logits, axis=-1)

    def greedy() -> Array:
        return jnp.argmax(logits, axis=-1)

    def drawn() -> Array:
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / draw.temperature
        whole = (draw.top_p >= 1) & (draw.top_k >= logits.shape[-1])
        among = jax.lax.cond(whole, lambda: jnp.ones(logits.shape, bool), lambda: kept(scaled, draw.top_p, draw.top_k))

        def noise(row: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(draw.key, row), index)
            return jax.random.gumbel(key, logits.shape[-1:])

        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return jnp.argmax(jnp.where(among, scaled, -jnp.inf) + jax.vmap(noise)(jnp.arange(len(logits))), axis=-1)

    chosen = jax.lax.cond(draw.temperature > 0, drawn, greedy)
    return jnp.where(jnp.isfinite(top), chosen, REFUSED).astype(jnp.int32)


def choose_rows(logits: Float[Array, "B V"], draws: Draws, index: Int[Array, " B"]) -> Int[Array, " B"]:
    """Chooses each row's next token by a draw of its own, as `choose` does for a single row: nothing else counts.

    Args:
      index: how many tokens of each row were chosen before.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    greedy = jnp.argmax(logits, axis=-1)

    def drawn() -> Array:
        warm = (draws.temperature > 0)[:, None]
        scaled = (logits - top) / jnp.where(warm, draws.temperature[:, None], 1)
        share, number = draws.top_p[:, None], draws.top_k[:, None]
        whole = (share >= 1) & (number >= logits.shape[-1])

        def some():
            return whole | kept(scaled, share, number)

        among = jax.lax.cond(jnp.all(whole | ~warm), lambda: jnp.ones(logits.shape, bool), some)

        def fold(key, at):
            return jax.random.fold_in(jax.random.fold_in(key, 0), at)

        # Row 0 of `choose`'s keys, so that an answer in company has the tokens that it has alone.
        keys = jax.vmap(fold)(jax.random.wrap_key_data(jnp.asarray(draws.key)), index)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
        return jnp.where(warm[:, 0], jnp.argmax(jnp.where(among, scaled, -jnp.inf) + noise, axis=-1), greedy)

    chosen = jax.lax.cond(jnp.any(draws.temperature > 0), drawn, lambda: greedy)
    return jnp.where(jnp.isfinite(top[:, 0]), chosen, REFUSED).astype(jnp.int32)


def kept(scaled: Float[Array, "B V"], top_p: Any, top_k: Any) -> Bool[Array, "B V"]:
    """Returns tokens that a draw is among, by logits over temperature of which each row's largest is 0.

    Args:
      top_p, top_k: of all rows, or of each one, [B,1].
    """
    weights = jnp.exp(scaled)
    among = jnp.where(weights >= _threshold(weights, jnp.ones_like(weights), top_k), weights, 0)
    mass = top_p * jnp.sum(among, axis=-1, keepdims=True)
    # At a share of 1 rounding must not cost the least likely ones.
    lowest = jnp.where(top_p < 1, _threshold(among, among, mass), 0)
    return (among >= lowest) & (among > 0)


def _threshold(values: Float[Array, "B V"], amounts: Float[Array, "B V"], mass: Any) -> Float[Array, "B 1"]:
    """Returns the largest number such that the amounts of values no smaller are `mass` at least; 0 where all are less.

    Found by bisection of the numbers from 0 to 1, whose bits are in their order: 31 passes over the vocabulary, where
    sorting it takes longer than a small model's whole step on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(jnp.where(bits >= middle, amounts, 0), axis=-1, keepdims=True) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros((len(values), 1), jnp.int32)
    one = np.float32(1).view(np.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one + 1)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
