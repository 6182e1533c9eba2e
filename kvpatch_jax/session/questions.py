"""Questions after a session's window: answers, audits, and chunks that a question refers to or retrieves."""

import dataclasses
import secrets
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..answers import Sampling, TextPiece, check_steps
from ..backbone import Backbone
from ..cache import Text, check_text
from ..errors import InputError, SessionError
from ..window import is_count
from .answers import Answer, Comparison, prefilled_logits, served_logits, with_answer
from .audits import audit_answer
from .inputs import EmbeddedInput, embedded
from .pieces import PieceBook, check_length
from .placing import Placer
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
    if not isinstance(stop, str | int | Iterable | None):
        raise InputError(f"stop: got {stop!r:.80}; expected token ids or texts of one token, or None")
    ids, tokenizer = None if stop is None else list[Any](), getattr(backbone, "tokenizer", None)
    for token in [stop] if isinstance(stop, str | int) else stop or ():
        # The backbone checks that ids are in its vocabulary.
        encoding = [token]
        if isinstance(token, str):
            encoding = [] if tokenizer is None else tokenizer.encode(token, add_special_tokens=False).ids
        if len(encoding) != 1:
            found = f"{token!r:.80}, which is {len(encoding)} tokens"
            raise InputError(f"stop: got {found}; expected a text of one token, or its id")
        assert ids is not None
        ids += encoding
    most: int = steps if steps is not None else getattr(backbone, "answer_tokens", None) or STEPS
    check_steps(most)
    if not is_count(look):
        raise InputError(f"look: got {look!r:.80}; expected a number of tokens, 1 or more")
    # A drawn seed is kept, so that the caller can repeat the answer.
    key = None
    if sampling.temperature > 0:
        key = secrets.randbits(32) if seed is None else seed
    return AnswerOptions(most, sampling, key, None if ids is None else tuple(ids))


class QuestionRunner:
    """Runner of questions after a session's window, which stays as it is."""

    def __init__(self, book: PieceBook):
        self._book, self._config = book, book.config

    def ask(self, question: Any, options: AnswerOptions, audit: bool, look: int) -> Answer:
        """Answers a question as `Session.ask`. With other chunks it is answered on a branch, after them."""
        parts, retriever, guard = self._parts(question), self._config.retriever, self._book.guard
        # Parts have the texts around the question already.
        items = self.items(question) if parts is None else self.items(parts.pop()[1], framed=False)
        asked = embedded(self._book.runtime.backbone, items)
        check_length(asked)
        book, recalled = self._book, list[str]()
        if parts is not None or retriever is not None:
            book = book.fork()
        placer, guarded = Placer(book, None), False
        try:
            for name, item in parts or ():
                placer.add(book.read(item))
                recalled += [] if name is None else [name]
            stream: Any
            if retriever is None:
                stream = book.runtime.answer(book.window, asked.tokens, asked.length, options)
                book.counters["questions"] += 1
            else:
                stream = self._retrieving(items, asked, options, look, placer, recalled)
            guarded = not audit and guard.begin(book.window)
            # The window may have changed by the time that the guard audits the answer.
            if guarded and book is self._book:
                book = book.fork()
            if guarded:
                stream = self._guarding(stream, book, items, asked)
            # The answer owns the branch, unless an audit needs it once more.
            owning = book is not self._book and not audit
            answer = Answer(self._closing(stream, book) if owning else stream, options.key)
            answer.recalled = recalled
            if audit:
                answer.audit = self._audit(book, items, asked, answer)
                self._close(book)
        except BaseException:
            # Of a question that raises nothing is counted.
            if book is not self._book and not book.closed:
                book.release()
            raise
        return answer

    def items(self, question: Any, framed: bool = True) -> list[Any]:
        """Returns a question as `Backbone.prepare` takes it, with the texts around every question if `framed`."""
        # Images and token ids are read as `add` reads them; a text may have texts around it.
        if not isinstance(question, str):
            return list(self._book.read(question).items)
        check_text(question, "question")
        if not question:
            raise InputError("question: got an empty text; expected at least one character")
        before, after = self._config.around if framed else ("", "")
        return self._book.text_items(before, question, after)

    def _parts(self, question: Any) -> list[tuple[str | None, Any]] | None:
        """Returns the parts of a question with references, or None if it has none.

        Each part is the reference, or None of a text, with an input for `Session.add`. The last one is asked.
        """
        if self._config.linker is None or not isinstance(question, str):
            return None
        before, after = self._config.around
        parts: list[tuple[str | None, Any]] = []
        # An open link holds the chunks' contents in the library.
        with self._config.linker.link(question) as linked:
            if not linked.chunks:
                return None
            for segment in [before, *linked.segments, after]:
                if not isinstance(segment, str):
                    parts.append((str(segment.reference), _content_of(segment.reference, segment.resource)))
                elif segment.strip():
                    # Texts between references may be spaces alone, which have no token.
                    parts.append((None, self._book.text_items(segment)))
        return parts

    def _closing(self, stream: Any, branch: PieceBook) -> Generator[TextPiece, None, None]:
        """Yields the tokens of a stream, then closes it and its branch."""
        try:
            yield from stream
        finally:
            stream.close()
            self._close(branch)

    def _guarding(
        self, stream: Any, branch: PieceBook, items: list[Any], asked: EmbeddedInput
    ) -> Generator[TextPiece, None, None]:
        """Yields the tokens of an approximate answer, then audits it for the guard.

        One that is closed early is not audited, and an audit that fails is counted and changes no answer.
        """
        ids, audit, failed = list[int](), None, False
        try:
            for piece in stream:
                ids.append(int(piece.ids[0]))
                yield piece
            try:
                audit = audit_answer(branch, items, asked, ids)
            except Exception:
                failed = True
        finally:
            stream.close()
            if audit is None:
                self._book.guard.skip(failed)
        if audit is not None:
            self._book.guard.end(branch.window, audit)

    def _close(self, branch: PieceBook) -> None:
        """Closes a branch and counts its work as the session's."""
        if branch is not self._book and not branch.closed:
            branch.release()
            for name in COUNTED:
                self._book.counters[name] += branch.counters[name]

    def _retrieving(
        self,
        items: list[Any],
        asked: EmbeddedInput,
        options: AnswerOptions,
        look: int,
        placer: Placer,
        recalled: list[str],
    ) -> Generator[TextPiece, None, None]:
        """Yields the tokens of an answer. Chunks that the retriever finds in between are placed first.

        The tokens so far then run again after the new chunks, as part of the question: one forward for each retrieval
        that finds something. Without one, the answer continues as if there were no retriever.
        """
        branch = placer.book
        backbone: Any = branch.runtime.backbone
        stops = backbone.stop_tokens if options.stop is None else options.stop
        ids, text, stream = list[int](), "", None
        while len(ids) < options.steps:
            # Question and answer so far, which is what a retriever looks at and what runs again behind new chunks.
            tokens = embedded(backbone, items, ids) if ids else asked
            names = dict.fromkeys(self._search(items, ids, text, tokens, branch))
            # A retriever may find the same chunk again after each part of the answer.
            names = [name for name in names if name not in recalled and name not in branch]
            for name in names:
                self._place(name, placer)
            recalled += names
            if names or stream is None:
                if stream is not None:
                    stream.close()
                # Another seed for each part, which would otherwise repeat the draws of the first.
                key = None if options.key is None else (options.key + len(ids)) % 2**63
                rest = options._replace(steps=options.steps - len(ids), key=key)
                stream = branch.runtime.answer(branch.window, tokens.tokens, tokens.length, rest)
                branch.counters["questions"] += 1
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
        self, items: list[Any], ids: list[int], text: str, tokens: EmbeddedInput, branch: PieceBook
    ) -> Sequence[str]:
        """Returns the names that the retriever finds."""
        # In float32 on the host: a mean of bfloat16 rows would lose the small ones.
        embeddings = np.asarray(tokens.tokens.embeddings[0], np.float32)[: tokens.length]

        def hidden(layer: int) -> np.ndarray:
            def job() -> Any:
                executor = branch.runtime.executor
                return executor.prefill(branch.window, tokens.tokens, tokens.length, hidden_at=(layer,))

            rows = branch.runtime.do(job).hidden[layer][0]
            return np.asarray(rows, np.float32)[: tokens.length].mean(axis=0)

        gone = self._book.names(self._book.window.gone)
        query = RetrievalQuery(tuple(items), tuple(ids), text, gone, embeddings.mean(axis=0), hidden)
        retriever = self._config.retriever
        names = retriever.search(query.vector, 1)[0] if hasattr(retriever, "search") else retriever(query)
        listed = isinstance(names, Sequence) and not isinstance(names, str)
        if not listed or not all(isinstance(name, str) for name in names):
            raise InputError(f"retriever: got {names!r:.80}; expected a list of names")
        return names

    def _place(self, name: str, placer: Placer) -> None:
        """Places an evicted chunk, or a reference of the linker, after the window of a branch."""
        branch, linker = placer.book, self._config.linker
        gone = branch.names(branch.window.gone)
        if name in gone:
            placer.recall(branch.find(name), None)
        elif linker is not None:
            with linker.resolve(name) as linked:
                item = _content_of(name, linked.chunks[0].resource)
                placer.add(branch.read(Text(item) if isinstance(item, str) else item))
        else:
            raise SessionError(f"retriever: got {name!r:.80}; expected an evicted chunk, of {gone[-8:]}")

    def log_probs(self, question: Any, ids: Sequence[int]) -> Float[np.ndarray, " n"]:
        """Scores an answer as `Session.log_probs`."""
        book, items = self._book, self.items(question)
        asked = embedded(book.runtime.backbone, items)
        followed, places = with_answer(book.runtime.backbone, items, asked, ids)
        scores = np.full(len(ids), np.nan, np.float32)
        if places:
            logits = served_logits(book.runtime, book.window, followed, asked.length, places).astype(np.float64)
            if max(ids) >= logits.shape[-1]:
                raise InputError(f"log_probs.ids: got {max(ids)}; expected tokens below {logits.shape[-1]}")
            logits -= logits.max(axis=-1, keepdims=True)
            chosen = logits[np.arange(places), np.asarray(ids)[:places]]
            scores[:places] = chosen - np.log(np.exp(logits).sum(axis=-1))
            book.counters["questions"] += 1
        return scores

    def _audit(self, book: PieceBook, items: list[Any], asked: EmbeddedInput, answer: Answer) -> Comparison:
        """Compares what a window served with a prefill of it, at every token of an answer."""
        # Both sides read the same tokens: the question, and the answer as it was served.
        runtime, window = book.runtime, book.window
        followed, places = with_answer(runtime.backbone, items, asked, answer.ids)
        if not places:
            return Comparison(0.0, 0.0, 0, 0, window.as_promised, "")
        served = served_logits(runtime, window, followed, asked.length, places)
        prompt = [(book.provide(book.records[piece.id]), piece.start) for piece in window.pieces]
        # Starts are those of the window: gaps that evicted chunks left stay, so that only reuse differs.
        truth = prefilled_logits(runtime.backbone, prompt, followed, window.next_start, asked.length, places)
        book.counters["questions"] += 2
        return Comparison.of(truth, served, window.as_promised, answer)


def _content_of(reference: Any, resource: Any) -> Any:
    """Returns a library's item, as `Session.add` takes it. Raises SessionError if it was put without its content."""
    if resource.content is None:
        expected = "a chunk without its content; expected both in the library"
        raise SessionError(f"question: got {reference!s:.80}, {expected}")
    return resource.item
