"""What families with images share: the parts of a configuration, the model, what Qwen's families do with images."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import ConfigError, InputError

from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import need, read_axial_theta
from ..decoder.known_keys import complete
from ..inputs.processors import Reader, process_images, processor
from ..inputs.texts import texts_of
from .family import Vision, pixels_of

_DTYPES = ("dtype", "torch_dtype")
QWEN_IMAGES = processor("qwen2_vl.Qwen2VL")


class TowerModel(nnx.Module):
    """Tower (with its projector, where it has one) and decoder with their parameters."""

    def __init__(self, tower: Callable[[Any, nnx.Rngs], Any], config: Any, rngs: nnx.Rngs):
        self.visual = tower(config.vision, rngs)
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, " P *patch"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features and, behind them, those of each deepstack layer where the tower has such."""
        features = self.visual(pixel_values, **plan)
        if isinstance(features, tuple):
            return jnp.concatenate([features[0][None], features[1]])
        return features[None]


def whole(raw: Mapping[str, Any], kind: str, flat: Collection[str] = ()) -> dict[str, Any]:
    """Returns the top level of `config.json`, checked and filled in.

    `flat` are keys of its parts that may stand there too. So may a key that repeats the text part's value.
    """
    part = raw.get("text_config")
    text = part if isinstance(part, Mapping) else {}
    repeated = [key for key, value in raw.items() if key in text and text[key] == value]
    return complete(raw, kind, drop=[*flat, *repeated])


def text_part(raw: Mapping[str, Any], given: Mapping[str, Any], kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the text part of `config.json`, with what the top level says for it (tying, dtype).

    The top level's dtype is the whole model's, as in transformers: writers leave others in the parts. The text part's
    holds where the top names none, until `load` knows the weights' own.

    Head and embedding are tied where either level says so, or where none says anything and the family's class has it
    so. What the file holds settles it (`family.settle_ties`).

    Args:
      raw: the top level, as `whole` gives it. given: as it was read.
      kinds: what `model_type` may be, the default first; empty for any.

    Raises:
      ConfigError: no `text_config`, or one of another kind.
    """
    part = raw.get("text_config") or raw.get("language_config")
    if not isinstance(part, Mapping):
        raise ConfigError(f"config.json: got text_config {part!r}; expected a table for {raw.get('architectures')}")

    kind = part.get("model_type", kinds[0] if kinds else None)
    if kinds and kind not in kinds:
        raise ConfigError(f"text_config: got type {kind!r}; expected one of {sorted(kinds)}")

    # Only where the top level names no dtype do the part's own count.
    top = {name: raw[name] for name in _DTYPES if raw.get(name) is not None}
    own = {name: value for name, value in part.items() if not (top and name in _DTYPES)}
    text = own | top | {"model_type": kind, "architectures": raw.get("architectures")}
    said = [table.get("tie_word_embeddings") for table in (given, part) if table.get("tie_word_embeddings") is not None]
    return text | {"tie_word_embeddings": any(said) if said else raw.get("tie_word_embeddings", False)}


def vision_part(raw: Mapping[str, Any], kind: str, *others: str) -> dict[str, Any]:
    """Returns the vision part of `config.json`, checked and filled in.

    Args:
      raw: the top level. kind: what `known_keys` calls the tower; others: further names for it in `model_type`.

    Raises:
      ConfigError: no `vision_config`, one of another kind, or keys that are not known.
    """
    part = need(raw, "vision_config")
    if not isinstance(part, Mapping):
        raise ConfigError(f"config.json: got vision_config {part!r}; expected a table")
    found = part.get("model_type", kind)
    if found not in (kind, *others):
        raise ConfigError(f"vision_config: got type {found!r}; expected {kind!r}")
    return complete(part, kind, "vision_config")


def one_size(raw: Mapping[str, Any], name: str) -> int:
    """Returns a number, or the one number that a pair of equal sides repeats.

    Raises:
      ConfigError: sides that differ.
    """
    value = need(raw, name)
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int) or isinstance(sides[0], bool):
        raise ConfigError(f"{name}: got {value!r}; expected equal sides")
    return int(sides[0])


def freeze(raw: Mapping[str, Any]) -> str:
    """Returns `config.json` as text that a frozen configuration keeps."""
    return json.dumps(dict(raw), sort_keys=True)


def thaw(kept: str, architecture: str, dtype: str) -> dict[str, Any]:
    """Returns `config.json` as it was read, with the dtype that the parameters have now."""
    raw: dict[str, Any] = json.loads(kept)
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for name in _DTYPES:
            part.pop(name, None)
    return raw | {"architectures": [architecture], "torch_dtype": dtype}


def grids_of(arrays: Mapping[str, Any]) -> Int[np.ndarray, "grids 3"]:
    """Returns the (time, height, width) grids of a prompt's images, and those of its videos behind them."""
    names = ("image_grid_thw", "video_grid_thw")
    kinds = [np.asarray(arrays[name]).reshape(-1, 3) for name in names if arrays.get(name) is not None]
    return np.concatenate([np.zeros((0, 3), np.int32), *kinds])


def qwen_vision(
    plan_patches: Callable[[Any, np.ndarray], dict[str, np.ndarray]],
    *tables: str,
    settings: Reader = QWEN_IMAGES,
) -> Vision:
    """Returns what a Qwen family does with images.

    Its plan is the tower's own plan of the grids, those of videos behind those of images, held against ids and pixels:
    it raises InputError for placeholders or patches that do not match the grids.

    Args:
      plan_patches: of the tower. tables: those of its index arrays that hold patch numbers.
      settings: directory → how images become patches.
    """

    def plan(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        grids = grids_of(arrays)
        if not len(grids):
            return None
        vision, found = config.vision, plan_patches(config.vision, grids)
        # A Qwen tower's processor hands patches over flat, merge block by merge block.
        patches, pads = found["rows"].size, (config.image_token, config.video_token)
        shape = (patches, vision.features)
        check_placeholders(input_ids, pads, patches // vision.merge**2, pixels_of(arrays), shape)
        return found

    def tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
        # The start and end tokens belong to the image's chunk.
        pads = int(np.prod(arrays["image_grid_thw"][index])) // config.vision.merge**2
        return [config.vision_start_token, *[config.image_token] * pads, config.vision_end_token]

    return Vision(settings, process_images, tokens, plan, fills=lambda config: dict.fromkeys(tables, 1))


def qwen_written(config: Any, tokenizer: Any) -> tuple[str, str, str]:
    """Returns what the chat templates of Qwen's families write for a video: its placeholder between start and end."""
    pad, start, end = texts_of(tokenizer, [config.video_token, config.vision_start_token, config.vision_end_token])
    return pad, start, end


def qwen_tower_sizes(raw: Mapping[str, Any], text: DecoderConfig) -> dict[str, Any]:
    """Reads the fields that the towers of Qwen2.5-VL and Qwen3-VL share from the vision part of `config.json`.

    Raises:
      ConfigError: a field that is missing, or an output that is not as wide as the decoder.
    """
    width = need(raw, "out_hidden_size")
    if width != text.width:
        raise ConfigError(f"vision out_hidden_size: got {width}; expected the text width {text.width}")
    return {
        "depth": need(raw, "depth"),
        "width": need(raw, "hidden_size"),
        "heads": need(raw, "num_heads"),
        "intermediate": need(raw, "intermediate_size"),
        "output_width": width,
        "merge": need(raw, "spatial_merge_size"),
        "temporal": one_size(raw, "temporal_patch_size"),
        "activation": need(raw, "hidden_act"),
        "theta": read_axial_theta(raw),
        "dtype": text.dtype,
    }


def check_placeholders(
    input_ids: Int[np.ndarray, "B T"], pads: tuple[int, ...], expected: int, pixel_values: Any, shape: tuple
) -> None:
    """Raises InputError where placeholders or pixels are not as many as the images given ask for.

    `shape` is what `pixel_values` must have; a None in it stands for any size.
    """
    found = None if pixel_values is None else tuple(pixel_values.shape)
    if found is None or len(found) != len(shape) or any(b not in (None, a) for a, b in zip(found, shape, strict=True)):
        raise InputError(f"pixel_values: got shape {found}; expected {shape}")
    count = int(np.isin(input_ids, pads).sum())
    if count != expected:
        raise InputError(f"input_ids: got {count} image placeholders; expected {expected} for the images given")
