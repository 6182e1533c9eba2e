"""`HostExecutor`: the edits of windows on plain arrays, piece by piece: the reference, and what evaluations use."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from ..backbone import Backbone, joined
from ..cache import Chunk, Patch, brief
from ..core import AnyArray, EngineKV, KVLayout, PhaseFreeKV, as_start, check_positions, ops, rotate_kv
from ..errors import WindowError
from ..patching import Placed, arrays_of
from .edit_dispatch import PatchOperand, plan
from .edits import Edit
from .executor import Executor, Lead
from .ledger import Ledger
from .sources import PatchStore, trimmed_patch
from .window import Window


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """One piece of one branch.

    Attributes:
      kv: phase-free, {channel: [L,B,T,K,H]} or [L,T,K,H]. patch: what is added to it before it turns.
      aside: what it was before it was served bare.
    """

    id: str
    kv: Mapping[str, Float[AnyArray, "L *B T _ _"]]
    local: Float[np.ndarray, "*positions"]
    start: int
    patch: Patch | None = None
    aside: "HostPiece | None" = None

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.local)

    def engine(self, layout: KVLayout) -> EngineKV:
        """R(start + local) · (KV + u v), rounded once."""
        start = np.asarray(as_start(layout.rope, self.start))
        if self.patch is None or not self.patch.factors:
            return EngineKV(rotate_kv(layout, self.kv, self.local, start))
        metadata = self.patch.metadata
        layers = None if len(metadata.layers) == layout.layers else metadata.layers
        kv, factors = arrays_of(self.kv), dict(self.patch.factors)
        return EngineKV(ops.jitted_apply(layout, kv, factors, self.local, start, layers=layers, heads=metadata.heads))

    def phase_free(self, layout: KVLayout) -> PhaseFreeKV:
        """KV + u v."""
        if self.patch is None:
            return PhaseFreeKV(self.kv)
        metadata = self.patch.metadata
        added = ops.correction(layout, dict(self.patch.factors), layers=metadata.layers, heads=metadata.heads)
        sums = {name: value + added[name] if name in added else value for name, value in self.kv.items()}
        return PhaseFreeKV({name: value.astype(self.kv[name].dtype) for name, value in sums.items()})


class HostExecutor(Executor):
    """Executes the edits of windows on arrays of their own for every piece.

    Tokens, chunks and patches may be batches that share their positions: every row is a window of the same shape.
    Nothing is padded, shared or overwritten; `context` joins the pieces in the engine frame. Arrays are immutable, so a
    run that fails changes nothing.
    """

    def __init__(self, backbone: Backbone, *, store: PatchStore | None = None, lead: Lead = None):
        """No pieces yet.

        Args:
          store: where canonicals and patches are fetched from.
          lead: what its canonicals were prefilled behind, as `make_chunk` takes it: others are refused.
        """
        super().__init__(backbone, store, padded=False, lead=lead)
        self._branches: dict[str, dict[str, HostPiece]] = {}
        self._joined: set[str] = set()

    def pieces(self, branch: str) -> Sequence[HostPiece]:
        """The pieces of a branch, in order."""
        return sorted(self._branches.get(branch, {}).values(), key=lambda piece: piece.start)

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window. Raises as `PagedExecutor.run`, but for a pool's room."""
        self.check_backbone(window)
        before = self.ledger
        run = HostRun(self, window)
        plan(self, run, window, edits)
        self._branches, self._joined = run.branches, run.joined
        self.settle(window)
        return self.ledger - before

    def context(self, window: Window) -> EngineKV | None:
        """The window's KV in the engine frame, {channel: [L,B,S,K,H]}; None of an empty window.

        Raises:
          WindowError: a window whose edits were not run, or others since.
        """
        self.check_current(window)
        return self.context_of(self.pieces(window.branch))

    def context_of(self, pieces: Sequence[HostPiece]) -> EngineKV | None:
        """The KV of some pieces, one behind the other."""
        return joined(*(piece.engine(self.layout) for piece in pieces)) if pieces else None

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """A piece's phase-free KV, {channel: [L,B,T,K,H]}, with its patch.

        Raises:
          WindowError: a piece that is not there.
        """
        found = self._branches.get(window.branch, {}).get(id)
        if found is None:
            raise WindowError(f"branch {window.branch!r} holds no piece {brief(id)!r}; expected one that is there")
        return found.phase_free(self.layout)


class HostRun:
    """Edits of one branch, executed as they are planned, on a copy of what the branches hold."""

    def __init__(self, executor: HostExecutor, window: Window):
        """What there is before the edits."""
        self.executor, self.window, self.branch = executor, window, window.branch
        self.branches = {name: dict(pieces) for name, pieces in executor._branches.items()}
        self.joined = set(executor._joined)

    @property
    def _own(self) -> dict[str, HostPiece]:
        return self.branches.setdefault(self.branch, {})

    def _held(self, id: str) -> HostPiece:
        if id not in self._own:
            raise WindowError(
                f"branch {self.branch!r} holds no piece {brief(id)!r}; expected one of {sorted(self._own)}"
            )
        return self._own[id]

    def standing(self) -> list[HostPiece]:
        """The branch's pieces, in order."""
        return sorted(self._own.values(), key=lambda piece: piece.start)

    def drop(self, id: str) -> None:
        """Takes a piece out."""
        del self._own[self._held(id).id]

    def share(self, branch: str, id: str) -> None:
        """Takes over a piece that another branch holds."""
        found = self.branches.get(branch, {}).get(id)
        if found is None or id in self._own:
            raise WindowError(
                f"branch {branch!r} shares no piece {brief(id)!r} with {self.branch!r}; expected it there"
            )
        self._own[id] = found

    def leave(self, branch: str) -> None:
        """Lets go of a branch that was joined, once."""
        if branch not in self.joined:
            self.branches.pop(branch, None)
            self.joined.add(branch)

    def prefill(self, id: str, start: int, content: str | None) -> None:
        """Runs a piece behind those in front of its start."""
        if id in self._own:
            raise WindowError(f"prefill: branch {self.branch!r} holds piece {brief(id)!r}; expected one without it")
        _, local = self.executor.sources.forward(id, "prefill")
        self._forward("Prefill", HostPiece(id, {}, local, start), 0)

    def recompute(self, id: str, start_layer: int) -> None:
        """Runs a piece again where it stands, from a layer up."""
        self._forward("Recompute", self._held(id), start_layer)

    def rotate(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Turns pieces, each from a start to another: always from the phase-free KV."""
        for id, old, new in moves:
            held = self._held(id)
            if held.start != old:
                raise WindowError(f"rotate: piece {brief(id)!r} from start {old}; expected {held.start}, where it is")
            check_positions(self.executor.layout.rope, held.local, np.asarray(new, np.int32))
            self._own[id] = dataclasses.replace(held, start=new)
            self.executor.meter.turned("Rotate", held.kv, held.length, held.length)

    def splice(
        self, kind: str, id: str, start: int, chunk: Chunk, added: PatchOperand | None = None, keep_aside: bool = False
    ) -> None:
        """Places a canonical, with a patch or without; a removal patch on the conditioned KV that is there."""
        patch, there = None if added is None else added.patch, self._own.get(id)
        removal = patch is not None and patch.metadata.base == "conditioned"
        if removal:
            there = self._held(id)
            there = there.aside or there
            if there.patch is not None:  # kept aside as it was served
                self._own[id] = dataclasses.replace(there, start=start)
                return
        base = None
        if removal and there is not None:
            single = chunk.batch is None
            base = {name: value[:, 0] if single and value.ndim == 5 else value for name, value in there.kv.items()}
        before = (patch.metadata.base_behind or ()) if patch is not None and removal else ()
        placed = Placed(chunk, patch, start, base=base, base_antecedent=before, allow_stale=True)
        if there is not None and there.length != chunk.length:
            raise WindowError(f"{kind}: chunk {brief(id)!r} of {chunk.length} tokens; expected {there.length}")
        local = np.asarray(chunk.local, np.float32)[: chunk.length]
        kv = {name: value[..., : chunk.length, :, :] for name, value in placed.kv.items()}
        patch = None if patch is None else trimmed_patch(patch, chunk.length)
        own = HostPiece(id, kv, local, start, patch, there if keep_aside else None)
        self._own[id] = own
        self.executor.meter.placed(kind, kv, own.length, own.length)
        if added is not None:
            self.executor.meter.patched(kind, added.patch, added.nbytes, own.length, own.length)

    def put_back(self, id: str, start: int) -> None:
        """Places what was kept aside of a piece."""
        aside = self._held(id).aside
        if aside is None:
            raise WindowError(f"condition: nothing of piece {brief(id)!r} was kept; expected it bare before")
        self._own[id] = dataclasses.replace(aside, start=start)
        self.executor.meter.placed("Copy", aside.kv, aside.length, aside.length)

    def compact(self) -> None:
        """Does nothing: there are no slots."""

    def _forward(self, kind: str, piece: HostPiece, start_layer: int) -> None:
        executor, id = self.executor, piece.id
        tokens, _ = executor.sources.forward(id, kind.lower(), start_layer)
        check_positions(executor.layout.rope, piece.local, np.asarray(piece.start, np.int32))
        front = [held for held in self.standing() if held.start < piece.start]
        context = executor.context_of(front)
        out = executor.backbone.prefill(tokens.shift(piece.start), context, start_layer=start_layer)
        executor.check_finite(kind, id, out.logits)

        kv = dict(out.kv)
        if start_layer:
            below = piece.phase_free(executor.layout)
            kv = {name: np.concatenate([_batched(below[name])[:start_layer], new]) for name, new in out.kv.items()}
        self._own[id] = HostPiece(id, PhaseFreeKV(kv), piece.local, piece.start)
        behind = sum(held.length for held in front)
        executor.meter.ran(kind, kv, (piece.length, piece.length), (behind, behind), start_layer)
        executor.tell(self.window, id, tokens, piece.length, out.kv)


def _batched(value: AnyArray) -> np.ndarray:
    host = np.asarray(value)
    return host[:, None] if host.ndim == 4 else host
