"""Disposability of a chunk: whether a question needs it, or what it absorbed from its antecedent. Kamera App. E."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from ..cache import Chunk, brief
from ..errors import SessionError
from ..sampling import Sampling
from ..window import Edits, Window, stored
from .answers import Answer
from .logit_comparison import compared, served_logits, with_answer
from .piece_registry import PieceRegistry
from .session_input import EmbeddedInput

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

    def __init__(self, registry: PieceRegistry, items: list[Any], asked: EmbeddedInput, steps: int):
        """Takes a question, as items and embedded, and the number of tokens of its answers."""
        self._registry, self._items, self._asked, self._steps = registry, items, asked, steps

    def run(self, chunk: str, bound: float, erased: bool) -> DisposabilityReport:
        """Answers as the window is, without a chunk's conditioning, and without the chunk.

        Raises:
          SessionError: an unknown name, or a text. WindowError: a chunk of the lead, or one that is not in the window.
        """
        registry, window = self._registry, self._registry.window
        id = registry.find(chunk).entry.id
        if window.piece(id).entry.kind != "chunk":
            raise SessionError(f"needs: got {brief(chunk)!r:.80}, a text, which has no canonical; expected a chunk")

        # Raises for a chunk of the lead, before anything runs.
        without, _ = window.evict(id)
        questions = registry.counters["questions"]

        # Every ablation is compared at the tokens of the answer as it is served.
        answer = self._answer(window)
        whole, places = with_answer(registry.runtime.backbone, self._items, self._asked, answer.ids)
        served = self._logits(window, whole, places)

        def ablate(change: Callable[[Window], tuple[Window, Edits]]) -> AblatedAnswer:
            # The fork's KV is the window's own until it is changed, so nothing is prefilled.
            fork, sharing = window.fork()
            try:
                registry.runtime.run(fork, sharing)
                changed, edits = change(fork)
                registry.runtime.run(changed, edits)
                logits = self._logits(changed, whole, places)
                ablated = self._answer(changed)
            finally:
                registry.runtime.release(fork.branch)

            kl, flipped = compared(served, logits)
            return AblatedAnswer(float(kl.mean()), float(kl[0]), int(flipped.sum()), _shown(ablated))

        canonicals = self._provide_canonical(id)
        bare = ablate(lambda fork: fork.bare(id))
        out = ablate(lambda fork: fork.evict(id))
        traceless = None

        if erased:
            following = [piece.id for piece in without.pieces[window.index(id) :] if piece.entry.kind == "chunk"]
            for each in following:
                canonicals += self._provide_canonical(each)

            def erase(fork: Window) -> tuple[Window, Edits]:
                changed, edits = fork.evict(id)
                for each in following:
                    changed, more = changed.bare(each)
                    edits = (*edits, *more)
                return changed, edits

            traceless = ablate(erase)

        registry.counters["forwards"] += canonicals
        forwards = registry.counters["questions"] - questions + canonicals
        return DisposabilityReport(chunk, _shown(answer), bare, out, traceless, bound, forwards)

    # -------------------------------------------------------------------------------------------------- inside

    def _answer(self, window: Window) -> Answer:
        """Returns the greedy answer after a window."""
        asked, runtime = self._asked, self._registry.runtime
        stream = runtime.answer(window, asked.tokens, asked.length, self._steps, Sampling(), None, None)
        answer = Answer(stream)
        self._registry.counters["questions"] += 1
        # Read to its end, while the branch that it reads exists.
        _ = answer.ids
        return answer

    def _logits(self, window: Window, whole: EmbeddedInput, places: int) -> np.ndarray:
        """Returns the logits of an answer as a window serves them."""
        self._registry.counters["questions"] += 1
        return served_logits(self._registry.runtime, window, whole, self._asked.length, places)

    def _provide_canonical(self, id: str) -> int:
        """Provides the executor with a piece's canonical. Returns the number of forwards that this took."""
        registry, runtime = self._registry, self._registry.runtime
        record, backbone = registry.records[id], runtime.backbone
        # The lock is not held during reads and forwards, on which other sessions would wait.
        with runtime.locked():
            source, lead = runtime.executor.sources[id], runtime.executor.lead
        if source.chunk is not None:
            return 0

        forwards = 0
        chunk = stored(runtime.store, id, backbone.fingerprint, lead)
        # Callers of a store choose ids, so what it has under this one may show another content.
        if chunk is None or chunk.content not in (None, record.entry.content):
            tokens, forwards = registry.provide_tokens(record), 1
            count = np.array([tokens.length], np.int32)
            options: Any = {"lengths": count} if backbone.layout.parts else {}
            out = backbone.prefill(tokens.tokens, logits=count[None] - 1, **options)
            chunk = Chunk(
                kv={name: jnp.asarray(value)[:, 0] for name, value in out.kv.items()},
                local=np.asarray(tokens.tokens.positions, np.float32)[0],
                span=tokens.span,
                length=tokens.length,
                id=id,
                layout=backbone.layout,
                backbone=backbone.fingerprint,
                content=record.entry.content,
            )

        with runtime.locked():
            runtime.executor.provide(id, chunk=chunk)
        return forwards


def _shown(answer: Answer) -> str:
    return answer.text or str(list(answer.ids))
