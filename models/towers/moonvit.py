"""MoonViT, Kimi-VL's vision tower: native resolution, bicubic learned and alternating rotary positions, 2×2 merger.

Kimi-K2.5's takes a few frames of a video as one grid: a sinusoid of the frame's number is added to its patches, all of
them attend to each other, and a token is the mean over frames. Of one frame (an image) all this is nothing.

Sources: transformers' Kimi_K25VisionModel (its image path is Kimi-VL's tower) and Kimi-VL's released configuration.
Axis letters: P patches, Y grids, Z patches per grid (padded), E merged tokens, D width.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from kvpatch_jax.errors import ShapeError

from ..decoder.layers import Linear
from .common import (
    BlockConfig,
    LayerNorm,
    PlainBlock,
    PlainMLP,
    add_positions,
    axial_tables,
    check_heads,
    join_places,
    learned,
    patch_places,
    resample_taps,
    scan_blocks,
    segment_table,
)


@dataclasses.dataclass(frozen=True)
class MoonViTConfig:
    """Sizes of the tower and its projector. `positions`: side of the learned table; `frames`: of a grid at most.

    `fused` and `rotary` follow the file: released ones keep query, key and value in one matrix whose rotary pairs are
    neighbours ("pairs"), transformers' split them and turn halves ("half"). The function computed is the same.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int
    positions: int
    frames: int = 1
    channels: int = 3
    activation: str = "gelu_pytorch_tanh"
    theta: float = 1e4
    norm_epsilon: float = 1e-5
    projector_epsilon: float = 1e-5
    fused: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)

    @property
    def rotary(self) -> Literal["half", "pairs"]:
        """Which channels turn together: "pairs" or "half"."""
        return "pairs" if self.fused else "half"

    @property
    def features(self) -> int:
        """Values per patch: channels · patch · patch."""
        return self.channels * self.patch**2

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            self.width,
            self.heads,
            self.intermediate,
            self.activation,
            self.norm_epsilon,
            fused=self.fused,
            dtype=self.dtype,
        )


def plan_patches(config: MoonViTConfig, grids: Int[np.ndarray, "images axes"]) -> dict[str, np.ndarray]:
    """Returns index arrays for (height, width) or (time, height, width) grids of patches, in raster order.

    Returns `rows`, `columns` (int32 [P]), `taps` (int32 [P,16]) and `weights` (float32 [P,16]) of the learned
    positions, `images` (int32 [Y,Z], patch numbers per grid, padded by P), `merged` (int32 [E,merge²], the patches of
    each token in the first frame), and for grids of several frames `times` (int32 [P], 0 in a grid of one frame, else
    the frame's number from 1), `strides` and `counts` (int32 [E], patches per frame and frames of each token's grid).

    Raises:
      ShapeError: a grid that is not a multiple of the merge size, or of more frames than the tower takes.
    """
    parts, sizes, merged, frames = [], [], [], []
    for *time, height, width in np.asarray(grids).tolist():
        count = time[0] if time else 1
        if not 1 <= count <= config.frames:
            raise ShapeError(f"grid: got {(count, height, width)}; expected 1 to {config.frames} frames")
        # Patches lie in raster order, and the squares that become one token are gathered at the end.
        block_rows, block_columns = patch_places(height, width, config.merge)
        merged.append((sum(sizes) + block_rows * width + block_columns).reshape(-1, config.merge**2))
        rows, columns = patch_places(height, width, 1)
        frame = (rows, columns, *resample_taps(rows, columns, (height, width), config.positions, "bicubic"))
        parts += [frame] * count
        sizes.append(rows.size * count)
        frames.append((count, rows.size, len(merged[-1])))

    plan = {**join_places(parts), "images": segment_table(sizes), "merged": np.concatenate(merged).astype(np.int32)}
    if max(count for count, *_ in frames) == 1:
        return plan
    counts, strides, tokens = np.array(frames, np.int32).T
    numbers = [np.arange(count, dtype=np.int32) + (count > 1) for count in counts]
    times = [np.repeat(own, stride) for own, stride in zip(numbers, strides, strict=True)]
    return plan | {
        "times": np.concatenate(times).astype(np.int32),
        "strides": np.repeat(strides, tokens),
        "counts": np.repeat(counts, tokens),
    }


def frame_table(frames: int, width: int) -> Float32[np.ndarray, "rows D"]:
    """Returns what is added to patches by frame: zeros for a lone one, then sines and cosines of the number."""
    # In float32 from the first step, as torch makes them.
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    angles = np.arange(frames, dtype=np.float32)[:, None] * (np.float32(1) / np.float32(10000) ** exponents)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.concatenate([np.zeros((1, width), np.float32), table]).astype(np.float32)


class MoonViT(nnx.Module):
    """Pixels to embeddings of the language tower, one per 2×2 patches; the projector is part of it."""

    def __init__(self, config: MoonViTConfig, rngs: nnx.Rngs):
        dtype, merged = jnp.dtype(config.dtype), config.width * config.merge**2
        self.patch_embedding = Linear(config.features, config.width, bias=True, rngs=rngs, dtype=dtype)
        self.position_embedding = learned(rngs, (config.positions**2, config.width), dtype)
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.final_norm = LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        self.merger_norm = LayerNorm(config.width, epsilon=config.projector_epsilon, dtype=dtype)
        self.merger = PlainMLP(merged, merged, config.output_width, activation="gelu", rngs=rngs, dtype=dtype)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, " P *patch"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        taps: Int[Array, "P taps"],
        weights: Float[Array, "P taps"],
        images: Int[Array, "Y Z"],
        merged: Int[Array, "E M"],
        times: Int[Array, " P"] | None = None,
        strides: Int[Array, " E"] | None = None,
        counts: Int[Array, " E"] | None = None,
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels, patch, patch] (or flat); the index arrays come from `plan_patches`."""
        config = self.config
        flat = pixel_values.reshape(pixel_values.shape[0], -1).astype(jnp.dtype(config.dtype))
        hidden = add_positions(self.patch_embedding(flat), self.position_embedding, taps, weights)
        if times is not None:
            hidden = hidden + jnp.asarray(frame_table(config.frames, config.width))[times].astype(hidden.dtype)

        # Width comes first in MoonViT's rotary pairs, height second.
        tables = axial_tables(columns, rows, config.width // config.heads, config.theta, alternate=True)

        def step(block: PlainBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, config.rotary, images)

        # The last norm is the tower's, the one over it the projector's: both are in the files.
        hidden = self.final_norm(scan_blocks(self.blocks, step, hidden, 0, config.depth))
        squares = hidden[merged]
        if strides is not None and counts is not None:
            # The mean over frames, of which padding has none.
            for frame in range(1, config.frames):
                here = hidden[merged + frame * strides[:, None]]
                squares = squares + jnp.where((frame < counts)[:, None, None], here, 0)
            squares = squares / jnp.maximum(counts, 1)[:, None, None].astype(squares.dtype)
        return self.merger(self.merger_norm(squares).reshape(merged.shape[0], -1))
