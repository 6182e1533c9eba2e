"""rotate_patch: checks and dispatch."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._dispatch import choose, interpretation
from ..errors import KernelShapeError
from . import reference, tpu

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
    length: Int[Array, ""] | int | np.integer | None = None,
    implementation: str | Sequence[str] | None = None,
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
      length: tokens that count, traced; later ones come back as zeros. None for all.
      implementation: None (the platform's kernel if it takes these arguments, else "xla"), "xla", "tpu", or several in
        order of preference.

    Raises:
      KernelShapeError: unknown layout word, or arrays that do not fit.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    check("rotate_patch", x, cos, sin, u, v, dense, per_head, layout)
    chosen = choose("rotate_patch", implementation, {"tpu": tpu.unsupported(x, cos, u, v, dense, per_head)})
    cos, sin = scaled(cos, sin, scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)
    if chosen == "tpu":
        return tpu.rotate_patch(layout, interpretation(), x, cos, sin, u, v, dense, length)
    return reference.rotate_patch(x, cos, sin, u, v, dense, length, per_head=per_head, layout=layout)


def scaled(cos, sin, scale: float):
    """cos and sin times the scale; as they are where it is 1 or they are None."""
    return (cos, sin) if scale == 1.0 or cos is None else (cos * scale, sin * scale)


def check(operation: str, x, cos, sin, u, v, dense, per_head: bool, layout: str) -> None:
    """Raises KernelShapeError where arguments do not fit each other; all of them as `rotate_patch` takes them."""
    if layout not in LAYOUTS:
        raise KernelShapeError(f"{operation}: layout {layout!r}; expected one of {LAYOUTS}")
    if (cos is None) != (sin is None) or (u is None) != (v is None):
        raise KernelShapeError(f"{operation}: cos and sin come together, and so do u and v")
    tokens, heads, width = x.shape[-3:]
    if cos is not None:
        fits = cos.ndim > 1 and 2 * cos.shape[-1] <= width and cos.shape[-2] in (1, tokens)
        if cos.shape != sin.shape or not fits:
            raise KernelShapeError(
                f"{operation}: cos {cos.shape} and sin {sin.shape}; expected [..., {tokens}, R/2] with R ≤ {width}"
            )
    if u is not None:
        rank = u.shape[-1]
        want_u = (heads, tokens, rank) if per_head else (tokens, rank)
        want_v = (heads, rank, width) if per_head else (rank, heads * width)
        if u.shape[-len(want_u) :] != want_u or v.shape[-len(want_v) :] != want_v:
            raise KernelShapeError(
                f"{operation}: u {u.shape} and v {v.shape}; expected [..., {want_u}] and [..., {want_v}]"
            )
    if dense is not None and dense.shape[-3:] != x.shape[-3:]:
        raise KernelShapeError(f"{operation}: dense {dense.shape}; expected [..., {x.shape[-3:]}]")
