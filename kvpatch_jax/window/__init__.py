"""Windows: what a model reads, as immutable values, and the edits that bring its KV there.

A `Window` holds entries at their places and how each of them is served, no arrays. Every operation returns a new window
and edits with exact costs, which `PagedExecutor` runs on a paged pool.
"""

from .costs import CostEntry, Costs, Ledger
from .edits import ApplyPatch, Compact, Compose, Copy, Drop, Edit, Edits, Fetch, Prefill, Recompute, Rotate
from .entry import Entry, PatchNote, PieceState, PlacedPiece
from .executor import PagedExecutor
from .patch_former import FormerStats, PatchFormer
from .window import Window

__all__ = [
    "ApplyPatch",
    "Compact",
    "Compose",
    "Copy",
    "CostEntry",
    "Costs",
    "Drop",
    "Edit",
    "Edits",
    "Entry",
    "Fetch",
    "FormerStats",
    "Ledger",
    "PagedExecutor",
    "PatchFormer",
    "PatchNote",
    "PieceState",
    "PlacedPiece",
    "Prefill",
    "Recompute",
    "Rotate",
    "Window",
]

# For other packages of the library, and for evaluations.
from .canonical_encoding import CANONICALS as CANONICALS
from .canonical_encoding import CanonicalEncoding as CanonicalEncoding
from .canonical_encoding import encoding_choice as encoding_choice
from .costs import ROTATION as ROTATION
from .costs import adding_flops as adding_flops
from .costs import composing_flops as composing_flops
from .costs import transition_adding_flops as transition_adding_flops
from .entry import BARE_WAYS as BARE_WAYS
from .entry import LIMIT as LIMIT
from .entry import UNKNOWN as UNKNOWN
from .entry import UNKNOWN_WAYS as UNKNOWN_WAYS
from .entry import Fidelity as Fidelity
from .entry import Kind as Kind
from .entry import Likeness as Likeness
from .entry import Way as Way
from .entry import Ways as Ways
from .entry import contents_differ as contents_differ
from .entry import merged as merged
from .entry import tuple_of as tuple_of
from .fidelity import SURVIVOR_WAYS as SURVIVOR_WAYS
from .fidelity import chain_digest as chain_digest
from .fidelity import chain_of as chain_of
from .kv_snapshot import SIDES as SIDES
from .kv_snapshot import PieceSnapshot as PieceSnapshot
from .kv_snapshot import placed as placed
from .kv_snapshot import taken as taken
from .padding import bucket as bucket
from .padding import padded_chunk as padded_chunk
from .padding import padded_patch as padded_patch
from .padding import padded_tokens as padded_tokens
from .padding import zero_padded as zero_padded
from .rearrangement import KEEP as KEEP
from .rearrangement import PREFILL as PREFILL
from .rearrangement import AtHand as AtHand
from .rearrangement import Rearrangement as Rearrangement
from .rearrangement import ServingChoice as ServingChoice
from .rearrangement import arrange as arrange
from .slot_table import ResidentPiece as ResidentPiece
from .slot_table import all_slots as all_slots
from .sources import Encodings as Encodings
from .sources import PatchStore as PatchStore
from .sources import asked_behind as asked_behind
from .sources import stored as stored
from .sources import stored_patches as stored_patches
from .stored_prefill import StoredPrefills as StoredPrefills
from .stored_prefill import keys_behind as keys_behind
from .stored_prefill import likeness_keys as likeness_keys
from .window_state import Promise as Promise
