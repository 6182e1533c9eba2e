"""Transitions: what a linear-attention layer keeps of some tokens, S → M·S + B, without any position.

Over a stretch of tokens such a layer is an affine map of its state S [key_width, value_width] per head. Maps compose,
so the state behind chunks in any order is a few small products of their own maps. Parts are channels of a layout
(`KVLayout.with_transitions`), [L, ..., R, K, W] with R rows, K heads and width W:

    map    M: [key_width, key_width]
    state  B: [key_width, value_width], the state behind the tokens from one of zeros
    tail   the last inputs of the causal convolution, zeros in front of fewer tokens than it reads

Composition is associative: (M₂, B₂)∘(M₁, B₁) = (M₂M₁, M₂B₁ + B₂).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import LayoutError, ShapeError
from ..utils.kinds import expect_kind
from .layout import PARTS, AnyArray, KVLayout

Transition = Mapping[str, AnyArray]


def transition_of(kv: Mapping[str, AnyArray]) -> dict[str, Array]:
    """Returns the parts of a transition among KV's channels; {} where a model has none."""
    return {name: jnp.asarray(kv[name]) for name in PARTS if name in kv}


def split_transition(kv: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array] | None]:
    """Returns KV's channels with a row per token, and its transition; None where a model has none."""
    return {name: value for name, value in kv.items() if name not in PARTS}, transition_of(kv) or None


def token_rows(kv: Mapping[str, Any]) -> Any:
    """Returns one of KV's arrays that has a row per token: its shape tells how many there are."""
    return next(value for name, value in kv.items() if name not in PARTS)


def through_map(
    map_: Float[Array, "*batch R K W"], state: Float[Array, "*batch J K V"]
) -> Float[Array, "*batch J K V"]:
    """Computes M·S per head in float32."""
    map_, state = map_.astype(jnp.float32), state.astype(jnp.float32)
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
    """Composes the transitions of stretches that follow each other, from left to right.

    Returns:
      As `compose` does, of one stretch alone too: map and state in float32.
    """
    first = {name: jnp.asarray(value) for name, value in transitions[0].items()}
    composed = {name: value if name == "tail" else value.astype(jnp.float32) for name, value in first.items()}
    for index, following in enumerate(transitions[1:], 1):
        composed = compose(composed, following, None if lengths is None else lengths[index])
    return composed


jitted_fold = jax.jit(fold)
"""`fold`, compiled once per number of stretches and shapes; lengths are traced where they are arrays."""


def identity(
    layout: KVLayout, batch: tuple[int, ...] = (), tail_dtype: jax.typing.DTypeLike = jnp.float32
) -> dict[str, Float[Array, "..."]]:
    """Returns the transition of no tokens, {part: [L, *batch, R, K, W]}: M the unit, B and the tail zeros."""
    parts = {}
    for part in layout.parts:
        shape = (layout.depth(part.name), *batch, part.rows or 1, part.heads, part.width)
        if part.name != "map":
            parts[part.name] = jnp.zeros(shape, tail_dtype if part.name == "tail" else jnp.float32)
            continue
        parts["map"] = jnp.broadcast_to(jnp.eye(part.width)[:, None], shape)
    return parts


def check_parts(layout: KVLayout, transition: Transition | None, what: str, batch: tuple[int, ...]) -> None:
    """Checks that a transition has the layout's parts, {part: float [L, *batch, R, K, W]}; None where that has none.

    Raises:
      LayoutError: the parts differ: rows of tokens, a part too few, or any where the layout has no transition.
      ShapeError: a shape differs, or a dtype is not floating-point.
    """
    names = [part.name for part in layout.parts]
    if transition is None and not names:
        return
    expected = f"parts of a transition, {', '.join(names)}" if names else "None, for a layout without transitions"
    expect_kind(transition, Mapping, what, expected, LayoutError)
    parts = dict(transition or {})
    if set(parts) != set(names) or not names:
        raise LayoutError(f"{what}: got {sorted(parts)!r:.80}; expected {expected}")
    for part in layout.parts:
        value, shape = parts[part.name], (layout.depth(part.name), *batch, part.rows, part.heads, part.width)
        found = getattr(value, "dtype", type(value).__name__), getattr(value, "shape", ())
        if found[1] != shape or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ShapeError(f"{what}[{part.name!r}]: got {found[0]} {found[1]}; expected floating-point {shape}")
