"""Two processes of one job (`jax.distributed`, gloo, two devices each), and one afterwards with another mesh."""

import contextlib
import socket
import subprocess
import time
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
    """A job of `count` processes; each says which steps it has done. Where one fails the others are not waited for."""
    program = [PYTHON, str(Path(__file__).parent / "store_hosts.py")]
    port, until = free_port(), time.monotonic() + 400
    with contextlib.ExitStack() as stack:
        children: list[subprocess.Popen] = []
        for index in range(count):
            out, log = (stack.enter_context(open(folder / f"{word}-{index}", "w")) for word in ("out", "log"))
            arguments = [*program, str(index), str(count), str(port), str(folder / "data"), *steps]
            children.append(subprocess.Popen(arguments, env=child_environment(), stdout=out, stderr=log))
            stack.callback(children[-1].wait)
            stack.callback(children[-1].kill)
        while not all(child.poll() == 0 for child in children):
            logs = "".join((folder / f"log-{index}").read_text()[-4000:] for index in range(count))
            assert not any(child.returncode for child in children), logs
            assert time.monotonic() < until, logs
            time.sleep(0.1)
    for index in range(count):
        assert [line for line in (folder / f"out-{index}").read_text().split() if line in steps] == list(steps)


def test_arrays_travel_between_jobs_of_two_processes_and_of_one(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 2, ["export", "load", "damaged", "disagreeing"])
    run(tmp_path, 1, ["load", "imported"])


def test_one_process_saves_and_two_load(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 1, ["alone"])
    run(tmp_path, 2, ["load", "of_one"])


def test_a_store_is_saved_by_two_processes_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / "data").mkdir()
    run(tmp_path, 2, ["item", "late", "failing", "in_the_background"])
    run(tmp_path, 1, ["one_process"])
