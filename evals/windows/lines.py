"""Pieces of a window one behind the other: prefilled, placed, and served from what is cached.

Everything is a batch of contexts that share all but their contents. KV of a piece is phase-free; what is read is in the
engine frame. Of a hybrid model each piece's KV has its own transition, which joining composes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV, Tokens
from models import ModelBackbone


class Piece(NamedTuple):
    """An image or a text of every context: its tokens, positions from its own start, and its canonical."""

    tokens: Tokens
    chunk: kvp.Chunk

    def of_others(self, by: int = 1) -> "Piece":
        """Gives each context the piece that the context `by` further on has in this place."""
        rolled = jax.tree.map(lambda array: jnp.asarray(np.roll(array, -by, axis=0)), self.tokens)
        kv = {name: np.roll(np.asarray(value), -by, axis=1) for name, value in self.chunk.kv.items()}
        name = f"{self.chunk.id}+{by}"
        chunk = dataclasses.replace(self.chunk, kv=kv, id=name, content=name)
        return Piece(rolled._replace(positions=self.tokens.positions), chunk)


def make_piece(backbone: ModelBackbone, tokens: Tokens, name: str) -> Piece:
    """Prefills embedded tokens alone; their rows share their positions."""
    local = np.asarray(tokens.positions)[0]
    chunk = kvp.Chunk(
        kv=dict(backbone.prefill(tokens).kv),
        local=local,
        span=int(local.max()) + 1,
        length=len(local),
        id=name,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=name,
    )
    return Piece(tokens, chunk)


def text_piece(backbone: ModelBackbone, ids: Int[np.ndarray, "B T"], name: str) -> Piece:
    """Makes a piece of token ids."""
    return make_piece(backbone, backbone.embed(ids.astype(np.int32), places(backbone, ids.shape)), name)


def places(backbone: ModelBackbone, shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """Makes positions start, start + 1, … of rows of tokens [B,T], with an axis for each of the rope's."""
    positions = np.broadcast_to(start + np.arange(shape[1], dtype=np.int32), shape)
    axes = backbone.layout.rope.axes
    return positions if axes is None else np.repeat(positions[..., None], axes, axis=2)


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """Pieces in the order in which they stand, the first one's positions from 0."""

    backbone: ModelBackbone
    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    def start(self, place: int) -> int:
        """Finds the position that a piece begins at; with the number of pieces, the one behind all."""
        return sum(piece.chunk.span for piece in self.pieces[:place])

    @property
    def end(self) -> int:
        """The position behind all pieces."""
        return self.start(len(self))

    def antecedent(self, place: int) -> tuple[str, ...]:
        """Lists the ids of the pieces in front of a place."""
        return tuple(piece.chunk.id for piece in self.pieces[:place])

    def prefilled(self) -> list[KV]:
        """Prefills every piece behind those in front of it; phase-free KV of each."""
        return [dict(kv) for kv in kvp.conditioned(self.backbone, [piece.tokens for piece in self.pieces])]

    def behind(self, parts: Sequence[KV], piece: Piece) -> KV:
        """Prefills a piece behind the line, whose engine-frame KV is `parts`; phase-free KV of the piece."""
        return dict(self.backbone.prefill(piece.tokens.shift(np.int32(self.end)), kvp.joined(*parts)).kv)

    def placed(self, parts: Sequence[KV]) -> list[KV]:
        """Turns phase-free KV of every piece to its place."""
        moved = []
        for place, (piece, kv) in enumerate(zip(self.pieces, parts, strict=True)):
            moved.append(kvp.to_engine(piece.chunk.layout, kv, piece.tokens.positions, self.start(place)))
        return moved

    def served(self, place: int, patch: kvp.Patch | None = None, **base: Any) -> KV:
        """Serves a piece from its canonical, or from a base with its `base_antecedent`, turned and patched.

        A patch that was formed behind others is served all the same: what that costs is what is measured.
        """
        piece, start = self.pieces[place], self.start(place)
        placed = kvp.Placed(piece.chunk, patch, start, self.antecedent(place), allow_stale=True, **base)
        return kvp.apply_patch(placed)
