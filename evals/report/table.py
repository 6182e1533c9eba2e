"""The main comparison as a short Markdown table: what the README shows, from the same results."""

from collections.abc import Sequence
from pathlib import Path

from ..results.rows import Rows
from ..results.tables import markdown_table
from ..small_task import KINDS
from .figures import Results, arm_label
from .verdict import COSTS, cost, cost_axes, first_arms
from .wording import share, show

ARMS = (
    "re-prefill",
    "blind",
    "patch.rank=4",
    "patch.rank=8",
    "patch.rank=16",
    "first_k.bytes_of_rank=8",
    "cacheblend.bytes_of_rank=8",
    "oracle_delta.bytes_of_rank=8",
    "first_k.budget=0.5",
    "cacheblend.budget=0.5",
    "oracle_delta.budget=0.5",
)


def comparison_table(
    rows: Rows, arms: Sequence[str], kinds: Sequence[str] | None = None, probe: str = "repair.visible"
) -> tuple[list[str], list[list[str]]]:
    """Makes head and lines: what an arm costs, accuracy with 95 % intervals by kind (None for all), KL of chain."""
    axes, kinds = cost_axes(rows), KINDS if kinds is None else kinds
    lines = []
    for arm in arms:
        costs = [share(cost(rows, arm, axis)) for axis in axes]
        accuracy = [show(rows.get(probe, arm, f"accuracy.{kind}")) for kind in kinds]
        lines.append([arm_label(arm), *costs, *accuracy, show(rows.get(probe, arm, "kl.chain"))])
    return ["way of reuse", *(COSTS[axis] for axis in axes), *kinds, "KL, chain"], lines


def write_table(results: Results, path: Path, probe: str = "repair.visible") -> Path:
    """Writes the comparison of the arms that the report shows first, whatever beats the patch among them, and more."""
    rows = Rows(results)
    arms = [arm for arm in dict.fromkeys([*ARMS, *first_arms(results)]) if arm in rows.arms(probe)]
    path.write_text(markdown_table(*comparison_table(rows, arms, probe=probe)) + "\n", encoding="utf-8")
    return path
