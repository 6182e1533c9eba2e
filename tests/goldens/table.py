"""The prompts of the goldens' tiny models. A model itself is the configuration in its family's folder.

Free of torch, so that tests read it too. A prompt is a list of parts: a number of text tokens, `Picture`, `Clip`,
`Sound` or `Both`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
IMAGE, VIDEO, START, END, AUDIO, AUDIO_START, AUDIO_END = 301, 302, 303, 304, 305, 306, 307
MELS = 16


class Picture(NamedTuple):
    """An image, drawn by its number in the prompt."""

    height: int
    width: int


class Clip(NamedTuple):
    """A video of drawn patches."""

    grid: tuple[int, int, int]
    seconds: float = 1.0


class Sound(NamedTuple):
    """Drawn log-mel features."""

    frames: int


class Both(NamedTuple):
    """A video with its sound, interleaved."""

    grid: tuple[int, int, int]
    seconds: float
    frames: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One family, or one held-out setting of it.

    Attributes:
      family: the name of its folder.
      cases: name → prompt.
      positions: name → prompt of which only position ids are kept; no tower runs.
      new_names: whether files are written under transformers 5's own names instead of the released ones.
      frames: how videos are written: one run of placeholders, or a run for each frame.
      first: the position of the first token.
      authors: whether a text behind a video goes on after its largest position, as the authors' code has it.
      setting: the configuration of a held-out setting.
    """

    family: str
    cases: dict[str, list[Any]]
    positions: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    new_names: bool = False
    frames: bool = False
    first: int = 0
    authors: bool = False
    setting: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        return self.setting or json.loads((HERE / self.family / "config.json").read_text())

    @property
    def model(self) -> str:
        """The name of transformers' class without its ending; of families without a class the folder's."""
        if self.family in ("phi3_v", "deepseek_vl2", "deepseek_vl2_tiny"):
            return self.family
        return self.config["architectures"][0].removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def words(count: int, first: int = 0) -> list[int]:
    """Text tokens, none of which is a control token."""
    return [int(value) for value in ((first + np.arange(count)) * 37 + 11) % 290 + 3]


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with nested changes."""
    out = dict(config)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if nested else value
    return out


def pictures(first: tuple[int, int], second: tuple[int, int]) -> dict[str, list[Any]]:
    """Returns the cases of families with images."""
    one = [5, Picture(*first), 4]
    return {"text": [9], "one_image": one, "two_images": [5, Picture(*first), 2, Picture(*second), 4]}


TEXTS = ("llama2", "llama3_1", "llama_linear", "llama_yarn", "llama_dynamic", "mistral", "mistral_window", "qwen2")
TEXTS += ("qwen2_window", "qwen3", "qwen3_window", "qwen3_moe", "glm", "glm4", "gemma3_text", "gemma4_text")
TEXTS += ("gemma4_wide", "phi3_short", "phi3_long", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_vl_text")
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Linear attention goes by blocks of 64, so their text has more tokens."""
CASES = pictures((24, 40), (40, 16))
WIDE = pictures((20, 41), (33, 18))
LOW = pictures((24, 40), (5, 30))
CROPPED = pictures((15, 33), (40, 27))
LONG = pictures((24, 60), (33, 10))
FRAMES = {"video": [4, Clip((2, 4, 4)), 1, Clip((2, 2, 4)), 5]}
MIXTURES = {
    "mixed": [2, Picture(16, 24), 1, Clip((5, 4, 4), 0.35), Picture(8, 8), Clip((7, 2, 6), 1.1), 3],
    "slow": [1, Clip((3, 2, 2), 0.2), 1],
    "videos": [Clip((10, 4, 6), 2 / 3), 2, Clip((2, 8, 4), 1.7), 2],
}
OMNI = {
    "text": [9],
    "one_image": [5, Picture(24, 40), 4],
    "audio": [3, Sound(37), 4],
    "long_audio": [2, Sound(231), 2],
    "mixed": [2, Sound(16), Picture(16, 24), 2, Clip((3, 4, 4), 0.7), 1, Sound(121), 3],
    "video_with_audio": [2, Both((4, 4, 4), 0.9, 130), 2, Picture(16, 16), 2],
}
OMNI_POSITIONS = {
    "seconds": [3, Clip((3, 4, 6), 4 / 3), 2, Clip((2, 4, 4), 0.37), Sound(211), 5],
    "fast": [3, Clip((5, 4, 4), 2 / 3), 2, Clip((2, 40, 4), 0.1), 5],
    "with_audio": [3, Both((4, 4, 6), 1.0, 410), 2, Picture(16, 16), 1],
    "with_long_audio": [Both((3, 4, 4), 4 / 3, 900), 2, Both((6, 4, 4), 0.7, 205), 4],
    "wide": [2, Both((2, 60, 40), 1.0, 60), 4],
}
ROWS = [
    *(Row(name, {"text": [14]}, first=40 if name == "phi3_long" else 0) for name in TEXTS),
    *(Row(name, {"text": [150]}) for name in LINEAR),
    Row("qwen2_vl", CASES | {"video": [4, Clip((5, 4, 2)), 5]}, authors=True),
    Row("qwen2_5_vl", CASES | {"video": [4, Clip((3, 4, 6)), 5]}, MIXTURES, authors=True),
    Row("qwen3_vl", CASES | FRAMES, frames=True),
    Row("qwen3_vl_moe", CASES),
    Row("qwen3_5", CASES | {"text": [150], **FRAMES}, frames=True),
    Row("qwen3_5_moe", CASES | {"text": [150]}),
    Row("qwen2_5_omni", OMNI, OMNI_POSITIONS),
    Row("qwen3_omni", OMNI, OMNI_POSITIONS),
    Row("llava", CROPPED),
    Row("llava_next", CROPPED),
    Row("llava_onevision", pictures((20, 41), (47, 50))),
    Row("deepseek_vl", WIDE),
    Row("deepseek_vl_hybrid", WIDE),
    Row("deepseek_ocr2", pictures((40, 70), (20, 41)), new_names=True),
    Row("internvl", WIDE),
    Row("internvl_6b", WIDE),
    Row("smolvlm", WIDE),
    Row("glm4v", LOW | FRAMES, frames=True),
    Row("glm4v_moe", LOW),
    Row("mistral3", LONG),
    Row("pixtral", LONG),
    Row("gemma3", WIDE),
    Row("gemma4", WIDE | {"audio": [4, Sound(37), 2, Sound(12), 3]}),
    Row("gemma4_moe", WIDE),
    Row("kimi_vl", pictures((16, 24), (32, 8)), new_names=True),
    Row("phi3_v", WIDE),
    Row("deepseek_vl2", pictures((40, 70), (61, 37))),
    Row("deepseek_vl2_tiny", {"text": [9], "one_image": [5, Picture(320, 456), 4]}),
]
FAMILIES = {row.family: row for row in ROWS}
