"""Many processes on the same roots for minutes: every read checked, memory of every process and budgets sampled.

Two roots. On the first, three tenants: one within a budget of its own, one encrypted and within a budget of its own,
and one without a budget, of which nothing may be lost. On the second, two tenants share the budget of the whole root.
With --remote, two of the processes are clients of a remote store as well, on a tenant of their own.

A run of 0.2 minutes shows that the load runs; memory that grows is only seen in minutes.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError

from ..results.environment import environment
from ..results.tables import markdown_table
from .benchmark import Benchmark, Row, measured_row, rows_table
from .store_fill import stored_bytes
from .store_load_log import LoadLog
from .store_load_worker import LoadCounts, LoadTenant, tokens_of, work

CHUNKS = 40
WRONG = ("unknown", "torn", "stale", "deleted", "lost")
MOST_GROWTH = {"of all processes together": 0.03, "of the process that grew most": 0.1}
"""Share of the memory that the second half of a run may add."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_SECONDS, _PATIENCE = 1.0, 120.0


def run(
    *,
    minutes: float = 0.2,
    workers: int = 32,
    remote: str | None = None,
    seed: int = 0,
    out: str | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Runs the load and judges it.

    Args:
      minutes: how long it lasts, from when all processes have opened their stores.
      workers: processes; at least four.
      remote: URL of a remote store that two more tenants' processes use.
      seed: of the choices.
      out: a directory on the disk that holds the roots; the system's temporary directory by default.
      quick: four processes for seconds.
    """
    minutes, workers = (0.05, 4) if quick else (minutes, workers)
    if workers < 4:
        raise InputError(f"--workers: got {workers}; expected 4 or more")
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-load-", dir=out) as folder:
        tenants = tenants_of(Path(folder), remote)
        assigned = assigned_tenants(tenants, workers)
        counts, samples, hung = _loaded(tenants, assigned, minutes, seed)

    config = {"minutes": minutes, "workers": workers, "remote": bool(remote), "seed": seed, "quick": quick}
    rows = verdict_rows(counts, samples, hung)
    result = {"config": config, "environment": environment(), "rows": rows, "counts": counts.as_json()}
    return result | {"samples": dataclasses.asdict(samples)}


def tenants_of(folder: Path, remote: str | None) -> list[LoadTenant]:
    """Returns the tenants of both roots."""
    whole = 1024 * sum(map(tokens_of, range(CHUNKS)))
    own, shared, many = str(folder / "own"), str(folder / "shared"), 2 * CHUNKS
    tenants = [
        LoadTenant("limited", own, 0, CHUNKS, budget=whole // 2),
        LoadTenant("kept", own, many, CHUNKS),
        LoadTenant("sealed", own, 2 * many, CHUNKS, budget=whole // 2, key=secrets.token_bytes(32)),
        LoadTenant("east", shared, 3 * many, CHUNKS, shared=whole),
        LoadTenant("west", shared, 4 * many, CHUNKS, shared=whole),
    ]
    if remote is not None:
        tenants.append(LoadTenant("remote", own, 5 * many, CHUNKS, budget=whole // 2, remote=remote))
    return tenants


def assigned_tenants(tenants: Sequence[LoadTenant], workers: int) -> list[LoadTenant]:
    """Assigns a tenant to every process: two to the one with a remote store, the others in turns."""
    near = [tenant for tenant in tenants if tenant.remote is None]
    far = [tenant for tenant in tenants if tenant.remote is not None]
    clients = [far[0], far[0]] if far else []
    return clients + [near[number % len(near)] for number in range(workers - len(clients))]


# ------------------------------------------------------------------------------------------------------------ sampling


@dataclasses.dataclass
class LoadSamples:
    """What was sampled while the load ran.

    Attributes:
      seconds: when, since the start.
      memory: resident bytes of every process, by sample and process.
      budgets: by budget: bytes held over the budget, by sample.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: list[list[int]] = dataclasses.field(default_factory=list)
    budgets: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process that no file backs; 0 if it has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * _PAGE


def share_of_budget(folder: Callable[[], int], budget: int, tries: int = 3) -> float:
    """Returns bytes held over a budget; a walk that finds too much is repeated, for files change while it lasts."""
    share = folder() / budget
    for _ in range(tries - 1):
        share = min(share, folder() / budget) if share > 1 else share
    return share


def _budgets_of(tenants: Sequence[LoadTenant]) -> dict[str, tuple[Callable[[], int], int]]:
    budgets: dict[str, tuple[Callable[[], int], int]] = {}
    for tenant in tenants:
        if tenant.budget is not None:
            with tenant.open() as store:
                space = f"{tenant.root}/{store.names.space}"
            budgets[f"tenant {tenant.name}"] = (lambda space=space: _bytes_below(space)), tenant.budget
        if tenant.shared is not None:
            budgets["root shared"] = (lambda root=tenant.root: stored_bytes(root)), tenant.shared
    return budgets


def _bytes_below(folder: str) -> int:
    total = 0
    for above, _, files in os.walk(folder):
        for file in files:
            if file.endswith(".safetensors"):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(f"{above}/{file}").st_size
    return total


def _loaded(
    tenants: Sequence[LoadTenant], assigned: Sequence[LoadTenant], minutes: float, seed: int
) -> tuple[LoadCounts, LoadSamples, int]:
    """Runs the processes. Returns their counts, the samples, and how many did not end."""
    context = multiprocessing.get_context("spawn")
    log = LoadLog.shared(2 * CHUNKS * len(tenants), context)
    ready, results = context.Barrier(len(assigned) + 1), context.Queue()
    budgets = _budgets_of(tenants)
    processes = []
    for number, tenant in enumerate(assigned):
        arguments = (tenant, log, 1000 * seed + number, ready, minutes, results)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
    ready.wait(600)

    counts, samples, received = LoadCounts(), LoadSamples(budgets={name: [] for name in budgets}), 0
    begin = time.monotonic()
    while received < len(processes) and time.monotonic() < begin + 60 * minutes + _PATIENCE:
        if time.monotonic() < begin + 60 * minutes:
            samples.seconds.append(time.monotonic() - begin)
            samples.memory.append([resident_bytes(process.pid or 0) for process in processes])
            for name, (held, budget) in budgets.items():
                samples.budgets[name].append(share_of_budget(held, budget))
        try:
            counts.add(results.get(timeout=_SAMPLE_SECONDS))
            received += 1
        except queue.Empty:
            pass
    hung = len(processes) - received
    for process in processes:
        process.join(5 if not hung else 1)
        process.terminate()
    return counts, samples, hung


# -------------------------------------------------------------------------------------------------------------- verdict


def growth(seconds: Sequence[float | int], nbytes: Sequence[float | int] | np.ndarray) -> float:
    """Returns the growth over the second half of some samples, by the line of least squares, as a share of the mean."""
    half = len(seconds) // 2
    times, values = np.asarray(seconds[half:]), np.asarray(nbytes[half:], float)
    if len(times) < 2 or not values.mean():
        return 0.0
    slope = np.polyfit(times, values, 1)[0]
    return float(slope * (times[-1] - times[0]) / values.mean())


def verdict_rows(counts: LoadCounts, samples: LoadSamples, hung: int) -> list[Row]:
    """Makes the rows that are judged: wrong reads, failures, memory and budgets."""

    def count(metric: str, value: int, **bar: float) -> Row:
        return measured_row(metric, [float(value)], **bar)  # pyright: ignore[reportArgumentType]

    rows = [count("reads checked", sum(counts.reads.values()), at_least=1.0)]
    rows += [count(f"wrong reads: {kind}", counts.wrong[kind], at_most=0.0) for kind in WRONG]
    rows.append(count("processes that did not end", hung, at_most=0.0))
    rows.append(count("failed calls", sum(counts.failures.values()), at_most=0.0))
    rows.append(count("objects moved to quarantine", counts.store["quarantined"], at_most=0.0))

    memory = np.asarray(samples.memory, float).reshape(len(samples.seconds), -1)
    each = [growth(samples.seconds, values) for values in memory.T]
    grown = {
        "of all processes together": growth(samples.seconds, memory.sum(axis=1)),
        "of the process that grew most": max(each, default=0.0),
    }
    for whose, share in grown.items():
        rows.append(measured_row(f"memory added by the second half, {whose}", [share], at_most=MOST_GROWTH[whose]))
    rows.append(measured_row("memory of a process, most", [float(memory.max(initial=0)) / 1e6], unit=" MB"))
    for name, shares in samples.budgets.items():
        rows.append(measured_row(f"bytes over the budget, most, {name}", [max(shares, default=0.0)], at_most=1.0))
    for operation, seconds in sorted(counts.longest.items()):
        rows.append(measured_row(f"longest {operation}", [seconds], unit=" s"))
    return rows


def verdict(result: Mapping[str, Any]) -> str:
    """Says in a sentence what ran and what was missed."""
    config, counts = result["config"], result["counts"]
    missed = [row["metric"] for row in result["rows"] if row.get("passed") is False]
    words = f"{sum(counts['calls'].values()):,} calls by {config['workers']} processes in {config['minutes']:g} minutes"
    words += ", two of them with a remote store" if config["remote"] else ""
    found = f"missed: {'; '.join(missed)}" if missed else "every read right, memory flat, every budget held"
    return f"{words}, {sum(counts['reads'].values()):,} reads checked: {found}."


def format_result(result: Mapping[str, Any]) -> str:
    """Formats the verdict, what was called and what failed as Markdown."""
    rows, counts = result["rows"], result["counts"]
    parts = [rows_table(rows)]
    for head in ("calls", "reads", "failures", "store"):
        lines = [[name, f"{count}"] for name, count in sorted(counts[head].items())]
        parts.append(markdown_table([head, "count"], lines) + "\n")
    parts += [f"- {example}\n" for example in counts["examples"][:20]]
    parts.append(f"{verdict(result)}\n")
    return "\n".join(parts)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the memory of all processes and the shares of the budgets over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    samples = result["samples"]
    left.plot(samples["seconds"], np.asarray(samples["memory"]).sum(axis=1) / 1e9)
    left.set(xlabel="seconds", ylabel="memory of all processes, GB", ylim=(0, None))
    for name, shares in samples["budgets"].items():
        right.plot(samples["seconds"], shares, label=name)
    right.axhline(1.0, color="black", linestyle=":", linewidth=1)
    right.set(xlabel="seconds", ylabel="bytes held over the budget", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


BENCHMARK = Benchmark("store_load", run, table=format_result, draw=draw)
