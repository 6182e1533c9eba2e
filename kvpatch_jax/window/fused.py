"""A piece and the question behind it as the input of one forward."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Tokens


def packed_tokens(first: Tokens, length: int, second: Tokens, count: int) -> Tokens:
    """Packs the first `length` tokens of one input, and right behind them `count` of another.

    Without a gap causal order alone says who sees whom. The result has as many rows as both inputs, padding included.
    """
    size = first.embeddings.shape[1] + second.embeddings.shape[1]
    before, after = np.asarray(first.positions), np.asarray(second.positions)
    positions = np.zeros((1, size, *before.shape[2:]), np.result_type(before, after))
    positions[:, :length] = before[:, :length]
    positions[:, length : length + count] = after[:, :count]
    ahead = None
    if first.ahead is not None or second.ahead is not None:
        ahead = np.zeros((1, size), np.int32)
        for tokens, (at, kept) in ((first, (0, length)), (second, (length, count))):
            ahead[:, at : at + kept] = 0 if tokens.ahead is None else np.asarray(tokens.ahead)[:, :kept]
    begin = np.int32(length)
    embeddings = _packed_rows(first.embeddings, second.embeddings, begin)

    # An input without features for deeper layers has zeros beside one that has some.
    deepstack = [first.deepstack, second.deepstack]
    given = next((value for value in deepstack if value is not None), None)
    if given is None:
        return Tokens(embeddings, positions, None, ahead)

    for place, tokens in enumerate((first, second)):
        if deepstack[place] is None:
            deepstack[place] = jnp.zeros((*tokens.embeddings.shape[:2], *given.shape[2:]), given.dtype)
    return Tokens(embeddings, positions, _packed_rows(deepstack[0], deepstack[1], begin), ahead)


@jax.jit
def _packed_rows(first: Float[Array, "..."], second: Float[Array, "..."], length: Int[Array, ""]) -> Array:
    """Writes the second array over the first along axis 1 from `length` on, in room for both."""
    room = [(0, second.shape[1] if axis == 1 else 0) for axis in range(first.ndim)]
    return jax.lax.dynamic_update_slice_in_dim(jnp.pad(first, room), second.astype(first.dtype), length, axis=1)
