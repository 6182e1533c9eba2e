"""Kernels on the accelerator at hand, row by row: `python3 -m evals.bench.accelerator --out=DIRECTORY`.

Every part and implementation runs in a process of its own with a time-out, so that none holds the device's memory for
another. Rows are added to DIRECTORY/rows.jsonl as they come; a fault or a hang costs the row at which it happened, is
recorded there, and the part continues after it. The same command resumes a run that was stopped. The end is
DIRECTORY/results.json and DIRECTORY/accelerator.md. The exit status is 0 only where every part was finished and every
number was right.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.tables import markdown_table
from . import accelerator_tasks
from .accelerator_tasks import FILE, PARTS, Row

LIMIT = 520.0
"""Seconds that one run may take; the same command resumes from there."""
FAULTS = 4
"""Processes of one part that may die before the part is given up."""
POLL = 0.2


def run_all(out: Path, tiny: bool, parts: Sequence[str], limit: float) -> list[str]:
    """Runs what is missing of these parts, in their order; returns what went wrong."""
    wrong, deadline = [], time.monotonic() + limit
    for name in parts:
        if any(line.get("part") == name and "finished" in line for line in accelerator_tasks.read(out)):
            print(f"{name}: is there already", flush=True)
        elif deadline - time.monotonic() < 5:
            wrong.append(f"{name}: not run, the {limit:.0f} seconds are over; the same command resumes from here")
        else:
            print(f"{name} ...", flush=True)
            trouble = run_part(name, out, tiny, deadline)
            wrong += [] if trouble is None else [trouble]

    return wrong


def run_part(name: str, out: Path, tiny: bool, deadline: float) -> str | None:
    """Runs the rows of one part that are missing, in processes of their own; returns what went wrong, if anything."""
    # A process that died is started again after the task at which it died.
    for _ in range(FAULTS):
        ended = _run_process(name, out, tiny, deadline)
        if ended == "out of time":
            return f"{name}: out of time; the same command resumes from here"
        if ended is None:
            return None

        task = accelerator_tasks.open_task(accelerator_tasks.read(out), name)
        if task is None:
            return f"{name}: {ended} before its first row; see log.txt"
        accelerator_tasks.append(out, {"part": name, "key": task, "exception": ended})
    return f"{name}: given up after {FAULTS} processes that ended early"


def _run_process(name: str, out: Path, tiny: bool, deadline: float) -> str | None:
    """Runs one process until it ends, hangs or the time is over; returns how it ended, None where as it should."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with (out / "log.txt").open("ab") as log:
        process = subprocess.Popen(_command(name, out, tiny), env=environment, stdout=log, stderr=log)

    # A process is alive as long as its file of rows grows: a kernel that hangs writes none.
    size, moved = -1, time.monotonic()

    while process.poll() is None:
        time.sleep(POLL)
        now, length = time.monotonic(), (out / FILE).stat().st_size if (out / FILE).exists() else 0
        if length != size:
            size, moved = length, now
        if now > deadline or now - moved > PARTS[name].limit:
            process.kill()
            process.wait()
            return "out of time" if now > deadline else f"no new row for {PARTS[name].limit:.0f} seconds, killed"

    return None if process.returncode == 0 else f"the process ended with status {process.returncode}"


def _command(name: str, out: Path, tiny: bool) -> list[str]:
    return [sys.executable, "-m", "evals.bench.accelerator", f"--out={out}", f"--alone={name}"] + ["--tiny"] * tiny


# ----------------------------------------------------------------------------------------------------------- report


def gather(lines: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Groups the lines by part: the last environment and notes, and the rows without their part."""
    results: dict[str, dict[str, Any]] = {}
    for line in lines:
        part = results.setdefault(line["part"], {"rows": []})
        if "environment" in line:
            part.update({name: line[name] for name in ("environment", "tiny", "notes")})
        elif "key" in line:
            part["rows"].append({name: value for name, value in line.items() if name != "part"})
        elif "finished" in line:
            part["finished"] = True

    return results


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lists the numbers that are not right and the rows that could not be made."""
    wrong = []
    for name, result in results.items():
        for row in result["rows"]:
            if "exception" in row:
                wrong.append(f"{name}: {row['key']}: {_cell(row['exception'])}")
            elif row.get("verdict", "pass") != "pass":
                wrong.append(f"{name}: {row['key']}: {row['verdict']}")
    return wrong


def with_comparisons(results: dict[str, Any]) -> dict[str, Any]:
    """Adds the ratios that need two parts: the XLA path and torch.compile over ours."""
    results = {name: dict(result) for name, result in results.items()}

    def timed_rows(part: str) -> list[Row]:
        return [row for row in results.get(part, {}).get("rows", []) if "microseconds" in row]

    for part, column in (("bandwidth_xla", "xla over it"), ("torch", "torch.compile over it")):
        other = {(row["operation"], row["case"]): row["microseconds"] for row in timed_rows(part)}
        for row in timed_rows("bandwidth"):
            case = (row["operation"], row["case"])
            if case in other:
                row[column] = other[case] / row["microseconds"]
    return results


def report(results: Mapping[str, Mapping[str, Any]], wrong: Sequence[str]) -> str:
    """Formats everything that was measured as Markdown."""
    lines = ["# Kernels on this accelerator", ""]
    for name, result in results.items():
        device = result.get("environment", {})
        lines += [f"## {name}", "", f"{device.get('device', '?')}, jax {device.get('jax', '?')}", ""]
        if result.get("tiny"):
            lines += ["Tiny shapes: this shows that the part runs, and nothing of its speed.", ""]
        rows = result["rows"]

        if rows:
            keys = dict.fromkeys(itertools.chain.from_iterable(rows))
            columns = [key for key in keys if key not in ("key", "seconds")]
            cells = []
            for row in rows:
                cells.append([_cell(row.get(column)) for column in columns])
            lines += [markdown_table(columns, cells), ""]

        lines += [f"- {note}" for note in result.get("notes", [])] + [""] * bool(result.get("notes"))

    lines += ["## What went wrong", "", *(f"- {trouble}" for trouble in wrong)] if wrong else ["Nothing went wrong."]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return (str(value).strip().splitlines() or [""])[-1].replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m evals.bench.accelerator", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="the folder for rows, results and report")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs; on a CPU too")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for this run")
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.alone:
        accelerator_tasks.work(flags.alone, flags.out, flags.tiny)
        return 0

    wrong = run_all(flags.out, flags.tiny, flags.part or list(PARTS), flags.limit)
    results = with_comparisons(gather(accelerator_tasks.read(flags.out)))
    wrong += judge(results)
    text = report(results, wrong)
    (flags.out / "results.json").write_text(json.dumps(results | {"wrong": wrong}, indent=2, ensure_ascii=False) + "\n")
    (flags.out / "accelerator.md").write_text(text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
