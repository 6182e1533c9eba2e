"""Comparison of logits: an answer as it is served, and the same answer in another context."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from ..backbone import Backbone, Tokens, ahead_of
from ..errors import InputError
from ..window import Window
from .runtime import Runtime
from .session_input import EmbeddedInput, embedded


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
    with runtime.locked():
        rows = _answer_rows(question, places)
        out = runtime.executor.prefill(window, asked.tokens, asked.length, logits=rows)
        return np.asarray(out.logits[0], np.float32)[:places]


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
    features = [part.tokens.deepstack for part, _ in parts if part.tokens.deepstack is not None]
    embeddings, positions, deepstack = [], [], []
    for part, start in parts:
        embeddings.append(np.asarray(part.tokens.embeddings)[:, : part.length])
        positions.append(np.asarray(part.tokens.positions)[:, : part.length] + start)
        own = part.tokens.deepstack
        if own is not None:
            deepstack.append(np.asarray(own)[:, : part.length])
        elif features:
            # Texts have no features of the vision tower; zeros add nothing.
            deepstack.append(np.zeros((1, part.length, *features[0].shape[2:]), features[0].dtype))

    prompt = Tokens(
        jnp.asarray(np.concatenate(embeddings, axis=1)),
        np.concatenate(positions, axis=1),
        jnp.asarray(np.concatenate(deepstack, axis=1)) if features else None,
        ahead_of([part.tokens.take(0, part.length) for part, _ in parts]),
    )
    before = sum(piece.length for piece, _ in pieces)
    out = backbone.prefill(prompt, logits=before + _answer_rows(question, places))
    return np.asarray(out.logits[0], np.float32)[:places]


def with_answer(
    backbone: Backbone, items: list[Any], asked: EmbeddedInput, ids: Sequence[int]
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
