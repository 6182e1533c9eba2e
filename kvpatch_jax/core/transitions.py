"""Transitions: what a linear-attention layer keeps of some tokens, S → M·S + B, without any position.

Over a stretch of tokens such a layer is an affine map of its state S [key_width, value_width] per head. Maps compose,
so the state behind chunks in any order is a few small products of their own maps. Parts are channels of a layout
(`KVLayout.with_transitions`), [L, ..., R, K, W] with R rows, K heads and width W:

    map    M: [key_width, key_width] (gated delta rules), [key_width, 1] (a decay per row) or [1, 1] (one decay)
    state  B: [key_width, value_width], the state behind the tokens from one of zeros
    tail   the last inputs of the causal convolution, zeros in front of fewer tokens than it reads
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .layout import PARTS, AnyArray

Transition = Mapping[str, AnyArray]


def transition_of(kv: Mapping[str, AnyArray]) -> dict[str, Array]:
    """Returns the parts of a transition among KV's channels; {} where a model has none."""
    return {name: jnp.asarray(kv[name]) for name in PARTS if name in kv}


def token_rows(kv: Mapping[str, Any]) -> Any:
    """Returns one of KV's arrays that has a row per token: its shape tells how many there are."""
    return next(value for name, value in kv.items() if name not in PARTS)


def through_map(
    map_: Float[Array, "*batch R K W"], state: Float[Array, "*batch J K V"]
) -> Float[Array, "*batch J K V"]:
    """Computes M·S per head in float32, whichever form the map has."""
    map_, state = map_.astype(jnp.float32), state.astype(jnp.float32)
    if map_.shape[-1] == 1:
        return map_ * state
    return jnp.einsum("...rkj,...jkv->...rkv", map_, state, precision=jax.lax.Precision.HIGHEST)


def compose(
    first: Transition, second: Transition, length: Int[Array, "..."] | int | None = None
) -> dict[str, Float[Array, "..."]]:
    """Composes the transitions of two stretches of tokens into that of the first followed by the second.

    Args:
      first, second: {part: [..., R, K, W]}.
      length: tokens of the second, where it may have fewer than its convolution reads; None: it has as many.

    Returns:
      The parts in float32, but for the tail, which keeps its dtype: M₂M₁, M₂B₁ + B₂, and the last inputs of both.
    """
    map_ = jnp.asarray(second["map"])
    composed = {"map": through_map(map_, jnp.asarray(first["map"]))}
    state = through_map(map_, jnp.asarray(first["state"]))
    composed["state"] = state + jnp.asarray(second["state"]).astype(jnp.float32)
    if "tail" not in second:
        return composed

    before, after = jnp.asarray(first["tail"]), jnp.asarray(second["tail"])
    if length is None:
        return {**composed, "tail": after}
    # The inputs in front move up by as many places as the second has tokens.
    rows = after.shape[-3]
    count = jnp.minimum(jnp.asarray(length, jnp.int32), rows)
    places = jnp.arange(rows)[:, None, None] + count[..., None, None, None]
    places = jnp.broadcast_to(places, (*after.shape[:-2], 1, 1))
    moved = jnp.take_along_axis(before, jnp.minimum(places, rows - 1), axis=-3)
    return {**composed, "tail": jnp.where(places < rows, moved.astype(after.dtype), after)}


def fold(
    transitions: Sequence[Transition], lengths: Sequence[Int[Array, "..."] | int | None] | None = None
) -> dict[str, Float[Array, "..."]]:
    """Composes the transitions of stretches that follow each other, from left to right."""
    composed = dict(transitions[0])
    for index, following in enumerate(transitions[1:], 1):
        composed = compose(composed, following, None if lengths is None else lengths[index])
    return {name: jnp.asarray(value) for name, value in composed.items()}
