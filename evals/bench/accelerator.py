"""Kernels on the accelerator at hand, part by part: `python3 -m evals.bench.accelerator --out=DIRECTORY`.

Every part runs in a process of its own, so that none holds the device's memory for another and a part that fails takes
no other with it. What a part found lies in DIRECTORY/<part>.json; a part whose file is there is not run again. The end
is DIRECTORY/accelerator.md. The exit status is 0 only where no part failed and every number was right.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = {
    "numerics": ("accelerator_numerics", "numerics"),
    "bandwidth": ("accelerator_timings", "bandwidth"),
    "torch": ("accelerator_torch", "compiled"),
    "factorise": ("accelerator_timings", "factorisation"),
    "prefill": ("accelerator_prefill", "prefill"),
    "configuration": ("accelerator_timings", "configuration"),
}
"""Which module's function makes a part's result, given whether shapes are to be tiny."""
LIMIT = 520.0
"""Seconds that all parts may take together; the next part gets what is left, and what does not fit is not run."""


def run_part(name: str, out: Path, tiny: bool) -> None:
    """Runs one part in this process and writes its file, whole or not at all."""
    module, function = PARTS[name]
    begin = time.perf_counter()
    result = getattr(importlib.import_module(f".{module}", __package__), function)(tiny)
    result |= {"part": name, "tiny": tiny, "part_seconds": time.perf_counter() - begin}
    path = out / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def run_all(out: Path, tiny: bool, parts: Sequence[str], limit: float) -> list[str]:
    """Runs the parts that are not there yet, each in a process of its own; returns what went wrong."""
    wrong, deadline = [], time.monotonic() + limit
    for name in parts:
        if (out / f"{name}.json").exists():
            print(f"{name}: is there already", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < 5:
            wrong.append(f"{name}: not run, the {limit:.0f} seconds are over; the same command goes on from here")
            continue
        print(f"{name} ...", flush=True)
        command = [sys.executable, "-m", "evals.bench.accelerator", f"--out={out}", f"--alone={name}"]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            done = subprocess.run(command + ["--tiny"] * tiny, env=environment, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            wrong.append(f"{name}: stopped after {left:.0f} seconds")
            continue
        if done.returncode:
            wrong.append(f"{name}: ended with status {done.returncode}")
    return wrong


def report(results: Mapping[str, Mapping[str, Any]], wrong: Sequence[str]) -> str:
    """Everything that was found, as Markdown."""
    lines = ["# Kernels on this accelerator", ""]
    for name, result in results.items():
        device = result.get("environment", {})
        lines += [f"## {name}", "", f"{device.get('device', '?')}, jax {device.get('jax', '?')}", ""]
        if result["tiny"]:
            lines += ["Tiny shapes: this shows that the part runs, and nothing of its speed.", ""]
        if "skipped" in result:
            lines += [f"Skipped: {result['skipped']}", ""]
        rows = result.get("rows", [])
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row if key != "all"))
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows]
            lines.append("")
        lines += [f"- {note}" for note in result.get("notes", [])] + [""] * bool(result.get("notes"))
    lines += ["## What went wrong", "", *(f"- {each}" for each in wrong)] if wrong else ["Nothing went wrong."]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The numbers that are not right, and the bars that are missed, in words."""
    wrong = []
    for row in results.get("numerics", {}).get("rows", []):
        if row["verdict"] not in ("pass", "skipped"):
            wrong.append(f"numerics: {row['operation']} {row['implementation']} {row['case']}: {row['verdict']}")
    return wrong


def with_comparisons(results: dict[str, Any]) -> dict[str, Any]:
    """The results with the ratios that need two parts: against torch.compile, and against the prefill."""
    results = {name: dict(result) for name, result in results.items()}
    torch = {row["case"]: row["microseconds"] for row in results.get("torch", {}).get("rows", [])}
    rows = results.get("bandwidth", {}).get("rows", [])
    for row in rows:
        theirs = torch.get(row["case"])
        if theirs and row["operation"] == "rotate_patch":
            row["torch.compile over it"] = theirs / row["microseconds"]
    prefill = next((row["microseconds"] for row in results.get("prefill", {}).get("rows", [])), None)
    for row in results.get("factorise", {}).get("rows", []):
        if prefill and row["case"] == "randomised":
            row["share of the prefill"] = row["microseconds"] / prefill
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m evals.bench.accelerator", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="the folder for JSON and Markdown")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it runs; on a CPU too")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all parts together")
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.alone:
        run_part(flags.alone, flags.out, flags.tiny)
        return 0
    wrong = run_all(flags.out, flags.tiny, flags.part or list(PARTS), flags.limit)
    found = {name: flags.out / f"{name}.json" for name in PARTS}
    results = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    wrong += judge(results)
    text = report(with_comparisons(results), wrong)
    (flags.out / "accelerator.md").write_text(text)
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
