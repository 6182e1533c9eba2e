"""MiniCPM-V's resampler: learned queries read the patches of each slice by one cross-attention.

Source: OpenBMB's `resampler.py`. Axis letters: P patches, Y slices, Z patches per slice (padded), Q queries, D width.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError

from ..attention import Mask, attention
from ..checkpoints import TensorEntry
from ..checkpoints.entries import Part
from ..decoder.layers import Linear
from ..decoder.mesh_axes import spread, spread_tokens
from ..decoder.weights import linear_entries
from .common import LayerNorm, learned
from .weights import norm_entries

HEAD_DIM = 128
"""Channels of a head, whatever the width is."""
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class ResamplerConfig:
    """Sizes: of the patches' features (`inputs`), of what comes out (`width`), and how many queries a slice has."""

    inputs: int
    width: int
    queries: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width % HEAD_DIM:
            raise ConfigError(f"resampler: got width {self.width}; expected a multiple of a head's {HEAD_DIM} channels")
        if self.inputs == self.width:
            raise ConfigError(
                f"resampler: got a tower and a decoder of one width, {self.width}, between which there is no map; "
                "expected two"
            )

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.width // HEAD_DIM


class Resampler(nnx.Module):
    """Features of packed patches to a few embeddings of each slice."""

    def __init__(self, config: ResamplerConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        linear = {"rngs": rngs, "dtype": dtype}
        norm = {"epsilon": EPSILON, "dtype": dtype}
        self.queries = learned(rngs, (config.queries, width), dtype)
        self.inputs = Linear(config.inputs, width, bias=False, **linear)
        self.query_norm, self.input_norm, self.final_norm = (LayerNorm(width, **norm) for _ in range(3))
        self.query, self.key, self.value, self.output = (Linear(width, width, bias=True, **linear) for _ in range(4))
        self.final = Linear(width, width, bias=False, **linear)
        self.config = config

    def __call__(
        self,
        features: Float[Array, "P C"],
        rows: Int[Array, " P"],
        columns: Int[Array, " P"],
        slices: Int[Array, "Y Z"],
    ) -> Float[Array, "E D"]:
        """Returns Q embeddings per slice, slice by slice.

        Args:
          features: of packed patches. rows, columns: of each patch in its slice.
          slices: patch numbers of each slice, padded by P.
        """
        config, patches = self.config, len(features)
        values = spread_tokens(self.input_norm(self.inputs(features)), config.heads)
        keys = values + grid_positions(rows, columns, config.width).astype(values.dtype)

        def heads(x):
            return x.reshape(*x.shape[:-1], config.heads, -1)

        # Over a mesh: heads, and slices over the devices that do not divide them.
        def gathered(x):
            return spread(jnp.take(heads(x), slices, axis=0, mode="fill", fill_value=0), 2, 0)

        query = heads(self.query(self.query_norm(self.queries[...].astype(values.dtype))))
        query = spread(jnp.broadcast_to(query, (len(slices), *query.shape)), 2, 0)
        # Queries of a slice that only pads the table see nothing, like its patches.
        real = jnp.where(slices < patches, 0, -1)
        asked = jnp.broadcast_to(real.max(axis=1, keepdims=True), query.shape[:2])
        mask = Mask(query_segments=asked, key_segments=real)
        read = attention(query, gathered(self.key(keys)), gathered(self.value(values)), mask, scale=HEAD_DIM**-0.5)
        mixed = self.output(read.reshape(-1, config.width))
        return self.final(self.final_norm(mixed))


def grid_positions(rows: Int[Array, " P"], columns: Int[Array, " P"], width: int) -> Float[Array, "P D"]:
    """Returns sines and cosines of columns in the first half of the channels, and of rows in the second."""
    # In float32 from the first step, as NumPy makes the authors' table.
    quarter = width // 4
    frequencies = np.float32(1) / np.float32(1e4) ** (np.arange(quarter, dtype=np.float32) / np.float32(quarter))
    angles = [place[:, None].astype(jnp.float32) * frequencies for place in (columns, rows)]
    return jnp.concatenate([part(angle) for angle in angles for part in (jnp.sin, jnp.cos)], axis=1)


def resampler_entries(config: ResamplerConfig, prefix: str, path: tuple[str, ...]) -> list[TensorEntry]:
    """Maps the resampler; query, key and value lie in one tensor of the file."""
    entries = [
        TensorEntry(f"{prefix}.query", (*path, "queries")),
        # The authors multiply by it from the right: it is [in, out] already.
        TensorEntry(f"{prefix}.proj", (*path, "final", "kernel")),
        *linear_entries(f"{prefix}.kv_proj", (*path, "inputs"), bias=False),
        *linear_entries(f"{prefix}.attn.out_proj", (*path, "output")),
        *norm_entries(f"{prefix}.ln_q", (*path, "query_norm")),
        *norm_entries(f"{prefix}.ln_kv", (*path, "input_norm")),
        *norm_entries(f"{prefix}.ln_post", (*path, "final_norm")),
    ]
    for number, name in enumerate(("query", "key", "value")):
        piece = Part(number * config.width, (number + 1) * config.width, 3 * config.width)
        entries += [
            TensorEntry(f"{prefix}.attn.in_proj_weight", (*path, name, "kernel"), (1, 0), part=piece),
            TensorEntry(f"{prefix}.attn.in_proj_bias", (*path, name, "bias"), part=piece),
        ]
    return entries
