"""splice: checks and dispatch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from .._dispatch import choose, kernel_module
from .._operands import Operands, padded_width
from .._target import interpretation
from ..errors import KernelError
from . import reference

Slots = Int[Array | np.ndarray, " T"]
Length = Int[Array, ""] | int | np.integer | None


def splice(
    pool: Float[Array, "*leading P O K _"],
    slots: Slots,
    x: Num[Array, "*leading T K H"],
    cos: Float[Array, "*angles #T half"] | None = None,
    sin: Float[Array, "*angles #T half"] | None = None,
    u: Num[Array, "*left T M"] | None = None,
    v: Num[Array, "*right M columns"] | None = None,
    *,
    dense: Float[Array, "*corrected T K H"] | None = None,
    layout: str = "half",
    scale: float = 1.0,
    length: Length = None,
    x_scale: Float[Array, "*scaled 1 K H"] | None = None,
    u_scale: Float[Array, "*scaled_left 1 M"] | None = None,
    v_scale: Float[Array, "*scaled_right M 1"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*leading P O K _"]:
    """Writes R · (x + u v) · scale into a paged pool, in place: token t goes to slot `slots[t]`.

    A slot is page · page_size + offset; a chunk may start in the middle of a page and its slots may lie in any order.
    Slots that are not named keep their bits. Everything is checked before anything is written.

    Args:
      pool: pages of vectors, the same leading dimensions as x, as wide as x or padded to a multiple of 128 lanes. The
        padding of slots that are named becomes zero. Donated: use what comes back.
      slots: int32, traced or concrete. Concrete slots are checked on the host for range and uniqueness; of traced ones
        those out of range are written nowhere; a slot named twice holds one of the values on the XLA path, and on a
        GPU or TPU possibly part of one and part of another, for their kernels write a vector in several copies.
      x, cos, sin, u, v, x_scale, u_scale, v_scale, dense, layout, scale: as in `rotate_patch`. An x without a
        scale has the pool's dtype.
      length: tokens that count, traced; later ones are written nowhere, and their slots are not looked at.
      implementation: "xla", "gpu", "tpu", or several in order of preference. None: "xla", unless `preferring` or
        `targeting` say otherwise.

    Returns:
      The pool. Arithmetic is float32, rounded once to its dtype.

    Raises:
      KernelError: a concrete slot out of range, or two alike;
      slots that are not integers, x of another dtype than the pool, or scales as in `rotate_patch`;
      arrays that do not fit, a rank beyond the width of what is patched, an unknown layout word.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    operands = Operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale)
    operands.check("splice", layout)
    _check_pool(pool, slots, operands)
    width = pool.shape[-1]

    def refusal(platform: str) -> str | None:
        # Kernels get rows as wide as the pool's: asked by shapes, for nothing is made before all is checked.
        wide = operands
        if x.shape[-1] != width:
            wide = jax.eval_shape(lambda operands: operands.with_width(width), operands)
        return kernel_module("splice", platform).unsupported(pool, wide, layout)

    unsupported = {"gpu": lambda: refusal("gpu"), "tpu": lambda: refusal("tpu")}
    chosen = choose("splice", implementation, unsupported)
    check_slots(slots, pool.shape[-4] * pool.shape[-3], length)

    if chosen != "xla":
        operands = operands.with_width(width)
    return _jitted(
        jnp.asarray(pool),
        jnp.asarray(slots, jnp.int32),
        operands.with_angles_scaled(scale),
        None if length is None else jnp.asarray(length, jnp.int32),
        implementation=chosen,
        layout=layout,
        interpret=interpretation(),
    )


def _write(pool, slots, operands, length, *, implementation: str, layout: str, interpret) -> Array:
    """Returns the pool with R · (x + u v + dense) at `slots`, by the implementation that was chosen."""
    if implementation == "xla":
        return reference.splice(pool, slots, operands, length, layout=layout)
    kernel = kernel_module("splice", implementation).kernel
    return kernel(pool, slots, operands, length, layout=layout, interpret=interpret)


_jitted = jax.jit(_write, static_argnames=("implementation", "layout", "interpret"), donate_argnames="pool")


def check_slots(slots: Slots, total: int, length: Length = None) -> None:
    """Refuses concrete slots that are not distinct numbers from 0 to total − 1; traced ones pass unseen.

    Args:
      slots: [T]. total: slots of the pool. length: slots from here on are padding; a traced one counts all of them.

    Raises:
      KernelError: see `splice`.
    """
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise KernelError(f"splice: got slots of dtype {slots.dtype}; expected int32")
    if isinstance(slots, Tracer):
        return

    tokens = slots.shape[0]
    named = np.asarray(slots)[: tokens if length is None or isinstance(length, Tracer) else int(length)]
    rising = np.sort(named)
    if named.size and (rising[0] < 0 or rising[-1] >= total):
        outside = named[(named < 0) | (named >= total)]
        raise KernelError(f"splice: got slot {int(outside[0])}; expected 0 to {total - 1}")

    twice = rising[1:][rising[1:] == rising[:-1]]
    if twice.size:
        raise KernelError(f"splice: got slot {int(twice[0])} named twice; expected distinct slots")


def _check_pool(pool: Array, slots: Slots, operands: Operands) -> None:
    """Refuses a pool or slots that do not fit the operands; raises as `splice` says."""
    x, v = operands.x, operands.v
    tokens, heads, width = x.shape[-3:]
    leading = x.shape[:-3]
    fits = pool.ndim == x.ndim + 1 and pool.shape[:-4] == leading and pool.shape[-2] == heads
    if not fits or pool.shape[-1] not in (width, padded_width(width)):
        wanted = f"{[*leading, 'P', 'O', heads, width]}, or {padded_width(width)} wide with padding"
        raise KernelError(f"splice: got pool {pool.shape}; expected {wanted}")
    if slots.shape != (tokens,):
        raise KernelError(f"splice: got slots of shape {slots.shape}; expected [{tokens}]")
    if operands.x_scale is None and x.dtype != pool.dtype:
        raise KernelError(f"splice: got x of dtype {x.dtype}; expected the pool's {pool.dtype}")
    if v is not None and v.shape[-2] > v.shape[-1]:
        raise KernelError(f"splice: got rank {v.shape[-2]}; expected at most the width {v.shape[-1]}")
