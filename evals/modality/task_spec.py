"""The ways of showing a context, each a `TaskSpec`: how it becomes tokens, and what its tower takes."""

import dataclasses
import functools
from typing import Any

import numpy as np
from einops import rearrange

from kvpatch_jax import Audio, Video
from models import FAMILIES
from models.inputs.mel import MelConfig
from models.inputs.video_frames import VideoConfig

from ..sheets_task import task as sheets
from ..sheets_task.instances import LAYERS
from ..sheets_task.task import VOCABULARY, ContextSize, SheetsContexts, SheetsVocabulary
from ..sheets_task.task_spec import SHEETS, TaskSpec
from ..small_task import instances as small
from ..small_task.instances import Instance
from ..small_task.prefix import Prefix
from . import rendered
from .sound import CELL_SAMPLES, RATE, synthesise
from .task import SIZES

FRAME_RATE = 2.0
"""Frames in a second: the two of a temporal patch show one thing: a sheet, or a row of the page, has a second."""

THETA = 1e6
"""Of the rotary positions, as released: most pairs turn slowly, so that content is compared across all of a context."""


class WordsVocabulary(SheetsVocabulary):
    """The sheets task's words, and behind them one for every pair of a fill and a stripe."""

    def __init__(self) -> None:
        super().__init__()
        colours = range(sheets.COLOURS)
        self.pair = self.add([f"fill{fill}stripe{stripe}" for fill in colours for stripe in colours])


class SoundVocabulary(WordsVocabulary):
    """Those words, and behind them what stands for sounds."""

    def __init__(self) -> None:
        super().__init__()
        self.audio, self.audio_start, self.audio_end = (self.add([word]) for word in AUDIO_WORDS)


AUDIO_WORDS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
WORDS_VOCABULARY, SOUND_VOCABULARY = WordsVocabulary(), SoundVocabulary()


@functools.cache
def cell_instance(
    cell: int = sheets.CELL_PIXELS, width: int = 96, words: SheetsVocabulary = VOCABULARY, layers: int = LAYERS
) -> Instance:
    """Makes configuration and image settings of the sheets task's backbone, whose tower sees one cell of this size."""
    vision = small.cell_tower(width=width, heads=2, patch=cell, merge=1, temporal=sheets.TEMPORAL)
    config = small.qwen2_5_vl(vision, layers, words)
    rope = dataclasses.replace(config.text.rope, theta=THETA)
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, rope=rope))
    return Instance(config, small.pixels(cell, 1, min_pixels=cell**2))


# ------------------------------------------------------------------------------------------------------- video


@dataclasses.dataclass(frozen=True)
class ClipSpec(TaskSpec):
    """Two clips in place of images: of the sheets, one a second, and of the page, one of its rows a second.

    Positions are Qwen2.5-VL's: what is shown t seconds into its clip stands 2·t positions behind the clip's start on
    the time axis.
    """

    def inputs(self, config: Any, settings: Any, contexts: SheetsContexts) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Makes the token ids [B,T] of both clips of every context, and their patches and grids."""
        form = self.form_of(config, settings, contexts.size)
        return np.tile(form.ids, (len(contexts), 1)), _processed(config, settings, self.clips(contexts))

    def clips(self, contexts: SheetsContexts) -> list[np.ndarray]:
        """Draws every context's sheets as frames uint8 [N,H,W,3], then its page's rows: B · 2 clips."""
        shown, (rows, columns) = [], contexts.size.page_shape
        for fronts, page in zip(*self.render(contexts), strict=True):
            strips = rearrange(page, "(row h) (w column) c -> row h (w column) c", row=rows, w=columns)
            shown += [np.repeat(frames, sheets.TEMPORAL, axis=0) for frames in (fronts, strips)]
        return shown

    def form_of(self, config: Any, settings: Any, size: ContextSize) -> Prefix:
        """Finds how contexts of this size are laid out as two clips."""
        return _clip_form(config, settings, size, self.cell)


@functools.lru_cache
def _clip_form(config: Any, settings: Any, size: ContextSize, cell: int) -> Prefix:
    (high, wide), (rows, columns) = size.sheet_shape, size.page_shape
    ids, local = [], []
    for seconds, height, width in ((size.sheets, high, wide), (rows, 1, columns)):
        blank = np.zeros((sheets.TEMPORAL * seconds, height * cell, width * cell, 3), np.uint8)
        arrays = _processed(config, settings, [blank])
        ids.append(np.array(config.family.video.tokens(config, arrays, 0, None), np.int32))
        local.append(config.family.positions(config, ids[-1], arrays).astype(np.int32))
    return Prefix(tuple(ids), tuple(local), config.video_token)


def _processed(config: Any, settings: Any, clips: list[np.ndarray]) -> dict[str, np.ndarray]:
    videos = [Video(frames, rate=FRAME_RATE) for frames in clips]
    return config.family.video.process(videos, VideoConfig(settings, "{}"))


# ------------------------------------------------------------------------------------------------------- words


@dataclasses.dataclass(frozen=True)
class WordsSpec(TaskSpec):
    """Words of the vocabulary in place of images, between the same marks: no tower runs, and ids differ by context.

    An entry is a line "address colours", with a word for both of its colours; a cell of the page is "address glyph".
    """

    def inputs(self, config: Any, settings: Any, contexts: SheetsContexts) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Makes the token ids [B,T] of all chunks of every context."""
        words = WORDS_VOCABULARY
        colours = words.pair + sheets.COLOURS * contexts.sheet_fill + contexts.sheet_stripe
        entries = [words.cell + contexts.sheet_address, colours, np.full_like(colours, words.end)]
        glyphs = words.glyph + contexts.page_glyph
        cells = [words.cell + contexts.page_address, glyphs, np.full_like(glyphs, words.end)]
        pages = rearrange(np.stack(cells), "word b cell -> b (cell word)")
        chunks = [*rearrange(np.stack(entries), "word b sheet entry -> sheet b (entry word)"), pages]
        marked = [np.pad(chunk, ((0, 0), (1, 1)), constant_values=((0, 0), _marks(config))) for chunk in chunks]
        return np.concatenate(marked, axis=1).astype(np.int32), {}

    def last_words(self, size: ContextSize) -> np.ndarray:
        """Finds where in the prefix the last word of every entry, then of every cell of the page stands."""
        counts = [*[size.entries // size.sheets] * size.sheets, size.cells]
        starts = np.cumsum([0, *(3 * count + 2 for count in counts[:-1])])
        return np.concatenate([start + 2 + 3 * np.arange(count) for start, count in zip(starts, counts, strict=True)])

    def form_of(self, config: Any, settings: Any, size: ContextSize) -> Prefix:
        """Finds how contexts of this size are laid out as words; the ids are marks with padding between them."""
        first, last = _marks(config)
        counts = [*[3 * size.entries // size.sheets] * size.sheets, 3 * size.cells]
        ids = tuple(np.array([first, *[VOCABULARY.pad] * count, last], np.int32) for count in counts)
        arrays: dict[str, Any] = {}
        local = tuple(config.family.positions(config, chunk, arrays).astype(np.int32) for chunk in ids)
        return Prefix(ids, local, config.image_token)


def _marks(config: Any) -> tuple[int, int]:
    return config.vision_start_token, config.vision_end_token


# ------------------------------------------------------------------------------------------------------- sound


MELS = MelConfig(feature_size=128)
"""How sounds become features, as Qwen2.5-Omni's release has it."""


@functools.cache
def sound_instance() -> Instance:
    """Makes configuration and sound settings of a small Qwen2.5-Omni: the same decoder, an encoder of two layers.

    What the encoder convolves and attends over at once is 40 ms, one cell.
    """
    raw, words = cell_instance().config.to_dict(), SOUND_VOCABULARY
    # The tower of images is there because the architecture has one; nothing runs it.
    vision = raw["vision_config"] | {"depth": 1, "hidden_size": 32, "intermediate_size": 32}
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "use_sliding_window")
    audio = {
        "num_mel_bins": MELS.feature_size,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 192,
        "d_model": 96,
        "n_window": 2,
        "max_source_positions": 2,
        "output_dim": small.WIDTH,
    }
    whole = {
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "text_config": {name: raw[name] for name in keys} | {"vocab_size": len(words), "tie_word_embeddings": False},
        "vision_config": vision,
        "audio_config": audio,
        "image_token_index": words.image,
        "video_token_index": words.video,
        "audio_token_index": words.audio,
        "vision_start_token_id": words.vision_start,
        "vision_end_token_id": words.vision_end,
        "audio_start_token_id": words.audio_start,
        "audio_end_token_id": words.audio_end,
        "position_id_per_seconds": 25,
        "tie_word_embeddings": False,
    }
    (architecture,) = whole["architectures"]
    return Instance(FAMILIES[architecture].config(whole, "exact", None), MELS)


@dataclasses.dataclass(frozen=True)
class SoundSpec(TaskSpec):
    """Sounds in place of images: one of every sheet, and one of the page."""

    def settings(self, backbone: Any) -> Any:
        """Returns the backbone's sound settings."""
        return backbone.audio_config

    def inputs(self, config: Any, settings: Any, contexts: SheetsContexts) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Makes the token ids [B,T] of all sounds of every context, and their log-mel features."""
        form = self.form_of(config, settings, contexts.size)
        arrays = config.family.audio.process(synthesise(contexts), settings)
        return np.tile(form.ids, (len(contexts), 1)), arrays

    def form_of(self, config: Any, settings: Any, size: ContextSize) -> Prefix:
        """Finds how contexts of this size are laid out as sounds."""
        return _sound_form(config, settings, size)


@functools.lru_cache
def _sound_form(config: Any, settings: Any, size: ContextSize) -> Prefix:
    ids, local = [], []
    for cells in (*[size.entries // size.sheets] * size.sheets, size.cells):
        arrays = config.family.audio.process([Audio(np.ones(cells * CELL_SAMPLES, np.float32), rate=RATE)], settings)
        ids.append(np.array(config.family.audio.tokens(config, arrays, 0, None), np.int32))
        local.append(config.family.positions(config, ids[-1], arrays).astype(np.int32))
    return Prefix(tuple(ids), tuple(local), config.audio_token)


# -------------------------------------------------------------------------------------------------- all of them

IMAGES = dataclasses.replace(SHEETS, sizes=SIZES, backbones={"images": cell_instance})


def _of(kind: type[TaskSpec], name: str, **changes: Any) -> TaskSpec:
    fields = {field.name: getattr(IMAGES, field.name) for field in dataclasses.fields(IMAGES)}
    return kind(**{**fields, "backbones": {name: cell_instance}, **changes})


MODALITIES: dict[str, TaskSpec] = {
    "images": IMAGES,
    "video": _of(ClipSpec, "video"),
    "rendered": _of(
        TaskSpec,
        "rendered",
        render=rendered.render,
        cell=rendered.CELL,
        backbones={"rendered": functools.partial(cell_instance, rendered.CELL)},
    ),
    # Their tower of images is there because the architecture has one; nothing runs it.
    "words": _of(
        WordsSpec,
        "words",
        backbones={"words": functools.partial(cell_instance, width=16, words=WORDS_VOCABULARY, layers=LAYERS + 1)},
        vocabulary=WORDS_VOCABULARY,
    ),
    "sound": _of(SoundSpec, "sound", backbones={"sound": sound_instance}, vocabulary=SOUND_VOCABULARY),
}
"""The specs by name; each has one backbone, of that name."""
