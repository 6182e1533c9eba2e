"""Answers that grow in one pool, a token of each at a time: what a backbone is given, as arrays.

Axis letters: B rows, N pages of a table, O slots of a page, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from .backbone import Tokens
from .core import NO_PAGE, AnyArray, Paged, Pool


class Draws(NamedTuple):
    """How the next token of each row is chosen.

    temperature, top_p float32 [B] and top_k int32 [B], as `models.Sampling` has them (a `top_k` beyond the vocabulary:
    all tokens). key uint32 [B,n]: the numbers of a `jax.random.key`.
    """

    temperature: Float[AnyArray, " B"]
    top_p: Float[AnyArray, " B"]
    top_k: Int[AnyArray, " B"]
    key: UInt[AnyArray, "B n"]


class AnswerRows(NamedTuple):
    """Where each of a batch of answers stands in the pool.

    Attributes:
      token: int32 [B], the last one chosen, whose KV the pool does not have yet.
      place: int32 [B], where it stands among the row's tokens; those in front of it are in the pool.
      position: [B], its rotary position, the same on every axis.
      index: int32 [B], how many tokens of the answer were chosen.
      table: int32 [B,N], pages, those that the answer will grow into among them; `NO_PAGE` fills up.
      owned: bool [B,N·O], which slots of these pages are the row's, written or still to be.
      places: int32 [B,N·O], which token of the row each of them is for.
    """

    token: Int[AnyArray, " B"]
    place: Int[AnyArray, " B"]
    position: Int[AnyArray, " B"] | Float[AnyArray, " B"]
    index: Int[AnyArray, " B"]
    table: Int[AnyArray, "B N"]
    owned: Bool[AnyArray, "B S"]
    places: Int[AnyArray, "B S"]


@runtime_checkable
class AnsweringBackbone(Protocol):
    """What batches of answers ask of a backbone beside `Backbone`: `models.load` gives such."""

    def answer_choices(self, sampling: Any, key: Any, stop: Sequence[int] | None) -> tuple[Draws, tuple[int, ...]]:
        """Checks how an answer's tokens are chosen and what ends it; one row of `Draws`, and the stop tokens."""
        ...

    def begin_answer(
        self, tokens: Tokens, length: int, context: Paged, slots: Int[np.ndarray, " T"], draws: Draws, steps: int
    ) -> tuple[Int[Array, "1"], Pool]:
        """Runs a question, writes it into the pool and chooses the first token."""
        ...

    def advance_answers(self, pool: Pool, rows: AnswerRows, draws: Draws) -> tuple[AnswerRows, Pool]:
        """Writes every row's last token into the pool and chooses the next one."""
        ...

    def answer_pieces(self, blocks: Iterator[Int[np.ndarray, "1 n"]], steps: int, stop: Sequence[int]) -> Iterator[Any]:
        """Pieces of text of one answer's tokens."""
        ...


def no_row(like: AnswerRows) -> AnswerRows:
    """A row that stands for none, of another's sizes: it sees itself alone and is written nowhere."""
    nothing = AnswerRows(*(np.zeros((1, *value.shape[1:]), value.dtype) for value in like))
    nothing.table[:] = NO_PAGE
    nothing.owned[:, :1] = True
    return nothing
