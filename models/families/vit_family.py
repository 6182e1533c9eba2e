"""What LLaVA, LLaVA-NeXT, DeepSeek-VL, InternVL and SmolVLM share: a plain ViT, a projector, a decoder.

Each family's own file reads its configuration and says where its tensors are and how its images become tokens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..decoder.decoder import Decoder
from ..decoder.hf_config import need
from ..decoder.layers import Linear, check_activation
from ..towers.projectors import PooledProjector, Projector, TileConfig, pack_tiles, pixel_shuffle
from ..towers.vit import ViT, ViTConfig
from .config_file import ConfigFile, FamilyConfig, one_size
from .family import joined_arrays
from .image_family import check_placeholders


@dataclasses.dataclass(frozen=True)
class GlueConfig:
    """From the tower's features to embeddings.

    Attributes:
      kind: "mlp" (linear, activation, linear), "linear" (one map without bias) or "pooled" (average, norm, one map).
      shuffle: side of the square of features that become one (pixel shuffle, or where pooled their average); 1 for
        none.
      norm_epsilon: of a layer norm in front of the maps; None for none.
      tiles: LLaVA-NeXT's resolutions, with a learned newline behind each row. most_tiles: beyond which LLaVA-OneVision
        makes their grid smaller.
    """

    kind: str = "mlp"
    shuffle: int = 1
    activation: str = "gelu"
    bias: bool = True
    norm_epsilon: float | None = None
    tiles: TileConfig | None = None
    most_tiles: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("mlp", "linear", "pooled"):
            raise ConfigError(f"projector: got {self.kind!r}; expected 'mlp', 'linear' or 'pooled'")
        check_activation(self.activation, "projector_hidden_act")
        if self.shuffle < 1:
            raise ConfigError(
                f"pixel shuffle: got {self.shuffle}; expected a square of at least 1 (downsample_ratio ≤ 1)"
            )


def read_vit(vision: Mapping[str, Any], model_type: str, **switches: Any) -> ViTConfig:
    """Reads the sizes of a plain ViT of this type from a part of `config.json`; `switches` are the other fields.

    Raises:
      ConfigError: a tower of another type, or a size that is missing or not one number.
    """
    if vision["model_type"] != model_type:
        raise ConfigError(f"vision_config: got type {vision['model_type']!r}; expected {model_type!r}")
    return ViTConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=need(vision, "num_attention_heads"),
        intermediate=need(vision, "intermediate_size"),
        image=one_size(vision, "image_size"),
        patch=one_size(vision, "patch_size"),
        channels=vision["num_channels"],
        activation=vision["hidden_act"],
        norm_epsilon=vision["layer_norm_eps"],
        **switches,
    )


def without_head(read: Callable[[ConfigFile], Any]) -> Callable[[ConfigFile], Any]:
    """Returns a reader whose configurations have no SigLIP head, which its class has by default: nothing reads it, so
    that it is not loaded and not saved.
    """

    def changed(file: ConfigFile) -> Any:
        vision = {**(file.raw.get("vision_config") or {}), "vision_use_head": False}
        return read(dataclasses.replace(file, raw={**file.raw, "vision_config": vision}))

    return changed


@runtime_checkable
class TiledConfig(Protocol):
    """What the plan of images or tiles of one size asks of a configuration."""

    @property
    def vision(self) -> ViTConfig:
        """The tower that takes them."""
        ...

    @property
    def image_token(self) -> int:
        """What stands in a feature's place."""
        ...

    @property
    def tile_tokens(self) -> int:
        """Features of one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTModelConfig(FamilyConfig):
    """The whole backbone; `edges` are the tokens around an image, if there are."""

    vision: ViTConfig
    glue: GlueConfig
    image_token: int
    edges: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.vision.side % self.glue.shuffle:
            raise ConfigError(
                f"vision tower: got {self.vision.side} patches a side; expected a multiple of {self.glue.shuffle}"
            )

    @property
    def tile_tokens(self) -> int:
        """Features that one image or tile becomes."""
        kept_class = self.vision.class_token and not self.vision.drop_class
        return (self.vision.side // self.glue.shuffle) ** 2 + kept_class


class ViTModel(nnx.Module):
    """Tower, projector and decoder with their parameters."""

    def __init__(self, config: ViTModelConfig, rngs: nnx.Rngs):
        dtype, glue = jnp.dtype(config.vision.dtype), config.glue
        inputs, width = config.vision.width * glue.shuffle**2, config.text.width
        self.visual = ViT(config.vision, rngs)
        if glue.kind == "pooled":
            epsilon = config.vision.norm_epsilon
            self.projector = PooledProjector(
                config.vision.width, width, glue.shuffle, rngs=rngs, epsilon=epsilon, dtype=dtype
            )
        elif glue.kind == "linear":
            self.projector = Linear(inputs, width, bias=False, rngs=rngs, dtype=dtype)
        else:
            self.projector = Projector(
                inputs,
                width,
                width,
                rngs=rngs,
                activation=glue.activation,
                bias=glue.bias,
                norm_epsilon=glue.norm_epsilon,
                dtype=dtype,
            )

        self.newline = nnx.Param(jnp.zeros((width,), dtype)) if glue.tiles else None
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def project(self, pixel_values: Float[Array, "*images C H W"], plan: Mapping[str, Array]) -> Float[Array, "B E D"]:
        """Returns the features of each image or tile."""
        tiles = pixel_values.reshape(-1, *pixel_values.shape[-3:])
        features = self.visual(tiles, plan.get("positions"))
        if self.config.glue.shuffle > 1 and self.config.glue.kind != "pooled":
            features = pixel_shuffle(features, self.config.glue.shuffle)
        return self.projector(features)

    def encode(self, pixel_values: Float[Array, "*images C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1."""
        features = self.project(pixel_values, plan)
        # Without tiles nothing refers to the newline, which `pack_tiles` appends all the same.
        newline = jnp.zeros(features.shape[-1], features.dtype) if self.newline is None else self.newline[...]
        return pack_tiles(features, newline, plan["order"])[None]


def join_tiles(
    axis: int, counts: Callable[[Mapping[str, Any]], Sequence[int]]
) -> Callable[[Any, Mapping[str, Mapping[str, Any]], Sequence[str]], dict[str, Any]]:
    """Returns how a family whose images and videos have one placeholder joins their tiles: in the prompt's order.

    Args:
      axis: of tiles in `pixel_values`. counts: arrays of images → tiles of each; videos have `video_frames`.
    """

    def join(config: Any, arrays: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
        joined = joined_arrays(config, arrays, order)
        if "video" not in arrays:
            return joined
        pieces, sizes = {}, {}
        for sort, own in arrays.items():
            sizes[sort] = [int(size) for size in (own["video_frames"] if sort == "video" else counts(own))]
            pieces[sort] = iter(np.split(own["pixel_values"], np.cumsum(sizes[sort])[:-1], axis))
        joined["pixel_values"] = np.concatenate([next(pieces[sort]) for sort in order], axis)
        if "num_patches" in joined:
            numbers = {sort: iter(own) for sort, own in sizes.items()}
            joined["num_patches"] = np.array([next(numbers[sort]) for sort in order], np.int32)
        return joined

    return join


def drops_class(model: Mapping[str, Any]) -> bool:
    """Returns whether the tower's class token is left out.

    Raises:
      ConfigError: a strategy that is not known.
    """
    strategy = model["vision_feature_select_strategy"]
    if strategy not in ("default", "full"):
        raise ConfigError(f"vision_feature_select_strategy: got {strategy!r}; expected 'default' or 'full'")
    return strategy == "default"


def tile_plan(
    config: TiledConfig, input_ids: np.ndarray, arrays: Mapping[str, Any], tiles: np.ndarray | None = None
) -> dict[str, np.ndarray] | None:
    """Returns the plan of a family whose features stand in the order of its tiles.

    `tiles` are the numbers of the tiles that count (all of them when None).

    Raises:
      InputError: pixels of another size, or placeholders that do not match them.
    """
    pixel_values = arrays.get("pixel_values")
    if pixel_values is None:
        return None

    shape = np.shape(pixel_values)
    if len(shape) < 4:
        raise InputError(f"pixel_values: got shape {shape}; expected [images, channels, height, width]")

    # Features lie tile by tile, each tile's one behind the other.
    tiles = np.arange(int(np.prod(shape[:-3]))) if tiles is None else tiles
    order = (tiles[:, None] * config.tile_tokens + np.arange(config.tile_tokens)).reshape(-1).astype(np.int32)
    image = (*shape[:-3], config.vision.channels, config.vision.image, config.vision.image)
    check_placeholders(input_ids, (config.image_token,), order.size, pixel_values, image)
    return {"order": order}


def tile_fills(config: TiledConfig) -> dict[str, int]:
    """Returns the plan's table of feature numbers, and how many features a tile has."""
    return {"order": config.tile_tokens}
