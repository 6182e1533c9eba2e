"""Attention masks: bool, True where a token may look."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvpatch_jax.errors import DtypeError


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def causal_mask(batch: int, length: int, keys: int, seen: Any) -> Bool[Array, "B 1 T S"]:
    """Makes the mask of tokens that look at a context and, causally, at each other.

    Args:
      length: T tokens. keys: of the context, in front of the tokens' own.
      seen: how many of the context's keys count, the first ones (the others are padding); traced.
    """
    key = jnp.arange(keys + length)
    allowed = (key < seen) | ((key >= keys) & (key - keys <= jnp.arange(length)[:, None]))
    return jnp.broadcast_to(allowed, (batch, 1, *allowed.shape))


def check_mask(mask: Any) -> None:
    """Raises DtypeError for a mask that is not bool: taken for one, a mask to add to scores would mean the opposite."""
    if mask is not None and mask.dtype != bool:
        raise DtypeError(
            f"mask is {mask.dtype}; expected bool, True where a token may attend (of a mask that is added to the "
            "scores: mask == 0)"
        )
