"""Branches share slots until one changes; a run that fails loses no slot and changes no KV; a lost pool comes back."""
# pyright: reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import BAR, Loop, same

from kvpatch_jax.errors import InputError, NotFiniteError, PatchMismatchError, PoolError, SessionError
from kvpatch_jax.window import BARE, Entry, PatchNote, Service
from tests.shared.window_oracle import Watched, backbone_of, owners


def loop_of(name: str = "gqa", **options) -> Loop:
    loop = Loop(name, **options)
    loop.append("c0", "c1", "c2")
    return loop


def slots_of(loop: Loop, branch: str, id: str) -> set[int]:
    return set(loop.executor.branches[branch][id].slots.tolist())


def test_forks_share_slots_until_one_changes():
    loop = loop_of()
    parent, rows, executor = loop.window, loop.rows(), loop.executor
    free = executor.slots.free
    fork = parent.fork("x")
    assert not executor.run(fork)
    assert executor.slots.free == free
    assert same(loop.rows(fork), rows)
    inner = fork.fork("y")
    assert same(loop.rows(inner), rows), "without a run too"

    # What moves in one of them moves to slots of its own; what stays is shared.
    changed = fork.evict("c1")
    missing, pages = executor.missing_pages(changed), executor.slots.free_pages
    assert [action.kind for action in executor.run(changed)] == ["rotate"]
    assert executor.slots.free_pages == pages - missing == pages - 1
    assert slots_of(loop, "/x", "c0") == slots_of(loop, "", "c0")
    assert not slots_of(loop, "/x", "c2") & slots_of(loop, "", "c2")
    for window in (parent, inner):
        assert same(loop.rows(window), rows)
    alone = loop_of()
    alone.run(alone.window.evict("c1"))
    assert same(loop.rows(changed), alone.rows())

    # The parent's changes are no longer the fork's; a branch that is released takes nothing along.
    loop.run(parent.replace("c1", loop.entry("c4")))
    assert same(loop.rows(inner), rows)
    executor.share(inner, "kept")
    for branch in ("/x", "/x/y", "/x/y", "never"):
        executor.release(branch)
    assert same(loop.rows(parent.renamed("kept")), rows)
    executor.release("kept")
    loop.run(parent)
    assert same(loop.rows(), rows)
    assert (executor.slots.free, set(executor.branches)) == (free, {""})


def test_a_window_that_the_pool_does_not_hold_is_refused():
    loop = loop_of()
    window = loop.window
    left = window.evict("c1")
    with pytest.raises(SessionError, match="got more pieces in branch ''; expected this window to be run first"):
        loop.executor.context(left)
    with pytest.raises(SessionError, match="got other KV of 'c3'"):
        loop.executor.context(left.append(loop.entry("c3")))
    # What was appended behind a front that never was in the pool cannot be made any more.
    skipped = left.append(loop.entry("c3")).recall("c1", before="c2")
    with pytest.raises(SessionError, match="'c3' behind another front; expected every window to be run"):
        loop.executor.run(skipped)
    assert not loop.executor.run(window)


def test_a_pool_grows_and_keeps_what_it_holds():
    loop = loop_of(pages=4)
    rows, window = loop.rows(), loop.window.append(loop.entry("c3")).append(loop.entry("c4"))
    with pytest.raises(PoolError, match="piece 'c4'"):
        loop.run(window)
    loop.executor.enlarge(64)
    assert loop.executor.slots.free_pages == 64 - 3
    assert same(loop.rows(), rows)
    loop.run(window)
    large = Loop()
    large.append("c0", "c1", "c2", "c3", "c4")
    assert same(loop.rows(), large.rows())


@pytest.mark.parametrize(("name", "dtype", "pages"), [("mrope", jnp.bfloat16, 51), ("hybrid", jnp.float32, 64)])
def test_a_snapshot_is_restored_bit_for_bit(name: str, dtype, pages: int):
    """In other slots, of a pool of another size too, whose next rotation gives the same bits too."""
    loop = loop_of(name, dtype=dtype)
    loop.run(loop.window.evict("c1"))
    snapshots, rows, logits = loop.executor.snapshot(loop.window), loop.rows(), loop.logits()
    # A fork shares states of linear layers too.
    counted = loop.executor.state_bytes
    loop.executor.run(fork := loop.window.fork())
    assert loop.executor.state_bytes == counted
    loop.executor.run(fork.evict("c2"))
    assert np.array_equal(loop.logits(), logits)
    loop.executor.release(fork.branch)
    other = Loop(name, pages=pages, dtype=dtype)
    other.append("c3")
    window = loop.window.renamed("restored")
    other.executor.restore(window, snapshots)
    assert same(other.rows(window), rows)
    assert np.array_equal(other.logits(window), logits)
    for place, before in ((loop, loop.window), (other, window)):
        step = place.run(before.append(place.entry("c4")))
        assert "rotate" not in {action.kind for action in step}
        place.run(place.window.reorder(["c4", "c2"]))
    assert same(loop.rows(), other.rows())


@pytest.mark.usefixtures("unchecked")
def test_a_snapshot_of_another_pool_is_refused():
    loop = loop_of()
    window, snapshots = loop.window, loop.executor.snapshot(loop.window)
    first = snapshots[0]
    for executor, wrong, error in (
        (Loop().executor, snapshots[1:], SessionError),
        (Loop().executor, [{**first, "engine.k": first["engine.k"].astype(np.float16)}, *snapshots[1:]], SessionError),
        (loop.executor, snapshots, SessionError),
        (Loop(pages=2).executor, snapshots, PoolError),
    ):
        pools, branches, free = executor.pools, executor.branches, executor.slots.free
        with pytest.raises(error, match="expected"):
            executor.restore(window, wrong)
        assert (executor.pools is pools, executor.branches, executor.slots.free) == (True, branches, free)


class Failing:
    """A loop of four chunks, and a change of its window: one leaves, two rotate, two come in."""

    def __init__(self, shared: bool, pages: int = 64):
        self.watched = Watched(backbone_of("gqa"))
        self.loop = Loop("gqa", pages, self.watched.backbone)
        self.loop.append("c0", "c1", "c2", "c3")
        self.parent = self.loop.window
        if shared:
            self.loop.run(self.parent.fork("x"))
        self.window = self.loop.window
        self.changed = self.window.evict("c1").append(self.loop.entry("c4")).append(self.loop.entry("c5"))

    def state(self) -> dict[str, Any]:
        """All that a failed run must leave: rows and logits of each branch, and who owns which slot."""
        windows = {window.branch: window for window in (self.parent, self.window)}
        rows = {f"{branch} {name}": row for branch in windows for name, row in self.loop.rows(windows[branch]).items()}
        logits = {branch: self.loop.logits(window) for branch, window in windows.items()}
        return rows | logits | {"counts": self.loop.executor.slots.counts, "owners": owners(self.loop.executor)}


ERROR = RuntimeError("no memory left")


CAUSES: list[tuple[Any, type[BaseException], Any]] = [
    (KeyboardInterrupt(), KeyboardInterrupt, 1),
    ("nan", NotFiniteError, 1),
    (ERROR, RuntimeError, 0),
    (ERROR, RuntimeError, "rotate_pieces"),
    (ERROR, RuntimeError, "write_piece"),
]
"""How a run fails, with which error, and where: after so many forwards, or in which launch."""


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize(("failure", "error", "where"), CAUSES)
def test_a_run_that_fails_leaves_everything(failure: Any, error: Any, where: Any, shared: bool, monkeypatch):
    """Pieces may have been rotated by then, in place or (what another branch owns) into new slots."""
    case = Failing(shared)
    before, executor = case.state(), case.loop.executor

    def fails(*_: Any, **__: Any) -> None:
        raise failure

    for call in (executor.run, lambda window: executor.ask(window, case.loop.question())):
        with monkeypatch.context() as patch:
            if isinstance(where, int):
                case.watched.fail(failure, where)
            else:
                patch.setattr(f"kvpatch_jax.window.executor.{where}", fails)
            with pytest.raises(error):
                call(case.changed)
        case.watched.fail(None)
        assert (executor.slots.counts == before["counts"]).all()
    assert same(case.state(), before)

    case.loop.run(case.changed)
    assert (executor.slots.counts == owners(executor)).all()
    other = Failing(shared)
    other.loop.run(other.changed)
    assert same(case.loop.rows(), other.loop.rows())


@pytest.mark.usefixtures("unchecked")
def test_what_can_be_refused_is_refused_before_anything_is_written():
    case = Failing(False, pages=6)
    loop, window = case.loop, case.window
    loop.executor.provide("c6", chunk=loop.canonical("c6"))
    before, pools = case.state(), loop.executor.pools
    patch = PatchNote("0" * 32, "c6", None, "canonical", window.target(), None, False, 4, 100, 5)
    for changed, error, words in (
        (case.changed.append(loop.entry("c6")), PoolError, "piece 'c6', 5 tokens: .*pages"),
        (case.changed.append(Entry("c9", None, 8, 8)), InputError, r"provide\('c9', tokens=…\) first"),
        (window.append(Entry("c9", None, 8, 8), BARE), InputError, r"'c9': got no canonical"),
        (window.append(Entry("c9", None, 8, 8), Service("restored")), InputError, "which no store has"),
        (window.append(loop.entry("c6"), Service("patch", patch)), InputError, "got patch 0+, which nobody has"),
        (window.append(Entry("c6", "another", 5, 5), BARE), PatchMismatchError, "expected 'another'"),
        (window.append(Entry("c6", "content of c6", 4, 5)), InputError, "got 5 tokens of 'c6'; expected 4"),
        (window.append(Entry("c6", "content of c6", 4, 5), BARE), SessionError, "got 5 tokens of 'c6'; expected 4"),
        (dataclasses.replace(window, backbone="f" * 64), SessionError, "a window of backbone 'ffff"),
    ):
        with pytest.raises(error, match=words):
            loop.executor.run(changed)
        assert loop.executor.pools is pools
        with pytest.raises(SessionError, match="expected"):
            loop.executor.context(changed)

    question = loop.question()
    nan = question._replace(embeddings=jnp.full_like(question.embeddings, jnp.nan))
    for tokens, length, error in ((nan, None, NotFiniteError), (question, 0, InputError), (question, 4, InputError)):
        with pytest.raises(error):
            loop.executor.ask(window.evict("c1").append(loop.entry("c6")), tokens, length)
    assert same(case.state(), before)


def test_a_pool_that_is_lost_comes_back(monkeypatch: pytest.MonkeyPatch):
    case = Failing(False)
    loop = case.loop
    loop.executor.provide("c3", chunk=loop.canonical("c3"))
    loop.run(loop.window.evict("c1").serve({"c3": BARE}))

    def dies(layout: Any, pools: Any, *_: Any, **__: Any) -> None:
        for value in (*pools.engine.values(), *pools.source.values()):
            value.delete()
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvpatch_jax.window.executor.write_piece", dies)
        with pytest.raises(PoolError, match=r"expected `renew\(\)`") as error:
            loop.run(loop.window.append(loop.entry("c4")))
    assert isinstance(error.value.__cause__, RuntimeError)
    executor, window = loop.executor, loop.window
    assert executor.lost
    for call in (
        lambda: executor.run(window),
        lambda: executor.context(window),
        lambda: executor.snapshot(window),
        lambda: executor.enlarge(64),
    ):
        with pytest.raises(PoolError, match="lost in a failed launch"):
            call()

    executor.renew()
    assert not executor.lost
    assert executor.slots.free_pages == 64
    with pytest.raises(SessionError, match="every window"):
        executor.run(window)
    loop.run(window.anew())
    assert [window.fidelity(id) for id in window.ids] == ["exact", "survivor", "approximate"]
    assert [loop.window.fidelity(id) for id in window.ids] == ["exact", "exact", "approximate"]
    loop.run(loop.window.evict("c3"))
    logits = np.asarray(loop.backbone.prefill(loop.prompt("c0", "c2", question=True)).logits)
    assert np.abs(loop.logits() - logits).max() <= BAR * np.abs(logits).max()
