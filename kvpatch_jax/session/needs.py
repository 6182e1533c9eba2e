"""Disposability of a chunk: whether a question needs it, or what it absorbed from its antecedent. Kamera App. E."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..cache import brief
from ..errors import SessionError
from ..window import BARE, Window, canonical_of, prefill_alone, stored
from .answers import Answer, compared, served_logits, with_answer
from .inputs import EmbeddedInput
from .pieces import PieceBook
from .runtime import AnswerOptions

Verdict = Literal["needed", "canonical", "disposable"]
UNCHANGED = 0.05
"""Mean nats per token that an answer may move and still count as unchanged."""


@dataclasses.dataclass(frozen=True)
class AblatedAnswer:
    """Answer to a question with something ablated.

    Attributes:
      kl: KL(as served ‖ ablated) of the next token, the mean over the tokens of the served answer, in nats.
      first: the same for the first token alone.
      flips: the number of tokens whose likeliest token differs.
      answer: the text; token ids without a tokenizer.
    """

    kl: float
    first: float
    flips: int
    answer: str

    def changed(self, bound: float) -> bool:
        """Returns whether a token flips, or the answer moves by more than `bound` nats."""
        return self.flips > 0 or self.kl > bound


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
    bare: AblatedAnswer
    out: AblatedAnswer
    erased: AblatedAnswer | None
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


class DisposabilityProbe:
    """Probe of one question, which runs on forks of a session's window."""

    def __init__(self, book: PieceBook, items: list[Any], asked: EmbeddedInput, steps: int):
        """Takes a question, as items and embedded, and the number of tokens of its answers."""
        self._book, self._items, self._asked, self._steps = book, items, asked, steps

    def run(self, chunk: str, bound: float, erased: bool) -> DisposabilityReport:
        """Answers as the window is, without a chunk's conditioning, and without the chunk.

        Raises:
          SessionError: an unknown name, or a text. WindowError: a chunk of the lead, or one that is not in the window.
        """
        book, window = self._book, self._book.window
        id = book.find(chunk).entry.id
        index = window.index(id)
        if window.pieces[index].entry.kind != "chunk":
            raise SessionError(f"needs: got {brief(chunk)!r:.80}, a text, which has no canonical; expected a chunk")
        # Raises for a chunk of the lead, before anything runs.
        without = window.evict(id)
        questions = book.counters["questions"]

        # Every ablation is compared at the tokens of the answer as it is served.
        answer = self._answer(window)
        asked = with_answer(book.runtime.backbone, self._items, self._asked, answer.ids)
        served = self._logits(window, *asked)
        canonicals = self._provide_canonicals([id])
        bare = self._ablated(window.serve({id: BARE}), served, asked)
        out = self._ablated(without, served, asked)
        traceless = None
        if erased:
            following = [piece.id for piece in without.pieces[index:] if piece.entry.kind == "chunk"]
            canonicals += self._provide_canonicals(following)
            traceless = self._ablated(without.serve(dict.fromkeys(following, BARE)), served, asked)

        book.counters["forwards"] += canonicals
        forwards = book.counters["questions"] - questions + canonicals
        return DisposabilityReport(chunk, _shown(answer), bare, out, traceless, bound, forwards)

    def _ablated(self, window: Window, served: np.ndarray, asked: tuple[EmbeddedInput, int]) -> AblatedAnswer:
        """Answers on a fork that shows another window, from the session's own KV: nothing is prefilled."""
        fork = self._book.window.fork()
        runtime = self._book.runtime
        try:
            runtime.run(fork)
            changed = dataclasses.replace(window, branch=fork.branch)
            runtime.run(changed)
            logits = self._logits(changed, *asked)
            answer = self._answer(changed)
        finally:
            runtime.release(fork.branch)
        kl, flipped = compared(served, logits)
        return AblatedAnswer(float(kl.mean()), float(kl[0]), int(flipped.sum()), _shown(answer))

    def _answer(self, window: Window) -> Answer:
        """Returns the greedy answer after a window, read to its end, while the branch that it reads exists."""
        options = AnswerOptions(self._steps)
        answer = Answer(self._book.runtime.answer(window, self._asked.tokens, self._asked.length, options))
        self._book.counters["questions"] += 1
        _ = answer.ids
        return answer

    def _logits(self, window: Window, whole: EmbeddedInput, places: int) -> np.ndarray:
        """Returns the logits of an answer as a window serves them."""
        self._book.counters["questions"] += 1
        return served_logits(self._book.runtime, window, whole, self._asked.length, places)

    def _provide_canonicals(self, ids: Sequence[str]) -> int:
        """Provides the executor with pieces' canonicals. Returns the number of forwards that this took."""
        book, forwards = self._book, 0
        executor, backbone = book.runtime.executor, book.runtime.backbone
        for id in ids:
            record = book.records[id]
            if executor.sources[id].chunk is not None:
                continue
            # Reads and forwards run without the executor, on which other sessions would wait.
            chunk = stored(book.runtime.store, id, backbone.fingerprint)
            # Callers of a store choose ids, so what it has under this one may show another content.
            if chunk is None or chunk.content not in (None, record.entry.content):
                tokens = book.provide(record)
                kv, forwards = prefill_alone(backbone, tokens.tokens, tokens.length), forwards + 1
                local = np.asarray(tokens.tokens.positions, np.float32)[0]
                chunk = canonical_of(backbone, kv, local, tokens.length, record.entry)
            provided = chunk
            book.runtime.do(lambda id=id, chunk=provided: executor.provide(id, chunk=chunk))
        return forwards


def _shown(answer: Answer) -> str:
    return answer.text or str(list(answer.ids))
