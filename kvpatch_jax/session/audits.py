"""Audits for the loss guard: an answer as it was served, as its window promises it, and as blind reuse gives it."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..errors import InputError, PatchMismatchError, PoolError, ShapeError
from ..plan import is_inherited
from ..window import BARE, PREFILL, Service, Window
from .answers import compared, served_logits, with_answer
from .guard import Audit
from .inputs import EmbeddedInput
from .pieces import PieceBook


def audit_answer(branch: PieceBook, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]) -> Audit | None:
    """Audits an answer on a branch that shows the window it was given behind. Nothing of it is stored or kept.

    Args:
      branch: whose KV is used up: it can only be released afterwards.
      items, asked: the question, and the question embedded.
      ids: tokens of the answer.

    Returns:
      The audit; None of an empty answer.

    Raises:
      PoolError: no room. SessionError: a content that was discarded. What the backbone raises.
    """
    window, runtime = branch.window, branch.runtime
    followed, places = with_answer(runtime.backbone, items, asked, ids)
    if not places:
        return None
    changed = [piece for piece, standing in zip(window.pieces, window.standings, strict=True) if standing.ways]
    forwards = 0

    def logits_behind(shown: Window) -> Float[np.ndarray, "n V"]:
        nonlocal forwards
        # Of what was shown before, only the KV that stays is kept, so that both fit in the room of one.
        stay = {piece.made for piece in shown.pieces}
        common = tuple(piece for piece in window.pieces if piece.made in stay)
        forwards += _bring(branch, dataclasses.replace(shown, pieces=common)) + _bring(branch, shown) + 1
        return served_logits(runtime, shown, followed, asked.length, places)

    # What blind reuse keeps of the window has to be there, so the promised window comes last.
    served, bare, blind_logits = logits_behind(window), _blind(window), None
    if bare is not None:
        # A canonical that nobody has is not formed for this.
        with contextlib.suppress(InputError, PatchMismatchError, ShapeError):
            blind_logits = logits_behind(bare)
    promised = logits_behind(window.serve({piece.id: PREFILL for piece in changed}))

    (kl, flipped), blind = compared(promised, served), None
    if blind_logits is not None:
        blind_kl, blind_flipped = compared(promised, blind_logits)
        blind = float(blind_kl.mean()), int(blind_flipped.sum())
    uncached = sum(piece.entry.tokens for piece in window.pieces[window.index(changed[0].id) :])
    return Audit(float(kl.mean()), int(flipped.sum()), places, blind, uncached, forwards)


def _blind(window: Window) -> Window | None:
    """Returns a window with its approximate chunks bare; None if that is how they are served."""
    services = dict[str, Service]()
    for piece, standing in zip(window.pieces, window.standings, strict=True):
        if standing.ways and is_inherited(piece):
            services[piece.id] = PREFILL
        elif standing.ways and piece.entry.kind == "chunk":
            services[piece.id] = BARE
    bare = window.serve(services)
    return None if [piece.made for piece in bare.pieces] == [piece.made for piece in window.pieces] else bare


def _bring(branch: PieceBook, window: Window) -> int:
    """Brings a window on a branch, unobserved. Returns the number of forwards of pieces."""
    runtime, executor = branch.runtime, branch.runtime.executor
    made = {piece.made for piece in branch.window.pieces}
    for piece in window.pieces:
        if piece.method == "prefill" and piece.made not in made:
            branch.provide(branch.records[piece.id])

    def job() -> Any:
        try:
            return executor.run(window, observed=False)
        except PoolError as error:
            # A pool of many sessions is not waited for, which would hold up the reader and others behind it.
            if runtime.private or error.lost:
                raise
            return error

    step = runtime.do(job, window if runtime.private else None)
    if isinstance(step, PoolError):
        raise step
    return sum(action.kind == "prefill" for action in step)
