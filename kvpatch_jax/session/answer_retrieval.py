"""Retrieval of chunks while an answer is decoded."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..cache import Text
from ..errors import InputError, SessionError
from ..sampling import TextPiece
from .piece_registry import PieceRegistry
from .session_input import EmbeddedInput, embedded


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


@dataclasses.dataclass(eq=False)
class AnswerRetrieval:
    """Retrieval for one answer, which is decoded on a branch of the session.

    Attributes:
      registry: of the session that was asked.
      branch, pieces: the session on a branch, in which chunks are placed, and its registry.
      recalled: names of the chunks that were placed for the answer.
    """

    registry: PieceRegistry
    branch: Any
    pieces: PieceRegistry
    recalled: list[str]

    def answer(self, items: list[Any], asked: EmbeddedInput, options: Any) -> Generator[TextPiece, None, None]:
        """Yields the tokens of an answer. Chunks that the retriever finds in between are placed first.

        The tokens so far then run again after the new chunks, as part of the question: one forward for each retrieval
        that finds something. Without one, the answer continues as if there were no retriever.

        Args:
          items, asked: the question, as items and embedded.
          options: `AnswerOptions`.
        """
        backbone: Any = self.registry.runtime.backbone
        stops = backbone.stop_tokens if options.stop is None else options.stop
        ids, text, stream = list[int](), "", None

        while len(ids) < options.steps:
            # Question and answer so far, which is what a retriever looks at and what runs again behind new chunks.
            tokens = embedded(backbone, items, ids) if ids else asked
            placed = self._place(self._search(items, ids, text, tokens))
            if placed or stream is None:
                if stream is not None:
                    stream.close()
                # Another seed for each part, which would otherwise repeat the draws of the first.
                key = None if options.key is None else (options.key + len(ids)) % 2**63
                rest = dataclasses.replace(options, steps=options.steps - len(ids), key=key)
                stream = rest.start(self.pieces.runtime, self.pieces.window, tokens)
                self.pieces.counters["questions"] += 1

            for _ in range(options.look):
                piece = next(stream, None)
                if piece is None:
                    return
                ids.append(int(piece.ids[0]))
                text += piece.text
                yield piece
                # A stop token may be the last of its part, and nothing is retrieved behind the end.
                if ids[-1] in stops:
                    return

    def _search(self, items: list[Any], ids: list[int], text: str, tokens: EmbeddedInput) -> Sequence[str]:
        """Returns the names that the retriever finds."""
        # In float32 on the host: a mean of bfloat16 rows would lose the small ones.
        embeddings = np.asarray(tokens.tokens.embeddings[0], np.float32)[: tokens.length]

        def hidden(layer: int) -> np.ndarray:
            runtime, options = self.pieces.runtime, {"hidden_at": (layer,)}
            with runtime.locked():
                out = runtime.executor.prefill(self.pieces.window, tokens.tokens, tokens.length, **options)
            return np.asarray(out.hidden[layer][0], np.float32)[: tokens.length].mean(axis=0)

        gone = self.registry.names(self.registry.window.gone)
        query = RetrievalQuery(tuple(items), tuple(ids), text, gone, embeddings.mean(axis=0), hidden)
        retriever = self.registry.config.retriever
        names = retriever.search(query.vector, 1)[0] if hasattr(retriever, "search") else retriever(query)
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise InputError(f"retriever: got {names!r:.80}; expected a list of names")
        return names

    def _place(self, names: Sequence[str]) -> bool:
        """Places chunks that are not in the window yet. Returns whether there were any."""
        branch, linker = self.branch, self.registry.config.linker
        before = len(self.recalled)
        for name in names:
            # A retriever may find the same chunk again after each part of the answer.
            if name in self.recalled or name in branch:
                continue

            if name in branch.gone:
                branch.recall(name)
            elif linker is not None:
                with linker.resolve(name) as linked:
                    resource = linked.chunks[0].resource
                    if resource.content is None:
                        found = f"{name!r:.80}, a chunk without its content"
                        raise SessionError(f"retriever: got {found}; expected both in the library")
                    branch.add(Text(resource.item) if isinstance(resource.item, str) else resource.item)
            else:
                raise SessionError(f"retriever: got {name!r:.80}; expected an evicted chunk, of {branch.gone[-8:]}")

            self.recalled.append(name)

        return len(self.recalled) > before
