"""The tables and the figure of docs/experiments/online.md: `python -m evals.online.document out/online`.

Keeps the rows that the page shows in docs/online.json. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..report.documents import ROOT, block
from ..results.tables import markdown_table
from .suite import published

matplotlib.use("Agg")
PAGE, KEPT, PICTURE = Path("docs/experiments/online.md"), Path("docs/online.json"), Path("docs/pictures/online.png")
Results = Mapping[str, Any]
NEVER = "never"


def loops_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Makes the table of the real loops until their shifts."""
    head = [
        "loop",
        "trials beyond the goal",
        "admitted after",
        "bounds at the shift",
        "revisits without a forward, answers 1–200",
        "151–200",
        "the last 50",
        "audits, % of FLOPs (largest)",
        "served approximately",
        "of these beyond their bound",
    ]
    lines = []
    for row in results["loops"]:
        admitted = NEVER
        if row["admitted after answers"] is not None:
            admitted = f"{row['admitted after answers']} answers, {row['admitted after audits']} audits"
        bounds = ", ".join(
            f"{way} {bound:g}" for way, bound in zip(row["trials beyond"], row["bounds"], strict=True) if bound
        )
        trials = ", ".join(
            f"{way} {beyond} of {count}" for way, (beyond, count) in row["trials beyond"].items() if count
        )
        lines.append(
            [
                row["loop"],
                trials,
                admitted,
                bounds or "none",
                *(_of(row[name]) for name in ("hits", "hits late", "hits before shift")),
                f"{100 * row['cost']:.1f} ({100 * row['largest cost']:.1f})",
                str(row["served before"]),
                _share(row["beyond before"], row["served before"]),
            ]
        )
    return head, lines


def shifts_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Makes the table of what happened after the shifts, of the loops that served something before theirs."""
    head = [
        "loop",
        "withdrawn after",
        "first served approximately after the shift at answer",
        "served so",
        "beyond their bound",
        "until withdrawn",
        "beyond in the whole loop, of those served so",
        "of all answers",
    ]
    lines = []
    for row in results["loops"]:
        if row["beyond until withdrawn"] is None:
            continue
        withdrawn = NEVER
        if row["withdrawn after answers"] is not None:
            withdrawn = f"{row['withdrawn after answers']} answers, {row['withdrawn after audits']} audits"
        beyond = row["beyond before"] + row["beyond after"]
        lines.append(
            [
                row["loop"],
                withdrawn,
                NEVER if row["first served after"] is None else str(row["first served after"]),
                str(row["served after"]),
                str(row["beyond after"]),
                str(row["beyond until withdrawn"]),
                _share(beyond, row["served before"] + row["served after"]),
                _share(beyond, row["answers"]),
            ]
        )
    return head, lines


def simulated_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Makes the table of the simulation on measured losses."""
    head = [
        "goal, nats",
        "losses beyond it",
        "seeds that admit it",
        "median audits until then",
        "withdrawals",
        "largest share beyond, of those served so",
        "of all answers",
        "seeds above 10 %, of those served so",
        "of all answers",
    ]
    lines = []
    for row in results["simulated"]:
        largest = row["largest share of served"]
        lines.append(
            [
                f"{row['goal']:g}",
                "as measured" if row["rate"] is None else f"{100 * row['rate']:.3g} %",
                f"{row['admitted']} of {row['seeds']}",
                "–" if row["audits until admitted"] is None else str(row["audits until admitted"]),
                str(row["withdrawals"]),
                "–" if largest is None else f"{100 * largest:.1f} %",
                f"{100 * row['largest share of all']:.1f} %",
                str(row["seeds beyond of served"]),
                str(row["seeds beyond of all"]),
            ]
        )
    return head, lines


def section(kept: Results) -> str:
    """Writes the text between the page's marks."""
    tables = (loops_table(kept), shifts_table(kept), simulated_table(kept))
    return "\n\n".join(markdown_table(*table) for table in tables)


def draw(results: Results, path: Path) -> None:
    """Draws hits, audit cost and the least bound over the answers: the first loop of each kind, a column each."""
    kinds: dict[tuple[str, float], Any] = {}
    for series in results["series"]:
        kinds.setdefault((series["loop"].partition(", seed")[0], series["kl"]), series)
    shown = list(kinds.values())
    figure = Figure(figsize=(3.0 * len(shown), 6.0), layout="constrained")
    panels = figure.subplots(3, len(shown), sharex="col", sharey="row", squeeze=False)
    for series, (hits, cost, bound) in zip(shown, panels.T, strict=True):
        answers = range(1, len(series["hits"]) + 1)
        hits.plot(answers, series["seen"], color="grey", label="revisits")
        hits.plot(answers, series["hits"], color="tab:green", label="without a forward")
        hits.set_title(series["loop"], fontsize=8)
        cost.plot(answers, [100 * share for share in series["cost"]], color="tab:orange")
        cost.axhline(5, color="black", linewidth=0.8, linestyle=":")
        proved = [value if value else float("nan") for value in series["bound"]]
        bound.plot(answers, proved, color="tab:blue", drawstyle="steps-post")
        bound.axhline(series["kl"], color="black", linewidth=0.8, linestyle=":")
        bound.set(yscale="log", ylim=(0.008, 0.7), xlabel="answer")
        for axis in (hits, cost, bound):
            axis.axvline(series["shift at"], color="tab:red", linestyle="--", linewidth=1)
            axis.grid(alpha=0.3)
    panels[0, 0].set_ylabel("sum so far")
    panels[0, 0].legend(fontsize=7)
    panels[1, 0].set_ylabel("audits, % of other FLOPs")
    panels[2, 0].set_ylabel("admitted bound, nats")
    figure.savefig(path, dpi=90)


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page, its figure and docs/online.json."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    kept = published(results)
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE, "online"), encoding="utf-8")
    draw(results, root / PICTURE)


def _of(pair: list[int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else "–"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
