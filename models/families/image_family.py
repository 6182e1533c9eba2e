"""What families with images share: the model, grids, and checks of what a prompt has."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError, InputError

from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder


class TowerModel(nnx.Module):
    """Tower (with its projector, where it has one) and decoder with their parameters."""

    def __init__(self, tower: Callable[[Any, nnx.Rngs], Any], config: Any, rngs: nnx.Rngs):
        self.visual = tower(config.vision, rngs)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, " P *patch"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features and, behind them, those of each deepstack layer where the tower has such."""
        features = self.visual(pixel_values, **plan)
        if isinstance(features, tuple):
            return jnp.concatenate([features[0][None], features[1]])
        return features[None]


def grids_of(arrays: Mapping[str, Any]) -> Int[np.ndarray, "grids 3"]:
    """Returns the (time, height, width) grids of a prompt's images, and those of its videos behind them."""
    names = ("image_grid_thw", "video_grid_thw")
    kinds = [np.asarray(arrays[name]).reshape(-1, 3) for name in names if arrays.get(name) is not None]
    return np.concatenate([np.zeros((0, 3), np.int32), *kinds])


def packed_fills(config: Any) -> dict[str, int]:
    """Returns the tables of patch numbers in the plan of a tower of packed patches."""
    return {"segments": 1, "windows": 1}


def check_width(name: str, width: int, text: DecoderConfig) -> None:
    """Raises ConfigError where a tower's output is not as wide as the decoder."""
    if width != text.width:
        raise ConfigError(f"vision {name}: got {width}; expected the text width {text.width}")


def check_placeholders(
    input_ids: Int[np.ndarray, "B T"], pads: tuple[int, ...], expected: int, pixel_values: Any, shape: tuple
) -> None:
    """Raises InputError where placeholders or pixels are not as many as the images given ask for.

    `shape` is what `pixel_values` must have; a None in it stands for any size.
    """
    found = None if pixel_values is None else tuple(pixel_values.shape)
    if found is None or len(found) != len(shape) or any(b not in (None, a) for a, b in zip(found, shape, strict=True)):
        raise InputError(f"pixel_values: got shape {found}; expected {shape}")
    count = int(np.isin(input_ids, pads).sum())
    if count != expected:
        raise InputError(f"input_ids: got {count} image placeholders; expected {expected} for the images given")
