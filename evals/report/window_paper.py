"""The paper's figures of the window beside ours, and the small models' beside each other: words computed from rows."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..harness.frame import Rows
from ..harness.intervals import Interval
from ..harness.tables import markdown_table
from .figures import Results
from .wording import number, show, within

GQA, DEEPSTACK, MLA, MHA = "GQA", "deepstack", "MLA", "MHA"
NEAR = 0.1
"""How far from a figure of the paper ours may lie: its models are large and its images natural."""
FEWEST = 8
"""Numbers that rest on fewer questions (flips, for flip-recover) are not shown: they say nothing."""
PUBLISHED = json.loads(Path(__file__).with_name("published_windows.json").read_text(encoding="utf-8"))
"""Figures of Kamera (arXiv 2606.23581): what it is about and where, our row ("probe arm metric"), and by the kind of
attention it was measured with, the figure or range as printed, behind how ours is held against it: "near", within
`NEAR` of it; "least", or above; "most", or below."""


class PaperComparison(NamedTuple):
    """A published figure beside ours. how: in words, how ours differs ("" where it does not)."""

    about: str
    paper: str
    here: str
    verdict: str
    how: str


def attention_of(results: Results) -> str:
    """Says which of the paper's four kinds of attention a run's backbone has."""
    config = results.get("config", {})
    name, channels = str(config.get("backbone", "")), set(config.get("kv", {}))
    if "ckv" in channels:
        return MLA
    if "qwen3" in name:
        return DEEPSTACK
    return MHA if "llava" in name else GQA


def enough(got: Interval) -> bool:
    """Returns whether a number is defined and rests on enough questions to be shown."""
    return math.isfinite(got.value) and got.n >= FEWEST


def beside_the_paper(results: Results) -> list[PaperComparison]:
    """Sets every published figure of the window beside this run's, for its kind of attention; all words generated."""
    rows, kind = Rows(results), attention_of(results)
    found = []
    for published in PUBLISHED:
        probe, arm, metric = published["row"].split(" ")
        got = rows.get(probe, arm, metric)
        if kind not in published["values"] or not enough(got):
            continue

        # A range is printed by its ends, a figure stands for both of its own.
        sense, *ends = published["values"][kind]
        least, most = ends[0], ends[-1]
        low = -math.inf if sense == "most" else least - NEAR
        high = {"least": math.inf, "most": most, "near": most + NEAR}[sense]
        # Sums of decimals are off by a rounding.
        verdict = within(got, low - 1e-9, high + 1e-9).replace("same direction", "within")

        how = ""
        if verdict != "within" and low <= got.value <= high:
            how = "the value agrees, its interval does not"
        elif verdict != "within":
            apart, side = (got.value - most, "above") if got.value > high else (least - got.value, "below")
            unsure = ", but the interval reaches it" if verdict == "undecided" else ""
            how = f"{number(apart)} {side} the paper's{unsure}"

        paper = f"{' to '.join(map(number, ends))} ({kind}; {published['where']})"
        found.append(PaperComparison(published["about"], paper, show(got), verdict, how))
    return found


SIDE_BY_SIDE = {
    "orbit patch of 3, facts (η)": ("window.reorder", "orbit.k=3.lead=0", "eta.chain"),
    "orbit patch of 3, where order decides (η)": ("window.reorder", "orbit.k=3.lead=0", "eta.override"),
    "kept survivors, facts that stay (KL, forget)": ("window.slide", "keep.gone=1.lead=0", "kl.survivor"),
    "kept survivors, mixed rows (KL, forget)": ("window.slide", "keep.gone=1.lead=0", "kl.aggregate"),
    "… the same (KL, remember)": ("window.slide.remember", "keep.gone=1.lead=0", "kl.aggregate"),
    "removal patch of another context (η, facts that stay)": ("window.slide", "removal.gone=1.lead=0", "eta.survivor"),
    "recall, a third replaced: stale (η)": ("window.recall", "stale.turnover=1.lead=0", "eta.chain"),
    "… fixed earlier context (η)": ("window.recall", "fixed_earlier.turnover=1.lead=0", "eta.chain"),
    "… fresh (η)": ("window.recall", "fresh.turnover=1.lead=0", "eta.chain"),
    "recall, all replaced: stale (η)": ("window.recall", "stale.turnover=3.lead=0", "eta.chain"),
    "… fresh, all replaced (η)": ("window.recall", "fresh.turnover=3.lead=0", "eta.chain"),
    "drift, one replaced: stored (η)": ("window.drift", "stored.replaced=1.lead=0", "eta.chain"),
    "… the window's own rebuilt patch (η)": ("window.drift", "rebuilt.replaced=1.lead=0", "eta.chain"),
    "drift, 3 irrelevant more: stored (η)": ("window.drift", "stored.distractors=3.lead=0", "eta.chain"),
    "drift, all replaced: upper layers from a quarter (η)": ("window.drift", "deep.replaced=3.lead=0", "eta.chain"),
    "8 images from the cache: blind (flips)": ("window.many", "blind.chunks=8.lead=0", "flips.chain"),
    "… kept survivors (flips)": ("window.many", "kept.chunks=8.lead=0", "flips.chain"),
    "… own patches, oracle (flips)": ("window.many", "oracle.chunks=8.lead=0", "flips.chain"),
    "… 8, re-prefill itself (accuracy)": ("window.many", "re-prefill.chunks=8.lead=0", "accuracy.chain"),
}


def side_by_side(results: Mapping[str, Results]) -> str:
    """Writes the window suite's main figures as a Markdown table, a column per backbone; intervals are in reports."""
    every = {name: Rows(each) for name, each in results.items()}
    head = ["figure", *(f"{name} ({attention_of(each)})" for name, each in results.items())]
    lines = []
    for about, where in SIDE_BY_SIDE.items():
        found = [rows.get(*where) for rows in every.values()]
        lines.append([about, *(number(got.value) if enough(got) else "–" for got in found)])
    return markdown_table(head, [line for line in lines if set(line[1:]) != {"–"}])


def write_windows(results: Mapping[str, Results], folder: Path) -> Path:
    """Writes windows.md, the backbones side by side; returns its path."""
    path = folder / "windows.md"
    path.write_text(side_by_side(results) + "\n", encoding="utf-8")
    return path
