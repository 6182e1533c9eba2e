"""What waits to be formed of an engine's prefills: what it holds on the device, and what a store that hangs costs."""

import gc
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from serving_sides import LAYOUT, TOKENS, served, sides_of

from kvpatch_jax.serving.vllm import segments_of
from kvpatch_jax.serving.vllm.messages import SaveCommand, StepCommands
from kvpatch_jax.store import ChunkStore

TOKEN_BYTES = LAYOUT.bytes_per_token("float32")


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, patience=60.0) as made:
        yield made


@pytest.fixture
def writing(monkeypatch):
    """A store whose writes wait for `writing.go`; `writing.begun` is set once one does."""
    gate, begun, put = threading.Event(), threading.Event(), ChunkStore.put

    def waiting(self, *given, **more):
        begun.set()
        gate.wait(60)
        return put(self, *given, **more)

    monkeypatch.setattr(ChunkStore, "put", waiting)
    yield SimpleNamespace(go=gate, begun=begun)
    gate.set()


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def former_threads():
    return [thread for thread in threading.enumerate() if thread.name == "chunk-former"]


def saves_of(sides, name, ends, wanted, blocks=tuple(range(8)), tokens=TOKENS):
    """What a step leaves to be saved of a prompt."""
    sides.pool.prefill(name, tokens, blocks)
    return StepCommands(saves=(SaveCommand(name, "default", segments_of("tiny", tokens, ends=ends), wanted, blocks),))


def test_waiting_prefills_hold_only_the_wanted_rows(sides, writing):
    """Of a prompt of thirty tokens, eight of which are to be a canonical."""
    warm = saves_of(sides, "warm", [8], (0,), tokens=[1, *TOKENS])
    first = saves_of(sides, "first", [8, 18, 24], (0,))
    sides.worker.save(warm)
    assert writing.begun.wait(60)
    before = live_bytes()
    sides.worker.save(first)
    assert live_bytes() - before == 8 * TOKEN_BYTES
    assert sides.worker.former.held_bytes == 16 * TOKEN_BYTES
    writing.go.set()
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 2}
    assert sides.worker.former.held_bytes == 0
    assert live_bytes() <= before


def test_waiting_prefills_stay_within_the_budget(tmp_path, writing):
    """A chunk beyond it is not read, and formed of a request that comes later. A chunk that fits behind it is."""
    with sides_of(tmp_path, pending_bytes=20 * TOKEN_BYTES) as sides:
        former = sides.worker.former
        sides.worker.save(saves_of(sides, "first", [8], (0,)))
        assert writing.begun.wait(60)
        second = saves_of(sides, "second", [14], (0,), tokens=[1, *TOKENS])
        before = live_bytes()
        sides.worker.save(second)
        assert live_bytes() == before
        assert former.counts == {"over_budget": 1}
        sides.worker.save(saves_of(sides, "third", [12], (0,), tokens=[2, *TOKENS]))
        assert (former.counts, former.held_bytes) == ({"over_budget": 1}, 20 * TOKEN_BYTES)
        writing.go.set()
        former.flush()
        assert former.counts == {"over_budget": 1, "canonicals": 2}
        sides.worker.save(second)
        former.flush()
        assert former.counts == {"over_budget": 1, "canonicals": 3}


def test_rows_that_cannot_be_read_release_their_bytes(sides):
    sides.worker.save(saves_of(sides, "alone", [10], (0,), tokens=TOKENS[8:]))
    sides.worker.former.flush()
    orders = saves_of(sides, "own", [8, 18], (0, 1))
    [save] = orders.saves
    missing = save._replace(blocks=(10**6, *save.blocks[1:]))  # the first chunk's, in no pool
    sides.worker.save(StepCommands(saves=(missing,)))
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 1, "failed": 1, "patches": 1}
    assert sides.worker.former.held_bytes == 0


def test_closing_waits_no_longer_than_the_patience(tmp_path, writing):
    """While one write hangs and others wait: what was not begun is dropped, also once the store answers again."""
    with sides_of(tmp_path, patience=0.2, pending=1) as sides:
        former = sides.worker.former
        sides.worker.save(saves_of(sides, "first", [8], (0,)))
        assert writing.begun.wait(60)
        sides.worker.save(saves_of(sides, "second", [9], (0,)))
        sides.worker.save(saves_of(sides, "third", [10], (0,)))
        assert former.counts == {"dropped": 1}, "the queue is full"
        began = time.monotonic()
        sides.worker.close()
        assert 0.2 <= time.monotonic() - began < 30, "the gate would have held it for 60 s"
        assert former.counts == {"dropped": 2}
        (thread,) = former_threads()
        writing.go.set()
        thread.join(60)
        assert not thread.is_alive()
        assert former.counts["canonicals"] <= 1, "the second is not formed"
        assert former.held_bytes == 0


def test_closing_finishes_waiting_prefills(tmp_path):
    with sides_of(tmp_path) as sides:
        sides.worker.save(saves_of(sides, "first", [8], (0,)))
        sides.worker.save(saves_of(sides, "second", [9], (0,)))
        sides.worker.close()
        assert sides.worker.former.counts == {"canonicals": 2}
        assert not former_threads()
    with sides_of(tmp_path) as sides:
        assert served(sides, "again", {"segments": [9]}).count == 9


def test_closing_does_not_wait_for_a_store_that_hangs(tmp_path, monkeypatch):
    """Of both sides, and another tenant's is closed all the same."""
    hang, close, closed = threading.Event(), ChunkStore.close, []

    def closing(self):
        if self is bad:
            hang.wait(60)
        close(self)
        closed.append(self)

    with sides_of(tmp_path, patience=0.2) as sides:
        bad, good = sides.scheduler.stores.of("bad"), sides.scheduler.stores.of("good")
        monkeypatch.setattr(ChunkStore, "close", closing)
        began = time.monotonic()
        sides.scheduler.close()
        assert closed == [], "the worker's side uses them too"
        sides.worker.close()
        assert time.monotonic() - began < 30
        assert closed == [good]
        hang.set()
