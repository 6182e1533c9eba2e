"""splice: checks and dispatch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from .._dispatch import Case, dispatch, kernel_module
from .._operands import Codes, Operands, padded_width, refuse, spread
from .._target import interpretation
from ..errors import KernelError
from . import reference

Slots = Int[Array | np.ndarray, " T"]
Length = Int[Array, ""] | int | np.integer | None


def splice(
    pool: Float[Array, "*leading P O K _"],
    slots: Slots,
    x: Float[Array, "*leading T K H"] | Codes,
    cos: Float[Array, "*angles #T half"] | None = None,
    sin: Float[Array, "*angles #T half"] | None = None,
    u: Num[Array, "*left T M"] | None = None,
    v: Num[Array, "*right M columns"] | None = None,
    *,
    dense: Float[Array, "*corrected T K H"] | None = None,
    layout: str = "half",
    scale: float = 1.0,
    length: Length = None,
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
      x, cos, sin, u, v, dense, layout, scale: as in `rotate_patch`; an array x has the pool's dtype.
      length: tokens that count, traced; later ones are written nowhere, and their slots are not looked at.
      implementation: as in `rotate_patch`.

    Returns:
      The pool. Arithmetic is float32, rounded once to its dtype.

    Raises:
      KernelError: a concrete slot out of range, or two alike;
      slots that are not integers, x of another dtype than the pool, arrays that do not fit, a rank beyond the width of
      what is patched, or an unknown layout word.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    operands = Operands(x, cos, sin, u, v, dense)
    operands.check("splice", layout)
    _check_pool(pool, slots, operands)
    check_slots(slots, pool.shape[-4] * pool.shape[-3], length)
    operands = operands.with_angles_scaled(scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)

    def run(name: str) -> Array:
        plan = {"implementation": name, "layout": layout, "interpret": interpretation()}
        return _jitted(jnp.asarray(pool), jnp.asarray(slots, jnp.int32), operands, length, **plan)

    case = Case("splice", x.shape[-2] == 1, u is not None, isinstance(x, Codes))
    return dispatch(case, implementation, run)


def _write(pool, slots, operands, length, *, implementation: str, layout: str, interpret) -> Array:
    """Returns the pool with R · (x + u v + dense) at `slots`, by the implementation that was chosen."""
    if implementation == "xla":
        return reference.splice(pool, slots, operands, length, layout=layout)
    operands.refuse(pool.dtype)
    kernel = kernel_module("splice", implementation).kernel
    return kernel(pool, slots, _widened(operands, pool.shape[-1]), length, layout=layout, interpret=interpret)


def _widened(operands: Operands, width: int) -> Operands:
    """Puts zeros behind each head up to `width` channels: kernels write whole rows."""
    if operands.x.shape[-1] == width:
        return operands
    refuse((isinstance(operands.x, Codes), f"codes of heads of {operands.x.shape[-1]}; expected the pool's {width}"))
    v = operands.v
    if v is not None:
        v = spread(v.reshape(*v.shape[:-1], *operands.x.shape[-2:]), 0, width)
        v = v.reshape(*v.shape[:-2], -1)
    return operands._replace(x=spread(operands.x, 0, width), v=v)


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
    if x.dtype != pool.dtype:
        raise KernelError(f"splice: got x of dtype {x.dtype}; expected the pool's {pool.dtype}")
    if v is not None and v.shape[-2] > v.shape[-1]:
        raise KernelError(f"splice: got rank {v.shape[-2]}; expected at most the width {v.shape[-1]}")
