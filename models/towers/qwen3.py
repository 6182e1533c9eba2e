"""Qwen3-VL's vision tower: interpolated and rotary positions, full attention per frame, main and deepstack mergers.

Source: transformers' Qwen3VLVisionModel. Images of a batch are packed into one row of patches; which patches attend to
each other, and where each reads the learned positions, is decided on the host (`plan_patches`).

Axis letters: P patches, Y frames, Z patches per frame (padded), E merged tokens, D width.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError

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
class Qwen3VisionConfig:
    """Sizes of the tower. `deepstack_layers`: blocks whose output goes to the first language layers as well.

    `positions` is the number of learned positions, a square.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int
    temporal: int
    positions: int
    deepstack_layers: tuple[int, ...]
    channels: int = 3
    activation: str = "gelu_pytorch_tanh"
    theta: float = 1e4
    norm_epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, 4)
        if self.side**2 != self.positions:
            raise ConfigError(f"num_position_embeddings: got {self.positions}; expected a square")
        inside = {layer for layer in self.deepstack_layers if type(layer) is int and 0 <= layer < self.depth}
        if list(self.deepstack_layers) != sorted(inside):
            raise ConfigError(
                f"deepstack layers: got {self.deepstack_layers}; expected rising layers below {self.depth}"
            )

    @property
    def features(self) -> int:
        """Values per patch as the processor hands them over: channels · temporal · patch · patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def side(self) -> int:
        """Rows of the square of learned positions."""
        return round(self.positions**0.5)

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            self.width, self.heads, self.intermediate, self.activation, self.norm_epsilon, fused=True, dtype=self.dtype
        )


def plan_patches(config: Qwen3VisionConfig, grids: Int[np.ndarray, "images 3"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images or videos with these (time, height, width) grids of patches.

    Returns `rows`, `columns` (int32 [P], place in the frame), `taps` (int32 [P,4]) and `weights` (float32 [P,4]) of the
    learned positions, and `frames` (int32 [Y,Z], patch numbers per frame, padded by P). Patches are in the processor's
    order: merge blocks in raster order, the patches of a block together.

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    parts, sizes = [], []
    for time, height, width in np.asarray(grids).tolist():
        # The frames of a video are alike: neither positions nor attention know of time.
        rows, columns = patch_places(height, width, config.merge)
        frame = (rows, columns, *resample_taps(rows, columns, (height, width), config.side, "bilinear"))
        parts += [frame] * time
        sizes += [rows.size] * time
    return {**join_places(parts), "frames": segment_table(sizes)}


class Qwen3VisionTower(nnx.Module):
    """Pixels to embeddings of the language tower, one per merge block, and the same for each deepstack layer."""

    def __init__(self, config: Qwen3VisionConfig, rngs: nnx.Rngs):
        dtype, merged = jnp.dtype(config.dtype), config.width * config.merge**2
        self.patch_embedding = Linear(config.features, config.width, bias=True, rngs=rngs, dtype=dtype)
        self.position_embedding = learned(rngs, (config.positions, config.width), dtype)
        self.blocks = PlainBlock(config.block, rngs, (config.depth,))
        self.merger_norm = LayerNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        mlp = {"activation": "gelu", "rngs": rngs, "dtype": dtype}
        self.merger = PlainMLP(merged, merged, config.output_width, **mlp)
        lead, deep = (len(config.deepstack_layers),), bool(config.deepstack_layers)
        norm = {"epsilon": config.norm_epsilon, "dtype": dtype}
        self.deepstack_norm = LayerNorm(merged, lead=lead, **norm) if deep else None
        self.deepstack = PlainMLP(merged, merged, config.output_width, lead=lead, **mlp) if deep else None
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P F"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        taps: Int[Array, "P taps"],
        weights: Float[Array, "P taps"],
        frames: Int[Array, "Y Z"],
    ) -> tuple[Float[Array, "E D"], Float[Array, "S E D"]]:
        """Embeds packed patches [P, channels·temporal·patch²]; the index arrays come from `plan_patches`.

        Returns the features [E,D] and the deepstack features [S,E,D], S being the number of deepstack layers: the s-th
        are to be added to the residual that leaves language layer s, at the image's tokens.
        """
        config = self.config
        embedded = self.patch_embedding(pixel_values.astype(jnp.dtype(config.dtype)))
        hidden = add_positions(embedded, self.position_embedding, taps, weights)
        tables = axial_tables(rows, columns, config.width // config.heads, config.theta, alternate=False)

        def step(block: PlainBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, "half", frames)

        # Deepstack features are the residual that leaves these blocks, so a scan ends behind each of them.
        stops, taken = [layer + 1 for layer in config.deepstack_layers], []
        for first, last in itertools.pairwise(sorted({0, *stops, config.depth})):
            hidden = scan_blocks(self.blocks, step, hidden, first, last)
            taken += [hidden] if last in stops else []

        square = config.width * config.merge**2
        features = self.merger(self.merger_norm(hidden).reshape(-1, square))
        if self.deepstack_norm is None or self.deepstack is None:
            return features, jnp.zeros((0, *features.shape), features.dtype)

        # The main merger norms patches before it joins four of them; those of deepstack norm what was joined.
        graph, state = nnx.split((self.deepstack_norm, self.deepstack))

        def body(carry: None, item: tuple) -> tuple[None, Array]:
            norm, mlp = nnx.merge(graph, item[0])
            return carry, mlp(norm(item[1]))

        stacked = jnp.stack(taken).reshape(len(taken), -1, square)
        return features, jax.lax.scan(body, None, (state, stacked))[1]
