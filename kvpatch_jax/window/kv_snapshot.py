"""A branch's vectors taken out of a pool as they lie, and put into another one, bit for bit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..cache import brief
from ..errors import WindowError
from . import programs
from .executor_pool import PoolExecutor
from .slot_table import ResidentPiece, StashedKV
from .sources import grown
from .window import Window

SIDES = ("engine", "source")


@dataclasses.dataclass(frozen=True, eq=False)
class PieceSnapshot:
    """What a pool holds of one piece, on the host.

    Attributes:
      turns, patch: as `ResidentPiece` has them.
      local: positions relative to its start.
      rows: {"engine" or "source": {channel: [L,T,K,H]}}, as they lie, padding of lanes included.
      aside: start, turns and patch of what was kept aside, with its rows; None where nothing was.
    """

    turns: int
    patch: str | None
    local: np.ndarray
    rows: Mapping[str, Mapping[str, np.ndarray]]
    aside: "tuple[int, int, str | None, Mapping[str, Mapping[str, np.ndarray]]] | None" = None


def taken(executor: PoolExecutor, window: Window) -> list[PieceSnapshot]:
    """Copies the pieces of a window out of the pool, in their order.

    Raises:
      WindowError: a window that the executor does not hold.
    """
    executor.check_current(window)
    found = []
    for held in executor.books.ordered(window.branch):
        slots = np.asarray(grown(held.slots, 0, executor.bucket(held.length)))
        rows = _host(programs.read_rows(executor.pools, slots), held.length)
        aside = None
        if held.aside is not None and held.aside.rows is not None:
            own = held.aside
            aside = own.start, own.turns, own.patch, _host(held.aside.rows, held.length)
        found.append(PieceSnapshot(held.turns, held.patch, held.local, rows, aside))
    return found


def placed(executor: PoolExecutor, window: Window, kept: list[PieceSnapshot]) -> None:
    """Puts the pieces of a window into the pool, where its branch holds nothing.

    Raises:
      WindowError: pieces that are not the window's, or of another pool's channels, widths or dtype; a branch that holds
      pieces. PoolError: no room. The pool is as it was then.
    """
    executor.check_backbone(window)
    executor.check_pool()
    books, writing = executor.books.copy(), []
    if books.branches.get(window.branch) or len(kept) != len(window.pieces):
        raise WindowError(
            f"placing: {len(kept)} pieces into branch {window.branch!r}, which holds "
            f"{len(books.branches.get(window.branch, ()))}; expected {len(window.pieces)} and none"
        )
    for piece, own in zip(window.pieces, kept, strict=True):
        length = piece.entry.tokens
        _check(executor, own.rows, own.local, length, piece.id)
        slots = books.allocate(length, executor.aligned, f"placing of piece {brief(piece.id)!r}")
        aside = None
        if own.aside is not None:
            start, turns, patch, rows = own.aside
            _check(executor, rows, own.local, length, piece.id)
            aside = StashedKV(start, turns, patch, _saved(rows, executor.bucket(length)))
        held = ResidentPiece(piece.id, piece.entry.content, slots, own.local, piece.start, own.turns, own.patch, aside)
        books.put(window.branch, held)
        writing.append((slots, own.rows))
    for slots, rows in writing:
        size = executor.bucket(len(slots))
        padded = np.asarray(grown(slots, 0, size))
        executor.pools = programs.put_rows(executor.pools, padded, _saved(rows, size), np.int32(len(slots)))
    executor.books = books
    executor.settle(window)


def _host(rows: programs.SavedRows, length: int) -> dict[str, dict[str, np.ndarray]]:
    sides = zip(SIDES, rows, strict=True)
    return {side: {name: np.asarray(value)[:, :length] for name, value in own.items()} for side, own in sides}


def _saved(rows: Mapping[str, Mapping[str, np.ndarray]], size: int) -> programs.SavedRows:
    sides = [{name: jnp.asarray(grown(value, 1, size)) for name, value in rows[side].items()} for side in SIDES]
    return programs.SavedRows(*sides)


def _check(executor: PoolExecutor, rows: Any, local: np.ndarray, length: int, id: str) -> None:
    """Refuses rows of another pool, or of another number of tokens."""
    axes = executor.layout.rope.axes
    wanted: dict[str, Any] = {"local": (length,) if axes is None else (length, axes)}
    found: dict[str, Any] = {"local": local.shape}
    for side, vectors in zip(SIDES, executor.pools, strict=True):
        for name, value in vectors.items():
            wanted[f"{side}.{name}"] = ((value.shape[0], length, *value.shape[3:]), str(value.dtype))
        for name, value in rows.get(side, {}).items():
            found[f"{side}.{name}"] = (value.shape, str(value.dtype))
    if found != wanted:
        other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))[0]
        shown = f"{other} {found.get(other)}; expected {wanted.get(other)}, as this pool has it"
        raise WindowError(f"placing: piece {brief(id)!r}: {shown}")
