"""What waits to be formed stays within its bytes on the device, and a store that hangs costs the patience alone."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import gc
import threading

import jax
import pytest
from serving_sides import LAYOUT, TOKENS, sides_of

from kvpatch_jax.serving.vllm import segments_of
from kvpatch_jax.serving.vllm.messages import SaveCommand, StepCommands
from kvpatch_jax.store import ChunkStore

TOKEN_BYTES = LAYOUT.bytes_per_token("float32")


@pytest.fixture
def gate(hang):
    return hang(ChunkStore, "put")


def save(sides, end, first=0, blocks=tuple(range(8))):
    """Saves the leading chunk of a prompt; returns the growth of the device's memory in bytes."""
    tokens = [first, *TOKENS]
    sides.pool.prefill(f"{first} {end}", tokens, tuple(range(8)))
    segments = segments_of("tiny", tokens, ends=[end])
    command = SaveCommand(f"{first} {end}", "default", segments, (0,), blocks)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    sides.worker.save(StepCommands(saves=(command,)))
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays()) - before


def test_waiting_prefills_hold_their_rows_within_the_budget(tmp_path, gate, wait_until):
    """A chunk beyond it is not read, and can be formed from a later request."""
    with sides_of(tmp_path, forming={"pending_bytes": 20 * TOKEN_BYTES}) as sides:
        former = sides.worker.former
        save(sides, 8)
        wait_until(lambda: gate.threads)
        assert save(sides, 12, 1) == 12 * TOKEN_BYTES
        assert (save(sides, 9, 2), former.held_bytes) == (0, 20 * TOKEN_BYTES)
        assert former.counts == {"over_budget": 1}
        gate.set()
        former.flush()
        assert (former.counts, former.held_bytes) == ({"over_budget": 1, "canonicals": 2}, 0)
        save(sides, 9, 2)
        former.flush()
        assert former.counts["canonicals"] == 3


def test_rows_that_cannot_be_read_cost_one_chunk(sides):
    save(sides, 8, blocks=(10**6, *range(1, 8)))  # a block of no pool
    save(sides, 9)
    sides.worker.former.flush()
    assert (sides.worker.former.counts, sides.worker.former.held_bytes) == ({"failed": 1, "canonicals": 1}, 0)


def test_closing_waits_no_longer_than_the_patience(tmp_path, gate, wait_until):
    """While a write hangs, what was not begun is dropped; the queue is short, too."""
    with sides_of(tmp_path, forming={"patience": 0.2, "pending": 1}, scheduling={"patience": 0.2}) as sides:
        former = sides.worker.former
        save(sides, 8)
        wait_until(lambda: gate.threads)
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


def test_closing_finishes_waiting_prefills(sides):
    save(sides, 8)
    save(sides, 9)
    sides.worker.close()
    assert sides.worker.former.counts == {"canonicals": 2}
