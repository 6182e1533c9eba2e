"""What waits to be formed stays within its bytes on the device, and a store that hangs costs the patience alone."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import gc
import threading

import jax
import pytest
from serving_sides import LAYOUT, TOKENS, served, sides_of

from kvpatch_jax.serving.vllm import segments_of
from kvpatch_jax.serving.vllm.messages import SaveCommand, StepCommands
from kvpatch_jax.store import ChunkStore

TOKEN_BYTES = LAYOUT.bytes_per_token("float32")


@pytest.fixture
def gate(monkeypatch):
    """An event that writes to a store wait for; `gate.begun` is set once one does."""
    event, put = threading.Event(), ChunkStore.put
    event.begun = threading.Event()

    def waiting(*args, **options):
        event.begun.set()
        event.wait(60)
        return put(*args, **options)

    monkeypatch.setattr(ChunkStore, "put", waiting)
    yield event
    event.set()


def save(sides, end, first=0):
    """Saves the leading chunk of a prompt; returns the growth of the device's memory in bytes."""
    tokens, blocks = [first, *TOKENS], tuple(range(8))
    sides.pool.prefill(f"{first} {end}", tokens, blocks)
    segments = segments_of("tiny", tokens, ends=[end])
    command = SaveCommand(f"{first} {end}", "default", segments, (0,), blocks)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    sides.worker.save(StepCommands(saves=(command,)))
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays()) - before


def test_waiting_prefills_hold_their_rows_within_the_budget(tmp_path, gate):
    """A chunk beyond it is not read, and can be formed from a later request."""
    with sides_of(tmp_path, forming={"pending_bytes": 20 * TOKEN_BYTES}) as sides:
        former = sides.worker.former
        save(sides, 8)
        assert gate.begun.wait(60)
        assert save(sides, 12, 1) == 12 * TOKEN_BYTES
        assert (save(sides, 9, 2), former.held_bytes) == (0, 20 * TOKEN_BYTES)
        assert former.counts == {"over_budget": 1}
        gate.set()
        former.flush()
        assert (former.counts, former.held_bytes) == ({"over_budget": 1, "canonicals": 2}, 0)
        save(sides, 9, 2)
        former.flush()
        assert former.counts["canonicals"] == 3


def test_rows_that_cannot_be_read_cost_one_chunk(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "alone", {"segments": [10]}, TOKENS[8:])
        orders = served(sides, "whole", {"segments": [8, 18], "save": False}).orders
        assert orders.saves == ()
        segments = segments_of("tiny", TOKENS, ends=[8, 18])
        blocks = (10**6, *range(1, 8))  # the first chunk's is in no pool
        sides.worker.save(StepCommands(saves=(SaveCommand("whole", "default", segments, (0, 1), blocks),)))
        sides.worker.former.flush()
        assert sides.worker.former.counts["failed"] >= 1
        assert sides.worker.former.held_bytes == 0


def test_closing_waits_no_longer_than_the_patience(tmp_path, gate):
    """While a write hangs, what was not begun is dropped; the queue is short, too."""
    with sides_of(tmp_path, forming={"patience": 0.2, "pending": 1}, scheduling={"patience": 0.2}) as sides:
        former = sides.worker.former
        save(sides, 8)
        assert gate.begun.wait(60)
        save(sides, 9)
        save(sides, 10)
        assert former.counts == {"dropped": 1}, "the queue is full"
        sides.worker.close()
        assert former.counts == {"dropped": 2}
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "chunk-former"]
        gate.set()
        thread.join(60)
        assert former.counts["canonicals"] <= 1, "the second is not formed"
        assert former.held_bytes == 0


def test_closing_finishes_waiting_prefills(tmp_path):
    with sides_of(tmp_path) as sides:
        save(sides, 8)
        save(sides, 9)
        sides.worker.close()
        assert sides.worker.former.counts == {"canonicals": 2}


def test_closing_does_not_wait_for_a_store_that_hangs(tmp_path, monkeypatch):
    """The other tenants' stores are closed all the same, once no side uses them."""
    hang, close, closed = threading.Event(), ChunkStore.close, []

    def closing(store):
        if store is bad:
            hang.wait(60)
        close(store)
        closed.append(store)

    with sides_of(tmp_path, forming={"patience": 0.2}, scheduling={"patience": 0.2}) as sides:
        bad, good = sides.scheduler.stores.of("bad"), sides.scheduler.stores.of("good")
        monkeypatch.setattr(ChunkStore, "close", closing)
        sides.scheduler.close()
        assert closed == [], "the worker's side uses them too"
        sides.worker.close()
        assert closed == [good]
        hang.set()
