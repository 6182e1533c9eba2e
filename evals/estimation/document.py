"""The tables of docs/experiments/estimation.md: `python -m evals.estimation.document out/estimation`.

Keeps the rows that the page shows in docs/estimation.json. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..results.intervals import Interval
from ..results.rows import Rows, rounded_row
from ..results.tables import markdown_table
from .contexts import PROSE
from .similarity import PAIRS as PAIR_NAMES
from .suite import ESTIMATES, PAIRS, RECALLED, STRUCTURE

PAGE, KEPT = Path("docs/experiments/estimation.md"), Path("docs/estimation.json")
Results = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]
SHOWN = {
    STRUCTURE: (
        *("keys", "keys_by_head", "rank", "antecedent_tokens", "residual", "kv", "share_90", "count", "eta.chain"),
        *("eta.next", *(f"recall.{share:g}" for share in RECALLED)),
    ),
    PAIRS: ("deficit", "correlation"),
    ESTIMATES: (
        *("eta.chain", "eta.next", "eta.aggregate", "first_k.eta.chain", "first_k.eta.next", "kl.page", "explained"),
        *("less_first_k.kl.chain", "less_first_k.kl.next", "serving_flops", "stored_bytes", "forming_forwards"),
    ),
}
"""Metrics that the page shows."""


def models_of(results: Results) -> list[str]:
    """Lists the backbones of a run of which something was measured."""
    measured = {row["model"] for row in results["rows"]}
    return [model for model in results_names(results) if model in measured]


def results_names(results: Results) -> list[str]:
    """Lists the backbones that a run was asked for."""
    return results["config"]["model"].split(", ")


def scored_kind(model: str) -> str:
    """Names the kind of question that a backbone's estimates are judged by."""
    return "next" if model == PROSE else "chain"


def structure_table(results: Results) -> Table:
    """Makes the table of landmark keys and cells of heads."""
    lines = []
    for model in models_of(results):
        rows = Rows(results, model)
        kind = scored_kind(model)
        keys, behind = rows.get(STRUCTURE, "landmarks", "keys"), rows.get(STRUCTURE, "landmarks", "antecedent_tokens")
        cells = [rows.get(STRUCTURE, f"deficit in {share} of cells", f"eta.{kind}") for share in ("25%", "50%", "75%")]
        lines.append(
            [
                model,
                f"{_number(keys, 1)} of {behind.value:.0f}",
                _number(rows.get(STRUCTURE, "landmarks", "keys_by_head"), 1),
                _number(rows.get(STRUCTURE, "landmarks", "rank"), 1),
                f"{_percent(rows.get(STRUCTURE, 'cells', 'share_90'))} of "
                f"{rows.get(STRUCTURE, 'cells', 'count').value:.0f}",
                *(_number(cell) for cell in cells),
            ]
        )
    return [
        "backbone",
        "landmark keys (90 %)",
        "of one head",
        "rank of the link (90 %)",
        "cells with 90 % of ‖Δ‖²",
        "η of Δ in the best 25 % of cells",
        "50 %",
        "75 %",
    ], lines


def injection_table(results: Results) -> Table:
    """Makes the table of the last layer's deficit that an injection at one layer brings."""
    lines, most = [], 0
    for model in models_of(results):
        rows = Rows(results, model)
        arms = rows.arms(STRUCTURE, "injection")
        most = max(most, len(arms))
        for metric, name in (("residual", "the residual"), ("kv", "KV of one layer")):
            cells = []
            for arm in arms:
                value = rows.get(STRUCTURE, arm, metric)
                layer = arm.partition("layer ")[2]
                cells.append(f"{layer}: {value.value:.2f}" if value.n else f"{layer}: –")
            lines.append([model, name, *cells])
    return ["backbone", "injected", *(f"layer {number + 1}" for number in range(most))], [
        line + ["–"] * (most + 2 - len(line)) for line in lines
    ]


def selectors_table(results: Results) -> Table:
    """Makes the table of cheap selectors: recall of the tokens with the largest deficit."""
    models = models_of(results)
    names = Rows(results, models[0]).arms(STRUCTURE, "selector: ")
    lines = []
    for name in names:
        line = [name.partition(": ")[2]]
        for model in models:
            found = [Rows(results, model).get(STRUCTURE, name, f"recall.{share:g}") for share in RECALLED]
            line.append(f"{found[0].value:.2f}, {_number(found[1])}")
        lines.append(line)
    return ["tokens chosen by", *models], lines


def pairs_table(results: Results) -> Table:
    """Makes the table of pairs of pages: size of the deficit by pair, then rank correlations with its size."""
    models = [model for model in models_of(results) if Rows(results, model).arms(PAIRS)]
    lines = []
    for name in PAIR_NAMES:
        lines.append([name, *(_number(Rows(results, model).get(PAIRS, name, "deficit")) for model in models)])
    for name in ("motion", "frame_similarity", "embedding_difference"):
        found = [Rows(results, model).get(PAIRS, name, "correlation") for model in models]
        lines.append([f"correlation with {name.replace('_', ' ')}", *map(_number, found)])
    return ["antecedent of a page", *models], lines


def estimates_table(results: Results) -> Table:
    """Makes the main table: η of every estimate by backbone, beside that of first-k at no more FLOPs."""
    models = [model for model in models_of(results) if Rows(results, model).arms(ESTIMATES)]
    lines = []
    for arm in _estimates(results, models):
        line = [arm]
        for model in models:
            rows, kind = Rows(results, model), scored_kind(model)
            cell = _number(rows.get(ESTIMATES, arm, f"eta.{kind}"))
            beside = rows.get(ESTIMATES, arm, f"first_k.eta.{kind}")
            if beside.n:
                cell += f" {_sign(rows.get(ESTIMATES, arm, f'less_first_k.kl.{kind}'))} {_bare(beside)}"
            line.append(cell)
        lines.append(line)
    return ["η of an estimate of Δ", *(f"{model}, {scored_kind(model)}" for model in models)], lines


def costs_table(results: Results) -> Table:
    """Makes the table of costs: FLOPs of one reuse, bytes per antecedent, forwards ahead."""
    models = [model for model in models_of(results) if Rows(results, model).arms(ESTIMATES)]
    lines = []
    for arm in _estimates(results, models):
        line = [arm]
        for model in models:
            rows = Rows(results, model)
            flops, stored = (rows.get(ESTIMATES, arm, metric) for metric in ("serving_flops", "stored_bytes"))
            forwards = rows.get(ESTIMATES, arm, "forming_forwards")
            line.append(f"{_percent(flops)}; {_percent(stored)}; {forwards.value:.1f}" if flops.n else "–")
        lines.append(line)
    return ["FLOPs; bytes; forwards ahead", *models], lines


def effects_table(results: Results) -> Table:
    """Makes the table of side effects: share of ‖Δ‖², η of aggregate questions, KL of direct reading of the page."""
    models = [model for model in models_of(results) if Rows(results, model).arms(ESTIMATES)]
    lines = []
    for arm in _estimates(results, models):
        line = [arm]
        for model in models:
            rows = Rows(results, model)
            found = [rows.get(ESTIMATES, arm, metric) for metric in ("explained", "eta.aggregate")]
            page = rows.get(ESTIMATES, arm, "kl.page")
            line.append("; ".join([*map(_bare, found), f"{page.value:.2g}" if page.n else "–"]))
        lines.append(line)
    return ["‖Δ‖² explained; η, aggregate; KL of direct reading, nats", *models], lines


def _estimates(results: Results, models: Sequence[str]) -> list[str]:
    """Lists the estimates of all backbones, in order."""
    names: dict[str, None] = {}
    for model in models:
        names.update(dict.fromkeys(Rows(results, model).arms(ESTIMATES)))
    return list(names)


def summary(results: Results) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    rows = [row for row in results["rows"] if row["metric"] in SHOWN[row["probe"]]]
    # By layer, landmarks are in the run's own file.
    rows = [row for row in rows if not row["arm"].startswith("landmarks, ")]
    config = {name: results["config"][name] for name in ("model", "plan", "parts_done", "parts")}
    return {"config": config, "rows": [rounded_row(row) for row in rows]}


def section(kept: Results) -> str:
    """Writes the text between the page's marks."""
    tables: Sequence[tuple[str, Table]] = (
        ("Estimates", estimates_table(kept)),
        ("What they cost", costs_table(kept)),
        ("What else they do", effects_table(kept)),
        ("Landmark keys and heads", structure_table(kept)),
        ("Injection into one layer", injection_table(kept)),
        ("Cheap selectors", selectors_table(kept)),
        ("Likeness of antecedent and chunk", pairs_table(kept)),
    )
    parts = [f"### {title}\n\n{markdown_table(*table)}" for title, table in tables]
    unmeasured = [name for name in results_names(kept) if not Rows(kept, name).arms(ESTIMATES)]
    if unmeasured:
        parts.insert(0, f"No estimates are measured yet of: {', '.join(unmeasured)}.")
    return "\n\n".join(parts)


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/estimation.json."""
    kept = summary(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE, "estimation"), encoding="utf-8")


def _number(value: Interval, digits: int = 2) -> str:
    """Writes a value with its interval."""
    if not value.n or value.value != value.value:
        return "–"
    if value.low != value.low:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _bare(value: Interval) -> str:
    return f"{value.value:.2f}" if value.n and value.value == value.value else "–"


def _percent(value: Interval) -> str:
    if not value.n:
        return "–"
    share = 100 * value.value
    return f"{share:.1f} %" if share < 10 else f"{share:.0f} %"


def _sign(less: Interval) -> str:
    """Writes > where an estimate's KL is less than first-k's beyond the interval of the difference, < where more."""
    if less.high < 0:
        return ">"
    return "<" if less.low > 0 else "≈"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
