"""Windows: what a model reads, as immutable values, and the executor that brings their KV into a pool."""

from .costs import Action, Costs, Step
from .entry import Entry, PatchNote
from .executor import Executor
from .traffic import FormerStats, PatchFormer
from .window import Piece, Service, Standing, Window

__all__ = [
    "Action",
    "Costs",
    "Entry",
    "Executor",
    "FormerStats",
    "PatchFormer",
    "PatchNote",
    "Piece",
    "Service",
    "Standing",
    "Step",
    "Window",
]

# For other rooms of the library, and for evaluations.
from .costs import ActionKind as ActionKind
from .costs import total as total
from .entry import LIMIT as LIMIT
from .entry import Kind as Kind
from .entry import is_count as is_count
from .sources import Encodings as Encodings
from .sources import PatchStore as PatchStore
from .sources import encodings_of as encodings_of
from .sources import stored as stored
from .sources import stored_patches as stored_patches
from .stored_prefill import StoredPrefills as StoredPrefills
from .traffic import canonical_of as canonical_of
from .window import BARE as BARE
from .window import KEEP as KEEP
from .window import PREFILL as PREFILL
from .window import Fidelity as Fidelity
from .window import Method as Method
from .window import Promise as Promise
from .window_json import from_json as from_json
from .window_json import to_json as to_json
