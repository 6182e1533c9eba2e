"""rotate_patch: checks and dispatch."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from .._dispatch import choose, kernel_module
from .._operands import Operands
from .._target import interpretation
from ..errors import KernelError
from . import reference


def rotate_patch(
    x: Num[Array, "*leading T K H"],
    cos: Float[Array, "*angles #T half"] | None = None,
    sin: Float[Array, "*angles #T half"] | None = None,
    u: Num[Array, "*left T M"] | None = None,
    v: Num[Array, "*right M columns"] | None = None,
    *,
    x_scale: Float[Array, "*scaled 1 K H"] | None = None,
    u_scale: Float[Array, "*scaled_left 1 M"] | None = None,
    v_scale: Float[Array, "*scaled_right M 1"] | None = None,
    dense: Float[Array, "*corrected T K H"] | None = None,
    layout: str = "half",
    scale: float = 1.0,
    length: Int[Array, ""] | int | np.integer | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*leading T K H"]:
    """Adds a correction to cached keys (or values), then rotates them: R · (x + u v) · scale.

    Arithmetic is float32; the result is rounded once. x, u and v may be int8, float8_e4m3fn or float8_e5m2 with float32
    scales, which multiply them: (x · x_scale) + (u · u_scale)(v · v_scale).

    Args:
      x: cached vectors, any leading dimensions.
      cos, sin: float32 [..., T, R/2] with R ≤ H, broadcast over x's leading dimensions; None leaves x unrotated.
      u, v: factors, [..., T, M] and [..., M, K·H]; or None.
      x_scale: float32 [..., 1, K, H], one per feature, of an x of 8 bits; int8 needs one.
      u_scale, v_scale: float32 [..., 1, M] and [..., M, 1], one per direction, of a u or v of 8 bits; int8 needs one.
      dense: a full correction [..., T, K, H] instead of factors.
      layout: how a rotary pair lies in H: "half" (i, i + R/2) or "pairs" (2i, 2i + 1).
      scale: multiplies the rotated channels of the result; 1 multiplies nothing.
      length: tokens that count, traced; later ones come back as zeros. None for all.
      out_dtype: of the result; None is x's, and must not be None where x is int8 or has a scale.
      implementation: "xla", "gpu", "tpu", or several in order of preference. None: "xla", unless `preferring` or
        `targeting` say otherwise.

    Raises:
      KernelError: unknown layout word, or arrays that do not fit;
      a scale beside a wide array, int8 without one, or no `out_dtype` where x does not say it.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    operands = Operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale)
    operands.check("rotate_patch", layout)
    out = _out_dtype(x, x_scale, out_dtype)

    def refusal(platform):
        return kernel_module("rotate_patch", platform).unsupported(operands, layout, out)

    unsupported = {"gpu": lambda: refusal("gpu"), "tpu": lambda: refusal("tpu")}
    chosen = choose("rotate_patch", implementation, unsupported)

    operands = operands.with_angles_scaled(scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)
    if chosen == "xla":
        return reference.rotate_patch(operands, length, layout=layout, out_dtype=out)
    return _by_kernel(chosen, layout, out, interpretation(), operands, length)


def _out_dtype(x: Array, x_scale: Array | None, out_dtype: jax.typing.DTypeLike | None) -> str:
    """Returns the result's dtype by name; that of x where nothing else is asked for."""
    if out_dtype is None and (x_scale is not None or x.dtype == jnp.int8):
        raise KernelError(f"rotate_patch: got x of dtype {x.dtype} with a scale; expected an out_dtype")
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise KernelError(f"rotate_patch: got out_dtype {out}; expected a floating-point dtype")
    return out.name


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _by_kernel(platform: str, layout: str, out_dtype: str, interpret, operands: Operands, length) -> Array:
    """Returns the result of a platform's kernel, with the reference's derivatives: a kernel has none of its own."""
    kernel = kernel_module("rotate_patch", platform).kernel
    return kernel(operands, length, layout=layout, out_dtype=out_dtype, interpret=interpret)


@_by_kernel.defjvp
def _(platform: str, layout: str, out_dtype: str, interpret, primals, tangents):
    plain = functools.partial(reference.rotate_patch, layout=layout, out_dtype=out_dtype)
    out = _by_kernel(platform, layout, out_dtype, interpret, *primals)
    return out, jax.jvp(plain, tuple(primals), tuple(tangents))[1]
