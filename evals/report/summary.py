"""A run in a dozen lines, for the terminal and for the head of the report."""

import io
import math
import sys
from pathlib import Path

from ..harness.frame import VISIBLE, Rows
from ..results.headline import headline_results, seeds_of
from ..rules import RULES
from .comparison import smallest_rank
from .figures import KINDS, MULTI_HOP, Results, arm_label
from .window import window_lines
from .wording import blind_losses, measured_line, number, spread

NO_WINDOW = "_no_window"
TOKEN_METHODS = ("first_k", "cacheblend", "oracle_delta")


def print_summary(results: Results, file: io.TextIOBase | None = None, report: Path | None = None) -> None:
    """Prints a dozen lines for someone who sees the library for the first time.

    Args:
      results: {"config", "environment", "rows"}.
      file: where to; standard output if None.
      report: path of the report (else config["report"], else not said).
    """
    model = Rows(results).model or "no model"
    where = report or results.get("config", {}).get("report")
    title = f"kvpatch_jax on {model}: cached pages reused behind other legends (accuracy, 0…1)"
    ending = [f"Report: {where}"] if where else []
    print("\n".join([title, *summary_lines(results), *ending]), file=file or sys.stdout)


def summary_lines(results: Results) -> list[str]:
    """Says what a run found: means over seeds, a line per question kind, and one per operation of the window."""
    rows, mean = Rows(results), headline_results(results)
    lines = []

    # What needs both images, as the mean over seeds; the rest is of one of them.
    if mean is not None:
        rank = smallest_rank(mean, VISIBLE) or max(RULES.arms.byte_ranks)
        lines.append(f"Means over {len(seeds_of(mean))} training seeds (least to largest):")
        for kind in MULTI_HOP:
            arms = {"re-prefill": "re-prefill", "blind": "blind", f"rank {rank}": f"patch.rank={rank}"}
            shown = [f"{name} {spread(Rows(mean).accuracy(arm, kind))}" for name, arm in arms.items()]
            lines.append(f"  {kind:<10} {', '.join(shown)}")
        lines.append(f"One of them, {seeds_of(mean)[0]}:")

    return [*lines, *_main_lines(results, rows), *_small_window_lines(results, rows), *window_lines(results)]


def _main_lines(results: Results, rows: Rows) -> list[str]:
    """Says what the main comparison found: accuracy by kind, the smallest rank, token repairs at its bytes."""
    ranks = [int(rank) for rank, _ in rows.settings(VISIBLE, "patch.rank=")]
    enough = smallest_rank(results, VISIBLE)
    rank = enough or max(ranks, default=0)
    lines = []
    for kind in rows.kinds(VISIBLE):
        arms = {"re-prefill": "re-prefill", "blind reuse": "blind", f"patch of rank {rank}": f"patch.rank={rank}"}
        shown = [f"{name} {number(rows.accuracy(arm, kind).value)}" for name, arm in arms.items()]
        lines.append(f"  {KINDS.get(kind, kind):<32} {', '.join(shown)}")

    if ranks and enough is None:
        lines.append("Smallest patch within 0.01 of re-prefill on chain and aggregate: none of the ranks tried.")
    elif ranks:
        arm = f"patch.rank={rank}"
        blind, mended = (number(rows.get(VISIBLE, name, "kl.chain").value) for name in ("blind", arm))
        stored = number(rows.get(VISIBLE, arm, "bytes").value)
        lines.append(
            f"Smallest patch within 0.01 of re-prefill: rank {rank}, {stored} of the page's KV bytes; KL {blind} → "
            f"{mended} (chain)."
        )

    matched = [int(rank) for rank, _ in rows.settings(VISIBLE, "first_k.bytes_of_rank=")]
    if matched:
        rank = min(matched, key=lambda tried: abs(tried - (enough or max(matched))))
        arms = [f"patch.rank={rank}", *(f"{method}.bytes_of_rank={rank}" for method in TOKEN_METHODS)]
        shown = [f"{arm_label(arm).split(',')[0]} {number(rows.accuracy(arm, 'chain').value)}" for arm in arms]
        lines.append(f"Tokens recomputed at the bytes of rank {rank} (chain): {', '.join(shown)}.")
    return lines


def _small_window_lines(results: Results, rows: Rows) -> list[str]:
    """Says what reorder, slide and recall found, and the two controls: the mask, and no sliding window in training."""
    lines = []
    if rows.arms("reorder"):
        shown = []
        for name, arm in {"orbit patch": "orbit", "own": "exact", "transferred": "transfer"}.items():
            pair = " | ".join(number(rows.accuracy(arm, kind, "reorder").value) for kind in ("chain", "override"))
            shown.append(f"{name} {pair}")
        lines.append(f"Reorder (chain | order decides): {', '.join(shown)}.")

    arms = {"survivors kept as they are": "keep", "removal patch": "removal", "blind": "blind"}
    lines += measured_line(rows, "Slide (KL, facts that stay)", "slide", "kl.survivor", arms)
    last = rows.settings("recall", "stale.turnover=")[-1:]
    for turnover, _ in last:
        arms = {name: f"{name}.turnover={turnover:.0f}" for name in ("re-prefill", "fresh", "stale", "blind")}
        lines += measured_line(rows, "Recall, all legends replaced (aggregate)", "recall", "accuracy.aggregate", arms)

    apart = rows.get("mask", "mask_4d", "probability_difference").value
    if math.isfinite(apart):
        lines.append(f"Control: a mask that hides the legends answers as blind reuse does, within {number(apart)}.")
    if (control := control_of(results)) is not None:
        lines.append(f"Trained without a window, re-prefill → blind: {blind_losses(control, MULTI_HOP)}.")
    return lines


def control_of(results: Results) -> Rows | None:
    """Finds the rows of the instance that was trained without the sliding window, where it was run."""
    names = sorted({str(row["model"]) for row in results["rows"] if str(row["model"]).endswith(NO_WINDOW)})
    return Rows(results, names[0]) if names else None
