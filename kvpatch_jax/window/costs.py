"""Costs of edits on one backbone: exact bytes and FLOPs from a few static numbers, serialisable."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from ..backbone import Backbone, ForwardCosts, seen_pairs
from ..cache import Patch, fingerprint_of

ROTATION = 3
"""FLOPs per rotated number: two products and a sum."""


def adding_flops(patch: Patch) -> int:
    """Returns FLOPs per token of multiplying a patch's factors and adding them."""
    metadata, flops = patch.metadata, 0
    for name in patch.factors:
        # A dense correction is only added.
        rank = patch.ranks[name]
        flops += (1 if rank is None else 2 * rank) * metadata.layout.channel(name).features * len(metadata.layers)
    return flops


@dataclasses.dataclass(frozen=True)
class Costs:
    """Static numbers of one backbone, from which costs of edits are computed.

    Attributes:
      backbone: its fingerprint.
      layers: of the decoder.
      kv_bytes: of one token's KV, all layers and channels. turning_bytes: of the channels that rotate.
      rotary: numbers of one token's KV, all layers, that a rotation changes.
      forward: FLOPs of forwards.
    """

    backbone: str
    layers: int
    kv_bytes: int
    turning_bytes: int
    rotary: int
    forward: ForwardCosts

    @classmethod
    def of(cls, backbone: Backbone, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> "Costs":
        """Computes the numbers of a backbone's layout and `forward_costs`.

        Args:
          dtype: of the KV in the pool.
        """
        # In whole numbers, so that sums over edits are exact.
        layout, size = backbone.layout, jnp.dtype(dtype).itemsize
        rotating = [channel for channel in layout.channels if channel.rotates]
        return cls(
            backbone=fingerprint_of(backbone.fingerprint, "costs"),
            layers=layout.layers,
            kv_bytes=layout.bytes_per_token(dtype),
            turning_bytes=layout.layers * size * sum(channel.features for channel in rotating),
            rotary=layout.layers * sum(channel.heads * channel.rotary for channel in rotating),
            forward=backbone.forward_costs,
        )

    def prefill(self, tokens: int, behind: int, start_layer: int = 0, logits: int = 0) -> dict[str, int]:
        """Returns costs of a forward behind `behind` other tokens: KV read and written, FLOPs of matrix products."""
        flops = self.run(tokens, behind) if start_layer == 0 else self.forward.flops(tokens, behind, start_layer)
        flops += logits * self.forward.logit

        # From a higher layer only the layers above are read and written.
        own = self.kv_bytes * (self.layers - start_layer) // self.layers
        return {"bytes": own * (tokens + behind), "flops": flops}

    def run(self, tokens: int, behind: int) -> int:
        """Returns FLOPs of a forward through all layers, as `ForwardCosts.flops`, from sums that are computed once."""
        token_flops, pairs = self._sums
        flops = token_flops * tokens
        for window, pair in pairs:
            flops += pair * seen_pairs(tokens, behind, window)
        return flops

    @functools.cached_property
    def _sums(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """FLOPs per token, and (attention window, FLOPs per pair of tokens), summed over the layers."""
        # Layers of one attention window see the same pairs of tokens, so their costs per pair add up.
        pairs = Counter[int]()
        for pair, window in zip(self.forward.pair, self.forward.window, strict=True):
            pairs[window] += pair
        return sum(self.forward.token), tuple(pairs.items())

    @functools.cached_property
    def copy_bytes(self) -> int:
        """Bytes per token of `copy`."""
        return 2 * self.kv_bytes

    @functools.cached_property
    def copy_flops(self) -> int:
        """FLOPs per token of `copy`."""
        return ROTATION * self.rotary

    def rotate(self, tokens: int) -> dict[str, int]:
        """Returns costs of rotating keys in place: rotating channels are read and written, the others stay."""
        return {"bytes": 2 * self.turning_bytes * tokens, "flops": ROTATION * self.rotary * tokens}

    def copy(self, tokens: int) -> dict[str, int]:
        """Returns costs of placing phase-free KV: all of it read, rotated and written."""
        return {"bytes": self.copy_bytes * tokens, "flops": self.copy_flops * tokens}

    def patch(self, tokens: int, patch_bytes: int, patch_flops: int) -> dict[str, int]:
        """Returns costs of placing phase-free KV with a patch: as `copy`, and factors read, multiplied and added."""
        placing = self.copy(tokens)
        return {"bytes": placing["bytes"] + patch_bytes, "flops": placing["flops"] + patch_flops * tokens}

    def fetch(self, tokens: int) -> dict[str, int]:
        """Returns costs of reading a canonical from a store."""
        return {"bytes": self.kv_bytes * tokens}

    def compact(self, tokens: int) -> dict[str, int]:
        """Returns costs of moving tokens to other slots, all of them at most."""
        return {"bytes": 2 * self.kv_bytes * tokens}

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON has them."""
        return dataclasses.asdict(self) | {"forward": self.forward._asdict()}
