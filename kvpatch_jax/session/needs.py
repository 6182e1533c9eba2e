"""Disposability of a chunk: whether a question needs it, or what it absorbed from its antecedent. Kamera App. E."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ..cache import brief
from ..errors import SessionError
from ..window import BARE, Window, canonical_of, stored
from .answers import Answer, Comparison, served_logits, with_answer
from .inputs import EmbeddedInput
from .pieces import PieceBook
from .runtime import AnswerOptions

Verdict = Literal["needed", "canonical", "disposable"]
UNCHANGED = 0.05
"""Mean nats per token that an answer may move and still count as unchanged."""


@dataclasses.dataclass(frozen=True)
class DisposabilityReport:
    """Result of the probe: what a question needs of a chunk.

    Attributes:
      chunk: its name.
      answer: as the window serves it.
      bare: without the chunk's conditioning: served by its canonical alone.
      out: without the chunk. Pieces that stay keep what they absorbed of it.
      erased: without a trace of the chunk: what follows it is served bare. None unless requested.
      bound: nats that count as no change.
      forwards: number of forwards of the probe: questions, answers, and canonicals that were not stored.
    """

    chunk: str
    answer: str
    bare: Comparison
    out: Comparison
    erased: Comparison | None
    bound: float
    forwards: int

    @property
    def verdict(self) -> Verdict:
        """Verdict for this window as it is served.

        Returns:
          "disposable": the answer is the same without the chunk (without a trace of it, if that was requested).
          "canonical": the chunk is needed, but not what it absorbed of its antecedent. "needed": both are.
        """
        if not (self.erased or self.out).changed(self.bound):
            return "disposable"
        return "needed" if self.bare.changed(self.bound) else "canonical"

    def __str__(self) -> str:
        parts = [f"{brief(self.chunk)!r}: {self.verdict}; as served {self.answer!r}"]
        for name, ablated in (("bare", self.bare), ("out", self.out), ("erased", self.erased)):
            if ablated is not None:
                parts.append(f"{name} {ablated.answer!r} (KL {ablated.kl:.2g}, {ablated.flips} flipped)")
        return ", ".join(parts)


def probe(
    book: PieceBook, chunk: str, items: list[Any], asked: EmbeddedInput, steps: int, bound: float, erased: bool
) -> DisposabilityReport:
    """Answers a question, `asked` when embedded, with and without a chunk. The rest is as of `Session.needs`."""
    runtime, window, id = book.runtime, book.window, book.find(chunk).entry.id
    index = window.index(id)
    if window.pieces[index].entry.kind != "chunk":
        raise SessionError(f"needs: got {brief(chunk)!r:.80}, a text, which has no canonical; expected a chunk")
    # Raises for a chunk of the lead, before anything runs.
    without = window.evict(id)

    # The answer is read to its end while the branch that it reads exists.
    def answered(shown: Window) -> Answer:
        answer = Answer(runtime.answer(shown, asked.tokens, asked.length, AnswerOptions(steps)))
        _ = answer.ids
        return answer

    # Every ablation is compared at the tokens of the answer as it is served.
    answer = answered(window)
    followed, places = with_answer(runtime.backbone, items, asked, answer.ids)
    served = served_logits(runtime, window, followed, asked.length, places)

    # Answers on a fork that shows another window, from the session's KV: nothing is prefilled.
    def ablated(other: Window) -> Comparison:
        fork = window.fork()
        try:
            runtime.run(fork)
            other = dataclasses.replace(other, branch=fork.branch)
            runtime.run(other)
            logits = served_logits(runtime, other, followed, asked.length, places)
            return Comparison.of(served, logits, other.as_promised, answered(other))
        finally:
            runtime.release(fork.branch)

    canonicals, traceless = _provide_canonicals(book, [id]), None
    bare, out = ablated(window.serve({id: BARE})), ablated(without)
    if erased:
        following = [piece.id for piece in without.pieces[index:] if piece.entry.kind == "chunk"]
        canonicals += _provide_canonicals(book, following)
        traceless = ablated(without.serve(dict.fromkeys(following, BARE)))

    # An answer and its logits, of each window.
    questions = 8 if erased else 6
    book.counters["questions"] += questions
    book.counters["forwards"] += canonicals
    shown = answer.text or str(list(answer.ids))
    return DisposabilityReport(chunk, shown, bare, out, traceless, bound, questions + canonicals)


def _provide_canonicals(book: PieceBook, ids: Sequence[str]) -> int:
    """Provides the executor with pieces' canonicals. Returns the number of forwards that this took."""
    executor, backbone, forwards = book.runtime.executor, book.runtime.backbone, 0
    for id in ids:
        record = book.records[id]
        if executor.sources[id].chunk is not None:
            continue
        # Reads and forwards run without the executor, on which other sessions would wait.
        chunk = stored(book.runtime.store, id, backbone.fingerprint)
        # Callers of a store choose ids, so what it has under this one may show another content.
        if chunk is None or chunk.content not in (None, record.entry.content):
            tokens = book.provide(record)
            chunk, forwards = canonical_of(backbone, tokens.tokens, record.entry), forwards + 1
        provided = chunk
        book.runtime.do(lambda id=id, chunk=provided: executor.provide(id, chunk=chunk))
    return forwards
