"""Prompts in which cached chunks and new text alternate: splicing them, and MPIC's one step against two.

Source: MPIC (Zhao et al. 2025, arXiv 2502.01960), sections 2.2 and 4.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..backbone import KV, Backbone, Tokens, joined_tokens
from ..core import EngineKV, to_engine
from ..errors import InputError
from .leading_tokens import first_counts, recompute_first
from .recomputation import Recompute
from .references import expect_nothing
from .repair_budget import NOTHING, RepairBudget
from .repaired import Repaired, method, untouched
from .spliced_cache import SplicedCache, check_splice

MPIC_32 = RepairBudget(tokens=32)
"""The k that MPIC reports most (section 5.2)."""


class PromptPiece(NamedTuple):
    """One piece of a prompt.

    Attributes:
      tokens: embeddings [B,n,D] and absolute positions.
      kv: phase-free canonical KV {channel: [L,B,n,K,H]} of a cached chunk; None: new text.
    """

    tokens: Tokens
    kv: KV | None = None


def splice_prompt(backbone: Backbone, pieces: Sequence[PromptPiece]) -> SplicedCache:
    """Splices the cached pieces of a prompt at their positions, with zeros where new text stands.

    The zeros are MPIC's dummy cache (section 4.1): new text is computed in the same forward that reads the chunks, and
    overwrites them before anything attends there.

    Raises:
      InputError: none that is cached. Else as a method: KV does not match the backbone or its tokens.
    """
    layout, parts, chunks, first = backbone.layout, [], [], 0
    if not any(piece.kv is not None for piece in pieces):
        raise InputError(f"splice_prompt.pieces: got {len(pieces)} without KV; expected at least one cached chunk")
    dtype = next(jnp.result_type(next(iter(piece.kv.values()))) for piece in pieces if piece.kv is not None)

    for piece in pieces:
        B, n, _ = piece.tokens.embeddings.shape
        if piece.kv is None:
            shapes = {channel.name: (layout.layers, B, n, channel.heads, channel.width) for channel in layout.channels}
            parts.append({name: jnp.zeros(shape, dtype) for name, shape in shapes.items()})
        else:
            parts.append(dict(to_engine(layout, piece.kv, piece.tokens.positions, 0)))
            chunks.append((first, first + n))
        first += n

    cache = {name: jnp.concatenate([part[name] for part in parts], axis=2) for name in layout.names}
    tokens = joined_tokens([piece.tokens for piece in pieces])
    slots = jnp.asarray(np.broadcast_to(np.arange(first, dtype=np.int32), (tokens.embeddings.shape[0], first)))
    splice = SplicedCache(tokens, EngineKV(cache), slots, chunks=tuple(chunks))
    check_splice(layout, splice)
    return splice


@method()
def mpic(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = MPIC_32) -> Repaired:
    """Computes new text and the first k tokens of every chunk in one forward, and reads the last token there.

    MPIC-k (section 4.2), as selective attention in a single step: `first_k` of a whole prompt.

    Args:
      splice: of a prompt that ends with new text, as `splice_prompt` makes it.
      budget: `tokens` is k.
    """
    _expect_prompt(splice)
    return recompute_first(backbone, splice, first_counts(backbone, splice, budget))


@method()
def two_step_reuse(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = NOTHING) -> Repaired:
    """Computes the KV of new text first, and then the last token over all that is cached: full reuse in two steps.

    Source: MPIC section 2.2, after Prompt Cache (Gim et al. 2024): "the first step is to calculate the KV cache of
    text, and the second step is to calculate the first output token using the concatenated KV cache". The paper does
    not say whether new text attends to chunks in the first step; here it does not.

    Args:
      splice: of a prompt that ends with new text.
    """
    _expect_prompt(splice)
    expect_nothing(backbone, splice, budget)
    new, layers = splice.new_text(), backbone.layout.layers
    B, S = len(splice.slots), next(iter(splice.cache.values())).shape[2]
    slots = jnp.asarray(splice.slots)
    # Slots outside the splice are in front of the prompt, and are seen.
    hidden = jnp.zeros((B, S), bool).at[jnp.arange(B)[:, None], slots].set(jnp.asarray(~new))
    mask = ((jnp.arange(S) <= slots[..., None]) & ~hidden[:, None])[:, None]

    # Without chunks the first step reads no logits, which it has no use for.
    text = Recompute(backbone, splice.replace(chunks=None), mask).run(0, layers, np.flatnonzero(new))
    last = Recompute(backbone, splice.replace(cache=text.cache)).run(0, layers, np.array([len(new) - 1]))
    repaired = last.repaired(untouched(backbone.layout, splice).bytes)
    return dataclasses.replace(repaired, chosen=text.chosen | last.chosen)


def _expect_prompt(splice: SplicedCache) -> None:
    if splice.chunks is None or not splice.new_text()[-1]:
        raise InputError(f"splice.chunks: got {splice.chunks}; expected a prompt that ends with new text")
