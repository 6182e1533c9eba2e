"""Comparison of logits: an answer as it is served, and the same answer in another context."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..backbone import Backbone, Tokens
from ..window import Window
from .runtime import Runtime
from .session_input import EmbeddedInput


class LogitComparison(NamedTuple):
    """Comparison of two distributions of the next token, at each token of an answer.

    Attributes:
      kl: KL(first ‖ second), in nats.
      flipped: whether the likeliest token differs.
    """

    kl: Float[np.ndarray, " n"]
    flipped: Any


def compared(first: Float[np.ndarray, "n V"], second: Float[np.ndarray, "n V"]) -> LogitComparison:
    """Compares logits token by token."""
    log_first, log_second = _log_softmax(first), _log_softmax(second)
    kl = (np.exp(log_first) * (log_first - log_second)).sum(axis=-1)
    # Rounding may leave a tiny negative number.
    return LogitComparison(np.maximum(kl, 0.0), log_first.argmax(-1) != log_second.argmax(-1))


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
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
    before = sum(piece.length for piece, _ in pieces)
    prompt = _joined_tokens([*pieces, (asked, start)])
    out = backbone.prefill(prompt, logits=before + _answer_rows(question, places))
    return np.asarray(out.logits[0], np.float32)[:places]


def _joined_tokens(parts: Sequence[tuple[EmbeddedInput, int]]) -> Tokens:
    """Returns parts at their starts as one prompt."""
    # On the host, where a new length compiles nothing.
    features = [part.tokens.deepstack for part, _ in parts if part.tokens.deepstack is not None]
    embeddings, positions, deepstack = [], [], []
    for part, start in parts:
        embeddings.append(np.asarray(part.tokens.embeddings)[:, : part.length])
        positions.append(np.asarray(part.tokens.positions)[:, : part.length] + start)
        own = part.tokens.deepstack
        if own is not None:
            deepstack.append(np.asarray(own)[:, : part.length])
        elif features:
            deepstack.append(np.zeros((1, part.length, *features[0].shape[2:]), features[0].dtype))

    return Tokens(
        jnp.asarray(np.concatenate(embeddings, axis=1)),
        np.concatenate(positions, axis=1),
        jnp.asarray(np.concatenate(deepstack, axis=1)) if features else None,
    )
