"""Answers: pieces of text as they come, and what an audit found of them."""

import dataclasses
import threading
from collections.abc import Generator, Iterator

from ..errors import SessionClosedError
from ..sampling import TextPiece


@dataclasses.dataclass(frozen=True)
class Audit:
    """A served answer beside the same question behind a re-prefill of the window.

    Attributes:
      kl: KL(re-prefill ‖ served) of the next token, the mean over the places of the answer, in nats.
      first: the same at its first token alone.
      flips: at how many places the likeliest token is another one. places: of the answer that were compared.
      as_promised: whether the window was served as it promises. One that remembers what has left differs from a
        re-prefill even then, and means to.
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
    """An answer on its way: iterating gives its text piece by piece, `str` waits for all of it.

        for piece in session.ask("What changed?"):
            print(piece, end="", flush=True)

    It may be read again, and by several threads. Behind the window it was asked behind it stays, whatever the session
    does meanwhile. Without a tokenizer there is no text, only `ids`.

    Attributes:
      seed: of what was drawn; None of a greedy answer.
      recalled: names of the chunks that were fetched for it while it was made.
      audit: what `audit=True` found, else None.
    """

    def __init__(self, pieces: Generator[TextPiece, None, None], seed: int | None = None):
        """Of pieces to come: the first is waited for, so that what is wrong with a question shows when it is asked."""
        self._pieces = pieces
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._done, self._error = False, None
        self.seed, self.audit = seed, None
        self.recalled: list[str] = []
        self._read(0)

    seed: int | None
    audit: Audit | None
    _error: BaseException | None

    @property
    def kl(self) -> float | None:
        """KL(re-prefill ‖ served), where the answer was audited."""
        return None if self.audit is None else self.audit.kl

    @property
    def done(self) -> bool:
        """Whether all of it is here."""
        return self._done

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids, a stop token included; waits for them."""
        for _ in self._places():
            pass
        return tuple(self._ids)

    @property
    def text(self) -> str:
        """All of the text; waits for it."""
        self.ids  # noqa: B018
        return "".join(self._texts)

    def __iter__(self) -> Iterator[str]:
        for place in self._places():
            if self._texts[place]:
                yield self._texts[place]

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        so_far = "".join(self._texts)
        return f"Answer({so_far[:80]!r}{'' if self._done else ' …'}, {len(self._ids)} tokens)"

    def close(self) -> None:
        """Ends the work. What is here stays readable; reading on raises SessionClosedError."""
        with self._lock:
            if not self._done and self._error is None:
                self._error = SessionClosedError(
                    f"answer: closed behind {len(self._ids)} tokens; expected it read to its end before"
                )
                self._pieces.close()

    def _places(self) -> Iterator[int]:
        place = 0
        while self._read(place):
            yield place
            place += 1

    def _read(self, place: int) -> bool:
        """Whether there is a piece of this number; waits for it."""
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
