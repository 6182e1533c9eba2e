"""Prompts of an episode's steps, computed anew or behind a prefix cache that holds what was computed before.

Axis letters: L layers, S keys, K KV heads, H head width, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import InputError
from kvpatch_jax.session.session_input import embedded
from kvpatch_jax.window.padding import padded_tokens
from models import ModelBackbone

from ...arms.reused_page import cut
from ..contexts import BLOCK, BLOCK_ABOVE, HostKV, joined, on_device, on_host

PREFIX_BLOCK = 16
"""Tokens of a block of a prefix cache, as engines have it."""


class StepPiece(NamedTuple):
    """A part of a prompt.

    Attributes:
      items: as `Backbone.prepare` takes them.
      keys: what each of its tokens is known by: equal ones behind equal ones have the same KV.
      tokens: on the host, positions from 0. span: positions that it takes.
    """

    items: list[Any]
    keys: Sequence[Hashable]
    tokens: Tokens
    span: int


class StepAnswer(NamedTuple):
    """An answer of one step.

    Attributes:
      ids: of the greedy answer, a stop token at its end included.
      first: logits of its first token.
      tokens: that were computed, the question's included and the answer's not.
      kv: phase-free KV of these tokens, [L,1,T,K,H]; empty of a session's answer.
    """

    ids: tuple[int, ...]
    first: Float[np.ndarray, " V"]
    tokens: int
    kv: HostKV


def text_piece(backbone: ModelBackbone, ids: Sequence[int]) -> StepPiece:
    """Embeds token ids. Raises InputError where there are none."""
    return _piece(backbone, [list(ids)], list(ids))


def image_piece(backbone: ModelBackbone, items: list[Any], content: str) -> StepPiece:
    """Embeds an image, with the token ids behind it. Raises what the backbone raises.

    Args:
      content: what it is known by, such as a digest.
    """
    return _piece(backbone, items, content)


def _piece(backbone: ModelBackbone, items: list[Any], known: Any) -> StepPiece:
    found = embedded(backbone, items)
    tokens = on_host(found.tokens).take(0, found.length)
    # The tokens of all images have the same ids: a content and a number tell them apart.
    keys = [(known, number) for number in range(found.length)] if isinstance(known, str) else known
    return StepPiece(items, keys, tokens, found.span)


class _Block(NamedTuple):
    """A block that was computed: its KV in the engine's frame [L,1,16,K,H], and the blocks that followed it."""

    kv: HostKV
    behind: "dict[tuple[Hashable, ...], _Block]"


class StepReader:
    """Reads the prompts of one episode.

    Args:
      cached: whether blocks of 16 tokens that an earlier prompt began with are not computed again. Nothing is evicted.
      most: tokens of a prompt and its answer at most; None: any number.
    """

    def __init__(self, backbone: ModelBackbone, cached: bool, most: int | None):
        """Holds nothing yet."""
        self._backbone, self._cached, self._most = backbone, cached, most
        self._begun: dict[tuple[Hashable, ...], _Block] = {}

    def answer(self, pieces: Sequence[StepPiece], steps: int) -> StepAnswer:
        """Answers greedily behind pieces, of which the last is the question.

        Raises:
          InputError: more tokens than the model serves.
        """
        keys, prompt = [key for piece in pieces for key in piece.keys], prompt_of(pieces)
        count = len(keys)
        if self._most is not None and count + steps > self._most:
            raise InputError(
                f"prompt: got {count} tokens and {steps} of the answer; expected at most {self._most}, which the model "
                "serves"
            )
        held = self._held(keys, prompt)
        answer, kv = answered_behind(self._backbone, prompt, behind_one_another([block.kv for block in held]), steps)
        if self._cached:
            self._hold(keys, kv)
        return answer

    def _held(self, keys: Sequence[Hashable], prompt: Tokens) -> list[_Block]:
        """Returns the leading blocks that are held. The last token always runs."""
        held, level = list[_Block](), self._begun
        for end in range(PREFIX_BLOCK, len(keys), PREFIX_BLOCK):
            block = level.get(tuple(keys[end - PREFIX_BLOCK : end]))
            if block is None:
                break
            held.append(block)
            level = block.behind
        # Where tokens of an image see those behind them, an image is computed as a whole.
        while held and prompt.ahead is not None and np.asarray(prompt.ahead)[0, PREFIX_BLOCK * len(held) - 1]:
            held.pop()
        return held

    def _hold(self, keys: Sequence[Hashable], kv: HostKV) -> None:
        level = self._begun
        for end in range(PREFIX_BLOCK, len(keys) + 1, PREFIX_BLOCK):
            where = slice(end - PREFIX_BLOCK, end)
            # Copied, so that a block does not keep the KV of its whole prompt.
            if (key := tuple(keys[where])) not in level:
                level[key] = _Block({name: value.copy() for name, value in cut(kv, where).items()}, {})
            level = level[key].behind


def prompt_of(pieces: Sequence[StepPiece]) -> Tokens:
    """Returns the tokens of pieces one behind the other, from position 0."""
    starts = np.cumsum([0, *(piece.span for piece in pieces)]).tolist()
    return joined([piece.tokens.shift(start) for piece, start in zip(pieces, starts, strict=False)])


def answered_behind(
    backbone: ModelBackbone, prompt: Tokens, before: HostKV | None, steps: int
) -> tuple[StepAnswer, HostKV]:
    """Computes the tokens of a prompt behind KV of its first ones, and answers greedily.

    Args:
      before: as of `computed_behind`.

    Returns:
      The answer, and the KV of the whole prompt, engine frame.
    """
    buckets, count = backbone.buckets or Buckets(), len(prompt.embeddings[0])
    first, computed, kv = computed_behind(backbone, prompt, before)

    # The last token runs once more, over the KV of all others, so that decoding begins from it.
    last = padded_tokens(prompt.take(count - 1, count), buckets.round_up(1))
    ids = backbone.generate(last, steps, on_device(cut(kv, slice(count - 1))), lengths=[1])[0].tolist()
    stop = next((place for place, token in enumerate(ids) if token in backbone.stop_tokens), len(ids) - 1)
    tokens = next(iter(computed.values())).shape[2]
    return StepAnswer(tuple(ids[: stop + 1]), first, tokens, computed), kv


def computed_behind(
    backbone: ModelBackbone, prompt: Tokens, before: HostKV | None
) -> tuple[Float[np.ndarray, " V"], HostKV, HostKV]:
    """Computes the tokens of a prompt behind KV of its first ones, padded to buckets, so that few lengths compile.

    Args:
      prompt: on the host.
      before: engine frame [L,1,S,K,H]; None: all tokens are computed.

    Returns:
      The last token's logits, phase-free KV of the tokens computed, and the KV of the whole prompt, engine frame.
    """
    buckets, count = backbone.buckets or Buckets(), len(prompt.embeddings[0])
    hit = 0 if before is None else next(iter(before.values())).shape[2]
    size = buckets.round_up(count - hit)
    rest = padded_tokens(prompt.take(hit, count), size)
    many = size > BLOCK_ABOVE and rest.ahead is None
    rows = np.array([[count - hit - 1]], np.int32)
    out = backbone.prefill(rest, on_device(before), logits=rows, chunk=BLOCK if many else None)
    placed = kvp.to_engine(backbone.layout, dict(out.kv), np.asarray(rest.positions), 0)
    own = cut({name: np.asarray(value) for name, value in placed.items()}, slice(count - hit))
    kv = own if before is None else {name: np.concatenate([before[name], own[name]], axis=2) for name in own}
    computed = cut({name: np.asarray(value) for name, value in out.kv.items()}, slice(count - hit))
    return np.asarray(out.logits)[0, 0].astype(np.float32), computed, kv


def behind_one_another(parts: Sequence[HostKV]) -> HostKV | None:
    """Joins KV along its tokens; None where there is none."""
    if not parts:
        return None
    return {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}
