"""Answers: text as it is decoded, and the result of an audit."""

import dataclasses
import threading
from collections.abc import Iterator

from ..errors import SessionClosedError
from .runtime import TokenIterator


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

    seed: int | None
    audit: Audit | None
    recalled: list[str]

    def __init__(self, pieces: TokenIterator, seed: int | None = None):
        """Waits for the first token, so that an invalid question raises where it is asked."""
        self.seed, self.audit, self.recalled = seed, None, []
        self._pieces = pieces
        self._lock = threading.Lock()
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
