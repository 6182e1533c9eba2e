"""Kimi-VL and Kimi-K2.5: MoonViT, a normed 2×2 projector, DeepSeek-V3's decoder (latent attention, experts).

Two forms of the same function of images: the released files of Kimi-VL, and transformers' Kimi_K25, which takes videos,
a few frames at a time behind their time as a text. Sources: the released configuration, tensor names and processor of
Kimi-VL; transformers' Kimi_K25ForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need, read_axial_theta
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.family_videos import kimi_time, process_kimi_videos
from ..inputs.images import HALVES, PictureConfig, process_kimi
from ..inputs.video_frames import VideoConfig
from ..towers.moonvit import MoonViT, MoonViTConfig, plan_patches
from ..towers.weights import moonvit_entries
from .family import Family, Medium, Run, Shapes, Vision, pixels_of, placeholders
from .image_family import (
    TowerModel,
    check_placeholders,
    freeze,
    grids_of,
    one_size,
    text_part,
    thaw,
    vision_part,
    whole,
)
from .text_families import read_deepseek

RELEASED = "KimiVLForConditionalGeneration"
TRANSFORMERS = "Kimi_K25ForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class FileForm:
    """How one kind of files holds the model.

    Attributes:
      model: what `known_keys` calls the top level, and the `model_type` of a file that names no architecture.
      tower: what `known_keys` calls the tower.
      released: whether tensors have the authors' names and packing, or transformers'.
      projector: what the projector, its inner and its outer map are called.
      patches: how many patches an image has at most where the image settings do not say it.
      video: whether it takes videos.
    """

    model: str
    tower: str
    released: bool
    projector: tuple[str, str, str]
    patches: int
    video: bool


FORMS = {
    RELEASED: FileForm("kimi_vl", "moonvit", True, ("multi_modal_projector", "linear_1", "linear_2"), 4096, False),
    TRANSFORMERS: FileForm(
        "kimi_k25", "kimi_k25_vision", False, ("model.mm_projector", "in_proj", "out_proj"), 16384, True
    ),
}
_NO_DEFAULT = (
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "v_head_dim"),
)
"""Of the text part: what the released code and transformers' DeepSeek-V3 may default differently."""


@dataclasses.dataclass(frozen=True)
class KimiVLConfig:
    """The whole backbone. Start and end ids stand around an image where the configuration names them; `video_token` is
    None where no videos are taken.
    """

    architecture: str
    text: DecoderConfig
    vision: MoonViTConfig
    image_token: int
    start_token: int | None
    end_token: int | None
    raw: str
    video_token: int | None = None

    @property
    def family(self) -> Family:
        """The form of these files."""
        return FAMILIES[self.architecture]

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.architecture, self.text.dtype)


def _read(architecture: str, raw: Mapping[str, Any], angles: str, regime: Regime) -> KimiVLConfig:
    """Reads `config.json` of either form."""
    form = FORMS[architecture]
    model = whole(raw, form.model, {"ignore_index"})
    part = text_part(model, raw, ("deepseek_v3", "kimi_k2"))
    for name in _NO_DEFAULT if form.released else ():
        need(part, name)

    text = read_deepseek(part, angles, regime)
    vision = vision_part(model, form.tower)
    side = need(vision, "init_pos_emb_height", "pos_emb_height")
    if need(vision, "init_pos_emb_width", "pos_emb_width") != side:
        raise ConfigError(f"learned positions: got {side} rows; expected a square")

    tower = MoonViTConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=need(vision, "num_attention_heads"),
        intermediate=need(vision, "intermediate_size"),
        output_width=text.width,
        patch=one_size(vision, "patch_size"),
        merge=one_size(vision, "merge_kernel_size"),
        positions=side,
        frames=need(vision, "pos_emb_time") if form.video else 1,
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        projector_epsilon=model.get("projection_layer_norm_eps", 1e-5),
        # Released files keep query, key and value in one matrix, transformers' in three.
        fused=form.released,
        dtype=text.dtype,
    )

    # transformers names the placeholder otherwise.
    image = need(model, "media_placeholder_token_id", "image_token_id")
    ends = (model.get("vision_start_token_id"), model.get("vision_end_token_id"))
    return KimiVLConfig(architecture, text, tower, image, *ends, freeze(raw), model.get("video_token_id"))


def _plan(config: KimiVLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    vision, grids = config.vision, grids_of(arrays)
    if not len(grids):
        return None
    plan = plan_patches(vision, grids)
    shape = (plan["rows"].size, vision.channels, vision.patch, vision.patch)
    check_placeholders(input_ids, placeholders(config), len(plan["merged"]), pixels_of(arrays), shape)
    return plan


def _tokens(config: KimiVLConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns `<|media_start|>image<|media_content|>` pads `<|media_end|>` (Kimi-K2.5: `<|media_begin|>`) where the
    tokenizer has them, else start and end.
    """
    # A square of patches becomes one token.
    pads = [config.image_token] * (int(np.prod(arrays["image_grid_thw"][index])) // config.vision.merge**2)
    for start in ("<|media_start|>", "<|media_begin|>"):
        if tokenizer is not None and tokenizer.token_to_id(start) is not None:

            def encode(text):
                return list(tokenizer.encode(text, add_special_tokens=False).ids)

            return [*encode(f"{start}image<|media_content|>"), *pads, *encode("<|media_end|>")]
    first, last = ([] if end is None else [end] for end in (config.start_token, config.end_token))
    return [*first, *pads, *last]


def _video_tokens(config: KimiVLConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns the parts of a video, each a few frames' placeholders behind the time of the first."""
    count, first = int(arrays["num_chunks_per_video"][index]), int(np.sum(arrays["num_chunks_per_video"][:index]))
    run: list[int | str] = []
    for part in range(first, first + count):
        pads = int(np.prod(arrays["video_grid_thw"][part][1:])) // config.vision.merge**2
        text = f"{kimi_time(float(arrays['video_timestamps'][part]))}<|media_begin|>video<|media_content|>"
        run += [text, *[config.video_token] * pads, "<|media_end|>"]
    return run


_VIDEO_SETTINGS = VideoConfig.reader(
    image_mean=HALVES,
    image_std=HALVES,
    resample=3,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=4,
    max_patches=4096,
    fps=2,
)
_VIDEO = Medium(
    _VIDEO_SETTINGS,
    process_kimi_videos,
    _video_tokens,
    lambda config, tokenizer: ("<|kimi_k25_video_placeholder|>", "", ""),
)


def _entries(config: KimiVLConfig, shapes: Shapes) -> list[TensorEntry]:
    form = FORMS[config.architecture]
    prefix = "language_model.model." if form.released else "model.language_model."
    head = "language_model.lm_head" if form.released else "lm_head"
    fused = expert_layout(config.text, shapes, prefix, "no" if form.released else "rows")
    decoder = decoder_entries(config.text, prefix=prefix, head=head, fused_experts=fused)
    tower = "vision_tower" if form.released else "model.vision_tower"
    return decoder + moonvit_entries(config.vision, tower, form.projector, released=form.released)


def _family(architecture: str) -> Family:
    form = FORMS[architecture]
    settings = PictureConfig.reader(
        only={"do_resize": True},
        names={"max_patches": "in_token_limit", "merge_size": "merge_kernel_size"},
        image_mean=HALVES,
        image_std=HALVES,
        resample=3,
        patch_size=14,
        merge_kernel_size=[2, 2],
        in_token_limit=form.patches,
    )
    return Family(
        architecture=architecture,
        config=lambda raw, angles, regime: _read(architecture, raw, angles, regime),
        module=functools.partial(TowerModel, MoonViT),
        entries=_entries,
        vision=Vision(settings, process_kimi, _tokens, _plan, fills=lambda config: {"images": 1}),
        video=_VIDEO if form.video else None,
        model_type=form.model,
    )


FAMILIES = {architecture: _family(architecture) for architecture in FORMS}
