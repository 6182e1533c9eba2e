"""Threads of the library end before the interpreter does, whatever is at work when a program ends."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpatch_jax.utils.background import JobQueue

ENDING = Path(__file__).with_name("ending.py")


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_processes_end_with_their_own_status_while_threads_work(count: int):
    """Sessions that nobody closes, at a normal end, an unhandled exception and an exit: no signal, no hang."""
    command = [sys.executable, "-W", "ignore", str(ENDING), str(count)]
    ends = [json.loads(line) for line in ended(command).stdout.splitlines()]
    assert len(ends) == count
    for end in ends:
        assert end["status"] == end["expected"], end
        assert end["printed"].startswith("at work\n"), end
        assert end["printed"].count("Traceback") == (end["status"] == 1), end  # the program's own and no thread's
        assert ("cut short" in end["printed"]) == ("answering" in end["case"]), end


EXITING = """
import sys, threading
from kvpatch_jax.utils import background

background.EXIT_SECONDS = float(sys.argv[1])
begun, opened = threading.Event(), threading.Event()

def run(job):
    begun.set()
    assert opened.wait(60)
    print(job, flush=True)

queue = background.JobQueue(run, 8, "gate")
assert all(queue.add(number) for number in range(3))
assert begun.wait(60)

def open_at_exit():
    while not queue.closed:  # until the exit has told the queue
        opened.wait(0.001)
    assert not queue.add(3)
    opened.set()

threading.Thread(target=open_at_exit, daemon=True).start()
"""

HANGING = """
import threading
from kvpatch_jax.utils.background import start_thread

start_thread(threading.Event().wait, lambda deadline: print("ended", flush=True), "hangs", 0.01)
"""


@pytest.mark.parametrize(("seconds", "jobs"), [("60", ["0", "1", "2"]), ("0", ["0"])])
def test_at_exit_the_job_that_runs_ends_and_those_that_wait_have_a_limit(seconds: str, jobs: list[str]):
    done = ended([sys.executable, "-c", EXITING, seconds])
    assert (done.stdout.split(), done.stderr) == (jobs, "")


def test_a_thread_that_hangs_keeps_no_process_from_ending():
    done = ended([sys.executable, "-c", HANGING])
    assert done.stdout == "ended\n"
    assert "'hangs' still runs after 0.01 s" in done.stderr


def test_a_queue_runs_jobs_in_order_and_is_bounded():
    begun, opened, jobs = threading.Event(), threading.Event(), []

    def run(job: int) -> None:
        begun.set()
        assert opened.wait(60)
        jobs.append(job)

    queue = JobQueue(run, 2, "gate")
    assert queue.add(0)
    assert begun.wait(60)
    assert [queue.add(number) for number in (1, 2, 3)] == [True, True, False]
    opened.set()
    queue.flush()
    assert jobs == [0, 1, 2]
    assert queue.add(4)
    queue.close()  # runs what waits
    queue.close()
    assert jobs == [0, 1, 2, 4]
    assert not queue.add(5)
