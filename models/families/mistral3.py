"""Mistral Small 3.1 and 3.2, and Pixtral-12B as LLaVA: Pixtral's tower, a projector, Mistral.

Sources: transformers' Mistral3ForConditionalGeneration, LlavaForConditionalGeneration with a `pixtral` tower, and
PixtralProcessor, which ends each row of an image's tokens with a token of its own.
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
from ..decoder.weights import decoder_entries
from ..inputs.pixtral_images import MERGING, pixtral_settings, process_pixtral
from ..towers.pixtral import PixtralConfig, PixtralTower, pixtral_entries, plan_patches
from .family import Family, Shapes, Vision
from .image_family import TowerModel, check_placeholders, freeze, one_size, text_part, thaw, vision_part, whole
from .text_families import read_mistral

ARCHITECTURE = "Mistral3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
TOWER = "pixtral"
BREAK, END = ("[IMG_BREAK]", 12), ("[IMG_END]", 13)
"""What stands behind a row of an image's tokens, and behind the last one; with the ids of Mistral's own tokenizers."""


@dataclasses.dataclass(frozen=True)
class Mistral3Config:
    """The whole backbone; `raw` is config.json as it was read."""

    architecture: str
    text: DecoderConfig
    vision: PixtralConfig
    image_token: int
    raw: str

    @property
    def family(self) -> Family:
        """The family of this architecture with Pixtral's tower."""
        return FAMILY if self.architecture == ARCHITECTURE else LLAVA_FAMILY

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.architecture, self.text.dtype)


def has_pixtral(model: Mapping[str, Any]) -> bool:
    """Returns whether the vision part of `config.json` is Pixtral's tower."""
    part = model.get("vision_config")
    return isinstance(part, Mapping) and part.get("model_type") == TOWER


def read_model(
    architecture: str, raw: Mapping[str, Any], model: Mapping[str, Any], text: DecoderConfig
) -> Mistral3Config:
    """Reads `config.json` of either architecture.

    Args:
      raw: as it was read. model: its top level, as `whole` gives it. text: its text tower.

    Raises:
      ConfigError: a tower, or a choice of features, that is not built.
    """
    vision, layer, merges = vision_part(model, TOWER), model["vision_feature_layer"], architecture == ARCHITECTURE
    if not isinstance(layer, int):
        raise ConfigError(f"vision_feature_layer: got {layer!r}; expected one layer")
    if not merges and model["vision_feature_select_strategy"] != "full":
        raise ConfigError(
            f"vision_feature_select_strategy: got {model['vision_feature_select_strategy']!r}; expected 'full' for "
            "Pixtral's tower, which has no class token"
        )
    width, heads = vision["hidden_size"], vision["num_attention_heads"]
    if vision["head_dim"] not in (None, width // heads):
        raise ConfigError(f"vision head_dim: got {vision['head_dim']}; expected {width // heads}: hidden_size / heads")

    tower = PixtralConfig(
        depth=vision["num_hidden_layers"],
        width=width,
        heads=heads,
        intermediate=vision["intermediate_size"],
        output_width=text.width,
        patch=one_size(vision, "patch_size"),
        merge=model["spatial_merge_size"] if merges else 1,
        merges=merges,
        channels=vision["num_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        feature_layer=layer,
        projector_activation=model["projector_hidden_act"],
        projector_bias=model["multimodal_projector_bias"],
        projector_epsilon=text.norm_epsilon,
        dtype=text.dtype,
    )
    return Mistral3Config(architecture, text, tower, need(model, "image_token_index"), freeze(raw))


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> Mistral3Config:
    model, part = whole(raw, MERGING), raw.get("text_config")
    if isinstance(part, Mapping) and part.get("model_type") == "ministral3":
        raise ConfigError(
            "text_config: got type 'ministral3', whose queries are scaled by their position beyond the original "
            "length, so that KV formed at one place is not that of another; expected 'mistral'"
        )
    return read_model(ARCHITECTURE, raw, model, read_mistral(text_part(model, raw, ("mistral",)), angles, regime))


def _plan(config: Mistral3Config, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    sizes = arrays.get("image_sizes")
    if sizes is None or not len(sizes):
        return None

    vision = config.vision
    plan = plan_patches(vision, np.asarray(sizes) // vision.patch)
    shape = (plan["rows"].size, vision.channels, vision.patch, vision.patch)
    check_placeholders(input_ids, (config.image_token,), len(plan["merged"]), arrays.get("pixel_values"), shape)
    return plan


def _tokens(config: Mistral3Config, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    rows, columns = (int(side) // (config.vision.patch * config.vision.merge) for side in arrays["image_sizes"][index])

    def number(mark):
        found = None if tokenizer is None else tokenizer.token_to_id(mark[0])
        return mark[1] if found is None else found

    ids = ([config.image_token] * columns + [number(BREAK)]) * rows
    return [*ids[:-1], number(END)]


def _entries(config: Mistral3Config, shapes: Shapes) -> list[TensorEntry]:
    decoder = decoder_entries(config.text, prefix="language_model.model.", head="language_model.lm_head")
    return decoder + pixtral_entries(config.vision, "vision_tower", "multi_modal_projector")


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=functools.partial(TowerModel, PixtralTower),
    entries=_entries,
    vision=Vision(pixtral_settings, process_pixtral, _tokens, _plan, fills=lambda config: {"images": 1}),
    model_type=MERGING,
)
LLAVA_FAMILY = dataclasses.replace(FAMILY, architecture=LLAVA, model_type="llava")
"""LLaVA with Pixtral's tower: what `llava` reads such a configuration as."""
