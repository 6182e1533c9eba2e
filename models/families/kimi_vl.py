"""Kimi-VL and Kimi-K2.5: MoonViT, a normed 2×2 projector, DeepSeek-V3's decoder (latent attention, experts).

Two forms of the same function of images: the released files of Kimi-VL, and transformers' Kimi_K25, which takes videos,
a few frames at a time behind their time as a text. Sources: the released configuration, tensor names and processor of
Kimi-VL; transformers' Kimi_K25ForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.hf_config import need, read_axial_theta
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.pictures import HALVES, process_kimi
from ..inputs.processors import own_settings
from ..inputs.videos import kimi_time, process_kimi_videos
from ..towers.packed import PackedConfig, PackedTower, plan_patches
from ..towers.weights import moonvit_entries
from .config_file import ConfigFile, FamilyConfig, one_size
from .family import Family, Medium, Run, Shapes, Vision, pixels_of, placeholders
from .image_family import TowerModel, check_placeholders, grids_of, packed_fills
from .parsed import Table

RELEASED = "KimiVLForConditionalGeneration"
TRANSFORMERS = "Kimi_K25ForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class FileForm:
    """How one kind of files holds the model.

    Attributes:
      model: its `model_type`.
      released: whether tensors have the authors' names and packing, or transformers'.
      projector: what the projector, its inner and its outer map are called.
      patches: how many patches an image has at most where the image settings do not say it.
      video: whether it takes videos.
    """

    model: str
    released: bool
    projector: tuple[str, str, str]
    patches: int
    video: bool


FORMS = {
    RELEASED: FileForm("kimi_vl", True, ("multi_modal_projector", "linear_1", "linear_2"), 4096, False),
    TRANSFORMERS: FileForm("kimi_k25", False, ("model.mm_projector", "in_proj", "out_proj"), 16384, True),
}
_FROM_FILE = (
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "v_head_dim"),
)
"""Of the text part: what the released code and transformers' DeepSeek-V3 may default differently."""
_MOONVIT = {"patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 1152}
_MOONVIT |= {"intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh", "merge_kernel_size": [2, 2]}
"""Defaults of the released configuration's tower."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiVLConfig(FamilyConfig):
    """The whole backbone. Start and end ids stand around an image where the configuration names them; `video_token` is
    None where no videos are taken.
    """

    vision: PackedConfig
    image_token: int
    start_token: int | None
    end_token: int | None
    video_token: int | None = None


def _read(file: ConfigFile) -> KimiVLConfig:
    """Reads `config.json` of either form."""
    form, model = FORMS[file.family.architecture], file.model
    text, vision = file.text("deepseek_v3"), file.part("vision_config")
    if form.released:
        for name in _FROM_FILE:
            need(model["text_config"], name)
        vision = Table(_MOONVIT | {"rope_parameters": {"rope_theta": 1e4}} | vision)
    side = need(vision, "init_pos_emb_height", "pos_emb_height")
    if need(vision, "init_pos_emb_width", "pos_emb_width") != side:
        raise ConfigError(f"learned positions: got {side} rows; expected a square")

    tower = PackedConfig(
        depth=vision["num_hidden_layers"],
        width=vision["hidden_size"],
        heads=vision["num_attention_heads"],
        intermediate=vision["intermediate_size"],
        output_width=text.width,
        patch=one_size(vision, "patch_size"),
        merge=one_size(vision, "merge_kernel_size"),
        positions=side,
        frames=vision["pos_emb_time"] if form.video else 1,
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        norm_epsilon=1e-5,
        merger_epsilon=model.get("projection_layer_norm_eps", 1e-5),
        # Released files keep query, key and value in one matrix whose rotary pairs are neighbours.
        fused=form.released,
        rotary="pairs" if form.released else "turns",
        raster=True,
        patch_bias=True,
        final_norm=True,
        dtype=text.dtype,
    )

    # transformers names the placeholder otherwise.
    image = need(model, "media_placeholder_token_id", "image_token_id")
    return file.config(
        KimiVLConfig,
        text,
        vision=tower,
        image_token=image,
        start_token=model.get("vision_start_token_id"),
        end_token=model.get("vision_end_token_id"),
        video_token=model.get("video_token_id"),
    )


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


_VIDEO_SETTINGS = own_settings(
    "video",
    only={"do_resize": True},
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
    form = FORMS[config.family.architecture]
    prefix = "language_model.model." if form.released else "model.language_model."
    head = "language_model.lm_head" if form.released else "lm_head"
    fused = expert_layout(config.text, shapes, prefix, "no" if form.released else "rows")
    decoder = decoder_entries(config.text, prefix=prefix, head=head, fused_experts=fused)
    tower = "vision_tower" if form.released else "model.vision_tower"
    return decoder + moonvit_entries(config.vision, tower, form.projector, released=form.released)


def _family(architecture: str) -> Family:
    form = FORMS[architecture]

    def options(given: dict[str, Any], root: Path) -> dict[str, Any]:
        # transformers' names, and one number for both sides.
        merge, most = given.get("merge_size"), given.get("max_patches")
        named = {"merge_kernel_size": given.get("merge_kernel_size") if merge is None else merge}
        named |= {"in_token_limit": given.get("in_token_limit") if most is None else most}
        if isinstance(named["merge_kernel_size"], int):
            named["merge_kernel_size"] = [named["merge_kernel_size"]] * 2
        return given | {name: value for name, value in named.items() if value is not None}

    settings = own_settings(
        "image",
        options,
        only={"do_resize": True},
        image_mean=HALVES,
        image_std=HALVES,
        resample=3,
        patch_size=14,
        merge_kernel_size=[2, 2],
        in_token_limit=form.patches,
    )
    return Family(
        architecture=architecture,
        read=_read,
        module=functools.partial(TowerModel, PackedTower),
        entries=_entries,
        vision=Vision(settings, process_kimi, _tokens, _plan, fills=packed_fills),
        video=_VIDEO if form.video else None,
        model_type=form.model,
    )


FAMILIES = {architecture: _family(architecture) for architecture in FORMS}
