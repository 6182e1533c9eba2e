"""Answers: how their tokens are chosen, the text that they stream, and the arrays of a batch that is decoded together.

A backbone that serves sessions has `answer_choices`, `begin_answer`, `advance_answers` and `answer_pieces`
(`models/decoding/answering.py`). Axis letters: B rows, N pages of a table, O slots of a page.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from .core import AnyArray
from .errors import ConfigError, InputError
from .utils.kinds import is_whole

MOST_STEPS = 1 << 30
"""Maximum number of tokens of an answer, so that positions after a long context still fit int32."""


def check_steps(steps: Any) -> None:
    """Raises InputError unless `steps` is a valid number of tokens."""
    if not is_whole(steps, 0) or steps >= MOST_STEPS:
        raise InputError(f"steps: got {steps!r:.80}; expected a number of tokens, 0 or more and below 2**30")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of choosing the next token.

    Attributes:
      temperature: divisor of the logits; 0 takes the most likely token.
      top_p: samples from the smallest set of most likely tokens with at least this probability (Holtzman et al.,
        arXiv:1904.09751, section 3.1). Tokens exactly as likely as the last of them are included.
      top_k: samples from this many most likely tokens, applied before `top_p`; None: all. Ties are included, as above.

    Raises:
      ConfigError: a value is not a number, the temperature is negative or infinite, `top_p` is outside 0 < p ≤ 1, or
      `top_k` is below 1.
    """

    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.temperature, "__float__") or not 0 <= self.temperature <= sys.float_info.max:
            raise ConfigError(f"temperature: got {self.temperature!r:.80}; expected a finite number, 0 or more")
        if not hasattr(self.top_p, "__float__") or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: got {self.top_p!r:.80}; expected a number, more than 0 and at most 1")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"top_k: got {self.top_k!r:.80}; expected a whole number from 1 on, or None for all")


class TextPiece(NamedTuple):
    """Piece of a stream: the next token of each row and, with a tokenizer, the text that it completes.

    Attributes:
      ids: [B]; a row that has ended repeats its last token.
      texts: one per row; empty while the bytes of a character are incomplete, for stop tokens, and after them.
    """

    ids: Int[np.ndarray, " B"]
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first row's text."""
        return self.texts[0] if self.texts else ""


class Draws(NamedTuple):
    """Sampling options and random keys of each row.

    Attributes:
      temperature, top_p: float32 [B], as in `Sampling`.
      top_k: int32 [B], as in `Sampling`; beyond the vocabulary's size: all tokens.
      key: uint32 [B,n], the data of a `jax.random.key`.
    """

    temperature: Float[AnyArray, " B"]
    top_p: Float[AnyArray, " B"]
    top_k: Int[AnyArray, " B"]
    key: UInt[AnyArray, "B n"]


class AnswerRows(NamedTuple):
    """Decoding state of a batch of answers in a pool.

    Attributes:
      token: int32 [B], the token chosen last, whose KV is not in the pool yet.
      place: int32 [B], its index among the row's tokens; all earlier tokens are in the pool.
      position: [B], its rotary position, the same on every axis.
      index: int32 [B], number of tokens chosen for the answer.
      table: int32 [B,N], pages, including those that the answer will grow into, padded with `NO_PAGE`.
      owned: bool [B,N·O], which slots of these pages belong to the row, written or not.
      places: int32 [B,N·O], index of the row's token that each of these slots is for.
      transition: of a hybrid model, what its linear layers keep of the row's tokens but the last, {part: [L,B,R,K,W]};
        None of other models.
    """

    token: Int[AnyArray, " B"]
    place: Int[AnyArray, " B"]
    position: Int[AnyArray, " B"] | Float[AnyArray, " B"]
    index: Int[AnyArray, " B"]
    table: Int[AnyArray, "B N"]
    owned: Bool[AnyArray, "B S"]
    places: Int[AnyArray, "B S"]
    transition: Mapping[str, AnyArray] | None = None
