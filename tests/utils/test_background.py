"""The library's threads end before the interpreter does, whatever is at work when a program ends."""

import json
import subprocess
import sys
import threading
from pathlib import Path

from kvpatch_jax.utils.background import JobQueue

PRINTED = {"patient queue": "job 0\njob 1\njob 2\n", "impatient queue": "job 0\n", "hanging": "told to end\n"}
CASES = ["end answering", "error answering", *PRINTED]


def test_processes_end_with_their_own_status_while_threads_work():
    """Sessions and queues that nobody closes; the job that runs is waited for, and those that wait within a limit."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ending.py")), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end["case"] for end in ends] == CASES
    for end in ends:
        assert end["status"] == end["expected"], end
        assert end["printed"].startswith("at work\n"), end
        assert end["printed"].count("Traceback") == (end["status"] == 1), end  # the program's own and no thread's
        assert ("cut short" in end["printed"]) == ("answering" in end["case"]), end
        assert ("'hangs' still runs after 0.01 s" in end["printed"]) == (end["case"] == "hanging"), end
        assert end["printed"].removeprefix("at work\n").startswith(PRINTED.get(end["case"], "")), end
        assert "job 1" not in end["printed"] or end["case"] == "patient queue", end


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
    assert (queue.full, queue.backlog) == (True, 3)
    opened.set()
    queue.flush()
    assert jobs == [0, 1, 2]
    assert queue.add(4)
    assert queue.close()  # runs what waits
    assert queue.close()
    assert jobs == [0, 1, 2, 4]
    assert not queue.add(5)
