"""Rows of a run on an accelerator: one file of JSON lines that grows as they come, and the process that makes them.

A line is a row, what a process says of its device, or `begun`: what is being measured now. A task whose `begun` has no
row behind it is where a process was when it ended, so that a fault or a hang costs one row and is told by name.
"""

import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels import KernelUnavailableError

from ..results.environment import environment

FILE = "rows.jsonl"

Row = dict[str, Any]


class Task(NamedTuple):
    """One row to make: its name within the part, and the function that makes it."""

    key: str
    run: Callable[[], Row]


class BenchPart(NamedTuple):
    """What a process of its own measures: a generator of tasks, and for which implementations ("kernel", "xla").

    Attributes:
      module: of this package; its function `function(tiny, which)` yields tasks.
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
    "prefill": BenchPart("accelerator_prefill", "prefill", limit=240.0),
    "wins": BenchPart("accelerator_timings", "wins", limit=240.0),
    "numerics_xla": BenchPart("accelerator_numerics", "numerics", "xla"),
}
"""In the order in which they run: first what would serve a wrong answer, then what a kernel is for."""


def read(out: Path) -> list[Row]:
    """Reads the lines that are whole; a process that was killed may have left part of one."""
    path = out / FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def append(out: Path, line: Row) -> None:
    """Adds one line, behind the last that is whole, and waits until it is on the disk."""
    path = out / FILE
    path.touch()
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.seek(whole)
        file.truncate()
        file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def done(lines: Sequence[Row], part: str) -> set[str]:
    """Collects the keys of a part that have their row."""
    return {line["key"] for line in lines if line.get("part") == part and "key" in line}


def open_task(lines: Sequence[Row], part: str) -> str | None:
    """Finds the task that was begun last and has no row; None where there is none."""
    begun = [line["begun"] for line in lines if line.get("part") == part and "begun" in line]
    return begun[-1] if begun and begun[-1] not in done(lines, part) else None


def work(name: str, out: Path, tiny: bool) -> None:
    """Makes the rows of a part that are not there yet, in this process."""
    part = PARTS[name]
    module = importlib.import_module(f".{part.module}", __package__)
    tasks: Iterator[Task] = getattr(module, part.function)(tiny, part.which)
    # torch describes its own device: asking jax would take memory of the accelerator in that process.
    where = getattr(module, "torch_environment", environment)
    have = done(read(out), name)
    append(out, {"part": name, "tiny": tiny, "environment": where(), "notes": module.NOTES})
    for task in tasks:
        if task.key in have:
            continue
        append(out, {"part": name, "begun": task.key})
        append(out, {"part": name, "key": task.key} | _row(task))
    append(out, {"part": name, "finished": True})


def _row(task: Task) -> Row:
    """What a task gives, or why it gave nothing: every exception is kept, and no other row is lost for it."""
    try:
        return task.run()
    except KernelUnavailableError as refused:
        return {"skipped": str(refused)}
    except Exception:
        return {"exception": traceback.format_exc()}
