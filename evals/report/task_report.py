"""The report of the sheets and documents tasks: table.md, figures, report.html, and what a task's guide says of a run.

`python -m evals.report.task_report out/run` puts a finished run into the guide of its kind of instances, what the guide
shows of its rows into docs/KIND-results.json and its figures into docs/pictures. A test holds the guides against those
files.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..results.costs import AMORTISED, AXES, TOGETHER
from ..results.headline import seeds_of
from ..results.rows import Rows
from ..results.tables import markdown_table
from .comparison import VISIBLE, smallest_rank
from .documents import ROOT, block, filled
from .figures import Results, arm_label
from .hero import hero_figure, pareto_figures
from .page import ProbeTable, picture, template
from .verdict import COSTS, first_arms, verdict
from .wording import number, share

CONTROL_ENDS = "_no_window"
COST_METRICS = (*AXES, *AMORTISED)
KINDS = ("sheets", "sheets_qwen3_vl", "documents")
"""Folders of instances that ship; each kind has a guide of its own."""
GUIDES = {
    "sheets": Path("docs/experiments/sheets-task.md"),
    "sheets_qwen3_vl": Path("docs/experiments/sheets-task-qwen3-vl.md"),
    "documents": Path("docs/experiments/documents-task.md"),
}
KEPT = {kind: Path(f"docs/{kind}-results.json") for kind in KINDS}
PICTURES = ("hero", "pareto_kept_1", "pareto_kept_16", "pareto_serving_flops")


MAIN_ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=8",
    "patch.rank=16",
    "patch.every_chunk.rank=16",
    "patch.every_chunk.rank=64",
    "cacheblend.budget=0.15",
    "query_attention.budget=0.15",
    "quantised.bits=3",
)
"""The arms of a page's tables."""
FIRST_ARMS = (
    *MAIN_ARMS,
    "patch.rank=4",
    "patch.rank=32",
    "patch.v_only.rank=16",
    "cacheblend.budget=0.5",
    "oracle_delta.budget=0.5",
    "pooled.rank=8",
    "quantised.bits=4",
    "svd.rank=16",
    "residual.layer=1",
)
"""Those of the first table, beside whatever beats the patch."""


class Bar(NamedTuple):
    """A bar that was set before the runs: what is held against it, what was measured, whether it is met."""

    what: str
    measured: str
    met: bool


def probes_of(results: Results) -> dict[str, str]:
    """Lists what was measured, by name, with what each is called in a table; the first is the main comparison."""
    return dict(results["config"]["probes"])


def of_probe(results: Results, probe: str | None = None, model: str | None = None) -> dict[str, Any]:
    """Makes the results whose main comparison is that of contexts of one probe, so that the main report's words fit."""
    name = f"{results['config']['task']}.{probe or next(iter(probes_of(results)))}"
    rows = [{**row, "probe": VISIBLE} for row in results["rows"] if row["probe"] == name]
    return {**results, "config": {**results["config"], "model": model or Rows(results).model}, "rows": rows}


def write_report(results: Results, folder: Path) -> str:
    """Writes table.md, figures/ and report.html; returns the text of the first."""
    text = markdown(results)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    probes, main, figures = probes_of(results), of_probe(results), folder / "figures"
    drawn = [*hero_figure(main, figures), *pareto_figures(main, figures)]
    page = template("sheets.html.j2").render(
        task=results["config"]["task"],
        model=Rows(results).model,
        verdict=verdict(main),
        beside=[_about(results).replace("`", ""), *_control(results)],
        hero=[picture(path) for path in drawn[:1]],
        pictures=[picture(path) for path in drawn[1:]],
        bars=bars(results),
        first=_lines(Rows(main), first_arms(main)),
        probes=[
            (probe, title, _say(results, probe), _lines(Rows(of_probe(results, probe))))
            for probe, title in probes.items()
        ],
        deficit=[(title, _deficit(results, probe)) for probe, title in probes.items()],
        settings=results["config"],
        environment=results.get("environment", {}),
        command=results["config"]["command"],
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    return text


def markdown(results: Results) -> str:
    """Writes what a run found, as the page has it: verdict, bars, and the main arms with contexts of each size.

    Every arm's figures are in the page's file of results and in report.html.
    """
    head = ("arm", *results["config"]["questions"], "kept, N = 1, 4, 16", "serving FLOPs")
    parts = [filled(" ".join(verdict(of_probe(results)))), filled(_about(results)), *map(filled, _control(results))]
    lines = [[bar.what, bar.measured, "met" if bar.met else "**not met**"] for bar in bars(results)]
    parts.append(markdown_table(("bar", "measured", ""), lines))

    for number_, (probe, title) in enumerate(probes_of(results).items()):
        of_size = of_probe(results, probe)
        rows = Rows(of_size)
        arms = shown_arms(of_size, FIRST_ARMS if number_ == 0 else MAIN_ARMS)
        lines = [[f"`{arm}`", *_cells(rows, arm)] for arm in arms]
        parts += [filled(f"**{title}.** {_say(results, probe)}"), markdown_table(head, lines)]

    return "\n\n".join(parts)


def shown_arms(results: Results, listed: Sequence[str]) -> list[str]:
    """Chooses the arms of a page's table, in the order of the rows: those listed, and whatever beats the patch."""
    wanted = {*listed, *(first_arms(results) if listed == FIRST_ARMS else ())}
    return [arm for arm in Rows(results).arms(VISIBLE) if arm in wanted]


def bars(results: Results) -> list[Bar]:
    """Holds a run against the bars that were set before it, contexts of four chunks."""
    main = of_probe(results)
    rows, rank = Rows(main), smallest_rank(main, VISIBLE)

    def right(kind):
        return rows.get(VISIBLE, "re-prefill", f"accuracy.{kind}").value

    lost = {kind: -rows.gap(VISIBLE, "blind", kind) for kind in ("chain", "aggregate")}
    worst = worst_class_share(results)
    return [
        Bar("training seeds: at least three", str(_seeds(results)), _seeds(results) >= 3),
        Bar("re-prefill, chain: at least .95", number(right("chain")), right("chain") >= 0.95),
        Bar("re-prefill, aggregate: at least .75", number(right("aggregate")), right("aggregate") >= 0.75),
        *(Bar(f"lost by blind reuse, {kind}: at least .25", number(gap), gap >= 0.25) for kind, gap in lost.items()),
        Bar("means over what cells show explain less than 60 % of ΔV in the deeper half", share(worst), worst < 0.6),
        Bar("smallest rank that suffices: 16 to 32", str(rank or "none"), rank is not None and 16 <= rank <= 32),
    ]


def worst_class_share(results: Results, probe: str | None = None) -> float:
    """Finds the largest share of ΔV's energy, in the deeper half, that means over cells that show the same explain."""
    rows = Rows(of_probe(results, probe))
    values = [arm for arm in rows.arms(VISIBLE, "layer=") if arm.endswith(".v")]
    deeper = values[len(values) // 2 :]
    shares = [
        rows.get(VISIBLE, arm, f"class_mean_share.{name}").value
        for arm in deeper
        for name in results["config"]["visible"]
    ]
    return max(shares, default=math.nan)


def _seeds(results: Results) -> int:
    return len(seeds_of(results)) or 1


def _about(results: Results) -> str:
    config = results["config"]
    names = ", ".join(config.get("seeds", [config["model"]]))
    seeds = f"Means over the training seeds {names}" if _seeds(results) > 1 else f"One training seed, {names}"
    return f"{seeds}; {config['contexts']} contexts of each size; from `{config['command']}`."


def _control(results: Results) -> list[str]:
    """Says what blind reuse loses on the control and on each seed, four chunks."""
    found = []
    models = [*results["config"].get("seeds", []), *(x for x in Rows(results).models if x.endswith(CONTROL_ENDS))]
    for model in models:
        rows = Rows(of_probe(results, model=model))

        def say(kind, rows=rows):
            return " → ".join(
                number(rows.get(VISIBLE, arm, f"accuracy.{kind}").value) for arm in ("re-prefill", "blind")
            )

        what = " (control, trained without a sliding window)" if model.endswith(CONTROL_ENDS) else ""
        found.append(f"{model}{what}: chain {say('chain')}, aggregate {say('aggregate')}")

    return ["By instance, re-prefill → blind reuse: " + "; ".join(found) + "."] if len(found) > 1 else []


def _say(results: Results, probe: str) -> str:
    main = of_probe(results, probe)
    rows = Rows(main)
    lost = ", ".join(f"{kind} {number(-rows.gap(VISIBLE, 'blind', kind))}" for kind in ("chain", "aggregate"))
    layers = [arm for arm in rows.arms(VISIBLE, "layer=") if arm.endswith(".v")][-2:]
    rank = smallest_rank(main, VISIBLE)
    directions = " and ".join(number(rows.get(VISIBLE, arm, "e90").value) for arm in layers)
    every = [row for row in rows.table if row[1] in layers and row[2].startswith("class_mean_share.absorbed")]
    absorbed = max((rows.get(*row).value for row in every), default=math.nan)
    return (
        f"Smallest sufficient rank: {rank or 'none'}. Re-prefill minus blind: {lost}. Class means explain at most "
        f"{share(worst_class_share(results, probe))} of ΔV's energy in the deeper half (classes seen) and "
        f"{share(absorbed)} (classes absorbed); 90 % of it in the last two layers lies in {directions} directions."
    )


def _cells(rows: Rows, arm: str) -> list[str]:
    right = [number(rows.get(VISIBLE, arm, f"accuracy.{kind}").value) for kind in rows.results["config"]["questions"]]
    kept = [share(rows.get(VISIBLE, arm, metric).value) for metric in TOGETHER]
    return [*right, ", ".join(kept), share(rows.get(VISIBLE, arm, "serving_flops").value)]


def _lines(rows: Rows, arms: list[str] | None = None) -> ProbeTable:
    """Makes a table of the report: what is lost and mended in front, then costs, then the other accuracies."""
    order = sorted(rows.results["config"]["questions"], key=lambda kind: kind not in ("chain", "aggregate"))
    arms = [arm for arm in arms or rows.arms(VISIBLE) if not arm.startswith("layer=")]
    lines = []

    for arm in arms:
        costs = [(share(rows.get(VISIBLE, arm, metric).value), "") for metric in AXES]
        spread = ", ".join(share(rows.get(VISIBLE, arm, metric).value) for metric in AMORTISED)
        got = [rows.get(VISIBLE, arm, f"accuracy.{kind}") for kind in order]
        values = [(number(each.value), f"{number(each.low)} to {number(each.high)}") for each in got]
        lines.append((arm_label(arm), [*values[:2], *costs, (spread, ""), *values[2:]]))

    costs = [COSTS[axis].replace(" = ", "\u00a0=\u00a0") for axis in AXES]
    head = [*order[:2], *costs, "serving FLOPs over 1, 3, 10 reuses", *order[2:]]
    return ProbeTable(head, lines, "")


def _deficit(results: Results, probe: str) -> ProbeTable:
    rows = Rows(of_probe(results, probe))
    layers = rows.arms(VISIBLE, "layer=")
    metrics = list(dict.fromkeys(metric for _, arm, metric in rows.table if arm in layers))
    lines = [(layer[6:], [(number(rows.get(VISIBLE, layer, each).value), "") for each in metrics]) for layer in layers]
    return ProbeTable([each.replace("class_mean_share.", "class mean, ") for each in metrics], lines, "")


# ---------------------------------------------------------------------------------------------------- the guide


def kept(results: Results) -> dict[str, Any]:
    """Keeps of a run what the guide shows, digits behind the sixth left out."""
    own, rows = Rows(results).model, []
    first = f"{results['config']['task']}.{next(iter(probes_of(results)))}"
    for row in results["rows"]:
        right = row["metric"].startswith("accuracy.")
        of_seed = right and row["probe"] == first and row["arm"] in ("re-prefill", "blind")
        shown = right or row["metric"].startswith(("class_mean_share.", "e90")) or row["metric"] in COST_METRICS
        if shown if row["model"] == own else of_seed:
            rows.append({**row, **{name: _six(row[name]) for name in ("value", "low", "high")}})

    names = ("task", "kind", "model", "seeds", "seed", "contexts", "command", "rules", "probes", "visible", "questions")
    config = {name: results["config"][name] for name in names if name in results["config"]}
    return {"config": config, "rows": rows}


def _six(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def write(results: Results, figures: Path, root: Path = ROOT) -> None:
    """Puts a run into its kind's guide and kept results, and its figures into docs/pictures."""
    shown, kind = kept(results), results["config"].get("kind", results["config"]["task"])
    (root / KEPT[kind]).write_text(json.dumps(shown, indent=0) + "\n", encoding="utf-8")
    (root / GUIDES[kind]).write_text(block(markdown(shown), root / GUIDES[kind]), encoding="utf-8")
    for name in PICTURES:
        if (figures / f"{name}.png").exists():
            shutil.copyfile(figures / f"{name}.png", root / "docs" / "pictures" / f"{kind}_{name}.png")


def _read(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    write(_read(Path(sys.argv[1])), Path(sys.argv[1]) / "figures")
