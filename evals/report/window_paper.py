"""The paper's figures of the window beside ours, and the small models' beside each other: words computed from rows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..results.intervals import Interval
from ..results.rows import Rows
from ..results.tables import markdown_table
from .figures import Results
from .wording import number, show, within


class PaperComparison(NamedTuple):
    """A published figure beside ours. how: in words, how ours differs ("" where it does not)."""

    about: str
    paper: str
    here: str
    verdict: str
    how: str


GQA, DEEPSTACK, MLA, MHA = "GQA", "deepstack", "MLA", "MHA"


def attention_of(results: Results) -> str:
    """Says which of the paper's four kinds of attention a run's backbone has."""
    config = results.get("config", {})
    name, channels = str(config.get("backbone", "")), set(config.get("kv", {}))
    if "ckv" in channels:
        return MLA
    if "qwen3" in name:
        return DEEPSTACK
    return MHA if "llava" in name else GQA


class Quoted(NamedTuple):
    """A figure of the paper as it prints it, and how ours is held against it.

    low, high: the figure (twice) or the range. sense: "near", ours lies within `NEAR` of it; "least", or above; "most",
    or below.
    """

    low: float
    high: float
    sense: str = "near"

    @property
    def words(self) -> str:
        """The figure as printed."""
        return number(self.low) if self.low == self.high else f"{number(self.low)} to {number(self.high)}"

    @property
    def held_against(self) -> tuple[float, float]:
        """Where ours is to lie."""
        low = -math.inf if self.sense == "most" else self.low - NEAR
        return low, math.inf if self.sense == "least" else self.high + (0 if self.sense == "most" else NEAR)


NEAR = 0.1
"""How far from a figure of the paper ours may lie: its models are large and its images natural."""


def near(low: float, high: float | None = None) -> Quoted:
    """Makes a figure that ours should be close to."""
    return Quoted(low, low if high is None else high)


def least(low: float, high: float | None = None) -> Quoted:
    """Makes a figure where more is better."""
    return Quoted(low, low if high is None else high, "least")


def most(value: float) -> Quoted:
    """Makes a figure where less is as the paper says."""
    return Quoted(value, value, "most")


class Published(NamedTuple):
    """A figure of Kamera (arXiv 2606.23581), by the kind of attention it was measured with, and our row beside it."""

    about: str
    where: str
    row: tuple[str, str, str]
    values: Mapping[str, Quoted]


def _reorder(count: int, values: Mapping[str, float]) -> Published:
    row = ("window.reorder", f"orbit.k={count}.lead=0", "eta.chain")
    return Published(f"η of one orbit patch, K = {count}", "§5", row, {kind: least(x) for kind, x in values.items()})


def _drift(about: str, arm: str, metric: str, values: Mapping[str, Quoted]) -> Published:
    return Published(about, "App. D", ("window.drift", f"{arm}.lead=0", metric), values)


def _recall(about: str, arm: str, metric: str, values: Mapping[str, Quoted]) -> Published:
    return Published(about, "Table 1, §5", ("window.recall", f"{arm}.lead=1", f"{metric}.chain"), values)


SURVIVORS = {GQA: most(0.015), MLA: most(0.023), DEEPSTACK: most(0.113)}
FRESH = {GQA: least(0.87), DEEPSTACK: least(0.96), MLA: least(0.81)}
PUBLISHED = (
    _reorder(3, {GQA: 0.92, DEEPSTACK: 0.87, MLA: 0.87, MHA: 0.89}),
    _reorder(4, {GQA: 0.93, MLA: 0.85}),
    _reorder(6, {GQA: 0.94, MLA: 0.83}),
    Published(
        "η of the order's own patch, K = 3 (oracle)",
        "§5, exact",
        ("window.reorder", "oracle.k=3.lead=0", "eta.chain"),
        {GQA: least(0.94), DEEPSTACK: least(0.92), MLA: least(0.94), MHA: least(0.93)},
    ),
    Published(
        "How far an order moves the deficit, K = 3",
        "§5",
        ("window.reorder", "order.k=3.lead=0", "relative_order_effect"),
        dict.fromkeys((GQA, DEEPSTACK, MLA, MHA), near(0.43, 0.53)),
    ),
    Published(
        "KL of survivors as they are, facts that stay",
        "§5",
        ("window.slide", "keep.gone=1.lead=1", "kl.survivor"),
        SURVIVORS,
    ),
    Published(
        "… rows that mix facts that stayed and facts that left",
        "§5",
        ("window.slide", "keep.gone=1.lead=1", "kl.aggregate"),
        SURVIVORS,
    ),
    Published(
        "η of a removal patch formed elsewhere, facts that stay",
        "§5, formed of its own context",
        ("window.slide", "removal.gone=1.lead=1", "eta.survivor"),
        {DEEPSTACK: least(0.82, 0.87)},
    ),
    _recall(
        "η of the stale patch, no turnover",
        "stale.turnover=0",
        "eta",
        dict.fromkeys((GQA, DEEPSTACK, MLA), least(0.9)),
    ),
    _recall(
        "η of the stale patch, all replaced",
        "stale.turnover=3",
        "eta",
        {GQA: most(-0.68), DEEPSTACK: most(-2.85), MLA: near(0.29)},
    ),
    _recall(
        "flip-recover of the stale patch, all replaced",
        "stale.turnover=3",
        "flip_recover",
        dict.fromkeys((GQA, DEEPSTACK, MLA), near(0.0, 0.25)),
    ),
    _recall(
        "η of a patch on the fixed earlier context, two of three replaced", "fixed_earlier.turnover=2", "eta", FRESH
    ),
    _recall("η of a patch formed behind the window, all replaced", "fresh.turnover=3", "eta", FRESH),
    _recall(
        "flip-recover of a patch formed behind the window, all replaced",
        "fresh.turnover=3",
        "flip_recover",
        {GQA: least(0.75), DEEPSTACK: least(1.0), MLA: least(0.67)},
    ),
    _drift(
        "η of the stored patch, one dropped and one doubled", "stored.drop_duplicate", "eta.chain", {GQA: near(0.92)}
    ),
    _drift("η of the stored patch, another order", "stored.reorder", "eta.chain", {GQA: near(0.76, 0.77)}),
    _drift("η of the stored patch, one replaced", "stored.replaced=1", "eta.chain", {GQA: near(0.76, 0.77)}),
    _drift("η of the stored patch, all replaced", "stored.replaced=3", "eta.chain", {GQA: most(-3.5)}),
    _drift(
        "η of the stored patch, one more that is irrelevant", "stored.distractors=1", "eta.chain", {GQA: near(0.71)}
    ),
    _drift("η of the stored patch, two more", "stored.distractors=2", "eta.chain", {GQA: near(0.39)}),
    _drift("η of the stored patch, three more", "stored.distractors=3", "eta.chain", {GQA: near(0.08)}),
    _drift("η of a patch rebuilt with three more", "rebuilt.distractors=3", "eta.chain", {GQA: least(0.92)}),
    _drift(
        "flip-recover of the stored patch, three more",
        "stored.distractors=3",
        "flip_recover.chain",
        {GQA: near(0.17)},
    ),
    _drift(
        "η of an update, one replaced",
        "update.replaced=1",
        "eta.chain",
        {GQA: least(0.81, 0.91), DEEPSTACK: least(0.94, 0.98)},
    ),
    _drift(
        "η of an update, all replaced (oracle)",
        "oracle_update.replaced=3",
        "eta.chain",
        {GQA: least(0.81, 0.91), DEEPSTACK: least(0.94, 0.98)},
    ),
    _drift("η of the deep three quarters recomputed, all replaced", "deep.replaced=3", "eta.chain", {GQA: least(0.9)}),
    _drift("η of the lowest quarter recomputed, all replaced", "shallow.replaced=3", "eta.chain", {GQA: near(0.37)}),
    Published(
        "False reuse of a gate at half coverage",
        "App. D",
        ("window.gate", "coverage=0.5", "false_reuse"),
        {GQA: near(0.24, 0.47), MLA: near(0.24, 0.47)},
    ),
)


def beside_the_paper(results: Results) -> list[PaperComparison]:
    """Sets every published figure of the window beside this run's, for its kind of attention; all words generated."""
    rows, kind = Rows(results), attention_of(results)
    found = []
    for each in PUBLISHED:
        got = rows.get(*each.row)
        if kind not in each.values or not enough(got):
            continue

        quoted = each.values[kind]
        low, high = quoted.held_against
        verdict = within(got, low - 1e-9, high + 1e-9)
        verdict = {"same direction": "within", "differs": "differs", "undecided": "undecided"}[verdict]
        how = _how(got, quoted, low, high, verdict)
        found.append(PaperComparison(each.about, f"{quoted.words} ({kind}; {each.where})", show(got), verdict, how))

    return found


FEWEST = 8
"""Numbers that rest on fewer questions (flips, for flip-recover) are not shown: they say nothing."""


def enough(got: Interval) -> bool:
    """Returns whether a number is defined and rests on enough questions to be shown."""
    return math.isfinite(got.value) and got.n >= FEWEST


def _how(got: Interval, quoted: Quoted, low: float, high: float, verdict: str) -> str:
    if verdict == "within":
        return ""
    if low <= got.value <= high:
        return "the value agrees, its interval does not"
    over = got.value > high
    apart = got.value - quoted.high if over else quoted.low - got.value
    unsure = ", but the interval reaches it" if verdict == "undecided" else ""
    return f"{number(apart)} {'above' if over else 'below'} the paper's{unsure}"


SIDE_BY_SIDE = {
    "orbit patch of 3, facts (η)": ("window.reorder", "orbit.k=3.lead=0", "eta.chain"),
    "orbit patch of 6, facts (η)": ("window.reorder", "orbit.k=6.lead=0", "eta.chain"),
    "orbit patch of 3, where order decides (η)": ("window.reorder", "orbit.k=3.lead=0", "eta.override"),
    "kept survivors, facts that stay (KL, forget)": ("window.slide", "keep.gone=1.lead=0", "kl.survivor"),
    "… behind a pinned lead": ("window.slide", "keep.gone=1.lead=1", "kl.survivor"),
    "kept survivors, mixed rows (KL, forget)": ("window.slide", "keep.gone=1.lead=0", "kl.aggregate"),
    "… the same (KL, remember)": ("window.slide.remember", "keep.gone=1.lead=0", "kl.aggregate"),
    "… behind a pinned lead (KL, remember)": ("window.slide.remember", "keep.gone=1.lead=1", "kl.aggregate"),
    "removal patch of another context (η, facts that stay)": ("window.slide", "removal.gone=1.lead=0", "eta.survivor"),
    "recall, a third replaced: stale (η)": ("window.recall", "stale.turnover=1.lead=0", "eta.chain"),
    "… fixed earlier context (η)": ("window.recall", "fixed_earlier.turnover=1.lead=0", "eta.chain"),
    "… fresh (η)": ("window.recall", "fresh.turnover=1.lead=0", "eta.chain"),
    "recall, all replaced: stale (η)": ("window.recall", "stale.turnover=3.lead=0", "eta.chain"),
    "… fresh, all replaced (η)": ("window.recall", "fresh.turnover=3.lead=0", "eta.chain"),
    "drift, one replaced: stored (η)": ("window.drift", "stored.replaced=1.lead=0", "eta.chain"),
    "… the window's own rebuilt patch (η)": ("window.drift", "rebuilt.replaced=1.lead=0", "eta.chain"),
    "drift, 3 irrelevant more: stored (η)": ("window.drift", "stored.distractors=3.lead=0", "eta.chain"),
    "drift, all replaced: update, oracle (η)": ("window.drift", "oracle_update.replaced=3.lead=0", "eta.chain"),
    "… upper layers from a quarter (η)": ("window.drift", "deep.replaced=3.lead=0", "eta.chain"),
    "… upper layers from the first (η)": ("window.drift", "deepest.replaced=3.lead=0", "eta.chain"),
    "8 images from the cache: blind (flips)": ("window.many", "blind.chunks=8.lead=0", "flips.chain"),
    "… kept survivors (flips)": ("window.many", "kept.chunks=8.lead=0", "flips.chain"),
    "… own patches, oracle (flips)": ("window.many", "oracle.chunks=8.lead=0", "flips.chain"),
    "… 8, re-prefill itself (accuracy)": ("window.many", "re-prefill.chunks=8.lead=0", "accuracy.chain"),
    "… the page prefilled behind canonicals, minus that": (
        "window.many",
        "blind_fresh_page.chunks=8.lead=0",
        "difference.chain",
    ),
    "32 images from the cache: blind (flips)": ("window.many", "blind.chunks=32.lead=0", "flips.chain"),
    "… 32, kept survivors (flips)": ("window.many", "kept.chunks=32.lead=0", "flips.chain"),
    "… 32, own patches, oracle (flips)": ("window.many", "oracle.chunks=32.lead=0", "flips.chain"),
    "… 32, re-prefill itself (accuracy)": ("window.many", "re-prefill.chunks=32.lead=0", "accuracy.chain"),
    "gate: false reuse at half coverage": ("window.gate", "coverage=0.5", "false_reuse"),
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
