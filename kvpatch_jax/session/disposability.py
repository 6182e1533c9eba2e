"""Whether a question needs a chunk: answers with its conditioning off, and with it out. Kamera App. E."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..cache import Chunk, brief
from ..errors import SessionError
from ..sampling import Sampling
from ..window import Edits, Window, stored
from .answers import Answer
from .logit_comparison import compared, served_logits
from .question_runner import QuestionRunner
from .session_input import EmbeddedInput, embedded

Verdict = Literal["needed", "canonical", "disposable"]
UNCHANGED = 0.05
"""Nats that an answer may move, on the mean over its places, and count as the same."""


@dataclasses.dataclass(frozen=True)
class AblatedAnswer:
    """The answer to a question with something switched off.

    Attributes:
      kl: KL(as served ‖ so) of the next token, the mean over the places of the served answer, in nats. first: at the
        first alone.
      flips: at how many places the likeliest token is another one.
      answer: what is said so; token ids where there is no tokenizer.
    """

    kl: float
    first: float
    flips: int
    answer: str

    def changed(self, bound: float) -> bool:
        """Whether the answer is another one: a token flips, or it moves by more than this."""
        return self.flips > 0 or self.kl > bound


@dataclasses.dataclass(frozen=True)
class DisposabilityReport:
    """What a question needs of a chunk.

    Attributes:
      chunk: its name. answer: as the window serves it.
      bare: with its conditioning off: served by its canonical alone. out: without the chunk; what stays keeps what it
        has absorbed of it. erased: without it, and what stands behind it served bare: without a trace of it. None
        where that was not asked for.
      bound: nats that count as no change.
      forwards: that were run to find out, over questions, answers and canonicals that were not stored.
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
        """What follows, for this window as it is served.

        Returns:
          "disposable": without the chunk (without a trace of it, where that was asked for) the answer is the same.
          "canonical": the chunk is needed, what it absorbed of those in front is not. "needed": both are.
        """
        if not (self.erased or self.out).changed(self.bound):
            return "disposable"
        return "needed" if self.bare.changed(self.bound) else "canonical"

    def __str__(self) -> str:
        said = [f"{brief(self.chunk)!r}: {self.verdict}; as served {self.answer!r}"]
        for word, without in (("bare", self.bare), ("out", self.out), ("erased", self.erased)):
            if without is not None:
                said.append(f"{word} {without.answer!r} (KL {without.kl:.2g}, {without.flips} flipped)")
        return ", ".join(said)


class DisposabilityProbe(QuestionRunner):
    """Disposability of a session's chunks."""

    def needs(
        self, chunk: str, question: Any, *, steps: int = 8, bound: float = UNCHANGED, erased: bool = False
    ) -> DisposabilityReport:
        """Asks as the window is, with a chunk's conditioning off, and with the chunk out. The window stays as it is.

        All of it runs on forks, which share what they do not change. No piece is prefilled again; canonicals come from
        the store, or of a forward of the chunk alone where it has none.

        Args:
          chunk: its name. question: as `ask` takes it. steps: of the answers, which are greedy.
          bound: nats on the mean over the places of the answer that count as no change.
          erased: asks without any trace of it too: what stays behind it is served bare. Nearer to a prefill without the
            chunk, and further from what this session would serve without it.

        Raises:
          SessionClosedError. SessionError: an unknown name, or a text. WindowError: a chunk of the pinned lead, which
          cannot leave, or one that is not in the window. What `ask` raises.
        """
        self._expect_open()
        items = self._items(question)
        asked = embedded(self.backbone, items)
        with self._lock:
            self._expect_open()
            id, window, before = self._piece(chunk), self._window, self._counts.words["questions"]
            if window.piece(id).entry.kind != "chunk":
                raise SessionError(f"needs: {brief(chunk)!r:.80} is a text, which has no canonical; expected a chunk")
            gone, _ = window.evict(id)
            answer, ids = self._greedy(window, asked, steps)
            whole, places = self._with_answer(items, asked, ids)
            served = self._logits(window, whole, asked.length, places)
            made = [self._canonical(id)]
            found = [self._without(lambda fork: fork.bare(id), served, whole, asked, places, steps)]
            found.append(self._without(lambda fork: fork.evict(id), served, whole, asked, places, steps))
            if erased:
                behind = [piece.id for piece in gone.pieces[window.index(id) :] if piece.entry.kind == "chunk"]
                made += [self._canonical(each) for each in behind]
                found.append(self._without(lambda fork: _erased(fork, id, behind), served, whole, asked, places, steps))
            forwards = self._counts.words["questions"] - before + sum(made)
            self._counts.add("forwards", sum(made))
            return DisposabilityReport(chunk, answer, found[0], found[1], found[2] if erased else None, bound, forwards)

    # -------------------------------------------------------------------------------------------------- inside

    def _greedy(self, window: Window, asked: EmbeddedInput, steps: int) -> tuple[str, tuple[int, ...]]:
        """The likeliest answer behind a window, as text and as ids."""
        answer = Answer(self._stream(window, asked, steps, Sampling(), None, None))
        self._counts.add("questions")
        return answer.text or str(list(answer.ids)), answer.ids

    def _logits(self, window: Window, whole: EmbeddedInput, question: int, places: int) -> np.ndarray:
        self._counts.add("questions")
        return served_logits(self.runtime, window, whole, question, places)

    def _without(
        self, change: Any, served: np.ndarray, whole: EmbeddedInput, asked: EmbeddedInput, places: int, steps: int
    ) -> AblatedAnswer:
        """The answer behind a fork of the window that was changed."""
        fork, sharing = self._window.fork()
        try:
            self.runtime.run(fork, sharing)
            changed, edits = change(fork)
            self.runtime.run(changed, edits)
            logits = self._logits(changed, whole, asked.length, places)
            answer, _ = self._greedy(changed, asked, steps)
        finally:
            self.runtime.release(fork.branch)
        kl, flipped = compared(served, logits)
        return AblatedAnswer(float(kl.mean()), float(kl[0]), int(flipped.sum()), answer)

    def _canonical(self, id: str) -> int:
        """Sees to it that a piece's canonical is at hand. Returns how many forwards that took."""
        known, backbone = self._known[id], self.backbone
        with self.runtime.locked():
            executor = self.runtime.executor
            unit, lead = executor.sources[id], executor.lead
        if unit.chunk is not None:
            return 0
        chunk, forwards = stored(self.store, id, backbone.fingerprint, lead), 0
        if chunk is not None and chunk.content not in (None, known.entry.content):
            chunk = None
        if chunk is None:
            chunk, forwards = self._prefilled_alone(id), 1
        with self.runtime.locked():
            self.runtime.executor.provide(id, chunk=chunk)
        return forwards

    def _prefilled_alone(self, id: str) -> Chunk:
        known, backbone = self._known[id], self.backbone
        tokens = self._hold(known)
        out = backbone.prefill(tokens.tokens, logits=np.array([[tokens.length - 1]], np.int32))
        return Chunk(
            kv={name: jnp.asarray(value)[:, 0] for name, value in out.kv.items()},
            local=np.asarray(tokens.tokens.positions, np.float32)[0],
            span=tokens.span,
            length=tokens.length,
            id=id,
            layout=backbone.layout,
            backbone=backbone.fingerprint,
            content=known.entry.content,
        )


def _erased(fork: Window, id: str, behind: list[str]) -> tuple[Window, Edits]:
    window, edits = fork.evict(id)
    for each in behind:
        window, more = window.bare(each)
        edits = (*edits, *more)
    return window, edits
