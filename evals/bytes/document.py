"""The page docs/experiments/bytes.md, written from runs: `python -m evals.bytes.document out/bytes`.

Reads results.json of the folder (small tasks) and of its folder `text` (real weights), where they are there; keeps the
rows that the page shows in docs/bytes.json, and draws the figure. A test holds the page against that file.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..harness.frame import Rows, rounded_row
from ..harness.intervals import Interval
from ..harness.tables import aligned_table, markdown_table
from ..report.documents import ROOT, block
from ..report.figures import NARROW
from .arms import BASE_LABELS, KEY_PLACES, KEYS, OURS, RIVAL_LABELS, RIVALS, SIMPLE, all_arms
from .fronts import BARS, COUNTS, ENOUGH, Point, Winner, front, points_of, winners
from .suite import COSTS, TEXT

PAGE, KEPT, PICTURE = Path("docs/experiments/bytes.md"), Path("docs/bytes.json"), Path("docs/pictures/bytes.png")
METRICS = ("eta", "kl", "flips", "accuracy", "error", *COSTS)
FEW_METRICS = ("eta", "kept", "once")
"""Of models that the page shows in one table alone."""
SHOWN_FAMILIES = {
    OURS: ("base and patches in few bits", "C0", "o"),
    SIMPLE: ("KV(B|A) in few bits", "C1", "s"),
    RIVALS: ("published rivals", "C2", "^"),
}
CONFIG = ("model", "plan", "parts_done", "parts")
Table = tuple[list[str], list[list[str]]]


def settings_of(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lists the probes and models of a run, real weights first; sixteen antecedents belong to their probe."""
    found = dict.fromkeys((row["probe"].partition(".")[0], row["model"]) for row in results["rows"])
    return sorted(found, key=lambda pair: pair[0] != TEXT)


# ------------------------------------------------------------------------------------------------------------- tables


def winners_table(results: Mapping[str, Any], probe: str, model: str) -> Table:
    """Makes the table that says who keeps the fewest bytes at each number of antecedents."""
    lines = []
    for found in winners(results, model, probe):
        bar, ratio = BARS.get(found.antecedents), found.ratio
        verdict = "–" if bar is None else f"≤ {bar:g}: {'met' if found.within else 'missed'}"
        cells = [_named(point) for point in (found.winner, found.ours, found.simple, found.rival)]
        lines.append([str(found.antecedents), *cells, "–" if ratio is None else f"{ratio:.2f}", verdict])
    head = ["N", "fewest bytes", "patch", "KV(B\\|A) in few bits", "published rival", "patch / few bits", "bar"]
    return head, lines


def _named(point: Point | None) -> str:
    if point is None:
        return "none reaches it"
    return f"{point.total:.1%}: {point.row} (η {_short(point.eta)})"


def sentence(found: Winner) -> str:
    """Says who wins at a number of antecedents."""
    what = f"N = {found.antecedents}"
    if found.winner is None:
        return f"{what}: nothing reaches η {ENOUGH:g}."
    said = f"{what}: **{found.winner.row}** keeps {found.winner.total:.1%}"
    if found.simple is not None and found.winner != found.simple:
        said += f", the best KV in few bits ({found.simple.row}) {found.simple.total:.1%}"
    if found.within is not None and found.ratio is not None:
        bar = BARS[found.antecedents]
        said += (
            f"; the patch takes {found.ratio:.2f} × of it, {'within' if found.within else 'over'} the bar of {bar:g}"
        )
    return said + "."


def tasks_table(results: Mapping[str, Any]) -> Table:
    """Makes the table of all models: our fewest bytes over those of KV in few bits, by antecedents."""
    lines = []
    for probe, model in settings_of(results):
        cells = []
        for found in winners(results, model, probe):
            pair = [f"{point.total:.1%}" if point else "–" for point in (found.ours, found.simple)]
            cells.append(f"{' : '.join(pair)} ({found.ratio:.2f})" if found.ratio is not None else " : ".join(pair))
        lines.append([probe, model, *cells])
    return ["task", "model", *(f"N = {count}" for count in COUNTS)], lines


def front_table(results: Mapping[str, Any], probe: str, model: str, antecedents: int) -> Table:
    """Makes the table of the Pareto front at a number of antecedents, all families together."""
    rows, lines = Rows(results, model), []
    points = points_of(results, model, probe, antecedents)
    for point in front(points):
        if point.eta.value > 0:
            costs = [rows.get(point.probe, point.row, metric).value for metric in ("moved", "serving", "forming")]
            flips = rows.get(point.probe, point.row, "flips")
            shown = [f"{cost:.1%}" for cost in costs]
            lines.append([f"{point.total:.1%}", point.row, _with_interval(point.eta), f"{flips.value:.1%}", *shown])
    return ["kept in all", "arm", "η", "flips", "bytes moved", "FLOPs of a reuse", "FLOPs of forming"], lines


def bases_table(results: Mapping[str, Any], probe: str, model: str) -> Table:
    """Makes the table of bases: their error, blind, and with the patches of all shares measured on several of them."""
    rows, lines = Rows(results, model), []
    arms = {own.name: own for own in all_arms().values() if own.family == OURS}
    shown = [(word, share) for word in ("k5v5gall", "k3v3gall") for share in (0.04, 0.05, 0.07, 0.1)]
    present = []
    for word, share in shown:
        names = [f"patch.{base}.{word}.int4.share={share:g}" for base in BASE_LABELS]
        found = [name for name in names if name in arms and any(row.startswith(name) for row in rows.arms(probe))]
        if len(found) > 1:
            present.append((word, share))
    for base, label in BASE_LABELS.items():
        for count in (2, 4) if base in ("others", "mean") else (None,):
            behind = "" if count is None else f"@{count}"
            blind = f"base.{base}.16{behind}"
            eta = rows.get(probe, blind, "eta")
            if not eta.n:
                continue
            cells = []
            for word, share in present:
                cells.append(_short(rows.get(probe, f"patch.{base}.{word}.int4.share={share:g}{behind}", "eta")))
            error = rows.get(probe, blind, "error").value
            name = label if count is None else f"{label}, N = {count}"
            lines.append([name, f"{error:.2f}", _with_interval(eta), *cells])
    return ["base", "error", "blind η", *(f"η, {word} + {share:.0%}" for word, share in present)], lines


def keys_table(results: Mapping[str, Any], probe: str, model: str) -> Table:
    """Makes the table of keys rounded alone: relative error and η by where they are rounded."""
    rows, lines = Rows(results, model), []
    arms = [own for own in all_arms().values() if own.family == KEYS and rows.get(probe, own.name, "eta").n]
    kinds = list(dict.fromkeys((own.settings["keys"], own.settings["group"]) for own in arms))
    for place, label in KEY_PLACES.items():
        cells = []
        for bits, group in kinds:
            width = "gall" if group == "all" else f"g{group}"
            name = f"keys.{place}.{bits}{width}"
            cells.append(f"{rows.get(probe, name, 'error').value:.3f}, {_short(rows.get(probe, name, 'eta'))}")
        lines.append([label, *cells])
    return ["keys rounded", *(f"{bits} bits, {_group(group)}" for bits, group in kinds)], lines


def _group(group: Any) -> str:
    return "one group" if group == "all" else f"groups of {group}"


def rivals_table(results: Mapping[str, Any], probe: str, model: str) -> Table:
    """Makes the table of every published rival, fewest bytes at four antecedents first."""
    rows, known, lines = Rows(results, model), all_arms(), []
    for row in rows.arms(probe):
        arm = known.get(row.partition("@")[0])
        eta = rows.get(probe, row, "eta")
        if arm is None or arm.family != RIVALS or not eta.n:
            continue
        kept, once, kl, flips = (rows.get(probe, row, metric).value for metric in ("kept", "once", "kl", "flips"))
        figures = [_with_interval(eta), f"{kl:.4f}", f"{flips:.1%}", f"{kept:.1%}", f"{once:.1%}", str(eta.n)]
        lines.append((kept + once / 4, [f"{row} ({RIVAL_LABELS[row.partition('.')[0]]})", *figures]))
    lines.sort(key=lambda line: line[0])
    return ["arm", "η", "KL, nats", "flips", "kept for each", "kept once", "n"], [line for _, line in lines]


# --------------------------------------------------------------------------------------------------------------- page


def sections(kept: Mapping[str, Any]) -> dict[str, str]:
    """Writes the text between each pair of the page's marks."""
    settings = settings_of(kept)
    (probe, model), first_task = settings[0], _first_task(settings)
    said = [f"* {sentence(found)}" for found in winners(kept, model, probe)]
    notes = []
    for name, config in kept["config"].items():
        if config["parts_done"] < config["parts"]:
            notes.append(f"**Not finished ({name}): {config['parts_done']} of {config['parts']} parts were run.**")
    items = Rows(kept, model).get(probe, "base.canonical.16", "eta").n
    about = f"{model}, {items} {'passages' if probe == TEXT else 'questions'}, fewest bytes at η ≥ {ENOUGH:g}:"
    fronts = []
    for count in (1, 4):
        fronts.append(f"N = {count}:\n\n{markdown_table(*front_table(kept, probe, model, count))}")
    return {
        "winners": "\n\n".join([*notes, about, "\n".join(said), markdown_table(*winners_table(kept, probe, model))]),
        "tasks": markdown_table(*tasks_table(kept)),
        "fronts": "\n\n".join(fronts),
        "bases": markdown_table(*bases_table(kept, probe, model)),
        "keys": "\n\n".join(_keys(kept, pair) for pair in dict.fromkeys([(probe, model), first_task])),
        "rivals": markdown_table(*rivals_table(kept, probe, model)),
    }


def _keys(kept: Mapping[str, Any], pair: tuple[str, str]) -> str:
    probe, model = pair
    return f"{model}:\n\n{markdown_table(*keys_table(kept, probe, model))}"


def printed(results: Mapping[str, Any]) -> str:
    """Writes what the program prints: who wins, on every model."""
    parts = []
    for probe, model in settings_of(results):
        parts.append(f"{probe}, {model}\n{aligned_table(*winners_table(results, probe, model))}")
    return "\n\n".join(parts)


def draw(kept: Mapping[str, Any], path: Path) -> None:
    """Draws η against all bytes kept, a panel per number of antecedents, with the front of each family."""
    probe, model = settings_of(kept)[0]
    figure = Figure(figsize=(NARROW, 6.4), layout="constrained")
    for axes, count in zip(figure.subplots(2, 2, sharey=True).flat, COUNTS, strict=True):
        points = points_of(kept, model, probe, count)
        for family, (label, colour, marker) in SHOWN_FAMILIES.items():
            own = [point for point in points if point.arm.family == family and point.eta.value > 0.5]
            style = {"color": colour, "marker": marker, "ms": 3}
            totals, etas = [100 * point.total for point in own], [point.eta.value for point in own]
            axes.plot(totals, etas, ls="none", alpha=0.3, **style)
            best = [point for point in front(own) if point.total < 1.2]
            axes.plot([100 * point.total for point in best], [point.eta.value for point in best], label=label, **style)
        axes.axhline(ENOUGH, color="0.5", lw=0.8, ls="--")
        axes.set(xscale="log", xlim=(2.5, 120), ylim=(0.6, 1.01), title=f"N = {count}")
        axes.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
        axes.minorticks_off()
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    figure.supxlabel("all bytes kept per antecedent, % of the chunk's KV in 16 bits", fontsize=9)
    figure.supylabel("η: share of blind reuse's KL removed", fontsize=9)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="outside upper center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Picks what the page shows out of runs by name ("tasks", "text"): configuration and rows."""
    config, rows = {}, []
    for name, results in runs.items():
        config[name] = {word: results["config"].get(word) for word in CONFIG}
        rows += [row for row in results["rows"] if row["metric"] in METRICS]
    settings = settings_of({"rows": rows})
    whole = [settings[0], _first_task(settings)]
    picked = []
    for row in rows:
        pair = row["probe"].partition(".")[0], row["model"]
        if pair in whole or row["metric"] in FEW_METRICS:
            picked.append(rounded_row(row))
    return {"config": config, "rows": picked}


def _first_task(settings: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return next((pair for pair in settings if pair[0] != TEXT), settings[0])


def write(folder: Path, root: Path = ROOT) -> Path:
    """Puts a folder's runs into the page, docs/bytes.json and the picture; returns the page.

    Raises:
      ValueError: the folder holds no run.
    """
    runs = {}
    for name, path in (("text", folder / "text" / "results.json"), ("tasks", folder / "results.json")):
        if path.exists():
            runs[name] = json.loads(path.read_text(encoding="utf-8"))
    if not runs:
        raise ValueError(f"{folder}: got no results.json in it or in its folder text; expected a run of --suite=bytes")
    kept = summary(runs)
    (root / KEPT).write_text("".join(_lines(kept)), encoding="utf-8")
    # What the file holds is what the page is made of.
    kept = json.loads((root / KEPT).read_text(encoding="utf-8"))
    for mark, text in sections(kept).items():
        (root / PAGE).write_text(block(text, root / PAGE, mark), encoding="utf-8")
    draw(kept, root / PICTURE)
    return root / PAGE


def _lines(kept: Mapping[str, Any]) -> Iterator[str]:
    """Yields strict JSON with a row a line."""
    yield f'{{"config": {json.dumps(kept["config"], ensure_ascii=False)},\n"rows": [\n'
    compact: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    yield ",\n".join(json.dumps(row, **compact) for row in kept["rows"])
    yield "\n]}\n"


def _with_interval(found: Interval) -> str:
    if not found.n or not math.isfinite(found.value):
        return "–"
    low, high = found.low, found.high
    return f"{found.value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) else "")


def _short(found: Interval) -> str:
    return f"{found.value:.3f}" if found.n and math.isfinite(found.value) else "–"


def main(arguments: Sequence[str]) -> None:
    """Writes the page from the folder of a run."""
    print(f"page: {write(Path(arguments[1]))}")


if __name__ == "__main__":
    main(sys.argv)
