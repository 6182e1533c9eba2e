"""rotate_patch: checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._dispatch import choose
from ..errors import KernelShapeError
from . import reference

LAYOUTS = ("half", "pairs")


def rotate_patch(
    x: Float[Array, "*leading T K H"],
    cos: Float[Array, "..."] | None = None,
    sin: Float[Array, "..."] | None = None,
    u: Float[Array, "..."] | None = None,
    v: Float[Array, "..."] | None = None,
    *,
    dense: Float[Array, "..."] | None = None,
    per_head: bool = False,
    layout: str = "half",
    scale: float = 1.0,
    implementation: str | None = None,
) -> Float[Array, "... T K H"]:
    """R · (x + u v) · scale: adds a correction to cached keys (or values), then rotates them.

    Arithmetic is float32; the result has x's dtype and is rounded once.

    Args:
      x: cached vectors, any leading dimensions.
      cos, sin: float32 [..., T, R/2] with R ≤ H, broadcast over x's leading dimensions; None leaves x unrotated.
      u, v: factors, [..., T, M] and [..., M, K·H], or with `per_head` [..., K, T, M] and [..., K, M, H]; or None.
      dense: a full correction [..., T, K, H] instead of factors.
      per_head: u and v are per head.
      layout: how a rotary pair lies in H: "half" (i, i + R/2) or "pairs" (2i, 2i + 1).
      scale: multiplies the rotated channels of the result; 1 multiplies nothing.
      implementation: None (best available) or "xla".

    Raises:
      KernelShapeError: unknown layout word, or arrays that do not fit.
      KernelUnavailableError: unknown or unavailable implementation.
    """
    choose("rotate_patch", implementation)
    _check(x, cos, sin, u, v, dense, per_head, layout)
    value = x.astype(jnp.float32)
    if u is not None and v is not None:
        value = value + (reference.product_per_head(u, v) if per_head else reference.product(u, v, x.shape[-2]))
    if dense is not None:
        value = value + dense.astype(jnp.float32)
    if cos is not None and sin is not None:
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        value = reference.rotate(value, cos, sin, layout)
    return value.astype(x.dtype)


def _check(x, cos, sin, u, v, dense, per_head, layout) -> None:
    if layout not in LAYOUTS:
        raise KernelShapeError(f"rotate_patch: layout {layout!r}; expected one of {LAYOUTS}")
    if (cos is None) != (sin is None) or (u is None) != (v is None):
        raise KernelShapeError("rotate_patch: cos and sin come together, and so do u and v")
    tokens, heads, width = x.shape[-3:]
    if cos is not None:
        fits = cos.ndim > 1 and 2 * cos.shape[-1] <= width and cos.shape[-2] in (1, tokens)
        if cos.shape != sin.shape or not fits:
            raise KernelShapeError(
                f"rotate_patch: cos {cos.shape} and sin {sin.shape}; expected [..., {tokens}, R/2] with R ≤ {width}"
            )
    if u is not None:
        rank = u.shape[-1]
        want_u = (heads, tokens, rank) if per_head else (tokens, rank)
        want_v = (heads, rank, width) if per_head else (rank, heads * width)
        if u.shape[-len(want_u) :] != want_u or v.shape[-len(want_v) :] != want_v:
            raise KernelShapeError(
                f"rotate_patch: u {u.shape} and v {v.shape}; expected [..., {want_u}] and [..., {want_v}]"
            )
    if dense is not None and dense.shape[-3:] != x.shape[-3:]:
        raise KernelShapeError(f"rotate_patch: dense {dense.shape}; expected [..., {x.shape[-3:]}]")
