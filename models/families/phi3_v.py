"""Phi-3-vision and Phi-3.5-vision: CLIP on crops, 2×2 concatenation with learned separators, two linear maps, Phi-3.

Sources: Microsoft's `modeling_phi3_v.py`, `image_embedding_phi3_v.py` and `processing_phi3_v.py`; transformers has no
such class, but CLIP and Phi-3. The authors' processor puts negative ids where image features go; here it is the token
`<|image|>` of their vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.decoder import Decoder
from ..decoder.weights import decoder_entries
from ..inputs.pictures import CLIP_MEAN, CLIP_STD, process_phi3_v
from ..inputs.processors import own_settings
from ..towers.projectors import Projector, pixel_shuffle
from ..towers.vit import ViT, ViTConfig
from ..towers.weights import clip_entries, projector_entries
from .config_file import ConfigFile, FamilyConfig, expect
from .family import Family, Shapes, Vision
from .image_family import check_placeholders
from .parsed import parse

ARCHITECTURE = "Phi3VForCausalLM"
TOWERS: dict[str, dict[str, Any]] = {
    "openai/clip-vit-large-patch14-336": {
        "depth": 24,
        "width": 1024,
        "heads": 16,
        "intermediate": 4096,
        "image": 336,
        "patch": 14,
    }
}
"""Sizes of the towers that `model_name` may be."""
ORDERS = ("glb_sub", "sub_glb")
SHUFFLE = 2
IMAGE_TOKEN = 32044
"""`<|image|>`, which the authors' files name nowhere but in the vocabulary."""
_OWN = ("embd_layer", "img_processor", "image_token_id")
_NO_SEPARATOR, _ROW_END, _BETWEEN = range(3)
TEMPLATE = (
    "{%- set images = namespace(count=0) -%}"
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{%- set images.count = images.count + 1 -%}"
    "{{ '<|image_' + images.count | string + '|>\n' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1]['role'] != 'assistant' -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
"""The authors' template, with their placeholders where a message has images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3VConfig(FamilyConfig):
    """The whole backbone; `whole_first` says whether the small whole image stands before its crops."""

    vision: ViTConfig
    whole_first: bool
    image_token: int

    def __post_init__(self) -> None:
        if self.vision.side % SHUFFLE:
            raise ConfigError(f"vision tower: got {self.vision.side} patches a side; expected a multiple of {SHUFFLE}")

    @property
    def tile_side(self) -> int:
        """Features along a side of a crop."""
        return self.vision.side // SHUFFLE


class Phi3VModel(nnx.Module):
    """Tower, separators, projector and decoder with their parameters."""

    def __init__(self, config: Phi3VConfig, rngs: nnx.Rngs):
        dtype, inputs, width = jnp.dtype(config.text.dtype), config.vision.width * SHUFFLE**2, config.text.width
        self.visual = ViT(config.vision, rngs)
        self.row_end, self.between = nnx.Param(jnp.zeros((inputs,), dtype)), nnx.Param(jnp.zeros((inputs,), dtype))
        self.projector = Projector(inputs, width, width, rngs=rngs, dtype=dtype)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "*images C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order with the separators among them, n = 1."""
        features = pixel_shuffle(self.visual(pixel_values.reshape(-1, *pixel_values.shape[-3:])), SHUFFLE)
        flat = features.reshape(-1, features.shape[-1])
        packed = jnp.take(flat, plan["order"], axis=0, mode="fill", fill_value=0)
        # Separators lie before the projection, which they pass like features.
        kinds = plan["separators"][:, None]
        for kind, learned in ((_ROW_END, self.row_end), (_BETWEEN, self.between)):
            packed = jnp.where(kinds == kind, learned[...].astype(packed.dtype), packed)
        return self.projector(packed)[None]


def _read(file: ConfigFile) -> Phi3VConfig:
    layer, tower = file.part("embd_layer"), file.part("img_processor")
    expect(layer, embedding_cls="image", projection_cls="mlp", hd_transform_order=(*ORDERS, None))
    expect(layer, use_hd_transform=True, with_learnable_separator=True)
    expect(tower, name="clip_vision_model", model_name=tuple(TOWERS), type_feature=("patch", None))

    own = {key: value for key, value in file.raw.items() if key not in _OWN}
    text = file.decoder(parse(own, "phi3"), "phi3")
    # Of the released towers; their last norm is in the files, and is not applied.
    vision = ViTConfig(
        **TOWERS[tower["model_name"]],
        activation="quick_gelu",
        norm_epsilon=1e-5,
        class_token=True,
        patch_bias=False,
        pre_norm=True,
        final_norm="kept",
        feature_layer=-2 if tower.get("layer_idx") is None else tower["layer_idx"],
        dtype=text.dtype,
    )
    config = file.config(
        Phi3VConfig,
        text,
        vision=vision,
        whole_first=layer.get("hd_transform_order") != "sub_glb",
        image_token=file.model.get("image_token_id", IMAGE_TOKEN),
    )
    expect(tower, image_dim_out=vision.width, num_img_tokens=(config.tile_side**2, None))
    return config


def _entries(config: Phi3VConfig, shapes: Shapes) -> list[TensorEntry]:
    place, wide = "model.vision_embed_tokens", config.vision.width * SHUFFLE**2
    return [
        *decoder_entries(config.text, fused=("gate_up", "qkv")),
        *clip_entries(config.vision, f"{place}.img_processor.vision_model"),
        *projector_entries(f"{place}.img_projection.0", f"{place}.img_projection.2"),
        TensorEntry(f"{place}.sub_GN", ("row_end",), file_shape=(1, 1, 1, wide)),
        TensorEntry(f"{place}.glb_GN", ("between",), file_shape=(1, 1, wide)),
    ]


def _crops(config: Phi3VConfig, sizes: Any) -> list[tuple[int, int]]:
    """Returns rows and columns of each image's crops.

    Raises:
      InputError: sizes that are no pairs of multiples of a crop's side.
    """
    side, found = config.vision.image, np.asarray(sizes)
    if found.ndim != 2 or found.shape[1] != 2 or found.min(initial=side) < side or (found % side).any():
        raise InputError(f"image_sizes: got {found.tolist()!r:.80}; expected heights and widths, multiples of {side}")
    return [(int(height) // side, int(width) // side) for height, width in found]


def _plan(config: Phi3VConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """Plans crops: the tiles of all images one behind the other, or [images, most tiles, …] as the authors pad them."""
    pixel_values = arrays.get("pixel_values")
    if pixel_values is None:
        return None

    crops, shape, side = _crops(config, arrays.get("image_sizes", ())), np.shape(pixel_values), config.tile_side
    counts = [1 + rows * columns for rows, columns in crops]
    if len(shape) == 5:
        tiles, firsts = (len(crops), max([shape[1], *counts])), [image * shape[1] for image in range(len(crops))]
    else:
        tiles, firsts = (sum(counts),), np.cumsum([0, *counts])[:-1].tolist()

    none = int(np.prod(tiles)) * side**2
    order, separators = [], []
    for first, (rows, columns) in zip(firsts, crops, strict=True):
        numbers = (first * side**2 + np.arange((1 + rows * columns) * side**2)).reshape(-1, side, side)
        grid = numbers[1:].reshape(rows, columns, side, side).transpose(0, 2, 1, 3).reshape(rows * side, -1)
        parts = [_lines(numbers[0], none), (np.array([none]), np.array([_BETWEEN])), _lines(grid, none)]
        for numbers, kinds in parts if config.whole_first else reversed(parts):
            order.append(numbers)
            separators.append(kinds)

    plan = {"order": np.concatenate(order), "separators": np.concatenate(separators)}
    image = (config.vision.channels, config.vision.image, config.vision.image)
    check_placeholders(input_ids, (config.image_token,), plan["order"].size, pixel_values, (*tiles, *image))
    return {name: table.astype(np.int32) for name, table in plan.items()}


def _lines(grid: np.ndarray, none: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a grid's feature numbers row by row with a separator behind each, and which of them are separators."""
    ends = np.ones((len(grid), 1), np.int64)
    kinds = np.concatenate([np.full_like(grid, _NO_SEPARATOR), ends * _ROW_END], axis=1)
    return np.concatenate([grid, ends * none], axis=1).reshape(-1), kinds.reshape(-1)


def _tokens(config: Phi3VConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    (rows, columns), side = _crops(config, arrays["image_sizes"])[index], config.tile_side
    return [config.image_token] * ((rows * columns + 1) * side**2 + 1 + (rows + 1) * side)


def _fills(config: Phi3VConfig) -> dict[str, int]:
    return {"order": config.tile_side**2}


_SETTINGS = own_settings(
    "image",
    only={"do_convert_rgb": True},
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    resample=2,
    num_crops=1,
    crop_size=336,
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=Phi3VModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_phi3_v, _tokens, _plan, _fills, spelling=r"<\|image_\d+\|>"),
    model_type="phi3_v",
    template=TEMPLATE,
)
