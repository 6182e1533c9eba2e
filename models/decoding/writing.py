"""Writing tokens into a cache, contiguous or in pages: `recompute`, `decode` and `attention` of a backbone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import (
    Context,
    LayerAttention,
    Logits,
    Step,
    Tokens,
    check_cached,
    check_tokens,
)
from kvpatch_jax.core import DEFAULT, AnyArray, EngineKV, Paged, arrays_of, check_mask, cut, split_transition
from kvpatch_jax.errors import InputError, ShapeError
from pallas_kernels.splice import check_slots

from ..inputs.buckets import pad_slots, pad_tokens
from ..inputs.masks import check_behind, check_mask_over
from ..inputs.rows import logit_rows
from .programs import LoadedModel
from .traced import key_count

ALL_LAYERS = {"start_layer": 0, "stop_layer": None, "hidden_at": ()}
"""Of a step: what a recompute may choose."""
WRITTEN = "True where a token is written at a layer"


class Writing(LoadedModel):
    """What a backbone gets from its programs and a check of positions: `recompute`, `decode` and `attention`."""

    def recompute(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array | np.ndarray, "B T"],
        keep: Bool[Array | np.ndarray, "L B T"] | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        logits: Logits = "last",
        start_layer: int = 0,
        stop_layer: int | None = None,
        hidden_at: tuple[int, ...] = (),
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.recompute`. Tokens of a set that ends at a layer run on, unwritten."""
        check_mask(keep, "recompute: keep", WRITTEN)
        if keep is not None and not isinstance(keep, Tracer):
            sets = np.asarray(keep)
            if sets.shape[0] != self.layout.layers or (sets[1:] & ~sets[:-1]).any():
                raise ShapeError(
                    f"keep: got {sets.shape}; expected one token set per layer ({self.layout.layers}), each inside the "
                    "one below"
                )
        stop, top = self.layout.layers if stop_layer is None else stop_layer, self.layout.layers
        if not 0 <= start_layer < stop <= top or any(not start_layer <= tap <= stop for tap in hidden_at):
            raise ShapeError(
                f"recompute: got layers {start_layer} to {stop_layer} with residuals at {hidden_at}; expected a part "
                f"of the layers 0 to {top}, and residuals inside it"
            )
        layers = {"start_layer": start_layer, "stop_layer": stop_layer, "hidden_at": tuple(hidden_at)}
        if self.layout.parts:
            self._check_appends(cache, slots, keep, layers)
        return self._write(tokens, cache, slots, keep, mask, logits, "recompute", layers)

    def _check_appends(self, cache: Context, slots: Any, keep: Any, layers: Mapping[str, Any]) -> None:
        """Refuses, for layers with linear attention, what is no appending: what they had of a token is gone in a state.

        Raises:
          InputError: it says so.
        """
        own = keep is not None or layers["start_layer"] or layers["stop_layer"] not in (None, self.layout.layers)
        if own or not isinstance(cache, Paged):
            found = "some layers or sets of tokens" if own else "a contiguous cache, of which any key may be written"
        elif isinstance(cache.seen, Tracer) or isinstance(slots, Tracer):
            return
        else:
            extended = cache.extended(slots, None)
            keys = np.asarray(extended.written(np.asarray(slots))[1][0])
            inside = np.pad(np.asarray(extended.seen), ((0, 0), (0, 1)))[np.arange(len(keys))[:, None], keys]
            if not inside.any():
                return
            found = f"slots of {int(inside.sum())} tokens that the context holds"
        raise InputError(
            f"recompute: got {found}, of a model with linear attention, whose state holds what each token added to it; "
            "expected tokens behind the context, through all layers (in a contiguous cache: decode)"
        )

    def attention(
        self,
        tokens: Tokens,
        context: Mapping[str, AnyArray],
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        *,
        layers: Sequence[int],
        reduce: Callable[[LayerAttention], Any],
        slots: Int[Array | np.ndarray, "B T"] | None = None,
        keep: Bool[Array | np.ndarray, "L B T"] | None = None,
        start_layer: int = 0,
    ) -> Any:
        """See `kvpatch_jax.backbone.Backbone.attention`. Nothing is padded: `reduce` sees real tokens alone."""
        check_tokens(tokens, "attention")
        check_mask(mask, "attention: mask")
        check_mask(keep, "attention: keep", WRITTEN)
        check_cached(self.layout, tokens, context, "attention: context")
        if slots is None:
            check_behind(tokens, context, mask, "attention")
        elif np.shape(slots) != tokens.embeddings.shape[:2]:
            raise ShapeError(f"attention: got slots of shape {np.shape(slots)}; expected {tokens.embeddings.shape[:2]}")
        wanted = tuple(int(layer) for layer in layers)
        top = self.layout.layers - 1
        if not wanted or list(wanted) != sorted(set(wanted)) or not 0 <= start_layer <= wanted[0] <= wanted[-1] <= top:
            raise InputError(f"attention.layers: got {wanted}; expected ascending layers of {start_layer} to {top}")
        kept = self.layout.layers_of(self.layout.token_channels[0].name) if self.layout.parts else wanted
        if not set(wanted) <= set(kept):
            raise InputError(
                f"attention.layers: got {wanted}, some of them with linear attention, which compares no keys; expected "
                f"some of {tuple(kept)}"
            )
        self._check_regime(tokens.positions)
        arrays = tokens, arrays_of(context), mask, slots, keep
        return self.programs.attention(
            self.programs.state, *arrays, layers=wanted, reduce=reduce, start_layer=start_layer
        )

    def decode(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array | np.ndarray, "B T"],
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        logits: Logits = "last",
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.decode`."""
        return self._write(tokens, cache, slots, None, mask, logits, "decode", ALL_LAYERS)

    def _write(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Any,
        keep: Any,
        mask: Any,
        logits: Logits,
        what: str,
        layers: Mapping[str, Any],
    ) -> Step:
        """Writes tokens into a cache, and reads the logits behind them.

        A pool is donated, and its table gets the slots' pages.
        """
        check_tokens(tokens, what)
        check_mask(mask, f"{what}: mask")
        check_cached(self.layout, tokens, cache, f"{what}: cache")
        if np.shape(slots) != tokens.embeddings.shape[:2]:
            raise ShapeError(f"{what}: got slots of shape {np.shape(slots)}; expected {tokens.embeddings.shape[:2]}")

        self._check_regime(tokens.positions)
        length, buckets = tokens.embeddings.shape[1], self.buckets
        slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
        # What leaves a lower layer is no input of the output head.
        ends_below = layers["stop_layer"] not in (None, self.layout.layers)
        rows = jnp.zeros((len(slots), 0), jnp.int32) if ends_below else logit_rows(tokens, logits, what)

        if not isinstance(cache, Paged):
            pages, written, end = None, None, key_count(cache)
            program, held = self.programs.recompute, arrays_of(cache)
        else:
            end = int(np.prod(next(iter(cache.pool.values())).shape[1:3]))
            check_slots(slots.reshape(-1), end)
            cache = cache.extended(slots, buckets or DEFAULT)
            check_mask_over(mask, (*slots.shape, cache.key_count), what)
            pages, written = cache.written(slots)
            program, held, pages = self.programs.recompute_in_pages, arrays_of(cache.pool), pages._replace(pool={})

        # Padding is written at no key and at no slot.
        if buckets is not None:
            tokens = pad_tokens(buckets, tokens)
            slots, keep, mask = pad_slots(buckets, slots, keep, mask, end)
            if written is not None:
                keys, places = written
                keys = pad_slots(buckets, keys, None, None, key_count(cache))[0]
                written = keys, pad_slots(buckets, places, None, None, 0)[0]

        step = program(self.programs.state, tokens, held, pages, slots, written, keep, mask, rows, **layers)
        # A loop's carry must come out as the pytree that went in: its frame is kept, if it has one.
        after: Any = step.cache
        if pages is not None:
            pool, transition = split_transition(step.cache)
            after = pages._replace(pool=pool, transition=transition)
        after = EngineKV(after) if isinstance(cache, EngineKV) else after
        hidden = {layer: cut(residual, 1, 0, length) for layer, residual in step.hidden.items()}
        return Step(step.logits if rows is not None else cut(step.logits, 1, 0, length), after, hidden)


def in_pages(window: int | None, context: Paged) -> Paged:
    """Returns a paged context as one kind of pytree: jax arrays by channel, and places only where layers slide."""
    pool, places = arrays_of(context.pool), None if window is None else context.places_of_keys()
    transition = None if context.transition is None else arrays_of(context.transition)
    return Paged(pool, context.table, context.seen, places, transition)
