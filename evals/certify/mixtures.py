"""Windows whose pieces are served in methods drawn at random: are answers within the bound of the worst method?

Certificates compose by that rule (`Certificate.together`). Plans test it with canonicals and patches; here stored
prefills of other windows, and pieces that are prefilled behind whatever is served in front, are among the methods.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.plan import DEFAULT_KL, Certificate

from ..probes.window.image_sequence import KV, AgentLoop, ImageSequence, cut, read_behind
from .certification_run import CertificationRun
from .other_histories import LIKENESSES, stored_pieces
from .scores import rounded
from .serving_modes import padded_to_chunk, patched_kv, room_of
from .window_sources import WindowBatch

Method = tuple[str, int]
"""Point and rank."""
PREFILL: Method = ("prefill", 0)
DRAWS = 4
"""Mixtures of each batch."""


def mixture_goals(certificate: Certificate, size: int) -> list[float]:
    """Returns the bounds that mixtures are tested at, descending: of "near", and the default one.

    Args:
      size: chunks of the windows.
    """
    bounds = [DEFAULT_KL, certificate.bound("near", behind=size - 1)]
    return sorted({rounded(bound) for bound in bounds if bound}, reverse=True)


class Mixer:
    """Serves a batch of windows in mixtures of methods.

    Attributes:
      windows: the batch.
    """

    def __init__(self, windows: WindowBatch):
        """Computes what mixtures share: the promised windows, and stored prefills."""
        self.windows, self._room = windows, room_of(windows)
        self._line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
        self._target = self._line.prefill()
        self._stored: dict[str, Any] = {likeness: kv for likeness, kv in stored_pieces(windows, self._room)}
        self._tail = windows.questions.behind(self._line.end)
        self._promised = read_behind(self._line, self._line.engine(self._target), self._tail)

    def answers(
        self, run: CertificationRun, goal: float, certificate: Certificate, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Draws mixtures of prefills and of all methods with a bound of at most `goal`, and asks behind them.

        Returns:
          KL of each answer, its window, and the share of pieces that were not prefilled.
        """
        questions, methods = self.windows.questions, _methods(certificate, run.ranks, len(self.windows.pieces), goal)
        kls, shares = [], []
        for _ in range(DRAWS):
            drawn = [methods[number] for number in rng.integers(len(methods), size=len(self.windows.pieces))]
            served = read_behind(self._line, self._line.engine(self._served(drawn)), self._tail)
            kls.append(questions.scored(served.divergence_from(self._promised))[questions.valid])
            shares.append(np.mean([method != PREFILL for method in drawn]))
        cluster = np.tile(questions.of_valid(self.windows.clusters), DRAWS)
        return np.concatenate(kls), cluster, float(np.mean(shares))

    def _served(self, methods: Sequence[Method]) -> list[KV]:
        """Returns the phase-free KV of the lead and every piece, each prefill behind what is served in front."""
        windows = self.windows
        loop = AgentLoop(windows.backbone, self._room, windows.lead)
        for place, (piece, (point, rank)) in enumerate(zip(windows.pieces, methods, strict=True), 1):
            chunk = piece.chunk
            if (point, rank) == PREFILL:
                loop.append(piece)
                continue
            if point == "bare":
                kv = cut(piece.canonical, slice(chunk.length))
            elif point == "stored":
                whole = padded_to_chunk(chunk, self._target[place])
                kv = patched_kv(chunk, kvp.form_patch(chunk, whole, rank, self._line.antecedent(place), dense=False))
            else:
                kv = self._stored[point][place]
            loop.held.append((piece, kv))
        return loop.parts


def _methods(certificate: Certificate, ranks: Sequence[int], size: int, goal: float) -> list[Method]:
    """Returns a prefill, and every method that a whole window may be served in."""
    methods = [("bare", 0), *((likeness, 0) for likeness in LIKENESSES), *(("stored", rank) for rank in ranks)]
    within = []
    for point, rank in methods:
        bound = certificate.bound(point, rank, behind=size - 1)
        if bound is not None and rounded(bound) <= goal:
            within.append((point, rank))
    return [PREFILL, *within]
