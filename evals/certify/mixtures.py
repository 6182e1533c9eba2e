"""Held-out windows whose pieces are served in different modes at once: are answers within the bound of the worst mode?

Certificates compose by that rule (`Certificate.together`), and plans rely on it. Modes are drawn, for every piece, from
those of a whole window that are within a bound, and a prefill that reads whatever is served in front of it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.plan import DEFAULT_KL, Certificate

from ..harness.frame import rounded
from ..harness.lines import GrowingWindow, Line, cut, divergence
from ..harness.parts import Record
from .modes import LIKENESSES, stored_prefills
from .windows import SEED, PlannedBatch, WindowSet

DRAWS = 4
"""Mixtures of each batch, for each bound."""
PREFILL = ("prefill", 0)
"""Point and rank of a piece that is prefilled."""


def goals_of(certificate: Certificate, ranks: Sequence[int], size: int) -> list[float]:
    """Lists the bounds that mixtures are tested at: of patches at inner ranks, of stored prefills, and the default."""
    bounds = [certificate.bound("stored", rank, behind=size - 1) for rank in ranks[1:-1] or ranks]
    bounds += [DEFAULT_KL, certificate.bound("near", behind=size - 1)]
    return sorted({rounded(bound) for bound in bounds if bound}, reverse=True)


def mixed(source: WindowSet, certificate: Certificate, ranks: Sequence[int], planned: PlannedBatch) -> Iterator[Record]:
    """Yields for every bound the KL of each answer, its window, and the share of pieces that were not prefilled."""
    windows, rng = source.load(planned), np.random.default_rng([SEED, 4, planned.number])
    line, questions, size = Line(windows.backbone, [windows.lead, *windows.pieces]), windows.questions, planned.chunks
    target = line.prefill()
    promised = questions.ask(line, line.engine(target))
    for goal in goals_of(certificate, ranks, size):
        # A prefill, and the modes of a whole window with a bound of at most the goal.
        points = [("bare", 0), *((likeness, 0) for likeness in LIKENESSES), *(("stored", rank) for rank in ranks)]
        bounds = {way: certificate.bound(*way, behind=size - 1) for way in points}
        within = [PREFILL, *(way for way, bound in bounds.items() if bound is not None and rounded(bound) <= goal)]
        kl, shares = list[float](), list[float]()
        for _ in range(DRAWS):
            ways = [within[number] for number in rng.integers(len(within), size=size)]
            loop = GrowingWindow(windows.backbone, windows.room)
            loop.append(windows.lead)
            for place, (piece, (point, rank)) in enumerate(zip(windows.pieces, ways, strict=True), 1):
                kv = None  # of a prefill behind what is served in front
                if point == "bare":
                    kv = cut(piece.chunk.kv, slice(piece.size))
                elif point == "stored":
                    conditioned, antecedent = piece.padded(target[place]), line.antecedent(place)
                    patch = kvp.form_patch(piece.chunk, conditioned, rank, antecedent, dense=False, force=True)
                    kv = piece.patched(patch)
                elif point in LIKENESSES:
                    kv = stored_prefills(windows)[point][place]
                loop.append(piece, kv)
            served = questions.ask(line, line.engine(loop.parts))
            kl += questions.answers(divergence(promised, served)).tolist()
            shares.append(float(np.mean([way != PREFILL for way in ways])))
        cluster = questions.of_answers(windows.clusters).tolist() * DRAWS
        yield {"size": size, "goal": goal, "kl": kl, "cluster": cluster, "share": float(np.mean(shares))}
