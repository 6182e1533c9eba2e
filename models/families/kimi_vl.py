"""Kimi-VL, Kimi-K2.5 and 2.6: MoonViT, a normed 2×2 projector, DeepSeek-V3's decoder (latent attention, experts).

Three forms of the same function of images: the released files of Kimi-VL and of Kimi-K2.5, and transformers' Kimi_K25.
The latter two take videos, a few frames at a time behind their time as a text. Sources: the released configurations,
tensor names and processors of Kimi-VL and Kimi-K2.5; transformers' Kimi_K25ForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need, read_axial_theta
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.family_videos import kimi_time, process_kimi_videos
from ..inputs.images import HALVES, KIMI_SIDE, PictureConfig, process_kimi
from ..inputs.video_frames import VideoConfig
from ..towers.moonvit import MoonViT, MoonViTConfig, plan_patches
from ..towers.weights import moonvit_entries
from .family import Family, Medium, Run, Shapes, Vision, joined_arrays, pixels_of, placeholders
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
RELEASED_K25 = "KimiK25ForConditionalGeneration"
TRANSFORMERS = "Kimi_K25ForConditionalGeneration"


@dataclasses.dataclass(frozen=True)
class FileForm:
    """How one kind of files holds the model.

    Attributes:
      model: what `known_keys` calls the top level, and the `model_type` of a file that names no architecture.
      towers: what `known_keys` calls the tower, and further names that it has in `model_type`.
      released: whether tensors have the authors' names and packing, or transformers'.
      projector: what the projector, its inner and its outer map are called.
      patches: how many patches an image has at most where the image settings do not say it.
      video: whether it takes videos.
    """

    model: str
    towers: tuple[str, ...]
    released: bool
    projector: tuple[str, str, str]
    patches: int
    video: bool = True


FORMS = {
    RELEASED: FileForm("kimi_vl", ("moonvit",), True, ("multi_modal_projector", "linear_1", "linear_2"), 4096, False),
    RELEASED_K25: FileForm(
        "kimi_k25_release", ("kimi_k25_release_vision", ""), True, ("mm_projector", "proj.0", "proj.2"), 16384
    ),
    TRANSFORMERS: FileForm(
        "kimi_k25", ("kimi_k25_vision",), False, ("model.mm_projector", "in_proj", "out_proj"), 16384
    ),
}
_NO_DEFAULT = (
    *("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "v_head_dim"),
)
"""Of the text part: what the released code and transformers' DeepSeek-V3 may default differently."""


@dataclasses.dataclass(frozen=True)
class KimiVLConfig:
    """The whole backbone. Start and end ids stand around an image where the configuration names them.

    `video_token` is None where videos have the placeholder of images.
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
    """Reads `config.json` of any of the three forms."""
    form = FORMS[architecture]
    model = whole(raw, form.model, {"ignore_index"})
    part = text_part(model, raw, ("deepseek_v3", "kimi_k2"))
    for name in _NO_DEFAULT if form.released else ():
        need(part, name)

    text = read_deepseek(part, angles, regime)
    vision = vision_part(model, *form.towers)
    if architecture == RELEASED_K25:
        # Kimi-K2.5's tower and projector are one table; the keys of the tower get the names of Kimi-VL's.
        width = vision["vt_hidden_size"]
        if vision["mm_hidden_size"] not in (None, width):
            raise ConfigError(f"mm_hidden_size: got {vision['mm_hidden_size']}; expected the tower's width {width}")
        if vision["text_hidden_size"] not in (None, text.width):
            raise ConfigError(
                f"text_hidden_size: got {vision['text_hidden_size']}; expected the text width {text.width}"
            )
        fixed = {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e4}
        vision = fixed | {key.removeprefix("vt_"): value for key, value in vision.items()}

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
        frames=need(vision, "init_pos_emb_time", "pos_emb_time") if form.video else 1,
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        projector_epsilon=model.get("projection_layer_norm_eps", vision.get("projector_ln_eps", 1e-5)),
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
    """Returns `<|media_start|>image<|media_content|>` pads `<|media_end|>` where the tokenizer has them, else start
    and end.

    Kimi-K2.5 calls the first `<|media_begin|>`.
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
    pad = config.image_token if config.video_token is None else config.video_token
    run: list[int | str] = []
    for part in range(first, first + count):
        pads = int(np.prod(arrays["video_grid_thw"][part][1:])) // config.vision.merge**2
        text = f"{kimi_time(float(arrays['video_timestamps'][part]))}<|media_begin|>video<|media_content|>"
        run += [text, *[pad] * pads, "<|media_end|>"]
    return run


def _join(config: KimiVLConfig, arrays: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Returns a prompt's arrays; where videos have the placeholder of images, patches and grids in the prompt's order,
    under the names of images.
    """
    joined = joined_arrays(config, arrays, order)
    if "video" not in arrays or config.video_token is not None:
        return joined
    grids: list[np.ndarray] = []
    pixels: list[np.ndarray] = []
    places = {"image": [0, 0], "video": [0, 0]}
    names = {"image": ("image_grid_thw", "pixel_values"), "video": ("video_grid_thw", "pixel_values_videos")}
    numbers = iter(arrays["video"]["num_chunks_per_video"].tolist())
    for sort in order:
        (grid, patch), (grid_name, pixel_name) = places[sort], names[sort]
        own = arrays[sort][grid_name][grid : grid + (1 if sort == "image" else next(numbers))]
        size = int(np.prod(own, axis=1).sum())
        grids.append(own)
        pixels.append(arrays[sort][pixel_name][patch : patch + size])
        places[sort] = [grid + len(own), patch + size]
    for name in names["video"]:
        del joined[name]
    return joined | {"image_grid_thw": np.concatenate(grids), "pixel_values": np.concatenate(pixels)}


def _video_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a file's options by transformers' names; a released file has them in a table, by its own."""
    table = options.get("media_proc_cfg")
    own = {**options, **(table if isinstance(table, Mapping) else {})}
    names = {
        "in_patch_limit_each_frame": "max_patches",
        "merge_kernel_size": "merge_size",
        "temporal_merge_kernel_size": "temporal_patch_size",
        "sample_fps": "fps",
    }
    own |= {ours: own[name] for name, ours in names.items() if own.get(name) is not None}
    if isinstance(own.get("merge_size"), list | tuple):
        own["merge_size"] = one_size(own, "merge_size")
    return own


_VIDEO_SETTINGS = VideoConfig.reader(
    only={"patch_limit_on_one_side": KIMI_SIDE, "max_num_frames_each_video": None, "in_patch_limit_video": None},
    adjust=_video_options,
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
        only={"do_resize": True, "patch_limit_on_one_side": KIMI_SIDE, "fixed_output_tokens": None},
        names={"in_patch_limit": "in_token_limit", "max_patches": "in_token_limit", "merge_size": "merge_kernel_size"},
        table="media_proc_cfg",
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
        join=_join,
        ignore=(r".*\.rotary_emb\.inv_freq",),
        model_type=form.model,
    )


FAMILIES = {architecture: _family(architecture) for architecture in FORMS}
