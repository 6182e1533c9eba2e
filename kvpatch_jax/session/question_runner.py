"""Questions after a session's window: answers as they are decoded, audits, and chunks that it refers to."""

import dataclasses
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ..backbone import Backbone
from ..cache import Text, check_text
from ..errors import InputError, SessionError
from ..sampling import Sampling, TextPiece, check_steps
from ..window import Window
from .answer_retrieval import AnswerRetrieval
from .answers import Answer, Audit
from .logit_comparison import compared, prefilled_logits, served_logits, with_answer
from .piece_registry import PieceRegistry
from .runtime import Runtime, TokenIterator
from .session_input import EmbeddedInput, embedded

STEPS = 256
"""Tokens of an answer at most, if neither the caller nor the checkpoint says."""
Stop = Sequence[int | str] | None


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Options of one answer.

    Attributes:
      steps: the largest number of tokens.
      sampling: how tokens are chosen.
      key: the seed of what is drawn; None for greedy answers.
      stop: token ids that end the answer; None for the backbone's own.
      audit: whether to compare the answer with one without reuse.
      look: tokens between two calls of the retriever.
    """

    steps: int
    sampling: Sampling
    key: int | None
    stop: tuple[int, ...] | None
    audit: bool
    look: int

    def start(self, runtime: Runtime, window: Window, asked: EmbeddedInput) -> TokenIterator:
        """Starts the answer to an embedded question after a window."""
        return runtime.answer(window, asked.tokens, asked.length, self.steps, self.sampling, self.key, self.stop)

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        steps: int | None,
        stop: Stop,
        sampling: Sampling,
        seed: int | None,
        audit: bool,
        look: int,
    ) -> "AnswerOptions":
        """Returns checked options, with the checkpoint's defaults, stop tokens as ids, and a seed if one is needed.

        Raises:
          InputError: an invalid option, or a stop text that is not exactly one token.
        """
        if stop is not None:
            if not isinstance(stop, str | int | Iterable):
                raise InputError(f"stop: got {stop!r:.80}; expected token ids or texts of one token, or None")

            # The backbone checks that ids are in its vocabulary.
            ids = []
            for token in [stop] if isinstance(stop, str | int) else stop:
                if isinstance(token, str):
                    tokenizer = getattr(backbone, "tokenizer", None)
                    encoded = [] if tokenizer is None else tokenizer.encode(token, add_special_tokens=False).ids
                    if len(encoded) != 1:
                        found = f"{token!r:.80}, which is {len(encoded)} tokens"
                        raise InputError(f"stop: got {found}; expected a text of one token, or its id")
                    token = encoded[0]
                ids.append(token)

            stop = tuple(ids)

        most: int = steps if steps is not None else getattr(backbone, "answer_tokens", None) or STEPS
        check_steps(most)
        if not isinstance(look, int) or isinstance(look, bool) or look < 1:
            raise InputError(f"look: got {look!r:.80}; expected a number of tokens, 1 or more")

        # A drawn seed is kept, so that the caller can repeat the answer.
        key = None
        if sampling.temperature > 0:
            key = secrets.randbits(32) if seed is None else seed
        return cls(most, sampling, key, stop, audit, look)


class QuestionRunner:
    """Runner of questions after a session's window."""

    def __init__(self, registry: PieceRegistry):
        self._registry, self._config = registry, registry.config

    def ask(self, question: Any, options: AnswerOptions, fork: Callable[[], tuple[Any, PieceRegistry]]) -> Answer:
        """Answers a question. The window stays as it is.

        Args:
          fork: returns a session on a branch of this one, with its registry. A question that refers to chunks, or may
            retrieve some, is answered there, after they are placed.
        """
        registry, backbone = self._registry, self._registry.runtime.backbone
        # Chunks are placed on a branch, so that the session's own window stays as it is.
        parts = self._resolve_references(question)
        if parts is not None or self._config.retriever is not None:
            return self._answer_on_fork(question, parts, options, *fork())

        items = self.items(question)
        asked = embedded(backbone, items)
        registry.check_text_length(asked.length)
        answer = Answer(options.start(registry.runtime, registry.window, asked), options.key)
        registry.counters["questions"] += 1
        if options.audit:
            answer.audit = self._audit(registry, items, asked, answer.ids)
        return answer

    def items(self, question: Any, framed: bool = True) -> list[Any]:
        """Returns a question as `Backbone.prepare` takes it, with the texts around every question if `framed`.

        Raises:
          InputError: an empty question, or one of another kind.
        """
        # Images and token ids are read as `add` reads them; a text may have texts around it.
        if not isinstance(question, str):
            return list(self._registry.read(question).items)
        check_text(question, "question")
        if not question:
            raise InputError("question: got an empty text; expected at least one character")
        before, after = self._config.around if framed else ("", "")
        return [self._text_item(f"{before}{question}{after}")]

    # -------------------------------------------------------------------------------------------------- inside

    def _text_item(self, text: str) -> Any:
        """Returns a text as `prepare` takes it."""
        # In a chat, the lead has the token that begins a sequence. Token ids, unlike a text, add no second one.
        backbone: Any = self._registry.runtime.backbone
        return backbone.ids(text) if self._config.chat else Text(text)

    def _resolve_references(self, question: Any) -> list[tuple[str, Any]] | None:
        """Returns the parts of a question with references, or None if it has none.

        Each part is the reference, or "text", with an input for `Session.add`. The last one is asked.

        Raises:
          UnknownReferenceError: a name that no library has. SessionError: a chunk that was put without its content.
        """
        if self._config.linker is None or not isinstance(question, str):
            return None

        before, after = self._config.around
        parts: list[tuple[str, Any]] = [("text", before)]
        # An open link holds the chunks' contents in the library.
        with self._config.linker.link(question) as linked:
            if not linked.chunks:
                return None
            for segment in linked.segments:
                if isinstance(segment, str):
                    parts.append(("text", segment))
                elif segment.resource.content is None:
                    found = f"{segment.reference!s:.80}, a chunk without its content"
                    raise SessionError(f"question: got {found}; expected both in the library")
                else:
                    parts.append((str(segment.reference), segment.resource.item))

        # Texts between references may be spaces alone, which have no token.
        parts.append(("text", after))
        kept = []
        for name, item in parts:
            if name != "text":
                kept.append((name, item))
            elif item.strip():
                kept.append((name, self._text_item(item)))
        return kept

    def _answer_on_fork(
        self,
        question: Any,
        parts: list[tuple[str, Any]] | None,
        options: AnswerOptions,
        branch: Any,
        pieces: PieceRegistry,
    ) -> Answer:
        """Answers a question on a branch of the session, where chunks are placed before it."""
        registry, backbone = self._registry, self._registry.runtime.backbone
        recalled: list[str] = []
        try:
            if parts is None:
                items = self.items(question)
            else:
                # The texts around the question are parts of it already.
                for _, item in parts[:-1]:
                    branch.add(item)
                items = self.items(parts[-1][1], framed=False)
                recalled += [name for name, _ in parts if name != "text"]

            asked = embedded(backbone, items)
            if self._config.retriever is not None:
                retrieval = AnswerRetrieval(registry, branch, pieces, recalled)
                stream = retrieval.answer(items, asked, options)
            else:
                stream = options.start(registry.runtime, pieces.window, asked)

            # The answer owns the branch, unless an audit needs it once more.
            answer = Answer(stream if options.audit else self._closing(stream, branch, pieces), options.key)
            answer.recalled = recalled
            if options.audit:
                answer.audit = self._audit(pieces, items, asked, answer.ids)
                self._close(branch, pieces)
        except BaseException:
            branch.close()
            raise

        return answer

    def _closing(self, stream: Any, branch: Any, pieces: PieceRegistry) -> Generator[TextPiece, None, None]:
        """Yields the tokens of a stream, then closes it and its branch."""
        try:
            yield from stream
        finally:
            stream.close()
            self._close(branch, pieces)

    def _close(self, branch: Any, pieces: PieceRegistry) -> None:
        """Closes a branch and counts its work as the session's own."""
        if not branch.closed:
            branch.close()
            for name in ("forwards", "questions", "tokens", "hits", "misses", "encoded", "bytes", "flops"):
                self._registry.counters[name] += pieces.counters[name]

    def _audit(self, pieces: PieceRegistry, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]) -> Audit:
        """Compares what a window served with a prefill of it, at every token of an answer."""
        # Both sides read the same tokens: the question, and the answer as it was served.
        runtime, window = pieces.runtime, pieces.window
        whole, places = with_answer(runtime.backbone, items, asked, ids)
        if not places:
            return Audit(0.0, 0.0, 0, 0, window.as_promised)

        served = served_logits(runtime, window, whole, asked.length, places)
        prompt = [(pieces.provide_tokens(pieces.records[piece.entry.id]), piece.start) for piece in window.pieces]
        # Starts are those of the window: gaps that evicted chunks left stay, so that only reuse differs.
        truth = prefilled_logits(runtime.backbone, prompt, whole, window.next_start, asked.length, places)
        pieces.counters["questions"] += 2
        kl, flipped = compared(truth, served)
        return Audit(float(kl.mean()), float(kl[0]), int(np.sum(flipped)), places, window.as_promised)
