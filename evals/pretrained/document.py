"""The page docs/experiments/pretrained.md: the results of the suite on real weights, written from a run.

    python -m evals.pretrained.document out/pretrained

keeps the rows that the page shows in docs/pretrained.json, draws its figures, and writes the page from these rows.
"""

import itertools
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..harness.frame import Row, Rows
from ..harness.tables import markdown_table
from ..report.documents import filled
from .arms import COSTS
from .plan import TASKS
from .report import cells, counted, draw_figures, show, titles, verdict
from .rows import EVERY_ARM

DOCS = Path(__file__).parents[2] / "docs"
SUMMARY, PAGE, PICTURES = "pretrained.json", "experiments/pretrained.md", "pictures"
PATCH = "patch.rank=16"
"""The patch that other arms are compared with."""
FIGURES = {
    "stored": "η against what an arm keeps: for this place of reuse alone (above), and with its share of the canonical "
    "(below). Bars: 95 %, documents resampled.",
    "serving": "η against FLOPs of a reuse; what is paid once is shared by 1, 3 and 10 reuses.",
    "depth": "The deficit by layer, ‖Δ‖ / ‖KV‖, of keys and of values.",
}
KEPT = ("eta", "kl", "flips", "loss_difference", "canonical", "stored", "serving", "forming")
COLUMNS = ("eta", "kl", "canonical", "stored", "serving", "forming")
"""Of the table of arms."""
ARMS = (
    *(f"patch.rank={rank}" for rank in (8, 16, 32, 64)),
    "patch.int8.rank=16",
    "pooled.rank=16",
    *(f"kv.bits={bits}" for bits in (3, 4, 8)),
    "kv.svd.rank=32",
    "shadowkv.rank=32",
    "residual.layer=8",
    *(f"{name}.budget=0.15" for name in ("first_k", "cacheblend", "kvshare", "vlcache")),
    *(f"{name}.budget=0.15" for name in ("query_aware", "prophetkv", "random")),
    "blind",
)
"""The lines of the table of arms; docs/pretrained.json has all."""
CASES = {
    "reorder": "other orders",
    "drift.dropped and doubled": "one piece dropped, one doubled",
    "drift.replaced 1": "one of three pieces replaced",
    "drift.replaced 3": "all pieces replaced",
    "slide": "the first piece leaves",
}
"""Probes of changed antecedents, by what changes."""


def kept_rows(results: Mapping[str, Any], metrics: Mapping[str, Collection[str]]) -> list[Row]:
    """Picks the rows of these probes and metrics out of results.json, numbers to five places."""
    rows = []
    for row in results["rows"]:
        if row["metric"] in metrics.get(row["probe"], ()):
            numbers = {name: row[name] for name in ("value", "low", "high") if row[name] is not None}
            rows.append({**row, **{name: round(number, 5) for name, number in numbers.items()}})
    return rows


def write_kept(found: Mapping[str, Any], path: Path) -> None:
    """Writes what a page was made of as JSON, a row a line."""
    head = {name: value for name, value in found.items() if name != "rows"}
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found["rows"])
    path.write_text(f'{json.dumps(head, ensure_ascii=False)[:-1]}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    metrics = {
        "text": {*KEPT, "loss"},
        EVERY_ARM: {*KEPT, "documents"},
        "deficit": {"relative_norm"},
        "greedy": {"greedy_tokens", "greedy_all"},
    }
    metrics |= {f"behaviour.{task}": {"right", "chosen", "tokens", "agrees"} for task in TASKS}
    metrics |= {probe: {"eta", "kl", "flips", "loss_difference"} for probe in CASES}
    config = {name: results["config"][name] for name in ("model", "parts_done", "parts", "plan", "licences")}
    return {"config": config, "cpu_seconds": round(results["cpu_seconds"]), "rows": kept_rows(results, metrics)}


def page(found: Mapping[str, Any]) -> str:
    """Writes the page from a summary."""
    rows, config = Rows(found), found["config"]
    measured = f"Measured by `python -m evals.run --suite=pretrained` in {found['cpu_seconds']} CPU s."
    if config["parts_done"] < config["parts"]:
        done, count = f"{config['parts_done']} of {config['parts']}", rows.get("text", "blind", "kl").n
        measured = f"**Not finished: {done} parts were run**, {count} passages. {measured}"
    packages = "; ".join(f"{name}: {licence}" for name, licence in config["licences"].items())
    blocks = [
        "# Real weights",
        verdict(rows),
        measured,
        *_arms(rows),
        _picture("stored"),
        _picture("serving"),
        *_plain_text(rows),
        *_depth(rows),
        *_antecedents(rows),
        *_answers(rows),
        f"Arms and intervals that a table leaves out are in `docs/pretrained.json`. Text and its licences: {packages}. "
        f"Weights: {config['model']}.",
    ]
    as_is = ("|", "#", "!", "<!--")
    return "\n\n".join(part if part.startswith(as_is) else filled(part) for part in blocks) + "\n"


def ordered(rows: Rows, probe: str) -> list[str]:
    """Lists the arms of a probe, those that remove most of blind reuse's KL first."""
    arms = [arm for arm in rows.arms(probe) if arm != "re-prefill" and rows.get(probe, arm, "eta").n]
    return sorted(arms, key=lambda arm: -rows.get(probe, arm, "eta").value)


def _arms(rows: Rows) -> Iterator[str]:
    """Shows what the main arms remove and cost, and the patch beside what removes more or keeps fewer bytes."""
    arms = ordered(rows, EVERY_ARM)
    yield "## What each arm removes and costs"
    yield f"All arms were measured on {counted(rows)}. Intervals resample these few documents, so they are rough."

    if PATCH in arms:
        eta, stored = rows.get(EVERY_ARM, PATCH, "eta"), rows.get("text", PATCH, "stored").value
        better = []
        for arm in arms[: arms.index(PATCH)]:
            if not arm.startswith("patch."):
                overlaps = rows.get(EVERY_ARM, arm, "eta").low <= eta.high
                better.append(f"{arm}{' (intervals overlap)' if overlaps else ''}")
        yield (
            f"The patch of rank 16 stores {100 * stored:.0f} % of the passage's KV beside the canonical and removes η "
            f"{show(eta, places=2)}. Other kinds of arm that remove more: {', '.join(better) or 'none'}."
        )

        # In bytes: from how many places of reuse on, the patch and its canonical are fewer than KV at four bits.
        few = rows.get("text", "kv.bits=4", "stored").value
        if np.isfinite(few):
            first = (
                f"For a single place of reuse, kv.bits=4 keeps {100 * few:.0f} % of the passage's KV and the patch of "
                f"rank 16 with its canonical {100 * (1 + stored):.0f} %"
            )
            places = (
                f"; from {int(1 / (few - stored)) + 1} places on, the patch keeps fewer bytes." if few > stored else ""
            )
            yield first + (places or ", and each further place takes the patch no fewer bytes.")

    lines = []
    measured, costs = [name for name in COLUMNS if name not in COSTS], [name for name in COLUMNS if name in COSTS]
    for arm in arms:
        if arm in ARMS:
            figures = cells(rows, EVERY_ARM, arm, measured, measured[1:]) + cells(rows, "text", arm, costs, costs)
            lines.append([arm, *figures])
    yield markdown_table(["arm", *titles(COLUMNS)], lines)
    yield (
        "Shares are of the passage's KV at 16 bits, and of re-prefilling it. Token ids, from which passages are run "
        "again, count as no bytes. The canonical is kept once for all places of reuse; arms `kv.…` and `shadowkv` keep "
        "KV(B|A) of one place instead, and `residual.layer=…` the residual that entered a layer instead of the KV "
        "above it. [Evaluation](evaluation.md#real-weights) describes the arms."
    )


def _picture(name: str) -> str:
    return f"![{FIGURES[name]}](../pictures/pretrained_{name}.png)"


def _plain_text(rows: Rows) -> Iterator[str]:
    """Shows what a reader of the text would notice: its loss, and the model's decisions."""
    yield "## What plain text loses"
    metrics = ("loss", "loss_difference", "kl", "flips")
    lines = [["re-prefill", *cells(rows, "text", "re-prefill", metrics[:1]), "–", "–", "–"]]
    for arm in ("blind", "patch.rank=8", PATCH, "patch.rank=32"):
        lines.append([arm, *cells(rows, "text", arm, metrics)])
    yield markdown_table(["arm", *titles(metrics)], lines)


def _depth(rows: Rows) -> Iterator[str]:
    """Shows the deficit's size at seven depths."""
    yield "## The deficit by depth"
    layers = sorted({int(arm.removeprefix("layer=").partition(".")[0]) for arm in rows.arms("deficit", "layer=")})
    if not layers:
        return

    picked = sorted({layers[round(share * (len(layers) - 1))] for share in np.linspace(0, 1, 7)})
    lines = []
    for channel in ("k", "v"):
        norms = [rows.get("deficit", f"layer={layer}.{channel}", "relative_norm").value for layer in picked]
        lines.append([channel, *(f"{norm:.2f}" for norm in norms)])
    yield markdown_table(["‖Δ‖ / ‖KV‖", *(f"layer {layer}" for layer in picked)], lines)
    yield _picture("depth")


def _antecedents(rows: Rows) -> Iterator[str]:
    """Shows the probes in which the passage's antecedent changes."""
    metrics = ("eta", "kl", "flips", "loss_difference")
    lines = []
    for probe, case in CASES.items():
        for arm in rows.arms(probe):
            count = rows.get(probe, arm, "eta").n
            if arm != "re-prefill" and count:
                lines.append([case, arm, *cells(rows, probe, arm, metrics, metrics[1:]), str(count)])

    yield "## Changed antecedents"
    if lines:
        yield "Against a re-prefill of the passage after its new antecedent."
        yield markdown_table(["antecedent", "arm", *titles(metrics), "n"], lines)
    missing = [case for probe, case in CASES.items() if not rows.arms(probe)]
    if missing:
        yield f"Not among the parts that were run: {'; '.join(missing)}."


def _answers(rows: Rows) -> Iterator[str]:
    """Shows how far greedy continuations and answers to questions are re-prefill's, a line per arm."""
    columns = {"greedy tokens": ("greedy", "greedy_tokens")} | {task: (f"behaviour.{task}", "agrees") for task in TASKS}
    run = {title: column for title, column in columns.items() if rows.arms(column[0])}
    yield "## Continuations and answers"

    if run:
        counts = {title: rows.get(probe, "re-prefill", metric).n for title, (probe, metric) in run.items()}
        said = [f"{title}: n = {count}" for title, count in counts.items()]
        # Said once where all have as many.
        if len(set(counts.values())) == 1:
            said = [f"n = {next(iter(counts.values()))} of each"]
        yield (
            "Shares of greedy tokens up to the first that differs from re-prefill's, and of answers that agree with "
            f"re-prefill's. {', '.join(said)}."
        )

        lines = []
        for arm in dict.fromkeys(itertools.chain.from_iterable(rows.arms(probe) for probe, _ in run.values())):
            found = [rows.get(probe, arm, metric) for probe, metric in run.values()]
            if all(interval.n for interval in found) and arm != "re-prefill":
                lines.append([arm, *(f"{interval.value:.2f}" for interval in found)])
        yield markdown_table(["arm", *run], lines)

    probes = {"greedy": "greedy continuations", **{f"behaviour.{task}": f"behaviour: {task}" for task in TASKS}}
    missing = [name for probe, name in probes.items() if not rows.arms(probe)]
    if missing:
        yield f"Not among the parts that were run: {'; '.join(missing)}."


def write(out: Path, docs: Path = DOCS) -> Path:
    """Writes summary, figures and page from a run's results.json; returns the page."""
    found = summary(json.loads((out / "results.json").read_text(encoding="utf-8")))
    write_kept(found, docs / SUMMARY)
    (docs / PICTURES).mkdir(exist_ok=True)
    draw_figures(Rows(found), docs / PICTURES, FIGURES, "pretrained_")
    (docs / PAGE).parent.mkdir(exist_ok=True)
    (docs / PAGE).write_text(page(json.loads((docs / SUMMARY).read_text(encoding="utf-8"))), encoding="utf-8")
    return docs / PAGE


if __name__ == "__main__":
    print(f"page: {write(Path(sys.argv[1]))}")
