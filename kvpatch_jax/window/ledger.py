"""What an executor did: launches, bytes and FLOPs by kind, counted at the arrays that moved and the tokens run."""

import dataclasses
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class CostEntry:
    """What was executed of one kind.

    Attributes:
      launches: programs started that move or compute KV.
      bytes, flops: of the tokens that count, in the units of the edits' own numbers.
      padded_bytes, padded_flops: with the padding of buckets.
    """

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    padded_bytes: int = 0
    padded_flops: int = 0

    def __add__(self, other: "CostEntry") -> "CostEntry":
        return CostEntry(
            self.launches + other.launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.padded_bytes + other.padded_bytes,
            self.padded_flops + other.padded_flops,
        )

    def __sub__(self, other: "CostEntry") -> "CostEntry":
        return CostEntry(*(getattr(self, name) - getattr(other, name) for name in _FIELDS))


_FIELDS = tuple(field.name for field in dataclasses.fields(CostEntry))


@dataclasses.dataclass(frozen=True)
class Ledger(Mapping[str, CostEntry]):
    """Tallies by kind of edit, and of what is done beside edits ("question", "undo"): an immutable value.

    `after - before` is what happened between two ledgers.
    """

    kinds: tuple[tuple[str, CostEntry], ...] = ()

    def __getitem__(self, kind: str) -> CostEntry:
        return dict(self.kinds)[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.kinds))

    def __len__(self) -> int:
        return len(self.kinds)

    def of(self, kind: str) -> CostEntry:
        """The tally of a kind, empty where nothing of it was done."""
        return dict(self.kinds).get(kind, CostEntry())

    def add(self, kind: str, tally: CostEntry) -> "Ledger":
        """Counts something more of a kind."""
        kinds = dict(self.kinds)
        kinds[kind] = kinds[kind] + tally if kind in kinds else tally
        return Ledger(tuple(kinds.items()))

    def __sub__(self, earlier: "Ledger") -> "Ledger":
        old, none = dict(earlier.kinds), CostEntry()
        changed = ((kind, tally) for kind, tally in self.kinds if old.get(kind) is not tally)
        left = ((kind, tally - old.get(kind, none)) for kind, tally in changed)
        return Ledger(tuple((kind, tally) for kind, tally in left if tally != none))

    @property
    def total(self) -> CostEntry:
        """All kinds together."""
        return sum((tally for _, tally in self.kinds), CostEntry())
