"""Compilation ahead of time of what an executor will need. Nothing is written to the pool, nothing is stored."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone, Tokens
from ..core import Buckets, Paged, as_start
from ..errors import InputError
from . import programs
from .edit_run import packed
from .paged_pool import PagedPool
from .sources import bucket, padded_tokens, zero_padded

NO_TOKENS = np.int32(0)
"""Length of what is written: programs run on zeros of which none count."""


def samples(backbone: Any, buckets: Buckets | None, inputs: Sequence[int | Tokens]) -> list[Tokens]:
    """Returns one set of tokens for each bucket and kind among lengths and sample tokens."""
    # Programs depend on the length, on features for deeper layers and on whether positions are whole numbers.
    found: dict[Any, Tokens] = {}
    for tokens in inputs:
        if not isinstance(tokens, Tokens):
            tokens = padded_tokens(backbone.embed(np.zeros((1, 1), np.int32)), bucket(buckets, int(tokens)))
        tokens = padded_tokens(tokens, bucket(buckets, tokens.embeddings.shape[1]))
        kind = tokens.embeddings.shape[1], tokens.deepstack is None, str(np.asarray(tokens.positions).dtype)
        found[kind] = tokens
    return list(found.values())


class Precompiler:
    """Runs every program that a pool will need once, on inputs of which no token counts."""

    def __init__(self, backbone: Backbone, pool: PagedPool, pages: int, page_size: int):
        self._backbone, self._pool, self._pages, self._page_size = backbone, pool, pages, page_size

    def compile(
        self,
        tokens: Sequence[int | Tokens],
        questions: Sequence[int | Tokens],
        *,
        keys: int,
        ranks: Sequence[int],
        steps: int,
        ask: bool,
    ) -> None:
        """Compiles what windows will need. See `PagedExecutor.warm_up`."""
        slots, buckets = self._pages * self._page_size, self._pool.buckets
        if not 0 <= keys <= slots:
            raise InputError(f"warm_up.keys: got {keys} tokens; expected 0 to {slots}, which the pool holds")

        pieces, asked = samples(self._backbone, buckets, tokens), samples(self._backbone, buckets, questions)

        # No context, and one of each bucket of page tables.
        contexts: dict[int, Paged | None] = {0: None}
        for count in range(1, min(-(-keys // self._page_size) + 1, self._pages) + 1):
            table = np.arange(count * self._page_size, dtype=np.int32)
            context = Paged.of(self._pool.vectors.engine, table, buckets)
            contexts.setdefault(context.table.shape[1], context)

        for sample in pieces:
            for context in contexts.values():
                self._prefill(self._backbone.prefill, sample, context)
            self._write(sample, ranks, spliced=True)

            # A piece and a question in one forward, and the launch that writes the piece.
            for question in asked if ask else ():
                together = packed(sample, sample.embeddings.shape[1], question, question.embeddings.shape[1])
                for context in contexts.values():
                    prefill = getattr(self._backbone, "prefill_padded", self._backbone.prefill)
                    self._prefill(prefill, together, context)
                self._write(together, (), spliced=False)

        for sample in asked:
            for context in contexts.values():
                self._prefill(self._backbone.prefill, sample, context)
                if steps:
                    backbone: Any = self._backbone
                    lengths = np.array([sample.embeddings.shape[1]], np.int32)
                    backbone.generate(_behind(sample, context), steps, self._in_pool(context), lengths=lengths)

        # Runs of rotations and copies have any number of tokens up to that of the window.
        for count in sorted({bucket(buckets, number) for number in range(1, keys + 1)}):
            self._rotate_and_copy(count)

    def _prefill(self, prefill: Any, sample: Tokens, context: Paged | None) -> None:
        last = np.array([[sample.embeddings.shape[1] - 1]], np.int32)
        prefill(_behind(sample, context), self._in_pool(context), logits=last)

    def _in_pool(self, context: Paged | None) -> Paged | None:
        """Returns a context in the current vectors, which every launch replaces."""
        return None if context is None else context._replace(pool=self._pool.vectors.engine)

    def _write(self, sample: Tokens, ranks: Sequence[int], spliced: bool) -> None:
        """Runs the launches that write a piece: prefilled, and if `spliced` bare, and patched at each rank."""
        pool, layout, size = self._pool, self._pool.layout, sample.embeddings.shape[1]
        dtype, kv = sample.embeddings.dtype, {}
        for channel in layout.channels:
            kv[channel.name] = jnp.zeros((layout.layers, size, channel.heads, channel.width), dtype)

        # As a prefill returns it, [L,1,T,K,H]; as a chunk has it; and with factors.
        inputs: list[tuple[Any, Any]] = [({name: value[:, None] for name, value in kv.items()}, {})]
        if spliced:
            inputs.append((kv, {}))

        for rank in ranks:
            factors = {}
            for channel in layout.channels:
                u = jnp.zeros((layout.layers, size, rank), dtype)
                factors[channel.name] = u, jnp.zeros((layout.layers, rank, channel.features), dtype)
            inputs.append((kv, factors))

        local = zero_padded(np.asarray(sample.positions[0], np.float32), 0, size)
        start = np.asarray(as_start(layout.rope, 0))
        destination = programs.Destination(np.zeros(size, np.int32), local, start, NO_TOKENS)
        for vectors, factors in inputs:
            pool.vectors = programs.write_piece(layout, pool.vectors, destination, vectors, factors)

    def _rotate_and_copy(self, size: int) -> None:
        """Runs the launches that rotate, copy and read so many slots."""
        pool, layout = self._pool, self._pool.layout
        axes = () if layout.rope.axes is None else (layout.rope.axes,)
        slots, starts = np.zeros(size, np.int32), np.zeros((size, *axes), np.int32)
        local = np.zeros((size, *axes), np.float32)
        rotation = programs.SlotRotation(slots, slots, local, starts, starts, NO_TOKENS)

        # In place, and into slots of the branch's own.
        for whole in (False, True):
            pool.vectors = programs.rotate_slots(layout, pool.vectors, rotation, whole=whole)
        pool.vectors = programs.copy_slots(pool.vectors, slots, slots, NO_TOKENS)
        rows = programs.read_rows(pool.vectors, slots)
        pool.vectors = programs.put_rows(pool.vectors, slots, rows, NO_TOKENS)


def _behind(sample: Tokens, context: Paged | None) -> Tokens:
    """Moves tokens behind a context; by how much changes no program."""
    return sample.shift(0 if context is None else 1)
