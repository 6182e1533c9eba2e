"""Answers that grow in the pool: tokens decoded behind a window, until they become a piece of it or are let go of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from ..backbone import Tokens, check_tokens
from ..cache import brief
from ..core import Paged
from ..errors import InputError
from . import programs
from .edit_transaction import EditTransaction, PlannedLaunch
from .edits import Edit, Prefill
from .executor_pool import PoolExecutor
from .slot_table import DecodedAnswer, ResidentPiece, all_slots
from .sources import bucket, grown
from .window import Window


def grow(executor: PoolExecutor, window: Window, id: str, tokens: Tokens) -> Float[Array, "1 1 V"]:
    """See `PagedExecutor.decode`."""
    executor.check_current(window)
    check_tokens(tokens, "decode")
    if len(tokens.embeddings) != 1:
        raise InputError(f"decode: {len(tokens.embeddings)} rows of tokens; expected one")
    answer = executor.books.answers.get(window.branch)
    if answer is not None and (answer.held.id != id or answer.behind != window.pieces):
        raise InputError(
            f"decode: {brief(answer.held.id)!r} grows behind branch {window.branch!r}; expected it, or `discard` first"
        )
    before = None if answer is None else answer.held
    offset = 0 if before is None else int(np.floor(before.local.max())) + 1
    books, count = executor.books.copy(), tokens.embeddings.shape[1]
    slots = books.allocate(count, False, f"decode of {brief(id)!r}")
    front = [*executor.books.ordered(window.branch), *([] if before is None else [before])]
    cache = Paged.of(executor.pools.engine, all_slots(front), executor.buckets)
    backbone: Any = executor.backbone
    step = backbone.decode(tokens.shift(window.next_start + offset), cache, slots[None])

    local = np.asarray(tokens.positions[0], np.float32) + offset
    if before is not None:
        slots, local = np.concatenate([before.slots, slots]), np.concatenate([before.local, local])
    held = ResidentPiece(id, None, slots, local, window.next_start)
    books.answers[window.branch] = DecodedAnswer(held, window.pieces)
    executor.pools = programs.Pools(dict(step.cache.pool), executor.pools.source)
    executor.books = books
    behind = sum(piece.length for piece in front)
    executor.meter.asked(executor.pools.engine, (count, bucket(executor.buckets, count)), (behind, cache.key_count), 1)
    return step.logits


def adopt(executor: PoolExecutor, run: EditTransaction, window: Window, edits: Sequence[Edit]) -> bool:
    """Makes what grew behind a window the piece that these edits would prefill there, where it is that; lets go of it
    where it is not. Returns whether the edits are planned so.
    """
    answer = run.books.answers.get(window.branch)
    if answer is None:
        return False
    held, one = answer.held, edits[0] if len(edits) == 1 else None
    if isinstance(one, Prefill) and one.id == held.id and one.id in window:
        piece = window.piece(one.id)
        same = (piece.start, piece.entry.tokens) == (held.start, held.length)
        if same and answer.behind == window.pieces[:-1] == executor.current(window.branch):
            del run.books.answers[window.branch]
            run.books.put(window.branch, dataclasses.replace(held, content=piece.entry.content))
            run.actions.append(PlannedLaunch(lambda: _keep_source(executor, held)))
            return True
    run.books.discard(window.branch)
    return False


def _keep_source(executor: PoolExecutor, held: ResidentPiece) -> None:
    """Writes the phase-free source of keys that were decoded, which came turned."""
    size = executor.bucket(held.length)
    slots = np.asarray(grown(held.slots, 0, size))
    if executor.pools.source:
        kv = executor.turned_back(held, size)
        rows = programs.SavedRows({}, {name: kv[name] for name in executor.pools.source})
        executor.pools = programs.put_rows(executor.pools, slots, rows, np.int32(held.length))
    executor.meter.moved("adopted", executor.pools.source, held.length, size, 1)
