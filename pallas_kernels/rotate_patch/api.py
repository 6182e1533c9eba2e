"""rotate_patch: checks and dispatch."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from .._dispatch import Case, dispatch, kernel_module
from .._operands import Codes, Operands
from .._target import interpretation
from ..errors import KernelError
from . import reference


def rotate_patch(
    x: Float[Array, "*leading T K H"] | Codes,
    cos: Float[Array, "*angles #T half"] | None = None,
    sin: Float[Array, "*angles #T half"] | None = None,
    u: Num[Array, "*left T M"] | None = None,
    v: Num[Array, "*right M columns"] | None = None,
    *,
    dense: Float[Array, "*corrected T K H"] | None = None,
    layout: str = "half",
    scale: float = 1.0,
    length: Int[Array, ""] | int | np.integer | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*leading T K H"]:
    """Adds a correction to cached keys (or values), then rotates them: R · (x + u v) · scale.

    Arithmetic is float32; the result is rounded once.

    Args:
      x: cached vectors, any leading dimensions; or `Codes`, the same in four bits.
      cos, sin: float32 [..., T, R/2] with R ≤ H, broadcast over x's leading dimensions; None leaves x unrotated.
      u, v: factors, [..., T, M] and [..., M, K·H]; or None.
      dense: a full correction [..., T, K, H] instead of factors.
      layout: how a rotary pair lies in H: "half" (i, i + R/2) or "pairs" (2i, 2i + 1).
      scale: multiplies the rotated channels of the result; 1 multiplies nothing.
      length: tokens that count, traced; later ones come back as zeros. None for all.
      out_dtype: of the result; None is x's, bfloat16 of codes.
      implementation: "xla", "gpu", "tpu", or several in order of preference. None: what `preferring` or `targeting`
        say; else the kernel where a committed result has it right and faster than XLA on this kind of device.

    Raises:
      KernelError: unknown layout word, arrays that do not fit, or a dtype that is not floating-point.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    operands = Operands(x, cos, sin, u, v, dense)
    operands.check("rotate_patch", layout)
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise KernelError(f"rotate_patch: got out_dtype {out}; expected a floating-point dtype")
    operands = operands.with_angles_scaled(scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)

    def run(name: str) -> Array:
        if name == "xla":
            return reference.rotate_patch(operands, length, layout=layout, out_dtype=out)
        operands.refuse(out)
        return _by_kernel(name, layout, out.name, interpretation(), operands, length)

    case = Case("rotate_patch", x.shape[-2] == 1, u is not None, isinstance(x, Codes))
    return dispatch(case, implementation, run)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _by_kernel(platform: str, layout: str, out_dtype: str, interpret, operands: Operands, length) -> Array:
    """Returns the result of a platform's kernel, with the reference's derivatives: a kernel has none of its own."""
    kernel = kernel_module("rotate_patch", platform).kernel
    return kernel(operands, length, layout=layout, interpret=interpret)


@_by_kernel.defjvp
def _(platform: str, layout: str, out_dtype: str, interpret, primals, tangents):
    plain = functools.partial(reference.rotate_patch, layout=layout, out_dtype=out_dtype)
    out = _by_kernel(platform, layout, out_dtype, interpret, *primals)
    return out, jax.jvp(plain, tuple(primals), tuple(tangents))[1]
