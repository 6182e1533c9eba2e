"""The report of a run: one HTML page that opens offline, a summary for the terminal, and the comparison with print.

Nothing is judged here by hand: every "same direction" is computed from the rows of results.json.
"""

import base64
import html
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..results.intervals import Interval
from ..results.rows import COLUMNS, Rows
from .figures import DEFICIT_METRICS, KINDS, MULTI_HOP, Results, arm_label, byte_share, deficit_table
from .wording import above, number, show, within

VISIBLE = "repair.visible"
DEEP = "patch.deepest_half.rank=16"
SINGLE_HOP = ("page", "legend")
NO_WINDOW = "_no_window"
TOKEN_METHODS = ("first_k", "cacheblend", "oracle_delta")


def smallest_rank(results: Results, probe: str, tolerance: float = 0.01) -> int | None:
    """Smallest patch rank whose accuracy is within `tolerance` of re-prefill on every kind that needs both images.

    Chain and aggregate, and override where it was asked. None where no rank is, or where the probe was not run.
    """
    rows = Rows(results)
    kinds = [*MULTI_HOP, *({"override"} & set(rows.kinds(probe)))]
    close = lambda arm: all(abs(rows.gap(probe, arm, kind)) <= tolerance + 1e-9 for kind in kinds)
    return next((int(rank) for rank, arm in rows.settings(probe, "patch.rank=") if close(arm)), None)


# ----------------------------------------------------------------------------- beside what is in print


class Claim(NamedTuple):
    """A published finding beside ours.

    paper: arXiv 2606.23581, with the place in it. prototype: an earlier task of ours. here: measured by this run.
    verdict: "same direction", "differs", "undecided" (the interval holds both) or "not measured".
    """

    about: str
    paper: str
    prototype: str
    here: str
    verdict: str


Check = Callable[[Rows], tuple[str, str]]


def _one(probe: str, arm: str, metric: str, low: float, high: float = math.inf) -> Check:
    """The finding holds where this statistic lies in [low, high]."""
    return lambda rows: (show(rows.get(probe, arm, metric)), within(rows.get(probe, arm, metric), low, high))


def _versus(probe: str, metric: str, first: str, second: str, margin: float = 0.0) -> Check:
    """The finding holds where the first arm's statistic is above the second's by more than `margin`."""

    def check(rows: Rows) -> tuple[str, str]:
        a, b = (rows.get(probe, arm, metric) for arm in (first, second))
        return f"{arm_label(first)} {show(a)}, {arm_label(second)} {show(b)}", above(a, b, margin)

    return check


def _both(kinds: Sequence[str], low: float, high: float) -> Check:
    """The finding holds where blind reuse's accuracy difference lies in [low, high] for both kinds."""

    def check(rows: Rows) -> tuple[str, str]:
        got = {kind: rows.get(VISIBLE, "blind", f"difference.{kind}") for kind in kinds}
        found = [within(interval, low, high) for interval in got.values()]
        worst = next((word for word in ("not measured", "differs", "undecided") if word in found), "same direction")
        return ", ".join(f"{kind} {show(interval)}" for kind, interval in got.items()), worst

    return check


def _smallest(rows: Rows) -> tuple[str, str]:
    ranks = rows.settings(VISIBLE, "patch.rank=")
    if not ranks or not all(math.isfinite(rows.gap(VISIBLE, ranks[-1][1], kind)) for kind in MULTI_HOP):
        return "–", "not measured"
    rank = smallest_rank(rows.results, VISIBLE)
    if rank is None:
        return f"none up to {ranks[-1][0]:.0f}", "differs"
    return f"rank {rank}", "same direction" if 8 <= rank <= 32 else "differs"


def _deepens(rows: Rows) -> tuple[str, str]:
    tables = deficit_table(rows, "relative_norm")
    if not tables:
        return "–", "not measured"
    shown, grows = [], []
    for channel, points in tables.items():
        half = max(len(points) // 2, 1)
        shallow, deep = (sum(p.value for _, p in part) / len(part) for part in (points[:half], points[-half:]))
        shown.append(f"{channel}: {number(shallow)} → {number(deep)}")
        grows.append(deep > shallow)
    return ", ".join(shown), "same direction" if all(grows) else "differs"


def _diffuse(rows: Rows) -> tuple[str, str]:
    last = {channel: points[-1][1] for channel, points in deficit_table(rows, "token_share_90").items()}
    if not last:
        return "–", "not measured"
    least = min(last.values())
    return ", ".join(f"{channel}: {show(got)}" for channel, got in last.items()), within(least, 0.4, math.inf)


def _orbit(rows: Rows) -> tuple[str, str]:
    orbit, exact = (rows.get("reorder", arm, "eta.chain") for arm in ("orbit", "exact"))
    paired = rows.get("reorder", "orbit", "orbit_minus_exact.chain")
    verdict = within(orbit, exact.value - 0.1, math.inf) if math.isfinite(exact.value) else "not measured"
    return f"η {show(orbit)} and {show(exact)}; accuracy, paired: {show(paired)}", verdict


def _stale(rows: Rows) -> tuple[str, str]:
    got = [rows.get("recall", arm, "eta.aggregate") for _, arm in rows.settings("recall", "stale.turnover=")]
    if not got or not math.isfinite(got[-1].value):
        return "–", "not measured"
    return "η " + " → ".join([*(number(x.value) for x in got[:-1]), show(got[-1])]), within(got[-1], -math.inf, 0.5)


# (finding, paper, prototype, check): the figures as printed; every check reads the run's own rows.
PUBLISHED: tuple[tuple[str, str, str, Check], ...] = (
    (
        "Blind reuse loses multi-hop answers",
        ".74 → .38 (MM-NIAH retrieval-image), .59 → .41 (reasoning-image), Qwen2.5-VL; §6",
        "chain .977 → .453, aggregate .750 → .180",
        _both(MULTI_HOP, -math.inf, -1e-9),
    ),
    (
        "… but not single-hop answers (within 0.01)",
        "unchanged, .57; §1",
        "unchanged, .902; 1.000",
        _both(SINGLE_HOP, -0.01, 0.01),
    ),
    (
        "A rank-16 patch brings the accuracy back (within 0.05)",
        "retrieval-image .72 of .74, reasoning-image .64 of .59; §6",
        "chain .977 of .977",
        _one(VISIBLE, "patch.rank=16", "difference.chain", -0.05, 0.05),
    ),
    ("Rank at which accuracy is back (8 to 32)", "KL bends at 8–16, flat by 32; §4", "2–8", _smallest),
    (
        "Rank 64 removes the KL (η ≥ 0.9)",
        ".61 → .009; Table 3",
        "3.85 → 0",
        _one(VISIBLE, "patch.rank=64", "eta.chain", 0.9),
    ),
    (
        "At the bytes of rank 16 the patch beats token recompute (oracle choice)",
        "loss closed: patch .82, oracle .55 (of the query; ours of ‖Δ‖), first-k .31; Table 6",
        "not run",
        _versus(VISIBLE, "eta.chain", "patch.rank=16", "oracle_delta.bytes_of_rank=16"),
    ),
    (
        "The patch brings back flipped answers, CacheBlend at 15 % few",
        "96 % against 21–44 %; §6, Fig. 7",
        "100 % against 15 % (chain)",
        _versus(VISIBLE, "flip_recover.chain", "patch.rank=16", "cacheblend.budget=0.15", 0.3),
    ),
    ("The deficit grows with depth (‖Δ‖ relative, halves)", ".08 → .49; §4", "V: .02 → 1.13", _deepens),
    ("It is spread over tokens (90 % of it needs 40 % or more)", "about half of them; §4", "73–82 %", _diffuse),
    (
        "Its deepest half nearly suffices (η ≥ 0.9)",
        "≈ 95 %; App. C.3",
        "KL .0011 of 3.85",
        _one(VISIBLE, DEEP, "eta.chain", 0.9),
    ),
    (
        "Recomputing the first half of the tokens recovers nothing (η ≤ 0.1)",
        "first-k “worse than nothing”; §4",
        "93 % of chain flips",
        _one(VISIBLE, "first_k.budget=0.5", "eta.chain", -math.inf, 0.1),
    ),
    (
        "Token recompute stays well below the patch at half the tokens (η ≤ 0.9)",
        "η ≈ .60 at 50 %; §7",
        "KL .865 of 3.85",
        _one(VISIBLE, "cacheblend.budget=0.5", "eta.chain", -math.inf, 0.9),
    ),
    (
        "Antecedents' order changes Δ (≥ 0.2)",
        ".43–.53; §5",
        ".07",
        _one("reorder", "order", "relative_order_effect", 0.2),
    ),
    ("One orbit patch does as well as the order's own", "η .92 and .94 (within 0.1); §5", "η .999 and 1.000", _orbit),
    (
        "Survivors need only the rotation: KL below blind",
        "KL .015 (GQA), .023 (MLA); §5",
        "KL .036 (GQA) of 3.66 blind, chain through survivors",
        _versus("slide", "kl.survivor", "blind", "keep"),
    ),
    (
        "… and that for every question (KL ≤ 0.1 on rows that mix facts that stayed and facts that left)",
        "near-lossless; §5",
        "KL .623 where rows touch survivors",
        _one("slide", "keep", "kl.aggregate", -math.inf, 0.1),
    ),
    ("A stale patch decays with turnover (η < 0.5)", "η .9 → −.68 (GQA), +.29 (MLA); §5", "η 1.00 → .07", _stale),
    (
        "A fresh patch does not (η ≥ 0.8)",
        "η .81–.96; §5",
        "η 1.00",
        _one("recall", "fresh.turnover=3", "eta.aggregate", 0.8),
    ),
)


def compare(results: Results) -> list[Claim]:
    """The published findings beside this run's figures, with the verdict computed from the run's rows."""
    rows = Rows(results)
    return [Claim(about, paper, prototype, *check(rows)) for about, paper, prototype, check in PUBLISHED]


def print_summary(results: Results, file: io.TextIOBase | None = None, report: Path | None = None) -> None:
    """A dozen lines for someone who sees the library for the first time.

    Args:
      results: {"config", "environment", "rows"}.
      file: where to; standard output if None.
      report: where the report lies (else config["report"], else not said).
    """
    rows = Rows(results)
    said = [line for maker in (_say_accuracy, _say_rank, _say_tokens, _say_window) for line in maker(results, rows)]
    where = report or results.get("config", {}).get("report")
    title = f"kvpatch_jax on {rows.model or 'no model'}: cached pages reused behind other legends (accuracy, 0…1)"
    print("\n".join([title, *said, *([f"Report: {where}"] if where else [])]), file=file or sys.stdout)


def _say_accuracy(results: Results, rows: Rows) -> list[str]:
    rank = smallest_rank(results, VISIBLE) or max((int(r) for r, _ in rows.settings(VISIBLE, "patch.rank=")), default=0)
    lines = []
    for kind in rows.kinds(VISIBLE):
        arms = {"re-prefill": "re-prefill", "blind reuse": "blind", f"patch of rank {rank}": f"patch.rank={rank}"}
        said = [f"{name} {number(rows.get(VISIBLE, arm, f'accuracy.{kind}').value)}" for name, arm in arms.items()]
        lines.append(f"  {KINDS.get(kind, kind):<32} {', '.join(said)}")
    return lines


def _say_rank(results: Results, rows: Rows) -> list[str]:
    if not rows.settings(VISIBLE, "patch.rank="):
        return []
    rank = smallest_rank(results, VISIBLE)
    if rank is None:
        return ["Smallest patch within 0.01 of re-prefill on chain and aggregate: none of the ranks tried."]
    arm = f"patch.rank={rank}"
    kl = [number(rows.get(VISIBLE, x, "kl.chain").value) for x in ("blind", arm)]
    found = (
        f"rank {rank}, {number(byte_share(rows, VISIBLE, arm))} of the page's KV bytes; KL {kl[0]} → {kl[1]} (chain)"
    )
    return [f"Smallest patch within 0.01 of re-prefill: {found}."]


def _say_tokens(results: Results, rows: Rows) -> list[str]:
    ranks = [rank for rank, _ in rows.settings(VISIBLE, "first_k.bytes_of_rank=")]
    if not ranks:
        return []
    rank = int(min(ranks, key=lambda x: abs(x - (smallest_rank(results, VISIBLE) or max(ranks)))))
    arms = [f"patch.rank={rank}", *(f"{method}.bytes_of_rank={rank}" for method in TOKEN_METHODS)]
    said = [f"{arm_label(arm).split(',')[0]} {number(rows.get(VISIBLE, arm, 'accuracy.chain').value)}" for arm in arms]
    return [f"Tokens recomputed at the bytes of rank {rank} (chain): {', '.join(said)}."]


def _say_window(results: Results, rows: Rows) -> list[str]:
    value = lambda probe, metric, arm: number(rows.get(probe, arm, metric).value)
    said = lambda probe, metric, arms: ", ".join(f"{name} {value(probe, metric, arm)}" for name, arm in arms.items())
    lines = []
    if rows.arms("reorder"):
        both = lambda arm: " | ".join(value("reorder", f"accuracy.{kind}", arm) for kind in ("chain", "override"))
        arms = {"orbit patch": "orbit", "own": "exact", "transferred": "transfer"}
        shown = ", ".join(f"{name} {both(arm)}" for name, arm in arms.items())
        lines.append(f"Reorder (chain | order decides): {shown}.")
    if rows.arms("slide"):
        arms = {"survivors kept as they are": "keep", "removal patch": "removal", "blind": "blind"}
        lines.append(f"Slide (KL, facts that stay): {said('slide', 'kl.survivor', arms)}.")
    turnovers = rows.settings("recall", "stale.turnover=")
    if turnovers:
        arms = {name: f"{name}.turnover={turnovers[-1][0]:.0f}" for name in ("re-prefill", "fresh", "stale", "blind")}
        lines.append(f"Recall, all legends replaced (aggregate): {said('recall', 'accuracy.aggregate', arms)}.")
    apart = rows.get("mask", "mask_4d", "probability_difference").value
    if math.isfinite(apart):
        lines.append(f"Control: a mask that hides the legends answers as blind reuse does, within {number(apart)}.")
    return lines + _say_control(results)


def _say_control(results: Results) -> list[str]:
    """The instance trained without the sliding window, where it was run."""
    names = sorted({str(row["model"]) for row in results["rows"] if str(row["model"]).endswith(NO_WINDOW)})
    if not names:
        return []
    control = Rows(results, model=names[0])
    value = lambda arm, kind: number(control.get(VISIBLE, arm, f"accuracy.{kind}").value)
    shown = ", ".join(f"{kind} {value('re-prefill', kind)} → {value('blind', kind)}" for kind in MULTI_HOP)
    return [f"Trained without a window, re-prefill → blind: {shown}."]


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem }
h1, h2 { line-height: 1.25 } h2 { margin-top: 2.6rem; border-top: 1px solid #ddd; padding-top: 1rem }
p, li, pre { max-width: 46rem } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { text-align: left; padding: .22rem .7rem .22rem 0; border-bottom: 1px solid #e8e8e8; vertical-align: top }
td small { color: #777; display: block; white-space: nowrap } img { max-width: 100% }
.differs { color: #a33c00; font-weight: 600 } .undecided { color: #775 }
"""

INTRO = """<p>A vision-language model turns an image into <em>keys and values</em> (KV) that later questions read. When
the same image is seen again behind other images, its stored KV could be reused: its keys can be rotated to the new
place exactly, but it has not seen what now stands in front of it. This run measures what is lost by reusing it as it
is (<em>blind reuse</em>), and how much of it a small low-rank correction (a <em>patch</em>) brings back.</p>
<p>The task: three <em>legend</em> images say which colours belong to which handwritten glyph, a <em>page</em> image is
full of glyphs. <b>page</b> and <b>legend</b> questions are answered from one image. <b>chain</b> questions ask the
legend's colour of the glyph in one cell of the page, <b>aggregate</b> questions the most frequent such colour in a
row. In <b>override</b> questions two legends define the glyph and the later one counts, so order decides.</p>
<p><b>Words.</b> <em>re-prefill</em>: everything computed anew, the reference. <em>KL</em>: divergence of an arm's
answer distribution from re-prefill's, in nats (0 is best). <em>η</em>: the share of blind reuse's KL an arm removes (1
is best, below 0 is worse than blind). <em>flip-recover</em>: of the answers blind reuse changes, the share an arm
changes back. Brackets and small print: 95 % intervals, resampling whole contexts. “–”: not defined or not run.</p>"""

# probe, heading, text; then the figures of a probe, by name (by default the one named after it)
SECTIONS = (
    (
        VISIBLE,
        "Repairing a reused page: the question sees legends and page",
        "The page was prefilled alone and is reused behind the legends. Token repairs recompute a share of the page's "
        "tokens in place; “bytes of rank 8” recomputes as many tokens as a rank-8 patch has bytes. In the “rotated "
        "frame” the patch is formed after the keys were rotated, as the paper does; ours is formed before.",
    ),
    (
        "repair.evicted",
        "The same, legends evicted before the question",
        "Only what the page absorbed from the legends can answer now, so blind reuse cannot know it.",
    ),
    (
        "reorder",
        "Reorder",
        "The same legends stand in another order. “orbit”: one patch averaged over the other orders; “exact”: a patch "
        "made for this very order; “transfer”: the patch of another order. Override answers depend on the order, so "
        "an order-free patch is expected to fail there. “orbit minus exact” is the paired difference in accuracy.",
    ),
    (
        "slide",
        "Slide",
        "The oldest legend leaves the window and the other chunks move up. “keep as is” only rotates them: they still "
        "remember the legend that left, so KL counts knowing more than the reference does. A removal patch forgets it.",
    ),
    (
        "recall",
        "Recall",
        "The page was evicted and is put back after some of the legends were replaced (turnover 0 to 3). “stale” uses "
        "the patch made at eviction, “fresh” one made behind the legends that stand there now.",
    ),
    (
        "mask",
        "Control: hiding instead of reusing",
        "One forward over everything in which the page may not see the legends. It must equal blind reuse: then what "
        "is lost is what the page would have absorbed, not its position.",
    ),
    (
        "deficit",
        "What conditioning adds, layer by layer",
        "Δ is the page's KV behind the legends minus its KV alone. Few directions and many tokens are why a low-rank "
        "patch mends it and recomputing a few tokens does not.",
    ),
)
FIGURES = {VISIBLE: ("example", "accuracy_visible", "rank_and_bytes"), "repair.evicted": ("accuracy_evicted",)}


def write_report(results: Results, figures: Sequence[Path], out: Path, notes: Sequence[str]) -> Path:
    """Write `out`, one HTML file that opens offline (figures embedded, no script), and return its path.

    Args:
      results: {"config", "environment", "rows"}.
      figures: PNGs; each goes to the section its name belongs to, the rest to the end.
      out: the file to write ("…/report.html"); its folder is made if missing.
      notes: plain sentences shown under "Notes".

    Raises:
      ValueError: a row lacks a column.
    """
    for row in results.get("rows", []):
        if missing := [column for column in COLUMNS if column not in row]:
            raise ValueError(f"results row {dict(row)} lacks {missing}")
    rows, config = Rows(results), dict(results.get("config", {}))
    left = {path.stem: path for path in figures}
    body = [f"<h1>Reusing a page's KV behind other legends: {_text(rows.model)}</h1>", INTRO, "<h2>In short</h2>"]
    said = [line for maker in (_say_accuracy, _say_rank, _say_tokens, _say_window) for line in maker(results, rows)]
    body.append("<ul>" + "".join(f"<li>{_text(line.strip())}</li>" for line in said) + "</ul>")
    for probe, heading, text in SECTIONS:
        images = [_image(left.pop(stem)) for stem in FIGURES.get(probe, (probe,)) if stem in left]
        if table := _probe_table(rows, probe):
            body += [f"<h2>{_text(heading)}</h2><p>{_text(text)}</p>", *images, table]
        else:
            body += images
    for model in rows.models:
        if model != rows.model:
            tables = [_probe_table(Rows(results, model), probe) for probe, *_ in SECTIONS]
            body += [f"<h2>Control: {_text(model)}</h2>", *tables]
    body += ["<h2>Beside the paper and our prototype</h2>", _comparison(results)]
    body += [_image(path) for path in left.values()]
    body += ["<h2>Notes</h2><ul>", *(f"<li>{_text(note)}</li>" for note in notes), "</ul>"] if notes else []
    body += ["<h2>To run it again</h2>", f"<pre>{_text(config.get('command', 'python -m evals.run'))}</pre>"]
    body += ["<h2>Every setting, training choice and seed</h2>", _settings(config)]
    body += ["<h2>Environment</h2>", _settings(results.get("environment", {}))]
    out.parent.mkdir(parents=True, exist_ok=True)
    head = f'<html lang="en"><head><meta charset="utf-8"><title>kvpatch_jax</title><style>{STYLE}</style></head>'
    out.write_text(f"<!doctype html>{head}<body>" + "\n".join(body) + "</body></html>\n", encoding="utf-8")
    return out


def _text(value: Any) -> str:
    return html.escape(str(value))


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{_text(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'


def _probe_table(rows: Rows, probe: str) -> str:
    """Arms down; accuracies, then KL, η and flips of the multi-hop kinds across. Empty where the probe is missing."""
    names = {f"accuracy.{kind}": f"accuracy, {kind}" for kind in rows.kinds(probe)}
    more = {"kl": "KL", "eta": "η", "flip_recover": "flip-recover", "orbit_minus_exact": "orbit minus exact"}
    for metric, name in more.items():
        names |= {f"{metric}.{kind}": f"{name}, {kind}" for kind in rows.kinds(probe) if kind not in SINGLE_HOP}
    names |= {"relative_order_effect": "‖Δπ − Δid‖ / ‖Δid‖", "bytes": "share of KV bytes", **DEFICIT_METRICS}
    names |= {
        "probability_difference": "largest difference in probability",
        "kv_difference": "largest difference in KV",
    }
    arms = rows.arms(probe)
    used = [metric for metric in names if any(math.isfinite(rows.get(probe, arm, metric).value) for arm in arms)]
    if not used:
        return ""
    lines = [["arm", *(_text(names[metric]) for metric in used)]]
    for arm in arms:
        label = arm.removeprefix("layer=").replace(".", ", ") if probe == "deficit" else arm_label(arm)
        lines.append([_text(label), *(_cell(rows.get(probe, arm, metric)) for metric in used)])
    most = {kind: max(rows.get(probe, arm, f"accuracy.{kind}").n for arm in arms) for kind in rows.kinds(probe)}
    counts = [f"{kind} {count}" for kind, count in most.items() if count]
    return _table(lines) + (f"<p>Questions: {_text(', '.join(counts))}.</p>" if counts else "")


def _cell(got: Interval) -> str:
    value, _, interval = show(got).partition(" ")
    return _text(value) + (f"<small>{_text(interval)}</small>" if interval else "")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """A table from cells that are HTML already; the first line is the head."""
    head = "".join(f"<th>{cell}</th>" for cell in lines[0])
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines[1:])
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _comparison(results: Results) -> str:
    lines = [["finding", "paper (arXiv 2606.23581)", "our prototype", "here", "direction"]]
    for claim in compare(results):
        verdict = f'<span class="{claim.verdict.split()[0]}">{claim.verdict}</span>'
        lines.append([*(_text(cell) for cell in claim[:4]), verdict])
    text = (
        "The paper's models are large and its images natural; ours is small and its images are drawn, so directions "
        "are compared, not sizes. “same direction”: the whole interval measured here meets the finding as worded on "
        "the left; “differs”: it lies wholly outside; “undecided”: it holds both. The prototype is an earlier, easier "
        "task without a vision tower."
    )
    return f"<p>{_text(text)}</p>{_table(lines)}"


def _settings(settings: Mapping[str, Any]) -> str:
    """A table of settings, tables inside tables."""
    cell = lambda value: _settings(value) if isinstance(value, Mapping) else _text(value)
    return _table([["setting", "value"], *([_text(name), cell(value)] for name, value in settings.items())])
