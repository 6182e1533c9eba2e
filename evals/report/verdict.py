"""The head of a report, computed from rows: its sentences, and the arms that stand in the first table."""

import itertools
import math
from collections.abc import Callable, Sequence

from ..harness.frame import VISIBLE, Rows
from ..harness.intervals import Interval
from ..results.costs import ANTECEDENTS, AXES, BESIDE, TOGETHER
from ..results.dominance import DominatingArm, dominating_arms, on_both
from ..results.headline import seeds_of
from ..rules import RULES
from .comparison import smallest_rank
from .figures import MULTI_HOP, Results, arm_label, family
from .wording import number, share, show, spread

ROWS = 6
"""How many rows a first table has, where no more than that many arms have to stand in it."""
TOLERANCE = RULES.beating_tolerance
OURS = ("re-prefill", "blind", "mask_4d", "patch", "rotated_frame")
"""Families that are no other way of reuse: the references, the control, and the patch in all its forms."""
WHOLE = "quantised.bits=16"
"""The conditioned KV, kept as it is."""
RIVALS = (WHOLE, "quantised.bits=4")
"""What always stands beside the patch: it needs no canonical."""
BY_COUNT = dict(zip(ANTECEDENTS, TOGETHER, strict=True))
COSTS = {
    **{axis: f"kept, N = {count}" for count, axis in BY_COUNT.items()},
    "serving_flops": "serving FLOPs",
    "moved_bytes": "bytes moved",
    "forming_flops": "forming FLOPs",
}
"""Heads of columns. "kept": all that lies stored for each of N antecedents, an N-th of the canonical with it."""


def cost(rows: Rows, arm: str, axis: str) -> float:
    """Finds what an arm costs on an axis, as a share; NaN where the rows do not say."""
    return rows.get(VISIBLE, arm, axis).value


def cost_axes(rows: Rows) -> list[str]:
    """Lists the axes that the rows have, of stored bytes by antecedents and serving FLOPs."""
    arms = rows.arms(VISIBLE)
    return [axis for axis in AXES if any(math.isfinite(cost(rows, arm, axis)) for arm in arms)]


def cost_columns(rows: Rows) -> list[str]:
    """Lists the costs that a table shows: the axes, and where the rows have them bytes moved and forming FLOPs."""
    arms = rows.arms(VISIBLE)
    return cost_axes(rows) + [axis for axis in BESIDE if any(math.isfinite(cost(rows, arm, axis)) for arm in arms)]


def shower(results: Results) -> Callable[[Interval], str]:
    """Chooses how a value is shown: with its interval, or as a mean over seeds with the least and the largest."""
    return spread if len(seeds_of(results)) > 1 else show


def shown_patch(results: Results, probe: str = VISIBLE) -> str | None:
    """Chooses the patch that the first table shows: the smallest sufficient rank, else the largest that was tried."""
    ranks = [int(rank) for rank, _ in Rows(results).settings(probe, "patch.rank=")]
    rank = smallest_rank(results, VISIBLE)
    if rank not in ranks:
        rank = max(ranks, default=None)
    return None if rank is None else f"patch.rank={rank}"


def several_hops(rows: Rows, probe: str, arm: str) -> float:
    """Means the accuracy of an arm over the kinds of question that need both images."""
    return sum(rows.accuracy(arm, kind, probe).value for kind in MULTI_HOP) / len(MULTI_HOP)


def all_beating(rows: Rows, patch: str, probe: str = VISIBLE) -> list[DominatingArm]:
    """Lists what beats a patch (`results.dominance`) of the other families."""
    return [beats for beats in dominating_arms(rows, patch, probe) if family(beats.arm) not in OURS]


def beating(rows: Rows, patch: str, probe: str = VISIBLE) -> dict[str, list[str]]:
    """Lists, by axis of cost, the other families that beat a patch, each by its cheapest arm."""
    found: dict[str, dict[str, str]] = {}
    for beats in all_beating(rows, patch, probe):
        found.setdefault(beats.axis, {}).setdefault(family(beats.arm), beats.arm)
    return {axis: list(arms.values()) for axis, arms in found.items()}


def nearest(rows: Rows, patch: str, probe: str = VISIBLE) -> list[str]:
    """Lists the other families by their best arm that keeps no more bytes than a patch, the best family first."""
    stored = cost_axes(rows)[:1]
    best: dict[str, tuple[float, str]] = {}
    for arm in rows.arms(probe):
        if family(arm) in OURS:
            continue
        # A fiftieth more is the same: shares are rounded where they are shown.
        dear = [cost(rows, arm, axis) > 1.02 * cost(rows, patch, axis) for axis in stored]
        right = several_hops(rows, probe, arm)
        if math.isfinite(right) and not any(dear) and right > best.get(family(arm), (-1.0, ""))[0]:
            best[family(arm)] = (right, arm)

    return [arm for _, arm in sorted(best.values(), reverse=True)]


def first_arms(results: Results, probe: str = VISIBLE, model: str | None = None) -> list[str]:
    """Chooses the arms of a probe's first table: the references, the patch, whatever beats it, then the next best."""
    rows = Rows(results, model)
    arms, patch = rows.arms(probe), shown_patch(results, probe)
    if patch not in arms:
        return arms[:ROWS]

    beats = itertools.chain.from_iterable(beating(rows, patch, probe).values())
    # What must be there may be more than ROWS; the best of the rest fills the table up to that.
    must = [arm for arm in ("re-prefill", "blind", patch, *beats, *RIVALS) if arm in arms]
    rest = [*nearest(rows, patch, probe), *arms]
    chosen = list(dict.fromkeys([*must, *rest]))
    return chosen[: max(ROWS, len(set(must)))]


def verdict(results: Results) -> list[str]:
    """Says in a few sentences what the main comparison found; [] where it was not run."""
    rows, patch, seeds = Rows(results), shown_patch(results), len(seeds_of(results))
    kinds = ("page", *MULTI_HOP)
    if patch is None or not all(math.isfinite(rows.accuracy("blind", kind).value) for kind in kinds):
        return []

    means = [f"Means over {seeds} training seeds, the least and the largest in brackets."] if seeds > 1 else []
    lost, page = min(-rows.gap(VISIBLE, "blind", kind) for kind in MULTI_HOP), rows.gap(VISIBLE, "blind", "page")
    join = "but only" if page >= -TOLERANCE and lost > 0.05 else "and"
    alone, whole = (number(rows.accuracy(arm, "page").value) for arm in ("blind", "re-prefill"))
    both = ", ".join(number(rows.accuracy("re-prefill", kind).value) for kind in MULTI_HOP)
    what_is_lost = (
        f"Blind reuse answers {alone} of the questions about the page alone (re-prefill: {whole}), {join} "
        f"{answers(rows, 'blind')}, which need both images (re-prefill: {both})."
    )

    asked = [kind for kind in (*MULTI_HOP, "override") if kind in rows.kinds(VISIBLE)]
    near = [kind for kind in asked if abs(rows.gap(VISIBLE, patch, kind)) <= TOLERANCE + 1e-9]
    enough = smallest_rank(results, VISIBLE) is not None
    rule = "the smallest sufficient rank," if enough else "no rank suffices; the largest tried is"
    what_brings_it_back = (
        f"A patch of rank {patch.rpartition('=')[2]} answers {answers(rows, patch)} ({rule} within {TOLERANCE} of "
        f"re-prefill on {', '.join(near) or 'no kind'}). {_what_is_kept(rows, patch)}"
    )
    return [*means, what_is_lost, what_brings_it_back, _what_else(rows, patch)]


def answers(rows: Rows, arm: str) -> str:
    """Says what an arm answers of the questions that need both images."""
    shown = {kind: rows.accuracy(arm, kind) for kind in MULTI_HOP}
    several = len(seeds_of(rows.results)) > 1
    return " and ".join(
        f"{spread(got) if several else number(got.value)} of {kind} questions" for kind, got in shown.items()
    )


def _what_is_kept(rows: Rows, patch: str) -> str:
    """Says what lies stored of a patch, its canonical with it, and of KV(B|A) kept whole."""
    # "107 %, 32 % and 13 %" by the number of antecedents, or one share where they are the same.
    kept = {}
    for arm in (patch, WHOLE):
        shares = [share(cost(rows, arm, axis)) for axis in TOGETHER]
        kept[arm] = shares[0] if len(set(shares)) == 1 else f"{', '.join(shares[:-1])} and {shares[-1]}"
    counts = f"for each of N = {', '.join(map(str, ANTECEDENTS))} antecedents"
    stored = f"With its share of the canonical it takes {kept[patch]} of the page's KV {counts}"
    if not math.isfinite(cost(rows, WHOLE, TOGETHER[0])):
        return f"{stored}."
    return f"{stored}; the conditioned KV in 16 bits, which needs no canonical, takes {kept[WHOLE]}."


def _what_else(rows: Rows, patch: str) -> str:
    """Says which other families beat the patch, on which axes and in bytes and work at once; else which comes near."""
    better = beating(rows, patch)
    if not better:
        others = [arm for arm in rows.arms(VISIBLE) if family(arm) not in OURS]
        close = nearest(rows, patch)
        near = f"; the best that keeps no more is {arm_label(close[0])}: {answers(rows, close[0])}" if close else ""
        axes = _axes_in_words(cost_axes(rows), " or in ")
        return (
            f"None of the {len(others)} other arms is as accurate, within {TOLERANCE}, at no greater cost in "
            f"{axes}{near}."
        )

    axes_of: dict[str, list[str]] = {}
    for axis, arms in better.items():
        for arm in arms:
            axes_of.setdefault(arm, []).append(axis)
    undercut = "; ".join(f"{arm_label(arm)} ({_axes_in_words(beaten)})" for arm, beaten in axes_of.items())
    at_once = undercut_at_once(rows, patch, "none")
    return (
        f"Cheaper and at most {TOLERANCE} less accurate on both kinds: {undercut}. In bytes and in serving FLOPs at "
        f"once it is undercut {at_once}."
    )


def undercut_at_once(rows: Rows, patch: str, nothing: str) -> str:
    """Says by number of antecedents which arms beat a patch in bytes and in serving FLOPs at once.

    Not only the cheapest on an axis: another of its family may be cheap enough on both. `nothing`: where no arm does.
    """
    found, counts = all_beating(rows, patch), dict[str, list[str]]()
    for count, axis in BY_COUNT.items():
        arms = ", ".join(map(arm_label, on_both(found, axis))) or nothing
        counts.setdefault(arms, []).append(str(count))
    return "; ".join(f"for N = {', '.join(numbers)} by {arms}" for arms, numbers in counts.items())


def _axes_in_words(axes: Sequence[str], joint: str = " and ") -> str:
    """Joins axes: "bytes for N = 1, 4 and serving FLOPs"."""
    counts = [str(count) for count, axis in BY_COUNT.items() if axis in axes]
    stored = [f"bytes for N = {', '.join(counts)}"] if counts else []
    return joint.join([*stored, *(COSTS[axis] for axis in axes if axis not in TOGETHER)])
