"""Execution of a plan: its launches one after the other, all of them or none.

Each launch leaves an undo. If a later one fails, the undos run in reverse, and pool and slot table are as they were.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Backbone, Tokens
from ..cache import brief
from ..errors import NotFiniteError
from .edit_plan import (
    AdoptLaunch,
    CopyLaunch,
    EditPlan,
    ForwardLaunch,
    Launch,
    PlaceLaunch,
    RotateLaunch,
)
from .paged_pool import KeyRotation, PagedPool, key_count
from .window import Window

Undo = Callable[[], None]

PrefillObserver = Callable[[Window, str, Tokens, int, Mapping[str, Array]], None]
"""Called after each prefill: the window after it, the piece's id, its tokens at local positions, how many of them
count, and its phase-free KV behind those in front, {channel: [L,B,T',K,H]}."""


@dataclasses.dataclass
class FusedQuestion:
    """A question asked behind a window in one forward with the window's last piece.

    Attributes:
      tokens: at their positions behind the window, padded.
      length: how many count.
      logits: of the last that counts, [1,1,V]; None until a forward of the run has answered it.
    """

    tokens: Tokens
    length: int
    logits: Float[Array, "1 1 V"] | None = None


@dataclasses.dataclass(eq=False)
class EditRun:
    """One execution of a plan on a pool.

    Attributes:
      alive: which slots have owners before the run, bool [S].
      question: answered by the forward of the last launch, if that prefills the window's last piece.
      formers: called after each prefill.
    """

    plan: EditPlan
    pool: PagedPool
    backbone: Backbone
    alive: np.ndarray
    question: FusedQuestion | None
    formers: Sequence[PrefillObserver]
    _forwards_left: int = 0

    def execute(self) -> None:
        """Executes all launches. If one fails those before it are undone, and its error is raised.

        Raises:
          PoolLostError: a launch failed after the pool was donated to it.
        """
        self._forwards_left = [type(launch) for launch in self.plan.launches].count(ForwardLaunch)

        # Undos run last to first: slots may be written twice in a run.
        undos: list[Undo] = []
        try:
            for launch in self.plan.launches:
                self._forwards_left -= isinstance(launch, ForwardLaunch)
                undo = self._launch(launch)
                if undo is not None:
                    undos.append(undo)
        except BaseException as error:
            # With the vectors lost there is nothing left to undo.
            self.pool.check(error)
            for undo in reversed(undos):
                undo()
            raise

    def _launch(self, launch: Launch) -> Undo | None:
        """Executes a launch. Returns its undo, None if it changes nothing that was in use before the run."""
        pool, meter = self.pool, self.pool.meter
        match launch:
            case ForwardLaunch(piece=piece, start_layer=first):
                # The forward may fail, so it runs before anything is written.
                kv = self._forward(launch)
                undo = self._saved(piece.slots)
                pool.write(launch.kind, piece, kv, first=first, below=launch.below)

                # KV of some layers alone is no prefill to form a patch of; that of a question behind is no one's.
                if self.formers and not first:
                    size = launch.tokens.embeddings.shape[1]
                    # A transition is of the piece alone, for then no question runs with it.
                    if not pool.layout.parts:
                        kv = {name: value[:, :, :size] for name, value in kv.items()}
                    for former in self.formers:
                        former(self.plan.window, piece.id, launch.tokens, piece.length, kv)
                return undo

            case PlaceLaunch(kind=kind, piece=piece, placed=placed):
                size = placed.chunk.tokens
                kv = placed.kv if launch.base is None else pool.phase_free(launch.base, size)
                undo = self._saved(piece.slots)

                # The pool keeps sources phase-free, and patches of windows are: no frame to convert.
                options = {word: value for word, value in placed.options.items() if word != "frame"}
                pool.write(kind, piece, kv, placed.factors, **options)
                if placed.patch is not None:
                    meter.patched(kind, placed.patch, launch.patch_bytes, piece.length, size)
                return undo

            case RotateLaunch(moves=moves, whole=whole):
                # Rotations into new slots leave the old ones as they are.
                rotation = pool.rotation_of(moves)
                undo = self._rotation_undo(moves) if not whole and self._forwards_left else None
                pool.rotate(rotation, whole=whole)
                return undo

            case CopyLaunch(kind=kind, old=old, new=new):
                pool.copy(kind, old, new)
                # Copies on write go to slots that were free, a compaction over slots in use.
                return (lambda: pool.copy("undo", new, old)) if kind == "Compact" else None

            case AdoptLaunch(answer=answer):
                pool.adopt(answer)
                return None

    def _forward(self, launch: ForwardLaunch) -> dict[str, Float[Array, "L 1 T _ _"]]:
        """Runs a piece behind those in front, with the question behind it if that can be answered now.

        In a hybrid model the question has a forward of its own: that of both returns the transition of both.

        Returns:
          Phase-free KV of the layers from `start_layer` up; of the piece, then of question and padding.

        Raises:
          NotFiniteError: NaN or infinity. What the backbone raises.
        """
        kind, piece, first = launch.kind, launch.piece, launch.start_layer
        tokens, context = launch.tokens.shift(piece.start), self.pool.context_of(launch.front)
        keys = sum(each.length for each in launch.front), key_count(context)
        backbone, count, options = self.backbone, piece.length, dict[str, Any](start_layer=first)
        prefill, transitions = backbone.prefill, bool(self.pool.layout.parts)
        if transitions:
            # Attention does not see padding behind the tokens; a state would go through it.
            options["lengths"] = np.array([count], np.int32)

        # With the window's last piece in the last launch, everything that the question sees is in place.
        last = self.plan.launches[-1] is launch and self.plan.window.pieces[-1].entry.id == piece.id
        question = self.question if last and kind == "Prefill" and not transitions else None
        if question is not None:
            # Padding of both follows the question, so no position that counts sees it.
            tokens = packed(tokens, count, question.tokens, question.length)
            prefill, count, options = getattr(backbone, "prefill_padded", prefill), count + question.length, {}
            kind = "Prefill, with a question behind it,"

        out = prefill(tokens, context, logits=np.array([[count - 1]], np.int32), **options)
        if not np.isfinite(np.asarray(out.logits)).all():
            raise NotFiniteError(f"{kind} of piece {brief(piece.id)!r}: got NaN or infinity; expected finite logits")

        engine, size = self.pool.vectors.engine, tokens.embeddings.shape[1]
        if question is None:
            self.pool.meter.ran(kind, engine, (count, size), keys, first)
        else:
            self.pool.meter.ran_fused(engine, (piece.length, question.length, size), keys)
            question.logits = out.logits
        return dict(out.kv)

    def _saved(self, slots: Int[np.ndarray, " T"]) -> Undo | None:
        """Saves the vectors at slots that were in use before the run, if a forward, which may fail, is still to come.

        Other launches fail only with the pool in their hands, and then there is nothing left to restore.
        """
        if not self._forwards_left or not self.alive[slots].any():
            return None
        rows = self.pool.read(slots)
        return lambda: self.pool.put(slots, rows)

    def _rotation_undo(self, moves: Sequence[KeyRotation]) -> Undo:
        """Returns the undo of a rotation in place."""
        # The rotation has no influence on the source, from which the old keys come back bit for bit.
        back = self.pool.rotation_of([KeyRotation(move.new, move.old) for move in moves])
        return lambda: self.pool.rotate(back, counted=False)


def packed(first: Tokens, length: int, second: Tokens, count: int) -> Tokens:
    """Packs the first `length` tokens of one input, and right behind them `count` of another.

    Without a gap causal order alone says who sees whom. The result has as many rows as both inputs, padding included.
    """
    size = first.embeddings.shape[1] + second.embeddings.shape[1]
    own, other = np.asarray(first.positions), np.asarray(second.positions)
    positions = np.zeros((1, size, *own.shape[2:]), np.result_type(own, other))
    positions[:, :length] = own[:, :length]
    positions[:, length : length + count] = other[:, :count]
    ahead = None
    if first.ahead is not None or second.ahead is not None:
        ahead = np.zeros((1, size), np.int32)
        for tokens, (at, kept) in ((first, (0, length)), (second, (length, count))):
            ahead[:, at : at + kept] = 0 if tokens.ahead is None else np.asarray(tokens.ahead)[:, :kept]
    begin = np.int32(length)
    embeddings = _packed_rows(first.embeddings, second.embeddings, begin)

    # An input without features for deeper layers has zeros beside one that has some.
    deepstack = [first.deepstack, second.deepstack]
    given = next((value for value in deepstack if value is not None), None)
    if given is None:
        return Tokens(embeddings, positions, None, ahead)

    for place, tokens in enumerate((first, second)):
        if deepstack[place] is None:
            deepstack[place] = jnp.zeros((*tokens.embeddings.shape[:2], *given.shape[2:]), given.dtype)
    return Tokens(embeddings, positions, _packed_rows(deepstack[0], deepstack[1], begin), ahead)


@jax.jit
def _packed_rows(first: Float[Array, "..."], second: Float[Array, "..."], length: Int[Array, ""]) -> Array:
    """Writes the second array over the first along axis 1 from `length` on, in room for both."""
    room = [(0, second.shape[1] if axis == 1 else 0) for axis in range(first.ndim)]
    return jax.lax.dynamic_update_slice_in_dim(jnp.pad(first, room), second.astype(first.dtype), length, axis=1)
