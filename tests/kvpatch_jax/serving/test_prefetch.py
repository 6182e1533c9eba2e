"""Reading threads have an order, limits and a patience, and no process waits at its end for a read that hangs."""
# pyright: reportArgumentType=false

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvpatch_jax.serving.vllm.prefetch import Prefetcher


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def reading():
    """One thread that reads, for at most two requests in memory, with a short patience."""
    prefetcher = Prefetcher(1, 2, 0.05)
    yield prefetcher
    prefetcher.close()


def test_results_are_taken_in_the_order_of_arrival(reading):
    reading.add("a", lambda: 1)
    reading.add("b", lambda: 1 / 0)
    wait_until(lambda: reading.is_ready("a") and reading.is_ready("b"))
    assert (reading.ready(), reading.take("a")) == (["a", "b"], 1)
    with pytest.raises(ZeroDivisionError):
        reading.take("b")
    assert "b" not in reading


def test_a_request_expires_while_others_hold_every_place(reading):
    """No thread is at fault: the patience counts from the request's arrival."""
    for name in "ab":
        reading.add(name, lambda name=name: name)
    wait_until(lambda: reading.is_ready("b"))
    reading.add("third", lambda: 1)
    wait_until(lambda: "third" in reading.ready(0.01))
    assert not reading.stuck
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        reading.take("third")
    assert [reading.take(name) for name in "ab"] == ["a", "b"], "results are kept as long as need be"
    for name in ("a", "b", "third"):
        reading.release(name)
    reading.add("fourth", lambda: "fourth")
    wait_until(lambda: reading.is_ready("fourth"))
    assert reading.take("fourth") == "fourth"


def test_every_request_expires_at_once_while_all_threads_hang(reading):
    """Nor do released requests stay in memory until the store answers."""

    class Prompt:
        def read(self):
            return "read"

    hang, references = threading.Event(), []
    reading.add("hangs", lambda: hang.wait(60))
    wait_until(lambda: reading.stuck)
    for number in range(50):
        prompt = Prompt()
        references.append(weakref.ref(prompt))
        reading.add(str(number), prompt.read)
        del prompt
        assert reading.is_ready(str(number))
        with pytest.raises(TimeoutError):
            reading.take(str(number))
        reading.release(str(number))
    gc.collect()
    assert not [reference for reference in references if reference() is not None]
    hang.set()
    wait_until(lambda: not reading.stuck)


def test_the_newer_of_two_requests_with_one_id_wins():
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


def test_waiting_work_is_not_begun_after_close():
    reading, begun, hang, calls = Prefetcher(1, 8, 60.0), threading.Event(), threading.Event(), []
    ended = threading.Event()
    reading.add("first", lambda: (begun.set(), hang.wait(60), ended.set()))
    begun.wait(60)
    reading.add("second", lambda: calls.append(1))
    reading.close()
    hang.set()
    assert ended.wait(60)
    assert not calls


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
