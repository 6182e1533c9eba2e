"""Costs of edits on one backbone: `Costs` computes them before anything runs, a `Ledger` has what was executed.

Both are exact, in bytes and FLOPs, and neither is computed from the other: an executor's `CostMeter` counts the arrays
that moved and the tokens that ran.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ..backbone import Backbone, ForwardCosts, seen_pairs
from ..cache import Patch, fingerprint_of
from ..core import AnyArray, KVLayout
from ..patching.patch_flops import ROTATION as ROTATION
from ..patching.patch_flops import adding_flops as adding_flops
from ..patching.patch_flops import composing_flops as composing_flops
from ..patching.patch_flops import transition_adding_flops as transition_adding_flops


@dataclasses.dataclass(frozen=True)
class Costs:
    """Static numbers of one backbone, from which costs of edits are computed.

    Attributes:
      backbone: its fingerprint.
      layers: of the decoder.
      kv_bytes: of one token's KV, all layers and channels.
      transition_bytes: of the transition of a piece, whatever its tokens, in a hybrid model; 0 in others.
      composing: FLOPs of composing two of them.
      turning_bytes: of the channels that rotate.
      rotary: numbers of one token's KV, all layers, that a rotation changes.
      forward: FLOPs of forwards.
    """

    backbone: str
    layers: int
    kv_bytes: int
    turning_bytes: int
    rotary: int
    forward: ForwardCosts
    transition_bytes: int = 0
    composing: int = 0

    @classmethod
    def of(cls, backbone: Backbone, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> "Costs":
        """Computes the numbers of a backbone's layout and `forward_costs`.

        Args:
          dtype: of the KV in the pool.
        """
        # In whole numbers, so that sums over edits are exact.
        layout, size = backbone.layout, jnp.dtype(dtype).itemsize
        rotating = [channel for channel in layout.channels if channel.rotates]
        return cls(
            backbone=fingerprint_of(backbone.fingerprint, "costs"),
            layers=layout.layers,
            kv_bytes=layout.bytes_per_token(dtype),
            turning_bytes=size * sum(layout.depth(channel.name) * channel.features for channel in rotating),
            rotary=sum(layout.depth(channel.name) * channel.heads * channel.rotary for channel in rotating),
            forward=backbone.forward_costs,
            transition_bytes=transition_bytes(layout),
            composing=composing_flops(layout),
        )

    def prefill(self, tokens: int, behind: int, start_layer: int = 0, logits: int = 0) -> dict[str, int]:
        """Returns costs of a forward behind `behind` other tokens: KV read and written, FLOPs of matrix products."""
        # From a higher layer only the layers above are read and written.
        flops = self.forward.flops(tokens, behind, start_layer) if start_layer else self.run(tokens, behind)
        nbytes = self.forward_bytes(tokens, behind, start_layer)
        return {"bytes": nbytes, "flops": flops + logits * self.forward.logit}

    def forward_bytes(self, tokens: int, behind: int, start_layer: int = 0) -> int:
        """Returns bytes of KV that a forward reads and writes: of each token, and one transition each."""
        rows, own = self.kv_bytes, self.transition_bytes
        if start_layer:
            rows, own = (nbytes * (self.layers - start_layer) // self.layers for nbytes in (rows, own))
        return rows * (tokens + behind) + own * (1 + bool(behind))

    def run(self, tokens: int, behind: int) -> int:
        """Returns FLOPs of a forward through all layers: those of `ForwardCosts.flops`, faster for many pieces."""
        token_flops, pairs = self._sums
        flops = token_flops * tokens
        for window, pair in pairs:
            flops += pair * seen_pairs(tokens, behind, window)
        return flops

    @functools.cached_property
    def _sums(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """FLOPs per token, and (attention window, FLOPs per pair of tokens), summed over the layers."""
        # Layers of one attention window see the same pairs of tokens, so their costs per pair add up.
        pairs = Counter[int]()
        for pair, window in zip(self.forward.pair, self.forward.window, strict=True):
            pairs[window] += pair
        return sum(self.forward.token), tuple(pairs.items())

    @functools.cached_property
    def copy_bytes(self) -> int:
        """Bytes per token of `copy`, the transition left out."""
        return 2 * self.kv_bytes

    @functools.cached_property
    def copy_flops(self) -> int:
        """FLOPs per token of `copy`."""
        return ROTATION * self.rotary

    def rotate(self, tokens: int) -> dict[str, int]:
        """Returns costs of rotating keys in place: rotating channels are read and written, the others stay."""
        return {"bytes": 2 * self.turning_bytes * tokens, "flops": ROTATION * self.rotary * tokens}

    def copy(self, tokens: int) -> dict[str, int]:
        """Returns costs of placing phase-free KV: all of it read, rotated and written."""
        return {"bytes": self.placing_bytes(tokens), "flops": self.copy_flops * tokens}

    def placing_bytes(self, tokens: int) -> int:
        """Returns bytes of `copy`: of each token, and of the transition, read and written."""
        return self.copy_bytes * tokens + 2 * self.transition_bytes

    def patch(self, tokens: int, patch_bytes: int, patch_flops: int, transition_flops: int = 0) -> dict[str, int]:
        """Returns costs of placing phase-free KV with a patch: as `copy`, and factors read, multiplied and added, per
        token (`patch_flops`) and to the transition.
        """
        # One pass over the KV: only the factors are read in addition.
        placing = self.copy(tokens)
        flops = placing["flops"] + patch_flops * tokens + transition_flops
        return {"bytes": placing["bytes"] + patch_bytes, "flops": flops}

    def compose(self, pieces: int) -> dict[str, int]:
        """Returns costs of composing the transitions of so many pieces from the first one on: all are read, and one is
        written.
        """
        # An upper bound: which compositions an executor has kept, the window does not know.
        if not pieces:
            return {"bytes": 0, "flops": 0}
        return {"bytes": self.transition_bytes * (pieces + 1), "flops": self.composing * (pieces - 1)}

    def fetch(self, tokens: int) -> dict[str, int]:
        """Returns costs of reading a canonical from a store."""
        return {"bytes": self.kv_bytes * tokens + self.transition_bytes}

    def compact(self, tokens: int) -> dict[str, int]:
        """Returns costs of moving tokens to other slots, all of them at most."""
        # An upper bound: which slots move depends on the pool, which the window does not know.
        return {"bytes": 2 * self.kv_bytes * tokens}

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON has them."""
        return dataclasses.asdict(self) | {"forward": self.forward._asdict()}


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
        own, added = vars(self).values(), vars(other).values()
        return CostEntry(*map(operator.add, own, added))

    def __sub__(self, other: "CostEntry") -> "CostEntry":
        own, left_out = vars(self).values(), vars(other).values()
        return CostEntry(*map(operator.sub, own, left_out))


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
        # Kinds in which nothing happened are left out.
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
    for channel in layout.token_channels:
        if channel.name in vectors and (channel.rotates or not rotating):
            value = vectors[channel.name]
            total += channel.features * value.shape[0] * value.dtype.itemsize
    return total


def transition_bytes(layout: KVLayout) -> int:
    """Returns bytes of a piece's transition as executors keep it, in float32; 0 of a model that has none."""
    return 4 * layout.transition_numbers


class CostMeter:
    """Counter of what an executor does.

    In its methods `vectors` are arrays of the pool, or of a piece, [L, …] by channel; `tokens` count, `size` includes
    padding; pairs are numbers without padding and with it.

    Attributes:
      ledger: everything counted so far.
    """

    def __init__(self, backbone: Backbone):
        self._backbone, self._layout = backbone, backbone.layout
        self.ledger = Ledger()

        # FLOPs of rotating one token's keys.
        layout = self._layout
        numbers = [layout.depth(channel.name) * channel.heads * channel.rotary for channel in layout.channels]
        self._rotation = ROTATION * sum(numbers)
        self._transition, self._composing = transition_bytes(layout), composing_flops(layout)

    def placed(
        self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int, transition: bool = False
    ) -> None:
        """Counts phase-free KV that was read, rotated and written, with its `transition` if that was written too."""
        nbytes, flops = 2 * row_bytes(vectors, self._layout), self._rotation
        own = 2 * self._transition if transition else 0
        self._add(kind, CostEntry(1, nbytes * tokens + own, flops * tokens, nbytes * size + own, flops * size))

    def composed(self, pieces: int, padded: int) -> None:
        """Counts transitions that were read and composed to one; `padded` with those that fill up their number."""
        counts = []
        for number in (pieces, padded):
            counts += [self._transition * (number + 1), self._composing * max(number - 1, 0)]
        self._add("transition", CostEntry(1, *counts))

    def patched(self, kind: str, patch: Patch, nbytes: int, tokens: int, size: int) -> None:
        """Counts factors that were read, multiplied and added, in the launch that placed what they are added to.

        Args:
          patch: as it was run, padded.
          nbytes: of the patch without padding.
        """
        flops, constant = adding_flops(patch), transition_adding_flops(patch)
        self._add(kind, CostEntry(0, nbytes, flops * tokens + constant, patch.nbytes, flops * size + constant))

    def rotated(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int) -> None:
        """Counts keys that were read, rotated and written; the other channels stay."""
        nbytes, flops = 2 * row_bytes(vectors, self._layout, rotating=True), self._rotation
        self._add(kind, CostEntry(1, nbytes * tokens, flops * tokens, nbytes * size, flops * size))

    def moved(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int, times: int = 2) -> None:
        """Counts vectors that were read and written unchanged; `times` 1: only one of the two."""
        nbytes = times * row_bytes(vectors, self._layout)
        self._add(kind, CostEntry(1, nbytes * tokens, 0, nbytes * size, 0))

    def ran(
        self,
        kind: str,
        vectors: Mapping[str, AnyArray],
        tokens: tuple[int, int],
        keys: tuple[int, int],
        start_layer: int = 0,
    ) -> None:
        """Counts a forward of `tokens` behind `keys`, both pairs, and the launch that wrote its KV."""
        forward, layers = self._backbone.forward_costs, self._layout.layers
        token_bytes = row_bytes(vectors, self._layout) * (layers - start_layer) // layers
        # One transition is written, and one read where there is anything in front.
        own = self._transition * (layers - start_layer) // layers * (1 + bool(keys[0]))

        nbytes, flops = [], []
        for token_count, key_count in zip(tokens, keys, strict=True):
            nbytes.append(token_bytes * (token_count + key_count) + own)
            flops.append(forward.flops(token_count, key_count, start_layer))

        self._add(kind, CostEntry(2, nbytes[0], flops[0], nbytes[1], flops[1]))
        self._add("logits", CostEntry(0, 0, forward.logit, 0, forward.logit))

    def ran_fused(self, vectors: Mapping[str, AnyArray], tokens: tuple[int, int, int], keys: tuple[int, int]) -> None:
        """Counts a forward of a piece followed by a question whose KV is not kept, and the launch that wrote the piece.

        Args:
          tokens: of the piece, of the question, and of both with padding.
          keys: that preceded the piece, a pair; they are read once for both.
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

        # Only what is in front is read: what the tokens themselves write is not kept, or counted when it is adopted.
        own = self._transition if keys[0] else 0
        flops = [forward.flops(run, behind) + logits * forward.logit for run, behind in zip(tokens, keys, strict=True)]
        nbytes = [token_bytes * behind + own for behind in keys]
        self._add("question", CostEntry(1, nbytes[0], flops[0], nbytes[1], flops[1]))

    def fetched(self, nbytes: int) -> None:
        """Counts what a store returned."""
        self._add("Fetch", CostEntry(0, nbytes, 0, nbytes, 0))

    def _add(self, kind: str, entry: CostEntry) -> None:
        # A new value each time, because other threads may read the ledger at any moment.
        kinds = dict(self.ledger.kinds)
        kinds[kind] = kinds[kind] + entry if kind in kinds else entry
        self.ledger = Ledger(tuple(kinds.items()))
