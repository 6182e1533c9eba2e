"""Tokens run at keys of a cache and written into it: the one step that recompute, decode and generate are made of.

A contiguous cache [L,B,S,K,H] is a pool whose page b is row b, with all of its keys seen; a row's keys are its slots.

Axis letters: B batch, T tokens, S keys, n tokens whose logits are wanted.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import KV, LayerAttention, Step, Tokens
from kvpatch_jax.core import KVLayout, Paged

from ..attention import Mask
from ..attention.mask import NOWHERE
from ..decoder.cached import row_slots, written_into
from ..decoder.decoder import Decoder
from .prompt import by_layer, take_tokens
from .traced import TracedModel, key_count

Written = tuple[Int[Array, "B T"], Int[Array, "B T"]]
"""Which keys of a context in pages tokens become, and their places in the sequence."""


def write_tokens(
    decoder: Decoder,
    layout: KVLayout,
    tokens: Tokens,
    context: Mapping[str, Any] | Paged,
    keys: Int[Array, "B T"],
    slots: Int[Array, "B T"] | None,
    mask: Any,
    rows: Int[Array, "B n"] | None,
    *,
    keep: Bool[Array, "L B T"] | None = None,
    start_layer: int = 0,
    stop_layer: int | None = None,
    hidden_at: tuple[int, ...] = (),
) -> Step:
    """Runs tokens as keys of a context and writes them into it.

    Args:
      context: contiguous or in pages.
      keys: which of the context's keys each token becomes. slots: of the pool, where it is in pages.
      rows: the tokens whose logits are wanted, by index; None for all.

    Returns:
      The cache is the pool, of a context in pages, and beside it what linear layers keep: composed with these tokens'.
    """
    # What linear layers keep travels beside the pool, and comes back in one dictionary with it.
    paged = isinstance(context, Paged)
    pool = {**context.pool, **(context.transition or {})} if paged else context
    size = key_count(context)
    if slots is None:
        keys, slots = row_slots(size, keys)
    run = decoder.run(
        tokens.embeddings,
        jnp.asarray(tokens.positions),
        mask,
        context=context,
        slots=keys,
        keep=keep,
        start_layer=start_layer,
        stop_layer=stop_layer,
        hidden_at=hidden_at,
        deepstack=by_layer(tokens),
        filled=keys < size if layout.parts else None,
    )
    assert run.written is not None
    layers = range(start_layer, layout.layers if stop_layer is None else stop_layer)
    cache = written_into(pool, layout, run.written, slots, keep, layers)
    hidden = run.hidden if rows is None else take_tokens(run.hidden, rows)
    return Step(decoder.logits(hidden), cache, run.taps)


def recompute(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    pool: KV,
    pages: Paged | None,
    slots: Int[Array, "B T"],
    written: Written | None,
    keep: Any,
    mask: Any,
    rows: Array | None,
    *,
    start_layer: int = 0,
    stop_layer: int | None = None,
    hidden_at: tuple[int, ...] = (),
) -> Step:
    """Writes tokens into a cache, contiguous where there are no pages.

    Args:
      pool: an argument of its own, so that it can be donated; without pages the contiguous cache.
      pages: which of their keys count once the tokens are written. slots: of the pool.
    """
    held = model.spread(pool)
    if pages is None:
        context, keys, places, stand = held, slots, slots, None
    else:
        assert written is not None
        context, (keys, places) = pages._replace(pool=held), written
        stand = jnp.where(pages.seen, pages.places_of_keys(), NOWHERE)
    ahead = tokens.ahead if mask is None else None
    seen = Mask(causal=mask is None, query_places=places, key_places=stand, ahead=ahead, allowed=mask)
    layers: Any = {"start_layer": start_layer, "stop_layer": stop_layer, "hidden_at": hidden_at}
    given = context, keys, None if pages is None else slots, seen, rows
    step = write_tokens(model.decoder(state), model.layout, tokens, *given, keep=keep, **layers)
    return step._replace(cache=model.spread(step.cache))


def observe_attention(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    context: KV,
    mask: Any,
    slots: Array | None,
    keep: Any,
    *,
    layers: tuple[int, ...],
    reduce: Callable[[LayerAttention], Any],
    start_layer: int = 0,
) -> Any:
    """Runs the tokens up to the highest of `layers` and returns what `reduce` makes of the attention there."""
    if slots is None:
        mask = model.mask(tokens, context, mask)
    elif mask is None:
        mask = Mask(causal=True, query_places=slots, ahead=tokens.ahead)
    run = model.decoder(state).run(
        tokens.embeddings,
        jnp.asarray(tokens.positions),
        mask,
        context=model.spread(context),
        slots=None if slots is None else row_slots(key_count(context), slots)[0],
        keep=keep,
        start_layer=start_layer,
        stop_layer=layers[-1] + 1,
        deepstack=by_layer(tokens),
        observed=layers,
        observe=reduce,
    )
    return run.observed
