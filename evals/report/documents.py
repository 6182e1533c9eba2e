"""What README.md and docs/experiments/results.md say of a run, written from its rows.

`python -m evals.report.documents out/run` puts a finished run into both pages, its rows into docs/results.json and its
pictures into docs/pictures. A test holds the pages against that file.
"""

import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from ..results.dominance import on_both
from ..results.headline import headline_arms, headline_results, seeds_of
from ..results.rows import Rows
from ..results.tables import markdown_table
from ..rules import RULES
from .comparison import DEEP, VISIBLE
from .figures import MULTI_HOP, Results, arm_label
from .summary import NO_WINDOW
from .table import comparison_table
from .verdict import BY_COUNT, all_beating, first_arms, shown_patch, verdict
from .wording import number, spread

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = "README.md", "docs/experiments/results.md"
PAGES = (README, RESULTS)
README_ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=4",
    "patch.rank=8",
    "quantised.bits=3",
    "quantised.bits=16",
    "residual.layer=1",
    "prophetkv.budget=0.15",
)
"""The rows of the README's table; that of the results has all."""
RESULTS_KINDS = ("page", "chain", "aggregate", "override")
"""The kinds of question in the table of the results."""
PICTURES = {"example.png": "example.png", "accuracy.png": "rank.png"}
"""In docs/pictures: the run's figure of the other name."""
SMALL_PROBES = ("reorder", "slide", "recall")


def kept(results: Results) -> dict[str, Any]:
    """Keeps of a run what the pages show: accuracies, costs and KL of the main comparison, three probes of the window.

    Values and their intervals lose what no page shows, digits behind the sixth. Of other training seeds and of the
    control the main comparison alone.
    """
    model, rows = Rows(results).model, []

    def shown(metric):
        return metric.split(".")[0] in ("accuracy", "stored_bytes", "serving_flops", "bytes", "kl")

    for row in results["rows"]:
        own = row["model"] == model and row["probe"] in (VISIBLE, *SMALL_PROBES)
        seed = row["model"] in RULES.headline_backbones and row["probe"] == VISIBLE
        control = row["model"].endswith(NO_WINDOW) and row["probe"] == VISIBLE and row["arm"] in ("re-prefill", "blind")
        if (own or seed or control) and shown(row["metric"]):
            rounded = {name: _six(row[name]) for name in ("value", "low", "high")}
            rows.append({**row, **rounded})

    names = ("backbone", "contexts", "seed", "command", "parameters", "example")
    return {"config": {name: results["config"].get(name) for name in names}, "rows": rows}


def _six(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def section(results: Results, page: str) -> str:
    """Writes what stands between the marks of a page: the mean over training seeds first, then one instance."""
    rows, config, mean = Rows(results), results["config"], headline_results(results)
    if page == README and mean is not None:
        return _readme(mean)

    said = [
        f"A small model ({config['parameters'] / 1e6:.1f} M parameters, Qwen2.5-VL's architecture) sees three legend "
        "images, which assign colours to handwritten glyphs, and a page of glyphs. The page is cached alone and reused "
        "after the legends. *page* questions need the page alone, *chain* and *aggregate* questions need both.",
        " ".join([*verdict(mean or results), *without_window(results)]),
    ]

    if mean is not None:
        table = comparison_table(Rows(mean), headline_arms(mean), RESULTS_KINDS)
        said += [_about_the_mean(mean), markdown_table(*table)]
        said.append(by_seed(results, mean))
    else:
        # One instance alone: its own table, with intervals over contexts.
        said.append(markdown_table(*comparison_table(rows, first_arms(results), RESULTS_KINDS)))

    said.append(f"What does *not* work ({rows.model}): " + "; ".join(negatives(rows)) + ".")
    return "\n\n".join(part if part.startswith("|") else filled(part) for part in said)


def _readme(mean: Results) -> str:
    """Writes the README's part: what blind reuse loses, what a patch restores, and the cost of both beside others'."""
    rows, patch = Rows(mean), shown_patch(mean) or README_ARMS[2]

    def shown(arm, kind):
        return spread(rows.get(VISIBLE, arm, f"accuracy.{kind}"))

    alone = [number(rows.get(VISIBLE, arm, "accuracy.page").value) for arm in ("blind", "re-prefill")]

    def both(arm):
        return f"{shown(arm, 'chain')} of chain questions and {shown(arm, 'aggregate')} of aggregate questions"

    undercut = "; ".join(
        f"for N = {count} by {', '.join(map(arm_label, on_both(all_beating(rows, patch), axis))) or 'no method tried'}"
        for count, axis in BY_COUNT.items()
    )
    join = "but only" if rows.gap(VISIBLE, "blind", "chain") < -0.05 else "and"
    found = (
        f"Blind reuse answers {alone[0]} of the questions about a page alone (re-prefill: {alone[1]}), {join} "
        f"{both('blind')}, which also need the images before it. A patch of rank {patch.rpartition('=')[2]} answers "
        f"{both(patch)}. It is undercut in bytes and in serving FLOPs at once {undercut}."
    )
    about = (
        f"Accuracy over {mean['config']['contexts']} held-out contexts of the small task: the mean over "
        f"{len(seeds_of(mean))} training seeds, the least and the largest in brackets. *kept, N*: all bytes stored for "
        "each of N antecedents, a share of the canonical included, over the page's KV. *serving FLOPs*: over a "
        f"re-prefill's. From `{mean['config']['command']}`:"
    )
    head, lines = comparison_table(rows, README_ARMS, MULTI_HOP)
    return "\n\n".join([filled(found), filled(about), markdown_table(head[:-1], [line[:-1] for line in lines])])


def _about_the_mean(mean: Results) -> str:
    config = mean["config"]
    return (
        f"Accuracy over {config['contexts']} held-out contexts with the legends in view: the mean over the training "
        f"seeds {', '.join(seeds_of(mean))}, the least and the largest in brackets. *kept, N*: all bytes stored for "
        "each of N antecedents over the page's KV, an N-th of the canonical (and of the inputs of recomputed tokens) "
        f"included. *serving FLOPs*: over a re-prefill of the page. From `{config['command']}`; tables of single "
        "instances with 95 % intervals are in `out/run/table.md`:"
    )


def by_seed(results: Results, mean: Results) -> str:
    """Says what blind reuse and the patch answer on each training seed."""

    def right(arm, kind):
        return ", ".join(
            number(Rows(results, seed).get(VISIBLE, arm, f"accuracy.{kind}").value) for seed in seeds_of(mean)
        )

    patch = shown_patch(mean) or ""
    said = [f"of {kind} questions {right('blind', kind)}, the patch {right(patch, kind)}" for kind in MULTI_HOP]
    return f"Seed by seed, blind reuse answers {'; '.join(said)}."


def filled(text: str) -> str:
    """Breaks a paragraph into lines as the pages have them."""
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def without_window(results: Results) -> list[str]:
    """Says what blind reuse loses on the instance that was trained without a sliding window, where it was run."""
    names = sorted({row["model"] for row in results["rows"] if row["model"].endswith(NO_WINDOW)})
    if not names:
        return []

    mains, control = Rows(results), Rows(results, names[0])

    def pair(rows, kind):
        return [number(rows.get(VISIBLE, arm, f"accuracy.{kind}").value) for arm in ("re-prefill", "blind")]

    lost = {kind: (mains.gap(VISIBLE, "blind", kind), control.gap(VISIBLE, "blind", kind)) for kind in MULTI_HOP}
    how = {kind: "loses less" if ours > own + 0.01 else "loses no less" for kind, (own, ours) in lost.items()}
    said = [f"{how[kind]} on {kind} questions ({' → '.join(pair(control, kind))})" for kind in MULTI_HOP]
    return [f"The same model trained without a sliding window {' and '.join(said)} under blind reuse."]


def negatives(rows: Rows) -> list[str]:
    """Says of four shortcuts whether they fell short, each with the figures that say so."""

    def value(probe, arm, kind):
        return rows.get(probe, arm, f"accuracy.{kind}").value

    last = rows.settings("recall", "stale.turnover=")[-1][0]

    def say(what: str, kind: str, got: float, other: str, than: float, words: tuple[str, str]) -> str:
        return f"{what} {words[0] if got < than - 0.01 else words[1]} ({kind}: {number(got)}, {other} {number(than)})"

    orders = [value("reorder", arm, "override") for arm in ("orbit", "exact")]
    turned = [value("recall", f"{arm}.turnover={last:g}", "aggregate") for arm in ("stale", "blind")]
    deep = [value(VISIBLE, arm, "chain") for arm in (DEEP, "patch.rank=16")]
    # Knowing more than a re-prefill of what is left: the other way round.
    left = [value("slide", arm, "evicted") for arm in ("re-prefill", "keep")]
    return [
        say(
            "one patch for all orders",
            "override",
            orders[0],
            "the order's own patch",
            orders[1],
            ("fails where the order decides", "does as well as the order's own"),
        ),
        say(
            "a patch that is kept while all legends change",
            "aggregate",
            turned[0],
            "blind reuse",
            turned[1],
            ("is worse than none", "is no worse than none"),
        ),
        say(
            "the deepest half of the layers",
            "chain, rank 16",
            deep[0],
            "all layers",
            deep[1],
            ("is not enough", "is enough"),
        ),
        f"survivors of a slide {'still answer' if left[1] > left[0] + 0.01 else 'no longer answer'} from the legend "
        f"that left ({number(left[1])}; a re-prefill without it {number(left[0])})",
    ]


def block(text: str, page: Path) -> str:
    """Replaces what stands between a page's marks; returns the page's whole new text."""
    old = page.read_text(encoding="utf-8")
    new, count = re.subn(
        r"(<!-- run -->\n).*?(<!-- /run -->)", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{page} has {count} places between <!-- run --> and <!-- /run -->; expected one")
    return new


def write(results: Results, figures: Path, root: Path = ROOT) -> None:
    """Puts a run into the pages, docs/results.json and docs/pictures."""
    shown = kept(results)
    (root / "docs" / "results.json").write_text(json.dumps(shown, indent=0) + "\n", encoding="utf-8")
    for page in PAGES:
        (root / page).write_text(block(section(shown, page), root / page), encoding="utf-8")
    for name, figure in PICTURES.items():
        if (figures / figure).exists():
            shutil.copyfile(figures / figure, root / "docs" / "pictures" / name)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder / "figures")
