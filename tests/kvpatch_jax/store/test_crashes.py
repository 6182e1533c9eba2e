"""Writers killed at random moments, readers and an evictor beside them; histories of several processes."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of, patch_of, same, same_chunk

from kvpatch_jax.store import Budget, ChunkStore

CHILD = str(Path(__file__).parent / "store_child.py")


class Processes:
    """Processes over a store, started by one program and seen through the files that they write."""

    def __init__(self, folder: Path):
        self._folder = folder
        command = [PYTHON, "-W", "ignore", CHILD]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._program = subprocess.Popen(command, env=child_environment(), **pipes)
        self._count = 0

    def start(self, what: str, root: Path, worker: int, steps: int = 0) -> tuple[int, Path]:
        """Number of the process, and where its output goes."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._count += 1
        output = self._folder / f"output{self._count}"
        self._program.stdin.write(f"{what} {root} {worker} {steps} {output}\n")
        self._program.stdin.flush()
        return int(self._program.stdout.readline()), output

    def close(self) -> None:
        self._program.kill()
        self._program.communicate()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory):
    processes = Processes(tmp_path_factory.mktemp("outputs"))
    yield processes
    processes.close()


def wait_until(done: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"nothing happened within {seconds} seconds"
        time.sleep(0.01)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def text_of(output: Path) -> str:
    return output.read_text(encoding="utf-8") if output.exists() else ""


def acknowledged(output: str) -> list[tuple[str, str, int]]:
    """Whole lines only: a writer may be killed while it speaks."""
    lines = [line.split() for line in output.split("\n")[:-1]]
    return [(kind, id, int(seed)) for kind, id, seed in lines]


def check(store: ChunkStore, kind: str, id: str, seed: int) -> None:
    chunk = chunk_of(id, seed)
    if kind == "kv":
        assert same_chunk(store.get(id, BACKBONE), chunk), f"{id}: acknowledged and lost"
        return
    for antecedent in (("A",), ("other",)):
        patch = patch_of(chunk, antecedent, seed=1)
        (found,) = store.get_patches(patch.stamp)
        assert same(found.factors["k"][0], patch.factors["k"][0])  # pyright: ignore


def killed_writers(processes: Processes, root: Path, rounds: int) -> int:
    """SIGKILLs that many writers, two at a time, and reads what they had acknowledged. How many objects."""
    rng, count = random.Random(0), 0
    with ChunkStore(root, budget=Budget(host=0)) as store:
        for _ in range(0, rounds, 2):
            writers = [processes.start("write", root, worker) for worker in range(2)]
            for process, output in writers:
                wait_until(lambda output=output: "\n" in text_of(output))
                time.sleep(rng.random() * 0.1)
                os.kill(process, signal.SIGKILL)
            for process, output in writers:
                wait_until(lambda process=process: not alive(process))
                spoken = acknowledged(text_of(output))
                for each in spoken:
                    check(store, *each)
                count += len(spoken)
        store.collect()
        assert list((root / "tmp").iterdir()) == []
        assert list((root / "quarantine").iterdir()) == []
        assert store.counters["quarantined"] == 0
    return count


def test_ten_killed_writers_lose_nothing(processes: Processes, tmp_path: Path):
    assert killed_writers(processes, tmp_path / "store", 10) >= 10


@pytest.mark.slow
def test_two_hundred_killed_writers_lose_nothing(processes: Processes, tmp_path: Path):
    assert killed_writers(processes, tmp_path / "store", 200) >= 200


def consistent(history: list[tuple[str, int, bool, int, int]]) -> bool:
    """Whether the calls on one key can be put in an order that their times allow and a register would give.

    A depth-first search over what may come next (Wing and Gong), remembering (done, state) seen before. Deletes that
    overlap may both say that they found the object, since each takes away what it saw of several files.
    """
    calls = sorted(history, key=lambda call: call[3])
    seen: set[tuple[frozenset[int], bool]] = set()
    waiting: list[tuple[frozenset[int], int, bool]] = [(frozenset(), 0, False)]
    while waiting:
        done, first, there = waiting.pop()
        while first in done:
            done, first = done - {first}, first + 1
        if first == len(calls):
            return True
        if (key := (done | {-1 - first}, there)) in seen:
            continue
        seen.add(key)
        earliest = min(calls[i][4] for i in range(first, min(len(calls), first + 64)) if i not in done)
        for i in range(first, min(len(calls), first + 64)):
            what, _, answer, begin, _ = calls[i]
            if begin > earliest:
                break
            if i not in done and (what == "put" or answer == there):
                waiting.append((done | {i}, first, what == "put" or (what == "get" and there)))
    return False


def test_the_checker_sees_a_stale_read():
    put, delete = ("put", 0, True, 0, 1), ("delete", 0, True, 2, 3)
    assert consistent([put, delete, ("get", 0, False, 4, 5)])
    assert consistent([put, ("delete", 0, True, 2, 6), ("get", 0, True, 4, 5)])
    assert not consistent([put, delete, ("get", 0, True, 4, 5)])
    assert not consistent([put, ("get", 0, False, 2, 3), ("delete", 0, True, 4, 5)])


def run_histories(processes: Processes, root: Path, workers: int, steps: int) -> None:
    ChunkStore(root).close()
    started = [processes.start("run", root, worker, steps) for worker in range(workers)]
    wait_until(lambda: not any(alive(process) for process, _ in started), 600)
    history = [tuple(call) for _, output in started for call in json.loads(text_of(output))]
    assert len(history) == workers * steps
    for key in range(4):
        assert consistent([call for call in history if call[1] == key]), f"no order explains what K{key} answered"


def test_processes_see_one_order_of_events(processes: Processes, tmp_path: Path):
    run_histories(processes, tmp_path / "store", 3, 100)


@pytest.mark.slow
def test_four_processes_of_a_thousand_operations(processes: Processes, tmp_path: Path):
    run_histories(processes, tmp_path / "store", 4, 1000)
