"""What an executor did: launches, bytes and FLOPs by kind, counted at the arrays that moved and the tokens run."""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxtyping import Float

from ..backbone import Backbone
from ..cache import Patch
from ..core import AnyArray, KVLayout
from .costs import ROTATION, adding_flops


@dataclasses.dataclass(frozen=True)
class CostEntry:
    """What was executed of one kind.

    Attributes:
      launches: programs started that move or compute KV.
      bytes, flops: of the tokens that count, in the units of the edits' own numbers.
      padded_bytes, padded_flops: including the padding of buckets.
    """

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    padded_bytes: int = 0
    padded_flops: int = 0

    def __add__(self, other: "CostEntry") -> "CostEntry":
        # Written out, because an executor adds entries for every launch.
        return CostEntry(
            self.launches + other.launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.padded_bytes + other.padded_bytes,
            self.padded_flops + other.padded_flops,
        )

    def __sub__(self, other: "CostEntry") -> "CostEntry":
        return CostEntry(
            self.launches - other.launches,
            self.bytes - other.bytes,
            self.flops - other.flops,
            self.padded_bytes - other.padded_bytes,
            self.padded_flops - other.padded_flops,
        )


@dataclasses.dataclass(frozen=True)
class Ledger(Mapping[str, CostEntry]):
    """Costs by kind of edit, and of what is done besides edits ("question", "undo"). An immutable value.

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
        """Returns the costs of a kind, zeros if nothing of it was done."""
        return dict(self.kinds).get(kind, CostEntry())

    def __sub__(self, earlier: "Ledger") -> "Ledger":
        old, zero = dict(earlier.kinds), CostEntry()
        left = []
        for kind, entry in self.kinds:
            before = old.get(kind, zero)
            # Kinds that were left alone are the same objects, and there may be many of them.
            if before is not entry and (change := entry - before) != zero:
                left.append((kind, change))
        return Ledger(tuple(left))

    @property
    def total(self) -> CostEntry:
        """Costs of all kinds together."""
        return sum((entry for _, entry in self.kinds), CostEntry())


def row_bytes(vectors: Mapping[str, Float[AnyArray, "..."]], layout: KVLayout, rotating: bool = False) -> int:
    """Returns bytes of one slot, all layers, without padding of lanes.

    Args:
      rotating: counts only the channels that carry phase.
    """
    total = 0
    for channel in layout.channels:
        if channel.name in vectors and (channel.rotates or not rotating):
            value = vectors[channel.name]
            total += channel.features * value.shape[0] * value.dtype.itemsize
    return total


class CostMeter:
    """Counter of what an executor does.

    `vectors` are arrays of the pool, or of a piece, [L, …] by channel; `tokens` count, `size` includes padding.

    Attributes:
      ledger: everything counted so far.
    """

    def __init__(self, backbone: Backbone):
        self._backbone, self._layout = backbone, backbone.layout
        self.ledger = Ledger()

        # FLOPs of rotating one token's keys.
        numbers = sum(channel.heads * channel.rotary for channel in self._layout.channels)
        self._rotation = ROTATION * numbers * self._layout.layers

    def placed(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int) -> None:
        """Counts phase-free KV that was read, rotated and written."""
        self._add_tokens(kind, tokens, size, 2 * row_bytes(vectors, self._layout), self._rotation)

    def patched(self, kind: str, patch: Patch, nbytes: int, tokens: int, size: int) -> None:
        """Counts factors that were read, multiplied and added, in the launch that placed what they are added to.

        Args:
          patch: as it was run, padded. nbytes: of the patch without padding.
        """
        flops = adding_flops(patch)
        self._add(kind, CostEntry(0, nbytes, flops * tokens, patch.nbytes, flops * size))

    def rotated(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int) -> None:
        """Counts keys that were read, rotated and written; the other channels stay."""
        self._add_tokens(kind, tokens, size, 2 * row_bytes(vectors, self._layout, rotating=True), self._rotation)

    def moved(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int, times: int = 2) -> None:
        """Counts vectors that were read and written unchanged; `times` 1: only one of the two."""
        self._add_tokens(kind, tokens, size, times * row_bytes(vectors, self._layout), 0)

    def ran(
        self,
        kind: str,
        vectors: Mapping[str, AnyArray],
        tokens: tuple[int, int],
        keys: tuple[int, int],
        start_layer: int = 0,
    ) -> None:
        """Counts a forward, and the launch that wrote its KV.

        Args:
          tokens: that ran. keys: that preceded them. Both without padding and with it.
        """
        forward, layers = self._backbone.forward_costs, self._layout.layers
        token_bytes = row_bytes(vectors, self._layout) * (layers - start_layer) // layers

        # Each argument is a pair, without padding and with it. The ledger records both.
        nbytes, flops = [], []
        for token_count, key_count in zip(tokens, keys, strict=True):
            nbytes.append(token_bytes * (token_count + key_count))
            flops.append(forward.flops(token_count, key_count, start_layer))

        # The forward, and the launch that writes what it returns.
        launches = 2
        self._add(kind, CostEntry(launches, nbytes[0], flops[0], nbytes[1], flops[1]))
        self._add("logits", CostEntry(0, 0, forward.logit, 0, forward.logit))

    def ran_fused(self, vectors: Mapping[str, AnyArray], tokens: tuple[int, int, int], keys: tuple[int, int]) -> None:
        """Counts a forward of a piece followed by a question whose KV is not kept, and the launch that wrote the piece.

        Args:
          tokens: of the piece, of the question, and of both with padding.
          keys: that preceded the piece, without padding and with it; they are read once for both.
        """
        forward, token_bytes = self._backbone.forward_costs, row_bytes(vectors, self._layout)
        own, question, size = tokens
        before, padded = keys
        question_flops = [forward.flops(question, behind + own) + forward.logit for behind in keys]

        # The padded forward ran once; what is not the question's share is the piece's.
        rest = forward.flops(size, padded) + forward.logit - question_flops[1]
        nbytes, padded_bytes = token_bytes * (own + before), token_bytes * (size + padded)
        self._add("Prefill", CostEntry(2, nbytes, forward.flops(own, before), padded_bytes, rest))
        self._add("question", CostEntry(0, 0, question_flops[0], 0, question_flops[1]))

    def asked(
        self, vectors: Mapping[str, AnyArray], tokens: tuple[int, int], keys: tuple[int, int], logits: int
    ) -> None:
        """Counts a forward of tokens whose KV is not counted as a piece's: a question, or decoded tokens."""
        forward, token_bytes = self._backbone.forward_costs, row_bytes(vectors, self._layout)

        # Only the keys in front are read: what the tokens themselves write is not kept, or counted when it is adopted.
        flops = [forward.flops(run, behind) + logits * forward.logit for run, behind in zip(tokens, keys, strict=True)]
        self._add("question", CostEntry(1, token_bytes * keys[0], flops[0], token_bytes * keys[1], flops[1]))

    def fetched(self, nbytes: int) -> None:
        """Counts what a store returned."""
        self._add("Fetch", CostEntry(0, nbytes, 0, nbytes, 0))

    def _add_tokens(self, kind: str, tokens: int, size: int, token_bytes: int, token_flops: int) -> None:
        entry = CostEntry(1, token_bytes * tokens, token_flops * tokens, token_bytes * size, token_flops * size)
        self._add(kind, entry)

    def _add(self, kind: str, entry: CostEntry) -> None:
        # A new value each time, because other threads may read the ledger at any moment.
        kinds = dict(self.ledger.kinds)
        kinds[kind] = kinds[kind] + entry if kind in kinds else entry
        self.ledger = Ledger(tuple(kinds.items()))
