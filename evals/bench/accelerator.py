"""Kernels on the accelerator at hand: `bash evals/bench/accelerator.sh [--tiny]`.

Parts run in processes of their own, none of which holds the device's memory for another: first every kernel against
float64, then timings beside XLA and a copy, then torch.compile. Rows are kept as they come; a fault or a hang costs the
benchmark at which it happened, and the part goes on behind it. The same command resumes a run that was stopped.
Needs jax, flax, orbax, numpy and, for its part, torch; no network. The end is DEVICE-DATE.json in --out, with
"config", "environment", "rows" and "notes"; the exit status is 0 only where every part was finished and nothing wrong.
"""

import argparse
import datetime
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..harness.environment import environment
from ..harness.frame import without_nan
from .benchmark import Benchmark, measure, table, wrong_rows
from .kernels import checks, timings
from .torch_operator import torch_timings

PARTS: dict[str, Callable[[bool], Iterator[Benchmark]]] = {
    "checks": checks,
    "timings": timings,
    "torch": torch_timings,
}
"""In the order in which they run: first what would serve a wrong answer."""
RESULTS = Path(__file__).with_name("results")
LIMIT, HUNG, FAULTS = 520.0, 120.0, 4
"""Seconds of one run, and of a benchmark that counts as hung; processes of a part that may die."""
REPEATS = 30


def finished_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the lines of a part; a process that died may have left half of one, which is cut off."""
    text = file.read_text() if file.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        file.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Adds a line."""
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def work(part: str, out: Path, tiny: bool) -> None:
    """Measures what is missing of a part, in this process."""
    file, begun = out / f"{part}.jsonl", out / f"{part}.begun"
    finished = {line["part"] for line in finished_lines(file)}
    if part != "torch" and "environment" not in finished:
        # Asking jax takes memory of the accelerator, which torch's process leaves alone.
        add_line(file, {"part": "environment", "environment": environment()})
    for benchmark in PARTS[part](tiny):
        if benchmark.key in finished:
            continue
        begun.write_text(benchmark.key)
        faulthandler.dump_traceback_later(HUNG, exit=True)
        rows, notes = measure(benchmark, 3 if tiny else REPEATS)
        faulthandler.cancel_dump_traceback_later()
        add_line(file, {"part": benchmark.key, "rows": without_nan(rows), "notes": notes})
    begun.unlink(missing_ok=True)


def run_part(part: str, out: Path, tiny: bool, deadline: float) -> list[str]:
    """Runs processes of one part until all of it is there; returns what went wrong."""
    command = [sys.executable, "-m", "evals.bench.accelerator", f"--out={out}", f"--alone={part}"]
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    file, begun = out / f"{part}.jsonl", out / f"{part}.begun"
    for _ in range(FAULTS):
        begun.unlink(missing_ok=True)
        with (out / "log.txt").open("ab") as log:
            try:
                left = max(1.0, deadline - time.monotonic())
                process = subprocess.run([*command, *["--tiny"] * tiny], env=variables, stdout=log, stderr=log,
                                         timeout=left, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                return [f"{part}: out of time; the same command resumes from here"]
        if process.returncode == 0:
            return []
        key = begun.read_text() if begun.exists() else None
        if key is None:
            return [f"{part}: status {process.returncode} before its first benchmark; see {out / 'log.txt'}"]
        reason = f"{key}: the process ended with status {process.returncode}"
        add_line(file, {"part": key, "rows": [], "notes": [reason], "failed": reason})
    return [f"{part}: given up after {FAULTS} processes that ended early"]


def run_all(out: Path, tiny: bool, parts: Sequence[str], limit: float) -> dict[str, Any]:
    """Runs what is missing of these parts; returns results, with "wrong": all that is not right or was not finished."""
    out.mkdir(parents=True, exist_ok=True)
    deadline, wrong = time.monotonic() + limit, []
    for part in parts:
        print(f"{part} ...", flush=True)
        wrong += run_part(part, out, tiny, deadline)

    rows, notes, described = [], [], {}
    for part in parts:
        for line in finished_lines(out / f"{part}.jsonl"):
            rows += line.get("rows", [])
            notes += line.get("notes", [])
            described |= line.get("environment", {})
            wrong += [line["failed"]] if "failed" in line else []
    wrong += wrong_rows(rows)
    config = {"tiny": tiny, "parts": list(parts), "repeats": 3 if tiny else REPEATS}
    return {"config": config, "environment": described, "rows": rows, "notes": notes, "wrong": wrong}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the results; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m evals.bench.accelerator", description=__doc__)
    parser.add_argument("--out", default=RESULTS, type=Path, help="the folder of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs; on a CPU too")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of this run; the next one resumes")
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    parts_folder = flags.out.resolve() / ("parts-tiny" if flags.tiny else "parts")
    if flags.alone:
        work(flags.alone, flags.out, flags.tiny)
        return 0

    results = run_all(parts_folder, flags.tiny, flags.part or list(PARTS), flags.limit)
    print(table(results["rows"]))
    for line in (*results["notes"], *(f"WRONG: {line}" for line in results["wrong"])):
        print(line)
    device = str(results["environment"].get("device", "unknown")).replace(" ", "-").lower()
    name = f"{'tiny-' * flags.tiny}{device}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json"
    (flags.out / name).write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {flags.out / name}")
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
