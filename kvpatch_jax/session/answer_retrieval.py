"""Retrieval while an answer is made: what a retriever is shown, and how what it finds comes in."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..cache import Text
from ..errors import InputError, SessionError
from ..sampling import Sampling, TextPiece
from .session_input import EmbeddedInput, embedded


@dataclasses.dataclass(frozen=True, eq=False)
class RetrievalQuery:
    """What is known where chunks are looked for: before an answer's first token, and between some of them.

    A session's `retriever` is a function of this that returns names: of chunks that left the session, or references of
    its linker (`"IMAGE#NAME"`). Or it is a retriever with `search(vector, k)`, as `kvpatch_jax.store` has them, whose
    nearest id is taken for such a name.

    Attributes:
      question: its items. ids, text: of the answer so far.
      gone: names of the chunks that left.
      vector: the mean of the embeddings that the decoder reads, over question and answer so far, [D]. Where a library
        filed pooled outputs of the vision tower, they have this width too; whether such a mean finds the right image is
        the model's affair, and is promised by nobody.
      hidden: gives the mean residual entering a layer instead, [D], by a forward behind the window.
    """

    question: Sequence[Any]
    ids: tuple[int, ...]
    text: str
    gone: tuple[str, ...]
    vector: Float[np.ndarray, " D"]
    hidden: Callable[[int], Float[np.ndarray, " D"]] = dataclasses.field(repr=False)


def looking_on(
    session: Any,
    branch: Any,
    items: list[Any],
    asked: EmbeddedInput,
    recalled: list[str],
    steps: int,
    sampling: Sampling,
    key: int | None,
    stop: tuple[int, ...] | None,
    look: int,
) -> Generator[TextPiece, None, None]:
    """The tokens of an answer behind a branch, into which what the retriever finds is placed between them.

    What was made so far is run again behind what came in, as part of the question: one forward for each time that
    something is found. Where nothing is, the answer goes on as if nobody had looked.
    """
    ids, text, stream = list[int](), "", None
    stops = session.backbone.stop_tokens if stop is None else stop
    while len(ids) < steps:
        tokens = embedded(session.backbone, items, ids) if ids else asked
        if _place(session, branch, _found(session, branch, items, ids, text, tokens), recalled) or stream is None:
            if stream is not None:
                stream.close()
            own = None if key is None else (key + len(ids)) % 2**63
            stream = branch._stream(branch.window, tokens, steps - len(ids), sampling, own, stop)
            branch._counts.add("questions")
        for _ in range(look):
            piece = next(stream, None)
            if piece is None:
                return
            ids.append(int(piece.ids[0]))
            text += piece.text
            yield piece
            if ids[-1] in stops:
                return


def _found(
    session: Any, branch: Any, items: list[Any], ids: list[int], text: str, tokens: EmbeddedInput
) -> Sequence[str]:
    """Names that the retriever gives."""
    vectors = np.asarray(tokens.tokens.embeddings[0], np.float32)[: tokens.length]

    def hidden(layer: int) -> np.ndarray:
        with branch.runtime.locked():
            how: dict[str, Any] = {"hidden_at": (layer,)}
            out = branch.runtime.executor.prefill(branch.window, tokens.tokens, tokens.length, **how)
        return np.asarray(out.hidden[layer][0], np.float32)[: tokens.length].mean(axis=0)

    seen = RetrievalQuery(tuple(items), tuple(ids), text, session.gone, vectors.mean(axis=0), hidden)
    retriever = session.retriever
    found = retriever.search(seen.vector, 1)[0] if hasattr(retriever, "search") else retriever(seen)
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise InputError(f"retriever: gave {found!r:.80}; expected a list of names")
    return found


def _place(session: Any, branch: Any, names: Sequence[str], recalled: list[str]) -> bool:
    """Places what was found and is not there yet. Returns whether anything came in."""
    came = False
    for name in names:
        if name in recalled or name in branch:
            continue
        if name in branch.gone:
            branch.recall(name)
        elif session.linker is not None:
            with session.linker.resolve(name) as linked:
                resource = linked.chunks[0].resource
                if resource.content is None:
                    raise SessionError(f"retriever: {name!r:.80} was put as a chunk alone; expected its content too")
                branch.add(Text(resource.item) if isinstance(resource.item, str) else resource.item)
        else:
            raise SessionError(f"retriever: {name!r:.80} names nothing that left; expected one of {branch.gone[-8:]}")
        recalled.append(name)
        came = True
    return came
