"""Branches of a pool share slots until one changes; larger pools and snapshots hold the same bits."""
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import Loop, same

from kvpatch_jax.errors import PoolError, SessionError


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
    loop.executor.enlarge(9)
    assert loop.executor.slots.free_pages == 9 - 3
    assert same(loop.rows(), rows)
    loop.run(window)
    large = Loop()
    large.append("c0", "c1", "c2", "c3", "c4")
    assert same(loop.rows(), large.rows())


@pytest.mark.parametrize(("name", "dtype"), [("mrope", jnp.bfloat16), ("hybrid", jnp.float32)])
def test_a_snapshot_is_restored_bit_for_bit(name: str, dtype):
    """In other slots of a larger pool, whose next rotation gives the same bits too."""
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
    other = Loop(name, pages=51, dtype=dtype)
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
