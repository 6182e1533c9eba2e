"""What a directory says of images, videos and sounds; transformers' processors of images and sounds.

Those of Pillow and NumPy are called, by the exact name of their module: they need no PyTorch, and what is installed
beside them changes none of their values.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange

from kvpatch_jax.cache import ImageSource, decoded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table

PROCESSOR_FILE = "processor_config.json"
CONFIG_FILE = "preprocessor_config.json"
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_FILES = {"image": (CONFIG_FILE,), "video": ("video_preprocessor_config.json", CONFIG_FILE), "audio": (CONFIG_FILE,)}
MAX_ASPECT_RATIO = 200
_UNUSED = {"num_crops", "num_soft_tokens_per_image", "batch_num_images", "pixel_attention_mask"}
"""Of what processors make: what follows from the rest."""
_FAILURES = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, MemoryError)
"""What transformers' processors raise for settings or inputs that they cannot use."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of a directory for one medium.

    Attributes:
      options: in JSON, so that settings are hashable.
      sort: "image", "video" or "audio".
      processor: of transformers, as "folder.Name"; empty where this library processes by its own rules.
    """

    options: str
    sort: str = "image"
    processor: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any], sort: str = "image", processor: str = "") -> "Settings":
        """Returns settings of a table of options, with the processor built once to check them.

        Raises:
          ConfigError: options that transformers' processor does not take.
        """
        settings = cls(json.dumps(dict(options), sort_keys=True), sort, processor)
        if processor:
            settings.built()
        return settings

    def __getitem__(self, name: str) -> Any:
        """Returns an option, None for one that is absent."""
        return _table(self.options).get(name)

    def built(self) -> Any:
        """Returns transformers' processor with these options."""
        return _built(self.processor, self.options)

    def length(self, name: str) -> int:
        """Returns an option that is one length: a number, equal sides, or one edge.

        Raises:
          ConfigError: it is not.
        """
        value = self[name]
        sides = set(value.values()) - {None} if isinstance(value, Mapping) else {value}
        side = sides.pop() if len(sides) == 1 else None
        if type(side) is not int or side < 1:
            raise ConfigError(f"{self.sort} {name}: got {value!r:.80}; expected one length")
        return side

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the options to their part of `processor_config.json`, as transformers does. Returns its path."""
        path = Path(directory) / PROCESSOR_FILE
        table = read_table(path) | {_PARTS[self.sort]: _table(self.options)}
        path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


@functools.lru_cache(maxsize=64)
def _table(options: str) -> dict[str, Any]:
    return json.loads(options)


@functools.lru_cache(maxsize=64)
def _built(processor: str, options: str) -> Any:
    folder, _, name = processor.partition(".")
    if name == "Gemma4Audio":
        module, name = "feature_extraction_gemma4", "Gemma4AudioFeatureExtractor"
    else:
        module, name = f"image_processing_pil_{folder}", f"{name}ImageProcessorPil"
    cls = getattr(require(f"transformers.models.{folder}.{module}", "transformers"), name)
    try:
        return cls.from_dict(_table(options))
    except _FAILURES as error:
        raise ConfigError(f"{CONFIG_FILE}: got options with which {name} fails ({error}); expected others") from error


def read_options(directory: str | os.PathLike[str], sort: str) -> dict[str, Any]:
    """Reads what a directory says of a medium, from the file that transformers takes it from: `processor_config.json`
    where it has a part for it, else `video_preprocessor_config.json` for videos, else `preprocessor_config.json`.

    Raises:
      ConfigError: a file that is no table in JSON.
    """
    root = Path(directory)
    found = read_table(root / PROCESSOR_FILE).get(_PARTS[sort])
    for name in _FILES[sort]:
        found = found or read_table(root / name)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{root / PROCESSOR_FILE}: got {_PARTS[sort]} {found!r:.80}; expected a table")
    return dict(found)


def _needed(options: Mapping[str, Any], directory: str | os.PathLike[str]) -> dict[str, Any]:
    if not options:
        raise ConfigError(f"{Path(directory) / CONFIG_FILE}: got no such file; expected a directory's image settings")
    return dict(options)


Reader = Callable[[str | os.PathLike[str]], Settings]


def processor(*names: str, **forced: Any) -> Reader:
    """Returns a function that reads a directory's image settings for a processor of transformers.

    Args:
      names: "folder.Name" of the classes that a directory may name, that of directories that name another one first.
      forced: options that the family's processor in transformers sets whatever the file says.
    """
    by_type = {f"{name.partition('.')[2]}ImageProcessor": name for name in names}

    def read(directory: str | os.PathLike[str]) -> Settings:
        options = _needed(read_options(directory, "image"), directory)
        named = str(options.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
        name = by_type.get(named, names[0])
        options["image_processor_type"] = f"{name.partition('.')[2]}ImageProcessor"
        return Settings.of(options | forced, "image", name)

    return read


def own_settings(
    sort: str,
    adjust: Callable[[dict[str, Any], Path], Mapping[str, Any]] | None = None,
    only: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> Reader:
    """Returns a function that reads a directory's settings for a medium that this library processes by its own rules.

    It raises ConfigError for an option of another kind than its default.

    Args:
      adjust: (the file's options, directory) → options by the names of `defaults`.
      only: options of which one value is built; it raises ConfigError for another.
      defaults: what absent options mean; None for one without a default.
    """

    def read(directory: str | os.PathLike[str]) -> Settings:
        given = {name: value for name, value in read_options(directory, sort).items() if value is not None}
        given = given if adjust is None else adjust(given, Path(directory))
        given = _needed(given, directory) if sort == "image" else given
        for name, value in (only or {}).items():
            if given.get(name, value) != value:
                raise ConfigError(f"{sort} {name}: got {given[name]!r:.80}, which is not built; expected {value!r}")
        for name, default in defaults.items():
            value = given.get(name, default)
            if default is not None and not _alike(value, default):
                raise ConfigError(f"{sort} {name}: got {value!r:.80}; expected a value like {default!r}")
        return Settings.of(defaults | dict(given), sort)

    return read


def _alike(value: Any, default: Any) -> bool:
    """Returns whether an option is of the kind of its default, and positive where that is a number."""
    if isinstance(default, bool | str | Mapping):
        return isinstance(value, bool if isinstance(default, bool) else str if isinstance(default, str) else Mapping)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(default) and all(map(_number, value))
    return _number(value) and value > 0 and (isinstance(default, float) or isinstance(value, int))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_images(images: Sequence[ImageSource]) -> list[np.ndarray]:
    """Returns images as uint8 RGB [H, W, 3].

    Raises:
      InputError: none at all; one that cannot be read, or is more than 200 times longer than wide.
    """
    if not len(images):
        raise InputError("images: got none; expected at least one")

    found = []
    for number, source in enumerate(images):
        name = os.fspath(source) if isinstance(source, str | os.PathLike) else f"image {number}"
        found.append(decoded(source, name))
        height, width = found[-1].shape[:2]
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InputError(
                f"{name}: got {height}×{width} pixels; expected sides within a ratio of {MAX_ASPECT_RATIO}"
            )

    return found


def process_images(images: Sequence[ImageSource], settings: Settings, **options: Any) -> dict[str, np.ndarray]:
    """Returns the arrays that transformers' processor makes of images: float32, and whole numbers as int32.

    Args:
      options: of the call, beside those of the directory.

    Raises:
      InputError: as `read_images`, or images that the processor does not take with these settings.
    """
    found, built = read_images(images), settings.built()
    try:
        made = built(found, return_tensors="np", input_data_format="channels_last", **options)
    except _FAILURES as error:
        shown = f"{type(built).__name__} fails with {[list(image.shape[:2]) for image in found]} pixels"
        raise InputError(f"images: {shown} and the directory's settings ({error}); expected others") from error
    return {name: compact(value) for name, value in made.items() if name not in _UNUSED}


def compact(value: Any) -> np.ndarray:
    """Returns an array with whole numbers in 32 bits."""
    value = np.asarray(value)
    return value.astype(np.int32) if value.dtype.kind in "iu" else value


def pixtral_settings(merge: int) -> Reader:
    """Returns a function that reads a directory's settings of Pixtral's images, and from its `config.json` how many
    pixels a patch and a token show, which the processor's own files may leave out or count without merging.

    Args:
      merge: side of the square of patches that becomes one token, where `config.json` does not say it.
    """
    read_image = processor("pixtral.Pixtral")

    def read(directory: str | os.PathLike[str]) -> Settings:
        settings, model = read_image(directory), read_table(Path(directory) / "config.json")
        vision = model.get("vision_config")
        patch = vision.get("patch_size", 16) if isinstance(vision, Mapping) else 16
        sides = {"patch_size": patch, "spatial_merge_size": model.get("spatial_merge_size", merge)}
        for name, side in sides.items():
            if type(side) is not int or side < 1:
                raise ConfigError(f"config.json: got {name} {side!r}; expected a positive whole number")
        return Settings.of(_table(settings.options) | sides, processor=settings.processor)

    return read


def process_pixtral(images: Sequence[ImageSource], settings: Settings) -> dict[str, np.ndarray]:
    """Returns `pixel_values` [P,3,patch,patch], the patches of all images in raster order, where transformers pads
    images to one size; and `image_sizes` [n,2], (height, width) in pixels.
    """
    patch = settings["patch_size"]
    made = process_images(images, settings, patch_size=patch * settings["spatial_merge_size"])
    cells = []
    for pixels, (height, width) in zip(made["pixel_values"], made["image_sizes"], strict=True):
        inner = pixels[:, :height, :width]
        cells.append(rearrange(inner, "C (row y) (column x) -> (row column) C y x", y=patch, x=patch))
    return {"pixel_values": np.concatenate(cells), "image_sizes": made["image_sizes"]}
