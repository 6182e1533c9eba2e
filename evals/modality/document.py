"""The tables of docs/experiments/modality.md, written from a run: `python -m evals.modality.document out/modality`.

Keeps the rows that the page shows in docs/modality.json, and draws its figure from them; without a folder it writes
page and figure from that file. A test compares the page with it.
"""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..report.summary import NO_WINDOW
from ..results.intervals import Interval
from ..results.rows import Rows, rounded_row
from ..results.tables import aligned_table, markdown_table
from ..rules import RULES
from .figures import draw
from .suite import BLIND, BOUND, REFERENCE, WITHOUT, is_seed, mean_of, modality_of
from .task import KINDS, ONE_CHUNK
from .task_spec import MODALITIES

PAGE, KEPT = Path("docs/experiments/modality.md"), Path("docs/modality.json")
PICTURE = Path("docs/pictures/modality.png")
SHOWN: str = RULES.modality["shown_kind"]
PATCH = f"patch.rank={RULES.arms.shown_rank}"
METRICS = ("accuracy", "difference", "kl", "eta")
TITLES = {
    "images": "images",
    "video": "video",
    "rendered": "rendered text",
    "words": "words (text tokens)",
    "sound": "sound",
}
Table = tuple[list[str], list[list[str]]]


def modalities_of(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the training seeds of every modality that was measured, in the order of the modalities."""
    names = [name for name in dict.fromkeys(row["model"] for row in results["rows"]) if not name.startswith("mean.")]
    found = {}
    for modality in MODALITIES:
        seeds = [name for name in names if modality_of(name) == modality and is_seed(name)]
        if seeds:
            found[modality] = seeds
    return found


def controls_of(results: Mapping[str, Any]) -> list[str]:
    """Lists the instances that were trained without a window."""
    names = dict.fromkeys(row["model"] for row in results["rows"])
    return [name for name in names if name.endswith(NO_WINDOW)]


def arms_table(results: Mapping[str, Any], kind: str = SHOWN) -> Table:
    """Makes the table of what every arm answers right, a line per modality: means over seeds, least and largest."""
    arms, lines = [WITHOUT, *RULES.modality["arms"]], []
    for modality, seeds in modalities_of(results).items():
        rows = Rows(results, mean_of(modality))
        cells = [_spread(rows.get(_probe(modality), arm, f"accuracy.{kind}"), len(seeds)) for arm in arms]
        lines.append([TITLES[modality], *cells])
    return ["modality", *(f"`{arm}`" for arm in arms)], lines


def gap_table(results: Mapping[str, Any], kind: str = SHOWN) -> Table:
    """Makes the table of the gap and of what closes it: accuracy and nats, shares of nats by rank."""
    arms = [arm for arm in RULES.modality["arms"] if arm.startswith("patch.")]
    lines = []
    for modality, seeds in modalities_of(results).items():
        rows, probe = Rows(results, mean_of(modality)), _probe(modality)
        lost, kl = (rows.get(probe, BLIND, f"{metric}.{kind}") for metric in ("difference", "kl"))
        shares = [_spread(rows.get(probe, arm, f"eta.{kind}"), len(seeds), 2) for arm in arms]
        negated = Interval(-lost.value, -lost.high, -lost.low, lost.n)
        lines.append([TITLES[modality], _spread(negated, len(seeds)), _spread(kl, len(seeds), 2), *shares])
    return [
        "modality",
        "accuracy lost by blind reuse",
        "KL of blind reuse, nats",
        *(f"η, `{arm}`" for arm in arms),
    ], lines


def controls_table(results: Mapping[str, Any]) -> Table:
    """Makes the table of the negative controls: questions that one chunk answers, and the page without the sheets."""
    lines = []
    for modality, seeds in modalities_of(results).items():
        rows, probe, count = Rows(results, mean_of(modality)), _probe(modality), len(seeds)
        line = [TITLES[modality]]
        for kind in ONE_CHUNK:
            right = [rows.get(probe, arm, f"accuracy.{kind}").value for arm in (REFERENCE, BLIND)]
            line += [f"{right[0]:.3f} → {right[1]:.3f}", _spread(rows.get(probe, BLIND, f"kl.{kind}"), count)]
        line += [_spread(rows.get(probe, arm, f"accuracy.{kind}"), count) for arm, kind in _ALONE]
        lines.append(line)
    head = [part for kind in ONE_CHUNK for part in (f"{kind}: re-prefill → blind", f"{kind}: KL, nats")]
    return ["modality", *head, "page, without the sheets", "chain, without", "chain, re-prefilled page alone"], lines


_ALONE = ((WITHOUT, "page"), (WITHOUT, SHOWN), (BOUND, SHOWN))


def instances_table(results: Mapping[str, Any]) -> Table:
    """Makes the table of every instance: chain questions, with intervals over its own contexts."""
    lines = []
    names = [name for seeds in modalities_of(results).values() for name in seeds] + controls_of(results)
    for name in names:
        rows, probe = Rows(results, name), _probe(modality_of(name))
        right = [rows.get(probe, arm, f"accuracy.{SHOWN}") for arm in (REFERENCE, BLIND, PATCH)]
        kl, eta = rows.get(probe, BLIND, f"kl.{SHOWN}"), rows.get(probe, PATCH, f"eta.{SHOWN}")
        lines.append([f"`{name}`", *map(_interval, right), _interval(kl), _interval(eta)])
    return ["instance", "re-prefill", "blind", f"`{PATCH}`", "KL of blind, nats", f"η, `{PATCH}`"], lines


def kinds_table(results: Mapping[str, Any]) -> Table:
    """Makes the table of every kind of question: re-prefill, blind, patch."""
    lines = []
    for modality in modalities_of(results):
        rows, probe = Rows(results, mean_of(modality)), _probe(modality)
        cells = []
        for kind in KINDS:
            right = [rows.get(probe, arm, f"accuracy.{kind}").value for arm in (REFERENCE, BLIND, PATCH)]
            cells.append(" → ".join(f"{value:.3f}" for value in right))
        lines.append([TITLES[modality], *cells])
    return ["modality", *KINDS], lines


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """Says by the rules of every modality whether it shows a gap, and whether a patch closes it."""
    rules, said = RULES.modality, []
    for modality, seeds in modalities_of(results).items():
        probe, mean = _probe(modality), Rows(results, mean_of(modality))
        lost = [Rows(results, name).get(probe, BLIND, f"difference.{SHOWN}") for name in seeds]
        eta = mean.get(probe, PATCH, f"eta.{SHOWN}")
        whole = -mean.get(probe, BLIND, f"difference.{SHOWN}").value
        if all(own.high < 0 for own in lost) and whole >= rules["gap"]:
            closes = "closes it" if eta.value >= rules["recovered"] else "does not close it"
            verdict = f"a gap of {whole:.3f}; rank {RULES.arms.shown_rank} {closes} ({eta.value:.2f} of the KL)"
        elif whole < rules["no_gap"]:
            verdict = f"no gap ({whole:.3f})"
        else:
            verdict = f"undecided ({whole:.3f} lost, not by the interval of every seed, or less than {rules['gap']})"
        few = "" if len(seeds) >= rules["seeds_at_least"] else f"; {_counted(seeds)}, so no claim"
        said.append(f"{TITLES[modality]}: {verdict}{few}.")

    for name in controls_of(results):
        modality, rows = modality_of(name), Rows(results, name)
        lost = rows.get(_probe(modality), BLIND, f"difference.{SHOWN}")
        interval = f"{-lost.value:.3f} [{-lost.high:.3f}, {-lost.low:.3f}]"
        said.append(f"{TITLES[modality]}, the control trained without a window: {interval} lost by blind reuse.")
    return said


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    rows = [row for row in results["rows"] if row["metric"].partition(".")[0] in METRICS]
    names = ("model", "instances", "seed", "contexts", "modality rules", "parts_done", "parts")
    return {"config": {name: results["config"][name] for name in names}, "rows": [rounded_row(row) for row in rows]}


def section(kept: Mapping[str, Any]) -> str:
    """Writes the text between the page's marks."""
    config = kept["config"]
    seeds = "; ".join(f"{TITLES[name]}: {_counted(own)}" for name, own in modalities_of(kept).items())
    parts = [
        "\n".join(f"- {line}" for line in verdicts(kept)),
        textwrap.fill(
            f"{config['contexts']} contexts, the same in every modality; {seeds}. Means over seeds, the least and the "
            "largest in brackets.",
            118,
        ),
        f"**Answered right, {SHOWN} questions.**\n\n{markdown_table(*arms_table(kept))}",
        f"**The gap, {SHOWN} questions, and the share of its KL that patches close.**\n\n"
        f"{markdown_table(*gap_table(kept))}",
        f"**Negative controls.**\n\n{markdown_table(*controls_table(kept))}",
        f"**Every kind of question, re-prefill → blind → `{PATCH}`.**\n\n{markdown_table(*kinds_table(kept))}",
        "**Every instance, with 95 % intervals over its contexts.** A control was trained without a window.\n\n"
        f"{markdown_table(*instances_table(kept))}",
    ]
    return "\n\n".join(parts)


def printed(results: Mapping[str, Any]) -> str:
    """Writes what the program prints of a run."""
    return "\n".join([aligned_table(*gap_table(results)), "", *verdicts(results)])


def write(kept: Mapping[str, Any], root: Path = ROOT) -> None:
    """Puts kept rows into the page and docs/modality.json, and draws the figure."""
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE), encoding="utf-8")
    draw(kept, root / PICTURE)


def _probe(modality: str) -> str:
    return f"modality.{modality}"


def _counted(seeds: Sequence[str]) -> str:
    return f"{len(seeds)} training seed{'s' if len(seeds) > 1 else ''}"


def _spread(found: Interval, seeds: int, digits: int = 3) -> str:
    """Writes a mean over seeds; the least and the largest where there are several."""
    if not found.n:
        return "–"
    ends = f" ({found.low:.{digits}f} to {found.high:.{digits}f})" if seeds > 1 else ""
    return f"{found.value:.{digits}f}{ends}"


def _interval(found: Interval) -> str:
    if not found.n or found.value != found.value:
        return "–"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main(arguments: Sequence[str]) -> None:
    """Writes the page from the folder of a run, or from the rows that are kept."""
    if len(arguments) > 1:
        write(summary(json.loads((Path(arguments[1]) / "results.json").read_text(encoding="utf-8"))))
    else:
        write(json.loads((ROOT / KEPT).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv)
