"""Speaks with `transformers_worker.py`, which another interpreter runs; torch is not imported here."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError, KVPatchError

WORKER = Path(__file__).with_name("transformers_worker.py")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
        found = shutil.which(python)
        if found is None:
            raise InputError(f"--torch-python {python!r} cannot be run; expected a Python with torch and transformers")
        environment = os.environ | {name: str(threads) for name in THREAD_VARIABLES}
        environment.pop("PYTHONPATH", None)  # ours is of another version of Python
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        self._process = subprocess.Popen([found, str(WORKER)], text=True, env=environment, **pipes)
        try:
            self.versions = self.ask("hello", threads=threads)
        except WorkerError as error:
            self.close()
            message = f"--torch-python {python!r}: {error}; expected a Python with torch and transformers"
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
            raise WorkerError(f"{call}: no answer but {line!r}; its last words: {self._last_words()!r}") from error
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

    def _last_words(self) -> str:
        file = self._stderr.fileno()
        start = max(0, os.fstat(file).st_size - 400)
        return os.pread(file, 400, start).decode(errors="replace")  # the process writes at the file's own place

    def __enter__(self) -> "TransformersSide":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
