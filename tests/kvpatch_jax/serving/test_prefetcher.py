"""Reading on threads: order, limits, expiry, and how a process ends while reads hang."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from kvpatch_jax.serving.vllm.prefetcher import Prefetcher


@pytest.fixture
def reading():
    """One thread that reads, for one request at once of eight held; the clock that it looks at."""
    made = Prefetcher(1, 8, 0.5)
    yield made
    made.close()


def test_patience_includes_the_time_in_the_queue(reading, monkeypatch):
    """Two at once and one thread: the second is over as long behind its coming as the first, however late it began.

    Its thread is none that hangs yet, so that a third one is waited for.
    """
    clock, gates = [0.0], {name: threading.Event() for name in "ab"}
    begun = {name: threading.Event() for name in "ab"}
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for name, gate in gates.items():
        reading.add(name, lambda name=name, gate=gate: (begun[name].set(), gate.wait(60))[-1])
    clock[0] = 0.4
    assert reading.ready() == []
    gates["a"].set()
    assert begun["b"].wait(60)
    assert reading.take("a")
    clock[0] = 0.6
    reading.add("c", lambda: "c")
    assert (reading.ready(), reading.stuck) == (["b"], False)
    with pytest.raises(TimeoutError, match=r"no result within 0\.5 s"):
        reading.take("b")
    clock[0] = 0.91
    assert reading.stuck
    assert reading.is_ready("c")
    gates["b"].set()
    while reading.stuck or not reading.is_ready("c"):
        time.sleep(0.001)
    assert reading.take("c") == "c", "it was read after all"


def test_a_request_expires_while_others_hold_every_place():
    """The engine has no room for eight requests: a ninth is served plainly in time, and no thread was at fault."""
    reading, most = Prefetcher(2, 8, 0.05), 8
    for number in range(most):
        reading.add(str(number), lambda: "made")
    while not all(reading.is_ready(str(number)) for number in range(most)):
        time.sleep(0.001)
    reading.add("ninth", lambda: "made")
    began = time.monotonic()
    while "ninth" not in reading.ready(0.01):
        assert time.monotonic() - began < 60
    assert not reading.stuck
    with pytest.raises(TimeoutError, match=r"no result within 0\.05 s"):
        reading.take("ninth")
    reading.release("ninth")
    assert [reading.take(str(number)) for number in range(most)] == ["made"] * most, "they are held as long as need be"
    for number in range(most):
        reading.release(str(number))
    reading.add("tenth", lambda: "tenth")
    while not reading.ready(1.0):
        pass
    assert reading.take("tenth") == "tenth"
    reading.close()


def test_the_newer_of_two_requests_with_one_id_wins():
    """Added again while the older is at work, which ends last."""
    reading, begun, go = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
    reading.add("own", lambda: (begun.set(), go.wait(60), "old")[-1])
    begun.wait(60)
    reading.add("own", lambda: "new")
    while not reading.ready(1.0):
        pass
    go.set()
    both = threading.Barrier(2)  # needs both threads, so the older read has ended
    for name in "xy":
        reading.add(name, lambda: both.wait(60))
    while not (reading.is_ready("x") and reading.is_ready("y")):
        time.sleep(0.001)
    assert reading.take("own") == "new"
    reading.close()


def test_released_requests_are_freed_while_every_thread_hangs(reading):
    """Else every request that comes leaves its prompt behind, until the store answers."""

    class HangingPrompt:
        def read(self):
            return None

    hang = threading.Event()
    reading.patience = 0.01
    reading.add("hangs", lambda: hang.wait(60))
    while not reading.stuck:
        time.sleep(0.001)
    left = []
    for number in range(100):
        prompt = HangingPrompt()
        left.append(weakref.ref(prompt))
        reading.add(str(number), prompt.read)
        del prompt
        with pytest.raises(TimeoutError):
            reading.take(str(number))
        reading.release(str(number))
    gc.collect()
    assert not [own for own in left if own() is not None]
    hang.set()


def test_waiting_work_is_not_begun_after_close():
    before = set(threading.enumerate())
    reading, hang, first, begun = Prefetcher(1, 8, 60.0), threading.Event(), threading.Event(), []
    reading.add("first", lambda: (first.set(), hang.wait(60)))
    first.wait(60)
    (thread,) = set(threading.enumerate()) - before
    reading.add("second", lambda: begun.append(1))
    reading.close()
    hang.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not begun


def test_a_process_exits_while_a_read_and_a_write_hang():
    """What was not begun to be formed is dropped, and what is at work waited for no longer than the patience."""
    program = """
import threading
from types import SimpleNamespace
import numpy as np
import kvpatch_jax as kvp
from kvpatch_jax.serving.vllm import ConnectorConfig, PromptSegment
from kvpatch_jax.serving.vllm.prefetcher import Prefetcher
from kvpatch_jax.serving.vllm.forming import ChunkFormer, FormingTask
prefetcher, reading, writing = Prefetcher(2, 8, 60.0), threading.Event(), threading.Event()
hang = lambda event: (event.set(), threading.Event().wait())
prefetcher.add("own", lambda: hang(reading))
layout = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64))
stores = SimpleNamespace(of=lambda tenant: hang(writing))
former = ChunkFormer(ConnectorConfig(store="s", backbone="b", patience=0.1), layout, stores)
for name in "ab":
    former.add([FormingTask("t", PromptSegment(name, 0, 4), (), np.arange(4))], lambda segment: {}, 1)
reading.wait()
writing.wait()
print("at the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "at the end\n")
    said = [line.split(" still runs")[0] for line in done.stderr.splitlines()]
    assert said == ["kvpatch: thread 'kvpatch-ahead-1'", "kvpatch: thread 'chunk-former'"]


def test_a_released_result_is_freed():
    class Read:
        pass

    reading = Prefetcher(1, 2, 60.0)
    reading.add("own", Read)
    while not reading.ready(1.0):
        pass
    read = weakref.ref(reading.take("own"))
    reading.release("own")
    gc.collect()
    assert read() is None, "or it fills memory until something else is read"
    reading.close()
