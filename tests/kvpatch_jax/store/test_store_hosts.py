"""Two processes of one job (`jax.distributed`, gloo, two devices each), and one afterwards with another mesh."""

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_cases import PYTHON, child_environment

pytestmark = pytest.mark.slow


def free_port() -> int:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


def run(folder: Path, count: int, steps: Sequence[str]) -> None:
    """A job of `count` processes; each says which steps it has done."""
    port = free_port()
    program = [PYTHON, str(Path(__file__).parent / "store_hosts.py")]
    with contextlib.ExitStack() as stack:
        children = []
        for index in range(count):
            log = stack.enter_context(open(folder / f"log-{index}", "w+"))
            arguments = [*program, str(index), str(count), str(port), str(folder / "data"), *steps]
            child = subprocess.Popen(arguments, env=child_environment(), stdout=subprocess.PIPE, stderr=log, text=True)
            stack.callback(child.kill)
            children.append((child, log))
        for child, log in children:
            printed = child.communicate(timeout=400)[0]
            log.seek(0)
            done = [line for line in printed.split("\n") if line in steps]
            assert (child.returncode, done) == (0, list(steps)), log.read()[-4000:]


def test_arrays_travel_between_jobs_of_two_processes_and_of_one(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 2, ["export", "load", "damaged", "disagreeing", "unacknowledged"])
    run(tmp_path, 1, ["load", "imported"])


def test_one_process_saves_and_two_load(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 1, ["alone"])
    run(tmp_path, 2, ["load", "of_one"])


def test_a_store_is_saved_by_two_processes_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 2, ["item", "own_roots", "failing", "in_the_background"])
    run(tmp_path, 1, ["one_process"])
