"""splice: checks and dispatch."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from .._dispatch import choose
from .._target import interpretation
from ..errors import KernelDtypeError, KernelShapeError, KernelSlotError
from ..rotate_patch.api import check, check_scales, scaled, word_of
from ..rotate_patch.gpu import Operands
from ..rotate_patch.reference import spread
from ..rotate_patch.tpu import padded_width
from . import gpu, reference, tpu

Slots = Int[Array | np.ndarray, " T"]
Length = Int[Array, ""] | int | np.integer | None


def splice(
    pool: Float[Array, "*leading P O K _"],
    slots: Slots,
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
      x, cos, sin, u, v, x_scale, u_scale, v_scale, dense, per_head, layout, scale: as in `rotate_patch`. An x without a
        scale has the pool's dtype.
      length: tokens that count, traced; later ones are written nowhere, and their slots are not looked at.
      implementation: "xla", "gpu", "tpu", or several in order of preference. None: the platform's kernel if it takes
        these arguments and won their shape on this kind of device, else "xla".

    Returns:
      The pool. Arithmetic is float32, rounded once to its dtype.

    Raises:
      KernelSlotError: a concrete slot out of range, or two alike.
      KernelDtypeError: slots that are not integers, x of another dtype than the pool, or scales as in `rotate_patch`.
      KernelShapeError: arrays that do not fit, a rank beyond the width of what is patched, an unknown layout word.
      KernelUnavailableError: none of the implementations asked for can run; says why of each.
    """
    check("splice", x, cos, sin, u, v, dense, per_head, layout)
    check_scales("splice", x, u, v, x_scale, u_scale, v_scale)
    _check_pool(pool, slots, x, v, x_scale)
    scales = (x_scale, u_scale, v_scale)
    reasons = _reasons(pool, x, cos, sin, u, v, dense, per_head, layout, *scales)
    chosen = choose("splice", implementation, reasons, word_of(x, u, dense, per_head, pool.shape[-1]))
    check_slots(slots, pool.shape[-4] * pool.shape[-3], length)
    if chosen != "xla":
        x, v, dense, x_scale = _in_rows(pool.shape[-1], per_head, x, v, dense, x_scale)
    cos, sin = scaled(cos, sin, scale)
    length = None if length is None else jnp.asarray(length, jnp.int32)
    slots = jnp.asarray(slots, jnp.int32)
    arrays = (jnp.asarray(pool), slots, x, cos, sin, u, v, dense, length, x_scale, u_scale, v_scale)
    if chosen == "gpu":
        given = Operands(x, cos, sin, u, v, dense, x_scale, u_scale, v_scale)
        return _jitted_gpu(jnp.asarray(pool), slots, given, length, layout=layout, interpret=interpretation())
    if chosen == "tpu":
        return _jitted_tpu(*arrays, layout=layout, interpret=interpretation())
    return _jitted(*arrays, per_head=per_head, layout=layout)


_jitted = jax.jit(reference.splice, static_argnames=("per_head", "layout"), donate_argnums=0)
_jitted_gpu = jax.jit(gpu.splice, static_argnames=("layout", "plan", "interpret"), donate_argnums=0)
_jitted_tpu = jax.jit(tpu.kernel, static_argnames=("layout", "tile", "interpret"), donate_argnums=0)


def check_slots(slots: Slots, total: int, length: Length = None) -> None:
    """Refuses concrete slots that are not distinct numbers from 0 to total − 1; traced ones pass unseen.

    Args:
      slots: [T]. total: slots of the pool. length: slots from here on are padding; a traced one counts all of them.

    Raises:
      KernelSlotError, KernelDtypeError: see `splice`.
    """
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise KernelDtypeError(f"splice: slots of dtype {slots.dtype}; expected int32")
    if isinstance(slots, Tracer):
        return
    tokens = slots.shape[0]
    named = np.asarray(slots)[: tokens if length is None or isinstance(length, Tracer) else int(length)]
    rising = np.sort(named)
    if named.size and (rising[0] < 0 or rising[-1] >= total):
        outside = named[(named < 0) | (named >= total)]
        raise KernelSlotError(f"splice: slot {int(outside[0])}; expected 0 to {total - 1}")
    twice = rising[1:][rising[1:] == rising[:-1]]
    if twice.size:
        raise KernelSlotError(f"splice: slot {int(twice[0])} is named twice; expected distinct slots")


def _check_pool(pool, slots, x, v, x_scale) -> None:
    tokens, heads, width = x.shape[-3:]
    leading = x.shape[:-3]
    fits = pool.ndim == x.ndim + 1 and pool.shape[:-4] == leading and pool.shape[-2] == heads
    if not fits or pool.shape[-1] not in (width, padded_width(width)):
        wanted = f"{[*leading, 'P', 'O', heads, width]}, or {padded_width(width)} wide with padding"
        raise KernelShapeError(f"splice: pool {pool.shape}; expected {wanted}")
    if slots.shape != (tokens,):
        raise KernelShapeError(f"splice: slots of shape {slots.shape}; expected [{tokens}]")
    if x_scale is None and x.dtype != pool.dtype:
        raise KernelDtypeError(f"splice: x of dtype {x.dtype}; expected the pool's {pool.dtype}")
    if v is not None and v.shape[-2] > v.shape[-1]:
        raise KernelShapeError(f"splice: rank {v.shape[-2]}; expected at most the width {v.shape[-1]}")


def _reasons(pool, x, cos, sin, u, v, dense, per_head: bool, layout: str, x_scale, *scales) -> dict[str, str | None]:
    """For each kernel, why it cannot take these arguments, as `choose` wants them."""
    if x.shape[-1] != pool.shape[-1]:
        as_rows = functools.partial(_in_rows, pool.shape[-1], per_head)
        x, v, dense, x_scale = jax.eval_shape(as_rows, x, v, dense, x_scale)
    return {
        "gpu": gpu.unsupported(pool, Operands(x, cos, sin, u, v, dense, x_scale, *scales), per_head, layout),
        "tpu": tpu.unsupported(pool, x, cos, u, v, dense, per_head, x_scale, *scales),
    }


def _in_rows(width: int, per_head: bool, x, v, dense, x_scale) -> tuple:
    """The arguments that are as wide as a channel, with zeros behind each head up to `width`: as kernels take them."""
    if x.shape[-1] == width:
        return x, v, dense, x_scale
    if v is not None and not per_head:
        v = spread(v.reshape(*v.shape[:-1], *x.shape[-2:]), 0, width).reshape(*v.shape[:-1], -1)
    elif v is not None:
        v = spread(v, 0, width)
    x, dense, x_scale = (None if leaf is None else spread(leaf, 0, width) for leaf in (x, dense, x_scale))
    return x, v, dense, x_scale
