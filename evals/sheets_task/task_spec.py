"""What a task of this kind is made of, so that training and evaluation serve more than one drawing of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..small_task.instances import Instance
from ..small_task.prefix import Prefix
from . import sequences, task
from .instances import qwen2_5_vl, qwen3_vl
from .task import VOCABULARY, ContextSize, SheetsContexts, SheetsQuestions

Named = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""By the first token of a group: features [n,D] of cells, and of each the number [n] of its token in that group."""


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A task by its parts.

    Attributes:
      sizes: of contexts, by name. backbones: makers of the small backbones, by name. sample: draws contexts. ask: draws
      questions.
      form_of: how a backbone lays a context's images out as tokens. images: every context's chunks, drawn.
      classes: numbers a page's cells [B,cells] by what each shows, one aspect at a time, and by what it absorbs.
      named: tells of the tower's features of sheets' and page's cells [B,cells,D] which token names each.
      vocabulary: its tokens.
    """

    sizes: Mapping[str, ContextSize]
    backbones: Mapping[str, Callable[[], Instance]]
    sample: Callable[..., Any]
    ask: Callable[..., SheetsQuestions]
    form_of: Callable[[Any, Any, ContextSize], Prefix]
    images: Callable[[Any], list[np.ndarray]]
    classes: Callable[[Any], dict[str, np.ndarray]]
    named: Callable[[Any, np.ndarray, np.ndarray], Named]
    vocabulary: Any

    def instance(self, backbone: str = "qwen2_5_vl") -> Instance:
        """Makes configuration and image settings of a small backbone. Raises ConfigError for one that is not known."""
        if backbone not in self.backbones:
            raise ConfigError(f"backbone {backbone!r} of this task; expected one of {', '.join(self.backbones)}")
        return self.backbones[backbone]()


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

    def flat(value):
        return value.reshape(-1)

    address = np.concatenate([flat(contexts.sheet_address), flat(contexts.page_address)])
    glyph = flat(contexts.page_glyph)
    both = np.concatenate([sheet, page])
    return {
        VOCABULARY.row: (both, address // task.COLUMN_MARKS),
        VOCABULARY.column: (both, address % task.COLUMN_MARKS),
        VOCABULARY.cell: (both, address),
        VOCABULARY.ink: (page, glyph // task.SHAPES),
        VOCABULARY.glyph: (page, glyph),
        VOCABULARY.fill: (sheet, flat(contexts.sheet_fill)),
        VOCABULARY.stripe: (sheet, flat(contexts.sheet_stripe)),
    }


SHEETS = TaskSpec(
    sizes=task.SIZES,
    backbones={"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl},
    sample=task.sample_contexts,
    ask=task.ask,
    form_of=sequences.form_of,
    images=sequences.context_images,
    classes=cell_classes,
    named=named_cells,
    vocabulary=VOCABULARY,
)
"""The sheets task."""
