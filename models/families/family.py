"""What tells one family of checkpoints from another: a handful of functions, and no class to derive from.

A family reads `config.json` into a `FamilyConfig`, names a module with `.decoder` and, with images,
`.encode(pixel_values, plan)`, and says where its tensors go. `docs/guides/extending.md` writes one.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from kvpatch_jax.errors import WeightsError

from ..checkpoints import LoRASource, RenamedSource, TensorEntry, TensorSource, rename, same_tensors, translate
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import Regime
from ..towers.common import place_features
from .config_file import ConfigFile, read_config

Arrays = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
Run = Sequence[int | str]
"""Token ids, and texts that are yet to be tokenized."""
VIDEO_SOUNDS = "video_sounds"
"""Of videos, for `Medium.tokens`: the number of each one's sound among the prompt's sounds, or None."""


@runtime_checkable
class Config(Protocol):
    """What a backbone asks of its configuration."""

    @property
    def text(self) -> DecoderConfig:
        """The decoder's configuration."""
        ...

    @property
    def family(self) -> "Family":
        """The family that reads it."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json`, which the family reads back."""
        ...


@dataclasses.dataclass(frozen=True)
class Vision:
    """What a family does with images on the host. Arrays are what the processor makes of all images of a prompt.

    Attributes:
      settings: directory → image settings, a dataclass with `.save(directory)`.
      process: (images, settings) → arrays, `pixel_values` among them.
      tokens: (config, arrays, index, tokenizer) → the token ids that stand for image `index`, start and end included.
      plan: (config, input_ids [B,T], arrays) → the index arrays that `encode` takes beside the pixels (None when there
        are no images and no videos); raises InputError where ids, patches and grids do not match. The pixels are
        `pixel_values` and behind them `pixel_values_videos`.
      fills: config → the plan's tables of patch numbers (1), feature numbers (features per tile) or numbers of the rows
        of another table (its name), for padding to buckets: the number one past the last stands for none.
      mark: config → the token by which a chat template places an image, where that is another than the placeholder, and
        the text that the processor writes around each; None where the template writes the placeholder.
      spelling: a regular expression of what stands for an image in a rendered chat, where no token does:
        the texts between the marks are tokenized one by one, each with the tokenizer's own start and end tokens.
    """

    settings: Callable[[str | os.PathLike[str]], Any]
    process: Callable[[Sequence[Any], Any], dict[str, np.ndarray]]
    tokens: Callable[[Any, Arrays, int, Any], Run]
    plan: Callable[[Any, np.ndarray, Arrays], Mapping[str, Any] | None]
    fills: Callable[[Any], Mapping[str, int | str]]
    mark: Callable[[Any], tuple[int, str]] | None = None
    spelling: str | None = None


@dataclasses.dataclass(frozen=True)
class Medium:
    """What a family does with videos, or with sounds, on the host.

    Attributes:
      settings: directory → settings, a dataclass with `.save(directory)`.
      process: (items, settings) → arrays of all videos (or sounds) of a prompt, by transformers' names.
      tokens: (config, arrays, index, tokenizer) → what stands for item `index`, start and end included: token ids, and
        texts (of a frame's time, say) among them; `arrays` are those of `process`, of videos with sounds theirs too.
      written: (config, tokenizer) → what a chat template writes for an item, as texts: its placeholder, and what may
        stand before and after it that `tokens` has too.
      template: a chat template for conversations with such items, where the released one leaves them out; else empty.
      plan, fills: of a tower of its own, as in `Vision`, and None where the tower is that of images: the plan is what
        the module's `.encode_audio(inputs, plan)` takes, and `inputs` where they are not `input_features` as they are.
    """

    settings: Callable[[str | os.PathLike[str]], Any]
    process: Callable[[Sequence[Any], Any], dict[str, np.ndarray]]
    tokens: Callable[[Any, Arrays, int, Any], Run]
    written: Callable[[Any, Any], tuple[str, str, str]]
    template: str = ""
    plan: Callable[[Any, np.ndarray, Arrays], Mapping[str, Any] | None] | None = None
    fills: Callable[[Any], Mapping[str, int | str]] | None = None


def joined_arrays(config: Config, arrays: Mapping[str, Arrays], order: Sequence[str]) -> dict[str, Any]:
    """Returns the arrays of a prompt's images, videos and sounds as one table: the rule of families that give each
    their own names.
    """
    return {name: array for part in arrays.values() for name, array in part.items()}


def count_positions(config: Config, input_ids: np.ndarray, arrays: Arrays) -> np.ndarray:
    """Returns positions 0, 1, 2, … of one prompt's tokens, int32 [T]: the rule of every family without M-RoPE."""
    return np.arange(len(input_ids), dtype=np.int32)


def image_runs(config: Config, input_ids: np.ndarray) -> np.ndarray:
    """Returns how many placeholders of images (or of a video's frame) follow each one without a gap, int32 [B,T]; 0 of
    other tokens.

    That is how far an image's tokens see behind their own where they see each other.
    """
    seen = set(placeholders(config)) - set(sound_placeholders(config))
    image = np.isin(np.asarray(input_ids), sorted(seen))
    places, length = np.arange(image.shape[1]), image.shape[1]
    # The first token from each one on that is of no image; behind it the run does not go on.
    ends = np.minimum.accumulate(np.where(image, length, places)[:, ::-1], axis=1)[:, ::-1]
    return np.where(image, ends - places - 1, 0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes:
      architecture: the name in `config.json`.
      read: `config.json` → configuration.
      module: (config, rngs) → nnx module with `.decoder` and, in a family with images, `.encode(pixel_values, plan)`,
        which gives image features [n,E,D]: themselves, then one array per deepstack layer.
      entries: (config, shapes) → where tensors go. `shapes` are those of the file's tensors, for families whose
        releases differ; empty when saving.
      positions: (config, input_ids [T], arrays) → positions [T] or [T,A] of one prompt.
      vision: None for a text family.
      video, audio: what is done with videos and with sounds; None for a family that takes none.
      join: (config, arrays of "image", "video", "audio" where there are such, these words in the prompt's order) → the
        prompt's arrays. A family whose images and videos have one placeholder puts their pixels in the prompt's order.
      model_type: of `config.json`, whose class of transformers, where there is one, completes it.
      ahead: (config, input_ids [B,T]) → how many tokens behind its own each one sees, int32 [B,T], or None of a
        configuration that has none do so; None where attention is causal throughout.
      template: a chat template for messages with images, for directories of which only `tokenizer_config.json` has one,
        that knows none; None where directories bring theirs.
      amend: (config.json, directory) → config.json with what only the tokenizer's files say; None where it says all.
    """

    architecture: str
    read: Callable[[ConfigFile], Any]
    module: Callable[[Any, nnx.Rngs], Any]
    entries: Callable[[Any, Shapes], list[TensorEntry]]
    positions: Callable[[Any, np.ndarray, Arrays], np.ndarray] = count_positions
    vision: Vision | None = None
    video: Medium | None = None
    audio: Medium | None = None
    join: Callable[[Any, Mapping[str, Arrays], Sequence[str]], dict[str, Any]] = joined_arrays
    model_type: str = ""
    ahead: Callable[[Any, np.ndarray], np.ndarray | None] | None = None
    template: str | None = None
    amend: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] | None = None

    def config(self, raw: Mapping[str, Any], angles: str, regime: Regime = None) -> Any:
        """Reads `config.json`; angles and regime as `models.load` takes them.

        Raises:
          ConfigError: values that make no sense, or that are not built.
        """
        return read_config(self, raw, angles, regime)

    def settings(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Reads what a directory says of images, videos and sounds: by `ModelBackbone`'s names, None where the family
        takes none.
        """
        media = {"image": self.vision, "video": self.video, "audio": self.audio}
        found = {name: None if medium is None else medium.settings(directory) for name, medium in media.items()}
        return {f"{name}_config": settings for name, settings in found.items()}

    def opened(
        self, config: Any, source: TensorSource, adapter: str | os.PathLike[str] | None = None
    ) -> tuple[Any, TensorSource]:
        """Returns a checkpoint's tensors under the names of `entries`, with a LoRA adapter merged; and the
        configuration with head and embedding tied or not, as the tensors show.

        In a tied model a head that repeats the embedding is left out, one that differs counts, and one that stands
        alone is the embedding.

        Raises:
          ConfigError, WeightsError: as `rename` and `LoRASource`, or an adapter of an embedding that is the head too.
        """
        known = self.knows(config)
        head, embedding = self.head_names(config)
        source = rename(source, known)
        if config.text.tied_embeddings and head in source.tensors and embedding not in source.tensors:
            names = {name: name for name in source.tensors if name != head}
            source = RenamedSource(source, names | {embedding: head})
        if adapter is not None:
            source = LoRASource(source, adapter, lambda name: translate(known, name))
            if config.text.tied_embeddings and embedding in source.changed and head not in source.changed:
                raise WeightsError(
                    f"{os.fspath(adapter)}: got a change of {embedding!r}, which is the output head too; expected an "
                    f"adapter that leaves it, or one that holds {head!r} as well"
                )

        own = head in source.tensors and config.text.tied_embeddings and not same_tensors(source, head, embedding)
        return (with_tie(config, False) if own else config), source

    def knows(self, config: Config) -> Callable[[str], bool]:
        """Returns a function that says whether a name is one of the model's, whatever its numbers and however
        experts lie.
        """
        names = {_without_numbers(entry.pattern) for entry in self.entries(config, {})}
        experts = tuple({name.partition(_EXPERTS)[0] + _EXPERTS for name in names if _EXPERTS in name})
        return lambda name: _without_numbers(name) in names or _without_numbers(name).startswith(experts)

    def head_names(self, config: Config) -> tuple[str, str]:
        """Returns what the file calls the output head and the embedding."""
        names = {entry.path: entry.pattern for entry in self.entries(config, {})}
        return names["decoder", "head", "kernel"], names["decoder", "embedding"]


_EXPERTS = ".mlp.experts."


def _without_numbers(name: str) -> str:
    """Returns a tensor's name, or an entry's pattern, with `#` for every number in it."""
    return re.sub(r"(?<=\.)(?:\d+|\{\w+\})(?=\.)", "#", name)


def placeholders(config: Any) -> tuple[int, ...]:
    """Returns token ids in whose places features are put: images' and, where the family has them, videos' and
    sounds'.
    """
    found = (getattr(config, name, None) for name in ("image_token", "video_token", "audio_token"))
    return tuple(token for token in found if token is not None)


def control_tokens(config: Any) -> set[int]:
    """Returns the token ids that a configuration names: placeholders, starts and ends."""
    names = [field.name for field in dataclasses.fields(config)]
    named = [getattr(config, name) for name in names if name.endswith(("_token", "_tokens", "edges"))]
    numbers = [number for value in named for number in (value if isinstance(value, tuple) else (value,))]
    return {number for number in numbers if isinstance(number, int)}


def sound_placeholders(config: Any) -> tuple[int, ...]:
    """Returns the token ids in whose places features of sounds are put."""
    token = getattr(config, "audio_token", None)
    return () if token is None else (token,)


def count_of(input_ids: np.ndarray, pads: tuple[int, ...]) -> int:
    """Returns how many of these tokens ids hold."""
    return int(np.isin(input_ids, pads).sum())


def feature_order(input_ids: np.ndarray, pads: tuple[int, ...]) -> Int32[np.ndarray, " E"] | None:
    """Returns the numbers of features, which lie kind by kind as `pads` does, in the order of their placeholders; None
    where that is the order in which they lie.
    """
    kinds = np.argmax(input_ids.reshape(-1, 1) == np.array(pads), axis=1)[np.isin(input_ids, pads).reshape(-1)]
    if not kinds.size or (np.diff(kinds) >= 0).all():
        return None
    order = np.empty(kinds.size, np.int32)
    order[np.argsort(kinds, kind="stable")] = np.arange(kinds.size)
    return order


def pixels_of(arrays: Arrays) -> Any:
    """Returns the pixels of a prompt's images, and those of its videos behind them; None where there are neither."""
    found = [arrays[name] for name in ("pixel_values", "pixel_values_videos") if arrays.get(name) is not None]
    return found[0] if len(found) == 1 else np.concatenate(found) if found else None


def feature_arrays(config: Any) -> int:
    """Returns how many arrays a tower makes of an image: its features, and one more per deepstack layer."""
    return 1 + len(getattr(config.vision, "deepstack_layers", ()))


def embed_tokens(
    decoder: Decoder, input_ids: Int[Array, "B T"], features: Float[Array, "n E D"] | None, pads: tuple[int, ...]
) -> tuple[Float[Array, "B T D"], Float[Array, "B T deep _"] | None]:
    """Returns token embeddings with image features put, in order, where the placeholders stand; and the deepstack
    features (0 elsewhere), or what else layers take of the tokens (`Decoder.of_tokens`); None where there is neither.
    """
    embeddings = decoder.embed(input_ids)
    if features is None:
        return embeddings, decoder.of_tokens(input_ids, embeddings, pads)

    here = jnp.isin(input_ids, jnp.array(pads))
    placed = place_features(embeddings, features[0], here)
    if len(features) == 1:
        return placed, decoder.of_tokens(input_ids, placed, pads)
    deep = [place_features(jnp.zeros_like(embeddings), layer, here) for layer in features[1:]]
    return placed, jnp.stack(deep, axis=2)


def abstract(config: Any) -> Any:
    """Returns the backbone's module with shapes instead of values."""
    return nnx.eval_shape(lambda: config.family.module(config, nnx.Rngs(0)))


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Returns the parameters as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_parameters(config: Any, values: dict[str, Any]) -> Any:
    """Returns the module of this configuration holding these parameters (nested as `parameters` gives them)."""
    model = abstract(config)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(model, state)
    return model


def tower_heads(config: Any) -> dict[str, int]:
    """Returns the attention heads of each tower of a configuration, by the first name of the tower's parameters."""
    # DeepSeek-VL-7B has a second tower for images, DeepSeek-OCR-2 an encoder behind SAM.
    parts = {"visual": "vision", "high": "high", "audio": "audio", "encoder": "encoder"}
    towers: dict[str, Any] = {name: getattr(config, part, None) for name, part in parts.items()}
    # Where several heads share one of keys, that many stay together.
    return {name: getattr(tower, "kv_heads", tower.heads) for name, tower in towers.items() if hasattr(tower, "heads")}


def with_tie(config: Any, tied: bool) -> Any:
    """Returns the configuration with head and embedding tied or not, in what it writes as well."""
    if config.text.tied_embeddings == tied:
        return config

    changes: dict[str, Any] = {"text": dataclasses.replace(config.text, tied_embeddings=tied)}
    if hasattr(config, "raw"):
        raw: dict[str, Any] = json.loads(config.raw)
        for part in (raw, *(raw[name] for name in ("text_config", "language_config") if raw.get(name) is not None)):
            part["tie_word_embeddings"] = tied
        changes["raw"] = json.dumps(raw, sort_keys=True)

    return dataclasses.replace(config, **changes)


def with_dtype(config: Any, dtype: str) -> Any:
    """Returns the configuration with every part of it that has a dtype in this one."""
    parts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    typed = {name: part for name, part in parts.items() if dataclasses.is_dataclass(part) and hasattr(part, "dtype")}
    replaced = {name: dataclasses.replace(part, dtype=dtype) for name, part in typed.items()}  # type: ignore[type-var]
    return dataclasses.replace(config, **replaced)
