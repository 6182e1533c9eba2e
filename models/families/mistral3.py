"""Mistral Small 3.1 and 3.2, and Pixtral-12B as LLaVA: Pixtral's tower, a projector, Mistral.

Sources: transformers' Mistral3ForConditionalGeneration, LlavaForConditionalGeneration with a `pixtral` tower, and
PixtralProcessor, which ends each row of an image's tokens with a token of its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import read_axial_theta
from ..decoder.weights import decoder_entries
from ..inputs.processors import pixtral_settings, process_pixtral
from ..towers.packed import PackedConfig, PackedTower, plan_patches
from ..towers.weights import pixtral_entries
from .config_file import ConfigFile, FamilyConfig, one_layer, one_size
from .family import Family, Run, Shapes, Vision
from .image_family import TowerModel, check_placeholders, packed_fills

ARCHITECTURE = "Mistral3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
TOWER, MODEL_TYPE = "pixtral", "mistral3"
Mark = tuple[str, int]
BREAK, END = ("[IMG_BREAK]", 12), ("[IMG_END]", 13)
"""What stands behind a row of an image's tokens, and behind the last one; with the ids of Mistral's own tokenizers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral3Config(FamilyConfig):
    """The whole backbone."""

    vision: PackedConfig
    image_token: int


def read_pixtral(vision: Mapping[str, Any], text: DecoderConfig, merges: bool, **glue: Any) -> PackedConfig:
    """Reads Pixtral's tower from its parsed part of `config.json`; the projector `merges` patches, even where it
    is one of a token (Mistral Small 3.1), and `glue` are its other fields.

    Raises:
      ConfigError: another tower, or heads that are not the width's.
    """
    if vision["model_type"] != TOWER:
        raise ConfigError(f"vision_config: got type {vision['model_type']!r}; expected {TOWER!r}")
    width, heads = vision["hidden_size"], vision["num_attention_heads"]
    if vision.get("head_dim") not in (None, width // heads):
        raise ConfigError(f"vision head_dim: got {vision['head_dim']}; expected {width // heads}: hidden_size / heads")
    return PackedConfig(
        depth=vision["num_hidden_layers"],
        width=width,
        heads=heads,
        intermediate=vision["intermediate_size"],
        output_width=text.width,
        patch=one_size(vision, "patch_size"),
        channels=vision["num_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        norm_epsilon=1e-5,
        rms_norms=True,
        gated=True,
        fused=False,
        qkv_bias=False,
        bias=False,
        embedding_norm=True,
        rotary="between",
        raster=True,
        merger_norm=merges,
        joined=merges,
        merger_width=text.width,
        merger_epsilon=text.norm_epsilon,
        dtype=text.dtype,
        **glue,
    )


def read_model(file: ConfigFile, text: DecoderConfig, merges: bool) -> Mistral3Config:
    """Reads a model with Pixtral's tower, whose patches `merges` joins.

    Raises:
      ConfigError: a tower, or a choice of features, that is not built.
    """
    model = file.model
    if not merges and model["vision_feature_select_strategy"] != "full":
        raise ConfigError(
            f"vision_feature_select_strategy: got {model['vision_feature_select_strategy']!r}; expected 'full' for "
            "Pixtral's tower, which has no class token"
        )
    tower = read_pixtral(
        file.part("vision_config"),
        text,
        merges,
        merge=model["spatial_merge_size"] if merges else 1,
        feature_layer=one_layer(model),
        merger_activation=model["projector_hidden_act"],
        merger_bias=model["multimodal_projector_bias"],
    )
    config = file.config(Mistral3Config, text, vision=tower, **file.tokens("image_token"))
    return config if merges else dataclasses.replace(config, family=LLAVA_FAMILY)


def _read(file: ConfigFile) -> Mistral3Config:
    return read_model(file, file.text("mistral"), merges=True)


def _plan(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    sizes = arrays.get("image_sizes")
    if sizes is None or not len(sizes):
        return None

    vision = config.vision
    plan = plan_patches(vision, np.asarray(sizes) // vision.patch)
    shape = (plan["rows"].size, vision.channels, vision.patch, vision.patch)
    check_placeholders(input_ids, (config.image_token,), len(plan["merged"]), arrays.get("pixel_values"), shape)
    return plan


def row_tokens(
    config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any, behind: Mark = BREAK, last: Mark = END
) -> list[int]:
    """Returns an image's placeholders row by row, a token `behind` each row but the `last` one."""
    rows, columns = (int(side) // (config.vision.patch * config.vision.merge) for side in arrays["image_sizes"][index])

    def number(mark: Mark) -> int:
        found = None if tokenizer is None else tokenizer.token_to_id(mark[0])
        return mark[1] if found is None else found

    ids = ([config.image_token] * columns + [number(behind)]) * rows
    return [*ids[:-1], number(last)]


def pixtral_vision(merge: int, tokens: Callable[[Any, Mapping[str, Any], int, Any], Run] = row_tokens) -> Vision:
    """Returns what is done with Pixtral's images.

    Args:
      merge: side of the square of patches that becomes one token, where `config.json` does not say it.
      tokens: as `Vision` has it.
    """
    return Vision(pixtral_settings(merge), process_pixtral, tokens, _plan, fills=packed_fills)


def _entries(config: Mistral3Config, shapes: Shapes) -> list[TensorEntry]:
    decoder = decoder_entries(config.text, prefix="language_model.model.", head="language_model.lm_head")
    return decoder + pixtral_entries(config.vision, "vision_tower", "multi_modal_projector")


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=functools.partial(TowerModel, PackedTower),
    entries=_entries,
    vision=pixtral_vision(2),
    model_type=MODEL_TYPE,
)
LLAVA_FAMILY = dataclasses.replace(FAMILY, architecture=LLAVA, model_type="llava", vision=pixtral_vision(1))
"""LLaVA with Pixtral's tower: what `llava` reads such a configuration as."""
