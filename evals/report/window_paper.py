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


class Beside(NamedTuple):
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


Range = tuple[float, float]


class Published(NamedTuple):
    """A figure of Kamera (arXiv 2606.23581), by kind of attention, and which of our rows it is set beside.

    values: a figure as printed, which ours agrees with within `NEAR`; or the range that it is to lie in.
    """

    about: str
    where: str
    row: tuple[str, str, str]
    values: Mapping[str, float | Range]


NEAR = 0.1


def _all(low: float, high: float) -> dict[str, float | Range]:
    return dict.fromkeys((GQA, DEEPSTACK, MLA, MHA), (low, high))


def _reorder(count: int, values: Mapping[str, float | Range]) -> Published:
    row = ("window.reorder", f"orbit.k={count}.lead=0", "eta.chain")
    return Published(f"η of one orbit patch, K = {count}", "§5", row, values)


def _drift(about: str, arm: str, metric: str, values: Mapping[str, float | Range]) -> Published:
    return Published(about, "App. D", ("window.drift", f"{arm}.lead=0", metric), values)


PUBLISHED = (
    _reorder(3, {GQA: 0.92, DEEPSTACK: 0.87, MLA: 0.87, MHA: 0.89}),
    _reorder(4, {GQA: 0.93, MLA: 0.85}),
    _reorder(6, {GQA: 0.94, MLA: 0.83}),
    Published(
        "How far an order moves the deficit, K = 3",
        "§5",
        ("window.reorder", "order.k=3.lead=0", "relative_order_effect"),
        _all(0.43, 0.53),
    ),
    Published(
        "KL of survivors as they are, facts that stay",
        "Table 1",
        ("window.slide", "keep.gone=1.lead=1", "kl.survivor"),
        {GQA: (0.0, 0.015), MLA: (0.0, 0.023), DEEPSTACK: (0.0, 0.113)},
    ),
    Published(
        "… rows that mix facts that stayed and facts that left",
        "Table 1",
        ("window.slide", "keep.gone=1.lead=1", "kl.aggregate"),
        {GQA: (0.0, 0.015), MLA: (0.0, 0.023), DEEPSTACK: (0.0, 0.113)},
    ),
    Published(
        "η of a removal patch formed elsewhere, facts that stay",
        "§5, its own context",
        ("window.slide", "removal.gone=1.lead=1", "eta.survivor"),
        {DEEPSTACK: (0.82, 1.0)},
    ),
    Published(
        "η of the stale patch, no turnover",
        "Table 1",
        ("window.recall", "stale.turnover=0.lead=1", "eta.chain"),
        _all(0.8, 1.0),
    ),
    Published(
        "η of the stale patch, all replaced",
        "Table 1",
        ("window.recall", "stale.turnover=3.lead=1", "eta.chain"),
        {GQA: (-math.inf, -0.58), DEEPSTACK: (-math.inf, -2.75), MLA: 0.29},
    ),
    Published(
        "η of a patch on the fixed earlier context, two of three replaced",
        "Table 1",
        ("window.recall", "fixed_earlier.turnover=2.lead=1", "eta.chain"),
        {GQA: (0.77, 1.0), DEEPSTACK: (0.86, 1.0), MLA: (0.71, 1.0)},
    ),
    Published(
        "η of a patch formed behind the window, all replaced",
        "Table 1",
        ("window.recall", "fresh.turnover=3.lead=1", "eta.chain"),
        {GQA: (0.77, 1.0), DEEPSTACK: (0.86, 1.0), MLA: (0.71, 1.0)},
    ),
    _drift("η of the stored patch, one dropped and one doubled", "stored.drop_duplicate", "eta.chain", _all(0.82, 1.0)),
    _drift("η of the stored patch, another order", "stored.reorder", "eta.chain", {GQA: (0.66, 1.0)}),
    _drift("η of the stored patch, one replaced", "stored.replaced=1", "eta.chain", {GQA: (0.67, 0.87)}),
    _drift("η of the stored patch, all replaced", "stored.replaced=3", "eta.chain", {GQA: (-math.inf, 0.0)}),
    _drift("η of the stored patch, one more that is irrelevant", "stored.distractors=1", "eta.chain", {GQA: 0.71}),
    _drift("η of the stored patch, two more", "stored.distractors=2", "eta.chain", {GQA: 0.39}),
    _drift("η of the stored patch, three more", "stored.distractors=3", "eta.chain", {GQA: 0.08}),
    _drift("η of a patch rebuilt with three more", "rebuilt.distractors=3", "eta.chain", {GQA: (0.82, 1.0)}),
    _drift(
        "flip-recover of the stored patch, three more",
        "stored.distractors=3",
        "flip_recover.chain",
        {GQA: 0.17},
    ),
    _drift(
        "η of an update, all replaced",
        "update.replaced=3",
        "eta.chain",
        {GQA: (0.81, 1.0), DEEPSTACK: (0.94, 1.0)},
    ),
    _drift("η of the deep three quarters recomputed, all replaced", "deep.replaced=3", "eta.chain", {GQA: (0.9, 1.0)}),
    _drift("η of the lowest quarter recomputed, all replaced", "shallow.replaced=3", "eta.chain", {GQA: 0.37}),
    Published(
        "False reuse of a gate at half coverage",
        "App. D",
        ("window.gate", "coverage=0.5", "false_reuse"),
        {GQA: (0.24, 0.47), MLA: (0.24, 0.47)},
    ),
)


def beside_the_paper(results: Results) -> list[Beside]:
    """Sets every published figure of the window beside this run's, for its kind of attention; all words generated."""
    rows, kind = Rows(results), attention_of(results)
    found = []
    for each in PUBLISHED:
        got = rows.get(*each.row)
        if not math.isfinite(got.value) or kind not in each.values:
            continue
        value = each.values[kind]
        low, high = value if isinstance(value, tuple) else (value - NEAR, value + NEAR)
        paper = f"{_printed(value)} ({kind}; {each.where})"
        verdict = within(got, low - 1e-9, high + 1e-9)
        verdict = {"same direction": "within", "differs": "differs", "undecided": "undecided"}[verdict]
        found.append(Beside(each.about, paper, show(got), verdict, _how(got, low, high, verdict)))
    return found


def _printed(value: float | Range) -> str:
    if not isinstance(value, tuple):
        return number(value)
    low, high = value
    if low <= 0:
        return f"{number(high)} or less"
    return f"{number(low)} or more" if high >= 1 else f"{number(low)} to {number(high)}"


def _how(got: Interval, low: float, high: float, verdict: str) -> str:
    if verdict == "within":
        return ""
    over = got.value > high
    apart = got.value - high if over else low - got.value
    if apart <= 0:
        return "the value lies within, its interval does not"
    side = "above" if over else "below"
    unsure = ", but the interval reaches it" if verdict == "undecided" else ""
    return f"{number(apart)} {side} the range{unsure}"


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
    "drift, 3 irrelevant more: stored (η)": ("window.drift", "stored.distractors=3.lead=0", "eta.chain"),
    "drift, all replaced: update (η)": ("window.drift", "update.replaced=3.lead=0", "eta.chain"),
    "… upper layers from a quarter (η)": ("window.drift", "deep.replaced=3.lead=0", "eta.chain"),
    "… upper layers from the first (η)": ("window.drift", "deepest.replaced=3.lead=0", "eta.chain"),
    "8 images from the cache: blind (flips)": ("window.many", "blind.chunks=8.lead=0", "flips.chain"),
    "… kept survivors (flips)": ("window.many", "kept.chunks=8.lead=0", "flips.chain"),
    "… own patches, oracle (flips)": ("window.many", "oracle.chunks=8.lead=0", "flips.chain"),
    "32 images from the cache: kept survivors (flips)": ("window.many", "kept.chunks=32.lead=0", "flips.chain"),
    "gate: false reuse at half coverage": ("window.gate", "coverage=0.5", "false_reuse"),
}


def write_windows(results: Mapping[str, Results], folder: Path) -> Path:
    """Writes windows.md: the window suite's main figures, a column per backbone; returns its path."""
    every = {name: Rows(each) for name, each in results.items()}
    head = ["figure", *(f"{name} ({attention_of(each)})" for name, each in results.items())]
    lines = [[about, *(show(rows.get(*where)) for rows in every.values())] for about, where in SIDE_BY_SIDE.items()]
    path = folder / "windows.md"
    path.write_text(markdown_table(head, [line for line in lines if set(line[1:]) != {"–"}]) + "\n", encoding="utf-8")
    return path
