"""rotate_patch: checks and dispatch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from .._dispatch import choose
from .._target import interpretation
from .._wins import shape_word
from ..errors import KernelDtypeError, KernelShapeError
from . import gpu, reference, tpu

LAYOUTS = ("half", "pairs")
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that may carry scales."""
WIDE = ("bfloat16", "float16", "float32", "float64")


def rotate_patch(
    x: Num[Array, "*leading T K H"],
    cos: Float[Array, "..."] | None = None,
    sin: Float[Array, "..."] | None = None,
    u: Num[Array, "..."] | None = None,
    v: Num[Array, "..."] | None = None,
    *,
    x_scale: Float[Array, "..."] | None = None,
    u_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    dense: Float[Array, "..."] | None = None,
    per_head: bool = False,
    layout: str = "half",
    scale: float = 1.0,
    length: Int[Array, ""] | int | np.integer | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "... T K H"]:
    """R · (x + u v) · scale: adds a correction to cached keys (or values), then rotates them.

    Arithmetic is float32; the result is rounded once. x, u and v may be int8, float8_e4m3fn or float8_e5m2 with float32
    scales, which multiply them: (x · x_scale) + (u · u_scale)(v · v_scale).

    Args:
      x: cached vectors, any leading dimensions.
      cos, sin: float32 [..., T, R/2] with R ≤ H, broadcast over x's leading dimensions; None leaves x unrotated.
      u, v: factors, [..., T, M] and [..., M, K·H], or with `per_head` [..., K, T, M] and [..., K, M, H]; or None.
      x_scale: float32 [..., 1, K, H], one per feature, of an x of 8 bits; int8 needs one.
      u_scale, v_scale: float32 [..., 1, M] and [..., M, 1], one per direction, of a u or v of 8 bits; int8 needs one.
      dense: a full correction [..., T, K, H] instead of factors.
      per_head: u and v are per head.
      layout: how a rotary pair lies in H: "half" (i, i + R/2) or "pairs" (2i, 2i + 1).
      scale: multiplies the rotated channels of the result; 1 multiplies nothing.
      length: tokens that count, traced; later ones come back as zeros. None for all.
      out_dtype: of the result; None is x's, and must not be None where x is int8 or has a scale.
      implementation: "xla", "gpu", "tpu", or several in order of preference. None: the platform's kernel if it takes
        these arguments and won their shape on this kind of device, else "xla".

    Raises:
      KernelShapeError: unknown layout word, or arrays that do not fit.
      KernelDtypeError: a scale beside a wide array, int8 without one, or no `out_dtype` where x does not say it.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    check("rotate_patch", x, cos, sin, u, v, dense, per_head, layout)
    check_scales("rotate_patch", x, u, v, x_scale, u_scale, v_scale)
    out = _out_dtype(x, x_scale, out_dtype)
    operands = gpu.Operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale)
    reasons = {
        "gpu": gpu.unsupported(operands, per_head, layout, out),
        "tpu": tpu.unsupported(x, cos, u, v, dense, per_head, x_scale, u_scale, v_scale, out),
    }
    chosen = choose("rotate_patch", implementation, reasons, word_of(x, u, dense, per_head, x.shape[-1]))
    cos, sin = scaled(cos, sin, scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)
    arrays = (x, cos, sin, u, v, dense, length, x_scale, u_scale, v_scale)
    if chosen == "gpu":
        return gpu.rotate_patch(layout, out, interpretation(), *arrays)
    if chosen == "tpu":
        return tpu.rotate_patch(layout, out, interpretation(), *arrays)
    return reference.rotate_patch(*arrays, per_head=per_head, layout=layout, out_dtype=out)


def word_of(x, u, dense, per_head: bool, width: int) -> str:
    """The word by which a table of timings knows these arguments, `width` wide; "" for what `tune` does not time."""
    if per_head or dense is not None:
        return ""
    return shape_word(x.shape[-2], width, 0 if u is None else u.shape[-1], x.dtype.itemsize)


def _out_dtype(x, x_scale, out_dtype) -> str:
    if out_dtype is None and (x_scale is not None or x.dtype == jnp.int8):
        raise KernelDtypeError(f"rotate_patch: x of dtype {x.dtype} with a scale; expected an out_dtype")
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise KernelDtypeError(f"rotate_patch: out_dtype {out}; expected a floating-point dtype")
    return out.name


def check_scales(operation: str, x, u, v, x_scale, u_scale, v_scale) -> None:
    """Raises KernelDtypeError, KernelShapeError where scales do not fit what they scale."""
    for name, value, scale, axis in (("x", x, x_scale, -3), ("u", u, u_scale, -2), ("v", v, v_scale, -1)):
        dtype = None if value is None else value.dtype.name
        if scale is None:
            if dtype == "int8":
                raise KernelDtypeError(f"{operation}: {name} of dtype int8 without a scale; expected {name}_scale")
            if dtype not in (None, *WIDE, *NARROW):
                raise KernelDtypeError(f"{operation}: {name} of dtype {dtype}; expected one of {WIDE + NARROW}")
            continue
        if value is None or dtype not in NARROW or scale.dtype != jnp.float32:
            raise KernelDtypeError(
                f"{operation}: {name} of dtype {dtype}, {name}_scale of dtype {scale.dtype}; expected one of {NARROW} "
                "and float32"
            )
        inner = list(value.shape[-3 if name == "x" else -2 :])
        inner[axis] = 1
        if scale.shape[-len(inner) :] != tuple(inner):
            raise KernelShapeError(f"{operation}: {name}_scale {scale.shape}; expected [..., {tuple(inner)}]")


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
