"""One plain vision transformer for CLIP, SigLIP and InternViT (300M and 6B), told apart by switches.

Sources: transformers' CLIPVisionModel, SiglipVisionModel, SmolVLMVisionTransformer and InternVLVisionModel.
Axis letters: B images (or tiles), T tokens (class token included), E features per image, D width.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from kvpatch_jax.errors import ConfigError, ShapeError

from ..attention import Mask, attention
from ..decoder.layers import Linear
from ..decoder.mesh_axes import spread
from .common import BlockConfig, LayerNorm, PlainBlock, check_heads, count_layers_run, learned, scan_blocks


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes and switches.

    Attributes:
      image, patch: pixels per side of the image the positions are for, and of a patch.
      class_token: one learned token in front (CLIP, InternViT); it is dropped from the features if `drop_class`.
      patch_bias: the patch embedding has a bias (not in CLIP).
      pre_norm: a layer norm on the embeddings (CLIP).
      final_norm: "applied" to the features, "kept" (parameters that are loaded and saved, not used), or "none".
      layer_scale: learned vectors scale both updates of a block (InternViT).
      norm_type: of a block's norms, "layer_norm" or "rms_norm" (InternViT-6B). qk_norm: RMS norms over the whole width
        of query and key (InternViT-6B).
      feature_layer: which hidden state the features are, as transformers counts them: -1 the last, -2 the one before.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    image: int
    patch: int
    channels: int = 3
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    class_token: bool = False
    drop_class: bool = True
    patch_bias: bool = True
    pre_norm: bool = False
    final_norm: str = "none"
    layer_scale: bool = False
    qkv_bias: bool = True
    norm_type: str = "layer_norm"
    qk_norm: bool = False
    feature_layer: int = -1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        _ = self.layers_run  # refuses a layer that is not there
        if self.norm_type not in ("layer_norm", "rms_norm"):
            raise ConfigError(f"norm_type: got {self.norm_type!r}; expected 'layer_norm' or 'rms_norm'")
        if self.final_norm not in ("applied", "kept", "none"):
            raise ConfigError(f"final_norm: got {self.final_norm!r}; expected 'applied', 'kept' or 'none'")

    @property
    def side(self) -> int:
        """Patches along a side of the image."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        """Learned positions: patches, and the class token."""
        return self.side**2 + self.class_token

    @property
    def layers_run(self) -> int:
        """Blocks up to the hidden state that is the feature."""
        return count_layers_run(self.feature_layer, self.depth)

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            intermediate=self.intermediate,
            activation=self.activation,
            norm_epsilon=self.norm_epsilon,
            layer_scale=self.layer_scale,
            qkv_bias=self.qkv_bias,
            rms_norms=self.norm_type == "rms_norm",
            qk_norm=self.qk_norm,
            dtype=self.dtype,
        )


def bucket_positions(height: int, width: int, side: int) -> Int32[np.ndarray, " T"]:
    """Returns each patch's position in a side×side table, by its fraction of the height×width grid (SmolVLM, Idefics).

    Equal to transformers' `bucketize` in float32 for the sides in use (27 and 32); elsewhere, where a share falls on a
    boundary, torch's own rounding depends on the processor's vector width.
    """
    step = 1 / side
    boundaries = (step + step * np.arange(math.ceil((1 - step) / step))).astype(np.float32)

    def buckets(count: int) -> np.ndarray:
        shares = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
        # Kept below 1, as transformers does, so that no share falls behind the last bucket.
        return np.searchsorted(boundaries, np.minimum(shares, np.float32(1 - 1e-6)), side="right")

    return (buckets(height)[:, None] * side + buckets(width)).reshape(-1).astype(np.int32)


class ViT(nnx.Module):
    """Images to one feature vector per patch."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)

        def norm(wanted):
            return LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype) if wanted else None

        features = config.channels * config.patch**2
        self.patch_embedding = Linear(features, config.width, bias=config.patch_bias, rngs=rngs, dtype=dtype)
        self.position_embedding = learned(rngs, (config.tokens, config.width), dtype)
        self.class_embedding = learned(rngs, (config.width,), dtype) if config.class_token else None
        self.pre_norm = norm(config.pre_norm)
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.final_norm = norm(config.final_norm != "none")
        self.config = config

    def __call__(
        self, pixel_values: Float[Array, "B C H W"], positions: Int[Array, "B P"] | None = None
    ) -> Float[Array, "B E D"]:
        """Returns features of images [B,C,H,W]; `positions` (from `bucket_positions`) replace the patches' own order.

        Raises:
          ShapeError: images of another size than the learned positions, without `positions`.
        """
        config = self.config
        # As the convolutions of these towers do, rows and columns that make no whole patch are left out: SmolVLM2's
        # larger tower takes tiles of 384 pixels in patches of 14.
        height, width = (size - size % config.patch for size in pixel_values.shape[2:])
        patches = rearrange(
            pixel_values[:, :, :height, :width].astype(jnp.dtype(config.dtype)),
            "B C (row y) (column x) -> B (row column) (C y x)",
            y=config.patch,
            x=config.patch,
        )
        if positions is None and pixel_values.shape[2:] != (config.image, config.image):
            raise ShapeError(f"images: got {pixel_values.shape[2:]} pixels; expected {config.image}×{config.image}")

        hidden = self.patch_embedding(patches)
        table = self.position_embedding[...].astype(hidden.dtype)
        if self.class_embedding is not None:
            # In front, where the learned positions have it.
            first = jnp.broadcast_to(self.class_embedding[...].astype(hidden.dtype), (len(hidden), 1, hidden.shape[-1]))
            hidden = jnp.concatenate([first, hidden], axis=1)
        hidden = hidden + (table if positions is None else table[positions])
        if self.pre_norm is not None:
            hidden = self.pre_norm(hidden)
        scale = (config.width // config.heads) ** -0.5

        def step(block: PlainBlock, hidden: Array) -> Array:
            # Over a mesh: heads, and images over the devices that do not divide them.
            query, key, value = (spread(x, 2, 0) for x in block.project(hidden))
            mixed = attention(query, key, value, Mask(), scale=scale)
            return block.update(hidden, mixed.reshape(hidden.shape))

        # LLaVA takes the hidden state before the last, so the blocks above it are not run.
        hidden = scan_blocks(self.blocks, step, hidden, 0, config.layers_run)
        if config.final_norm == "applied" and self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return hidden[:, 1:] if config.class_token and config.drop_class else hidden
