"""A question in one forward with the piece appended in front of it: its tokens run right behind the piece's own.

The piece's KV goes into the pool, the question's nowhere. Both are packed without a gap, so that causal order alone
says who sees whom; the forward has as many rows as the two of them have with their padding.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Tokens
from .executor import key_count
from .executor_pool import PoolExecutor
from .slot_table import ResidentPiece


@dataclasses.dataclass
class FusedQuestion:
    """What is asked behind a window while the run that leads to it goes on.

    Attributes:
      tokens: at their places behind the window, padded. length: how many count.
      logits: behind the last that counts, [1,1,V]; None until a forward of the run has answered it.
    """

    tokens: Tokens
    length: int
    logits: Float[Array, "1 1 V"] | None = None


def run_together(
    executor: PoolExecutor, question: FusedQuestion, tokens: Tokens, held: ResidentPiece, front: Sequence[ResidentPiece]
) -> dict[str, Float[Array, "L 1 T K H"]]:
    """Runs a piece behind those in front and the question behind it, and takes the answer down.

    Returns:
      Phase-free KV of piece, question and padding; the first `held.length` tokens are the piece's.

    Raises:
      NotFiniteError: NaN or infinity. What the backbone raises.
    """
    together = packed(tokens.shift(held.start), held.length, question.tokens, question.length)
    last = np.array([[held.length + question.length - 1]], np.int32)
    context = executor.context_of(front)
    prefill = getattr(executor.backbone, "prefill_padded", executor.backbone.prefill)
    out = prefill(together, context, logits=last)
    executor.check_finite("Prefill, with a question behind it,", held.id, out.logits)
    counts = held.length, question.length, together.embeddings.shape[1]
    behind = sum(piece.length for piece in front), key_count(context)
    executor.meter.ran_together(executor.pools.engine, counts, behind)
    question.logits = out.logits
    return dict(out.kv)


def packed(first: Tokens, length: int, second: Tokens, count: int) -> Tokens:
    """The first `length` tokens of one, right behind them `count` of the other, and as much padding as both had."""
    size = first.embeddings.shape[1] + second.embeddings.shape[1]
    own, other = np.asarray(first.positions), np.asarray(second.positions)
    positions = np.zeros((1, size, *own.shape[2:]), np.result_type(own, other))
    positions[:, :length] = own[:, :length]
    positions[:, length : length + count] = other[:, :count]
    begin = np.int32(length)
    embeddings = _behind(first.embeddings, second.embeddings, begin)
    deep = [each.deepstack for each in (first, second)]
    some = next((value for value in deep if value is not None), None)
    if some is None:
        return Tokens(embeddings, positions)
    whole = [
        jnp.zeros((*each.embeddings.shape[:2], *some.shape[2:]), some.dtype) if value is None else value
        for each, value in zip((first, second), deep, strict=True)
    ]
    return Tokens(embeddings, positions, _behind(whole[0], whole[1], begin))


@jax.jit
def _behind(first: Float[Array, "..."], second: Float[Array, "..."], length: Int[Array, ""]) -> Float[Array, "..."]:
    """Writes the second behind the first `length` along axis 1 of room for both."""
    room = [(0, second.shape[1] if axis == 1 else 0) for axis in range(first.ndim)]
    return jax.lax.dynamic_update_slice_in_dim(jnp.pad(first, room), second.astype(first.dtype), length, axis=1)
