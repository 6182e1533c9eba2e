"""Batches of answers decoded in one pool, one token per row and step: the arrays that a backbone takes.

Axis letters: B rows, N pages of a table, O slots of a page, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from .backbone import Tokens
from .core import NO_PAGE, AnyArray, Paged, Pool


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


@runtime_checkable
class AnsweringBackbone(Protocol):
    """Backbone that also decodes batches of answers; `models.load` returns one."""

    def answer_choices(self, sampling: Any, key: Any, stop: Sequence[int] | None) -> tuple[Draws, tuple[int, ...]]:
        """Checks the sampling options of an answer; returns one row of `Draws`, and the stop tokens."""
        ...

    def begin_answer(
        self, tokens: Tokens, length: int, context: Paged, slots: Int[np.ndarray, " T"], draws: Draws, steps: int
    ) -> tuple[Int[Array, "1"], Pool, Mapping[str, Array] | None]:
        """Runs a question, writes its KV into the pool and chooses the first token.

        Also returns the transition of context and question, of a hybrid model.
        """
        ...

    def advance_answers(self, pool: Pool, rows: AnswerRows, draws: Draws) -> tuple[AnswerRows, Pool]:
        """Writes the KV of every row's last token into the pool and chooses the next token."""
        ...

    def answer_pieces(self, blocks: Iterator[Int[np.ndarray, "1 n"]], steps: int, stop: Sequence[int]) -> Iterator[Any]:
        """Yields the tokens of one answer as pieces of text."""
        ...


def no_row(like: AnswerRows) -> AnswerRows:
    """Returns a padding row of the same sizes, which attends only to itself and is not written to the pool."""
    *fields, transition = like
    empty: list[Any] = [np.zeros((1, *value.shape[1:]), value.dtype) for value in fields]
    row = AnswerRows(*empty)
    if transition is not None:
        parts = {name: np.zeros((len(value), 1, *value.shape[2:]), value.dtype) for name, value in transition.items()}
        row = row._replace(transition=parts)
    row.table[:] = NO_PAGE

    # One key must be visible: a softmax over none is NaN.
    row.owned[:, :1] = True
    return row
