"""Vectors of a paged pool, and every launch on them: reading, writing, rotating and copying pieces, each counted."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import (
    Buckets,
    Factors,
    KVLayout,
    Paged,
    PhaseFreeKV,
    as_start,
    identity,
    rotate_kv,
)
from ..errors import PoolLostError
from ..pool import make_pool, trimmed
from . import programs
from .costs import CostMeter
from .padding import bucket, zero_padded
from .slot_table import DecodedAnswer, PieceTransition, ResidentPiece, all_slots

Composed = Mapping[str, Float[Array, "L 1 R _ _"]]
"""Transition of a whole context, as backbones read it."""

COMPOSITIONS = 4
"""Windows whose composed transitions are kept: many questions behind one of them compose once."""


class KeyRotation(NamedTuple):
    """Piece that rotates to a new start: in its slots, or into new ones if another branch keeps the old ones."""

    old: ResidentPiece
    new: ResidentPiece


class PagedPool:
    """Vectors of a paged pool, and the launches on them.

    The vectors are donated from launch to launch: after a launch that fails they may be lost. Channels that carry phase
    are kept phase-free beside the pool, slot by slot: survivors rotate from there, with one rounding however often.

    Of hybrid models the pieces' transitions lie beside it, and are composed in the order of the pieces that are read.

    Attributes:
      vectors: the pool and its source.
      meter: counts the launches.
      aligned: whether pieces begin on a page of their own.
    """

    def __init__(
        self,
        layout: KVLayout,
        meter: CostMeter,
        buckets: Buckets | None,
        *,
        aligned: bool,
        padded: bool,
        shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    ):
        """Describes a pool; `allocate` makes its vectors, over devices as `shardings` of each channel say."""
        self.layout, self.meter, self.buckets, self.aligned = layout, meter, buckets, aligned
        self.vectors = programs.Pools({}, {})
        self._padded, self._shardings = padded, shardings
        # By the transitions that were composed, which may end meanwhile.
        self._composed: OrderedDict[tuple[weakref.ref[PieceTransition], ...], Composed] = OrderedDict()

    def allocate(self, pages: int, page_size: int, dtype: jax.typing.DTypeLike) -> None:
        """Allocates vectors of zeros, in place of those there were, and keeps no composition of them."""
        self._composed.clear()
        # The source has no padding of its own: it takes the shape of the channels it doubles.
        engine = make_pool(self.layout, pages, page_size, dtype, padded=self._padded, shardings=self._shardings)
        rotating = [channel.name for channel in self.layout.token_channels if channel.rotates]
        self.vectors = programs.Pools(engine, {name: jnp.zeros_like(engine[name]) for name in rotating})

    def enlarge(self, more: int) -> None:
        """Appends pages of zeros; the vectors stay. Programs compile for the new size."""
        # Slots keep their numbers, because pages are appended at the end.
        self.vectors = jax.tree.map(
            lambda value: jnp.pad(value, [(0, more if axis == 1 else 0) for axis in range(value.ndim)]), self.vectors
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of its source."""
        return sum(value.nbytes for value in jax.tree.leaves(self.vectors))

    @property
    def lost(self) -> bool:
        """Whether a launch failed after the pool was donated to it."""
        return any(value.is_deleted() for value in jax.tree.leaves(self.vectors))

    def check(self, cause: BaseException | None = None) -> None:
        """Raises PoolLostError if the vectors are lost."""
        if self.lost:
            raise PoolLostError(
                "executor: got a pool whose vectors were lost in a failed launch; expected `renew()`, then a run of "
                "`window.anew()`"
            ) from cause

    def new_transition(self) -> PieceTransition | None:
        """Returns a place for the transition of a piece, which a launch fills; None of a model without any."""
        return PieceTransition() if self.layout.parts else None

    def padded_slots(self, slots: Int[np.ndarray, " T"]) -> tuple[np.ndarray, np.int32]:
        """Returns slots padded to their bucket, and how many count."""
        return np.asarray(zero_padded(slots, 0, bucket(self.buckets, len(slots)))), np.int32(len(slots))

    # ---------------------------------------------------------------------------------------------------- reading

    def context_of(self, pieces: Sequence[ResidentPiece]) -> Paged | None:
        """Returns the KV of pieces as a backbone reads it; None without pieces."""
        slots = all_slots(pieces)
        if not slots.size:
            return None
        return Paged.of(self.vectors.engine, slots, self.buckets, self.composed(pieces))

    def composed(self, pieces: Sequence[ResidentPiece]) -> Composed | None:
        """Returns the transition of pieces that follow each other, {part: [L,1,R,K,W]}; None of a model without any."""
        if not self.layout.parts:
            return None

        # As long as the same pieces stand in the same order, the composition of the last time holds.
        transitions = [piece.transition for piece in pieces if piece.transition is not None]
        key = tuple(map(weakref.ref, transitions))
        made = self._composed.pop(key, None)
        front = self._composed.get(key[:-1]) if key else None
        if made is None and front is not None:
            # Most windows are one of the last time with a piece behind it.
            made = programs.extend_composition(front, transitions[-1].parts or {}, np.int32(pieces[-1].length))
            self.meter.composed(2, 2)
        elif made is None:
            # The programs have few numbers of pieces; those that are missing change nothing.
            missing = (1 << (len(pieces) - 1).bit_length()) - len(pieces) if pieces else 1
            parts = (*(transition.parts or {} for transition in transitions), *[self.unit] * missing)
            lengths = np.array([piece.length for piece in pieces] + [0] * missing, np.int32)
            made = programs.compose_transitions(parts, lengths)
            self.meter.composed(len(pieces), len(parts))

        self._composed[key] = made
        for other in list(self._composed):
            if len(self._composed) > COMPOSITIONS or any(reference() is None for reference in other):
                del self._composed[other]
        return made

    @property
    def compositions(self) -> list[Composed]:
        """The compositions that are kept, the latest last."""
        return list(self._composed.values())

    @functools.cached_property
    def unit(self) -> dict[str, Float[Array, "L R _ _"]]:
        """Transition of no tokens, which leaves every state as it is."""
        return identity(self.layout)

    def before_answer(self, pieces: Sequence[ResidentPiece]) -> Composed | None:
        """Returns what an answer is decoded behind: the state of the pieces, and the map of no tokens."""
        # So the map that the backbone leaves behind the answer is the answer's own.
        composed = self.composed(pieces)
        return None if composed is None else {**composed, "map": self.unit["map"][:, None]}

    def phase_free(self, piece: ResidentPiece, size: int, rotate_back: bool = False) -> PhaseFreeKV:
        """Returns the phase-free KV of a piece, padded to `size` tokens, with its transition in a hybrid model.

        Args:
          rotate_back: rotates the pool's keys back, because the source does not have the piece yet.
        """
        parts = {} if piece.transition is None else piece.transition.parts or {}
        rows = programs.read_rows(self.vectors, np.asarray(zero_padded(piece.slots, 0, size)))
        if not rotate_back:
            # Channels that do not rotate are phase-free in the pool; the source replaces the others.
            return PhaseFreeKV({**trimmed(self.layout, {**rows.engine, **rows.source}), **parts})

        local, start = zero_padded(piece.local, 0, size), np.asarray(as_start(self.layout.rope, piece.start))
        engine = {**trimmed(self.layout, rows.engine), **parts}
        return PhaseFreeKV(rotate_kv(self.layout, engine, local, start, back=True))

    def read(self, slots: Int[np.ndarray, " T"]) -> programs.SavedRows:
        """Returns the vectors at slots, padded to their bucket, as they are."""
        return programs.read_rows(self.vectors, self.padded_slots(slots)[0])

    @functools.cached_property
    def _part_names(self) -> tuple[str, ...]:
        return tuple(channel.name for channel in self.layout.parts)

    # ---------------------------------------------------------------------------------------------------- writing

    def put(self, slots: Int[np.ndarray, " T"], rows: programs.SavedRows) -> None:
        """Writes what `read` returned for as many slots. Not counted."""
        # Rows are padded as slots are: both come from the same bucket.
        padded, length = self.padded_slots(slots)
        self.vectors = programs.put_rows(self.vectors, padded, rows, length)

    def copy(self, kind: str, old: Int[np.ndarray, " N"], new: Int[np.ndarray, " N"]) -> None:
        """Copies vectors between slots, reading all before writing any."""
        (read, length), (write, _) = self.padded_slots(old), self.padded_slots(new)
        self.vectors = programs.copy_slots(self.vectors, read, write, length)
        self.meter.moved(kind, self.vectors.engine, len(old), len(read))

    def write(
        self,
        kind: str,
        piece: ResidentPiece,
        kv: Any,
        factors: Factors | None = None,
        first: int = 0,
        below: PieceTransition | None = None,
        **options: Any,
    ) -> None:
        """Writes R(start + local) · (KV + u v) to a piece's slots, and KV + u v to its source and its transition.

        Args:
          kv: phase-free, {channel: [L,T',K,H]} or [L,1,T',K,H], padded; the parts of a transition as they are.
          first: the lowest layer that is written. below: the transition that lower layers keep.
          options: layers of the factors.
        """
        parts, factors = {name: kv[name] for name in self._part_names}, factors or {}
        if piece.transition is not None:
            own = {name: factor for name, factor in factors.items() if name in parts}
            made = programs.make_transition(self.layout, parts, own, **options)
            lower = None if below is None else below.parts
            piece.transition.parts = made if lower is None else programs.replace_upper_layers(lower, made)

        # Slots of padding are 0, and never written: the launch knows how many tokens count.
        kv = {name: value for name, value in kv.items() if name not in parts}
        factors = {name: factor for name, factor in factors.items() if name not in parts}
        layout, size = self.layout, next(iter(kv.values())).shape[-3]
        slots, local = zero_padded(piece.slots, 0, size), zero_padded(piece.local, 0, size)
        start = np.asarray(as_start(layout.rope, piece.start))
        destination = programs.Destination(slots, local, start, np.int32(piece.length))

        if first:
            self.vectors = programs.write_layers(layout, self.vectors, destination, kv, first=first)
        else:
            self.vectors = programs.write_piece(layout, self.vectors, destination, kv, factors, **options)

        # Forwards were counted together with what they write.
        if kind not in ("Prefill", "Recompute"):
            self.meter.placed(kind, self.vectors.engine, piece.length, size, piece.transition is not None)
        if self.vectors.source:
            self.meter.moved("source", self.vectors.source, piece.length, size, times=1)

    def adopt(self, answer: DecodedAnswer) -> None:
        """Makes a piece of a decoded answer: writes the phase-free source of its keys, and its transition."""
        piece = answer.piece
        if piece.transition is not None:
            before, after = answer.before or {}, answer.after or {}
            piece.transition.parts = programs.answer_transition(before, after, np.int32(piece.length))

        # The backbone wrote the keys rotated, so that rotating them back rounds once more.
        size = bucket(self.buckets, piece.length)
        if self.vectors.source:
            kv = self.phase_free(piece, size, rotate_back=True)
            self.put(piece.slots, programs.SavedRows({}, {name: kv[name] for name in self.vectors.source}))
        self.meter.moved("adopted", self.vectors.source, piece.length, size, times=1)

    def rotation_of(self, moves: Sequence[KeyRotation]) -> programs.SlotRotation:
        """Returns the arrays of one launch that rotates all these pieces."""
        read, write = all_slots(move.old for move in moves), all_slots(move.new for move in moves)
        local = np.concatenate([move.new.local for move in moves])

        # One start per token, and per axis where positions have axes.
        lengths = [move.new.length for move in moves]
        starts = np.repeat(np.array([move.new.start for move in moves], np.int32), lengths)
        if local.ndim > 1:
            starts = np.broadcast_to(starts[:, None], local.shape)

        # Programs are compiled per bucket, so lengths are rounded up before the launch.
        size = bucket(self.buckets, len(read))
        arrays = [np.asarray(zero_padded(array, 0, size)) for array in (read, write, local, starts)]
        return programs.SlotRotation(*arrays, length=np.int32(len(read)))

    def rotate(self, rotation: programs.SlotRotation, *, whole: bool = False, counted: bool = True) -> None:
        """Rotates keys in one launch; `whole` copies the other channels to the new slots too."""
        self.vectors = programs.rotate_slots(self.layout, self.vectors, rotation, whole=whole)

        # Undos, and what is part of another edit, are not counted.
        length, size = int(rotation.length), len(rotation.read)
        if counted:
            self.meter.rotated("Rotate", self.vectors.engine, length, size)
        if whole:
            self.meter.moved("copy on write", self.vectors.engine, length, size)


def key_count(context: Paged | None) -> int:
    """Returns how many keys a backbone reads of a context, those that do not count included."""
    return 0 if context is None else context.key_count
