"""Tables of arms: as the report shows them, and as short Markdown tables of the same rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..harness.frame import VISIBLE, Rows
from ..harness.tables import markdown_table
from ..results.headline import headline_arms, headline_results
from ..small_task import KINDS
from .figures import Results, arm_label
from .verdict import COSTS, cost, cost_columns, first_arms, shower
from .wording import share

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


class ProbeTable(NamedTuple):
    """A probe's table: the metrics shown, a line per arm with each metric's (value, interval).

    questions: how many of each kind an arm rests on, in words. probe: its name, where the page does not say it.
    """

    metrics: list[str]
    lines: list[tuple[str, list[tuple[str, str]]]]
    questions: str = ""
    probe: str = ""


def comparison_table(
    rows: Rows, arms: Sequence[str], kinds: Sequence[str] | None = None, probe: str = VISIBLE
) -> tuple[list[str], list[list[str]]]:
    """Makes head and lines: what an arm costs, accuracy by kind (None for all) and KL of chain, each with its interval.

    Of a mean over seeds the interval is the least and the largest.
    """
    axes, kinds, show = cost_columns(rows), KINDS if kinds is None else kinds, shower(rows.results)
    lines = []
    for arm in arms:
        costs = [share(cost(rows, arm, axis)) for axis in axes]
        accuracy = [show(rows.accuracy(arm, kind, probe)) for kind in kinds]
        lines.append([arm_label(arm), *costs, *accuracy, show(rows.get(probe, arm, "kl.chain"))])
    return ["way of reuse", *(COSTS[axis] for axis in axes), *kinds, "KL, chain"], lines


def write_table(results: Results, path: Path, probe: str = VISIBLE) -> Path:
    """Writes the mean over seeds, where they were run, then the comparison of the arms that the report shows first."""
    rows, mean = Rows(results), headline_results(results)
    arms = [arm for arm in dict.fromkeys([*ARMS, *first_arms(results)]) if arm in rows.arms(probe)]
    tables = [markdown_table(*comparison_table(rows, arms, probe=probe))]
    if mean is not None:
        tables.insert(0, markdown_table(*comparison_table(Rows(mean), headline_arms(mean))))
    path.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    return path
