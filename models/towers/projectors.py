"""From a tower's features to embeddings of the language tower: MLPs, pixel shuffle, LLaVA-NeXT's packing of tiles.

Axis letters: B images or tiles, E features per image, D width, F packed features.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from einops import rearrange, reduce
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from kvpatch_jax.errors import ConfigError, ShapeError

from ..decoder.layers import Linear, RMSNorm
from .common import LayerNorm, PlainMLP


def pixel_shuffle(features: Float[Array, "B E D"], factor: int) -> Float[Array, "B merged wide"]:
    """Concatenates factor×factor neighbours of a square of features: by row, then column, then channel.

    This is `pixel_shuffle` of transformers' InternVL (factor 2: scale ½) and SmolVLM (factor 3).

    Raises:
      ShapeError: features that are not a square, or a side that is not a multiple of the factor.
    """
    side = round(features.shape[1] ** 0.5)
    if side**2 != features.shape[1] or side % factor:
        raise ShapeError(
            f"features: got {features.shape[1]} per image; expected a square with a side multiple of {factor}"
        )
    return rearrange(features, "B (h y w x) D -> B (h w) (y x D)", h=side // factor, y=factor, x=factor)


class Projector(nnx.Module):
    """[layer norm,] linear, activation, linear: LLaVA, DeepSeek-VL (no norm), InternVL (norm)."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "gelu",
        bias: bool = True,
        norm_epsilon: float | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        self.norm = None if norm_epsilon is None else LayerNorm(inputs, epsilon=norm_epsilon, dtype=dtype)
        self.mlp = PlainMLP(inputs, hidden, outputs, activation=activation, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, features: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Applies to [..., D]."""
        return self.mlp(features if self.norm is None else self.norm(features))


class PooledProjector(nnx.Module):
    """Average of size×size neighbouring features, a norm, one map without bias: Gemma 3."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        rngs: nnx.Rngs,
        epsilon: float,
        dtype: DTypeLike = jnp.float32,
    ):
        self.norm = RMSNorm(inputs, epsilon=epsilon, dtype=dtype, weight="offset")
        self.linear = Linear(inputs, outputs, bias=False, rngs=rngs, dtype=dtype)
        self.size = size

    def __call__(self, features: Float[Array, "B E D"]) -> Float[Array, "B pooled F"]:
        """Returns features of squares, in raster order, of features that are a square themselves."""
        side = round(features.shape[1] ** 0.5)
        size = {"h": side // self.size, "y": self.size, "x": self.size}
        return self.linear(self.norm(reduce(features, "B (h y w x) D -> B (h w) D", "mean", **size)))


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """LLaVA-NeXT's tiles: `image` pixels per tile side, `side` features per tile side, resolutions to choose from.

    `pinpoints` are (height, width) in pixels, multiples of `image`.
    """

    image: int
    side: int
    pinpoints: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.pinpoints or any(len(point) != 2 or min(point) < 1 for point in self.pinpoints):
            raise ConfigError(f"image_grid_pinpoints: got {self.pinpoints!r}; expected pairs of heights and widths")


def best_resolution(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the (height, width) of `pinpoints` that shows most of an image, and among those wastes least."""
    best, most, least = pinpoints[0], -1, float("inf")
    for rows, columns in pinpoints:
        scale = min(columns / width, rows / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns - shown
        if shown > most or (shown == most and wasted < least):
            best, most, least = (rows, columns), shown, wasted
    return best


def unpadded_grid(
    config: TileConfig, height: int, width: int, first: int
) -> tuple[int, Int[np.ndarray, "rows columns"]]:
    """Returns how many tiles an image of this size has, the small whole image included, and the numbers of the
    features of the others in their grid, without the rows or columns that only padding made.

    Features are counted tile by tile in raster order, from `first` on, the small whole image's before all.
    """
    rows, columns = (edge // config.image for edge in best_resolution(height, width, config.pinpoints))
    grid = first + config.side**2 * (1 + np.arange(rows * columns)).reshape(rows, columns, 1, 1)
    grid = grid + np.arange(config.side**2).reshape(config.side, config.side)
    grid = grid.transpose(0, 2, 1, 3).reshape(rows * config.side, -1)

    # The margin is rounded as transformers does it.
    tall, wide = grid.shape
    if width / height > wide / tall:
        margin = (tall - int(round(height * (wide / width), 7))) // 2
        return 1 + rows * columns, grid[margin : tall - margin]
    margin = (wide - int(round(width * (tall / height), 7))) // 2
    return 1 + rows * columns, grid[:, margin : wide - margin]


def packing_index(
    config: TileConfig, image_sizes: Int[np.ndarray, "images 2"], most: int | None = None
) -> Int32[np.ndarray, " F"]:
    """Returns which features, in which order, stand for images of these (height, width): LLaVA-NeXT's unpadding and
    newlines.

    Features are counted over the tiles of all images: an image's own, or `most` where each has room for so many. The
    number after the last stands for the learned newline. An image is its first tile, which is the whole image, small,
    then the grid of the others with a newline after each row.
    """
    size, first, parts = config.side**2, 0, []
    for height, width in np.asarray(image_sizes).astype(int).tolist():
        count, grid = unpadded_grid(config, height, width, first)
        lines = np.concatenate([grid, np.full((len(grid), 1), -1)], axis=1)
        parts += [np.arange(first, first + size), lines.reshape(-1)]
        first += size * (count if most is None else most)

    index = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return np.where(index < 0, first, index).astype(np.int32)


def pack_tiles(
    features: Float[Array, "B E D"], newline: Float[Array, " D"], index: Int[Array, " F"]
) -> Float[Array, "F D"]:
    """Packs tiles' features in the order of `packing_index`."""
    flat = features.reshape(-1, features.shape[-1])
    return jnp.concatenate([flat, newline[None].astype(flat.dtype)])[index]
