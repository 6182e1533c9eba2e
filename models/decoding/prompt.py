"""Running a prompt through the decoder: in one piece, or chunk by chunk in bounded memory.

Axis letters: B batch, T tokens, n tokens whose logits are wanted, L layers, K KV heads, H head width, D model width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpatch_jax.backbone import Context, Tokens

from ..attention import Mask
from ..decoder.decoder import Decoder, Earlier


class Prefilled(NamedTuple):
    """What a prompt leaves behind.

    hidden: residual after the last layer, of the tokens asked for [B,n,D]. kv: phase-free, per channel [L,B,T,K,H] over
    the layers run. taps: {layer: residual [B,T,D] entering it}.
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
) -> Prefilled:
    """Runs a prompt from `start_layer` up.

    Args:
      rows: the tokens whose last residual is wanted, by index; None: all of them.
      context: engine-frame KV in front of the tokens, over all layers of the decoder, contiguous or in pages.
      chunk: tokens run at a time; None, or as many as there are: all at once.
    """
    layers: dict[str, Any] = {"start_layer": start_layer, "hidden_at": hidden_at, "context": context}
    if chunk is not None and chunk < tokens.embeddings.shape[1]:
        return _in_chunks(decoder, tokens, mask, rows, chunk, layers)
    run = decoder.run(tokens.embeddings, jnp.asarray(tokens.positions), mask, deepstack=by_layer(tokens), **layers)
    return Prefilled(run.hidden if rows is None else take_tokens(run.hidden, rows), run.kv, run.taps)


def _in_chunks(
    decoder: Decoder, tokens: Tokens, mask: Mask, rows: Array | None, chunk: int, layers: dict[str, Any]
) -> Prefilled:
    """Runs a prompt chunk by chunk: each is written into the whole prompt's KV, and reads there what precedes it.

    The last chunk ends with the prompt: where the lengths do not fit it runs some tokens of the one before again.
    """
    B, T, _ = tokens.embeddings.shape

    def run(start: Array, kv: dict[str, Array]) -> Prefilled:
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, chunk, 1), tokens)
        found = decoder.run(
            own.embeddings,
            own.positions,
            mask.take_queries(start, chunk, T),
            earlier=Earlier(kv, jnp.asarray(tokens.positions), start),
            deepstack=by_layer(own),
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

        # Of each channel the layers from `start_layer` up are run.
        kv = {}
        for name, new in part.kv.items():
            at = (whole.kv[name].shape[0] - new.shape[0], 0, start, 0, 0)
            kv[name] = jax.lax.dynamic_update_slice(whole.kv[name], new.astype(whole.kv[name].dtype), at)
        return Prefilled(hidden, kv, jax.tree.map(write(1), whole.taps, part.taps)), None

    # The scan's carry: the whole prompt's results, zero at first. Keys of a later chunk are not seen before it is run.
    room, layout, first = {}, decoder.config.layout, layers["start_layer"]
    for channel in layout.channels:
        shape = (layout.depth(channel.name), B, T, channel.heads, channel.width)
        room[channel.name] = jnp.zeros(shape, tokens.embeddings.dtype)

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
