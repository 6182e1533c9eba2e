"""The tables of docs/experiments/segments.md: `python -m evals.segments.document out/segments`.

Keeps the results that the page shows in docs/segments.json. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..results.tables import markdown_table

PAGE, KEPT = Path("docs/experiments/segments.md"), Path("docs/segments.json")
Results = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]


def retrieval_table(results: Results) -> Table:
    """Makes the table of recall by threshold, then by kind and edit for the main threshold."""
    lines = []
    rows = sorted(results["retrieval"], key=lambda row: (row["kind"] != "all", row["kind"], row["edit"]))
    main = min((row["segment"] for row in rows if not row["context"]), default=None)
    for row in rows:
        if row["kind"] != "all" and (row["segment"] != main or row["context"]):
            continue
        lines.append(
            [
                f"{row['segment']:g}",
                f"{row['context']:g}",
                row["kind"],
                row["edit"],
                f"{row['recalled']} of {row['repeats']}",
                _rate(row["recall"]),
                f"{row['milliseconds']:g}",
            ]
        )
    return ["τ_seg", "τ_ctx", "kind", "edit", "recalled", "recall", "ms per prompt"], lines


def settings_table(results: Results) -> Table:
    """Makes the table of the main setting and its ablations."""
    head = [
        "setting",
        "prompts",
        "runs accepted",
        "rejected left, right",
        "of accepted within ε",
        "precision",
        "KL at a run's end: median, 95 %, largest",
        "KL of the prompt's last token",
        "prompts within ε",
        "other argmax",
        "tokens reused",
        "FLOPs saved, net",
        "test",
        "discarded",
    ]
    lines = []
    for row in results["settings"]:
        lines.append(
            [
                row["setting"],
                str(row["prompts"]),
                f"{row['accepted']} of {row['tried']}",
                f"{row['left']}, {row['right']}",
                f"{row['within']} of {row['accepted']}",
                _rate(row["precision"]),
                _triple(row["run kl"]),
                _triple(row["prompt kl"]),
                f"{row['prompts within']} of {row['prompts']}",
                str(row["flips"]),
                f"{row['reused']:.0%}",
                _rate(row["saved"]),
                f"{row['test']:.1%}",
                f"{row['discarded']:.1%}",
            ]
        )
    return head, lines


def baselines_table(results: Results) -> Table:
    """Makes the table of baselines: prefill FLOPs that each saves."""
    return ["arm", "FLOPs saved, net"], [[row["arm"], _rate(row["saved"])] for row in results.get("baselines", [])]


def break_even_table(results: Results) -> Table:
    """Makes the table of the shortest run that pays, if its test passes."""
    rows = results["break_even"]
    layers = list(rows[0]["tokens"])
    lines = [
        [row["test"], *("none" if row["tokens"][at] is None else str(row["tokens"][at]) for at in layers)]
        for row in rows
    ]
    return ["test", *(f"L_reuse = {at}" for at in layers)], lines


def stricter_table(results: Results) -> Table:
    """Makes the table of tests that allow less than the promised ε."""
    lines = []
    for row in results.get("stricter", []):
        within = f"{row['within']} of {row['accepted']}"
        lines.append([f"{row['tested']:g}", str(row["accepted"]), within, _rate(row["precision"])])
    return ["ε of the test", "runs accepted", "within 0.1 nats", "precision"], lines


def lengths_table(results: Results) -> Table:
    """Makes the table of runs by length where every run is tried, whatever it saves."""
    lines = []
    for row in results.get("lengths", []):
        size = f"{row['from']} to {row['to'] - 1}" if row["to"] else f"{row['from']} and more"
        lines.append([size, str(row["runs"]), str(row["accepted"]), f"{row['saves']:.2f}", f"{row['net']:.2f}"])
    return [
        "tokens of a run",
        "runs",
        "accepted",
        "lower layers, GFLOP",
        "saved net of tests and rejections, GFLOP",
    ], lines


def cold_table(results: Results) -> Table:
    """Makes the table of prompts served while the store fills."""
    lines = []
    for row in results["cold"]:
        accepted = f"{row['accepted']} of {row['tried']}"
        size = f"{row['bytes'] / 1e6:.0f}"
        lines.append(
            [
                str(row["prompt"] + 1),
                f"{row['saved']:.1%}",
                accepted,
                str(row["beyond"]),
                str(row["generation"]),
                f"{row['kl']:.2g}",
                size,
            ]
        )
    head = ["prompt", "FLOPs saved, net", "runs accepted", "beyond ε", "largest generation reused", "KL", "store, MB"]
    return head, lines


def sentences(results: Results) -> str:
    """Writes figures that are no table: continuations, stability and seconds."""
    parts = []
    if "continuations" in results:
        row = results["continuations"]
        parts.append(
            f"- **Tool calls.** {row['equal']} of {row['prompts']} greedy continuations have the line of the whole "
            f"prefill, token by token; mean Levenshtein distance {row['distance']:.3f} of the longer line. A call "
            f"as JSON: {row['valid']} with segments, {row['whole valid']} without."
        )
        main = results["settings"][0]
        parts.append(
            f"- **Seconds.** Median per prompt: {main['seconds']:.1f} s with segments, first calls that compile among "
            f"them; {main['whole seconds']:.1f} s for the whole prefill, compiled. Other programs shared the two cores."
        )
    if results["stability"]:
        row = results["stability"]
        parts.append(
            f"- **Stability.** Mean Levenshtein distance between three runs over stores of other transcripts: "
            f"{row['served']:.3f} of the longer line; without reuse {row['whole']:.3f}."
        )
    config = results["config"]
    parts.append(f"- **Parts** of the plan that were measured: {config['parts_done']} of {config['parts']}.")
    return "\n".join(parts)


def section(kept: Results) -> str:
    """Writes the text between the page's marks."""
    titles = {
        "**Retrieval**": retrieval_table,
        "**Settings**": settings_table,
        "**Stricter tests of the same promise**, of the main setting's runs": stricter_table,
        "**Baselines**, over the same prompts and warm store": baselines_table,
        "**Break-even length**, in tokens with both halos, 300 tokens into a prompt": break_even_table,
        "**Runs by length**": lengths_table,
        "**A store that is empty at first**": cold_table,
    }
    parts = []
    for title, table in titles.items():
        head, lines = table(kept)
        if lines:
            parts.append(f"{title}\n\n{markdown_table(head, lines)}")
    parts.append(sentences(kept))
    return "\n\n".join(parts).rstrip()


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/segments.json."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    (root / KEPT).write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(results), root / PAGE, "segments"), encoding="utf-8")


def _rate(shown: Sequence[float | None] | None) -> str:
    if shown is None or shown[0] is None:
        return "–"
    if shown[1] is None:
        return f"{shown[0]:.1%}"
    return f"{shown[0]:.1%} [{shown[1]:.1%}, {shown[2]:.1%}]"


def _triple(values: Sequence[float] | None) -> str:
    return "–" if values is None else ", ".join(f"{value:.2g}" for value in values)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
