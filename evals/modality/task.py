"""What every modality shows: contexts of the sheets task, smaller, and the kinds of question that are asked of them."""

from ..sheets_task import task as sheets
from ..sheets_task.task import ContextSize

SMALL, FULL = "small", "4"
SIZES = {SMALL: sheets.SIZES["tiny"], FULL: ContextSize(3, (10, 1), (5, 5))}
"""Sizes by name: how many chunks a context of images has, and the small one that training begins with."""
ONE_CHUNK, TWO_CHUNKS = ("page", "sheet"), ("chain", "override", "list")
"""Kinds of question by what they need: the page or the sheets alone, which is a control, or both."""
KINDS = (*ONE_CHUNK, *TWO_CHUNKS)
