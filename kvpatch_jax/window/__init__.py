"""Windows: what a model is to read, as immutable values, and the edits that bring its KV there.

A `Window` holds entries at their places and how each of them is served, no arrays. Every operation returns a new window
and edits with exact costs; an executor runs them: `PagedExecutor` on a paged pool, `HostExecutor` on plain arrays.
"""

from .costs import Costs
from .edits import ApplyPatch, Compact, Copy, Drop, Edit, Edits, Fetch, Prefill, Recompute, Rotate
from .entry import Entry, PatchNote, PlacedPiece, State
from .host import HostExecutor
from .ledger import Ledger, Tally
from .paged import PagedExecutor
from .traffic import Formed, Former
from .window import Window

__all__ = [
    "ApplyPatch",
    "Compact",
    "Copy",
    "Costs",
    "Drop",
    "Edit",
    "Edits",
    "Entry",
    "Fetch",
    "Formed",
    "Former",
    "HostExecutor",
    "Ledger",
    "PagedExecutor",
    "PatchNote",
    "PlacedPiece",
    "Prefill",
    "Recompute",
    "Rotate",
    "State",
    "Tally",
    "Window",
]
