"""FLOPs of placing a chunk and of adding a patch to it."""

from ..cache import Patch
from ..core import KVLayout

ROTATION = 3
"""FLOPs per rotated number: two products and a sum."""


def composing_flops(layout: KVLayout) -> int:
    """Returns FLOPs of composing two transitions: M₂M₁ and M₂B₁ + B₂ of every head."""
    flops, numbers = 0, {channel.name: (channel.rows or 0) * channel.features for channel in layout.parts}
    for channel in layout.parts:
        if channel.name == "map":
            # A matrix multiplies each column of map and state.
            flops += layout.depth(channel.name) * 2 * channel.width * (numbers["map"] + numbers["state"])
    return flops


def adding_flops(patch: Patch) -> int:
    """Returns FLOPs per token of multiplying a patch's factors and adding them."""
    return sum(_row_flops(patch, channel.name) for channel in patch.metadata.chunk.layout.token_channels)


def transition_adding_flops(patch: Patch) -> int:
    """Returns FLOPs of multiplying and adding a patch's factors of a transition, whatever the number of tokens."""
    return sum((channel.rows or 0) * _row_flops(patch, channel.name) for channel in patch.metadata.chunk.layout.parts)


def _row_flops(patch: Patch, name: str) -> int:
    if name not in patch.factors:
        return 0
    # Two for each rank and feature (multiply and add), over the patch's own layers; a dense correction is only added.
    metadata, rank = patch.metadata, patch.ranks[name]
    layers = len(metadata.chunk.layout.rows_of(name, metadata.layers))
    return (1 if rank is None else 2 * rank) * metadata.chunk.layout.channel(name).features * layers
