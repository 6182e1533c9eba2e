"""`config.json` as transformers' own configuration classes parse it: defaults, legacy names and sub-configurations.

The classes need no torch; their first import takes about two seconds. A released file states what it means, so what
stands in it wins over a class's default. A model without a class there is read with the class of its text part.
"""

import contextlib
import copy
import dataclasses
import logging
import math
import re
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError, KVPatchError, MissingExtraError
from kvpatch_jax.utils.optional_packages import require


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOST_LAYERS = 1024
_LEVEL = threading.RLock()
"""Held while transformers' logging is quiet: models may be read by several threads."""
DTYPES = ("dtype", "torch_dtype")
_DEPTHS = frozenset({"num_hidden_layers", "depth", "encoder_layers"})
_SIZES = _DEPTHS | _words(
    """
    hidden_size num_attention_heads num_heads vocab_size patch_size spatial_merge_size temporal_patch_size
    max_position_embeddings full_attention_interval linear_num_key_heads n_window n_window_infer image_size
    merge_kernel_size pooling_kernel_size
    """
)
"""Keys of positive whole numbers, or lists of them: classes and readers loop over them or divide by them."""
_BUILT: dict[str, tuple[Any, ...]] = {
    "apply_vit_abs_pos_embed": (True,),
    "attention_invalid_logits_value": (-1e9,),
    "attn_logit_softcapping": (),
    "attn_output_gate": (True,),
    "is_causal": (True,),
    "linear_attn_config": (),
    "pruned_heads": ({},),
    "quantization_config": (),
    "use_absolute_position_embeddings": (True,),
    "use_mask_token": (False,),
    "use_mean_pooling": (True,),
}
"""By key: its values that are built, beside null. Others change what any model that has the key computes."""
_INERT = _words(
    """
    architectures attention_dropout auto_map aux_loss_alpha cache_implementation chunk_size_feed_forward dropout
    dtype embd_pdrop embed_dim enable_talker encoder_layerdrop ep_size full_attention_interval head_dim
    hidden_dropout hidden_dropout_prob ignore_index image_size in_chans init_std initializer_factor
    initializer_range is_composition is_llama_config mamba_ssm_dtype max_image_size max_window_layers model_type
    moe_layer_freq mtp_num_hidden_layers norm_topk_prob num_local_experts num_nextn_predict_layers
    partial_rotary_factor pretraining_tp qk_head_dim resid_pdrop scale scoring_func seconds_per_chunk seq_aux
    shared_expert_intermediate_size sliding_window_pattern spatial_patch_size tie_word_embeddings tokenizer_class
    tokens_per_second topk_method torch_dtype transformers.js_config use_image_newline_parameter use_qk_norm
    vision_soft_tokens_per_image
    """
)
"""Keys of releases that their class leaves alone: a reader or a modeling file looks at them, or nothing does."""
_SILENT = re.compile(r"^_|^mtp_|_token_(id|index)$")
_MODELS = str(Path(__file__).parents[1])


class UnknownKeyWarning(UserWarning):
    """A key of `config.json` that no class of transformers reads. The model is read without it."""


class Table(dict[str, Any]):
    """A table of `config.json`; a key that it lacks raises ConfigError."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"config.json: got no {key!r} for {self.get('model_type')}; expected it")


def parse(raw: Any, model_type: str, place: str = "config.json") -> Table:
    """Returns a table, and those inside it, as the class of this `model_type` completes it.

    Raises:
      ConfigError: no such class, a value that it refuses, or one that is not built.

    Warns:
      UnknownKeyWarning: a key that the class does not read.
    """
    classes = known_classes()
    check_table(raw, place)
    rope = raw.get("rope_scaling")
    # Early files of Phi-3 call longrope otherwise, which the class knows too late.
    if model_type == "phi3" and isinstance(rope, Mapping) and rope.get("type") in ("su", "yarn"):
        raw = {**raw, "rope_scaling": {**rope, "type": "longrope"}}
    if model_type not in classes:
        raise ConfigError(f"{place}: got model_type {model_type!r:.60}; expected one that transformers has a class for")
    with typed_errors(place), _quiet():
        # The class changes the tables that it gets; where torch is installed, dtypes would import it.
        config = classes[model_type](**without_keys(copy.deepcopy(dict(raw)), DTYPES)[0])
        parsed = _tables(config.to_dict())
    for key, value in _take_unknown(config, raw, parsed, _fields(config)).items():
        warnings.warn(
            f"{place}: got {key!r}: {value!r:.60}, which no class of transformers reads; the model is read without it. "
            f"load(..., ignore=[{key!r}]) says that this is right",
            UnknownKeyWarning,
            skip_file_prefixes=(_MODELS,),
        )
    return parsed


def known_classes() -> Mapping[str, Any]:
    """Returns transformers' configuration classes by `model_type`."""
    return require("transformers.models.auto.configuration_auto", "transformers").CONFIG_MAPPING


def check_table(raw: Any, place: str) -> None:
    """Raises ConfigError for what is no table, and for sizes, numbers and switches in it that no model is built for."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: got {raw!r:.60}; expected a table")
    for key, value in raw.items():
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{place}: got {key} {value}; expected a finite number")
        if key in _BUILT and value not in _BUILT[key]:
            expected = " or ".join(map(repr, _BUILT[key])) or "none"
            raise ConfigError(f"{place}: got {key} {value!r:.60}, which is not built; expected {expected}")
        if key in _SIZES:
            sizes = value if isinstance(value, list | tuple) and key not in _DEPTHS else [value]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise ConfigError(f"{place}: got {key} {value!r:.60}; expected a positive whole number")
        if key in _DEPTHS and value > MOST_LAYERS:  # pyright: ignore[reportOperatorIssue]
            raise ConfigError(f"{place}: got {key} {value}; expected at most {MOST_LAYERS} layers")
        if isinstance(value, Mapping):
            check_table(value, f"{place}: {key}")


@contextlib.contextmanager
def typed_errors(place: str) -> Iterator[None]:
    """Turns what is raised in the block into a ConfigError: a file's values reach the block unchecked."""
    try:
        yield
    except (ConfigError, MissingExtraError, Warning):
        raise
    except KVPatchError as error:
        raise ConfigError(f"{place}: {error}") from error
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{place}: got {type(error).__name__}: {said:.300}; expected values that fit") from error


def without_keys(raw: Mapping[str, Any], ignore: Collection[str]) -> tuple[dict[str, Any], set[str]]:
    """Returns a table without these keys, in the tables inside it too, and those of them that there were."""
    found, rest = set(ignore) & raw.keys(), {key: value for key, value in raw.items() if key not in ignore}
    for key, value in rest.items():
        if isinstance(value, Mapping):
            rest[key], inside = without_keys(value, ignore)
            found |= inside
    return rest, found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what transformers logs of keys: the ones that matter are refused or warned about here."""
    # Asked of transformers, which sets the level itself when it is first asked.
    logger = require("transformers.utils.logging", "transformers").get_logger("transformers")
    with _LEVEL:
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _tables(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Table((str(key), _tables(entry)) for key, entry in value.items())
    return value


def _fields(config: Any) -> set[str]:
    """Returns the names of what a class and those of its parts declare."""
    names = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    return names.union(*(_fields(part) for part in _parts(config).values()))


def _parts(config: Any) -> dict[str, Any]:
    parts = {name: getattr(config, name, None) for name in config.sub_configs_defaults}
    return {name: part for name, part in parts.items() if part is not None}


def _take_unknown(config: Any, raw: Mapping[str, Any], parsed: Table, known: set[str]) -> dict[str, Any]:
    """Takes out what became an attribute of a class that has no field for it, and returns it.

    What is empty or false says nothing.
    """
    found = dict[str, Any]()
    for key, value in raw.items():
        silent = not value or key in known or key in _INERT or key in _BUILT or _SILENT.search(key)
        if not silent and key in vars(config):
            found[key] = parsed.pop(key)
    for name, part in _parts(config).items():
        if isinstance(raw.get(name), Mapping):
            found = _take_unknown(part, raw[name], parsed[name], known) | found
    return found
