"""Replay of one visit in one session: what was served how, what it cost, and the logits after every question."""

import collections
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import kvpatch_jax as kvp
from kvpatch_jax.session import embedded
from kvpatch_jax.session.logit_comparison import served_logits
from kvpatch_jax.window import Window

from .contents import Question, RevisitContents
from .visits import Visit
from .ways import RevisitWay

POINTS = ("restored", "patch", "mean", "near", "leading", "bare", "other")
"""How a piece is served without a forward, as tables name it."""
Logits = Float[np.ndarray, "n V"]


def point_of(window: Window) -> str:
    """Returns how the last piece of a window is served, none having run a forward for it."""
    piece = window.pieces[-1]
    if piece.state.kind == "bare":
        return "leading" if len(window.pieces) == 1 else "bare"
    if piece.state.kind == "patched":
        return "patch"
    # What was restored from another window says which, and how that was alike.
    return "restored" if piece.state.patch is None else piece.state.ways[0][0] or "other"


class ServedVisit(NamedTuple):
    """One visit as it was served.

    Attributes:
      logits: after every question of the counted steps, a row for each scored place.
      counts: of these steps, by name: "steps", "revisits" (pieces shown before), "hits", "forwards", "tokens", "flops",
        "written" and "read" (bytes of the store), "canonicals", "patches", "prefills" and "formed flops" and "formed
        seconds" (in the background).
      points: hits by how they are served.
      tokens: of each piece shown.
    """

    logits: list[Logits]
    counts: dict[str, int | float]
    points: dict[str, int]
    tokens: dict[int, int]


def questions_of(contents: RevisitContents, visit: Visit, window: int, seed: int) -> list[Question]:
    """Asks after every step of a visit, about what is in a window of so many pieces."""
    # The same trace is asked the same questions.
    rng, asked = np.random.default_rng([seed, *visit.pieces]), []
    for step in range(len(visit.pieces)):
        asked.append(contents.question(rng, visit.pieces[max(step + 1 - window, 0) : step + 1]))
    return asked


def serve(
    backbone: Any,
    store: Any,
    contents: RevisitContents,
    visit: Visit,
    questions: Sequence[Question],
    way: RevisitWay,
    options: Mapping[str, Any],
    shown: set[int],
) -> ServedVisit:
    """Replays a visit.

    After every piece the session waits until all is stored, as it would while the agent's model decodes.

    Args:
      options: of the session, as `RevisitWay.opened` returns them.
      shown: pieces that were shown before, in any visit; those of this one are added.
    """
    logits, points, tokens = [], collections.Counter[str](), {}
    counts: dict[str, int | float] = dict.fromkeys(("steps", "revisits", "formed seconds", "formed flops"), 0)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(kvp.Session(backbone, store, lead=contents.lead, **options))
        before = _snapshot(session)
        for step, (piece, question) in enumerate(zip(visit.pieces, questions, strict=True)):
            if visit.forked and step == visit.forked:
                session = stack.enter_context(session.fork())
                before = _snapshot(session)
            counted = step >= visit.forked

            hits = session.stats().hits
            session.add(contents.pieces[piece], kind="chunk")
            hit = session.stats().hits > hits
            tokens[piece] = session.window.pieces[-1].entry.tokens
            seconds, canonicals = _settle(session)
            if counted:
                counts["steps"] += 1
                counts["revisits"] += piece in shown
                counts["formed seconds"] += seconds
                counts["formed flops"] += canonicals * backbone.forward_costs.flops(tokens[piece])
                points[point_of(session.window)] += hit
            shown.add(piece)

            if counted:
                asked = embedded(backbone, [list(question.ids)])
                places = len(question.answers)
                logits.append(served_logits(session.runtime, session.window, asked, question.tokens, places))

        after = _snapshot(session)
        counts |= {name: value - before.get(name, 0) for name, value in after.items()}
    return ServedVisit(logits, counts, {name: count for name, count in points.items() if count}, tokens)


def _settle(session: kvp.Session) -> tuple[float, int]:
    """Waits for what is stored in the background. Returns the seconds, and the forwards of chunks alone."""
    former = session.runtime.former
    if former is None:
        return 0.0, 0
    before, began = former.done.forwards, time.perf_counter()
    former.flush()
    return time.perf_counter() - began, former.done.forwards - before


def _snapshot(session: kvp.Session) -> dict[str, int | float]:
    """Reads all counters: the session's own, and those of its runtime and store."""
    stats, former = session.stats(), session.runtime.former
    found: dict[str, int | float] = {
        "hits": stats.hits,
        "forwards": stats.forwards,
        "tokens": stats.tokens,
        "flops": stats.flops,
    }
    found["read"] = session.runtime.executor.ledger.of("Fetch").bytes
    store: Any = session.store
    if store is not None:
        found["written"] = store.statistics().counts.get("put_bytes", 0)
    if former is not None:
        found |= {name: getattr(former.done, name) for name in ("canonicals", "patches", "prefills")}
    return found
