"""Questions behind a session's window: answers as they come, audited, with chunks that a question names."""

import secrets
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ..content import Text, check_text
from ..errors import InputError
from ..sampling import Piece, Sampling
from ..window import Window
from .answers import Answer, Audit
from .checking import compared, prefilled_logits, served_logits
from .holding import Holding
from .things import Embedded, embedded, thing_of

STEPS = 256
"""Tokens of an answer at most, where nobody says."""
Stop = Sequence[int | str] | None


class Asking(Holding):
    """What is asked behind a window."""

    around: tuple[str, str]
    largest_image: int
    linker: Any
    retriever: Any
    _answers: weakref.WeakSet[Answer]

    def ask(
        self,
        question: Any,
        *,
        steps: int = STEPS,
        stop: Stop = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        audit: bool = False,
    ) -> Answer:
        """Asks behind the window; nothing of the question is kept, and the window stays as it is.

        The first token is there when this returns, and the answer is what it is behind this window, whatever the
        session does while the rest is read.

        Args:
          question: a text, token ids, an image, or several of them; a str that names a file is refused.
          steps: tokens at most. stop: what ends the answer besides: token ids, or texts that are one token each; None:
            the backbone's own stop tokens, () none.
          temperature, top_p, top_k: how tokens are drawn; 0 takes the likeliest.
          seed: of what is drawn; None draws one, which the answer says.
          audit: reads the answer to its end, then runs window, question and answer through the model at once, without
            any reuse, and compares: `answer.kl`, `answer.audit`.

        Returns:
          The answer: an iterable of text as it comes; `str(answer)` is all of it.

        Raises:
          SessionClosedError. InputError, ConfigError: a question, steps, stop or sampling that is none.
          UnknownReferenceError: a reference that the linker does not know. What the backbone raises.
        """
        self._expect_open()
        sampling = Sampling(float(temperature), float(top_p), top_k)
        stops = self._stops(stop)
        if sampling.temperature > 0 and seed is None:
            seed = secrets.randbits(32)
        items = self._items(question)
        asked = embedded(self.backbone, items)
        with self._lock:
            self._expect_open()
            window = self._window
            key = seed if sampling.temperature > 0 else None
            answer = Answer(self._stream(window, asked, steps, sampling, key, stops), key)
            self._answers.add(answer)
            self._counts.add("asked")
            self._counts.add("questions")
            if audit:
                answer.audit = self._audit(window, items, asked, answer.ids)
            if isinstance(question, str):
                self._tell("ask", text=str(question), steps=steps)
            return answer

    # -------------------------------------------------------------------------------------------------- inside

    def _stream(
        self, window: Window, asked: Embedded, steps: int, sampling: Sampling, key: int | None, stop: Any
    ) -> Generator[Piece, None, None]:
        """The tokens of an answer behind a window."""
        yield from self.runtime.answer(window, asked.tokens, asked.length, steps, sampling, key, stop)

    def _items(self, question: Any) -> list[Any]:
        """A question as `prepare` takes it."""
        if isinstance(question, str):
            check_text(question, "question")
            if not question:
                raise InputError("question: an empty text; expected some")
            before, behind = self.around
            return [Text(f"{before}{question}{behind}")]
        return list(thing_of(self.backbone, question, self.largest_image).items)

    def _stops(self, stop: Stop) -> tuple[int, ...] | None:
        """Stop tokens by their ids.

        Raises:
          InputError: a text that is not one token, or without a tokenizer.
        """
        if stop is None:
            return None
        found = []
        for each in [stop] if isinstance(stop, str | int) else stop:
            if isinstance(each, str):
                tokenizer = getattr(self.backbone, "tokenizer", None)
                ids = [] if tokenizer is None else list(tokenizer.encode(each, add_special_tokens=False).ids)
                if len(ids) != 1:
                    raise InputError(f"stop {each!r:.80} is {len(ids)} tokens; expected a text of one token, or its id")
                each = ids[0]
            found.append(each)
        return tuple(found)

    def _audit(self, window: Window, items: list[Any], asked: Embedded, ids: Sequence[int]) -> Audit:
        """Compares what a window served with a prefill of it, at every place of an answer."""
        whole, places = self._with_answer(items, asked, ids)
        if not places:
            return Audit(0.0, 0.0, 0, 0, window.as_promised)
        served = served_logits(self.runtime, window, whole, asked.length, places)
        pieces = [(self._hold(self._known[piece.entry.id]), piece.start) for piece in window.pieces]
        truth = prefilled_logits(self.backbone, pieces, whole, window.next_start, asked.length, places)
        self._counts.add("questions", 2)
        kl, flipped = compared(truth, served)
        return Audit(float(kl.mean()), float(kl[0]), int(np.sum(flipped)), places, window.as_promised)

    def _with_answer(self, items: list[Any], asked: Embedded, ids: Sequence[int]) -> tuple[Embedded, int]:
        """A question with its answer behind it, and at how many places of the answer tokens were chosen."""
        if len(ids) <= 1:
            return asked, len(ids)
        try:
            return embedded(self.backbone, items, ids[:-1]), len(ids)
        except InputError:  # tokens that stand for images, which nobody gave: the first place is what can be compared
            return asked, 1
