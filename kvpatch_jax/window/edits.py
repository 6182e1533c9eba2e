"""Edits of the KV when a window changes: small values with exact costs, in an order that can be executed.

Every edit but `Compact` has the `id` of the piece that it changes. `bytes` are those of KV, factors and stored objects
that are read and written; weights are not among them. `flops` are multiplications and additions of the matrix products
and rotations.
"""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Drop:
    """Release of the slots of a piece that left. Its canonical stays in its store."""

    id: str
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Read of a piece's canonical, its patch (`digest`) or its stored prefill behind a front (`digest`)."""

    id: str
    what: Literal["canonical", "patch", "prefill"]
    digest: str | None = None
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Rotate:
    """Rotation of the keys of a piece that stays, from its old start to its new one."""

    id: str
    old: int
    new: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Copy:
    """Placement of available KV at the piece's start: its canonical, its stored prefill, or what another branch
    holds.

    `branch` is the branch that holds "shared" KV: no bytes move, slots get one more owner.
    """

    id: str
    source: Literal["canonical", "prefill", "shared"]
    branch: str | None = None
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class ApplyPatch:
    """Placement of base and patch at the piece's start: one pass over canonical or conditioned KV and factors."""

    id: str
    patch: str
    rank: int
    base: Literal["canonical", "conditioned"] = "canonical"
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Forward of a new piece behind the `behind` tokens in front of it, whose KV is kept."""

    id: str
    behind: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Forward of a piece of the window, from `start_layer` up, behind the `behind` tokens in front of it."""

    id: str
    start_layer: int
    behind: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Compose:
    """Composition of the transitions of the `pieces` in front of a piece's forward, in a hybrid model.

    The forward's executor composes what it has not composed before: at most `bytes` move.
    """

    id: str
    pieces: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Compact:
    """Compaction of the slots in use, so that only the last page is partly filled. At most `bytes` move."""

    tokens: int
    bytes: int = 0
    flops: int = 0


Edit = Drop | Compact | Fetch | Rotate | Copy | ApplyPatch | Compose | Prefill | Recompute
Edits = tuple[Edit, ...]

_KINDS = (Drop, Rotate, Fetch, Copy, ApplyPatch, Prefill, Recompute, Compact)
_RANK = {kind: rank for rank, kind in enumerate(_KINDS)} | {Compose: _KINDS.index(Prefill)}
"""Slots are free before they are needed, sources are read before they are placed, and forwards run last."""


def new_edit[E: Edit](kind: type[E], **fields: Any) -> E:
    """Makes an edit of all its fields, without the `__init__` of a frozen dataclass, which is slow for hundreds."""
    # A frozen dataclass sets each field by `object.__setattr__`; its dictionary takes them at once.
    edit = object.__new__(kind)
    edit.__dict__.update(fields)
    return edit


def in_order(edits: "list[Edit]") -> Edits:
    """Sorts edits into an order of execution; those of one kind keep their order."""
    return tuple(sorted(edits, key=lambda edit: _RANK[type(edit)]))
