"""Processes that end while threads of the library work, each in a way of its own. A program.

    python ending.py CASE
    python ending.py fork COUNT

A case prints "at work" once its threads are, and ends at once. `fork` imports everything once and forks a process for
each of COUNT ends, four at a time, so that one costs no imports; no process that forks has touched a device. It prints
a line of JSON for each: its case, its status, the one that is wanted, and what it printed.
"""

import atexit
import itertools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from window_oracle import tiny  # noqa: E402

import kvpatch_jax as kvp  # noqa: E402
from kvpatch_jax.errors import SessionClosedError  # noqa: E402

SIDE_BY_SIDE = 4
kept = []
"""Keeps what a case made alive until the interpreter ends."""


def forming() -> None:
    """A session that is not closed, whose former compiles what the second chunk's patch takes."""
    store = kvp.ChunkStore(tempfile.mkdtemp())
    session = kvp.Session(tiny("gqa", buckets=None), store, rank=4)  # else it forms no patch without a certificate
    looked, get = threading.Semaphore(0), store.get

    def looking(*names: Any, **options: Any) -> Any:
        looked.release()
        return get(*names, **options)

    store.get = looking
    for length in (9, 11):
        session.add(np.random.default_rng(length).integers(3, 40, length).tolist(), kind="chunk")
    assert looked.acquire(timeout=60)
    assert looked.acquire(timeout=60)
    kept.append(session)


def answering() -> None:
    """Sessions that are not closed, with an answer that nobody reads before the end."""
    atexit.register(read)  # before the library registers what ends its threads, and so run after that
    sessions = kvp.Sessions(tiny("gqa", buckets=None), pages=64)
    session = sessions.open()
    session.add([5, 6, 7, 8, 9], kind="chunk")
    kept.extend([sessions, session.ask([7, 11], steps=512, stop=())])


def read() -> None:
    try:
        print(len(kept[-1].ids), "tokens were made")
    except SessionClosedError:
        print("the answer was cut short")


def at_work(make: Callable[[], None]) -> None:
    make()
    print("at work", flush=True)


def end(make: Callable[[], None]) -> None:
    at_work(make)


def error(make: Callable[[], None]) -> None:
    at_work(make)
    raise KeyError("the program's own")


def leave(make: Callable[[], None]) -> None:
    at_work(make)
    sys.exit(3)


def child(make: Callable[[], None]) -> None:
    """A process that was forked off ends as well, before its parent does."""
    at_work(make)
    if number := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
    os._exit(0)


CASES = {
    "end forming": (end, forming, 0),
    "error forming": (error, forming, 1),
    "end answering": (end, answering, 0),
    "child forming": (child, forming, 0),
    "leave forming": (leave, forming, 3),
    "error answering": (error, answering, 1),
    "leave answering": (leave, answering, 3),
}
"""How a process ends, what is at work then, and the status that it is to end with."""


def forked(case: str, output: Path) -> int | None:
    """Forks a process for a case; None in that process, which is to run it."""
    number = os.fork()
    if number:
        return number
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return None


def main(count: int) -> str | None:
    """Forks for every end; returns the case that a forked process is to run."""
    folder, waiting = Path(tempfile.mkdtemp()), {}
    cases = list(itertools.islice(itertools.cycle(CASES), count))
    for place in range(count + SIDE_BY_SIDE):
        if place >= SIDE_BY_SIDE and waiting:
            number, status = os.wait()
            case, output = waiting.pop(number)
            said = output.read_text()
            ended = {"case": case, "status": os.waitstatus_to_exitcode(status), "said": said}
            print(json.dumps(ended | {"wanted": CASES[case][2]}), flush=True)
        if place < count:
            output = folder / str(place)
            number = forked(cases[place], output)
            if number is None:
                return cases[place]
            waiting[number] = cases[place], output
    return None


if __name__ == "__main__":
    chosen = main(int(sys.argv[2])) if sys.argv[1] == "fork" else sys.argv[1]
    if chosen is not None:
        way, make, _ = CASES[chosen]
        way(make)
