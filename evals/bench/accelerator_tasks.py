"""What the parts of a run on an accelerator share: rows in a file, tasks that make them, shapes and drawn arrays.

Rows go into one file of JSON lines that grows as they come. A line is a row, what a process says of its device, or
`begun`: what is being measured now. A task whose `begun` has no row after it is where a process was when it ended, so
that a fault or a hang costs one row, and the report names it.
"""

import importlib
import json
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import KernelUnavailableError
from pallas_kernels.rotate_patch.shapes import PRODUCTION, SMALL, RotateShape

from ..harness.environment import environment

FILE = "rows.jsonl"
RANKS = (0, 16, 64)
PAGE_SIZE = 64

Row = dict[str, Any]


class Task(NamedTuple):
    """One row to make: its name within the part, and the function that makes it."""

    key: str
    run: Callable[[], Row]


class BenchPart(NamedTuple):
    """What a process of its own measures: a generator of tasks, and for which implementations ("kernel", "xla").

    Attributes:
      module: of this package; its function `function(tiny, which)` yields tasks, its `NOTES` explain the columns.
      function: see `module`.
      which: "kernel": this platform's kernel; "xla"; "" where there is nothing to choose.
      limit: seconds without a new row after which the process counts as hung.
    """

    module: str
    function: str
    which: str = ""
    limit: float = 120.0


PARTS = {
    "scattered": BenchPart("accelerator_numerics", "scattered", "kernel"),
    "bandwidth": BenchPart("accelerator_timings", "bandwidth", "kernel"),
    "numerics": BenchPart("accelerator_numerics", "numerics", "kernel"),
    "bandwidth_xla": BenchPart("accelerator_timings", "bandwidth", "xla"),
    "torch": BenchPart("accelerator_torch", "compiled"),
    "factorise": BenchPart("accelerator_timings", "factorisation"),
    "numerics_xla": BenchPart("accelerator_numerics", "numerics", "xla"),
}
"""In the order in which they run: first what would serve a wrong answer, then what a kernel is for."""


# ------------------------------------------------------------------------------------------------ the file of rows


def read(out: Path) -> list[Row]:
    """Reads the lines that are whole; a process that was killed may have left part of one."""
    path = out / FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def append(out: Path, line: Row) -> None:
    """Adds one line, after the last that is whole, and waits until it is on the disk."""
    path = out / FILE
    path.touch()
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.seek(whole)
        file.truncate()
        file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def finished_keys(lines: Sequence[Row], part: str) -> set[str]:
    """Collects the keys of a part that have their row."""
    return {line["key"] for line in lines if line.get("part") == part and "key" in line}


def open_task(lines: Sequence[Row], part: str) -> str | None:
    """Returns the task that was begun last and has no row, or None."""
    begun = [line["begun"] for line in lines if line.get("part") == part and "begun" in line]
    return begun[-1] if begun and begun[-1] not in finished_keys(lines, part) else None


def work(name: str, out: Path, tiny: bool) -> None:
    """Makes the rows of a part that are missing, in this process."""
    part = PARTS[name]
    module = importlib.import_module(f".{part.module}", __package__)
    tasks: Iterator[Task] = getattr(module, part.function)(tiny, part.which)

    # torch describes its own device: asking jax would take memory of the accelerator in that process.
    describe = getattr(module, "torch_environment", environment)
    finished = finished_keys(read(out), name)
    append(out, {"part": name, "tiny": tiny, "environment": describe(), "notes": module.NOTES})

    for task in tasks:
        if task.key not in finished:
            append(out, {"part": name, "begun": task.key})
            append(out, {"part": name, "key": task.key} | make_row(task))

    append(out, {"part": name, "finished": True})


def spread(seconds: Sequence[float]) -> Row:
    """Makes the part of a row that says how long a call took: median, fastest and slowest, in microseconds."""
    return {
        "microseconds": statistics.median(seconds) * 1e6,
        "fastest": min(seconds) * 1e6,
        "slowest": max(seconds) * 1e6,
    }


def make_row(task: Task) -> Row:
    """Runs a task; a refusal or an exception becomes the row, so that no other row is lost for it."""
    try:
        return task.run()
    except KernelUnavailableError as refused:
        return {"skipped": str(refused)}
    except Exception:
        return {"exception": traceback.format_exc()}


# ------------------------------------------------------------------------------------------------ shapes and arrays


class KernelCase(NamedTuple):
    """A chunk's shape at one rank and length."""

    shape: RotateShape
    tokens: int
    rank: int

    @property
    def name(self) -> str:
        """Model, tokens and rank."""
        return f"{self.shape.name} T={self.tokens} M={self.rank}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the chunk, [L, T, K, H]."""
        return (*self.shape.leading, self.tokens, self.shape.heads, self.shape.width)


def cases(tiny: bool, least_tokens: int = 0) -> list[KernelCase]:
    """Lists every production shape at every rank; token counts doubled until they reach `least_tokens`."""
    result = []
    for shape in SMALL[:1] if tiny else PRODUCTION:
        tokens = shape.tokens
        while tokens < least_tokens and not tiny:
            tokens *= 2
        ranks = (0, 4) if tiny else RANKS
        result += [KernelCase(shape, tokens, rank) for rank in ranks if rank or shape.rotary]
    return result


def draw(case: KernelCase, key: Array, dtype: str = "bfloat16") -> dict[str, Any]:
    """Draws a chunk as `rotate_patch` takes it, from the device's own generator."""
    keys = jax.random.split(key, 4)

    def normal(key: Array, *sizes: int) -> Array:
        return jax.random.normal(key, sizes, jnp.float32).astype(dtype)

    chunk = {"x": normal(keys[0], *case.sizes)}
    if case.shape.rotary:
        angle = jax.random.uniform(keys[1], (case.tokens, case.shape.rotary // 2), maxval=2 * np.pi)
        chunk |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}

    if case.rank:
        chunk["u"] = normal(keys[2], *case.shape.leading, case.tokens, case.rank)
        chunk["v"] = normal(keys[3], *case.shape.leading, case.rank, case.shape.heads * case.shape.width)
    return chunk


def implementation(which: str) -> str:
    """Names this platform's kernel where `which` is "kernel" (on a CPU the GPU's, to be refused), else "xla"."""
    backend = jax.default_backend()
    if which != "kernel":
        return "xla"
    return backend if backend in ("gpu", "tpu") else "gpu"
