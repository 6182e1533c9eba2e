"""A tower's transformer block with RMS norms and a gated MLP, and its tensors: GLM-4V, Pixtral.

Axis letters: P packed patches, Y segments, Z patches per segment (padded), N heads, H head width, D tower width.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import rotate

from ..decoder.layers import GatedMLP, Linear, RMSNorm, check_activation, in_blocks
from ..decoder.mesh_axes import spread_tokens
from .common import attend_segments, check_heads, project_fused


@dataclasses.dataclass(frozen=True)
class GatedBlockConfig:
    """Sizes and switches of a block.

    Attributes:
      fused: query, key and value are one matrix, as the file has it.
      qkv_bias: they have biases.
    """

    width: int
    heads: int
    intermediate: int
    activation: str
    norm_epsilon: float
    fused: bool = True
    qkv_bias: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)
        check_activation(self.activation, "vision hidden_act")


class GatedBlock(nnx.Module):
    """Pre-norm attention and gated MLP with RMS norms, as a stack of `depth` blocks to scan over."""

    def __init__(self, config: GatedBlockConfig, rngs: nnx.Rngs, depth: int):
        width, lead, dtype = config.width, (depth,), jnp.dtype(config.dtype)
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        linear = {"rngs": rngs, "lead": lead, "dtype": dtype}
        self.attention_norm = RMSNorm(width, **norm)

        if config.fused:
            self.qkv = Linear(width, 3 * width, bias=config.qkv_bias, **linear)
        else:
            self.query, self.key, self.value = (Linear(width, width, bias=config.qkv_bias, **linear) for _ in range(3))

        self.output = Linear(width, width, bias=False, **linear)
        self.mlp_norm = RMSNorm(width, **norm)
        self.mlp = GatedMLP(width, config.intermediate, bias=False, activation=config.activation, **linear)
        self.config = config

    def attend(
        self, hidden: Float[Array, "P D"], tables: tuple[Array, Array], segments: Int[Array, "Y Z"]
    ) -> Float[Array, "P D"]:
        """Runs one block over packed patches with rotary positions in halves, full attention inside each segment.

        Args:
          tables: cosines and sines, [P,H/2] each. segments: as `attend_segments` takes them.
        """
        x, heads = self.attention_norm(hidden), self.config.heads
        if self.config.fused:
            query, key, value = project_fused(self.qkv, x, heads)
        else:
            x = spread_tokens(x, heads)
            query, key, value = (part(x).reshape(len(x), heads, -1) for part in (self.query, self.key, self.value))

        query, key = (rotate(part, *tables, "half") for part in (query, key))
        hidden = hidden + self.output(attend_segments(query, key, value, segments))
        return hidden + in_blocks(self.mlp, self.mlp_norm(hidden))
