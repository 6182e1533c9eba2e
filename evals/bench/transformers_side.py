"""The other side of a comparison: `transformers_worker.py` in another interpreter; torch is not imported here."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError, KVPatchError

from .benchmark import Row, measured_row

WORKER = Path(__file__).with_name("transformers_worker.py")
AGREEMENT = 2e-4
"""Largest difference of logits and features, over the largest magnitude, at which both sides are one function."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


_PACKAGES = "with torch and transformers"


class WorkerError(KVPatchError):
    """The interpreter with torch answered with an error, or ended."""


class TransformersSide:
    """transformers in a process of its own; it runs only while it is asked to.

    Attributes:
      versions: of torch and transformers, and the number of threads.

    Raises:
      InputError: `python` cannot be run, or has no torch or transformers.
      WorkerError: of every method, when the other side fails.
    """

    def __init__(self, python: str, threads: int):
        program = shutil.which(python)
        if program is None:
            raise InputError(f"--torch-python: got {python!r}, which cannot be run; expected a Python {_PACKAGES}")

        environment = os.environ | {name: str(threads) for name in THREAD_VARIABLES}
        environment.pop("PYTHONPATH", None)  # ours is of another version of Python
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._process = subprocess.Popen([program, str(WORKER)], text=True, env=environment, **pipes)

        try:
            self.versions = self.ask("hello", threads=threads)
        except WorkerError as error:
            self.close()
            message = f"--torch-python: got {python!r}: {error}; expected a Python {_PACKAGES}"
            raise InputError(message) from error

    def ask(self, call: str, **request: Any) -> dict[str, Any]:
        """Sends one request and reads its answer."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None

        try:
            print(json.dumps({"call": call, **request}), file=to, flush=True)
            line = back.readline()
        except BrokenPipeError:
            line = ""

        try:
            answer = json.loads(line)
        except ValueError as error:
            # Read at a place of its own, because the process writes at the file's.
            file = self._stderr.fileno()
            words = os.pread(file, 400, max(0, os.fstat(file).st_size - 400)).decode(errors="replace")
            raise WorkerError(f"{call}: got {line!r}, after {words!r}; expected an answer as JSON") from error

        if "error" in answer:
            raise WorkerError(f"{call}: {answer['error']}")
        return answer

    def seconds(self, call: str) -> float:
        """Times a call on the other side."""
        return self.ask(call, timed=True)["seconds"]

    def outputs(self, folder: Path) -> dict[str, np.ndarray]:
        """Reads the prompt's logits [1,T,V], the tokens that follow [1,n], and an image's features [E,D]."""
        path = folder / "theirs.npz"
        self.ask("outputs", path=str(path))
        with np.load(path) as file:
            return {name: file[name] for name in file.files}

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it never read
                assert pipe is not None
                pipe.close()
        self._process.wait(timeout=30)
        self._stderr.close()

    def __enter__(self) -> "TransformersSide":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def agreement_row(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], **labels: Any) -> Row:
    """Checks that both sides compute the same function.

    Args:
      ours, theirs: arrays by name; "tokens" are counted where they are equal, of the others the largest difference over
        the largest magnitude is judged, infinite where shapes differ.
    """
    differences = {}
    for name, expected in theirs.items():
        if name == "tokens":
            labels["equal_tokens"] = float(np.mean(ours[name] == expected))
        elif ours[name].shape != expected.shape:
            differences[name] = float("inf")
        else:
            differences[name] = float(np.abs(ours[name] - expected).max() / np.abs(expected).max())

    worst = max(differences.values())
    return measured_row("agreement", [worst], at_most=AGREEMENT, differences=differences, **labels)
