"""Kimi-VL: MoonViT, a normed 2×2 projector, DeepSeek-V3's decoder (latent attention, experts).

Two forms of the same function: Kimi-VL's released files, and transformers' Kimi_K25 on images (video is not built).
Sources: Kimi-VL's released configuration and tensor names; transformers' Kimi_K25ForConditionalGeneration.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import Regime, need, read_axial_theta
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.images import HALVES, PictureConfig, process_kimi
from ..towers.moonvit import MoonViT, MoonViTConfig, plan_patches
from ..towers.weights import moonvit_entries
from .family import Family, Shapes, Vision
from .image_family import check_placeholders, freeze, one_size, text_part, thaw, vision_part, whole
from .text_families import read_deepseek

RELEASED = "KimiVLForConditionalGeneration"
TRANSFORMERS = "Kimi_K25ForConditionalGeneration"
_NO_DEFAULT = (
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "v_head_dim"),
)
"""Of the text part: what the released code and transformers' DeepSeek-V3 may default differently."""


@dataclasses.dataclass(frozen=True)
class KimiVLConfig:
    """The whole backbone. Start and end ids stand around an image where the configuration names them."""

    architecture: str
    text: DecoderConfig
    vision: MoonViTConfig
    image_token: int
    start_token: int | None
    end_token: int | None
    raw: str

    @property
    def family(self) -> Family:
        """The form of these files."""
        return FAMILIES[self.architecture]

    def to_dict(self) -> dict[str, Any]:
        """`config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.architecture, self.text.dtype)


def _read(architecture: str, raw: Mapping[str, Any], angles: str, regime: Regime) -> KimiVLConfig:
    released = architecture == RELEASED
    model = whole(raw, "kimi_vl" if released else "kimi_k25", {"ignore_index": None})
    part = text_part(model, raw, ("deepseek_v3", "kimi_k2"))
    for name in _NO_DEFAULT if released else ():
        need(part, name)
    text = read_deepseek(part, angles, regime)
    vision = vision_part(model, *(("moonvit",) if released else ("kimi_k25_vision",)))
    side = need(vision, "init_pos_emb_height", "pos_emb_height")
    if need(vision, "init_pos_emb_width", "pos_emb_width") != side:
        raise ConfigError(f"learned positions of {side} rows; expected a square")
    tower = MoonViTConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=need(vision, "num_attention_heads"),
        intermediate=need(vision, "intermediate_size"),
        output_width=text.width,
        patch=one_size(vision, "patch_size"),
        merge=one_size(vision, "merge_kernel_size"),
        positions=side,
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        projector_epsilon=model.get("projection_layer_norm_eps", 1e-5),
        fused=released,
        dtype=text.dtype,
    )
    image = need(model, "media_placeholder_token_id", "image_token_id")
    ends = (model.get("vision_start_token_id"), model.get("vision_end_token_id"))
    return KimiVLConfig(architecture, text, tower, image, *ends, raw=freeze(raw))


class KimiVL(nnx.Module):
    """Tower (with its projector) and decoder with their parameters."""

    def __init__(self, config: KimiVLConfig, rngs: nnx.Rngs):
        self.visual = MoonViT(config.vision, rngs)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "P C y x"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Image features, n = 1."""
        return self.visual(pixel_values, **plan)[None]


def _plan(config: KimiVLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    grids = arrays.get("image_grid_thw")
    if arrays.get("video_grid_thw") is not None:
        raise InputError("Kimi-VL's video is not built; expected images")
    if grids is None or not len(grids):
        return None
    vision = config.vision
    plan = plan_patches(vision, np.asarray(grids))
    shape = (plan["rows"].size, vision.channels, vision.patch, vision.patch)
    check_placeholders(input_ids, (config.image_token,), len(plan["merged"]), arrays.get("pixel_values"), shape)
    return plan


def _tokens(config: KimiVLConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """`<|media_start|>image<|media_content|>` pads `<|media_end|>` where the tokenizer has them, else start and end."""
    pads = [config.image_token] * (int(np.prod(arrays["image_grid_thw"][index])) // config.vision.merge**2)
    if tokenizer is not None and tokenizer.token_to_id("<|media_start|>") is not None:
        encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
        return [*encode("<|media_start|>image<|media_content|>"), *pads, *encode("<|media_end|>")]
    first, last = ([] if end is None else [end] for end in (config.start_token, config.end_token))
    return [*first, *pads, *last]


def _entries(config: KimiVLConfig, shapes: Shapes) -> list[TensorEntry]:
    released = config.architecture == RELEASED
    prefix = "language_model.model." if released else "model.language_model."
    head = "language_model.lm_head" if released else "lm_head"
    fused = expert_layout(config.text, shapes, prefix, "no" if released else "rows")
    decoder = decoder_entries(config.text, prefix=prefix, head=head, fused_experts=fused)
    tower = ("vision_tower", "multi_modal_projector") if released else ("model.vision_tower", "model.mm_projector")
    return decoder + moonvit_entries(config.vision, *tower, released=released)


_SETTINGS = PictureConfig.reader(
    only={"do_resize": True},
    image_mean=HALVES,
    image_std=HALVES,
    resample=3,
    patch_size=14,
    merge_kernel_size=[2, 2],
    in_token_limit=4096,
)


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        config=lambda raw, angles, regime: _read(architecture, raw, angles, regime),
        module=KimiVL,
        entries=_entries,
        vision=Vision(_SETTINGS, process_kimi, _tokens, _plan, fills=lambda config: {"images": 1}),
        ignore=(r".*\.rotary_emb\.inv_freq",),
        model_type=model_type,
    )


FAMILIES = {RELEASED: _family(RELEASED, "kimi_vl"), TRANSFORMERS: _family(TRANSFORMERS, "kimi_k25")}
