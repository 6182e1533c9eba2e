"""Holding answers against others: the same question behind a re-prefill, without a patch, without a chunk."""

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
    """Two distributions of the next token at each place of an answer: KL(first ‖ second) in nats, and who differ."""

    kl: Float[np.ndarray, " n"]
    flipped: Any


def compared(first: Float[np.ndarray, "n V"], second: Float[np.ndarray, "n V"]) -> LogitComparison:
    """Compares logits place by place."""
    logs = [_log_softmax(np.asarray(each, np.float64)) for each in (first, second)]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1)
    return LogitComparison(np.maximum(kl, 0.0), logs[0].argmax(-1) != logs[1].argmax(-1))


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    moved = logits - logits.max(axis=-1, keepdims=True)
    return moved - np.log(np.exp(moved).sum(axis=-1, keepdims=True))


def _rows(question: int, places: int) -> np.ndarray:
    """Which tokens of a question and its answer the answer's distributions stand behind; as many as a power of two."""
    room = 1 << max(places - 1, 0).bit_length()
    return question - 1 + np.minimum(np.arange(room), places - 1)[None].astype(np.int32)


def served_logits(
    runtime: Runtime, window: Window, asked: EmbeddedInput, question: int, places: int
) -> Float[np.ndarray, "n V"]:
    """Logits of an answer's tokens as a window is served.

    Args:
      asked: a question of `question` tokens and the answer behind it. places: tokens of the answer.
    """
    with runtime.locked():
        out = runtime.executor.prefill(window, asked.tokens, asked.length, logits=_rows(question, places))
        return np.asarray(out.logits[0], np.float32)[:places]


def prefilled_logits(
    backbone: Backbone,
    pieces: Sequence[tuple[EmbeddedInput, int]],
    asked: EmbeddedInput,
    start: int,
    question: int,
    places: int,
) -> Float[np.ndarray, "n V"]:
    """The same behind a prefill of pieces at their starts, in one forward, without any reuse."""
    whole = [*pieces, (asked, start)]
    before = sum(piece.length for piece, _ in pieces)
    out = backbone.prefill(joined_tokens(whole), logits=before + _rows(question, places))
    return np.asarray(out.logits[0], np.float32)[:places]


def joined_tokens(parts: Sequence[tuple[EmbeddedInput, int]]) -> Tokens:
    """Parts at their starts as one prompt; put together on the host, where no length compiles anything."""
    cut = [(np.asarray(part.tokens.embeddings)[:, : part.length], part) for part, _ in parts]
    deep = next((part.tokens.deepstack for part, _ in parts if part.tokens.deepstack is not None), None)
    deepstack = None
    if deep is not None:
        deepstack = np.concatenate([_deep(part, deep) for part, _ in parts], axis=1)
    positions = [np.asarray(part.tokens.positions)[:, : part.length] + start for part, start in parts]
    embeddings: Any = np.concatenate([value for value, _ in cut], axis=1)
    return Tokens(_device(embeddings), np.concatenate(positions, axis=1), _device(deepstack))


def _deep(part: EmbeddedInput, like: Any) -> np.ndarray:
    own = part.tokens.deepstack
    if own is None:
        return np.zeros((1, part.length, *like.shape[2:]), like.dtype)
    return np.asarray(own)[:, : part.length]


def _device(value: Any) -> Any:
    return None if value is None else jnp.asarray(value)
