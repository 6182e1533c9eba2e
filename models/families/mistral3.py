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
from ..decoder.hf_config import read_axial_theta
from ..decoder.weights import decoder_entries
from ..inputs.processors import pixtral_settings, process_pixtral
from ..towers.pixtral import PixtralConfig, PixtralTower, pixtral_entries, plan_patches
from .config_file import ConfigFile, FamilyConfig, one_layer, one_size
from .family import Family, Shapes, Vision
from .image_family import TowerModel, check_placeholders

ARCHITECTURE = "Mistral3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
TOWER, MODEL_TYPE = "pixtral", "mistral3"
BREAK, END = ("[IMG_BREAK]", 12), ("[IMG_END]", 13)
"""What stands behind a row of an image's tokens, and behind the last one; with the ids of Mistral's own tokenizers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral3Config(FamilyConfig):
    """The whole backbone."""

    vision: PixtralConfig
    image_token: int


def read_model(file: ConfigFile, text: DecoderConfig, merges: bool) -> Mistral3Config:
    """Reads Pixtral's tower, whose patches `merges` joins, in front of a text tower.

    Raises:
      ConfigError: a tower, or a choice of features, that is not built.
    """
    model, vision = file.model, file.part("vision_config")
    if vision["model_type"] != TOWER:
        raise ConfigError(f"vision_config: got type {vision['model_type']!r}; expected {TOWER!r}")
    if not merges and model["vision_feature_select_strategy"] != "full":
        raise ConfigError(
            f"vision_feature_select_strategy: got {model['vision_feature_select_strategy']!r}; expected 'full' for "
            "Pixtral's tower, which has no class token"
        )
    width, heads = vision["hidden_size"], vision["num_attention_heads"]
    if vision.get("head_dim") not in (None, width // heads):
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
        feature_layer=one_layer(model),
        projector_activation=model["projector_hidden_act"],
        projector_bias=model["multimodal_projector_bias"],
        projector_epsilon=text.norm_epsilon,
        dtype=text.dtype,
    )
    config = file.config(Mistral3Config, text, vision=tower, **file.tokens("image_token"))
    return config if merges else dataclasses.replace(config, family=LLAVA_FAMILY)


def _read(file: ConfigFile) -> Mistral3Config:
    return read_model(file, file.text("mistral"), merges=True)


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


def _vision(merge: int) -> Vision:
    """Returns what is done with images; `merge` is the side of the square of patches that becomes one token, where
    `config.json` does not say it.
    """
    return Vision(pixtral_settings(merge), process_pixtral, _tokens, _plan, fills=lambda config: {"images": 1})


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=functools.partial(TowerModel, PixtralTower),
    entries=_entries,
    vision=_vision(2),
    model_type=MODEL_TYPE,
)
LLAVA_FAMILY = dataclasses.replace(FAMILY, architecture=LLAVA, model_type="llava", vision=_vision(1))
"""LLaVA with Pixtral's tower: what `llava` reads such a configuration as."""
