"""Writing tokens into a cache, contiguous or in pages: `recompute` and `decode` of a backbone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import Context, Logits, Step, Tokens, check_cached, check_tokens
from kvpatch_jax.core import DEFAULT, EngineKV, Paged, arrays_of
from kvpatch_jax.errors import ShapeError
from pallas_kernels.splice import check_slots

from .forward import LoadedModel, key_count
from .inputs.buckets import pad_slots, pad_tokens
from .inputs.masks import check_mask, check_mask_over
from .inputs.rows import logit_rows


class Writing(LoadedModel):
    """What a backbone gets from its programs and a check of positions: `recompute` and `decode`."""

    def recompute(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array | np.ndarray, "B T"],
        keep: Bool[Array | np.ndarray, "L B T"] | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        logits: Logits = "last",
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.recompute`. Tokens of a set that ends at a layer run on, unwritten."""
        if keep is not None and not isinstance(keep, Tracer):
            sets = np.asarray(keep)
            if sets.shape[0] != self.layout.layers or (sets[1:] & ~sets[:-1]).any():
                raise ShapeError(
                    f"keep: got {sets.shape}; expected one token set per layer ({self.layout.layers}), each inside the "
                    "one below"
                )
        return self._write(tokens, cache, slots, keep, mask, logits, "recompute")

    def decode(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array | np.ndarray, "B T"],
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        logits: Logits = "last",
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.decode`."""
        return self._write(tokens, cache, slots, None, mask, logits, "decode")

    def _write(
        self, tokens: Tokens, cache: Context, slots: Any, keep: Any, mask: Any, logits: Logits, what: str
    ) -> Step:
        """Writes tokens into a cache, and reads the logits behind them."""
        check_tokens(tokens, what)
        check_mask(mask)
        check_cached(self.layout, tokens, cache, f"{what}: cache")
        if np.shape(slots) != tokens.embeddings.shape[:2]:
            raise ShapeError(f"{what}: got slots of shape {np.shape(slots)}; expected {tokens.embeddings.shape[:2]}")

        self._check_regime(tokens.positions)
        rows, length = logit_rows(tokens, logits, what), tokens.embeddings.shape[1]
        if self.buckets is not None:
            tokens = pad_tokens(self.buckets, tokens)
        state = self.programs.state_for(tokens.embeddings.shape[0] * tokens.embeddings.shape[1])

        if isinstance(cache, Paged):
            step = self._write_pages(state, tokens, cache, slots, keep, mask, rows, what)
        else:
            slots = jnp.asarray(slots)
            if self.buckets is not None:
                slots, keep, mask = pad_slots(self.buckets, slots, keep, mask, key_count(cache))
            step = self.programs.recompute(state, tokens, dict(cache), slots, keep, mask, rows)
            # A loop's carry must come out as the pytree that went in: its frame is kept, if it has one.
            step = step._replace(cache=type(cache)(step.cache) if isinstance(cache, EngineKV) else step.cache)

        return step if rows is not None else step._replace(logits=step.logits[:, :length])

    def _write_pages(
        self, state: Any, tokens: Tokens, cache: Paged, slots: Any, keep: Any, mask: Any, rows: Any, what: str
    ) -> Step:
        """Does what `_write` does where the cache is in pages. The pool is donated; the table gets the slots' pages."""
        total = int(np.prod(next(iter(cache.pool.values())).shape[1:3]))
        slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
        check_slots(slots.reshape(-1), total)
        cache = cache.extended(slots, self.buckets or DEFAULT)
        check_mask_over(mask, (*slots.shape, cache.key_count), what)
        after, written = cache.written(slots)
        pool = arrays_of(cache.pool)

        if self.buckets is not None:
            # Padding is written at no key and at no slot.
            keys, places = written
            written = (
                pad_slots(self.buckets, keys, None, None, cache.key_count)[0],
                pad_slots(self.buckets, places, None, None, 0)[0],
            )
            slots, keep, mask = pad_slots(self.buckets, slots, keep, mask, total)

        step = self.programs.recompute_in_pages(
            state, tokens, pool, after._replace(pool={}), slots, written, keep, mask, rows
        )
        return Step(step.logits, after._replace(pool=step.cache))


def in_pages(window: int | None, context: Paged) -> Paged:
    """Returns a paged context as one kind of pytree: jax arrays by channel, and places only where layers slide."""
    pool = arrays_of(context.pool)
    return Paged(pool, context.table, context.seen, None if window is None else context.places_of_keys())
