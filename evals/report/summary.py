"""A run in a dozen lines, for the terminal and for the head of the report."""

import io
import math
import sys
from pathlib import Path

from ..results.headline import headline_results, seeds_of
from ..results.rows import Rows
from ..rules import RULES
from .comparison import VISIBLE, smallest_rank
from .figures import KINDS, MULTI_HOP, Results, arm_label, byte_share
from .window import window_lines
from .wording import number, spread

NO_WINDOW = "_no_window"
TOKEN_METHODS = ("first_k", "cacheblend", "oracle_delta")


def summary_lines(results: Results) -> list[str]:
    """Says what a run found: a line per question kind, repair and window operation that it ran."""
    rows, mean = Rows(results), headline_results(results)
    first = [] if mean is None else _say_mean(mean)
    lines = [line for say in (_say_accuracy, _say_rank, _say_tokens, _say_window) for line in say(results, rows)]
    return [*first, *lines, *window_lines(results)]


def print_summary(results: Results, file: io.TextIOBase | None = None, report: Path | None = None) -> None:
    """Prints a dozen lines for someone who sees the library for the first time.

    Args:
      results: {"config", "environment", "rows"}.
      file: where to; standard output if None.
      report: where the report lies (else config["report"], else not said).
    """
    model = Rows(results).model or "no model"
    where = report or results.get("config", {}).get("report")
    title = f"kvpatch_jax on {model}: cached pages reused behind other legends (accuracy, 0…1)"
    ending = [f"Report: {where}"] if where else []
    print("\n".join([title, *summary_lines(results), *ending]), file=file or sys.stdout)


def _say_mean(mean: Results) -> list[str]:
    """Returns what needs both images, as the mean over seeds with the least and the largest; then whose lines
    follow.
    """
    rows, rank = Rows(mean), smallest_rank(mean, VISIBLE) or max(RULES.arms.byte_ranks)
    lines = [f"Means over {len(seeds_of(mean))} training seeds (least to largest):"]
    for kind in MULTI_HOP:
        arms = {"re-prefill": "re-prefill", "blind": "blind", f"rank {rank}": f"patch.rank={rank}"}
        said = [f"{name} {spread(rows.get(VISIBLE, arm, f'accuracy.{kind}'))}" for name, arm in arms.items()]
        lines.append(f"  {kind:<10} {', '.join(said)}")
    return [*lines, f"One of them, {seeds_of(mean)[0]}:"]


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
    def value(probe, metric, arm):
        return number(rows.get(probe, arm, metric).value)

    def said(probe, metric, arms):
        return ", ".join(f"{name} {value(probe, metric, arm)}" for name, arm in arms.items())

    lines = []

    if rows.arms("reorder"):

        def both(arm):
            return " | ".join(value("reorder", f"accuracy.{kind}", arm) for kind in ("chain", "override"))

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
    """Returns the instance trained without the sliding window, where it was run."""
    names = sorted({str(row["model"]) for row in results["rows"] if str(row["model"]).endswith(NO_WINDOW)})
    if not names:
        return []

    control = Rows(results, model=names[0])

    def value(arm, kind):
        return number(control.get(VISIBLE, arm, f"accuracy.{kind}").value)

    shown = ", ".join(f"{kind} {value('re-prefill', kind)} → {value('blind', kind)}" for kind in MULTI_HOP)
    return [f"Trained without a window, re-prefill → blind: {shown}."]
