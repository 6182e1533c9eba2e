"""What every program of a model begins with: the module of its parameters, its masks, and KV laid over a mesh.

Axis letters: B batch, T tokens, S keys.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.backbone import Context, Tokens
from kvpatch_jax.core import KVLayout, Paged, token_rows

from ..attention import Mask, as_mask
from ..decoder.decoder import Decoder
from ..inputs.masks import causal_mask, paged_mask


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A module without its parameters, which are an argument of every program.

    Attributes:
      graph: the module as `nnx.split` leaves it. pads: token ids of placeholders. window: of the layers that slide.
      kv_shardings: how each channel's KV lies over the mesh; {} without one.
    """

    graph: Any
    pads: tuple[int, ...]
    layout: KVLayout
    window: int | None
    kv_shardings: Mapping[str, jax.sharding.Sharding]

    def decoder(self, state: Any) -> Decoder:
        """Returns the decoder with these parameters."""
        return nnx.merge(self.graph, state).decoder

    def spread(self, kv: Any) -> Any:
        """Returns a KV pytree laid over the mesh, where there is one (and None where there is no KV)."""
        if kv is None or not self.kv_shardings:
            return kv
        if isinstance(kv, Paged):
            return kv._replace(pool=self.spread(kv.pool), transition=self.spread(kv.transition))
        lay = jax.lax.with_sharding_constraint
        return {name: lay(value, self.kv_shardings[name]) for name, value in kv.items()}

    def mask(self, tokens: Tokens, context: Context | None, mask: Any) -> Mask:
        """Returns what tokens see of a context and of each other, by a mask or, without one, all that is in front and
        what they see ahead.
        """
        length = tokens.embeddings.shape[1]
        if isinstance(context, Paged):
            made = paged_mask(length, context, mask, self.window)
        else:
            made = causal_mask(length, key_count(context)) if mask is None else as_mask(mask, length)
        # A mask of bools says all that is seen.
        return dataclasses.replace(made, ahead=tokens.ahead) if made.causal and tokens.ahead is not None else made

    def on_all_axes(self, place: Array | np.ndarray) -> Array:
        """Returns positions [B,1] or [B,1,A] of one text token per row: text advances on all axes of M-RoPE alike."""
        axes = () if self.layout.rope.axes is None else (self.layout.rope.axes,)
        return jnp.broadcast_to(place.reshape(-1, 1, *(1 for _ in axes)), (len(place), 1, *axes))


def key_count(context: Context | Mapping[str, Any] | None) -> int:
    """Returns how many keys of a row a context holds, those of its pages that do not count included; 0 for none."""
    if isinstance(context, Paged):
        return context.key_count
    if context is None:
        return 0
    return token_rows(context).shape[2]
