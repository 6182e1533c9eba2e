"""The report of the sheets and documents tasks: table.md, figures, report.html, and what a task's guide says of a run.

`python -m evals.report.task_report out/run` puts a finished run into the guide of its kind of instances, what the guide
shows of its rows into docs/KIND-results.json and its figures into docs/pictures. A test holds the guides against those
files.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.frame import VISIBLE, Rows, rounded_row
from ..harness.tables import markdown_table
from ..results.costs import AMORTISED, AXES, TOGETHER
from ..results.headline import seeds_of
from .comparison import smallest_rank
from .documents import ROOT, filled, publish
from .drawing import hero_figure, pareto_figures
from .figures import MULTI_HOP, Results, arm_label
from .page import picture, template
from .summary import NO_WINDOW
from .table import ProbeTable
from .verdict import COSTS, first_arms, verdict
from .wording import blind_losses, number, share

KINDS = ("sheets", "sheets_qwen3_vl", "sheets_qwen3_5", "documents")
"""Folders of instances that ship; each kind has a guide of its own."""
GUIDES = {
    "sheets": Path("docs/experiments/sheets-task.md"),
    "sheets_qwen3_vl": Path("docs/experiments/sheets-task-qwen3-vl.md"),
    "sheets_qwen3_5": Path("docs/experiments/hybrids.md"),
    "documents": Path("docs/experiments/documents-task.md"),
}
KEPT = {kind: Path(f"docs/{kind}-results.json") for kind in KINDS}
PICTURES = ("hero", "pareto_kept_1", "pareto_kept_16", "pareto_serving_flops")
MAIN_ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=8",
    "patch.rank=16",
    "patch.rank=32",
    "patch.every_chunk.rank=16",
    "patch.rows_only.rank=16",
    "patch.transition_only.whole",
    "patch.whole_transition.rank=16",
    "cacheblend.budget=0.15",
    "query_attention.budget=0.15",
    "pooled.rank=8",
    "svd.rank=16",
    "residual.layer=1",
    "quantised.bits=3",
)
"""The arms of a guide's table, beside whatever beats the patch."""
SIZES_PATCH = "patch.rank=16"
"""The patch that a guide's table of context sizes shows."""


class Bar(NamedTuple):
    """A bar that was set before the runs: what is held against it, what was measured, whether it is met."""

    what: str
    measured: str
    met: bool


def of_probe(results: Results, probe: str | None = None, model: str | None = None) -> dict[str, Any]:
    """Makes the results whose main comparison is that of contexts of one probe, so that the main report's words fit."""
    config = results["config"]
    name = f"{config['task']}.{probe or next(iter(config['probes']))}"
    rows = [{**row, "probe": VISIBLE} for row in results["rows"] if row["probe"] == name]
    return {**results, "config": {**config, "model": model or Rows(results).model}, "rows": rows}


def write_report(results: Results, folder: Path) -> str:
    """Writes table.md, figures/ and report.html; returns the text of the first."""
    text = markdown(results)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    main, figures, probes, deficits = of_probe(results), folder / "figures", [], []
    for probe, title in results["config"]["probes"].items():
        rows = Rows(of_probe(results, probe))
        probes.append((probe, title, _finding(results, probe), _accuracies(rows)))
        deficits.append((title, _deficit(rows)))

    drawn = [*hero_figure(main, figures), *pareto_figures(main, figures)]
    page = template("sheets.html.j2").render(
        task=results["config"]["task"],
        model=Rows(results).model,
        verdict=verdict(main),
        beside=[caveat.replace("`", "") for caveat in _caveats(results)],
        hero=[picture(path) for path in drawn[:1]],
        pictures=[picture(path) for path in drawn[1:]],
        bars=bars(results),
        first=_accuracies(Rows(main), first_arms(main)),
        probes=probes,
        deficit=deficits,
        settings=results["config"],
        environment=results.get("environment", {}),
        command=results["config"]["command"],
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    return text


def markdown(results: Results) -> str:
    """Writes what a run found, as the guide has it: verdict, bars, the main arms, and contexts of each size.

    Every arm's figures are in the guide's file of results and in report.html.
    """
    main, kinds, probes = of_probe(results), results["config"]["questions"], results["config"]["probes"]
    held = bars(results)
    missed = [f"{bar.what} ({bar.measured})" for bar in held if not bar.met]
    met = f"Of {len(held)} bars that were set before the runs {len(held) - len(missed)} are met"
    parts = [" ".join(verdict(main)), *_caveats(results), f"{met}{'; not met: ' if missed else ''}{'; '.join(missed)}."]

    rows, lines = Rows(main), []
    for arm in rows.arms(VISIBLE):
        if arm in {*MAIN_ARMS, *first_arms(main)}:
            right = [number(rows.accuracy(arm, kind).value) for kind in kinds]
            kept_bytes = ", ".join(share(rows.get(VISIBLE, arm, metric).value) for metric in TOGETHER)
            work = share(rows.get(VISIBLE, arm, "serving_flops").value)
            lines.append([f"`{arm}`", *right, kept_bytes, work])
    head = ("arm", *kinds, "kept, N = 1, 4, 16", "serving FLOPs")
    first, title = next(iter(probes.items()))
    parts += [f"**{title}.** {_finding(results, first)}", markdown_table(head, lines), *_sizes(results)]
    return "\n\n".join(part if part.startswith("|") else filled(part) for part in parts)


def _sizes(results: Results) -> list[str]:
    """Sets contexts of all sizes beside each other: the smallest sufficient rank, and what needs page and sheets."""
    lines = []
    for probe, title in results["config"]["probes"].items():
        of_size = of_probe(results, probe)
        rows = Rows(of_size)
        right = [
            number(rows.accuracy(arm, kind).value) for kind in MULTI_HOP for arm in ("re-prefill", "blind", SIZES_PATCH)
        ]
        lines.append([title, str(smallest_rank(of_size, VISIBLE) or "none"), *right])
    columns = [f"{kind}, {way}" for kind in MULTI_HOP for way in ("re-prefill", "blind", "rank 16")]
    return [] if len(lines) < 2 else [markdown_table(("contexts", "smallest sufficient rank", *columns), lines)]


def bars(results: Results) -> list[Bar]:
    """Holds a run against the bars that were set before it, contexts of four chunks."""
    main = of_probe(results)
    rows, rank, seeds = Rows(main), smallest_rank(main, VISIBLE), len(seeds_of(results)) or 1
    chain, aggregate = (rows.accuracy("re-prefill", kind).value for kind in MULTI_HOP)
    lost = {kind: -rows.gap(VISIBLE, "blind", kind) for kind in MULTI_HOP}
    worst = worst_class_share(results)
    return [
        Bar("training seeds: at least three", str(seeds), seeds >= 3),
        Bar("re-prefill, chain: at least .95", number(chain), chain >= 0.95),
        Bar("re-prefill, aggregate: at least .75", number(aggregate), aggregate >= 0.75),
        *(Bar(f"lost by blind reuse, {kind}: at least .25", number(gap), gap >= 0.25) for kind, gap in lost.items()),
        Bar("means over what cells show explain less than 60 % of ΔV in the deeper half", share(worst), worst < 0.6),
        Bar("smallest rank that suffices: 16 to 32", str(rank or "none"), rank is not None and 16 <= rank <= 32),
    ]


def worst_class_share(results: Results, probe: str | None = None) -> float:
    """Finds the largest share of ΔV's energy, in the deeper half, that means over cells that show the same explain."""
    rows, shares = Rows(of_probe(results, probe)), []
    values = [arm for arm in rows.arms(VISIBLE, "layer=") if arm.endswith(".v")]
    for name in results["config"]["visible"]:
        deeper = values[len(values) // 2 :]
        shares += [rows.get(VISIBLE, arm, f"class_mean_share.{name}").value for arm in deeper]
    return max(shares, default=math.nan)


def _caveats(results: Results) -> list[str]:
    """Says what a run rests on; of several instances, what blind reuse loses on each seed and on the control."""
    config = results["config"]
    seeds = config["seeds"]
    what = "Means over the training seeds" if len(seeds_of(results)) > 1 else "One training seed,"
    about = f"{what} {', '.join(seeds)}; {config['contexts']} contexts of each size; from `{config['command']}`."

    lost = []
    for model in [*seeds, *(x for x in Rows(results).models if x.endswith(NO_WINDOW))]:
        losses = blind_losses(Rows(of_probe(results, model=model)), MULTI_HOP)
        control = " (control, trained without a sliding window)" if model.endswith(NO_WINDOW) else ""
        lost.append(f"{model}{control}: {losses}")

    if len(lost) < 2:
        return [about]
    return [about, "By instance, re-prefill → blind reuse: " + "; ".join(lost) + "."]


def _finding(results: Results, probe: str) -> str:
    """Says of contexts of one probe which rank suffices, what is lost, and what shape the deficit has."""
    main = of_probe(results, probe)
    rows, rank = Rows(main), smallest_rank(main, VISIBLE)
    lost = ", ".join(f"{kind} {number(-rows.gap(VISIBLE, 'blind', kind))}" for kind in MULTI_HOP)
    layers = [arm for arm in rows.arms(VISIBLE, "layer=") if arm.endswith(".v")][-2:]
    directions = " and ".join(number(rows.get(VISIBLE, arm, "e90").value) for arm in layers)
    every = [row for row in rows.table if row[1] in layers and row[2].startswith("class_mean_share.absorbed")]
    absorbed = max((rows.get(*row).value for row in every), default=math.nan)
    return (
        f"Smallest sufficient rank: {rank or 'none'}. Re-prefill minus blind: {lost}. Class means explain at most "
        f"{share(worst_class_share(results, probe))} of ΔV's energy in the deeper half (classes seen) and "
        f"{share(absorbed)} (classes absorbed); 90 % of it in the last two layers lies in {directions} directions."
    )


def _accuracies(rows: Rows, arms: Sequence[str] | None = None) -> ProbeTable:
    """Makes a table of the report: what is lost and mended in front, then costs, then the other accuracies."""
    order = sorted(rows.results["config"]["questions"], key=lambda kind: kind not in MULTI_HOP)
    lines = []
    for arm in arms or rows.arms(VISIBLE):
        if not arm.startswith("layer="):
            costs = [(share(rows.get(VISIBLE, arm, metric).value), "") for metric in AXES]
            spread = ", ".join(share(rows.get(VISIBLE, arm, metric).value) for metric in AMORTISED)
            got = [rows.accuracy(arm, kind) for kind in order]
            values = [(number(each.value), f"{number(each.low)} to {number(each.high)}") for each in got]
            lines.append((arm_label(arm), [*values[:2], *costs, (spread, ""), *values[2:]]))

    costs = [COSTS[axis].replace(" = ", "\u00a0=\u00a0") for axis in AXES]
    return ProbeTable([*order[:2], *costs, "serving FLOPs over 1, 3, 10 reuses", *order[2:]], lines)


def _deficit(rows: Rows) -> ProbeTable:
    """Makes the table of the deficit's shape, a line per layer and channel."""
    layers = rows.arms(VISIBLE, "layer=")
    metrics = list(dict.fromkeys(metric for _, arm, metric in rows.table if arm in layers))
    lines = []
    for layer in layers:
        cells = [(number(rows.get(VISIBLE, layer, metric).value), "") for metric in metrics]
        lines.append((layer.removeprefix("layer="), cells))
    return ProbeTable([metric.replace("class_mean_share.", "class mean, ") for metric in metrics], lines)


# ---------------------------------------------------------------------------------------------------- the guide


APART = ("patch.rows_only.", "patch.transition_only.", "patch.whole_transition.", "residual.", "first_k.")
"""Beginnings of the names of arms that repair rows or transitions alone, or run tokens again."""


def kept(results: Results) -> dict[str, Any]:
    """Keeps of a run what the guide shows; of each seed and the control, accuracies of the first probe's references.

    Of hybrids also the arms of each seed that say where the loss lies: in rows, or in transitions.
    """
    own, rows = Rows(results).model, []
    first = f"{results['config']['task']}.{next(iter(results['config']['probes']))}"
    hybrid = any(row["arm"].startswith("patch.transition_only.") for row in results["rows"])
    for row in results["rows"]:
        right = row["metric"].startswith("accuracy.")
        named = row["arm"] in ("re-prefill", "blind") or (hybrid and row["arm"].startswith(APART))
        of_seed = right and row["probe"] == first and named
        shown = right or row["metric"].startswith(("class_mean_share.", "e90")) or row["metric"] in (*AXES, *AMORTISED)
        if shown if row["model"] == own else of_seed:
            rows.append(rounded_row(row))

    names = ("task", "kind", "model", "seeds", "seed", "contexts", "command", "rules", "probes", "visible", "questions")
    return {"config": {name: results["config"][name] for name in names}, "rows": rows}


def write(results: Results, figures: Path, root: Path = ROOT) -> None:
    """Puts a run into its kind's guide and kept results, and its figures into docs/pictures."""
    shown, kind = kept(results), results["config"]["kind"]
    pictures = {f"{name}.png": f"{kind}_{name}.png" for name in PICTURES}
    publish(shown, KEPT[kind], {GUIDES[kind]: markdown(shown)}, figures, pictures, root)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder / "figures")
