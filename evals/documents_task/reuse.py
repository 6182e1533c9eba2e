"""A context of documents whose every chunk is reused, as `evals.sheets_task.reuse` does it."""

import numpy as np
from jaxtyping import Int

from ..sheets_task import reuse
from ..sheets_task import task as sheets
from .task import Documents
from .task_spec import DOCUMENTS


class DocumentReuse(reuse.Reuse):
    """A batch of documents and their questions: the chunks, what re-prefill gives, and caches for every arm."""

    contexts: Documents
    material = DOCUMENTS

    def page_classes(self) -> dict[str, Int[np.ndarray, "B T"]]:
        """Numbers the page's cells by the parts of their codes and items, and by the value and unit that they absorb.

        A word has no parts: two numbers that stand for nothing seen take their place, those of its entry in the list
        of words.
        """
        fill, stripe, _ = sheets.latest(self.contexts)
        address, glyph = self.contexts.page_address, self.contexts.page_glyph
        first, second = np.divmod(address, sheets.COLUMN_MARKS)
        return {
            "letter": glyph // sheets.SHAPES,
            "digit": glyph % sheets.SHAPES,
            "item, first part": first,
            "item, second part": second,
            "absorbed value": np.take_along_axis(fill, address, axis=1),
            "absorbed unit": np.take_along_axis(stripe, address, axis=1),
        }
