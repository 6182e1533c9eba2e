"""Answers of many contexts of one pool, a token of each at a time: what a batch of them asks of a backbone.

An answer's tokens depend on its own context, question, sampling and key, and on no row beside it.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kvpatch_jax.answers import AnswerRows, Draws, Sampling, TextPiece
from kvpatch_jax.backbone import Tokens, check_cached, check_tokens
from kvpatch_jax.core import Paged, arrays_of, split_transition
from kvpatch_jax.errors import InputError, ShapeError
from pallas_kernels.splice import check_slots

from .generation import check_stop
from .programs import LoadedModel
from .sampling import draw_of
from .text_pieces import pieces_of


class Answering(LoadedModel):
    """What a backbone gets from its programs and a check of positions: questions and steps of answers in pages."""

    def answer_choices(
        self, sampling: Sampling | None, key: PRNGKeyArray | int | None, stop: Sequence[int] | None
    ) -> tuple[Draws, tuple[int, ...]]:
        """Checks how an answer's tokens are chosen and what ends it.

        Args:
          sampling, key, stop: as `generate` takes them.

        Returns:
          One row of `Draws`, and the stop tokens.

        Raises:
          InputError: a temperature without a key, a key of another generator than jax's default, or stop tokens that
          are none.
        """
        stops = self.stop_tokens if stop is None else check_stop(stop, self.config.text.vocabulary)
        draw = draw_of(sampling or Sampling(), key, stops)
        data = np.asarray(jax.random.key_data(draw.key))
        default = jax.random.key_impl(jax.random.key(0))
        if data.ndim != 1 or jax.random.key_impl(draw.key) != default:
            raise InputError(
                f"key: got {jax.random.key_impl(draw.key)}, shape {draw.key.shape}; expected one of {default}"
            )
        numbers = (np.asarray(value)[None] for value in (draw.temperature, draw.top_p, draw.top_k, data))
        return Draws(*numbers), stops

    def begin_answer(
        self, tokens: Tokens, length: int, context: Paged, slots: Int[np.ndarray, " T"], draws: Draws, steps: int
    ) -> tuple[Int[Array, "1"], dict[str, Float[Array, "L P O _ _"]], dict[str, Array] | None]:
        """Runs a question behind a context, writes it into the pool and chooses the first token of its answer.

        Args:
          tokens: one row at its place in the sequence, padded as it is to run. length: how many count.
          context: pages, those of `slots` among them; its pool is donated.
          slots: of the pool, [length], one for each token that counts.
          draws: one row. steps: tokens of the answer, whose positions the rope must serve.

        Returns:
          The token [1], `REFUSED` where the logits say nothing; the pool; and of a hybrid model the transition of
          context and question, {part: [L,1,R,K,W]}.

        Raises:
          ShapeError: slots that are not one per token. What `decode` raises.
        """
        check_tokens(tokens, "begin_answer")
        check_cached(self.layout, tokens, context, "begin_answer: context")
        self._check_regime(tokens.positions, steps)
        size, given = tokens.embeddings.shape[1], np.asarray(slots, np.int32)
        if not 1 <= length <= size or given.shape != (length,):
            raise ShapeError(
                f"begin_answer: got slots {given.shape}, length {length} of {size} tokens; expected one each"
            )

        total = int(np.prod(next(iter(context.pool.values())).shape[1:3]))
        check_slots(given, total)

        # Padding is written at no key and at no slot: one past the last of each.
        after, (keys, places) = context.extended(given[None]).written(given[None])
        room = ((0, 0), (0, size - length))
        written = np.pad(keys, room, constant_values=after.key_count), np.pad(places, room)
        padded = np.pad(given[None], room, constant_values=total)
        pool = arrays_of(context.pool)
        state, last = self.programs.state, np.array([[length - 1]], np.int32)
        arrays = after._replace(pool={}), padded, written, last, draws
        token, cache = self.programs.first_in_pages(state, tokens, pool, *arrays)
        return token, *split_transition(cache)

    def advance_answers(
        self, pool: dict[str, Float[Array, "L P O _ _"]], rows: AnswerRows, draws: Draws
    ) -> tuple[AnswerRows, dict[str, Float[Array, "L P O _ _"]]]:
        """Writes every row's last token into the pool and chooses the next one, in one program.

        It is compiled once for each number of rows and pages of a table. The pool is donated.

        Args:
          rows: where each answer stands; those that stand for none are run, and written nowhere. draws: as many rows.

        Returns:
          The rows, each a token further: what the next step takes; and the pool.
        """
        moved, cache = self.programs.next_in_pages(self.programs.state, arrays_of(pool), rows, draws)
        pool, transition = split_transition(cache)
        token, place, position, index = moved
        return rows._replace(token=token, place=place, position=position, index=index, transition=transition), pool

    def answer_pieces(
        self, blocks: Iterator[Int[np.ndarray, "1 n"]], steps: int, stop: Sequence[int]
    ) -> Iterator[TextPiece]:
        """Yields one answer's tokens as `stream` does, each with the text that it completes."""
        return pieces_of(blocks, self.tokenizer, 1, steps, stop)
