"""What is to be done to the KV when a window changes: small values with exact costs, in an order that can be executed.

`bytes` are those of KV, factors and stored objects that are read and written; weights are not among them. `flops` are
multiplications and additions of the matrix products and rotations.
"""

import dataclasses
from typing import Any, Literal

Source = Literal["canonical", "conditioned", "shared"]
Fetchable = Literal["canonical", "patch"]


@dataclasses.dataclass(frozen=True)
class Drop:
    """Give up the slots of a piece that left. Its canonical stays wherever it is stored."""

    id: str
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Bring a piece's canonical, or its patch (`digest`), to where it can be placed from."""

    id: str
    what: Fetchable
    digest: str | None = None
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Rotate:
    """Turn the keys of a piece that stays, from its old start to its new one."""

    id: str
    old: int
    new: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Copy:
    """Place KV that is at hand at the piece's start: its canonical, its conditioned KV, or what another branch holds.

    `branch` is the branch that holds it, of what is "shared": no bytes move, slots get one more owner.
    """

    id: str
    source: Source
    branch: str | None = None
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class ApplyPatch:
    """Place base and patch at the piece's start: one pass over canonical or conditioned KV and factors."""

    id: str
    patch: str
    rank: int
    base: Literal["canonical", "conditioned"] = "canonical"
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Run the piece through the model behind the `behind` tokens that stand in front of it, and keep its KV."""

    id: str
    behind: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Run a piece that stands in the window again, from `start_layer` up, behind the `behind` tokens in front of it."""

    id: str
    start_layer: int
    behind: int
    bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Compact:
    """Pack the slots in use, so that no page is partly filled but the last. At most `bytes` move."""

    tokens: int
    bytes: int = 0
    flops: int = 0


Edit = Drop | Compact | Fetch | Rotate | Copy | ApplyPatch | Prefill | Recompute
Edits = tuple[Edit, ...]


def new_edit[E: Edit](kind: type[E], **fields: Any) -> E:
    """Makes an edit of all its fields, without the `__init__` of a frozen dataclass, which is slow for hundreds."""
    edit = object.__new__(kind)
    edit.__dict__.update(fields)
    return edit


_KINDS = (Drop, Rotate, Fetch, Copy, ApplyPatch, Prefill, Recompute, Compact)
_RANK = {kind: rank for rank, kind in enumerate(_KINDS)}
"""Slots are free before they are needed, what is read is there, and a forward finds all in front of it in place."""


def in_order(edits: "list[Edit]") -> Edits:
    """Sorts edits so that they can be executed one after the other; those of one kind keep their order."""
    return tuple(sorted(edits, key=lambda edit: _RANK[type(edit)]))
