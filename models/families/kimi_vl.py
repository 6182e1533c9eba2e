"""Kimi-VL, Kimi-K2.5 and 2.6: MoonViT, a normed 2×2 projector, DeepSeek-V3's decoder (latent attention, experts).

Three forms of the same function of images: the released files of Kimi-VL and of Kimi-K2.5, and transformers' Kimi_K25.
Video, of which the latter two have a sinusoid per frame and a mean over frames, is not built; an image is one frame, of
which both are nothing. Sources: the released configurations, tensor names and processors of Kimi-VL and Kimi-K2.5;
transformers' Kimi_K25ForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need, read_axial_theta
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.images import HALVES, KIMI_SIDE, PictureConfig, process_kimi
from ..towers.moonvit import MoonViT, MoonViTConfig, plan_patches
from ..towers.weights import moonvit_entries
from .family import Family, Shapes, Vision
from .image_family import TowerModel, check_placeholders, freeze, one_size, text_part, thaw, vision_part, whole
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
    """

    model: str
    towers: tuple[str, ...]
    released: bool
    projector: tuple[str, str, str]
    patches: int


FORMS = {
    RELEASED: FileForm("kimi_vl", ("moonvit",), True, ("multi_modal_projector", "linear_1", "linear_2"), 4096),
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
    return KimiVLConfig(architecture, text, tower, image, *ends, raw=freeze(raw))


def _plan(config: KimiVLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    grids = arrays.get("image_grid_thw")
    if arrays.get("video_grid_thw") is not None:
        raise InputError("Kimi-VL: got a video, which is not built; expected images")
    if grids is None or not len(grids):
        return None

    vision = config.vision
    plan = plan_patches(vision, np.asarray(grids))
    shape = (plan["rows"].size, vision.channels, vision.patch, vision.patch)
    check_placeholders(input_ids, (config.image_token,), len(plan["merged"]), arrays.get("pixel_values"), shape)
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
        ignore=(r".*\.rotary_emb\.inv_freq",),
        model_type=form.model,
    )


FAMILIES = {architecture: _family(architecture) for architecture in FORMS}
