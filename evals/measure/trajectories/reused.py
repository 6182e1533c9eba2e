"""Windows of pieces that were prefilled alone: moved to their places as they are, or with patches.

A patch is formed from the piece's KV in exactly this window, as it is where the same window was met before: the forward
of that meeting is not counted.
"""

from collections.abc import Hashable, Sequence

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.core import Buckets
from kvpatch_jax.window.padding import padded_chunk, padded_tokens, zero_padded
from models import ModelBackbone

from ...arms.reused_page import chunk_of, cut
from ..contexts import HostKV
from .prompts import StepAnswer, StepPiece, answered_behind, behind_one_another, prompt_of


class ReusedWindow:
    """Canonicals of one episode's pieces, and what they answer."""

    def __init__(self, backbone: ModelBackbone):
        """Holds nothing yet."""
        self._backbone = backbone
        self._buckets = backbone.buckets or Buckets()
        self._canonicals: dict[tuple[Hashable, ...], kvp.Chunk] = {}
        self._counted = dict[int | None, set[tuple[Hashable, ...]]]()

    def answer(self, pieces: Sequence[StepPiece], conditioned: HostKV, rank: int | None, steps: int) -> StepAnswer:
        """Answers greedily behind reused pieces.

        Args:
          pieces: the last is the question, which is computed; the first, with nothing in front, is exact.
          conditioned: phase-free KV of all pieces as one prompt, which patches are formed from.
          rank: of the patches; None: no patches.

        Returns:
          The answer; its tokens are the question's and those of pieces that are met for the first time.
        """
        counted, tokens = self._counted.setdefault(rank, set()), len(pieces[-1].keys)
        placed, slot, start = list[HostKV](), 0, 0
        for number, piece in enumerate(pieces[:-1]):
            key, count = tuple(piece.keys), len(piece.keys)
            tokens += 0 if key in counted else count
            counted.add(key)
            chunk, size = self._canonical(piece), self._buckets.round_up(count)
            patch, antecedent = None, tuple(str(place) for place in range(number))
            if rank is not None and number:
                own = cut(conditioned, slice(slot, slot + count))
                rows = {name: zero_padded(value[:, 0], 1, size) for name, value in own.items()}
                patch = kvp.form_patch(padded_chunk(chunk, size), rows, min(rank, count), antecedent)
            kv = kvp.apply_patch(kvp.Placed(padded_chunk(chunk, size), patch, start, antecedent))
            placed.append({name: np.asarray(value)[:, None, :count] for name, value in kv.items()})
            slot, start = slot + count, start + piece.span
        answer, _ = answered_behind(self._backbone, prompt_of(pieces), behind_one_another(placed), steps)
        return answer._replace(tokens=tokens)

    def _canonical(self, piece: StepPiece) -> kvp.Chunk:
        """Returns a piece's canonical, of a forward of its own where it is met for the first time."""
        key, count = tuple(piece.keys), len(piece.keys)
        if key not in self._canonicals:
            kv = self._backbone.prefill(padded_tokens(piece.tokens, self._buckets.round_up(count))).kv
            rows = {name: np.asarray(value)[:, 0, :count] for name, value in kv.items()}
            local = np.asarray(piece.tokens.positions)[0]
            self._canonicals[key] = chunk_of(self._backbone, rows, local, f"piece {len(self._canonicals)}")
        return self._canonicals[key]
