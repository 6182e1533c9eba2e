"""Snapshots of a branch's vectors: copied out of a pool as they are, and written into another one, bit for bit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..cache import brief
from ..errors import WindowError
from .executor import PagedExecutor
from .padding import bucket, zero_padded
from .programs import SavedRows
from .slot_table import PieceTransition, ResidentPiece
from .window import Window

SIDES = ("engine", "source", "transition")

HostRows = Mapping[str, Mapping[str, np.ndarray]]
"""{"engine" or "source": {channel: [L,T,K,H]}, "transition": {part: [L,R,K,W]}}, padding of lanes included."""


@dataclasses.dataclass(frozen=True, eq=False)
class PieceSnapshot:
    """What a pool holds of one piece, on the host.

    Attributes:
      local: positions relative to its start.
      rows: its vectors as they are.
    """

    local: np.ndarray
    rows: HostRows


def taken(executor: PagedExecutor, window: Window) -> list[PieceSnapshot]:
    """Copies the pieces of a window out of the pool, in their order.

    Raises:
      WindowError: the executor does not hold the window.
    """
    executor.check_current(window)

    found = []
    for piece in executor.books.ordered(window.branch):
        rows = _on_host(executor.pool.read(piece.slots), piece.transition, piece.length)
        found.append(PieceSnapshot(piece.local, rows))

    return found


def placed(executor: PagedExecutor, window: Window, kept: list[PieceSnapshot]) -> None:
    """Writes the pieces of a window into the pool, where its branch holds nothing.

    Raises:
      WindowError: pieces that are not the window's, or of another pool's channels, widths or dtype; a branch that holds
      pieces. PoolError: no room. Then nothing has changed.
    """
    # A lost pool would take the rows and lose them with the next launch.
    executor.check_backbone(window)
    executor.pool.check()
    books = executor.books.copy()
    held = len(books.branches.get(window.branch, ()))
    if held or len(kept) != len(window.pieces):
        raise WindowError(
            f"placing: got {len(kept)} pieces for branch {window.branch!r}, which holds {held}; expected "
            f"{len(window.pieces)} and none"
        )

    # Check and enter everything before the first vector is written.
    pending = []
    for piece, own in zip(window.pieces, kept, strict=True):
        id, content, length = piece.entry.id, piece.entry.content, piece.entry.tokens
        size = bucket(executor.buckets, length)
        _check(executor, own.rows, own.local, length, id)
        slots = books.allocate(length, executor.aligned, f"placing of piece {brief(id)!r}")

        resident = ResidentPiece(id, content, slots, own.local, piece.start, _transition(own.rows))
        books.put(window.branch, resident)
        pending.append((slots, own.rows, size))

    # Nothing is refused from here on.
    for slots, rows, size in pending:
        executor.pool.put(slots, _on_device(rows, size))
    executor.books = books
    executor.settle(window)


def _on_host(rows: SavedRows, transition: PieceTransition | None, length: int) -> HostRows:
    # Padding of buckets is cut off, that of lanes kept: a pool of the same widths takes the rows as they are.
    found = {}
    for side, vectors in zip(SIDES[:2], rows, strict=True):
        found[side] = {name: np.asarray(value)[:, :length] for name, value in vectors.items()}
    parts = {} if transition is None else transition.parts or {}
    return found | {"transition": {name: np.asarray(value) for name, value in parts.items()}}


def _on_device(rows: HostRows, size: int) -> SavedRows:
    sides = []
    for side in SIDES[:2]:
        sides.append({name: jnp.asarray(zero_padded(value, 1, size)) for name, value in rows[side].items()})
    return SavedRows(*sides)


def _transition(rows: HostRows) -> PieceTransition | None:
    parts = rows.get("transition")
    return PieceTransition({name: jnp.asarray(value) for name, value in parts.items()}) if parts else None


def _check(executor: PagedExecutor, rows: HostRows, local: np.ndarray, length: int, id: str) -> None:
    """Refuses rows of another pool, or of another number of tokens."""
    axes = executor.layout.rope.axes
    wanted: dict[str, Any] = {"local": (length,) if axes is None else (length, axes)}
    found: dict[str, Any] = {"local": local.shape}

    for channel in executor.layout.parts:
        depth, shape = executor.layout.depth(channel.name), (channel.rows, channel.heads, channel.width)
        wanted[f"transition.{channel.name}"] = ((depth, *shape), "float32")
    for side, vectors in zip(SIDES, (*executor.pool.vectors, {}), strict=True):
        for name, value in vectors.items():
            wanted[f"{side}.{name}"] = ((value.shape[0], length, *value.shape[3:]), str(value.dtype))
        for name, value in rows.get(side, {}).items():
            found[f"{side}.{name}"] = (value.shape, str(value.dtype))

    # Name the first array that differs, in alphabetical order, so that the message is reproducible.
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise WindowError(f"placing: got {name} {found.get(name)} of piece {brief(id)!r}; expected {wanted.get(name)}")
