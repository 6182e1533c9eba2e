"""Answers: text as it is decoded, and how far an answer is from the same answer in another context."""

import dataclasses
import threading
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from ..backbone import Backbone, Tokens, ahead_of
from ..errors import InputError, SessionClosedError
from ..window import Window
from .inputs import EmbeddedInput, embedded
from .runtime import Runtime, TokenIterator


@dataclasses.dataclass(frozen=True)
class Audit:
    """Comparison of a served answer with the same question after a re-prefill of the window.

    Attributes:
      kl: KL(re-prefill ‖ served) of the next token, the mean over the tokens of the answer, in nats.
      first: the same for the first token alone.
      flips: the number of tokens whose likeliest token differs.
      places: the number of tokens that were compared.
      as_promised: whether the window was served as it promises. A window that remembers evicted chunks differs from a
        re-prefill even then, by intention.
    """

    kl: float
    first: float
    flips: int
    places: int
    as_promised: bool

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

    def __init__(self, pieces: TokenIterator, seed: int | None = None):
        """Waits for the first token, so that an invalid question raises where it is asked."""
        self.seed: int | None = seed
        self.audit: Audit | None = None
        self.recalled: list[str] = []
        self._pieces, self._lock = pieces, threading.Lock()
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
        """Ends decoding. What was decoded stays readable; reading further raises SessionClosedError."""
        with self._lock:
            if not self._done and self._error is None:
                self._error = SessionClosedError(
                    f"answer: got closed after {len(self._ids)} tokens; expected it read to its end before"
                )
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
    log_first, log_second = _log_softmax(first), _log_softmax(second)
    kl = (np.exp(log_first) * (log_first - log_second)).sum(axis=-1)
    # Rounding may leave a tiny negative number.
    return np.maximum(kl, 0.0), log_first.argmax(-1) != log_second.argmax(-1)


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    # The largest logit becomes 0, so that no exponential overflows.
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


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
    # Joined on the host, where a new length compiles nothing.
    parts = [*pieces, (asked, start)]
    features = next((part.tokens.deepstack for part, _ in parts if part.tokens.deepstack is not None), None)
    embeddings, positions, deepstack = [], [], []
    for part, place in parts:
        embeddings.append(np.asarray(part.tokens.embeddings)[:, : part.length])
        positions.append(np.asarray(part.tokens.positions)[:, : part.length] + place)
        if features is not None:
            # Texts have no features of the vision tower; zeros add nothing.
            zeros = np.zeros((1, part.length, *features.shape[2:]), features.dtype)
            rows = part.tokens.deepstack
            deepstack.append(zeros if rows is None else np.asarray(rows)[:, : part.length])
    prompt = Tokens(
        jnp.asarray(np.concatenate(embeddings, axis=1)),
        np.concatenate(positions, axis=1),
        None if features is None else jnp.asarray(np.concatenate(deepstack, axis=1)),
        ahead_of([part.tokens.take(0, part.length) for part, _ in parts]),
    )
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
