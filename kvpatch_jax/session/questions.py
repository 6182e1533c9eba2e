"""Questions after a session's window: answers, audits, and chunks that a question refers to or retrieves."""

import dataclasses
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..backbone import Backbone
from ..cache import Text, check_text, encoded
from ..errors import InputError, SessionError
from ..sampling import Sampling, TextPiece, check_steps
from ..window import is_count
from .answers import Answer, Audit, compared, prefilled_logits, served_logits, with_answer
from .inputs import EmbeddedInput, embedded
from .pieces import PieceBook
from .runtime import AnswerOptions

STEPS = 256
"""Tokens of an answer at most, if neither the caller nor the checkpoint says."""
Stop = Sequence[int | str] | None
COUNTED = ("forwards", "questions", "tokens", "hits", "misses", "encoded", "bytes", "flops")
"""Work on a question's own branch that counts as the session's."""


@dataclasses.dataclass(frozen=True, eq=False)
class RetrievalQuery:
    """Query that a retriever receives before the first token of an answer, and between some of the others.

    A session's `retriever` is a function of this that returns names: of evicted chunks, or references of its linker
    (`"IMAGE#NAME"`). Or it is an object with `search(vector, k)`, such as the retrievers of `kvpatch_jax.store`, whose
    nearest id is taken as such a name.

    Attributes:
      question: its items.
      ids, text: of the answer so far.
      gone: names of the evicted chunks.
      vector: the mean of the embeddings that the decoder reads, over question and answer so far, [D]. Pooled outputs of
        the vision tower have this width too. Whether such a mean finds the right image depends on the model, and is not
        guaranteed.
      hidden: returns the mean residual entering a layer instead, [D], by a forward after the window.
    """

    question: Sequence[Any]
    ids: tuple[int, ...]
    text: str
    gone: tuple[str, ...]
    vector: Float[np.ndarray, " D"]
    hidden: Callable[[int], Float[np.ndarray, " D"]] = dataclasses.field(repr=False)


def options_of(
    backbone: Backbone, steps: int | None, stop: Stop, sampling: Sampling, seed: int | None, look: int
) -> AnswerOptions:
    """Returns checked options, with the checkpoint's defaults, stop tokens as ids, and a seed if one is needed.

    Raises:
      InputError: an invalid option, or a stop text that is not exactly one token.
    """
    ids = None
    if stop is not None:
        if not isinstance(stop, str | int | Iterable):
            raise InputError(f"stop: got {stop!r:.80}; expected token ids or texts of one token, or None")
        # The backbone checks that ids are in its vocabulary.
        ids = tuple(_stop_id(backbone, token) for token in ([stop] if isinstance(stop, str | int) else stop))
    most: int = steps if steps is not None else getattr(backbone, "answer_tokens", None) or STEPS
    check_steps(most)
    if not is_count(look):
        raise InputError(f"look: got {look!r:.80}; expected a number of tokens, 1 or more")
    # A drawn seed is kept, so that the caller can repeat the answer.
    key = None
    if sampling.temperature > 0:
        key = secrets.randbits(32) if seed is None else seed
    return AnswerOptions(most, sampling, key, ids)


def _stop_id(backbone: Any, token: Any) -> Any:
    if not isinstance(token, str):
        return token
    tokenizer = getattr(backbone, "tokenizer", None)
    ids = [] if tokenizer is None else tokenizer.encode(token, add_special_tokens=False).ids
    if len(ids) != 1:
        raise InputError(
            f"stop: got {token!r:.80}, which is {len(ids)} tokens; expected a text of one token, or its id"
        )
    return ids[0]


class QuestionRunner:
    """Runner of questions after a session's window, which stays as it is."""

    def __init__(self, book: PieceBook):
        self._book, self._config = book, book.config

    def ask(
        self,
        question: Any,
        options: AnswerOptions,
        audit: bool,
        look: int,
        fork: Callable[[], tuple[Any, PieceBook]],
    ) -> Answer:
        """Answers a question.

        Args:
          audit: whether to compare the answer with one without reuse.
          look: tokens between two calls of the retriever.
          fork: returns a session on a branch of this one, with its book. A question that refers to chunks, or may
            retrieve some, is answered there, after they are placed.
        """
        book = self._book
        parts = self._references(question)
        if parts is not None or self._config.retriever is not None:
            return self._answer_on_fork(question, parts, options, audit, look, *fork())
        items = self.items(question)
        asked = embedded(book.runtime.backbone, items)
        book.check_text_length(None, asked.length)
        answer = Answer(book.runtime.answer(book.window, asked.tokens, asked.length, options), options.key)
        book.counters["questions"] += 1
        if audit:
            answer.audit = self._audit(book, items, asked, answer.ids)
        return answer

    def items(self, question: Any, framed: bool = True) -> list[Any]:
        """Returns a question as `Backbone.prepare` takes it, with the texts around every question if `framed`.

        Raises:
          InputError: an empty question, or one of another kind.
        """
        # Images and token ids are read as `add` reads them; a text may have texts around it.
        if not isinstance(question, str):
            return list(self._book.read(question).items)
        check_text(question, "question")
        if not question:
            raise InputError("question: got an empty text; expected at least one character")
        before, after = self._config.around if framed else ("", "")
        return [self._text(f"{before}{question}{after}")]

    def _text(self, text: str) -> Any:
        """Returns a text as `prepare` takes it.

        Raises:
          InputError: a text without UTF-8, such as a lone surrogate.
        """
        encoded(text)
        # In a chat, the lead has the token that begins a sequence. Token ids, unlike a text, add no second one.
        backbone: Any = self._book.runtime.backbone
        return backbone.ids(text) if self._config.chat else Text(text)

    # ------------------------------------------------------------------------------------- questions with other chunks

    def _references(self, question: Any) -> list[tuple[str | None, Any]] | None:
        """Returns the parts of a question with references, or None if it has none.

        Each part is the reference, or None of a text, with an input for `Session.add`. The last one is asked.

        Raises:
          UnknownReferenceError: a name that no library has. SessionError: a chunk that was put without its content.
        """
        if self._config.linker is None or not isinstance(question, str):
            return None
        before, after = self._config.around
        parts: list[tuple[str | None, Any]] = [(None, before)]
        # An open link holds the chunks' contents in the library.
        with self._config.linker.link(question) as linked:
            if not linked.chunks:
                return None
            for segment in linked.segments:
                if isinstance(segment, str):
                    parts.append((None, segment))
                else:
                    parts.append((str(segment.reference), _content_of(segment.reference, segment.resource)))
        parts.append((None, after))
        # Texts between references may be spaces alone, which have no token.
        parts = [(name, item) for name, item in parts if name is not None or item.strip()]
        return [(name, self._text(item) if name is None else item) for name, item in parts]

    def _answer_on_fork(
        self,
        question: Any,
        parts: list[tuple[str | None, Any]] | None,
        options: AnswerOptions,
        audit: bool,
        look: int,
        branch: Any,
        pieces: PieceBook,
    ) -> Answer:
        """Answers a question on a branch of the session, where chunks are placed before it."""
        recalled: list[str] = []
        try:
            items = self.items(question) if parts is None else self.items(parts[-1][1], framed=False)
            # The texts around the question are parts of it already.
            for name, item in parts[:-1] if parts else ():
                branch.add(item)
                recalled += [] if name is None else [name]
            asked = embedded(self._book.runtime.backbone, items)
            stream: Any
            if self._config.retriever is not None:
                stream = self._retrieving(items, asked, options, look, branch, pieces, recalled)
            else:
                stream = pieces.runtime.answer(pieces.window, asked.tokens, asked.length, options)

            # The answer owns the branch, unless an audit needs it once more.
            answer = Answer(stream if audit else self._closing(stream, branch, pieces), options.key)
            answer.recalled = recalled
            if audit:
                answer.audit = self._audit(pieces, items, asked, answer.ids)
                self._close(branch, pieces)
        except BaseException:
            branch.close()
            raise
        return answer

    def _closing(self, stream: Any, branch: Any, pieces: PieceBook) -> Generator[TextPiece, None, None]:
        """Yields the tokens of a stream, then closes it and its branch."""
        try:
            yield from stream
        finally:
            stream.close()
            self._close(branch, pieces)

    def _close(self, branch: Any, pieces: PieceBook) -> None:
        """Closes a branch and counts its work as the session's own."""
        if not branch.closed:
            branch.close()
            for name in COUNTED:
                self._book.counters[name] += pieces.counters[name]

    def _retrieving(
        self,
        items: list[Any],
        asked: EmbeddedInput,
        options: AnswerOptions,
        look: int,
        branch: Any,
        pieces: PieceBook,
        recalled: list[str],
    ) -> Generator[TextPiece, None, None]:
        """Yields the tokens of an answer. Chunks that the retriever finds in between are placed first.

        The tokens so far then run again after the new chunks, as part of the question: one forward for each retrieval
        that finds something. Without one, the answer continues as if there were no retriever.
        """
        backbone: Any = pieces.runtime.backbone
        stops = backbone.stop_tokens if options.stop is None else options.stop
        ids, text, stream = list[int](), "", None
        while len(ids) < options.steps:
            # Question and answer so far, which is what a retriever looks at and what runs again behind new chunks.
            tokens = embedded(backbone, items, ids) if ids else asked
            placed = self._retrieved(self._search(items, ids, text, tokens, pieces), branch, recalled)
            if placed or stream is None:
                if stream is not None:
                    stream.close()
                # Another seed for each part, which would otherwise repeat the draws of the first.
                key = None if options.key is None else (options.key + len(ids)) % 2**63
                rest = options._replace(steps=options.steps - len(ids), key=key)
                stream = pieces.runtime.answer(pieces.window, tokens.tokens, tokens.length, rest)
                pieces.counters["questions"] += 1
            for _ in range(look):
                piece = next(stream, None)
                if piece is None:
                    return
                ids.append(int(piece.ids[0]))
                text += piece.text
                yield piece
                # A stop token may be the last of its part, and nothing is retrieved behind the end.
                if ids[-1] in stops:
                    return

    def _search(
        self, items: list[Any], ids: list[int], text: str, tokens: EmbeddedInput, pieces: PieceBook
    ) -> Sequence[str]:
        """Returns the names that the retriever finds."""
        # In float32 on the host: a mean of bfloat16 rows would lose the small ones.
        embeddings = np.asarray(tokens.tokens.embeddings[0], np.float32)[: tokens.length]

        def hidden(layer: int) -> np.ndarray:
            def job() -> Any:
                executor = pieces.runtime.executor
                return executor.prefill(pieces.window, tokens.tokens, tokens.length, hidden_at=(layer,))

            rows = pieces.runtime.do(job).hidden[layer][0]
            return np.asarray(rows, np.float32)[: tokens.length].mean(axis=0)

        gone = self._book.names(self._book.window.gone)
        query = RetrievalQuery(tuple(items), tuple(ids), text, gone, embeddings.mean(axis=0), hidden)
        retriever = self._config.retriever
        names = retriever.search(query.vector, 1)[0] if hasattr(retriever, "search") else retriever(query)
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise InputError(f"retriever: got {names!r:.80}; expected a list of names")
        return names

    def _retrieved(self, names: Sequence[str], branch: Any, recalled: list[str]) -> bool:
        """Places chunks that are not in the window yet. Returns whether there were any."""
        before, linker = len(recalled), self._config.linker
        # A retriever may find the same chunk again after each part of the answer.
        for name in [name for name in dict.fromkeys(names) if name not in recalled and name not in branch]:
            if name in branch.gone:
                branch.recall(name)
            elif linker is not None:
                with linker.resolve(name) as linked:
                    item = _content_of(name, linked.chunks[0].resource)
                    branch.add(Text(item) if isinstance(item, str) else item)
            else:
                raise SessionError(f"retriever: got {name!r:.80}; expected an evicted chunk, of {branch.gone[-8:]}")
            recalled.append(name)
        return len(recalled) > before

    # ---------------------------------------------------------------------------------------------------------- audits

    def _audit(self, pieces: PieceBook, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]) -> Audit:
        """Compares what a window served with a prefill of it, at every token of an answer."""
        # Both sides read the same tokens: the question, and the answer as it was served.
        runtime, window = pieces.runtime, pieces.window
        whole, places = with_answer(runtime.backbone, items, asked, ids)
        if not places:
            return Audit(0.0, 0.0, 0, 0, window.as_promised)
        served = served_logits(runtime, window, whole, asked.length, places)
        prompt = [(pieces.provide(pieces.records[piece.id]), piece.start) for piece in window.pieces]
        # Starts are those of the window: gaps that evicted chunks left stay, so that only reuse differs.
        truth = prefilled_logits(runtime.backbone, prompt, whole, window.next_start, asked.length, places)
        pieces.counters["questions"] += 2
        kl, flipped = compared(truth, served)
        return Audit(float(kl.mean()), float(kl[0]), int(np.sum(flipped)), places, window.as_promised)


def _content_of(reference: Any, resource: Any) -> Any:
    """Returns a library's item, as `Session.add` takes it.

    Raises:
      SessionError: a chunk that was put without its content.
    """
    if resource.content is None:
        raise SessionError(
            f"question: got {reference!s:.80}, a chunk without its content; expected both in the library"
        )
    return resource.item
