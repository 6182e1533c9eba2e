"""Pixtral's vision tower and its two glues: Mistral Small 3.1's, which merges patches, and LLaVA's, which does not.

Sources: transformers' PixtralVisionModel, Mistral3MultiModalProjector and LlavaMultiModalProjector. Images of a batch
are packed into one row of patches; which patches attend to each other is decided on the host (`plan_patches`).

Axis letters: P patches, Y images, Z patches per image (padded), E tokens, M patches per token, D width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError

from ..checkpoints import ParamPath, TensorEntry, module_entries
from ..decoder.layers import Linear, RMSNorm, check_activation
from .common import patch_places, scan_blocks, segment_table
from .gated import GatedBlock, GatedBlockConfig
from .projectors import Projector
from .weights import blocks, patch_entries, projector_entries

EPSILON = 1e-5
"""Of the tower's norms."""


@dataclasses.dataclass(frozen=True)
class PixtralConfig:
    """Sizes and switches of the tower and its projector.

    Attributes:
      merge: patches per side that become one token.
      merges: the projector norms patches and mixes those of a token by a linear map first (Mistral Small 3.1), even
        where it is one patch.
      feature_layer: which hidden state the features are, as transformers counts them: -1 the last.
      projector_activation, projector_bias, projector_epsilon: of the projector.
    """

    depth: int
    width: int
    heads: int
    intermediate: int
    output_width: int
    patch: int
    merge: int = 1
    merges: bool = False
    channels: int = 3
    activation: str = "gelu"
    theta: float = 1e4
    feature_layer: int = -1
    projector_activation: str = "gelu"
    projector_bias: bool = True
    projector_epsilon: float = 1e-5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _ = self.block  # refuses heads that do not fit and unknown activations
        check_activation(self.projector_activation, "projector_hidden_act")
        if not -self.depth - 1 <= self.feature_layer <= self.depth:
            raise ConfigError(
                f"vision_feature_layer: got {self.feature_layer}; expected a layer of the tower's {self.depth}"
            )

    @property
    def layers_run(self) -> int:
        """Blocks up to the hidden state that is the feature."""
        return self.feature_layer if self.feature_layer >= 0 else self.depth + 1 + self.feature_layer

    @property
    def block(self) -> GatedBlockConfig:
        """The transformer block."""
        return GatedBlockConfig(
            self.width, self.heads, self.intermediate, self.activation, EPSILON, fused=False, dtype=self.dtype
        )


def plan_patches(config: PixtralConfig, grids: Int[np.ndarray, "images 2"]) -> dict[str, np.ndarray]:
    """Returns index arrays for images with these (height, width) grids of patches, in raster order.

    Returns `rows`, `columns` (int32 [P]), `images` (int32 [Y,Z], patch numbers per image, padded by P) and `merged`
    (int32 [E,M], the patches of each token).

    Raises:
      ShapeError: a grid that is not a multiple of the merge size.
    """
    places, sizes, merged = [], [], []
    for height, width in np.asarray(grids).tolist():
        block_rows, block_columns = patch_places(height, width, config.merge)
        merged.append((sum(sizes) + block_rows * width + block_columns).reshape(-1, config.merge**2))
        places.append(patch_places(height, width, 1))
        sizes.append(height * width)
    rows, columns = (np.concatenate(axis) for axis in zip(*places, strict=True))
    tokens = np.concatenate(merged).astype(np.int32)
    return {"rows": rows, "columns": columns, "images": segment_table(sizes), "merged": tokens}


class PixtralTower(nnx.Module):
    """Pixels to embeddings of the language tower; the projector is part of it."""

    def __init__(self, config: PixtralConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        linear = {"bias": False, "rngs": rngs, "dtype": dtype}
        self.patch_embedding = Linear(config.channels * config.patch**2, width, **linear)
        self.pre_norm = RMSNorm(width, epsilon=EPSILON, dtype=dtype)
        self.blocks = GatedBlock(config.block, rngs, config.depth)
        self.merger_norm = RMSNorm(width, epsilon=config.projector_epsilon, dtype=dtype) if config.merges else None
        self.merger = Linear(width * config.merge**2, width, **linear) if config.merges else None
        self.projector = Projector(
            width,
            config.output_width,
            config.output_width,
            activation=config.projector_activation,
            bias=config.projector_bias,
            rngs=rngs,
            dtype=dtype,
        )
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, " P *patch"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        images: Int[Array, "Y Z"],
        merged: Int[Array, "E M"],
    ) -> Float[Array, "E D"]:
        """Embeds packed patches [P, channels, patch, patch] (or flat); the index arrays come from `plan_patches`."""
        config = self.config
        flat = pixel_values.reshape(pixel_values.shape[0], -1).astype(jnp.dtype(config.dtype))
        hidden = self.pre_norm(self.patch_embedding(flat))
        tables = self._tables(rows, columns)

        def step(block: GatedBlock, hidden: Array) -> Array:
            return block.attend(hidden, tables, images)

        hidden = scan_blocks(self.blocks, step, hidden, 0, config.layers_run)
        if self.merger_norm is not None and self.merger is not None:
            # `unfold` puts a token's patches together channel by channel.
            squares = jnp.swapaxes(self.merger_norm(hidden)[merged], 1, 2)
            hidden = self.merger(squares.reshape(len(merged), -1))
        return self.projector(hidden)

    def _tables(self, rows: Int[Array, " P"], columns: Int[Array, " P"]) -> tuple[Array, Array]:
        """Computes cosines and sines [P,R]: rows take every other frequency of a head, columns those between."""
        # In float32 from the first step, as torch makes them.
        head_dim = self.config.width // self.config.heads
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = np.float32(1) / np.float32(self.config.theta) ** exponents
        parts = ((rows, frequencies[0::2]), (columns, frequencies[1::2]))
        angles = jnp.concatenate([place[:, None].astype(jnp.float32) * part for place, part in parts], axis=1)
        return jnp.cos(angles), jnp.sin(angles)


_BLOCK = {part: f"attention.{part[0]}_proj" for part in ("query", "key", "value", "output")}
_BLOCK |= {f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
NAMES = {"pre_norm": "ln_pre"} | blocks(
    "transformer.layers", _BLOCK | {"attention_norm": "attention_norm", "mlp_norm": "ffn_norm"}
)


def pixtral_entries(config: PixtralConfig, prefix: str, glue: str, path: ParamPath = ("visual",)) -> list[TensorEntry]:
    """Maps the tower and its projector, `glue`."""
    shape = (config.width, config.channels, config.patch, config.patch)
    merger = {"merger_norm": "norm", "merger": "patch_merger.merging_layer"}
    return [
        *patch_entries(f"{prefix}.patch_conv", path, *shape),
        *module_entries(prefix, path, NAMES),
        *module_entries(glue, path, merger),
        *projector_entries(f"{glue}.linear_1", f"{glue}.linear_2", path=(*path, "projector")),
    ]
