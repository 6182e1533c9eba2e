"""Kernels on the accelerator at hand: `bash evals/bench/accelerator.sh [--tiny] [--interpret=gpu|tpu]`.

Every kernel is compared with XLA and float64, then timed beside XLA and a copy; then come a session's step with kernels
and without, and `evals.run --quick`. Processes of their own write a line for each benchmark: a fault or a hang costs
the one at which it happened. The same command resumes a run that was stopped; without its lines.jsonl it begins anew.
Needs jax, flax, orbax and numpy, and no network. The results are DEVICE-DATE.json in --out, of which `pallas_kernels`
reads "kernels"; the exit status is 0 only where every benchmark was finished and nothing wrong.
"""

import argparse
import contextlib
import datetime
import faulthandler
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import targeting

from ..harness.environment import environment
from ..harness.frame import measured_row, without_nan
from . import kernels
from .benchmark import Benchmark, measure, median_interval, table, wrong_rows

RESULTS = Path(__file__).with_name("results")
LIMIT, HUNG, QUICK_LIMIT, FAULTS = 520.0, 240.0, 200.0, 12
"""Seconds of one run, of a benchmark that counts as hung, and of `evals.run`; processes of a run that may die."""
REPEATS = 30
STAGES = ("correctness,times,window", "evals.run", "more times")
"""What one process does, one behind the other."""
OUT_OF_TIME = "out of time; the same command resumes from here"


def finished_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the lines of a run; a process that died may have left half of one, which is cut off."""
    text = file.read_text() if file.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        file.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def add_line(file: Path, line: Mapping[str, Any], **more: Any) -> None:
    """Adds a line, and writes the results so far."""
    with file.open("a") as lines:
        lines.write(json.dumps({**line, **more}) + "\n")
    write_results(file)


def benchmarks(stage: str, tiny: bool) -> Iterator[Benchmark]:
    """Yields the benchmarks of a stage."""
    if stage != "window":
        yield from kernels.benchmarks(tiny, stage)
    elif kernels.kernel_name():
        # Imported where it is prepared: the library needs more than the kernels.
        window = f"{__package__}.window"
        yield Benchmark("window.step", "kernels", lambda: importlib.import_module(window).with_kernels(tiny))


def work(file: Path, stages: str, tiny: bool) -> None:
    """Measures what a file of lines lacks, in this process; `file`.begun has the line of the benchmark at hand."""
    finished, begun = {line["key"] for line in finished_lines(file)}, file.with_suffix(".begun")
    if "environment" not in finished:
        add_line(file, {"key": "environment", "environment": environment()})
    for stage in stages.split(","):
        for benchmark in benchmarks(stage, tiny):
            if benchmark.key in finished:
                continue
            line, start = {"key": benchmark.key, "probe": benchmark.name, "stage": stage}, time.monotonic()
            begun.write_text(json.dumps(line))
            faulthandler.dump_traceback_later(HUNG, exit=True)
            try:
                rows, notes = measure(benchmark, 3 if tiny else REPEATS)
            except ModuleNotFoundError as error:
                rows, notes = [], [f"{benchmark.key}: not run: {error}"]
            # Raises where a fault has lost the device to this process.
            jax.block_until_ready(jax.numpy.ones(8) + 1)
            faulthandler.cancel_dump_traceback_later()
            add_line(file, line, seconds=time.monotonic() - start, rows=without_nan(rows), notes=notes)
    begun.unlink(missing_ok=True)


def run_workers(file: Path, stages: str, passed: Sequence[str], deadline: float) -> str | None:
    """Runs processes until every benchmark of the stages has a line; returns the reason where some have none."""
    command = [sys.executable, "-m", "evals.bench.accelerator", f"--work={file}", f"--stages={stages}", *passed]
    begun, log = file.with_suffix(".begun"), file.with_suffix(".log")
    for _ in range(FAULTS):
        begun.unlink(missing_ok=True)
        with log.open("ab") as output:
            try:
                left = max(1.0, deadline - time.monotonic())
                process = subprocess.run(command, stdout=output, stderr=output, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                return OUT_OF_TIME
        if process.returncode == 0:
            return None
        if not begun.exists():
            return f"{stages}: status {process.returncode} before the first benchmark; see {log}"
        line = json.loads(begun.read_text())
        reason = f"{line['key']}: the process ended with status {process.returncode}; see {log}"
        add_line(file, line, failed=reason)
    return f"{stages}: given up after {FAULTS} processes that ended early"


def run_quick(file: Path, tiny: bool, deadline: float) -> str | None:
    """Runs `evals.run --quick` on the device, if there is time for it; what a bare machine lacks is no failure."""
    limit, log, start = min(QUICK_LIMIT, deadline - time.monotonic()), file.with_suffix(".run.log"), time.monotonic()
    if "evals.run" in {line["key"] for line in finished_lines(file)}:
        return None
    if limit < 30:
        return OUT_OF_TIME
    command = [sys.executable, "-m", "evals.run", "--config=main", "--quick", f"--out={file.with_suffix('.run')}"]
    command += ["--set=n=2", "--set=batch=2"] * tiny
    with log.open("w") as output:
        try:
            status = subprocess.run(command, stdout=output, stderr=output, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            if limit < QUICK_LIMIT:
                return OUT_OF_TIME
            status = "stopped"
    seconds, last = time.monotonic() - start, " | ".join(log.read_text().splitlines()[-4:])
    line: dict[str, Any] = {"key": "evals.run", "stage": "evals.run", "seconds": seconds}
    if "No module named" in last or "are not installed" in last:
        status = "not run"
    elif isinstance(status, int) and status:
        line["failed"] = f"evals.run: status {status}"
    row = measured_row("evals.run", "main, quick", f"status {status}", "seconds", median_interval([seconds]))
    add_line(file, line, rows=[row], notes=[f"evals.run: status {status}: {last}"])
    return None


def speeds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Finds how many times as fast as XLA a kernel is for each `Case`: the least low end of its sizes, 0 if wrong."""
    found: dict[str, float] = {}
    for line in lines:
        if line.get("stage") not in kernels.STAGES:
            continue
        rows = line.get("rows", [])
        times = [row["low"] or 0.0 for row in rows if (row["arm"], row["metric"]) == ("xla", "over first")]
        if "failed" in line or wrong_rows(row for row in rows if row["arm"] in ("gpu", "tpu")):
            times = [0.0]
        if times:
            found[line["probe"]] = min(found.get(line["probe"], math.inf), *times)
    return found


def write_results(file: Path, unfinished: Sequence[str] = ()) -> tuple[Path, dict[str, Any]]:
    """Writes DEVICE-DATE.json of the lines so far; a tiny run says nothing of kernels' speed."""
    lines, name = finished_lines(file), file.name.removesuffix("lines.jsonl")
    rows, notes = ([entry for line in lines for entry in line.get(word, [])] for word in ("rows", "notes"))
    for stage in dict.fromkeys(line["stage"] for line in lines if "stage" in line):
        took = [line.get("seconds", 0.0) for line in lines if line.get("stage") == stage]
        notes.append(f"{stage}: {len(took)} benchmarks, {sum(took):.0f} s")
    described = next((line["environment"] for line in lines if "environment" in line), {})
    wrong = [*unfinished, *(line["failed"] for line in lines if "failed" in line), *wrong_rows(rows)]
    config = {"tiny": bool(name), "interpret": name[5:-1], "repeats": 3 if name else REPEATS}
    results = {"config": config, "environment": described, "kernels": {} if name else speeds(lines), "rows": rows}
    results |= {"notes": notes, "wrong": wrong}
    device = str(described.get("device", "unknown")).replace(" ", "-").lower()
    path = file.with_name(f"{name}{device}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.json")
    # At once or not at all: calls that name no implementation read this file. (The library, which has such a step, may
    # not be importable on a bare machine.)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(written, path)
    return path, results


def interpreting(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Makes calls inside the context those of a platform's kernels, interpreted; of none where there is no name."""
    if name is None:
        return contextlib.nullcontext()
    from jax.experimental.pallas import mosaic_gpu, tpu

    params = mosaic_gpu.InterpretGPUParams if name == "gpu" else tpu.InterpretParams
    return targeting(name, params(uninitialized_memory="nan"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the results; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m evals.bench.accelerator", description=__doc__)
    parser.add_argument("--out", default=RESULTS, type=Path, help="the folder of the results")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs; on a CPU too")
    parser.add_argument("--interpret", choices=("gpu", "tpu"), help="with --tiny: its kernels, interpreted, not timed")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stages", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.interpret and not flags.tiny:
        parser.error("--interpret: expected --tiny, whose shapes are small enough")
    if flags.work:
        with interpreting(flags.interpret):
            work(flags.work, flags.stages, flags.tiny)
        return 0

    flags.out.mkdir(parents=True, exist_ok=True)
    # A process that holds all of the device's memory would leave none to the next.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    passed, name = ["--tiny"] * flags.tiny, "tiny-" * flags.tiny
    if flags.interpret:
        passed, name = [*passed, f"--interpret={flags.interpret}"], f"{name}{flags.interpret}-"
    file, deadline, reasons = flags.out.resolve() / f"{name}lines.jsonl", time.monotonic() + LIMIT, []
    for stages in STAGES:
        if stages == "evals.run":
            reasons.append(run_quick(file, flags.tiny, deadline))
        else:
            reasons.append(run_workers(file, stages, passed, deadline))
    path, results = write_results(file, [reason for reason in dict.fromkeys(reasons) if reason])
    print(table(results["rows"]), *results["notes"], *(f"WRONG: {each}" for each in results["wrong"]), sep="\n")
    print(f"written: {path}")
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
