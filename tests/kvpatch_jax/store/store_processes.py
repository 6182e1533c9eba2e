"""Processes over a store, started by one program (`store_child.py`) and seen through the files that they write."""

import atexit
import dataclasses
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from store_cases import PYTHON, child_environment

CHILD = str(Path(__file__).parent / "store_child.py")


@dataclasses.dataclass(frozen=True)
class Process:
    """A running process: its number, and where what it says goes."""

    number: int
    output: Path

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def spoken(self) -> str:
        """What it said."""
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    @property
    def error(self) -> str:
        """What it ended by; nothing if that was well, or SIGKILL."""
        path = Path(f"{self.output}.error")
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL, if it is there, and waits until it is gone."""
        if self.alive:
            os.kill(self.number, signal.SIGKILL)
        wait_until(lambda: not self.alive)


class Processes:
    """The program that forks them."""

    def __init__(self) -> None:
        command = [PYTHON, "-W", "ignore", CHILD]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._program = subprocess.Popen(command, env=child_environment(), **pipes)
        self._count = 0
        atexit.register(self.close)

    def start(self, what: str, root: Path, worker: int = 0, **more: int | str) -> Process:
        """Starts one; its output lies in `<root>.outputs`, in a file whose name begins with what it does."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._count += 1
        outputs = Path(f"{root}.outputs")
        outputs.mkdir(exist_ok=True)
        output = outputs / f"{what}.{self._count}"
        order = {"what": what, "root": str(root), "worker": worker, "output": str(output)} | more
        self._program.stdin.write(json.dumps(order) + "\n")
        self._program.stdin.flush()
        return Process(int(self._program.stdout.readline()), output)

    def close(self) -> None:
        """Ends the program; the processes that it forked must be gone."""
        self._program.kill()
        self._program.communicate()


@functools.cache
def processes() -> Processes:
    """One for all tests: what costs time is starting the program."""
    return Processes()


def wait_until(done: Callable[[], bool], seconds: float = 600) -> None:
    """Polls; fails after so many seconds, which only a hang should take."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"nothing happened within {seconds} seconds"
        time.sleep(0.005)
