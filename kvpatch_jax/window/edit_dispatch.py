"""From the edits of a window to what a run plans, one kind after the other."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..cache import Chunk, Patch, brief
from ..errors import InputError, WindowError
from .edits import ApplyPatch, Compact, Copy, Drop, Edit, Fetch, Prefill, Recompute, Rotate
from .executor import Executor, ExecutorPiece
from .sources import asked_behind, stored
from .window import Window


class PatchOperand(NamedTuple):
    """A patch that a base gets: as it is run, its bytes as it was given, and its digest."""

    patch: Patch
    nbytes: int
    digest: str


@runtime_checkable
class EditHandler(Protocol):
    """What edits of one branch are turned into, kind by kind."""

    def drop(self, id: str) -> None:
        """Takes a piece out."""
        ...

    def share(self, branch: str, id: str) -> None:
        """Takes over a piece that another branch holds."""
        ...

    def leave(self, branch: str) -> None:
        """Lets go of all that a branch holds, once: it was joined."""
        ...

    def prefill(self, id: str, start: int, content: str | None) -> None:
        """Runs a piece behind those in front of its start."""
        ...

    def recompute(self, id: str, start_layer: int) -> None:
        """Runs a piece again where it stands."""
        ...

    def rotate(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Turns pieces: id, old start, new start."""
        ...

    def splice(
        self, kind: str, id: str, start: int, chunk: Chunk, added: PatchOperand | None, keep_aside: bool
    ) -> None:
        """Places a canonical, with a patch or without."""
        ...

    def put_back(self, id: str, start: int) -> None:
        """Places what was kept aside of a piece."""
        ...

    def compact(self) -> None:
        """Packs slots."""
        ...

    def standing(self) -> Sequence[ExecutorPiece]:
        """The branch's pieces, as they will be."""
        ...


def plan(executor: Executor, run: EditHandler, window: Window, edits: Sequence[Edit]) -> None:
    """Plans edits that led to a window, in their order.

    Raises:
      As `PagedExecutor.run`.
    """
    place = 0
    while place < len(edits):
        edit, after = edits[place], place + 1
        if isinstance(edit, Rotate):
            turns = {edit.id: edit}
            while after < len(edits) and isinstance(one := edits[after], Rotate) and one.id not in turns:
                turns[one.id] = one
                after += 1
            run.rotate([(one.id, one.old, one.new) for one in turns.values()])
        else:
            _plan_one(executor, run, window, edit, edits[after:])
        place = after
    for branch in window.joined:
        run.leave(branch)
    executor.check_holds(run.standing(), window)


def _plan_one(executor: Executor, run: EditHandler, window: Window, edit: Edit, later: Sequence[Edit]) -> None:
    match edit:
        case Drop():
            run.drop(edit.id)
        case Fetch():
            _fetch(executor, window, edit)
        case Copy(source="shared"):
            run.share(edit.branch or "", edit.id)
        case Copy(source="conditioned"):
            run.put_back(edit.id, _start(window, edit.id, later))
        case Copy():
            chunk = executor.sources.chunk(edit.id, _content(window, edit.id))
            aside = _returns(window, edit.id, later)
            run.splice("Copy", edit.id, _start(window, edit.id, later), chunk, None, aside)
        case ApplyPatch():
            chunk = executor.sources.chunk(edit.id, _content(window, edit.id))
            added = PatchOperand(*executor.sources.patch(edit.id, edit.patch), edit.patch)
            run.splice("ApplyPatch", edit.id, _start(window, edit.id, later), chunk, added, False)
        case Prefill():
            content, given = _content(window, edit.id), executor.sources[edit.id].content
            if None not in (content, given) and content != given:
                raise InputError(f"prefill: tokens of {brief(edit.id)!r} show {given!r}; expected {content!r}")
            run.prefill(edit.id, _start(window, edit.id, later), content)
        case Recompute():
            run.recompute(edit.id, edit.start_layer)
        case Compact():
            run.compact()
        case _:
            raise WindowError(f"executor: an edit of type {type(edit).__name__}; expected those of kvpatch_jax.window")


def _start(window: Window, id: str, later: Sequence[Edit]) -> int:
    """Where a piece stands when an edit reaches it: where the next rotation takes it from, or else where it stays."""
    for edit in later:
        if isinstance(edit, Rotate) and edit.id == id:
            return edit.old
        if isinstance(edit, Drop) and edit.id == id:
            raise WindowError(f"executor: {brief(id)!r} is placed and dropped by the same edits; expected two runs")
    return window.start(id)


def _returns(window: Window, id: str, later: Sequence[Edit]) -> bool:
    """Whether a piece that is served bare now may be asked to stand again as it does."""
    if any(isinstance(edit, Copy) and edit.id == id and edit.source == "conditioned" for edit in later):
        return True
    aside = window.piece(id).aside if id in window else None
    return aside is not None and (aside.kind == "conditioned" or aside.base == "conditioned")


def _content(window: Window, id: str) -> str | None:
    return window.piece(id).entry.content if id in window else None


def _fetch(executor: Executor, window: Window, edit: Fetch) -> None:
    """Brings a canonical or a patch from the store, where it was not given.

    Raises:
      InputError: the store does not have it, or there is none.
    """
    sources, store, content = executor.sources, executor.store, _content(window, edit.id)
    unit = sources[edit.id]
    if edit.what == "canonical":
        if unit.chunk is not None and content in (None, unit.chunk.content):
            return
        found = stored(store, edit.id, executor.backbone.fingerprint, executor.lead)
        if found is None:
            raise InputError(f"fetch: no canonical of {brief(edit.id)!r} was given and no store has it; expected one")
        sources.give(edit.id, chunk=found)
        executor.meter.fetched("Fetch", _kv_bytes(found))
        return
    if edit.digest in unit.patches:
        return
    backbone = executor.backbone.fingerprint
    served = asked_behind(window.target(edit.id), edit.id, content, executor.layout, backbone, executor.lead)
    for asked in (served, dataclasses.replace(served, orbit=True)):
        for patch in [] if store is None else store.get_patches(asked):
            if sources.give(edit.id, patch=patch) == edit.digest:
                executor.meter.fetched("Fetch", patch.nbytes)
                return
    raise InputError(f"fetch: no patch {edit.digest} of {brief(edit.id)!r} was given and no store has it; expected one")


def _kv_bytes(chunk: Chunk) -> int:
    return chunk.nbytes * chunk.length // chunk.tokens
