"""SAM's image encoder (ViTDet) as DeepSeek's models use it: windowed and global attention with relative positions,
the neck behind it, and the convolutions that shrink its square of features.

Sources: transformers' SamVisionEncoder, DeepSeek-VL's `sam.py`; relative positions as in MViTv2 (arXiv:2112.01526).
Axis letters: B images (or windows of them), h and w rows and columns of patches, D width, C channels of the neck.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, ShapeError

from ..attention import Mask, attention
from ..decoder.layers import Linear
from .common import BlockConfig, Convolution, LayerNorm, PlainBlock, check_heads, learned, project_fused


@dataclasses.dataclass(frozen=True)
class SamConfig:
    """Sizes and switches.

    Attributes:
      image, patch: pixels per side of the image the positions are for, and of a patch.
      window: patches per side of the windows that layers outside `global_layers` attend in.
      global_layers: layers that attend over the whole image.
      neck: channels behind the neck.
      positions, relative: learned absolute positions; learned relative ones in every layer.
      interpolate: images of other sizes are taken too, with positions resampled to them (DeepSeek-OCR-2).
    """

    depth: int = 12
    width: int = 768
    heads: int = 12
    intermediate: int = 3072
    image: int = 1024
    patch: int = 16
    window: int = 14
    global_layers: tuple[int, ...] = (2, 5, 8, 11)
    neck: int = 256
    channels: int = 3
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    qkv_bias: bool = True
    positions: bool = True
    relative: bool = True
    interpolate: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        if self.window < 1:
            raise ConfigError(f"SAM window: got {self.window}; expected at least one patch a side")
        if not all(isinstance(layer, int) and 0 <= layer < self.depth for layer in self.global_layers):
            raise ConfigError(
                f"SAM global layers: got {self.global_layers}; expected layers of the tower's {self.depth}"
            )
        if self.patch < 1 or self.image % self.patch:
            raise ConfigError(f"SAM image: got {self.image} pixels; expected a multiple of the patch, {self.patch}")

    @property
    def side(self) -> int:
        """Patches along a side of the image."""
        return self.image // self.patch

    @property
    def block(self) -> BlockConfig:
        """The transformer block."""
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            intermediate=self.intermediate,
            activation=self.activation,
            norm_epsilon=self.norm_epsilon,
            fused=True,
            qkv_bias=self.qkv_bias,
            dtype=self.dtype,
        )


class SamBlock(nnx.Module):
    """One layer: attention inside windows of `side` patches (or, with `windowed` False, over an image of that side)."""

    def __init__(self, config: SamConfig, rngs: nnx.Rngs, windowed: bool):
        side = config.window if windowed else config.side
        shape, dtype = (2 * side - 1, config.width // config.heads), jnp.dtype(config.dtype)
        self.block = PlainBlock(config.block, rngs)
        self.rows = learned(rngs, shape, dtype) if config.relative else None
        self.columns = learned(rngs, shape, dtype) if config.relative else None
        self.window = config.window if windowed else None
        self.interpolate = config.interpolate

    def __call__(self, hidden: Float[Array, "B h w D"]) -> Float[Array, "B h w D"]:
        """Returns the residual behind this layer."""
        rows, columns = hidden.shape[1:3]
        x = self.block.attention_norm(hidden)
        if self.window is not None:
            # Padding lies behind the norm, so its keys are the projection's bias: SAM's windows see them.
            size = self.window
            x = jnp.pad(x, ((0, 0), (0, -rows % size), (0, -columns % size), (0, 0)))
            down, across = x.shape[1] // size, x.shape[2] // size
            x = rearrange(x, "B (down y) (across x) D -> (B down across) y x D", y=size, x=size)
            mixed = rearrange(
                self._attend(x),
                "(B down across) y x D -> B (down y) (across x) D",
                down=down,
                across=across,
            )[:, :rows, :columns]
        else:
            mixed = self._attend(x)

        # The MLP goes over tokens, which its blocks are counted in.
        flat = hidden.reshape(len(hidden), rows * columns, -1)
        return self.block.update(flat, mixed.reshape(flat.shape)).reshape(hidden.shape)

    def _attend(self, x: Float[Array, "B h w D"]) -> Float[Array, "B h w D"]:
        """Attends over squares of normalised patches.

        A score is scale · q kᵀ + q · R[row of q − row of k] + q · S[column of q − column of k]. The last two are inner
        products with the key's row and column, one-hot: they lengthen query and key, and no matrix of tokens by tokens
        is made.
        """
        batch, rows, columns, width = x.shape
        heads = self.block.config.heads
        query, key, value = project_fused(self.block.qkv, x.reshape(batch, rows * columns, width), heads)
        scale = query.shape[-1] ** -0.5

        if self.rows is not None and self.columns is not None:
            tables = ((self.rows, rows), (self.columns, columns))
            apart = [_distances(table[...], count, self.interpolate) for table, count in tables]
            places = query.reshape(batch, rows, columns, heads, -1)
            by_row = jnp.einsum("Bhwnd,hkd->Bhwnk", places, apart[0].astype(query.dtype))
            by_column = jnp.einsum("Bhwnd,wkd->Bhwnk", places, apart[1].astype(query.dtype))
            flat = (*query.shape[:3], -1)
            query = jnp.concatenate([query * scale, by_row.reshape(flat), by_column.reshape(flat)], axis=-1)

            row, column = np.divmod(np.arange(rows * columns), columns)
            here = np.concatenate([np.eye(rows)[row], np.eye(columns)[column]], axis=-1)[None, :, None]
            here = jnp.broadcast_to(jnp.asarray(here, key.dtype), (*key.shape[:3], rows + columns))
            key, scale = jnp.concatenate([key, here], axis=-1), 1.0

        return attention(query, key, value, Mask(), scale=scale).reshape(x.shape)


def _distances(table: Float[Array, "distances H"], count: int, interpolate: bool) -> Float[Array, "count count H"]:
    """Returns the relative positions of `count` queries to as many keys.

    Raises:
      ShapeError: more or fewer patches than the table is for, where it is not interpolated.
    """
    if interpolate and len(table) != 2 * count - 1:
        wide = table.astype(jnp.float32)
        table = jax.image.resize(wide, (2 * count - 1, table.shape[1]), "linear", antialias=False).astype(table.dtype)
    if len(table) != 2 * count - 1:
        raise ShapeError(f"SAM relative positions: got {count} patches a side; expected {(len(table) + 1) // 2}")
    places = np.arange(count)
    return table[places[:, None] - places[None] + count - 1]


class SamEncoder(nnx.Module):
    """Images to the residual of the last layer and of chosen layers below it."""

    def __init__(self, config: SamConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.patch_embedding = Linear(
            config.channels * config.patch**2, config.width, bias=True, rngs=rngs, dtype=dtype
        )
        shape = (config.side, config.side, config.width)
        self.position_embedding = learned(rngs, shape, dtype) if config.positions else None
        # Windowed and global layers have tables of other lengths, so layers are no stack.
        self.blocks = nnx.Dict(
            {str(layer): SamBlock(config, rngs, layer not in config.global_layers) for layer in range(config.depth)}
        )
        self.config = config

    def __call__(
        self, pixel_values: Float[Array, "B C H W"], keep: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B h w D"], list[Float[Array, "B h w D"]]]:
        """Returns the residual behind the last layer, and those behind the layers `keep`.

        Raises:
          ShapeError: images of another size than the learned positions, where these are not interpolated.
        """
        config = self.config
        if not config.interpolate and pixel_values.shape[2:] != (config.image, config.image):
            raise ShapeError(f"images: got {pixel_values.shape[2:]} pixels; expected {config.image}×{config.image}")

        patches = rearrange(
            pixel_values.astype(jnp.dtype(config.dtype)),
            "B C (row y) (column x) -> B row column (C y x)",
            y=config.patch,
            x=config.patch,
        )
        hidden, kept = self.patch_embedding(patches), []
        if self.position_embedding is not None:
            table = self.position_embedding[...]
            if table.shape[:2] != hidden.shape[1:3]:
                # Antialiased, with Keys' cubic of a = -1/2: torch's interpolation where it says so.
                shape = (*hidden.shape[1:3], table.shape[2])
                table = jax.image.resize(table.astype(jnp.float32), shape, "cubic", antialias=True)
            hidden = hidden + table.astype(hidden.dtype)
        for layer in range(config.depth):
            hidden = self.blocks[str(layer)](hidden)
            if layer in keep:
                kept.append(hidden)
        return hidden, kept


class SamNeck(nnx.Module):
    """From the encoder's residual to `neck` channels: two convolutions, each with a layer norm over the channels."""

    def __init__(self, config: SamConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        # SAM's own epsilon, whatever that of the layers is.
        norm = {"epsilon": 1e-6, "dtype": dtype}
        self.narrow = Linear(config.width, config.neck, bias=False, rngs=rngs, dtype=dtype)
        self.narrow_norm = LayerNorm(config.neck, **norm)
        self.mix = Convolution(config.neck, config.neck, rngs=rngs, dtype=dtype)
        self.mix_norm = LayerNorm(config.neck, **norm)

    def __call__(self, hidden: Float[Array, "B h w D"]) -> Float[Array, "B h w C"]:
        """Applies to a residual of the encoder."""
        return self.mix_norm(self.mix(self.narrow_norm(self.narrow(hidden))))


class SamDownsampling(nnx.Module):
    """Two convolutions of stride 2 that double the neck's channels (or lead to `channels`): a square of a quarter the
    side.
    """

    def __init__(self, config: SamConfig, rngs: nnx.Rngs, channels: tuple[int, int] | None = None):
        middle, last = channels or (2 * config.neck, 4 * config.neck)
        dtype = jnp.dtype(config.dtype)
        self.first = Convolution(config.neck, middle, stride=2, rngs=rngs, dtype=dtype)
        self.second = Convolution(middle, last, stride=2, rngs=rngs, dtype=dtype)

    def __call__(self, features: Float[Array, "B h w C"], side: int | None = None) -> Float[Array, "B rows columns E"]:
        """Shrinks features; with `side` they are first interpolated so that a square of this side comes out."""
        if side is not None:
            batch, *_, channels = features.shape
            shape = (batch, 4 * side, 4 * side, channels)
            # In float32, as torch's bilinear interpolation without aligned corners.
            wide = jax.image.resize(features.astype(jnp.float32), shape, "bilinear", antialias=False)
            features = wide.astype(features.dtype)
        return self.second(self.first(features))
