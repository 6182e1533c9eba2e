"""Gemma 4's vision tower: patches with positions per axis, rotary positions per half of a head, squares averaged.

Source: transformers' Gemma4VisionModel and Gemma4MultimodalEmbedder. Images of a batch are packed into one row of
patches without padding; which patches attend to each other is decided on the host (`plan_patches`).

Axis letters: P patches, Y images, Z patches per image (padded), E tokens, M patches per token, N heads, D tower width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import rotate
from kvpatch_jax.errors import ConfigError

from ..checkpoints import ParamPath, TensorEntry, module_entries
from ..decoder.layers import ACTIVATIONS, Linear, RMSNorm, check_activation, in_blocks
from ..decoder.mesh_axes import spread_tokens
from .bounded import BoundedLinear, bounded_entries
from .common import attend_segments, axial_tables, learned, patch_places, scan_blocks, segment_table

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
MAPS = {
    **{part: f"self_attn.{part[0]}_proj" for part in ("query", "key", "value", "output")},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


@dataclasses.dataclass(frozen=True)
class Gemma4VisionConfig:
    """Sizes and switches of the tower and the map behind it.

    Attributes:
      pool: patches per side that become one token. positions: places of an axis that have learned positions.
      bounded: maps cut their inputs and outputs (`use_clipped_linears`).
      standardised: a bias and a factor per channel of what is averaged.
      epsilon: of all norms.
    """

    depth: int
    width: int
    heads: int
    head_dim: int
    intermediate: int
    output_width: int
    patch: int = 16
    pool: int = 3
    positions: int = 10240
    activation: str = "gelu_pytorch_tanh"
    theta: float = 100.0
    bounded: bool = False
    standardised: bool = False
    epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.head_dim % 4:
            raise ConfigError(f"vision head_dim: got {self.head_dim}; expected a multiple of 4")
        check_activation(self.activation, "vision hidden_activation")

    @property
    def features(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch**2


def plan_patches(config: Gemma4VisionConfig, grids: Int[np.ndarray, "images 2"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images with these (height, width) grids of patches, in raster order.

    Returns `rows`, `columns` (int32 [P]), `images` (int32 [Y,Z], patch numbers per image, padded by P) and `merged`
    (int32 [E,M], the patches of each token).

    Raises:
      ShapeError: a grid that is not a multiple of the pooling size.
    """
    places, sizes, merged = [], [], []
    for height, width in np.asarray(grids).tolist():
        rows, columns = patch_places(height, width, config.pool)
        merged.append((sum(sizes) + rows * width + columns).reshape(-1, config.pool**2))
        places.append(patch_places(height, width, 1))
        sizes.append(height * width)
    rows, columns = (np.concatenate(axis) for axis in zip(*places, strict=True))
    tokens = np.concatenate(merged).astype(np.int32)
    return {"rows": rows, "columns": columns, "images": segment_table(sizes), "merged": tokens}


class Gemma4VisionBlock(nnx.Module):
    """Attention and gated MLP with norms before and behind each, as a stack of blocks to scan over."""

    def __init__(self, config: Gemma4VisionConfig, rngs: nnx.Rngs):
        lead, width, dtype = (config.depth,), config.width, jnp.dtype(config.dtype)
        norm = {"epsilon": config.epsilon, "lead": lead, "dtype": dtype}
        head_dim, inner = config.head_dim, config.heads * config.head_dim
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            RMSNorm(width, weight="wide", **norm) for _ in range(4)
        )
        self.query_norm, self.key_norm = (RMSNorm(head_dim, weight="wide", **norm) for _ in range(2))
        self.value_norm = RMSNorm(head_dim, weight="none", **norm)

        def linear(inputs, outputs):
            return BoundedLinear(inputs, outputs, bounded=config.bounded, rngs=rngs, lead=lead, dtype=dtype)

        self.query, self.key, self.value = (linear(width, inner) for _ in range(3))
        self.output = linear(inner, width)
        self.gate, self.up = (linear(width, config.intermediate) for _ in range(2))
        self.down = linear(config.intermediate, width)
        self.config = config

    def attend(
        self, hidden: Float[Array, "P D"], tables: tuple[Array, Array], segments: Int[Array, "Y Z"]
    ) -> Float[Array, "P D"]:
        """Runs one block over packed patches, full attention inside each segment.

        Args:
          tables: cosines and sines [P,H/2] of the columns' positions, then of the rows'.
          segments: as `attend_segments` takes them.
        """
        heads = self.config.heads
        x = spread_tokens(self.attention_norm(hidden), heads)
        query, key, value = (part(x).reshape(len(x), heads, -1) for part in (self.query, self.key, self.value))
        query, key = (_turn(part, tables) for part in (self.query_norm(query), self.key_norm(key)))
        mixed = self.output(attend_segments(query, key, self.value_norm(value), segments, scale=1.0))
        hidden = hidden + self.attention_post_norm(mixed)
        return hidden + self.mlp_post_norm(in_blocks(self._mlp, self.mlp_norm(hidden)))

    def _mlp(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        x = spread_tokens(x, self.up.kernel.shape[-1])
        return self.down(ACTIVATIONS[self.config.activation](self.gate(x)) * self.up(x))


def _turn(x: Float[Array, "P N H"], tables: tuple[Array, Array]) -> Float[Array, "P N H"]:
    """Rotates the first half of each head by the columns' positions, the second by the rows'."""
    quarter = x.shape[-1] // 4
    halves = []
    for number, part in enumerate(jnp.split(x, 2, axis=-1)):
        cos, sin = (table[:, number * quarter : (number + 1) * quarter] for table in tables)
        halves.append(rotate(part, cos, sin, "half"))
    return jnp.concatenate(halves, axis=-1)


class Gemma4VisionTower(nnx.Module):
    """Pixels to embeddings of the language tower; the map behind the tower is part of it."""

    def __init__(self, config: Gemma4VisionConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        linear = {"bias": False, "rngs": rngs, "dtype": dtype}
        self.patch_embedding = Linear(config.features, width, **linear)
        self.position_embedding = learned(rngs, (2, config.positions, width), dtype)
        self.blocks = Gemma4VisionBlock(config, rngs)
        standard = config.standardised
        self.mean = nnx.Param(jnp.zeros(width, dtype)) if standard else None
        self.factor = nnx.Param(jnp.ones(width, dtype)) if standard else None
        self.norm = RMSNorm(width, epsilon=config.epsilon, dtype=dtype, weight="none")
        self.projector = Linear(width, config.output_width, **linear)
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P d"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        images: Int[Array, "Y Z"],
        merged: Int[Array, "E M"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches of values in 0 … 1; the index arrays come from `plan_patches`."""
        config, table = self.config, self.position_embedding[...]
        dtype = jnp.dtype(config.dtype)
        hidden = self.patch_embedding((2 * (pixel_values.astype(jnp.float32) - 0.5)).astype(dtype))
        hidden = hidden + (table[0][columns] + table[1][rows])
        tables = axial_tables(columns, rows, config.head_dim, config.theta)

        def step(block: Gemma4VisionBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, images)

        hidden = scan_blocks(self.blocks, step, hidden, 0, config.depth)
        pooled = jnp.mean(hidden.astype(jnp.float32)[merged], axis=1).astype(dtype)
        pooled = pooled.astype(jnp.float32) * config.width**0.5
        if self.mean is not None and self.factor is not None:
            pooled = (pooled - self.mean[...].astype(jnp.float32)) * self.factor[...].astype(jnp.float32)
        return self.projector(self.norm(pooled.astype(dtype)))


def gemma4_vision_entries(prefix: str, glue: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps the tower and the map behind it, `glue`."""
    return [
        *module_entries(prefix, path, {"patch_embedding": "patch_embedder.input_proj"}),
        TensorEntry(f"{prefix}.patch_embedder.position_embedding_table", (*path, "position_embedding")),
        *module_entries(glue, path, {"projector": "embedding_projection"}),
        *module_entries(f"{prefix}.encoder.layers.{{layer}}", (*path, "blocks"), NORMS),
        *bounded_entries(f"{prefix}.encoder.layers.{{layer}}", (*path, "blocks"), MAPS),
        TensorEntry(f"{prefix}.std_bias", (*path, "mean")),
        TensorEntry(f"{prefix}.std_scale", (*path, "factor")),
    ]
