"""GLM-4V's vision tower: bicubic learned and rotary positions, full attention per frame, downsampling, gated merger.

Sources: transformers' Glm4vVisionModel and Glm4vMoeVisionModel. Images of a batch are packed into one row of patches;
which patches attend to each other, and where each reads the learned positions, is decided on the host (`plan_patches`).

Axis letters: P patches, Y frames, Z patches per frame (padded), E merged tokens, D width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ..checkpoints import ParamPath, TensorEntry, module_entries
from ..decoder.layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm
from .common import (
    LayerNorm,
    add_positions,
    axial_tables,
    join_places,
    learned,
    patch_places,
    resample_taps,
    scan_blocks,
    segment_table,
)
from .gated import GatedBlock, GatedBlockConfig
from .weights import CONVOLUTION, GATED, TIMM, blocks, patch_entries

MERGER_EPSILON = 1e-5
"""Of the merger's layer norm."""


@dataclasses.dataclass(frozen=True)
class Glm4vVisionConfig:
    """Sizes and switches of the tower.

    Attributes:
      intermediate, merger: width inside a block's MLP, and inside the merger's.
      positions: side of the square of learned positions.
      qkv_bias: as `GatedBlockConfig` has it.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    merger: int
    output_width: int
    patch: int
    merge: int
    temporal: int
    positions: int
    channels: int = 3
    activation: str = "silu"
    theta: float = 1e4
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _ = self.block  # refuses heads that do not fit and unknown activations

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · temporal · patch · patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def block(self) -> GatedBlockConfig:
        """The transformer block."""
        return GatedBlockConfig(
            self.width,
            self.heads,
            self.intermediate,
            self.activation,
            self.norm_epsilon,
            qkv_bias=self.qkv_bias,
            dtype=self.dtype,
        )


def plan_patches(config: Glm4vVisionConfig, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images or videos with these (time, height, width) grids of patches.

    Returns `rows`, `columns` (int32 [P], place in the frame), `frames` (int32 [Y,Z], patch numbers per frame, padded by
    P), and of the learned positions `taps` (int32 [P,16]) and `weights` (float32 [P,16]). Patches are in the
    processor's order: merge blocks in raster order, the patches of a block together.

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    parts, sizes = [], []
    for time, height, width in np.asarray(grids).tolist():
        rows, columns = patch_places(height, width, config.merge)
        # transformers asks `grid_sample` for the same places: bicubic, corners not aligned, edges repeated.
        taps = resample_taps(rows, columns, (height, width), config.positions, "bicubic")
        parts += [(rows, columns, *taps)] * time
        sizes += [rows.size] * time
    return {**join_places(parts), "frames": segment_table(sizes)}


class Glm4vMerger(nnx.Module):
    """Linear map, layer norm, GELU, gated MLP."""

    def __init__(self, config: Glm4vVisionConfig, rngs: nnx.Rngs):
        width, dtype = config.output_width, jnp.dtype(config.dtype)
        self.project = Linear(width, width, bias=False, rngs=rngs, dtype=dtype)
        self.norm = LayerNorm(width, epsilon=MERGER_EPSILON, dtype=dtype)
        self.mlp = GatedMLP(width, config.merger, bias=False, activation=config.activation, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "E D"]) -> Float[Array, "E D"]:
        """Applies to [E,D]."""
        return self.mlp(ACTIVATIONS["gelu"](self.norm(self.project(x))))


class Glm4vVisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block."""

    def __init__(self, config: Glm4vVisionConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        norm = {"epsilon": config.norm_epsilon, "dtype": dtype}
        self.patch_embedding = Linear(config.features, width, bias=True, rngs=rngs, dtype=dtype)
        self.embedding_norm = RMSNorm(width, **norm)
        self.position_embedding = learned(rngs, (config.positions**2, width), dtype)
        self.blocks = GatedBlock(config.block, rngs, config.depth)
        self.final_norm = RMSNorm(width, **norm)
        self.downsample = Linear(width * config.merge**2, config.output_width, bias=True, rngs=rngs, dtype=dtype)
        self.merger = Glm4vMerger(config, rngs)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P F"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        frames: Int[Array, "Y Z"],
        taps: Int[Array, "P taps"],
        weights: Float[Array, "P taps"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels·temporal·patch²]; the index arrays come from `plan_patches`."""
        config = self.config
        hidden = self.patch_embedding(pixel_values.astype(jnp.dtype(config.dtype)))
        hidden = add_positions(self.embedding_norm(hidden), self.position_embedding, taps, weights)
        tables = axial_tables(rows, columns, config.width // config.heads, config.theta, alternate=False)

        def step(block: GatedBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, frames)

        hidden = self.final_norm(scan_blocks(self.blocks, step, hidden, 0, config.depth))
        # A convolution whose stride is its kernel: the patches of a merge block lie side by side.
        return self.merger(self.downsample(hidden.reshape(-1, config.width * config.merge**2)))


NAMES = {
    "embedding_norm": "post_conv_layernorm",
    "final_norm": "post_layernorm",
    "merger.project": "merger.proj",
    "merger.norm": "merger.post_projection_norm",
    **{f"merger.mlp.{part}": f"merger.{part}_proj" for part in ("gate", "up", "down")},
    **blocks("blocks", TIMM | GATED),
}


def glm4v_vision_entries(config: Glm4vVisionConfig, prefix: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps the tower with its merger."""
    patch = (config.width, config.channels, config.temporal, config.patch, config.patch)
    square = (config.output_width, config.width, config.merge, config.merge)
    downsample, place = f"{prefix}.downsample", (*path, "downsample")
    return [
        *patch_entries(f"{prefix}.patch_embed.proj", path, *patch),
        *module_entries(prefix, path, NAMES),
        TensorEntry(f"{prefix}.embeddings.position_embedding.weight", (*path, "position_embedding")),
        # [out, in, row, column] to [row · column · in, out]
        TensorEntry(f"{downsample}.weight", (*place, "kernel"), CONVOLUTION, file_shape=square),
        TensorEntry(f"{downsample}.bias", (*place, "bias")),
    ]
