"""DeepSeek-OCR: SAM with a compressor, CLIP over its features, both beside each other through one map, experts with
multi-head attention.

Sources: DeepSeek's `modeling_deepseekocr.py`, `deepencoder.py` and `modeling_deepseekv2.py`; transformers has no such
class, but SAM with a compressor and this decoder (DeepSeek-OCR-2), and CLIP.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import Regime, need
from ..decoder.known_keys import complete
from ..decoder.layers import Linear
from ..decoder.weights import decoder_entries, expert_layout, fused_entries, linear_entries
from ..inputs.images import HALVES, PictureConfig
from ..inputs.qwen_images import CONFIG_FILE
from ..inputs.view_images import TILES, process_ocr
from ..towers.sam import SamConfig, SamDownsampling, SamEncoder, SamNeck
from ..towers.sam_weights import sam_downsampling_entries, sam_encoder_entries, sam_neck_entries
from ..towers.vit import ViT, ViTConfig
from ..towers.weights import CLIP_NAMES, CONV2D, block_entries, norm_entries
from . import namings
from .authors import expect
from .deepseek_ocr2 import GREY, SHRINK, TEMPLATE, read_channels, read_ocr_text
from .family import Family, Shapes, Vision
from .image_family import freeze, one_size, thaw
from .view_packing import NEWLINE, SEPARATOR, pack_views, view_fills, view_plan, view_tokens

ARCHITECTURE = "DeepseekOCRForCausalLM"
CLIP, SAM = "clip-l-14-224", "sam_vit_b"
"""What `vision_config.width` calls the towers."""
TOWER_KEYS = {
    CLIP: {"heads", "image_size", "layers", "patch_size", "width"},
    SAM: {"downsample_channels", "global_attn_indexes", "heads", "layers", "width"},
}


@dataclasses.dataclass(frozen=True)
class DeepseekOcrConfig:
    """The whole backbone; `raw` is config.json as it was read."""

    text: DecoderConfig
    vision: SamConfig
    compressor: tuple[int, int]
    clip: ViTConfig
    image_token: int
    raw: str

    def __post_init__(self) -> None:
        if self.compressor[1] != self.clip.width:
            raise ConfigError(
                f"downsample_channels: got {self.compressor}; expected to end in CLIP's width, {self.clip.width}"
            )

    @property
    def family(self) -> Family:
        """The family that reads it."""
        return FAMILY

    @property
    def newline(self) -> bool:
        """Whether a learned vector stands behind each row of features."""
        return True

    @property
    def view_first(self) -> bool:
        """Whether an image's view stands before its tiles."""
        return False

    def side_of(self, pixels: int, name: str) -> int:
        """Returns the features along a side of an image.

        Raises:
          InputError: sides that are no multiple of what becomes one feature.
        """
        side = SHRINK * self.vision.patch
        if pixels % side:
            raise InputError(f"{name}: got {pixels} pixels a side; expected a multiple of {side}")
        return pixels // side

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, ARCHITECTURE, self.text.dtype)


class DeepseekOcrModel(nnx.Module):
    """Towers, projector, learned vectors and decoder with their parameters."""

    def __init__(self, config: DeepseekOcrConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.text.dtype), config.text.width
        self.visual, self.neck = SamEncoder(config.vision, rngs), SamNeck(config.vision, rngs)
        self.downsampling = SamDownsampling(config.vision, rngs, config.compressor)
        self.clip = ViT(config.clip, rngs)
        self.projection = Linear(2 * config.clip.width, width, bias=True, rngs=rngs, dtype=dtype)
        self.newline, self.separator = (nnx.Param(jnp.zeros((width,), dtype)) for _ in range(2))
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "B C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1; the plan has the tiles' pixels."""
        tiles = plan.get(TILES)
        tiles = None if tiles is None else self._features(tiles)
        learned = {NEWLINE: self.newline[...], SEPARATOR: self.separator[...]}
        return pack_views(self._features(pixel_values), tiles, learned, plan)

    def _features(self, pixel_values: Float[Array, "B C H W"]) -> Float[Array, "B E D"]:
        low = self.downsampling(self.neck(self.visual(pixel_values)[0]))
        high = self.clip.over(low)
        return self.projection(jnp.concatenate([high, low.reshape(high.shape)], axis=-1))


def read_authors(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the top level of an authors' `config.json`, checked and filled in, and its decoder's table as
    transformers' DeepSeek-OCR-2 has it.

    Raises:
      ConfigError: a part that is missing, text keys that say two things, or keys that are not known.
    """
    model = {name: need(raw, name) for name in ("language_config", "vision_config", "projector_config")}
    if not all(isinstance(part, Mapping) for part in model.values()):
        raise ConfigError(f"config.json: got {model!r:.80}; expected three tables")
    inner = model["language_config"]
    # The authors' class reads the text's keys at the top; files have them in the part too.
    for key in sorted(inner.keys() & raw.keys() - {"architectures", "auto_map", "model_type", "torch_dtype", "dtype"}):
        if raw[key] != inner[key]:
            raise ConfigError(f"language_config: got {key} {inner[key]!r}; expected {raw[key]!r}, as at the top")
    model = complete(raw, "deepseek_ocr", drop=inner)
    model["vision_config"] = complete(model["vision_config"], "deepseek_ocr_vision", "vision_config")
    top = {name: raw[name] for name in ("dtype", "torch_dtype") if raw.get(name) is not None}
    text = complete({**inner, **top}, "deepseek_ocr_text", "language_config")
    text |= {name: need(text, name) for name in ("n_routed_experts", "topk_method", "moe_intermediate_size")}
    dense, layers = text["first_k_dense_replace"], need(text, "num_hidden_layers")
    kinds = ["dense"] * min(dense, layers) + ["sparse"] * max(layers - dense, 0)
    unread = ("first_k_dense_replace", "moe_layer_freq", "scoring_func", "norm_topk_prob", "auto_map", "architectures")
    text = {key: value for key, value in text.items() if key not in unread}
    return model, text | {"mlp_layer_types": kinds, "model_type": "deepseek_ocr2_text"}


def tower_table(parts: Any, name: str, known: set[str]) -> dict[str, Any]:
    """Returns a tower's sizes from `vision_config.width`.

    Raises:
      ConfigError: no table, or a key that is not known.
    """
    table = parts.get(name) if isinstance(parts, Mapping) else None
    if not isinstance(table, Mapping) or set(table) - known:
        raise ConfigError(f"vision_config: got {name} {table!r:.160}; expected a table of {sorted(known)}")
    for key, value in table.items():
        listed = key in ("downsample_channels", "global_attn_indexes")
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, list) if listed else whole):
            raise ConfigError(
                f"{name}: got {key} {value!r:.80}; expected {'a list' if listed else 'a positive whole number'}"
            )
    return dict(table)


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> DeepseekOcrConfig:
    model, text = read_authors(raw)
    decoder = read_ocr_text(text, angles, regime)
    vision = model["vision_config"]
    expect(vision, "vision_config", model_name="deeplip_b_l")
    widths = need(vision, "width")
    clip, sam = (tower_table(widths, name, TOWER_KEYS[name]) for name in (CLIP, SAM))
    tower = SamConfig(
        depth=need(sam, "layers"),
        width=need(sam, "width"),
        heads=need(sam, "heads"),
        intermediate=4 * need(sam, "width"),
        image=one_size(vision, "image_size"),
        global_layers=tuple(need(sam, "global_attn_indexes")),
        interpolate=True,
        dtype=decoder.dtype,
    )
    second = ViTConfig(
        depth=need(clip, "layers"),
        width=need(clip, "width"),
        heads=need(clip, "heads"),
        intermediate=4 * need(clip, "width"),
        image=one_size(clip, "image_size"),
        patch=one_size(clip, "patch_size"),
        activation="quick_gelu",
        norm_epsilon=1e-5,
        class_token=True,
        patch_bias=False,
        pre_norm=True,
        dtype=decoder.dtype,
    )
    glue = {"projector_type": "linear", "input_dim": 2 * second.width, "n_embed": decoder.width}
    expect(model["projector_config"], "projector_config", **glue)
    channels = read_channels(need(sam, "downsample_channels"))
    return DeepseekOcrConfig(decoder, tower, channels, second, need(model, "image_token_id"), freeze(raw))


def _entries(config: DeepseekOcrConfig, shapes: Shapes) -> list[TensorEntry]:
    sam, clip, own = "model.sam_model", "model.vision_model", config.clip
    embeddings, place = f"{clip}.embeddings", ("clip",)
    layer, blocks = f"{clip}.transformer.layers.{{layer}}", (*place, "blocks")
    # The patches' own embedding is in the files, and SAM's features stand in its place.
    names = {ours: theirs for ours, theirs in CLIP_NAMES.items() if ours not in ("query", "key", "value")}
    shape = (own.width, own.channels, own.patch, own.patch)
    return [
        *decoder_entries(config.text, fused_experts=expert_layout(config.text, shapes, "model.")),
        *sam_encoder_entries(config.vision, sam, ("visual",), True),
        *sam_neck_entries(config.vision, f"{sam}.neck", ("neck",), True),
        *sam_downsampling_entries(f"{sam}.net_2", f"{sam}.net_3", ("downsampling",)),
        TensorEntry(
            f"{embeddings}.patch_embedding.weight", (*place, "patch_embedding", "kernel"), CONV2D, file_shape=shape
        ),
        TensorEntry(f"{embeddings}.position_embedding.weight", (*place, "position_embedding")),
        TensorEntry(f"{embeddings}.class_embedding", (*place, "class_embedding")),
        *norm_entries(f"{clip}.pre_layrnorm", (*place, "pre_norm")),
        *block_entries(layer, blocks, names),
        *fused_entries(
            f"{layer}.self_attn.qkv_proj", blocks, dict.fromkeys(("query", "key", "value"), own.width), bias=True
        ),
        *linear_entries("model.projector.layers", ("projection",)),
        TensorEntry("model.image_newline", ("newline",)),
        TensorEntry("model.view_seperator", ("separator",)),
    ]


GUNDAM: dict[str, Any] = {
    "image_mean": HALVES,
    "image_std": HALVES,
    "resample": 3,
    "size": {"height": 1024, "width": 1024},
    "tile_size": 640,
    "crop_to_patches": True,
    "min_patches": 2,
    "max_patches": 9,
    "background_color": GREY,
}
"""The authors' mode with tiles, which is what `infer` does unless it is told otherwise."""


def _settings(directory: str | os.PathLike[str]) -> PictureConfig:
    """Reads `preprocessor_config.json`; the release has none, and its own code holds the settings."""
    if (Path(directory) / CONFIG_FILE).is_file():
        return PictureConfig.reader(**GUNDAM)(directory)
    return PictureConfig.from_dict(GUNDAM)


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=DeepseekOcrModel,
    entries=_entries,
    vision=Vision(_settings, process_ocr, view_tokens, view_plan, view_fills),
    ignore=(r".*\.rotary_emb\.inv_freq", r".*\.position_ids"),
    model_type="DeepseekOCR",
    namings=namings.DEEPSEEK_OCR,
    template=TEMPLATE,
)
