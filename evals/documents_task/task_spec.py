"""What the documents task is made of: its backbone, its drawing, and what its cells are named by."""

import functools

import numpy as np

from ..sheets_task import task as sheets
from ..sheets_task.instances import LAYERS
from ..sheets_task.task_spec import Named, TaskSpec
from ..sheets_task.training import training_of
from ..small_task.instances import Instance, cell_tower, pixels, qwen2_5_vl
from . import task
from .drawing import CELL, LINE, render
from .task import VOCABULARY, Documents

PAPER, CONTRAST = 0.93, 0.25
"""Mean and deviation that pixels are normalised by: blank paper is about nothing, so that what is drawn stands out."""


@functools.cache
def instance() -> Instance:
    """Makes configuration and image settings: the sheets task's decoder; a cell's four patches see each other."""
    vision = cell_tower(width=128, heads=4, patch=LINE, merge=2, temporal=1)
    images = pixels(LINE, 2, PAPER, CONTRAST, temporal_patch_size=1, min_pixels=LINE**2)
    return Instance(qwen2_5_vl(vision, LAYERS, VOCABULARY), images)


def cell_classes(documents: Documents) -> dict[str, np.ndarray]:
    """Numbers a page's cells by the parts of their codes and items, and by the value and unit that they absorb.

    A word has no parts: two numbers that stand for nothing seen take their place, those of its entry in the list of
    words.
    """
    fill, stripe, _ = sheets.latest(documents)
    address, glyph = documents.page_address, documents.page_glyph
    first, second = np.divmod(address, sheets.COLUMN_MARKS)
    return {
        "letter": glyph // sheets.SHAPES,
        "digit": glyph % sheets.SHAPES,
        "item, first part": first,
        "item, second part": second,
        "absorbed value": np.take_along_axis(fill, address, axis=1),
        "absorbed unit": np.take_along_axis(stripe, address, axis=1),
    }


def named_cells(documents: Documents, sheet: np.ndarray, page: np.ndarray) -> Named:
    """Tells which token names what a cell shows."""

    glyph, both = documents.page_glyph.ravel(), np.concatenate([sheet, page])
    addresses = [documents.sheet_address.reshape(len(documents), -1), documents.page_address]
    item = np.concatenate([address.ravel() for address in addresses])
    document = np.concatenate([np.repeat(documents.document, address.shape[1]) for address in addresses])
    named = {
        VOCABULARY.ink: (page, glyph // sheets.SHAPES),
        VOCABULARY.digit: (page, glyph % sheets.SHAPES),
        VOCABULARY.glyph: (page, glyph),
        VOCABULARY.fill: (sheet, documents.sheet_fill.ravel()),
        VOCABULARY.stripe: (sheet, documents.sheet_stripe.ravel()),
        VOCABULARY.cell: (both, item + sheets.ADDRESSES * document),
    }
    parts = task.parts_of(document, item)
    for kind, tokens in enumerate(VOCABULARY.part):
        mine = document == kind
        named |= {first: (both[mine], part[mine]) for first, part in zip(tokens, parts, strict=True)}
    return named


DOCUMENTS = TaskSpec(
    sizes=task.SIZES,
    backbones={"qwen2_5_vl": instance},
    sample=task.sample_documents,
    ask=task.ask,
    render=render,
    cell=CELL,
    classes=cell_classes,
    named=named_cells,
    vocabulary=VOCABULARY,
    titles=1,
)
"""The documents task."""
DOCUMENTS_TRAINING = training_of(DOCUMENTS, task.DocumentsRecipe)
"""The documents task, to train on."""
