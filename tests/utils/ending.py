"""Processes that end while threads of the library work, each in a way of its own: `python ending.py CASE...`.

It imports everything once and forks a process for each case, four at a time; no process that forks has touched a
device. A process prints "at work" once its threads are, and ends at once. A line of JSON is printed for each: its case,
its status, the one that is expected, and what it printed.
"""

import atexit
import itertools
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from kvpatch_jax.utils import background
from tests.shared.window_oracle import tiny

# Of compilations that take long nothing is said here.
logging.getLogger("kvpatch_jax.utils.compiling").setLevel(logging.ERROR)

SIDE_BY_SIDE = 4
alive = []
"""Keeps what a case made alive until the interpreter ends."""


def answering() -> None:
    """Sessions that are not closed, with an answer that nobody reads before the end."""
    atexit.register(read)  # before the library registers what ends its threads, and so run after that
    sessions = kvp.Sessions(tiny("gqa"), pages=104, page_size=8)  # as tests of shared pools have them
    session = sessions.open()
    session.add([5, 6, 7, 8, 9], kind="chunk")
    alive.extend([sessions, session.ask([7, 11], steps=400, stop=())])


def read() -> None:
    try:
        print(len(alive[-1].ids), "tokens were made")
    except SessionError:
        print("the answer was cut short")


def queueing(seconds: float) -> None:
    """A queue with a job that runs, until the exit has told the queue, and two that wait."""
    background.EXIT_SECONDS = seconds
    begun, opened = threading.Event(), threading.Event()

    def work(job: int) -> None:
        begun.set()
        assert opened.wait(60)
        print("job", job, flush=True)

    queue = background.JobQueue(work, 8, "gate")
    assert all(queue.add(number) for number in range(3))
    assert begun.wait(60)

    def open_at_exit() -> None:
        while not queue.closed:
            opened.wait(0.001)
        assert not queue.add(3)
        opened.set()

    threading.Thread(target=open_at_exit, daemon=True).start()


def hanging() -> None:
    """A thread that does not end when it is told to."""
    background.start_thread(threading.Event().wait, lambda deadline: print("told to end", flush=True), "hangs", 0.01)


def error() -> None:
    raise KeyError("the program's own")


CASES: dict[str, tuple[Callable[[], None], Callable[[], object], int]] = {
    "end answering": (answering, int, 0),
    "error answering": (answering, error, 1),
    "patient queue": (lambda: queueing(60), int, 0),
    "impatient queue": (lambda: queueing(0), int, 0),
    "hanging": (hanging, int, 0),
}
"""What is at work, how the process ends then (`int` does nothing), and the status that it is to end with."""


def main(cases: list[str]) -> str | None:
    """Forks for every end; returns the case that a forked process is to run."""
    for batch in itertools.batched(cases, SIDE_BY_SIDE):
        children = []
        for case in batch:
            file, output = tempfile.mkstemp()
            number = os.fork()
            if not number:
                os.dup2(file, 1)
                os.dup2(file, 2)
                return case
            children.append((case, number, Path(output)))
        for case, number, output in children:
            status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
            result = {"case": case, "status": status, "expected": CASES[case][2], "printed": output.read_text()}
            print(json.dumps(result), flush=True)
    return None


if __name__ == "__main__":
    if (chosen := main(sys.argv[1:])) is not None:
        begin, end, _ = CASES[chosen]
        begin()
        print("at work", flush=True)
        end()
