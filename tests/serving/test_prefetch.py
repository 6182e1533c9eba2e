"""Reading threads have an order, limits and a patience, and no process waits at its end for a read that hangs."""
# pyright: reportArgumentType=false

import functools
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from kvpatch_jax.serving.vllm.prefetch import Prefetcher


@pytest.fixture
def reading():
    """One thread that reads, for at most two requests in memory, with a short patience."""
    prefetcher = Prefetcher(1, 2, 0.05)
    yield prefetcher
    prefetcher.close()


def test_a_request_expires_while_others_hold_every_place(reading, wait_until):
    """Results are taken in the order of arrival; the patience counts from the request's arrival."""

    def fails():
        raise ZeroDivisionError

    reading.add("a", lambda: "a")
    reading.add("b", fails)
    wait_until(lambda: reading.ready() == ["a", "b"])
    reading.add("third", lambda: 1)
    wait_until(lambda: "third" in reading.ready(0.01))
    assert not reading.stuck, "no thread is at fault"
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        reading.take("third")
    assert reading.take("a") == "a", "results are kept as long as need be"
    with pytest.raises(ZeroDivisionError):
        reading.take("b")
    for name in ("a", "b", "third"):
        reading.release(name)
    reading.add("fourth", lambda: "fourth")
    wait_until(lambda: reading.is_ready("fourth"))
    assert reading.take("fourth") == "fourth"


def test_released_requests_leave_memory_while_all_threads_hang(reading, wait_until):
    """They expire at once, and do not wait for the store to answer."""
    hang, reads = threading.Event(), [functools.partial(int) for _ in range(50)]
    reading.add("hangs", lambda: hang.wait(60))
    wait_until(lambda: reading.stuck)
    references = [weakref.ref(read) for read in reads]
    while reads:
        reading.add("name", reads.pop())
        with pytest.raises(TimeoutError):
            reading.take("name")
        reading.release("name")
    gc.collect()
    assert not [reference for reference in references if reference() is not None]
    hang.set()
    wait_until(lambda: not reading.stuck)


def test_the_newer_of_two_requests_with_one_id_wins(wait_until):
    """Added again while the older one is read, which ends last."""
    reading, begun, go = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
    reading.add("name", lambda: (begun.set(), go.wait(60), "old")[-1])
    begun.wait(60)
    reading.add("name", lambda: "new")
    wait_until(lambda: reading.is_ready("name"))
    go.set()
    both = threading.Barrier(2)  # needs both threads, so the older read has ended
    for name in "xy":
        reading.add(name, lambda: both.wait(60))
    wait_until(lambda: reading.is_ready("x") and reading.is_ready("y"))
    assert reading.take("name") == "new"
    reading.close()


def test_a_process_exits_while_a_read_and_a_write_hang():
    """What was not begun is dropped, and what is running is waited for no longer than the patience."""
    program = """
import threading
from types import SimpleNamespace
import numpy as np
import kvpatch_jax as kvp
from kvpatch_jax.serving.vllm import PromptSegment
from kvpatch_jax.serving.vllm.forming import ChunkFormer, FormingTask
from kvpatch_jax.serving.vllm.prefetch import Prefetcher
prefetcher, reading, writing = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
hang = lambda event: (event.set(), threading.Event().wait())
prefetcher.add("name", lambda: hang(reading))
layout = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64))
former = ChunkFormer(SimpleNamespace(of=lambda tenant: hang(writing)), layout, 4, patience=0.1)
for name in "ab":
    former.add([FormingTask("t", PromptSegment(name, 0, 4), (), np.arange(4))], lambda segment: {}, 1)
reading.wait()
writing.wait()
print("at the end")
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (0, "at the end\n")
    warnings = [line.split(" still runs")[0] for line in process.stderr.splitlines()]
    assert warnings == ["kvpatch: thread 'kvpatch-ahead-1'", "kvpatch: thread 'chunk-former'"]
