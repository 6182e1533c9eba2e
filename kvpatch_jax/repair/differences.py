"""Differences that are added to a base copy: KVCOMM's anchors, and TokenDance's blocks.

Differences are taken against the decoded base, so that they mend its rounding too.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..backbone import KV, Backbone
from ..core import WHOLE, AnyArray, KVEncoding
from ..errors import InputError
from .repair_budget import RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, method
from .spliced_cache import SplicedCache, canonical_of, live_tokens, pooled_embedding, required
from .stored_forms import allowed_bytes, decode_rows, differences, encode_rows, encoding_of, expect_values, serve_form

BLOCK_TOKENS = 16
"""Tokens of a block of TokenDance: a page of its engine's cache."""


@method()
def anchored(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
    *,
    precision: KVEncoding | str | int = WHOLE,
    encoding: KVEncoding | str | int = WHOLE,
) -> Repaired:
    """Adds a weighted mean of the deviations that the chunk's KV has behind other antecedents, the anchors.

    Source: KVCOMM (arXiv 2510.12872): anchors keep observed deviations from the base KV, positions aligned;
    an unseen context's is their sum, weighted by a softmax of negative distances of embeddings. There anchors are of
    other contents too, and a request far from all of them is computed; here they are of the same chunk, and all are
    used, whatever the distance. Distances are Euclidean, of mean token embeddings of antecedents. It reads no KV of the
    splice's own antecedent, which therefore may be new.

    Args:
      budget: bytes of all anchors with their embeddings (16 bits a number), kept once; of `splice.others` the first
        that fit.
      precision: of a deviation; 16: bfloat16, as the source keeps KV.
      encoding: of the canonical that they deviate from.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed, others = allowed_bytes(layout, splice, budget), required(splice, "others")
    embedding, anchors = pooled_embedding(required(splice, "front")), []
    for place, other in enumerate(others):
        if other.embedding is None:
            raise InputError(f"splice.others[{place}].embedding: got None; expected a pooled embedding")
        anchors.append(jnp.asarray(other.embedding).astype(jnp.bfloat16))

    fine, coarse = encoding_of(precision), encoding_of(encoding)
    size = fine.nbytes(layout, tokens) + 2 * splice.tokens.embeddings.shape[-1]
    count = min(len(others), allowed // size)
    if not count:
        raise InputError(f"budget: got {allowed} bytes; expected at least {size}, of one anchor")

    stored = encode_rows(layout, canonical_of(layout, splice), coarse, splice.length)
    base, deviations = decode_rows(stored), []
    for other in others[:count]:
        deviations.append(encode_rows(layout, differences(dict(other.kv), base), fine, splice.length))
    weights = anchor_weights(embedding, jnp.stack(anchors[:count]))

    def decode() -> KV:
        return _interpolated(decode_rows(stored), [decode_rows(deviation) for deviation in deviations], weights)

    # Every anchor is read, because every one has a weight.
    canonical, shared = coarse.nbytes(layout, tokens), count * size
    bytes = RepairBytes(canonical=canonical, shared=shared, moved=canonical + shared)
    adding = (2 + fine.decoding) * count * layout.numbers * tokens
    return serve_form(backbone, splice, bytes, decode, adding)


def anchor_weights(embedding: Float[AnyArray, "B D"], anchors: Float[AnyArray, "N B D"]) -> Float[Array, "N B"]:
    """Computes the weights of anchors: softmax over them of −‖e − e_i‖, in float32."""
    apart = jnp.asarray(embedding).astype(jnp.float32) - jnp.asarray(anchors).astype(jnp.float32)
    return jax.nn.softmax(-jnp.linalg.norm(apart, axis=-1), axis=0)


@jax.jit
def _interpolated(base: KV, deviations: list[dict[str, Array]], weights: Array) -> dict[str, Array]:
    total = dict(base)
    for weight, delta in zip(weights, deviations, strict=True):
        total = {name: value + weight[:, None, None, None] * delta[name] for name, value in total.items()}
    return total


@method()
def block_differences(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget, *, base: Literal["canonical", "first"] = "canonical"
) -> Repaired:
    """Adds the largest blocks of the deficit to a master copy: block-sparse differences, both in bfloat16.

    Source: TokenDance (arXiv 2604.03143), "Diff-Aware Storage": sibling caches as block-sparse differences against one
    master. There a block differs where tokens were recomputed, and is exact where not; here every block differs, since
    all tokens have absorbed another antecedent, so the blocks with the most energy per byte are kept that the
    budget allows. A block is the tokens of a page at one layer in one channel.

    Args:
      budget: bytes of the blocks' differences and indices (16 bits each, or 32 beyond 65 536 blocks).
      base: the master: the canonical, or the KV behind the first of the others.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed, recorded = allowed_bytes(layout, splice, budget), required(splice, "recorded")
    if base not in ("canonical", "first"):
        raise InputError(f"block_differences.base: got {base!r:.80}; expected 'canonical' or 'first'")
    source = required(splice, "others")[0].kv if base == "first" else canonical_of(layout, splice)
    master = {name: jnp.asarray(value).astype(jnp.bfloat16).astype(jnp.float32) for name, value in source.items()}
    delta = differences(dict(recorded), master)
    expect_values((delta, splice.length), "block_differences")

    # Bytes of each block with its index: [channels, layers, blocks].
    lengths = np.array([min(BLOCK_TOKENS, tokens - first) for first in range(0, tokens, BLOCK_TOKENS)])
    index = 2 if len(layout.channels) * layout.layers * len(lengths) <= 65_536 else 4
    costs = np.asarray([[index + 2 * lengths * channel.features] * layout.layers for channel in layout.channels])
    marked = _marked_blocks([delta[name] for name in layout.names], live_tokens(splice), costs, allowed)
    # Blocks of different channels may differ in size, so rows may fill their budget differently.
    stored = round(float((np.asarray(marked) * costs).sum((-1, -2, -3)).mean()))
    masks = jnp.repeat(marked, BLOCK_TOKENS, axis=-1)[..., :tokens]
    blocks = {}
    for place, name in enumerate(layout.names):
        inside = jnp.moveaxis(masks[:, place], 0, 1)[..., None, None]
        blocks[name] = jnp.where(inside, delta[name], 0.0).astype(jnp.bfloat16)

    def decode() -> KV:
        return {name: value + blocks[name].astype(jnp.float32) for name, value in master.items()}

    size = kv_bytes(layout, tokens)
    bytes = RepairBytes(stored=stored, moved=size + stored, **{"canonical" if base == "canonical" else "shared": size})
    # Every number is brought back, and the sum of both taken.
    return serve_form(backbone, splice, bytes, decode, 3 * layout.numbers * tokens)


def _marked_blocks(deltas: list[Array], live: Array, costs: np.ndarray, allowed: int) -> Array:
    """Marks the blocks [B, channels, layers, blocks] with the most energy per byte, until the next one does not fit."""
    energies = []
    for delta in deltas:
        square = jnp.where(live, jnp.square(delta).sum((-1, -2)), 0.0)
        padded = jnp.pad(square, ((0, 0), (0, 0), (0, -square.shape[-1] % BLOCK_TOKENS)))
        energies.append(padded.reshape(*padded.shape[:2], -1, BLOCK_TOKENS).sum(-1))
    by_byte = jnp.moveaxis(jnp.stack(energies), 2, 0) / costs
    flat = by_byte.reshape(by_byte.shape[0], -1)
    order = jnp.argsort(-flat, axis=-1)
    spent = jnp.cumsum(jnp.asarray(costs.reshape(-1))[order], axis=-1)
    rows = jnp.arange(flat.shape[0])[:, None]
    fits = (spent <= allowed) & (jnp.take_along_axis(flat, order, -1) > 0)
    return jnp.zeros(flat.shape, bool).at[rows, order].set(fits).reshape(by_byte.shape)
