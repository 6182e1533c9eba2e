"""FLOPs of adding a patch to its chunk."""

from ..cache import Patch


def adding_flops(patch: Patch) -> int:
    """Returns FLOPs per token of multiplying a patch's factors and adding them."""
    return sum(_row_flops(patch, channel.name) for channel in patch.metadata.layout.token_channels)


def transition_adding_flops(patch: Patch) -> int:
    """Returns FLOPs of multiplying and adding a patch's factors of a transition, whatever the number of tokens."""
    return sum((channel.rows or 0) * _row_flops(patch, channel.name) for channel in patch.metadata.layout.parts)


def _row_flops(patch: Patch, name: str) -> int:
    if name not in patch.factors:
        return 0
    # Two for each rank and feature (multiply and add), over the patch's own layers; a dense correction is only added.
    metadata, rank = patch.metadata, patch.ranks[name]
    layers = len(metadata.layout.rows_of(name, metadata.layers))
    return (1 if rank is None else 2 * rank) * metadata.layout.channel(name).features * layers
