"""The generated parts of README.md and docs/experiments/results.md, written from the rows of a run.

`python -m evals.report.documents out/run` puts a finished run into both pages, its rows into docs/results.json and its
pictures into docs/pictures. Of a run of the window's suite it writes the table of the results page: a column for every
model whose results lie in the folder, or in folders of it. A test holds the pages against docs/results.json.
"""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.frame import VISIBLE, Rows, rounded_row
from ..harness.tables import markdown_table
from ..results.costs import ANTECEDENTS, TOGETHER
from ..results.headline import headline_arms, headline_results, seeds_of
from ..rules import RULES
from .comparison import DEEP
from .figures import MULTI_HOP, Results
from .summary import NO_WINDOW, control_of
from .table import comparison_table
from .verdict import answers, cost, first_arms, shown_patch, undercut_at_once, verdict
from .window_paper import side_by_side
from .wording import number, share

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = "README.md", "docs/experiments/results.md"
PAGES = (README, RESULTS)
README_ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=4",
    "patch.k4v4g32.int4.rank=8",
    "quantised.bits=3",
    "quantised.bits=16",
    "residual.layer=1",
    "prophetkv.budget=0.15",
)
"""The rows of the README's table; that of the results has all."""
PICTURES = {"example.png": "example.png", "accuracy.png": "rank.png"}
"""In docs/pictures: the run's figure of the other name."""
SMALL_PROBES = ("reorder", "slide", "recall")
KEPT_METRICS = ("accuracy", "stored_bytes", "serving_flops", "moved_bytes", "forming_flops", "bytes", "kl")


def kept(results: Results) -> dict[str, Any]:
    """Keeps of a run what the pages show: accuracies, costs and KL of the main comparison, three probes of the window.

    Of other training seeds it keeps the main comparison alone, of the control its two reference arms.
    """
    model, rows = Rows(results).model, []
    for row in results["rows"]:
        main = row["probe"] == VISIBLE
        own = row["model"] == model and (main or row["probe"] in SMALL_PROBES)
        seed = main and row["model"] in RULES.headline_backbones
        control = main and row["model"].endswith(NO_WINDOW) and row["arm"] in ("re-prefill", "blind")
        if (own or seed or control) and row["metric"].split(".")[0] in KEPT_METRICS:
            rows.append(rounded_row(row))

    names = ("backbone", "contexts", "seed", "command", "parameters", "example")
    return {"config": {name: results["config"].get(name) for name in names}, "rows": rows}


def section(results: Results, page: str) -> str:
    """Writes what stands between the marks of a page: the mean over training seeds first, then one instance."""
    rows, config, mean = Rows(results), results["config"], headline_results(results)
    if page == README and mean is not None:
        return _readme(mean)

    parts = [
        f"A small model ({config['parameters'] / 1e6:.1f} M parameters, Qwen2.5-VL's architecture) sees three legend "
        "images, which assign colours to handwritten glyphs, and a page of glyphs. The page is cached alone and reused "
        "after the legends. *page* questions need the page alone, *chain* and *aggregate* questions need both.",
        " ".join([*verdict(mean or results), *without_window(results)]),
    ]

    if mean is None:
        # One instance alone: its own table, with intervals over contexts.
        parts.append(markdown_table(*comparison_table(rows, first_arms(results), MULTI_HOP)))
    else:
        seeds, patch = seeds_of(mean), shown_patch(mean) or ""
        parts.append(
            f"Accuracy over {config['contexts']} held-out contexts with the legends in view: the mean over the "
            f"training seeds {', '.join(seeds)}, the least and the largest in brackets. *kept, N*: all bytes stored "
            "for each of N antecedents over the page's KV, an N-th of the canonical (and of the inputs of recomputed "
            f"tokens) included. *bytes moved*: read for one reuse. *serving* and *forming FLOPs*: of one "
            f"reuse, and before the first, over a re-prefill of the page. From `{config['command']}`; tables of "
            "single instances with 95 % intervals are in `out/run/table.md`:"
        )
        parts.append(markdown_table(*comparison_table(Rows(mean), headline_arms(mean), MULTI_HOP)))

        instances, by_seed = [Rows(results, seed) for seed in seeds], []
        for kind in MULTI_HOP:
            blind, mended = [], []
            for own in instances:
                blind.append(number(own.accuracy("blind", kind).value))
                mended.append(number(own.accuracy(patch, kind).value))
            by_seed.append(f"of {kind} questions {', '.join(blind)}, the patch {', '.join(mended)}")
        parts.append(f"Seed by seed, blind reuse answers {'; '.join(by_seed)}.")

    parts.append(f"What does *not* work ({rows.model}): " + "; ".join(negatives(rows)) + ".")
    return "\n\n".join(part if part.startswith("|") else filled(part) for part in parts)


def _readme(mean: Results) -> str:
    """Writes the README's part: what blind reuse loses, what a patch restores, and the cost of both beside others'."""
    rows, patch = Rows(mean), shown_patch(mean) or README_ARMS[2]
    alone, whole = (number(rows.accuracy(arm, "page").value) for arm in ("blind", "re-prefill"))
    join = "but only" if rows.gap(VISIBLE, "blind", "chain") < -0.05 else "and"
    encoded = "patch.k4v4g32.int4.rank=8"
    kept = [share(cost(rows, encoded, axis)) for axis in TOGETHER]
    found = (
        f"Blind reuse answers {alone} of the questions about a page alone (re-prefill: {whole}), {join} "
        f"{answers(rows, 'blind')}, which also need the images before it. A patch of rank "
        f"{patch.rpartition('=')[2]} answers {answers(rows, patch)}. Canonical and patch in 4 bits "
        f"(rank 8) answer {answers(rows, encoded)}, and keep {', '.join(kept[:-1])} and {kept[-1]} of the KV for each "
        f"of N = {', '.join(map(str, ANTECEDENTS))} antecedents; undercut in bytes and serving FLOPs at once "
        f"{undercut_at_once(rows, encoded, 'none tried')}."
    )
    about = (
        f"Accuracy over {mean['config']['contexts']} held-out contexts of the small task, mean over "
        f"{len(seeds_of(mean))} training seeds (least to largest). *kept, N*: all bytes stored for each of N "
        "antecedents, a share of the canonical included; *moved*: read for one reuse; both over the page's KV. *FLOPs* "
        f"are over a re-prefill's; *forming*: before the first reuse. From `{mean['config']['command']}`:"
    )
    head, lines = comparison_table(rows, README_ARMS, MULTI_HOP)
    return "\n\n".join([filled(found), filled(about), markdown_table(head[:-1], [line[:-1] for line in lines])])


def without_window(results: Results) -> list[str]:
    """Says what blind reuse loses on the instance that was trained without a sliding window, where it was run."""
    rows, control = Rows(results), control_of(results)
    if control is None:
        return []

    losses = []
    for kind in MULTI_HOP:
        less = control.gap(VISIBLE, "blind", kind) > rows.gap(VISIBLE, "blind", kind) + 0.01
        whole, blind = (number(control.accuracy(arm, kind).value) for arm in ("re-prefill", "blind"))
        losses.append(f"loses {'less' if less else 'no less'} on {kind} questions ({whole} → {blind})")
    return [f"The same model trained without a sliding window {' and '.join(losses)} under blind reuse."]


def negatives(rows: Rows) -> list[str]:
    """Says of four shortcuts whether they fell short, each with the figures that say so."""
    last = rows.settings("recall", "stale.turnover=")[-1][0]
    # What was tried and how its kind is shown; probe, kind, its arm and the arm that it is held against; that arm's
    # name; what is said where it is less accurate, and where it is not.
    tried = (
        (
            ("one patch for all orders", "override"),
            ("reorder", "override", "orbit", "exact"),
            "the order's own patch",
            ("fails where the order decides", "does as well as the order's own"),
        ),
        (
            ("a patch that is kept while all legends change", "aggregate"),
            ("recall", "aggregate", f"stale.turnover={last:g}", f"blind.turnover={last:g}"),
            "blind reuse",
            ("is worse than none", "is no worse than none"),
        ),
        (
            ("the deepest half of the layers", "chain, rank 16"),
            (VISIBLE, "chain", DEEP, "patch.rank=16"),
            "all layers",
            ("is not enough", "is enough"),
        ),
    )
    found = []
    for (what, shown), (probe, kind, *arms), other, (worse, no_worse) in tried:
        got, than = (rows.accuracy(arm, kind, probe).value for arm in arms)
        words = worse if got < than - 0.01 else no_worse
        found.append(f"{what} {words} ({shown}: {number(got)}, {other} {number(than)})")

    # Here a shortcut falls short by knowing more than a re-prefill of what is left.
    whole, kept_survivors = (rows.accuracy(arm, "evicted", "slide").value for arm in ("re-prefill", "keep"))
    words = "still answer" if kept_survivors > whole + 0.01 else "no longer answer"
    found.append(
        f"survivors of a slide {words} from the legend that left ({number(kept_survivors)}; a re-prefill without it "
        f"{number(whole)})"
    )
    return found


def windows_section(results: Mapping[str, Results]) -> str:
    """Writes the command of the window's suite, how much was measured, and a table with a column per model."""
    counts = sorted({each["config"]["window"]["contexts"] for each in results.values()})
    head = (
        f"`python -m evals.run --suite=window`, {', '.join(results)}: {' and '.join(map(str, counts))} contexts; "
        "reorder of more than three images and many images on the first batch of them."
    )
    return f"{filled(head)}\n\n{side_by_side(results)}"


def filled(text: str) -> str:
    """Breaks a paragraph into lines as the pages have them."""
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def block(text: str, page: Path, mark: str = "run") -> str:
    """Replaces what stands between a page's marks; returns the page's whole new text.

    Raises:
      ValueError: the page does not have the pair of marks once.
    """
    old = page.read_text(encoding="utf-8")
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    # A function, because `text` may hold what re.sub takes for a group.
    new, count = re.subn(pattern, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", old, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page}: got {count} places between <!-- {mark} --> and <!-- /{mark} -->; expected one")
    return new


def publish(
    kept: Results, file: Path, sections: Mapping[Path, str], figures: Path, pictures: Mapping[str, str], root: Path
) -> None:
    """Writes kept rows, the parts of pages that are made of them, and pictures.

    Args:
      kept: the results that the pages show. file: where they are written. sections: text by page.
      figures: folder of the run's figures. pictures: names in docs/pictures, by the run's own.
    """
    (root / file).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    for page, text in sections.items():
        (root / page).write_text(block(text, root / page), encoding="utf-8")
    for figure, name in pictures.items():
        if (figures / figure).exists():
            shutil.copyfile(figures / figure, root / "docs" / "pictures" / name)


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a finished run into the pages, docs/results.json and docs/pictures.

    Raises:
      ValueError: the folder holds no results that a page shows, or a page lacks its marks.
    """
    files = [folder / "results.json", *sorted(folder.glob("*/results.json"))]
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    windows = {run["config"]["backbone"]: run for run in runs if "window" in run["config"].get("suite", ())}
    main = runs[0] if files[0].exists() and "repair" in runs[0]["config"].get("suite", ()) else None
    if main is None and not windows:
        raise ValueError(f"{folder}: got no results of the main comparison or of the window's suite; expected a run")

    if windows:
        page = root / RESULTS
        page.write_text(block(windows_section(windows), page, "windows"), encoding="utf-8")
    if main is not None:
        shown = kept(main)
        sections = {Path(page): section(shown, page) for page in PAGES}
        pictures = {figure: name for name, figure in PICTURES.items()}
        publish(shown, Path("docs/results.json"), sections, folder / "figures", pictures, root)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
