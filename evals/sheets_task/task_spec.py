"""What a task of this kind is made of, so that training and evaluation serve more than one drawing of it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..small_task.instances import Instance
from ..small_task.prefix import Prefix, by_context, lay_out
from . import task
from .instances import qwen2_5_vl, qwen3_5, qwen3_vl
from .task import VOCABULARY, ContextSize, SheetsContexts, SheetsQuestions

Named = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""By the first token of a group: features [n,D] of cells, and of each the number [n] of its token in that group."""


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task by its parts.

    Attributes:
      sizes: of contexts, by name. backbones: makers of the small backbones, by name.
      sample: draws contexts. ask: draws questions. render: draws sheets [B, sheets, H, W, 3] and pages [B, H, W, 3].
      cell: pixels of a cell's side. titles: rows of cells that an image has above its own.
      classes: numbers a page's cells [B,cells] by what each shows, one aspect at a time, and by what it absorbs.
      named: tells of the tower's features of sheets' and page's cells [B,cells,D] which token names each.
      vocabulary: its tokens.
    """

    sizes: Mapping[str, ContextSize]
    backbones: Mapping[str, Callable[[], Instance]]
    sample: Callable[..., Any]
    ask: Callable[..., SheetsQuestions]
    render: Callable[[Any], tuple[np.ndarray, np.ndarray]]
    cell: int
    classes: Callable[[Any], dict[str, np.ndarray]]
    named: Callable[[Any, np.ndarray, np.ndarray], Named]
    vocabulary: Any
    titles: int = 0

    def instance(self, backbone: str = "qwen2_5_vl") -> Instance:
        """Makes configuration and image settings of a small backbone. Raises ConfigError for one that is not known."""
        if backbone not in self.backbones:
            raise ConfigError(f"backbone of the task: got {backbone!r}; expected one of {', '.join(self.backbones)}")
        return self.backbones[backbone]()

    def form_of(self, config: Any, images: Any, size: ContextSize) -> Prefix:
        """Finds the form that a backbone of this configuration and these image settings gives contexts of this size."""
        return _form_of(config, images, size, self.cell, self.titles)

    def inputs(self, config: Any, settings: Any, contexts: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Makes the token ids [B,T] of all chunks of every context, and the arrays that a tower takes beside them."""
        form = self.form_of(config, settings, contexts.size)
        arrays = config.family.vision.process(self.images(contexts), settings)
        return np.tile(form.ids, (len(contexts), 1)), arrays

    def images(self, contexts: Any) -> list[np.ndarray]:
        """Draws every context's sheets in their order, then its page: B · chunks images uint8 [H,W,3]."""
        return by_context(*self.render(contexts))


@functools.lru_cache
def _form_of(config: Any, images: Any, size: ContextSize, cell: int, titles: int) -> Prefix:
    sheet, page = (((rows + titles) * cell, columns * cell) for rows, columns in (size.sheet_shape, size.page_shape))
    return Prefix(*lay_out(config, images, sheet, page, size.sheets), config.image_token)


def cell_classes(contexts: SheetsContexts) -> dict[str, np.ndarray]:
    """Numbers a page's cells by what each shows, one aspect at a time, and by the colours that it absorbs."""
    fill, stripe, _ = task.latest(contexts)
    address, glyph = contexts.page_address, contexts.page_glyph
    return {
        "shape": glyph % task.SHAPES,
        "ink": glyph // task.SHAPES,
        "row mark": address // task.COLUMN_MARKS,
        "column mark": address % task.COLUMN_MARKS,
        "absorbed fill": np.take_along_axis(fill, address, axis=1),
        "absorbed stripe": np.take_along_axis(stripe, address, axis=1),
    }


def named_cells(contexts: SheetsContexts, sheet: np.ndarray, page: np.ndarray) -> Named:
    """Tells which token names what a cell of the sheets task shows."""

    address = np.concatenate([contexts.sheet_address.ravel(), contexts.page_address.ravel()])
    glyph, both = contexts.page_glyph.ravel(), np.concatenate([sheet, page])
    return {
        VOCABULARY.row: (both, address // task.COLUMN_MARKS),
        VOCABULARY.column: (both, address % task.COLUMN_MARKS),
        VOCABULARY.cell: (both, address),
        VOCABULARY.ink: (page, glyph // task.SHAPES),
        VOCABULARY.glyph: (page, glyph),
        VOCABULARY.fill: (sheet, contexts.sheet_fill.ravel()),
        VOCABULARY.stripe: (sheet, contexts.sheet_stripe.ravel()),
    }


SHEETS = TaskSpec(
    sizes=task.SIZES,
    backbones={
        "qwen2_5_vl": qwen2_5_vl,
        "qwen3_vl": qwen3_vl,
        "qwen3_5": qwen3_5,
    },
    sample=task.sample_contexts,
    ask=task.ask,
    render=task.render,
    cell=task.CELL_PIXELS,
    classes=cell_classes,
    named=named_cells,
    vocabulary=VOCABULARY,
)
"""The sheets task."""
