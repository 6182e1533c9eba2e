"""Tokens behind a prompt, one step after the other: of a prompt's rows together, and of answers each at its own place.

Axis letters: B batch, T tokens, S keys, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.answers import AnswerRows, Draws
from kvpatch_jax.backbone import KV, Context, Tokens
from kvpatch_jax.core import Paged, compose, end_position, to_engine, transition_of

from ..attention import Mask
from ..attention.mask import NOWHERE
from ..decoder.cached import read_all_pages
from ..decoder.decoder import Decoder
from .cache_writes import Written, recompute, write_tokens
from .prompt import run_prompt
from .sampling import REFUSED, Draw, choose, choose_rows
from .traced import TracedModel, key_count

BLOCK = 32
"""Tokens that one call of `advance` can make."""


class Continuation(NamedTuple):
    """What stands behind a prompt so far, between the blocks that tokens are made in.

    token [B]: the last one chosen, whose KV the cache does not have yet. count []: how many were chosen. done [B]: rows
    whose last token stops them. place [B]: position of the first token that was chosen. seen [B,1,1,S]: keys that the
    next step sees. places [B,S]: where each key stands in the sequence, for windows that slide.
    """

    token: Int[Array, " B"]
    count: Int[Array, ""]
    done: Bool[Array, " B"]
    place: Array
    seen: Bool[Array, "B 1 1 S"]
    places: Int[Array, "B S"]


def first(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    context: Context | None,
    mask: Any,
    last: Int[Array, " B"],
    draw: Draw,
    filled: Bool[Array, "B T"] | None = None,
) -> Int[Array, " B"]:
    """Chooses the token behind a prompt, and keeps no cache."""
    return begin(model, state, tokens, context, mask, last, draw, filled, room=0)[0].token


def begin(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    context: Context | None,
    mask: Any,
    last: Int[Array, " B"],
    draw: Draw,
    filled: Bool[Array, "B T"] | None = None,
    *,
    room: int,
) -> tuple[Continuation, Any]:
    """Runs a prompt and chooses the first token of each row. Returns where it stands, and its cache.

    Args:
      last: index of each row's last token: nothing behind it (padding) is read.
      filled: which tokens up to there are no padding, of a model with linear attention.
      room: tokens to come that the cache has room for.
    """
    decoder = model.decoder(state)
    B, T, _ = tokens.embeddings.shape
    size = key_count(context)
    seen = model.mask(tokens, context, mask)
    if model.layout.parts:
        behind = jnp.arange(T) <= last[:, None]
        filled = behind if filled is None else behind & filled
    layers: Any = {"context": model.spread(context), "start_layer": 0, "hidden_at": (), "chunk": None, "filled": filled}
    run = run_prompt(decoder, tokens, seen, last[:, None], **layers)
    token = choose(decoder.logits(run.hidden)[:, 0], draw, 0)

    # Padding has positions too, which must not move the first token that is made.
    inside = (jnp.arange(T) <= last[:, None]).reshape(B, T, *(1,) * (tokens.positions.ndim - 2))
    positions = jnp.where(inside, tokens.positions, tokens.positions[jnp.arange(B), last][:, None])
    place = end_position(positions) + 1

    # What each row's last token sees; keys made since are added as they are written, and stand behind it.
    def row_of(row: Array) -> Array:
        return seen.take_rows(row, 1).take_queries(last[row], 1, T).dense(1, size + T)[0]

    row = jnp.pad(jax.lax.map(row_of, jnp.arange(len(last))), ((0, 0), (0, 0), (0, 0), (0, room)))
    of_last = jnp.take_along_axis(jnp.broadcast_to(seen.places_of_queries(T), (B, T)), last[:, None], axis=1)
    of_keys = jnp.broadcast_to(seen.places_of_keys(size + T), (B, size + T))
    places = jnp.concatenate([of_keys, of_last + 1 + jnp.arange(room, dtype=jnp.int32)], axis=1)

    # The engine-frame cache of context and tokens, with room for as many more.
    turned, before = to_engine(model.layout, run.kv, tokens.positions, 0), context
    if isinstance(before, Paged):
        before = read_all_pages(before, model.layout)
    cache = {}
    for name, new in turned.items():
        if model.layout.channel(name).rows is not None:
            continue
        whole = new if before is None else jnp.concatenate([before[name].astype(new.dtype), new], 2)
        cache[name] = jnp.pad(whole, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))
    if model.layout.parts:
        transition = transition_of(turned)
        if before is not None:
            transition = compose(transition_of(before), transition, jnp.sum(jnp.asarray(filled), axis=1))
        cache |= transition
    return Continuation(token, jnp.int32(1), _stopped(token, draw), place, row, places), model.spread(cache)


def advance(
    model: TracedModel, state: Any, now: Continuation, cache: Any, draw: Draw, written: Array, count: Array
) -> tuple[Int[Array, "B block"], Continuation, Any]:
    """Makes `count` tokens more, at most `BLOCK`, or fewer where every row is done.

    Args:
      written: how many keys the cache holds of the prompt: the slot of the first token that was chosen.

    Returns:
      The tokens [B, BLOCK], of which the first `count` mean something; a row that is done repeats its last one.
    """
    decoder = model.decoder(state)
    ids = jnp.zeros((len(now.token), BLOCK), jnp.int32)

    def more(carry: tuple[Array, Any, Continuation, Any]) -> Array:
        made, _, now, _ = carry
        return (made < count) & ~jnp.all(now.done)

    def step(carry: tuple[Array, Any, Continuation, Any]):
        made, ids, now, cache = carry
        # The token that is written now was chosen by the step before; rows that are done keep theirs.
        key = written + now.count - 1
        seen = now.seen | (jnp.arange(now.seen.shape[-1]) == key)
        at = jax.lax.dynamic_slice_in_dim(now.places, key, 1, axis=1)
        mask = Mask(query_places=at, key_places=now.places, allowed=seen)
        positions = model.on_all_axes(now.place + (now.count - 1).astype(now.place.dtype))
        keys = jnp.full((len(now.token), 1), key, jnp.int32)
        logits, cache = _write_one(model, decoder, now.token, positions, cache, keys, None, mask)

        token = jnp.where(now.done, now.token, choose(logits, draw, now.count))
        now = now._replace(token=token, count=now.count + 1, done=now.done | _stopped(token, draw), seen=seen)
        return made + 1, ids.at[:, made].set(token), now, cache

    made, ids, now, cache = jax.lax.while_loop(more, step, (jnp.int32(0), ids, now, cache))
    return jnp.where(jnp.arange(BLOCK) < made, ids, now.token[:, None]), now, cache


def first_in_pages(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    pool: KV,
    context: Paged,
    slots: Array,
    written: Written,
    last: Int[Array, "B 1"],
    draws: Draws,
) -> tuple[Int[Array, " B"], KV]:
    """Writes a question into the pool, as `recompute` does, and chooses the first token behind it."""
    step = recompute(model, state, tokens, pool, context, slots, written, None, None, last)
    return choose_rows(step.logits[:, 0], draws, jnp.zeros_like(last[:, 0])), step.cache


def next_in_pages(
    model: TracedModel, state: Any, pool: KV, rows: AnswerRows, draws: Draws
) -> tuple[tuple[Array, Array, Array, Array], KV]:
    """Writes the last token of each row into the pool and chooses the next one.

    Returns:
      Token, place, position and index of each row, one further; and the pool, with the rows' transitions.
    """
    at = jnp.asarray(rows.place)[:, None]
    _, pages, size, *_ = next(iter(pool.values())).shape
    stand = jnp.where(rows.owned & (rows.places <= at), rows.places, NOWHERE)
    # The key whose place is that of the token to write; a row that stands for none has no page, and writes nowhere.
    key = jnp.argmax(stand == at, axis=1, keepdims=True).astype(jnp.int32)
    page = jnp.take_along_axis(rows.table, key // size, axis=1)
    slots = jnp.where(page < 0, pages * size, page * size + key % size)

    mask = Mask(causal=True, query_places=at, key_places=stand)
    context = Paged(model.spread(pool), rows.table, stand != NOWHERE, rows.places, rows.transition)
    positions, token = model.on_all_axes(rows.position), jnp.asarray(rows.token)
    logits, pool = _write_one(model, model.decoder(state), token, positions, context, key, slots, mask)

    index = jnp.asarray(rows.index)
    after = choose_rows(logits, draws, index), at[:, 0] + 1, jnp.asarray(rows.position) + 1, index + 1
    return after, model.spread(pool)


def _write_one(
    model: TracedModel,
    decoder: Decoder,
    token: Int[Array, " B"],
    positions: Array,
    context: Any,
    keys: Int[Array, "B 1"],
    slots: Int[Array, "B 1"] | None,
    mask: Mask,
) -> tuple[Float[Array, "B V"], Any]:
    """Writes one token of each row. Returns the logits behind it, and the cache."""
    ids = token[:, None]
    embeddings = decoder.embed(ids)
    tokens = Tokens(embeddings, positions, decoder.of_tokens(ids, embeddings))
    step = write_tokens(decoder, model.layout, tokens, context, keys, slots, mask, None)
    return step.logits[:, -1], step.cache


def _stopped(token: Int[Array, " B"], draw: Draw) -> Bool[Array, " B"]:
    return (token == REFUSED) | jnp.isin(token, draw.stop)
