"""Answers: text as it is decoded, and how far an answer is from the same answer in another context."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from ..backbone import Backbone, joined_tokens
from ..errors import InputError, SessionError
from ..window import Window
from .inputs import EmbeddedInput, embedded
from .runtime import Runtime


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of a question after a window with the same question after another, at every token of an answer.

    An audit compares a re-prefill of the window with the window as it was served. `Session.needs` compares the window
    as it is served with one in which a chunk, or its conditioning, is ablated.

    Attributes:
      kl: KL(first ‖ second) of the next token, the mean over the tokens of the answer, in nats.
      first: the same for the first token alone.
      flips: the number of tokens whose likeliest token differs.
      places: the number of tokens that were compared.
      as_promised: whether the second window was served as it promises. A window that remembers evicted chunks differs
        from a re-prefill even then, by intention.
      answer: the text after the second window; token ids without a tokenizer.
    """

    kl: float
    first: float
    flips: int
    places: int
    as_promised: bool
    answer: str

    @classmethod
    def of(
        cls, first: Float[np.ndarray, "n V"], second: Float[np.ndarray, "n V"], as_promised: bool, answer: "Answer"
    ) -> "Comparison":
        """Compares the logits of two windows at the same tokens."""
        kl, flipped = compared(first, second)
        text = answer.text or str(list(answer.ids))
        return cls(float(kl.mean()), float(kl[0]), int(flipped.sum()), len(kl), as_promised, text)

    def changed(self, bound: float) -> bool:
        """Returns whether a token flips, or the answer moves by more than `bound` nats."""
        return self.flips > 0 or self.kl > bound

    def __str__(self) -> str:
        served = "as promised" if self.as_promised else "approximately"
        flips = f"{self.flips} of {self.places} flipped"
        return f"KL {self.kl:.2g} (first token {self.first:.2g}), {flips}, served {served}"


class Answer:
    """Answer that is being decoded. Iterating yields its text piece by piece; `str` waits for all of it.

        for piece in session.ask("What changed?"):
            print(piece, end="", flush=True)

    It may be read repeatedly, and by several threads. It belongs to the window that was asked, whatever the session
    does meanwhile. Without a tokenizer there is no text, only `ids`.

    Attributes:
      seed: of what was drawn; None for a greedy answer.
      recalled: names of the chunks that were placed for it.
      audit: the result of `audit=True`, otherwise None.
    """

    def __init__(self, pieces: Any, seed: int | None = None):
        """Waits for the first token of a closable iterator, so that an invalid question raises where it is asked."""
        self.seed: int | None = seed
        self.audit: Comparison | None = None
        self.recalled: list[str] = []
        # Re-entrant, because a retriever that runs for the answer may close it.
        self._pieces, self._lock = pieces, threading.RLock()
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._done = False
        self._error: BaseException | None = None
        self._has(0)

    @property
    def kl(self) -> float | None:
        """KL(re-prefill ‖ served), if the answer was audited."""
        return None if self.audit is None else self.audit.kl

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._done

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids, including a stop token. Waits for them."""
        while self._has(len(self._ids)):
            pass
        return tuple(self._ids)

    @property
    def text(self) -> str:
        """All of the text. Waits for it."""
        return "".join(self)

    def __iter__(self) -> Iterator[str]:
        place = 0
        while self._has(place):
            if self._texts[place]:
                yield self._texts[place]
            place += 1

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        so_far = "".join(self._texts)
        return f"Answer({so_far[:80]!r}{'' if self._done else ' …'}, {len(self._ids)} tokens)"

    def close(self) -> None:
        """Ends decoding. What was decoded stays readable; reading further raises SessionError."""
        with self._lock:
            if not self._done and self._error is None:
                self._error = SessionError(
                    f"answer: got closed after {len(self._ids)} tokens; expected it read to its end before"
                )
                # A generator that runs right now, on this thread, is closed after its step.
                with contextlib.suppress(ValueError):
                    self._pieces.close()

    def _has(self, place: int) -> bool:
        """Returns whether the answer has a token at this place. Waits until that is known."""
        with self._lock:
            if place < len(self._ids):
                return True
            if self._error is not None:
                raise self._error
            if self._done:
                return False
            try:
                piece = next(self._pieces)
            except StopIteration:
                self._done = True
                return False
            except BaseException as error:
                self._error = error
                raise
            if self._error is not None:
                self._pieces.close()
                raise self._error
            self._ids.append(int(piece.ids[0]))
            self._texts.append(piece.text)
            return True


# ------------------------------------------------------------------------------------------------------ comparing


def compared(
    first: Float[np.ndarray, "n V"], second: Float[np.ndarray, "n V"]
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Compares two distributions of the next token, at each token of an answer.

    Returns:
      KL(first ‖ second) in nats, and whether the likeliest token differs.
    """
    # The largest logit becomes 0, so that no exponential overflows.
    shifted = [np.asarray(logits, np.float64) for logits in (first, second)]
    shifted = [logits - logits.max(axis=-1, keepdims=True) for logits in shifted]
    logs = [logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)) for logits in shifted]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1)
    # Rounding may leave a tiny negative number.
    return np.maximum(kl, 0.0), logs[0].argmax(-1) != logs[1].argmax(-1)


def _answer_rows(question: int, places: int) -> np.ndarray:
    """Returns the tokens, of a question and its answer, whose logits choose the answer: [1, n]."""
    # Padded to a power of two, so that answers of many lengths compile few programs.
    count = 1 << max(places - 1, 0).bit_length()
    return question - 1 + np.minimum(np.arange(count), places - 1)[None].astype(np.int32)


def served_logits(
    runtime: Runtime, window: Window, asked: EmbeddedInput, question: int, places: int
) -> Float[np.ndarray, "n V"]:
    """Returns the logits of an answer as a window is served.

    Args:
      asked: the question followed by the answer.
      question, places: tokens of the question, and of the answer.
    """
    rows = _answer_rows(question, places)

    def job() -> np.ndarray:
        out = runtime.executor.prefill(window, asked.tokens, asked.length, logits=rows)
        return np.asarray(out.logits[0], np.float32)

    return runtime.do(job)[:places]


def prefilled_logits(
    backbone: Backbone,
    pieces: Sequence[tuple[EmbeddedInput, int]],
    asked: EmbeddedInput,
    start: int,
    question: int,
    places: int,
) -> Float[np.ndarray, "n V"]:
    """Returns the logits of an answer after a prefill of pieces at their starts, in one forward without any reuse.

    Args:
      asked, question, places: as of `served_logits`.
      start: of the question.
    """
    parts = [piece.take(0, piece.length).shift(place) for piece, place in [*pieces, (asked, start)]]
    prompt = joined_tokens(parts).on_device()
    before = sum(piece.length for piece, _ in pieces)
    out = backbone.prefill(prompt, logits=before + _answer_rows(question, places))
    return np.asarray(out.logits[0], np.float32)[:places]


def with_answer(
    backbone: Backbone, items: list[object], asked: EmbeddedInput, ids: Sequence[int]
) -> tuple[EmbeddedInput, int]:
    """Returns a question followed by its answer, and the number of tokens of the answer that can be compared."""
    if len(ids) <= 1:
        return asked, len(ids)
    try:
        # The last token is chosen, and then read by nothing.
        return embedded(backbone, items, ids[:-1]), len(ids)
    except InputError:
        # The answer has tokens that stand for images, which nobody gave. Only its first token can be compared.
        return asked, 1
