"""Running a prompt through the decoder: in one piece, or chunk by chunk in bounded memory.

Axis letters: B batch, T tokens, n tokens whose logits are wanted, L layers, K KV heads, H head width, D model width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.backbone import Context, Tokens
from kvpatch_jax.core import compose, identity, transition_of

from ..attention import Mask
from ..decoder.decoder import Decoder, Earlier


class Prefilled(NamedTuple):
    """What a prompt leaves behind.

    hidden: residual after the last layer, of the tokens asked for [B,n,D]. kv: phase-free, per channel [L,B,T,K,H] over
    the layers run, and the transition of these tokens alone. taps: {layer: residual [B,T,D] entering it}.
    """

    hidden: Array
    kv: dict[str, Array]
    taps: dict[int, Array]


def run_prompt(
    decoder: Decoder,
    tokens: Tokens,
    mask: Mask,
    rows: Int[Array, "B n"] | None,
    *,
    context: Context | None,
    start_layer: int,
    hidden_at: tuple[int, ...],
    chunk: int | None,
    filled: Bool[Array, "B T"] | None = None,
) -> Prefilled:
    """Runs a prompt from `start_layer` up.

    Args:
      rows: the tokens whose last residual is wanted, by index; None: all of them.
      context: engine-frame KV in front of the tokens, over all layers of the decoder, contiguous or in pages.
      chunk: tokens run at a time; None, or as many as there are: all at once.
      filled: which tokens are no padding, for layers with linear attention; None: all.
    """
    layers: dict[str, Any] = {"start_layer": start_layer, "hidden_at": hidden_at, "context": context}
    if chunk is not None and chunk < tokens.embeddings.shape[1]:
        if decoder.config.layout.parts:
            return _in_stretches(decoder, tokens, mask, rows, chunk, filled, layers)
        return _in_chunks(decoder, tokens, mask, rows, chunk, None, layers)
    layers |= {"deepstack": by_layer(tokens), "filled": filled}
    run = decoder.run(tokens.embeddings, jnp.asarray(tokens.positions), mask, **layers)
    return Prefilled(run.hidden if rows is None else take_tokens(run.hidden, rows), run.kv, run.taps)


def _in_stretches(
    decoder: Decoder,
    tokens: Tokens,
    mask: Mask,
    rows: Array | None,
    chunk: int,
    filled: Array | None,
    layers: dict[str, Any],
) -> Prefilled:
    """Runs a prompt chunk by chunk through layers with linear attention, which no token may pass twice: the last chunk
    is padded instead.
    """
    B, T, _ = tokens.embeddings.shape
    extra = -T % chunk
    filled = jnp.ones((B, T), bool) if filled is None else filled

    def room(x):
        return jnp.pad(jnp.asarray(x), [(0, extra if axis == 1 else 0) for axis in range(jnp.ndim(x))])

    padded, filled = jax.tree.map(room, tokens), room(filled)
    rows = jnp.broadcast_to(jnp.arange(T), (B, T)) if rows is None else rows
    whole = _in_chunks(decoder, padded, mask.padded(T, extra), rows, chunk, filled, layers)
    kv = {}
    for channel in decoder.config.layout.channels:
        value = whole.kv[channel.name]
        kv[channel.name] = value if channel.rows is not None else value[:, :, :T]
    return Prefilled(whole.hidden, kv, {layer: tap[:, :T] for layer, tap in whole.taps.items()})


def _in_chunks(
    decoder: Decoder,
    tokens: Tokens,
    mask: Mask,
    rows: Array | None,
    chunk: int,
    filled: Array | None,
    layers: dict[str, Any],
) -> Prefilled:
    """Runs a prompt chunk by chunk: each is written into the whole prompt's KV, and reads there what precedes it.

    The last chunk ends with the prompt: where the lengths do not fit it runs some tokens of the one before again.
    """
    B, T, _ = tokens.embeddings.shape
    counts = None if filled is None else jnp.cumsum(filled, axis=1, dtype=jnp.int32)

    def count_before(end: Array) -> Any:
        # Tokens that are no padding before a place, by row.
        if counts is None:
            return None
        return jnp.where(end > 0, jax.lax.dynamic_index_in_dim(counts, jnp.maximum(end - 1, 0), 1, False), 0)

    def run(start: Array, kv: dict[str, Array]) -> Prefilled:
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, chunk, 1), tokens)
        found = decoder.run(
            own.embeddings,
            own.positions,
            mask.take_queries(start, chunk, T),
            earlier=Earlier(kv, jnp.asarray(tokens.positions), start, count_before(start)),
            deepstack=by_layer(own),
            filled=None if filled is None else jax.lax.dynamic_slice_in_dim(filled, start, chunk, 1),
            **layers,
        )
        return Prefilled(found.hidden, found.kv, found.taps)

    def step(whole: Prefilled, start: Array) -> tuple[Prefilled, None]:
        part = run(start, whole.kv)

        def write(axis):
            return lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, axis)

        if rows is None:
            hidden = write(1)(whole.hidden, part.hidden)
        else:
            inside = (rows >= start) & (rows < start + chunk)
            picked = take_tokens(part.hidden, jnp.clip(rows - start, 0, chunk - 1))
            hidden = jnp.where(inside[..., None], picked, whole.hidden)

        # Of each channel the layers from `start_layer` up are run; a transition is that of all tokens so far.
        own, kv = dict(part.kv), {}
        if counts is not None:
            before = {name: whole.kv[name][len(whole.kv[name]) - len(own[name]) :] for name in transition_of(own)}
            own |= compose(before, transition_of(own), count_before(start + chunk) - count_before(start))
        for name, new in own.items():
            token = start if layout.channel(name).rows is None else 0
            at = (whole.kv[name].shape[0] - new.shape[0], 0, token, 0, 0)
            kv[name] = jax.lax.dynamic_update_slice(whole.kv[name], new.astype(whole.kv[name].dtype), at)
        return Prefilled(hidden, kv, jax.tree.map(write(1), whole.taps, part.taps)), None

    # The scan's carry: the whole prompt's results, zero at first. Keys of a later chunk are not seen before it is run.
    room, layout, first = {}, decoder.config.layout, layers["start_layer"]
    for channel in layout.token_channels:
        shape = (layout.depth(channel.name), B, T, channel.heads, channel.width)
        room[channel.name] = jnp.zeros(shape, tokens.embeddings.dtype)
    room |= identity(layout, (B,), tokens.embeddings.dtype)

    shapes = jax.eval_shape(run, jnp.int32(0), room)
    wanted = T if rows is None else rows.shape[1]
    hidden = jnp.zeros((B, wanted, shapes.hidden.shape[-1]), shapes.hidden.dtype)
    taps = {}
    for layer, leaf in shapes.taps.items():
        taps[layer] = jnp.zeros((B, T, *leaf.shape[2:]), leaf.dtype)

    # All chunks have one shape: the last one runs some tokens again rather than fewer.
    begin = Prefilled(hidden, room, taps)
    starts = jnp.minimum(jnp.arange(0, T, chunk, dtype=jnp.int32), T - chunk)
    whole, _ = jax.lax.scan(step, begin, starts)
    kv = {}
    for name, value in whole.kv.items():
        run_over = len(layout.rows_of(name, range(first, layout.layers)))
        kv[name] = value[value.shape[0] - run_over :]
    return whole._replace(kv=kv)


def take_tokens(x: Float[Array, "B T D"], rows: Int[Array, "B n"]) -> Float[Array, "B n D"]:
    """Returns the tokens with these indices in each row."""
    return jnp.take_along_axis(x, rows[:, :, None], axis=1)


def by_layer(tokens: Tokens) -> Float[Array, "n B T _"] | None:
    """Returns deepstack features, layers first, as the decoder adds them."""
    return None if tokens.deepstack is None else jnp.moveaxis(tokens.deepstack, 2, 0)
