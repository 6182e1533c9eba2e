"""Compiling ahead of time what an executor's configuration will need: nothing is written, nothing is stored."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backbone import Tokens
from ..core import Buckets, Paged, as_start
from ..errors import InputError
from . import programs
from .executor_pool import PoolExecutor
from .fused_question import packed
from .sources import bucket, grown, padded_tokens

NONE = np.int32(0)
"""How many tokens are written."""


def warm_up(
    executor: PoolExecutor,
    tokens: Sequence[int | Tokens],
    questions: Sequence[int | Tokens],
    keys: int,
    ranks: Iterable[int],
    steps: int,
    ask: bool,
) -> None:
    """See `PagedExecutor.warm_up`."""
    pages, size = executor.books.allocator.pages, executor.books.allocator.page_size
    if not 0 <= keys <= pages * size:
        raise InputError(f"warm_up: contexts of {keys} tokens; expected 0 to {pages * size}, all that the pool holds")
    pieces, asked = (samples(executor.backbone, executor.buckets, given) for given in (tokens, questions))
    contexts = _contexts(executor, keys)
    for sample in pieces:
        for context in contexts:
            _prefill(executor, sample, context)
        _writes(executor, sample, ranks)
        for question in asked if ask else ():
            _asks(executor, sample, question, contexts)
    for sample in asked:
        for context in contexts:
            _prefill(executor, sample, context)
            if steps:
                backbone: Any = executor.backbone
                lengths = np.array([sample.embeddings.shape[1]], np.int32)
                backbone.generate(_behind(sample, context), steps, _now(executor, context), lengths=lengths)
    for count in sorted({executor.bucket(number) for number in range(1, keys + 1)}):
        _turns(executor, count)


def _asks(executor: PoolExecutor, sample: Tokens, question: Tokens, contexts: Sequence[Paged | None]) -> None:
    """A piece and a question in one forward, and the launch that places the piece."""
    together = packed(sample, sample.embeddings.shape[1], question, question.embeddings.shape[1])
    prefill = getattr(executor.backbone, "prefill_padded", executor.backbone.prefill)
    for context in contexts:
        last = np.array([[together.embeddings.shape[1] - 1]], np.int32)
        prefill(_behind(together, context), _now(executor, context), logits=last)
    _writes(executor, together, (), spliced=False)


def samples(backbone: Any, buckets: Buckets | None, given: Sequence[int | Tokens]) -> list[Tokens]:
    """One set of tokens for each bucket and kind."""
    found: dict[Any, Tokens] = {}
    for one in given:
        if not isinstance(one, Tokens):
            one = padded_tokens(backbone.embed(np.zeros((1, 1), np.int32)), bucket(buckets, int(one)))
        one = padded_tokens(one, bucket(buckets, one.embeddings.shape[1]))
        found[one.embeddings.shape[1], one.deepstack is None, str(np.asarray(one.positions).dtype)] = one
    return list(found.values())


def _contexts(executor: PoolExecutor, keys: int) -> list[Paged | None]:
    """No context, and one of each bucket of page tables up to so many tokens."""
    pages, size = executor.books.allocator.pages, executor.books.allocator.page_size
    found: dict[int, Paged | None] = {0: None}
    for count in range(1, min(-(-keys // size) + 1, pages) + 1):
        slots = np.arange(count * size, dtype=np.int32)
        context = Paged.of(executor.pools.engine, slots, executor.buckets)
        found.setdefault(context.table.shape[1], context)
    return list(found.values())


def _behind(sample: Tokens, context: Paged | None) -> Tokens:
    return sample.shift(0 if context is None else 1)  # where it stands changes no program


def _prefill(executor: PoolExecutor, sample: Tokens, context: Paged | None) -> None:
    last = np.array([[sample.embeddings.shape[1] - 1]], np.int32)
    executor.backbone.prefill(_behind(sample, context), _now(executor, context), logits=last)


def _now(executor: PoolExecutor, context: Paged | None) -> Paged | None:
    """A context in the pool as it is now, which every launch gives anew."""
    return None if context is None else context._replace(pool=executor.pools.engine)


def _writes(executor: PoolExecutor, sample: Tokens, ranks: Iterable[int], spliced: bool = True) -> None:
    """The launches that place a piece: prefilled, and if `spliced` bare, and patched at each rank."""
    layout, size = executor.layout, sample.embeddings.shape[1]
    dtype = sample.embeddings.dtype
    kv = {
        channel.name: jnp.zeros((layout.layers, size, channel.heads, channel.width), dtype)
        for channel in layout.channels
    }
    slots, start = np.zeros(size, np.int32), np.asarray(as_start(layout.rope, 0))
    local = grown(np.asarray(sample.positions[0], np.float32), 0, size)
    place = local, start, NONE
    given: list[tuple[Any, Any]] = [({name: value[:, None] for name, value in kv.items()}, {})]
    given += [(kv, {})] if spliced else []
    for rank in ranks:
        factors = {
            channel.name: (
                jnp.zeros((layout.layers, size, rank), dtype),
                jnp.zeros((layout.layers, rank, channel.features), dtype),
            )
            for channel in layout.channels
        }
        given.append((kv, factors))
    for value, factors in given:
        executor.pools = programs.write_piece(layout, executor.pools, slots, value, factors, *place)


def _turns(executor: PoolExecutor, size: int) -> None:
    """The launches that turn, copy and read so many slots."""
    axes = () if executor.layout.rope.axes is None else (executor.layout.rope.axes,)
    slots, starts = np.zeros(size, np.int32), np.zeros((size, *axes), np.int32)
    local = np.zeros((size, *axes), np.float32)
    for whole in (False, True):
        given = slots, slots, local, starts, starts, NONE
        executor.pools = programs.turn_slots(executor.layout, executor.pools, *given, whole=whole)
    executor.pools = programs.copy_slots(executor.pools, slots, slots, NONE)
    rows = programs.read_rows(executor.pools, slots)
    executor.pools = programs.put_rows(executor.pools, slots, rows, NONE)
