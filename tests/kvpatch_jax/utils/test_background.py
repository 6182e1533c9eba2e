"""Threads of the library end before the interpreter does, whatever is at work when a program ends."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvpatch_jax.utils import background
from kvpatch_jax.utils.background import JobQueue, start_thread

ENDING = Path(__file__).with_name("ending.py")


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_processes_end_with_their_own_status_while_threads_work(count: int):
    """Sessions that nobody closes, at a normal end, an unhandled exception and an exit: no signal, no hang."""
    command = [sys.executable, "-W", "ignore", str(ENDING), "fork", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == count
    for end in ends:
        assert end["status"] == end["wanted"], end
        assert end["said"].startswith("at work\n"), end
        assert end["said"].count("Traceback") == (end["status"] == 1), end  # the program's own and no thread's
        assert ("cut short" in end["said"]) == ("answering" in end["case"]), end


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps threads of other tests from being ended."""
    monkeypatch.setattr(background, "_ends", {})


class Gate:
    """A job that runs until it is let through."""

    def __init__(self):
        self.begun, self.open, self.jobs = threading.Event(), threading.Event(), []

    def run(self, job: int) -> None:
        self.begun.set()
        assert self.open.wait(60)
        self.jobs.append(job)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(("seconds", "jobs"), [(60.0, [0, 1, 2]), (0.0, [0])])
def test_at_exit_the_job_that_runs_ends_and_those_that_wait_have_a_limit(monkeypatch, seconds: float, jobs: list[int]):
    monkeypatch.setattr(background, "EXIT_SECONDS", seconds)
    gate = Gate()
    queue = JobQueue(gate.run, 8, "gate")
    assert all(queue.add(number) for number in range(3))
    assert gate.begun.wait(60)
    exits = threading.Thread(target=background._end_threads)
    exits.start()
    while not queue.closed:  # until the exit has told the queue
        time.sleep(0.001)
    assert not queue.add(3)
    assert exits.is_alive()
    gate.open.set()
    exits.join(60)
    assert not exits.is_alive()
    assert gate.jobs == jobs
    assert not background._ends
    queue.flush()
    queue.close()


@pytest.mark.usefixtures("ends")
def test_a_thread_that_hangs_keeps_no_process_from_ending(caplog: pytest.LogCaptureFixture):
    hangs, told = threading.Event(), []
    thread = start_thread(hangs.wait, told.append, "hangs", 0.01)
    background._end_threads()
    assert thread.is_alive()
    assert len(told) == 1
    assert "'hangs' still runs after 0.01 s" in caplog.text
    hangs.set()
    thread.join(60)


def test_a_queue_runs_jobs_in_order_and_is_bounded():
    gate = Gate()
    queue = JobQueue(gate.run, 2, "gate")
    assert queue.add(0)
    assert gate.begun.wait(60)
    assert [queue.add(number) for number in (1, 2, 3)] == [True, True, False]
    gate.open.set()
    queue.flush()
    assert gate.jobs == [0, 1, 2]
    assert queue.add(4)
    queue.close()  # runs what waits
    queue.close()
    assert gate.jobs == [0, 1, 2, 4]
    assert not queue.add(5)
