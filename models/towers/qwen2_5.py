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

from kvpatch_jax.errors import ShapeError
from kvpatch_jax.rope import rotate

from ..decoder.layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm
from .common import attend_segments, check_heads, scan_blocks


@dataclasses.dataclass(frozen=True)
class VisionConfig:
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


def plan_patches(config: VisionConfig, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Index arrays for images with these (time, height, width) grids of patches.

    Returns `rows` and `columns` (int32 [P], each patch's place in its frame, for the tower's rotary positions),
    `windows` and `frames` (int32 [W,O], patch numbers per attention segment, padded by P). Patches are in the
    processor's order: merge blocks in raster order, the patches of a block together.

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    merge = config.merge
    reach = config.window // config.patch // merge
    rows, columns, windows, frames, first = [], [], [], [], 0
    for time, height, width in np.asarray(grids).tolist():
        if height % merge or width % merge:
            raise ShapeError(f"image grid {height}×{width} patches is not a multiple of the merge size {merge}")
        row, column = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        blocks = lambda x, h=height, w=width: (
            x.reshape(h // merge, merge, w // merge, merge).transpose(0, 2, 1, 3).reshape(-1)
        )
        row, column = blocks(row), blocks(column)
        across = -(-(width // merge) // reach)
        segment = (row // merge // reach) * across + column // merge // reach
        for _ in range(time):
            rows.append(row)
            columns.append(column)
            frames.append(np.arange(first, first + row.size))
            windows += [first + np.flatnonzero(segment == number) for number in np.unique(segment)]
            first += row.size
    pad = lambda parts: _pad_segments(parts, first)
    place = lambda parts: np.concatenate(parts).astype(np.int32)
    return {"rows": place(rows), "columns": place(columns), "windows": pad(windows), "frames": pad(frames)}


def _pad_segments(parts: list[np.ndarray], fill: int) -> np.ndarray:
    table = np.full((len(parts), max(part.size for part in parts)), fill, np.int32)
    for number, part in enumerate(parts):
        table[number, : part.size] = part
    return table


class VisionBlock(nnx.Module):
    """One transformer block of the tower (or a stack of them)."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs, lead: tuple[int, ...]):
        dtype = jnp.dtype(config.dtype)
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        linear = {"bias": True, "rngs": rngs, "lead": lead, "dtype": dtype}
        self.attention_norm = RMSNorm(config.width, **norm)
        self.qkv = Linear(config.width, 3 * config.width, **linear)
        self.output = Linear(config.width, config.width, **linear)
        self.mlp_norm = RMSNorm(config.width, **norm)
        self.mlp = GatedMLP(config.width, config.intermediate, activation=config.activation, **linear)


class VisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.patch_embedding = Linear(config.features, config.width, bias=False, rngs=rngs, dtype=dtype)
        self.blocks = VisionBlock(config, rngs, (config.depth,))
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
        """Embed packed patches [P, channels·temporal·patch²]; the index arrays come from `plan_patches`."""
        hidden = self.patch_embedding(pixel_values.astype(jnp.dtype(self.config.dtype)))
        tables = self._tables(rows, columns)
        for first, last, full in _runs(self.config.depth, self.config.full_layers):
            segments = frames if full else windows
            step = lambda block, hidden, segments=segments: self._block(block, hidden, tables, segments)
            hidden = scan_blocks(self.blocks, step, hidden, first, last)
        merged = self.merger_norm(hidden).reshape(-1, self.config.width * self.config.merge**2)
        return self.merger_out(ACTIVATIONS["gelu"](self.merger_in(merged)))

    def _tables(self, rows: Array, columns: Array) -> tuple[Array, Array]:
        quarter = self.config.width // self.config.heads // 4
        frequencies = self.config.theta ** (-np.arange(quarter, dtype=np.float32) / np.float32(quarter))
        angles = jnp.concatenate([place[:, None] * frequencies for place in (rows, columns)], axis=-1)
        return jnp.cos(angles), jnp.sin(angles)

    def _block(self, block: VisionBlock, hidden: Array, tables: tuple[Array, Array], segments: Array) -> Array:
        heads = self.config.heads
        qkv = block.qkv(block.attention_norm(hidden)).reshape(hidden.shape[0], 3, heads, -1)
        query, key = (rotate(qkv[:, part], *tables, "half") for part in (0, 1))
        hidden = hidden + block.output(attend_segments(query, key, qkv[:, 2], segments))
        return hidden + block.mlp(block.mlp_norm(hidden))


def _runs(depth: int, full_layers: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Maximal runs of layers of one kind: [(first, last, attends over the whole frame)]."""
    kinds = [layer in full_layers for layer in range(depth)]
    edges = [0, *[layer for layer in range(1, depth) if kinds[layer] != kinds[layer - 1]], depth]
    return [(first, last, kinds[first]) for first, last in itertools.pairwise(edges)]
