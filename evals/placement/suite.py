"""Placement over traces, and cascades on a small model: rows, a table, figures.

Policies are compared on the forming cost of whole traces, in FLOPs of Qwen2.5-VL-7B's shape. What an online policy may
see ends with the request it serves. Seeds 100 and above were looked at while policies were chosen; these are 0 and on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.traces import Trace
from kvpatch_jax.window import Entry

from ..results.environment import environment
from ..results.intervals import ratio
from ..results.parts import make_out
from ..results.tables import markdown_table
from . import cascade_fidelity, figures
from .offline_schedule import optimum, schedule
from .prefix_cache import serve_by_prefix
from .synthetic_traces import KINDS, canonical_bytes, released_costs, requests_of, synthetic_trace
from .trace_replay import ARRIVAL, LEAST_RECENT, ONLINE, Terms, WindowRequest, replay, total

POLICIES = ("arrival", "LRU", "prefix cache", "prefix cache, ordered", "online", "offline")
BUDGETS = {"ample": None, "scarce": 0.3}
"""Bytes of the store, as a share of the canonicals of all chunks of a trace; None: all there is to store."""
SOLVED_BAR = 1.2
"""Offline over the exact optimum, where that can be found."""
Row = dict[str, Any]


def run(*, seed: int = 0, out: str | None = None, quick: bool = False, traces: Sequence[str] = ()) -> dict[str, Any]:
    """Measures all of it.

    Args:
      seed: the first of the traces' seeds.
      out: folder of the figures; None draws none.
      quick: two traces of each kind, and nothing that runs a model: a preview, not a measurement.
      traces: files of recorded traces, measured beside those that are drawn.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        make_out(folder)
    count = 2 if quick else 6
    rows: list[Row] = []
    for kind in KINDS:
        rows += compared(kind, [synthetic_trace(kind, seed + number) for number in range(count)])
        print(f"{kind}: replayed", flush=True)

    for path in traces:
        rows += compared(Path(path).stem, [Trace.read(path)])
    solved = against_the_optimum(seed, 2 if quick else 8)
    result = {
        "config": {"seed": seed, "quick": quick, "traces": count, "recorded": [str(path) for path in traces]},
        "environment": environment(),
        "rows": rows,
        "solved": solved,
        "cascade": {} if quick else cascade_fidelity.measure(seed),
    }
    if folder is not None:
        figures.draw(result, folder)
    return result


# -------------------------------------------------------------------------------------------------------- traces


def compared(kind: str, traces: Sequence[Trace]) -> list[Row]:
    """Serves traces of one kind by every policy under every budget; returns a row for each budget."""
    costs, rows = released_costs(), []
    for budget, share in BUDGETS.items():
        forming: dict[str, list[float]] = {}
        clusters: list[int] = []

        for number, trace in enumerate(traces):
            requests = requests_of(trace, costs)
            clusters += [number] * len(requests)
            store = None if share is None else int(share * canonical_bytes(requests, costs))
            promise = "remember" if trace.parameters.get("promise", "remember") == "remember" else "forget"
            terms = Terms(costs, store, promise=promise)
            served = {
                "arrival": replay(requests, terms, ARRIVAL),
                "LRU": replay(requests, terms, LEAST_RECENT),
                "online": replay(requests, terms, ONLINE),
                "offline": list(schedule(requests, terms).served),
            }
            # A prefix cache holds the window that is read; ours has the pool for that, beside the store.
            sizes = [request.tokens for request in requests]
            tree = None if store is None else store + costs.kv_bytes * max(sizes)
            values = {
                "prefix cache": serve_by_prefix(requests, terms, budget=tree),
                "prefix cache, ordered": serve_by_prefix(requests, terms, budget=tree, ordered=True),
                "re-prefill": [terms.forward(size, 0) for size in sizes],
            }
            for name, windows in served.items():
                values[name] = [window.forming for window in windows]
            for name, taken in values.items():
                forming.setdefault(name, []).extend(taken)

        row: Row = {"kind": kind, "budget": budget, "requests": len(clusters), "traces": len(traces)}
        columns = {name: np.array(values, np.float64) for name, values in forming.items()}
        row["of re-prefill"] = {}
        for name in POLICIES:
            interval = ratio(columns[name], columns["re-prefill"], np.array(clusters))
            row["of re-prefill"][name] = {"value": interval.value, "low": interval.low, "high": interval.high}
        rows.append(row)

    return rows


def against_the_optimum(seed: int, count: int) -> list[Row]:
    """Schedules traces that are small enough for the exact optimum: four windows of three of four pages."""
    costs, rows = released_costs(), []
    lead = Entry("system", "system", 64, 64, "text")
    for budget, share in BUDGETS.items():
        for number in range(count):
            random = np.random.default_rng([seed + number, 7])
            sizes = random.integers(500, 1100, 4)
            requests = []

            for _ in range(4):
                chosen = [int(page) for page in random.permutation(4)[:3]]
                pages = []
                for page in chosen:
                    size = int(sizes[page])
                    pages.append(Entry(f"{page}", f"{page}", size, size, order_free=True))
                requests.append(WindowRequest(f"session {random.integers(2)}", (lead, *pages)))

            # A larger share than elsewhere: below it nothing could be kept of so few pages.
            room = None if share is None else int(2 * share * canonical_bytes(requests, costs))
            terms = Terms(costs, room)
            best, found = optimum(requests, terms), schedule(requests, terms).cost
            online = total(replay(requests, terms, ONLINE))
            rows.append({"budget": budget, "optimum": best, "offline": found / best, "online": online / best})

    return rows


# --------------------------------------------------------------------------------------------------------- tables


def table(result: dict[str, Any]) -> str:
    """Formats the result as Markdown."""
    lines = []
    for row in result["rows"]:
        shown = []
        for name in POLICIES:
            value, low, high = (row["of re-prefill"][name][key] for key in ("value", "low", "high"))
            shown.append(f"{value:.2f} ({low:.2f}–{high:.2f})" if np.isfinite(low) else f"{value:.2f}")
        lines.append([row["kind"], row["budget"], *shown])
    parts = ["Forming cost over that of re-prefill (95 % interval over traces):"]
    parts.append(markdown_table(("trace", "store", *POLICIES), lines))

    lines = []
    for budget in BUDGETS:
        for name in ("offline", "online"):
            found = [row[name] for row in result["solved"] if row["budget"] == budget]
            within = ("yes" if max(found) <= SOLVED_BAR else "no") if name == "offline" else ""
            lines.append([budget, name, f"{np.mean(found):.3f}", f"{max(found):.3f}", str(len(found)), within])
    parts.append("Cost over the exact optimum's, on traces where that can be found:")
    parts.append(markdown_table(("store", "policy", "mean", "worst", "traces", f"all within {SOLVED_BAR}"), lines))
    if result["cascade"]:
        parts.append(cascade_fidelity.table(result["cascade"]))
    return "\n\n".join(parts) + "\n"
