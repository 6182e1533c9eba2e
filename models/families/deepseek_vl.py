"""DeepSeek-VL: SigLIP, two linear maps, Llama (1.3B); in the 7B SAM on a large image beside SigLIP on a small one, both
mapped to half the width.

Sources: transformers' DeepseekVLForConditionalGeneration and DeepseekVLHybridForConditionalGeneration.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry, module_entries
from ..decoder.decoder import Decoder
from ..decoder.hf_config import need
from ..decoder.layers import ACTIVATIONS, Linear
from ..decoder.weights import decoder_entries
from ..inputs.processors import process_images, processor
from ..towers.sam import SamConfig, SamDownsampling, SamEncoder, SamNeck
from ..towers.sam_weights import sam_downsampling_entries, sam_encoder_entries, sam_neck_entries
from ..towers.vit import ViT, ViTConfig
from ..towers.weights import clip_entries, projector_entries
from .config_file import ConfigFile, FamilyConfig, one_size
from .family import Family, Shapes, Vision
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, read_vit, tile_fills, tile_plan, without_head

PREFIX = "model.language_model."
LARGE = "high_res_pixel_values"
"""What the large images' pixels are called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(FamilyConfig):
    """The whole backbone; `high` is the tower of the large image."""

    vision: ViTConfig
    high: SamConfig
    image_token: int

    def __post_init__(self) -> None:
        if self.text.width % 2:
            raise ConfigError(f"hidden_size: got {self.text.width}; expected an even number, half for each tower")
        if not self.high.global_layers:
            raise ConfigError("global_attn_indexes: got none; expected a layer whose features are added to the last's")

    @property
    def tile_tokens(self) -> int:
        """Features that one image becomes."""
        return self.vision.side**2


class HybridModel(nnx.Module):
    """Both towers, their projector and the decoder with their parameters."""

    def __init__(self, config: HybridConfig, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.text.dtype), config.text.width
        linear = {"bias": True, "rngs": rngs, "dtype": dtype}
        self.visual = ViT(config.vision, rngs)
        self.high = SamEncoder(config.high, rngs)
        self.neck, self.global_neck = SamNeck(config.high, rngs), SamNeck(config.high, rngs)
        self.downsampling = SamDownsampling(config.high, rngs)
        self.global_share = nnx.Param(jnp.zeros((1,), dtype))
        self.low_projection = Linear(config.vision.width, width // 2, **linear)
        self.high_projection = Linear(4 * config.high.neck, width // 2, **linear)
        self.projection = Linear(width, width, **linear)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "B C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1; the plan has the large images' pixels."""
        side, first = self.config.vision.side, self.config.high.global_layers[0]
        last, kept = self.high(plan[LARGE], (first,))
        # The first global layer's features, through a neck of their own, are added in a learned share.
        large = self.downsampling(self.neck(last), side)
        large = large + self.downsampling(self.global_neck(kept[0]), side) * self.global_share[...].astype(large.dtype)

        small = self.low_projection(self.visual(pixel_values))
        large = self.high_projection(large.reshape(len(large), side**2, -1))
        mixed = self.projection(ACTIVATIONS["gelu"](jnp.concatenate([large, small], axis=-1)))
        return jnp.take(mixed.reshape(-1, mixed.shape[-1]), plan["order"], axis=0, mode="fill", fill_value=0)[None]


def read_sam(vision: Mapping[str, Any], dtype: str) -> SamConfig:
    """Reads SAM's tower from its part of `config.json`."""
    width = need(vision, "hidden_size")
    # `intermediate_size` stands in released files and says nothing: the MLP's width is a multiple of the model's.
    inner = vision["mlp_dim"]
    return SamConfig(
        depth=need(vision, "num_hidden_layers"),
        width=width,
        heads=need(vision, "num_attention_heads"),
        intermediate=int(width * vision["mlp_ratio"]) if inner is None else inner,
        image=one_size(vision, "image_size"),
        patch=one_size(vision, "patch_size"),
        window=vision["window_size"],
        global_layers=tuple(vision["global_attn_indexes"]),
        neck=vision["output_channels"],
        channels=vision["num_channels"],
        activation=vision["hidden_act"],
        norm_epsilon=vision["layer_norm_eps"],
        qkv_bias=vision["qkv_bias"],
        positions=vision["use_abs_pos"],
        relative=vision["use_rel_pos"],
        dtype=dtype,
    )


def _read(file: ConfigFile) -> ViTModelConfig | HybridConfig:
    text, model = file.text("llama"), file.model
    tower = read_vit(file.part("vision_config"), "siglip_vision_model", final_norm="applied", dtype=text.dtype)
    own = {"vision": tower, **file.tokens("image_token")}
    if "high_res_vision_config" not in model:
        return file.config(ViTModelConfig, text, glue=GlueConfig(), **own)
    return file.config(HybridConfig, text, high=read_sam(file.part("high_res_vision_config"), text.dtype), **own)


_ALIGNER = {"low_projection": "vision_proj", "high_projection": "high_res_vision_proj", "projection": "proj"}


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    return [
        *decoder_entries(config.text, prefix=PREFIX),
        *clip_entries(config.vision, "model.vision_model"),
        *projector_entries("model.aligner.linear1", "model.aligner.linear2"),
    ]


def _hybrid_entries(config: HybridConfig, shapes: Shapes) -> list[TensorEntry]:
    large = "model.high_res_vision"
    return [
        *decoder_entries(config.text, prefix=PREFIX),
        *clip_entries(config.vision, "model.vision_model"),
        *sam_encoder_entries(config.high, f"{large}_model.vision_encoder", ("high",)),
        *sam_neck_entries(config.high, f"{large}_model.vision_encoder.neck", ("neck",)),
        *sam_neck_entries(config.high, f"{large}_neck", ("global_neck",)),
        *sam_downsampling_entries(f"{large}_proj.conv1", f"{large}_proj.conv2", ("downsampling",)),
        TensorEntry(f"{large}_alpha", ("global_share",)),
        *module_entries("model.aligner", (), _ALIGNER),
    ]


def _tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns the placeholders of one image, with nothing around them."""
    return [config.image_token] * config.tile_tokens


def _hybrid_plan(config: HybridConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Plans images, whose large pixels go along."""
    plan, large = tile_plan(config, input_ids, arrays), arrays.get(LARGE)
    if plan is None:
        return None
    side, count = config.high.image, int(np.prod(np.shape(arrays["pixel_values"])[:-3]))
    found = None if large is None else np.shape(large)
    if found != (count, config.high.channels, side, side):
        raise InputError(f"{LARGE}: got shape {found}; expected {(count, config.high.channels, side, side)}")
    return {**plan, LARGE: large}


_HYBRID = processor("deepseek_vl_hybrid.DeepseekVLHybrid")
FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="DeepseekVLForConditionalGeneration",
            read=without_head(_read),
            module=ViTModel,
            entries=_entries,
            vision=Vision(processor("deepseek_vl.DeepseekVL"), process_images, _tokens, tile_plan, tile_fills),
            model_type="deepseek_vl",
        ),
        Family(
            architecture="DeepseekVLHybridForConditionalGeneration",
            read=without_head(_read),
            module=HybridModel,
            entries=_hybrid_entries,
            vision=Vision(_HYBRID, process_images, _tokens, _hybrid_plan, tile_fills),
            model_type="deepseek_vl_hybrid",
        ),
    )
}
