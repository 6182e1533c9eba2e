"""Questions behind a session's window: answers as they come, audited, with chunks that a question names."""

import secrets
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ..cache import Text, check_text
from ..errors import InputError, SessionError
from ..sampling import Sampling, TextPiece, check_steps
from ..utils.argument_names import with_our_names
from ..window import Window
from .answer_retrieval import looking_on
from .answers import Answer, Audit
from .logit_comparison import compared, prefilled_logits, served_logits
from .piece_registry import PieceRegistry, outliving_the_pool
from .session_input import EmbeddedInput, embedded, thing_of

STEPS = 256
"""Tokens of an answer at most, where neither the caller nor the checkpoint says."""
Stop = Sequence[int | str] | None


class QuestionRunner(PieceRegistry):
    """What is asked behind a window."""

    around: tuple[str, str]
    chat: bool
    largest_image: int
    linker: Any
    retriever: Any
    _answers: weakref.WeakSet[Answer]

    @with_our_names
    @outliving_the_pool
    def ask(
        self,
        question: Any,
        *,
        steps: int | None = None,
        stop: Stop = None,
        temperature: float | int = 0.0,
        top_p: float | int = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        audit: bool = False,
        look: int = 16,
    ) -> Answer:
        """Asks behind the window; nothing of the question is kept, and the window stays as it is.

        The first token is there when this returns, and the answer is what it is behind this window, whatever the
        session does while the rest is read.

        Args:
          question: a text, token ids, an image, or several of them. A str is a text, as for `add`.
          steps: tokens at most; None: as many as the checkpoint says (`max_new_tokens` of its generation_config.json),
            256 where it does not.
          stop: what ends the answer besides: token ids, or texts that are one token each; None: the backbone's own stop
            tokens, () none.
          temperature, top_p, top_k: how tokens are drawn; 0 takes the likeliest.
          seed: of what is drawn; None draws one, which the answer says.
          look: where the session has a retriever, it is asked before the first token and whenever so many were made.
          audit: reads the answer to its end, then runs window, question and answer through the model at once, without
            any reuse, and compares: `answer.kl`, `answer.audit`.

        `IMAGE#NAME` in a text stands for what the session's linker has under it: those chunks are placed behind the
        window for this question alone, with the text between them. What the retriever finds (see `Looking`) is placed
        so too, before the answer goes on; `answer.recalled` names both.

        Returns:
          The answer: an iterable of text as it comes; `str(answer)` is all of it.

        Raises:
          SessionClosedError. InputError, ConfigError: a question, steps, stop or sampling that is none.
          UnknownReferenceError: a reference that the linker does not know. What the backbone raises.
        """
        self._expect_open()
        sampling = Sampling(temperature, top_p, top_k)
        stops = self._stops(stop)
        most: int = steps if steps is not None else getattr(self.backbone, "answer_tokens", None) or STEPS
        check_steps(most)
        if sampling.temperature > 0 and seed is None:
            seed = secrets.randbits(32)
        key = seed if sampling.temperature > 0 else None
        if not isinstance(look, int) or isinstance(look, bool) or look < 1:
            raise InputError(f"look {look!r:.80}; expected after how many tokens a retriever is asked, 1 or more")
        with self._lock:
            self._expect_open()
            linked = self._linked(question)
            if linked is None and self.retriever is None:
                answer = self._plainly(question, most, sampling, key, stops, audit)
            else:
                answer = self._on_a_fork(question, linked, most, sampling, key, stops, audit, look)
            self._answers.add(answer)
            self._counts.add("asked")
            if isinstance(question, str):
                self._tell("ask", text=str(question), steps=most)
            return answer

    # -------------------------------------------------------------------------------------------------- inside

    def _plainly(self, question: Any, steps: int, sampling: Sampling, key: Any, stops: Any, audit: bool) -> Answer:
        """An answer behind the window as it is."""
        items = self._items(question)
        asked = embedded(self.backbone, items)
        answer = Answer(self._stream(self._window, asked, steps, sampling, key, stops), key)
        self._counts.add("questions")
        if audit:
            answer.audit = self._audit(self._window, items, asked, answer.ids)
        return answer

    def _on_a_fork(
        self,
        question: Any,
        linked: "list[Any] | None",
        steps: int,
        sampling: Sampling,
        key: Any,
        stops: Any,
        audit: bool,
        look: int,
    ) -> Answer:
        """An answer behind a fork of the window, where what a question names or a retriever finds is placed too."""
        branch = self._fork()
        branch.keep = branch.linker = None
        recalled: list[str] = []
        try:
            *before, last = [("text", question)] if linked is None else linked
            for _, thing in before:
                branch.add(thing)
            items = branch._items(last[1], last[0] == "text" and linked is None)
            recalled += [name for name, _ in [*before, last] if name != "text"]
            asked = embedded(self.backbone, items)
            if self.retriever is None:
                pieces = branch._stream(branch.window, asked, steps, sampling, key, stops)
            else:
                how = steps, sampling, key, stops, look
                pieces = looking_on(self, branch, items, asked, recalled, *how)
            answer = Answer(pieces if audit else _closing(pieces, self, branch), key)
            answer.recalled = recalled
            if audit:
                answer.audit = branch._audit(branch.window, items, asked, answer.ids)
                _close(self, branch)
        except BaseException:
            branch.close()
            raise
        return answer

    def _linked(self, question: Any) -> list[tuple[str, Any]] | None:
        """The parts of a question that names resources, each a text or what a library has; None of one that does not.

        Raises:
          UnknownReferenceError: a name that no library has. SessionError: one that was put without content.
        """
        if self.linker is None or not isinstance(question, str):
            return None
        before, behind = self.around
        parts: list[tuple[str, Any]] = []
        with self.linker.link(question) as linked:
            if not linked.chunks:
                return None
            for segment in linked.segments:
                if isinstance(segment, str):
                    parts.append(("text", segment))
                elif segment.resource.content is None:
                    shown = f"{segment.reference!s:.80}"
                    raise SessionError(f"question: {shown} was put as a chunk alone; expected its content too")
                else:
                    parts.append((str(segment.reference), segment.resource.item))
        if before:
            parts.insert(0, ("text", before))
        if behind:
            parts.append(("text", behind))
        parts = [part for part in parts if part[0] != "text" or part[1].strip()]
        return [(name, self._worded(thing) if name == "text" else thing) for name, thing in parts]

    def _stream(
        self, window: Window, asked: EmbeddedInput, steps: int, sampling: Sampling, key: int | None, stop: Any
    ) -> Generator[TextPiece, None, None]:
        """The tokens of an answer behind a window."""
        yield from self.runtime.answer(window, asked.tokens, asked.length, steps, sampling, key, stop)

    def _fork(self) -> Any:
        """A side branch that nobody is told of."""
        raise NotImplementedError

    def _items(self, question: Any, framed: bool = True) -> list[Any]:
        """A question as `prepare` takes it, a text with what stands around every one if `framed`."""
        if not isinstance(question, str):
            return list(thing_of(self.backbone, question, self.largest_image).items)
        check_text(question, "question")
        if not question:
            raise InputError("question: an empty text; expected some")
        before, behind = self.around if framed else ("", "")
        return [self._worded(f"{before}{question}{behind}")]

    def _worded(self, text: str) -> Any:
        """A text as `prepare` takes it: in a chat, whose start stands in front of all, without a start of its own."""
        reader: Any = self.backbone
        return reader.ids(text) if self.chat else Text(text)

    def _stops(self, stop: Stop) -> tuple[int, ...] | None:
        """Stop tokens by their ids.

        Raises:
          InputError: a text that is not one token, or without a tokenizer.
        """
        if stop is None:
            return None
        if not isinstance(stop, str | int | Iterable):
            raise InputError(f"stop {stop!r:.80}; expected token ids or texts of one token, or None")
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

    def _audit(self, window: Window, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]) -> Audit:
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

    def _with_answer(self, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]) -> tuple[EmbeddedInput, int]:
        """A question with its answer behind it, and at how many places of the answer tokens were chosen."""
        if len(ids) <= 1:
            return asked, len(ids)
        try:
            return embedded(self.backbone, items, ids[:-1]), len(ids)
        except InputError:  # tokens that stand for images, which nobody gave: the first place is what can be compared
            return asked, 1


def _closing(
    pieces: Generator[TextPiece, None, None], session: QuestionRunner, branch: Any
) -> Generator[TextPiece, None, None]:
    """The same, which lets go of the branch at its end."""
    try:
        yield from pieces
    finally:
        pieces.close()
        _close(session, branch)


def _close(session: QuestionRunner, branch: Any) -> None:
    """Lets go of a branch, and counts what it did as the session's."""
    if not branch.closed:
        branch.close()
        session._count_branch(branch._counts)
