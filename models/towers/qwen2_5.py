"""Qwen2.5-VL's vision tower: patch embedding, windowed and full attention blocks, 2×2 merger.

Images of a batch are packed into one flat row of patches. Which patches attend to each other is decided on the host
(`plan_patches`) and travels as index arrays, so that another set of images of the same sizes never recompiles.

Axis letters: P patches, W windows, O patches per window (padded), E merged tokens, D tower width.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import rotate

from ..decoder.layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm, in_blocks
from ..decoder.mesh_axes import spread_tokens
from .common import (
    attend_segments,
    axial_tables,
    check_heads,
    pad_segments,
    patch_places,
    project_fused,
    scan_blocks,
    segment_table,
)


@dataclasses.dataclass(frozen=True)
class Qwen25VisionConfig:
    """Sizes of the tower. `window` is in pixels; `full_layers` attend over a whole frame, the others in windows."""

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int
    temporal: int
    window: int
    full_layers: tuple[int, ...]
    channels: int = 3
    activation: str = "silu"
    theta: float = 1e4
    norm_epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · temporal · patch · patch."""
        return self.channels * self.temporal * self.patch**2


def plan_patches(config: Qwen25VisionConfig, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images with these (time, height, width) grids of patches.

    Returns `rows` and `columns` (int32 [P], each patch's place in its frame, for the tower's rotary positions),
    `windows` and `frames` (int32 [W,O], patch numbers per attention segment, padded by P). Patches are in the
    processor's order: merge blocks in raster order, the patches of a block together.

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    merge = config.merge
    reach = config.window // config.patch // merge  # merged patches per side of a window
    places, sizes, windows = [], [], []

    for time, height, width in np.asarray(grids).tolist():
        row, column = patch_places(height, width, merge)
        across = -(-(width // merge) // reach)
        window = (row // merge // reach) * across + column // merge // reach
        # transformers reorders patches by window and back. Here they stay in the processor's order, and a window is a
        # list of their numbers.
        inside = [np.flatnonzero(window == number) for number in np.unique(window)]
        # Attention never crosses the frames of a video.
        for _ in range(time):
            windows += [sum(sizes) + patches for patches in inside]
            places.append((row, column))
            sizes.append(row.size)

    rows, columns = (np.concatenate(axis) for axis in zip(*places, strict=True))
    table = pad_segments(windows, sum(sizes))
    return {"rows": rows, "columns": columns, "windows": table, "frames": segment_table(sizes)}


class Qwen25VisionBlock(nnx.Module):
    """One transformer block of the tower (or a stack of them)."""

    def __init__(self, config: Qwen25VisionConfig, rngs: nnx.Rngs, lead: tuple[int, ...]):
        dtype = jnp.dtype(config.dtype)
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        linear = {"bias": True, "rngs": rngs, "lead": lead, "dtype": dtype}
        self.attention_norm = RMSNorm(config.width, **norm)
        self.qkv = Linear(config.width, 3 * config.width, **linear)
        self.output = Linear(config.width, config.width, **linear)
        self.mlp_norm = RMSNorm(config.width, **norm)
        self.mlp = GatedMLP(config.width, config.intermediate, activation=config.activation, **linear)


class Qwen25VisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block."""

    def __init__(self, config: Qwen25VisionConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.patch_embedding = Linear(config.features, config.width, bias=False, rngs=rngs, dtype=dtype)
        self.blocks = Qwen25VisionBlock(config, rngs, (config.depth,))
        self.merger_norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        merged = config.width * config.merge**2
        self.merger_in = Linear(merged, merged, bias=True, rngs=rngs, dtype=dtype)
        self.merger_out = Linear(merged, config.output_width, bias=True, rngs=rngs, dtype=dtype)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P F"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        windows: Int[Array, "W O"],
        frames: Int[Array, "Y Z"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels·temporal·patch²]; the index arrays come from `plan_patches`."""
        hidden = self.patch_embedding(pixel_values.astype(jnp.dtype(self.config.dtype)))
        head_dim = self.config.width // self.config.heads
        tables = axial_tables(rows, columns, head_dim, self.config.theta, alternate=False)

        # One scan goes through maximal runs of layers that attend alike.
        depth, whole = self.config.depth, set(self.config.full_layers)
        edges = [layer for layer in range(1, depth) if (layer in whole) != (layer - 1 in whole)]
        for first, last in itertools.pairwise([0, *edges, depth]):
            segments = frames if first in whole else windows

            def step(block: Qwen25VisionBlock, hidden: Array, segments: Array = segments) -> Array:
                query, key, value = project_fused(block.qkv, block.attention_norm(hidden), self.config.heads)
                query, key = (rotate(x, *tables, "half") for x in (query, key))
                hidden = hidden + block.output(attend_segments(query, key, value, segments))
                return hidden + in_blocks(block.mlp, block.mlp_norm(hidden))

            hidden = scan_blocks(self.blocks, step, hidden, first, last)

        merged = self.merger_norm(hidden).reshape(-1, self.config.width * self.config.merge**2)
        merged = spread_tokens(merged, merged.shape[-1])
        return self.merger_out(ACTIVATIONS["gelu"](self.merger_in(merged)))
