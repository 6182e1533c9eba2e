"""Counting what is executed, where it is executed: bytes of the arrays that move, FLOPs of the tokens and keys run."""

from collections.abc import Mapping

from jaxtyping import Float

from ..backbone import Backbone
from ..cache import Patch
from ..core import AnyArray, KVLayout
from .costs import ROTATION, adding_flops
from .ledger import CostEntry, Ledger


def row_bytes(vectors: Mapping[str, Float[AnyArray, "..."]], layout: KVLayout, turning: bool = False) -> int:
    """Bytes of one slot, all layers, without padding of lanes; of the channels that carry phase alone if `turning`."""
    channels = [channel for channel in layout.channels if channel.name in vectors]
    return sum(
        channel.features * vectors[channel.name].shape[0] * vectors[channel.name].dtype.itemsize
        for channel in channels
        if channel.rotates or not turning
    )


class CostMeter:
    """Counts into a ledger."""

    def __init__(self, backbone: Backbone):
        """Nothing counted yet."""
        self._backbone, self._layout = backbone, backbone.layout
        self.ledger = Ledger()

    def _add(self, kind: str, tokens: int, size: int, each: tuple[int, int], launches: int = 1) -> None:
        """Counts bytes and FLOPs of each of `tokens`, which are `size` with padding."""
        nbytes, flops = each
        tally = CostEntry(launches, nbytes * tokens, flops * tokens, nbytes * size, flops * size)
        self.ledger = self.ledger.add(kind, tally)

    def rotated(self) -> int:
        """FLOPs of turning one token's keys."""
        numbers = sum(channel.heads * channel.rotary for channel in self._layout.channels)
        return ROTATION * numbers * self._layout.layers

    def placed(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int) -> None:
        """Phase-free KV that was read, turned and written."""
        self._add(kind, tokens, size, (2 * row_bytes(vectors, self._layout), self.rotated()))

    def patched(self, kind: str, patch: Patch, nbytes: int, tokens: int, size: int) -> None:
        """Factors that were read, multiplied and added, in the launch that placed what they are added to.

        Args:
          patch: as it was run, padded. nbytes: of the patch as it was given.
        """
        flops = adding_flops(patch)
        self.ledger = self.ledger.add(kind, CostEntry(0, nbytes, flops * tokens, patch.nbytes, flops * size))

    def turned(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int) -> None:
        """Keys that were turned, read and written; the other channels stay."""
        self._add(kind, tokens, size, (2 * row_bytes(vectors, self._layout, turning=True), self.rotated()))

    def moved(self, kind: str, vectors: Mapping[str, AnyArray], tokens: int, size: int, times: int = 2) -> None:
        """Vectors that were read and written as they are; `times` 1: only one of the two."""
        self._add(kind, tokens, size, (times * row_bytes(vectors, self._layout), 0))

    def ran(
        self,
        kind: str,
        vectors: Mapping[str, AnyArray],
        tokens: tuple[int, int],
        keys: tuple[int, int],
        start_layer: int = 0,
    ) -> None:
        """A forward, and the launch that wrote its KV.

        Args:
          tokens, keys: that ran and that stood in front, each without padding and with it.
        """
        forward, layers = self._backbone.forward_costs, self._layout.layers
        each = row_bytes(vectors, self._layout) * (layers - start_layer) // layers
        nbytes, flops = (
            tuple(of(run, behind) for run, behind in zip(tokens, keys, strict=True))
            for of in (
                lambda run, behind: each * (run + behind),
                lambda run, behind: forward.flops(run, behind, start_layer),
            )
        )
        launches = 2
        self.ledger = self.ledger.add(kind, CostEntry(launches, nbytes[0], flops[0], nbytes[1], flops[1]))
        self.ledger = self.ledger.add("logits", CostEntry(0, 0, forward.logit, 0, forward.logit))

    def ran_together(
        self, vectors: Mapping[str, AnyArray], tokens: tuple[int, int, int], keys: tuple[int, int]
    ) -> None:
        """A forward of a piece and, behind it, a question whose KV is not kept; and the launch that wrote the piece's.

        Keys are read once for both.

        Args:
          tokens: of the piece, of the question, and of both with padding. keys: that stood in front, without padding
            and with it.
        """
        forward, each = self._backbone.forward_costs, row_bytes(vectors, self._layout)
        own, question, size = tokens
        before, padded = keys
        of_question = [forward.flops(question, behind + own) + forward.logit for behind in keys]
        rest = forward.flops(size, padded) + forward.logit - of_question[1]
        tally = CostEntry(2, each * (own + before), forward.flops(own, before), each * (size + padded), rest)
        self.ledger = self.ledger.add("Prefill", tally)
        self.ledger = self.ledger.add("question", CostEntry(0, 0, of_question[0], 0, of_question[1]))

    def asked(
        self, vectors: Mapping[str, AnyArray], tokens: tuple[int, int], keys: tuple[int, int], logits: int
    ) -> None:
        """A question behind a window, whose KV is not kept."""
        forward, each = self._backbone.forward_costs, row_bytes(vectors, self._layout)
        flops = [forward.flops(run, behind) + logits * forward.logit for run, behind in zip(tokens, keys, strict=True)]
        self.ledger = self.ledger.add("question", CostEntry(1, each * keys[0], flops[0], each * keys[1], flops[1]))

    def fetched(self, kind: str, nbytes: int) -> None:
        """Something that a store gave."""
        self.ledger = self.ledger.add(kind, CostEntry(0, nbytes, 0, nbytes, 0))
