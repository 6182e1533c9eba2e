"""`HostExecutor`: the edits of windows on plain arrays, piece by piece; the reference for `PagedExecutor`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvpatch_jax.backbone import Backbone, Output, Tokens, joined
from kvpatch_jax.cache import Patch, brief
from kvpatch_jax.core import (
    AnyArray,
    EngineKV,
    KVLayout,
    PhaseFreeKV,
    arrays_of,
    as_start,
    check_positions,
    ops,
    rotate_kv,
)
from kvpatch_jax.errors import NotFiniteError, WindowError
from kvpatch_jax.patching import Placed
from kvpatch_jax.window import (
    ApplyPatch,
    Compact,
    Compose,
    Copy,
    CostMeter,
    Drop,
    Edit,
    Fetch,
    Ledger,
    PieceSources,
    PlacedPiece,
    Prefill,
    PrefillObserver,
    Recompute,
    ResolvedEdit,
    Rotate,
    Window,
    check_pieces,
    resolve_edits,
    trimmed_patch,
)


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """One piece of one branch.

    Attributes:
      kv: phase-free, {channel: [L,B,T,K,H]} or [L,T,K,H]. patch: added to it before it rotates.
    """

    id: str
    kv: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    local: Float[np.ndarray, "*positions"]
    start: int
    patch: Patch | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.local)

    def engine(self, layout: KVLayout) -> EngineKV:
        """Returns R(start + local) · (KV + u v), rounded once."""
        start = np.asarray(as_start(layout.rope, self.start))
        if self.patch is None or not self.patch.factors:
            return EngineKV(rotate_kv(layout, self.kv, self.local, start))
        metadata = self.patch.metadata
        layers = None if len(metadata.layers) == layout.layers else metadata.layers
        kv, factors = arrays_of(self.kv), dict(self.patch.factors)
        return EngineKV(ops.jitted_apply(layout, kv, factors, self.local, start, layers=layers))

    def phase_free(self, layout: KVLayout) -> PhaseFreeKV:
        """Returns KV + u v."""
        if self.patch is None:
            return PhaseFreeKV(self.kv)
        metadata = self.patch.metadata
        added = ops.correction(layout, dict(self.patch.factors), layers=metadata.layers)
        sums = {name: value + added[name] if name in added else value for name, value in self.kv.items()}
        return PhaseFreeKV({name: value.astype(self.kv[name].dtype) for name, value in sums.items()})


class HostExecutor:
    """Executor of the edits of windows on separate arrays for every piece.

    Tokens, chunks and patches may be batches that share their positions: every row is a window of the same shape.
    Nothing is padded, shared or overwritten, and there are no slots. Arrays are immutable and a run works on a copy of
    the branches, so one that fails changes nothing.

    Attributes are those of `PagedExecutor`.
    """

    def __init__(self, backbone: Backbone):
        """Starts without pieces."""
        self.backbone, self.layout = backbone, backbone.layout
        self.lead: str | None = None
        self.sources = PieceSources(backbone, buckets=None, single=False)
        self.provide, self.forget = self.sources.give, self.sources.forget
        self.meter = CostMeter(backbone)
        self.formers: list[PrefillObserver] = []
        self._branches: dict[str, dict[str, HostPiece]] = {}
        self._current: dict[str, tuple[PlacedPiece, ...]] = {}

    @property
    def ledger(self) -> Ledger:
        """Everything executed so far."""
        return self.meter.ledger

    def pieces(self, branch: str) -> list[HostPiece]:
        """Returns the pieces of a branch, in order."""
        return _ordered(self._branches.get(branch, {}))

    def release(self, branch: str) -> None:
        """Ends a branch; another may begin under its name."""
        self._branches.pop(branch, None)
        self._current.pop(branch, None)

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window. Raises as `PagedExecutor.run`, but for a pool's room."""
        self._check_backbone(window)
        before = self.ledger
        run = _HostRun(self, window, {name: dict(pieces) for name, pieces in self._branches.items()})
        for edit in resolve_edits(window, edits):
            run.execute(edit)
        check_pieces(_ordered(run.own), window)
        self._branches = run.branches
        self._current[window.branch] = window.pieces
        return self.ledger - before

    def ask(self, window: Window, edits: Sequence[Edit], tokens: Tokens) -> Float[Array, "B 1 V"]:
        """Executes the edits that led to a window, and returns the logits of a question behind it."""
        self.run(window, edits)
        return self.prefill(window, tokens).logits

    def prefill(self, window: Window, tokens: Tokens) -> Output:
        """Runs tokens, at positions from 0, behind a window and keeps nothing."""
        context, count = self.context(window), tokens.embeddings.shape[1]
        keys = 0 if context is None else next(iter(context.values())).shape[2]
        self.meter.asked(context or {}, (count, count), (keys, keys), 1)
        return self.backbone.prefill(tokens.shift(window.next_start), context)

    def context(self, window: Window) -> EngineKV | None:
        """Returns the window's KV in the engine frame, {channel: [L,B,S,K,H]}; None of an empty window.

        Raises:
          WindowError: a window whose edits were not run, or others since.
        """
        self._check_backbone(window)
        if window.pieces != self._current.get(window.branch, ()):
            raise WindowError(f"executor: branch {window.branch!r}; expected the window whose edits it ran last")
        return _context(self.layout, self.pieces(window.branch))

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """Returns a piece's phase-free KV, {channel: [L,B,T,K,H]}, with its patch."""
        return self._branches[window.branch][id].phase_free(self.layout)

    def _check_backbone(self, window: Window) -> None:
        own = self.backbone.fingerprint
        if window.backbone != own:
            raise WindowError(f"executor: a window of backbone {window.backbone[:16]!r}; expected {own[:16]!r}")


class _HostRun:
    """Edits of one branch, executed on a copy of what the branches hold."""

    def __init__(self, executor: HostExecutor, window: Window, branches: dict[str, dict[str, HostPiece]]):
        self.executor, self.window, self.branches = executor, window, branches
        self.own = branches.setdefault(window.branch, {})

    def execute(self, resolved: ResolvedEdit) -> None:
        """Executes one edit."""
        edit, sources, meter = resolved.edit, self.executor.sources, self.executor.meter
        match edit:
            case Drop():
                del self.own[self._held(edit.id).id]
            case Fetch():
                sources.fetch(edit, self.window, None)
            case Rotate():
                # Always from the phase-free KV, so there is nothing to compute.
                piece = self._held(edit.id)
                if piece.start != edit.old:
                    raise WindowError(f"rotate: piece {edit.id!r} from start {edit.old}; expected {piece.start}")
                check_positions(self.executor.layout.rope, piece.local, np.asarray(edit.new, np.int32))
                self.own[edit.id] = dataclasses.replace(piece, start=edit.new)
                meter.rotated("Rotate", piece.kv, piece.length, piece.length)
            case Copy(source="shared"):
                shared = self.branches.get(edit.branch or "", {}).get(edit.id)
                if shared is None or edit.id in self.own:
                    raise WindowError(f"branch {edit.branch!r} shares no piece {edit.id!r}; expected it there")
                self.own[edit.id] = shared
            case Copy() | ApplyPatch():
                self._place(edit, resolved)
            case Prefill():
                if edit.id in self.own:
                    raise WindowError(f"prefill: branch {self.window.branch!r} holds piece {edit.id!r} already")
                _, local = sources.forward(edit.id, "prefill")
                self._forward("Prefill", HostPiece(edit.id, {}, local, resolved.start), 0)
            case Recompute():
                self._forward("Recompute", self._held(edit.id), edit.start_layer)
            case Compact() | Compose():
                pass  # there are no slots, and contexts are composed when they are read
            case _:
                raise WindowError(f"executor: an edit of type {type(edit).__name__}")

    def _held(self, id: str) -> HostPiece:
        if id not in self.own:
            raise WindowError(f"branch {self.window.branch!r} holds no piece {brief(id)!r}")
        return self.own[id]

    def _place(self, edit: Copy | ApplyPatch, resolved: ResolvedEdit) -> None:
        """Places a canonical, with a patch or without; a removal patch on the conditioned KV that is there."""
        kind, id, sources = type(edit).__name__, edit.id, self.executor.sources
        chunk = sources.chunk(id, resolved.content)
        patch, patch_bytes = sources.patch(id, edit.patch) if isinstance(edit, ApplyPatch) else (None, 0)
        start = resolved.start
        there, base, base_antecedent = self.own.get(id), None, ()

        if patch is not None and patch.metadata.base == "conditioned":
            there = self._held(id)
            rows = there.kv.items()
            base = {name: value[:, 0] if chunk.batch is None and value.ndim == 5 else value for name, value in rows}
            base_antecedent = patch.metadata.base_behind or ()

        placed = Placed(chunk, patch, start, base=base, base_antecedent=base_antecedent, allow_stale=True)
        if there is not None and there.length != chunk.length:
            raise WindowError(f"{kind}: chunk {brief(id)!r} of {chunk.length} tokens; expected {there.length}")

        local = np.asarray(chunk.local, np.float32)[: chunk.length]
        kv = arrays_of(placed.kv)
        for channel in chunk.layout.token_channels:
            kv[channel.name] = kv[channel.name][..., : chunk.length, :, :]
        trimmed = None if patch is None else trimmed_patch(patch, chunk.length)
        piece = HostPiece(id, kv, local, start, trimmed)
        self.own[id] = piece
        self.executor.meter.placed(kind, kv, piece.length, piece.length, bool(chunk.layout.parts))
        if patch is not None:
            self.executor.meter.patched(kind, patch, patch_bytes, piece.length, piece.length)

    def _forward(self, kind: str, piece: HostPiece, start_layer: int) -> None:
        """Runs a piece behind those in front of its start, from a layer up."""
        executor, id = self.executor, piece.id
        tokens, _ = executor.sources.forward(id, kind.lower(), start_layer)
        check_positions(executor.layout.rope, piece.local, np.asarray(piece.start, np.int32))
        front = [held for held in _ordered(self.own) if held.start < piece.start]
        context = _context(executor.layout, front)
        out = executor.backbone.prefill(tokens.shift(piece.start), context, start_layer=start_layer)
        if not np.isfinite(np.asarray(out.logits)).all():
            raise NotFiniteError(f"{kind} of piece {brief(id)!r}: logits hold NaN or infinity; expected finite ones")

        kv: dict[str, Any] = dict(out.kv)
        if start_layer:
            below = {name: np.asarray(value) for name, value in piece.phase_free(executor.layout).items()}
            for name, new in out.kv.items():
                rows = below[name] if below[name].ndim == 5 else below[name][:, None]
                kv[name] = np.concatenate([rows[: len(rows) - len(new)], new])

        self.own[id] = HostPiece(id, PhaseFreeKV(kv), piece.local, piece.start)
        keys = sum(held.length for held in front)
        executor.meter.ran(kind, kv, (piece.length, piece.length), (keys, keys), start_layer)
        for former in executor.formers:
            former(self.window, id, tokens, piece.length, out.kv)


def _ordered(pieces: Mapping[str, HostPiece]) -> list[HostPiece]:
    return sorted(pieces.values(), key=lambda piece: piece.start)


def _context(layout: KVLayout, pieces: Sequence[HostPiece]) -> EngineKV | None:
    """Returns the KV of pieces, concatenated, and their transitions composed; None without pieces."""
    if not pieces:
        return None
    engine = [piece.engine(layout) for piece in pieces]
    rows = joined(*({channel.name: kv[channel.name] for channel in layout.token_channels} for kv in engine))
    if not layout.parts:
        return rows

    # Token after token of the definition: S → M·S + B of one piece after the other, and the last inputs of all.
    parts: dict[str, np.ndarray] = {}
    for piece, kv in zip(pieces, engine, strict=True):
        own = {channel.name: np.asarray(kv[channel.name], np.float64) for channel in layout.parts}
        own = {name: value[:, None] if value.ndim == 4 else value for name, value in own.items()}
        parts = _behind(parts, own, piece.length) if parts else own
    return EngineKV({**rows, **{name: jnp.asarray(value, jnp.float32) for name, value in parts.items()}})


def _behind(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Composes two transitions [L,B,R,K,W], `second` of `length` tokens behind the first."""
    map_ = second["map"]

    def through(values: np.ndarray) -> np.ndarray:
        if map_.shape[-1] == 1:
            return map_ * values
        return np.einsum("lbrkj,lbjkv->lbrkv", map_, values)

    composed = {"map": through(first["map"]), "state": through(first["state"]) + second["state"]}
    if "tail" in second:
        rows = second["tail"].shape[2]
        inputs = np.concatenate([first["tail"], second["tail"][:, :, max(rows - length, 0) :]], axis=2)
        composed["tail"] = inputs[:, :, -rows:]
    return composed
