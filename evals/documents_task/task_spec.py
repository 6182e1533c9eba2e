"""What the documents task is made of: its backbone, its drawing, and what its cells are named by."""

import functools
from typing import Any

import numpy as np

from models.towers.qwen2_5 import Qwen25VisionConfig

from ..sheets_task import task as sheets
from ..sheets_task.instances import WIDTH, instance_of
from ..sheets_task.task import ContextSize
from ..sheets_task.task_spec import Named, TaskSpec
from ..small_task.instances import Instance
from ..small_task.prefix import Prefix, blank_image
from . import task
from .drawing import CELL, LINE, document_images
from .task import VOCABULARY, Documents

PAPER, CONTRAST = 0.93, 0.25
"""Mean and deviation that pixels are normalised by: blank paper is about nothing, so that what is drawn stands out."""


@functools.cache
def instance() -> Instance:
    """Makes configuration and image settings: the sheets task's decoder; a cell's four patches see each other."""
    vision = Qwen25VisionConfig(
        depth=2,
        width=128,
        heads=4,
        intermediate=256,
        output_width=WIDTH,
        patch=LINE,
        merge=2,
        temporal=1,
        window=CELL,
        full_layers=(),
    )
    return instance_of(vision, VOCABULARY, PAPER, CONTRAST)


@functools.lru_cache
def form_of(config: Any, images: Any, size: ContextSize) -> Prefix:
    """Finds the form that a backbone of this configuration and these image settings gives contexts of this size."""
    sheet, page = (
        blank_image(config, images, (rows + 1) * CELL, columns * CELL)
        for rows, columns in (size.sheet_shape, size.page_shape)
    )
    ids, local = zip(*[sheet] * size.sheets, page, strict=True)
    return Prefix(ids, local, config.image_token)


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

    def flat(value):
        return value.reshape(-1)

    glyph, both = flat(documents.page_glyph), np.concatenate([sheet, page])
    address = [documents.sheet_address.reshape(len(documents), -1), documents.page_address]
    document = np.concatenate([flat(np.repeat(documents.document[:, None], of.shape[1], axis=1)) for of in address])
    item = np.concatenate([flat(of) for of in address])
    named = {
        VOCABULARY.ink: (page, glyph // sheets.SHAPES),
        VOCABULARY.digit: (page, glyph % sheets.SHAPES),
        VOCABULARY.glyph: (page, glyph),
        VOCABULARY.fill: (sheet, flat(documents.sheet_fill)),
        VOCABULARY.stripe: (sheet, flat(documents.sheet_stripe)),
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
    form_of=form_of,
    images=document_images,
    classes=cell_classes,
    named=named_cells,
    vocabulary=VOCABULARY,
)
"""The documents task."""
