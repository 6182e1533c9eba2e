"""Qwen2-VL's vision tower: rotary positions, layer norms, full attention per frame, 2×2 merger.

Source: transformers' Qwen2VisionTransformerPretrainedModel. Images of a batch are packed into one row of patches; which
patches attend to each other is decided on the host (`plan_patches`).

Axis letters: P patches, Y frames, Z patches per frame (padded), E merged tokens, D width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ..decoder.layers import Linear
from .common import (
    BlockConfig,
    LayerNorm,
    PlainBlock,
    PlainMLP,
    axial_tables,
    check_heads,
    patch_places,
    scan_blocks,
    segment_table,
)


@dataclasses.dataclass(frozen=True)
class Qwen2VisionConfig:
    """Sizes of the tower; `merge` patches a side become one token of `output_width`."""

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int
    temporal: int
    channels: int = 3
    activation: str = "quick_gelu"
    theta: float = 1e4
    norm_epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · temporal · patch · patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            self.width, self.heads, self.intermediate, self.activation, self.norm_epsilon, fused=True, dtype=self.dtype
        )


def plan_frames(merge: int, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images or videos with these (time, height, width) grids of patches.

    Returns `rows`, `columns` (int32 [P], place in the frame) and `frames` (int32 [Y,Z], patch numbers per frame, padded
    by P). Patches are in the processor's order: merge blocks in raster order, the patches of a block together.

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    places, sizes = [], []
    for time, height, width in np.asarray(grids).tolist():
        # Attention never crosses the frames of a video, and positions know nothing of time.
        places += [patch_places(height, width, merge)] * time
        sizes += [height * width] * time
    rows, columns = (np.concatenate(axis) for axis in zip(*places, strict=True))
    return {"rows": rows, "columns": columns, "frames": segment_table(sizes)}


def plan_patches(config: Qwen2VisionConfig, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Returns `plan_frames` of grids, with the tower's merge size; raises what that does."""
    return plan_frames(config.merge, grids)


class Qwen2VisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block."""

    def __init__(self, config: Qwen2VisionConfig, rngs: nnx.Rngs):
        dtype, merged = jnp.dtype(config.dtype), config.width * config.merge**2
        self.patch_embedding = Linear(config.features, config.width, bias=False, rngs=rngs, dtype=dtype)
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.merger_norm = LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        self.merger = PlainMLP(merged, merged, config.output_width, activation="gelu", rngs=rngs, dtype=dtype)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P F"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        frames: Int[Array, "Y Z"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels·temporal·patch²]; the index arrays come from `plan_patches`."""
        config = self.config
        hidden = self.patch_embedding(pixel_values.astype(jnp.dtype(config.dtype)))
        tables = axial_tables(rows, columns, config.width // config.heads, config.theta, alternate=False)

        def step(block: PlainBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, "half", frames)

        hidden = scan_blocks(self.blocks, step, hidden, 0, config.depth)
        return self.merger(self.merger_norm(hidden).reshape(-1, config.width * config.merge**2))
