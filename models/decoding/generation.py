"""Continuing prompts in blocks of tokens: `generate` and `stream` of a backbone. Everything here runs on the host."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from kvpatch_jax.answers import Sampling, TextPiece, check_steps
from kvpatch_jax.backbone import Context, Tokens, check_tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError

from .continuing import BLOCK
from .programs import Forward, LoadedModel
from .sampling import REFUSED, Draw, draw_of
from .text_pieces import pieces_of
from .traced import key_count

LEAST_ROOM = 64
"""Tokens that a cache has room for at least, so that short answers of other lengths compile nothing again."""


def make_blocks(
    programs: Forward,
    tokens: Tokens,
    context: Context | None,
    mask: Any,
    last: Int[np.ndarray, " B"],
    draw: Draw,
    steps: int,
    block: int = BLOCK,
    filled: Bool[Array, "B T"] | None = None,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Yields the next `steps` tokens of each row, at most `block` at a time; fewer once every row has a stop token.

    The block behind the one that is yielded is already under way then. Closing the iterator asks for no further one.

    Args:
      tokens, context, mask: padded to their buckets. last: index of each row's last token.
      filled: as `continuing.begin` takes it.

    Raises:
      NotFiniteError: logits of which no token can be chosen.
    """
    length = tokens.embeddings.shape[1]
    state = programs.state
    if steps == 1:
        token = programs.first(state, tokens, context, mask, last, draw, filled)
        found = np.asarray(token)[:, None]
        _check_chosen(found, 0)
        yield found
        return

    room = Buckets(smallest=LEAST_ROOM).round_up(max(steps - 1, LEAST_ROOM))
    prompt = tokens, context, mask, last, draw, filled
    now, cache = programs.begin(state, *prompt, room=room)
    written, stops = np.int32(key_count(context) + length), np.asarray(draw.stop)

    ids, count, left, made = now.token[:, None], 1, steps - 1, 0
    while True:
        # The next block is dispatched before this one is read, so that the device does not wait for the host.
        following = None
        if left:
            many = min(block, left)
            following, now, cache = programs.advance(state, now, cache, draw, written, np.int32(many))
            left -= many

        found = np.asarray(ids)[:, :count]
        _check_chosen(found, made)
        ended = np.logical_or.accumulate(np.isin(found, stops), axis=1).all(axis=0)
        if ended.any():
            yield found[:, : int(ended.argmax()) + 1]
            return

        yield found
        if following is None:
            return
        made += count
        ids, count = following, many


def _check_chosen(ids: Int[np.ndarray, "B n"], made: int) -> None:
    refused = np.argwhere(ids == REFUSED)
    if len(refused):
        row, place = refused[0]
        raise NotFiniteError(
            f"row {row}: got logits of token {made + int(place)} behind the prompt that hold NaN or infinity, or are "
            "all -infinity; expected a finite largest one"
        )


class Generating(LoadedModel):
    """What a backbone gets from its programs, its tokenizer and a check of what it reads: `generate` and `stream`."""

    def _read_of(
        self, tokens: Tokens, context: Context | None, mask: Any, steps: int
    ) -> tuple[Tokens, Context | None, Any, Any]:
        """Returns what generation reads, checked and padded to its buckets, and which tokens a mask leaves that layers
        with linear attention run over.
        """
        raise NotImplementedError

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: Context | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        *,
        sampling: Sampling | None = None,
        key: PRNGKeyArray | int | None = None,
        stop: Sequence[int] | None = None,
        lengths: Sequence[int] | Int[np.ndarray, " B"] | None = None,
    ) -> Int[np.ndarray, "B n"]:
        """Continues tokens and, where given, an engine-frame context by at most `steps` tokens.

        Of a context in pages, the pages are gathered once into the cache of this call; the pool stays as it is.

        Args:
          sampling: how tokens are chosen; greedily when None.
          key: a `jax.random.key`, or the number to make one of; needed for a temperature above 0. The same key gives
            the same tokens, here and in `stream`.
          stop: token ids that end a row; None for the checkpoint's own (`stop_tokens`), () for none.
          lengths: how many of each row's tokens count, the first ones, as `pad_rows` gives them; None for all.

        Returns:
          Token ids [B, n] on the host, stop tokens included: n is `steps`, or less where every row ends before. A row
          that ends before the others repeats its stop token.

        Raises:
          InputError: steps, stop tokens or lengths that are none, or a temperature without a key. NotFiniteError:
          logits of which no token can be chosen. What `prefill` raises.
        """
        blocks = self._blocks(tokens, steps, context, mask, sampling, key, stop, lengths, BLOCK)
        none = np.zeros((len(tokens.embeddings), 0), np.int32)
        return np.concatenate([none, *blocks], axis=1)

    def stream(
        self,
        tokens: Tokens,
        steps: int,
        context: Context | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        *,
        sampling: Sampling | None = None,
        key: PRNGKeyArray | int | None = None,
        stop: Sequence[int] | None = None,
        lengths: Sequence[int] | Int[np.ndarray, " B"] | None = None,
    ) -> Iterator[TextPiece]:
        """Continues as `generate` does, and yields each token as it is made.

            for piece in backbone.stream(tokens, 200):
                print(piece.text, end="", flush=True)

        Pieces of text never split a character, and leave out stop tokens. Closing the iterator (or leaving the loop,
        and letting go of it) ends the work: one token may be under way.

        Arguments are those of `generate`.

        Raises:
          What `generate` raises, most of it when the iterator is made.
        """
        stops = self.stop_tokens if stop is None else check_stop(stop, self.config.text.vocabulary)
        blocks = self._blocks(tokens, steps, context, mask, sampling, key, stops, lengths, 1)
        return pieces_of(blocks, self.tokenizer, len(tokens.embeddings), steps, stops)

    def _blocks(
        self,
        tokens: Tokens,
        steps: int,
        context: Context | None,
        mask: Any,
        sampling: Sampling | None,
        key: PRNGKeyArray | int | None,
        stop: Sequence[int] | None,
        lengths: Any,
        block: int,
    ) -> Iterator[np.ndarray]:
        """Returns tokens of `generate`, at most `block` at a time; everything is checked before the first is asked
        for.
        """
        check_steps(steps)
        stops = self.stop_tokens if stop is None else check_stop(stop, self.config.text.vocabulary)
        draw = draw_of(sampling or Sampling(), key, stops)
        padded, context, mask, filled = self._read_of(tokens, context, mask, steps)
        last = last_tokens(tokens, lengths)
        if not steps:
            return iter(())
        return make_blocks(self.programs, padded, context, mask, last, draw, steps, block, filled)


def pad_rows(prompts: Sequence[Tokens]) -> tuple[Tokens, Int[np.ndarray, " B"]]:
    """Puts prompts of unequal lengths below each other: one batch, and how many of each row's tokens count.

        tokens, lengths = pad_rows([backbone.embed(**prompt) for prompt in prompts])
        backbone.generate(tokens, 100, lengths=lengths)

    Padding stands behind a row's tokens, where nothing looks at it.

    Raises:
      InputError: no prompts. ShapeError: prompts of different widths or numbers of axes.
    """
    if not isinstance(prompts, list | tuple) or not prompts:
        found = "no prompts" if isinstance(prompts, list | tuple) else f"prompts {prompts!r:.80}"
        raise InputError(f"pad_rows: got {found}; expected at least one, in a list of Tokens")

    for prompt in prompts:
        check_tokens(prompt, "pad_rows")
        width, axes = prompts[0].embeddings.shape[2:], np.shape(prompts[0].positions)[2:]
        if prompt.embeddings.shape[2:] != width or np.shape(prompt.positions)[2:] != axes:
            raise ShapeError(
                f"pad_rows: got embeddings {prompt.embeddings.shape} and positions {np.shape(prompt.positions)}; "
                f"expected them to go with the first prompt's {prompts[0].embeddings.shape}"
            )

    lengths = [prompt.embeddings.shape[1] for prompt in prompts]
    longest = max(lengths)

    def behind(x, fill):
        return fill(x, [(0, longest - x.shape[1] if axis == 1 else 0) for axis in range(x.ndim)])

    # A prompt without images has no deepstack features: zeros where another one has some.
    deep = next((prompt.deepstack for prompt in prompts if prompt.deepstack is not None), None)
    embeddings, positions, deepstack, ahead = [], [], [], []
    for prompt in prompts:
        embeddings.append(behind(prompt.embeddings, jnp.pad))
        positions.append(behind(np.asarray(prompt.positions), np.pad))
        if deep is not None:
            own = prompt.deepstack
            own = jnp.zeros((*prompt.embeddings.shape[:2], *deep.shape[2:]), deep.dtype) if own is None else own
            deepstack.append(behind(own, jnp.pad))
        if any(prompt.ahead is not None for prompt in prompts):
            own = np.zeros(prompt.embeddings.shape[:2], np.int32) if prompt.ahead is None else np.asarray(prompt.ahead)
            ahead.append(behind(own, np.pad))

    tokens = Tokens(
        jnp.concatenate(embeddings),
        np.concatenate(positions),
        jnp.concatenate(deepstack) if deepstack else None,
        np.concatenate(ahead) if ahead else None,
    )
    rows = [len(prompt.embeddings) for prompt in prompts]
    return tokens, np.repeat(lengths, rows).astype(np.int32)


def last_tokens(tokens: Tokens, lengths: Any) -> Int[np.ndarray, " B"]:
    """Returns index of each row's last token.

    Raises:
      ShapeError: another number of lengths than rows, or a length that a row does not have.
    """
    rows, longest, _ = tokens.embeddings.shape
    if lengths is None:
        return np.full(rows, longest - 1, np.int32)
    given = np.asarray(lengths)
    if given.shape != (rows,) or given.dtype.kind not in "iu" or given.min() < 1 or given.max() > longest:
        raise ShapeError(f"lengths: got {given.tolist()}; expected {rows} whole numbers from 1 to {longest}")
    return given.astype(np.int32) - 1


def check_stop(stop: Sequence[int] | Int[np.ndarray, " n"], vocabulary: int) -> tuple[int, ...]:
    """Checks stop tokens.

    Raises:
      InputError: what is no token id of this vocabulary.
    """
    found = tuple(stop) if isinstance(stop, Sequence | np.ndarray) and not isinstance(stop, str) else (stop,)
    for token in found:
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise InputError(f"stop token: got {token!r}; expected ids from 0 to {vocabulary - 1}")
    return tuple(int(token) for token in found)
