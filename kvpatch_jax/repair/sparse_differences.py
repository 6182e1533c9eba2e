"""Block-sparse differences to a master copy: TokenDance's diff-aware storage.

Differences are taken against the *decoded* base, so that they mend its rounding too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..backbone import Backbone
from ..core import KVLayout
from ..core.few_bits import GROUP
from ..errors import InputError
from .repair_budget import RepairBudget
from .spliced_cache import Repaired, SplicedCache, live_tokens, recorded_of, with_flops
from .stored_kv import (
    WHOLE,
    Base,
    KVPrecision,
    Precision,
    allowed_bytes,
    array_bytes,
    decode_kv_rows,
    encode_rows,
    phase_free_written,
    stored_base,
)

BLOCK_TOKENS = 16
"""Tokens of a block of TokenDance: a page of its engine's cache."""


def block_differences(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    bits: int = WHOLE,
    encoding: Precision | None = WHOLE,
    base: Base = "canonical",
    block: int = BLOCK_TOKENS,
    group: int | None = GROUP,
) -> Repaired:
    """Adds the largest blocks of the deficit to a master copy: block-sparse differences.

    Source: TokenDance (arXiv 2604.03143), "Diff-Aware Storage": sibling caches as block-sparse differences against one
    master. There a block differs where tokens were recomputed, and is exact where not; here every block differs, since
    all tokens have absorbed another antecedent, so the blocks with the most energy per byte are kept that the
    budget allows. A block is the tokens of a page at one layer in one channel. The source has no differences in 4 bits.

    Args:
      budget: bytes of the blocks' differences and indices (16 bits each, or 32 beyond 65 536 blocks).
      bits: of a difference: 16 (bfloat16), or 2 to 8, about zero, in groups over a token's features.
      encoding: of the master; None: the cache's dtype. base: the master; "first" is the KV behind the first of the
        others.
      block: tokens of a block; the last may be shorter.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, another base, encoding or bits, no KV of others, no
        tokens in a block, or it is called inside a trace. ShapeError, LayoutError, DtypeError: the splice does not
        match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "block_differences")
    recorded = recorded_of(splice, "block_differences")
    if block < 1:
        raise InputError(f"block_differences.block: got {block}; expected at least 1 token")
    # Checks the bits and the group.
    KVPrecision(bits, bits, group, "token", symmetric=True)
    kept = stored_base(layout, splice, base, encoding, "block_differences")
    costs = _block_costs(layout, tokens, block, bits, group)
    dense = {name: jnp.asarray(recorded[name]).astype(jnp.float32) - kept.kv[name] for name in layout.names}
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((dense, splice.length))):
        raise InputError("block_differences: got KV inside a trace; expected arrays, whose values its bytes depend on")
    marked = _marked_blocks(layout, dense, live_tokens(splice), costs, allowed, block)

    # Blocks of different channels may differ in size, so rows may fill their budget differently.
    size = round(float((np.asarray(marked) * costs).sum((-1, -2, -3)).mean()))
    bytes = kept.bytes._replace(stored=size, moved=kept.bytes.moved + size)
    masks = jnp.repeat(marked, block, axis=-1)[..., :tokens]
    delta = {}
    for place, name in enumerate(layout.names):
        value = jnp.where(jnp.moveaxis(masks[:, place], 0, 1)[..., None, None], dense[name], 0.0)
        # Groups lie within a token, so a block's codes are the same in whatever it is packed with.
        delta[name] = encode_rows(value, None, bits, group, -1, symmetric=True)

    def serve(own: SplicedCache) -> Repaired:
        return phase_free_written(layout, own, _sum(kept.read(own), decode_kv_rows(delta)), bytes)

    setting = ("block_differences", bits, block, base, str(encoding))
    # Every number is brought back, and the sum of both taken.
    return with_flops(serve(splice), serve, splice, backbone, setting, 3 * layout.numbers * tokens)


@jax.jit
def _sum(base: dict[str, Array], delta: dict[str, Array]) -> dict[str, Array]:
    return {name: value + delta[name] for name, value in base.items()}


def _block_costs(layout: KVLayout, tokens: int, block: int, bits: int, group: int | None) -> np.ndarray:
    """Bytes of each block with its index: [channels, layers, blocks]."""
    lengths = [min(block, tokens - first) for first in range(0, tokens, block)]
    index = 2 if len(layout.channels) * layout.layers * len(lengths) <= 65_536 else 4
    costs = []
    for channel in layout.channels:
        own = [index + array_bytes(length, channel.features, bits, group, -1, True) for length in lengths]
        costs.append([own] * layout.layers)
    return np.asarray(costs)


def _marked_blocks(
    layout: KVLayout, dense: dict[str, Array], live: Array, costs: np.ndarray, allowed: int, block: int
) -> Array:
    """Marks the blocks [B, channels, layers, blocks] with the most energy per byte, until the next one does not fit."""
    energies = []
    for channel in layout.channels:
        square = jnp.where(live, jnp.square(dense[channel.name]).sum((-1, -2)), 0.0)
        padded = jnp.pad(square, ((0, 0), (0, 0), (0, -square.shape[-1] % block)))
        energies.append(padded.reshape(*padded.shape[:2], -1, block).sum(-1))
    by_byte = jnp.moveaxis(jnp.stack(energies), 2, 0) / costs
    flat = by_byte.reshape(by_byte.shape[0], -1)
    order = jnp.argsort(-flat, axis=-1)
    spent = jnp.cumsum(jnp.asarray(costs.reshape(-1))[order], axis=-1)
    rows = jnp.arange(flat.shape[0])[:, None]
    fits = (spent <= allowed) & (jnp.take_along_axis(flat, order, -1) > 0)
    return jnp.zeros(flat.shape, bool).at[rows, order].set(fits).reshape(by_byte.shape)
