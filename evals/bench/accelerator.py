"""Kernels on the accelerator at hand: `bash evals/bench/accelerator.sh [--tiny]`.

Every kernel is held against float64 and timed beside XLA and a copy, in a process of its own. Rows are written as they
come: a fault or a hang costs the benchmark at which it happened, and another process goes on behind it. The same
command resumes a run that was stopped. Needs jax, flax, orbax and numpy, and no network. The end is DEVICE-DATE.json in
--out, with "config", "environment", "rows" and "notes"; the exit status is 0 only where every benchmark was
finished and nothing wrong.
"""

import argparse
import datetime
import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness.environment import environment
from ..harness.frame import without_nan
from .benchmark import measure, table, wrong_rows
from .kernels import benchmarks

RESULTS = Path(__file__).with_name("results")
LIMIT, HUNG, FAULTS = 520.0, 120.0, 6
"""Seconds of one run, and of a benchmark that counts as hung; processes of a run that may die."""
REPEATS = 30


def finished_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the lines of a run; a process that died may have left half of one, which is cut off."""
    text = file.read_text() if file.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        file.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Adds a line."""
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def work(file: Path, tiny: bool) -> None:
    """Measures what a file of lines lacks, in this process; `file`.begun names the benchmark at hand."""
    finished, begun = {line["key"] for line in finished_lines(file)}, file.with_suffix(".begun")
    if "environment" not in finished:
        add_line(file, {"key": "environment", "environment": environment()})
    for benchmark in benchmarks(tiny):
        if benchmark.key in finished:
            continue
        begun.write_text(benchmark.key)
        faulthandler.dump_traceback_later(HUNG, exit=True)
        rows, notes = measure(benchmark, 3 if tiny else REPEATS)
        faulthandler.cancel_dump_traceback_later()
        add_line(file, {"key": benchmark.key, "rows": without_nan(rows), "notes": notes})
    begun.unlink(missing_ok=True)


def run(file: Path, tiny: bool) -> str | None:
    """Runs processes until every benchmark has a line; returns the reason where some have none."""
    command = [sys.executable, "-m", "evals.bench.accelerator", f"--work={file}", *["--tiny"] * tiny]
    deadline, begun, log = time.monotonic() + LIMIT, file.with_suffix(".begun"), file.with_suffix(".log")
    for _ in range(FAULTS):
        begun.unlink(missing_ok=True)
        with log.open("ab") as output:
            try:
                left = max(1.0, deadline - time.monotonic())
                process = subprocess.run(command, stdout=output, stderr=output, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                return "out of time; the same command resumes from here"
        if process.returncode == 0:
            return None
        if not begun.exists():
            return f"status {process.returncode} before the first benchmark; see {log}"
        key = begun.read_text()
        add_line(file, {"key": key, "failed": f"{key}: the process ended with status {process.returncode}; see {log}"})
    return f"given up after {FAULTS} processes that ended early"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the results; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m evals.bench.accelerator", description=__doc__)
    parser.add_argument("--out", default=RESULTS, type=Path, help="the folder of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs; on a CPU too")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.work:
        work(flags.work, flags.tiny)
        return 0

    flags.out.mkdir(parents=True, exist_ok=True)
    file = flags.out.resolve() / f"{'tiny-' * flags.tiny}lines.jsonl"
    unfinished = run(file, flags.tiny)
    lines = finished_lines(file)
    rows, notes = ([entry for line in lines for entry in line.get(name, [])] for name in ("rows", "notes"))
    described = next((line["environment"] for line in lines if "environment" in line), {})
    wrong = [*([unfinished] if unfinished else []), *(line["failed"] for line in lines if "failed" in line)]
    wrong += wrong_rows(rows)
    print(table(rows), *notes, *(f"WRONG: {reason}" for reason in wrong), sep="\n")

    device = str(described.get("device", "unknown")).replace(" ", "-").lower()
    path = flags.out / f"{'tiny-' * flags.tiny}{device}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"
    config = {"tiny": flags.tiny, "repeats": 3 if flags.tiny else REPEATS}
    results = {"config": config, "environment": described, "rows": rows, "notes": notes, "wrong": wrong}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
