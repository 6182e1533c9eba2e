"""Prompts of unequal lengths as rows of one batch, and what ends a row."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvpatch_jax.backbone import Tokens, check_tokens
from kvpatch_jax.errors import InputError, ShapeError


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
