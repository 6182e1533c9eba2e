"""The headline: means over training seeds, with their spread, from rows that each seed's run made."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..rules import RULES, Rules
from .rows import Row


class Spread(NamedTuple):
    """A statistic over training seeds: the mean of the seeds' values, the least, the largest, how many seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f} over {self.seeds} seeds)"


Key = tuple[str, str, str]


def headline(tables: Mapping[str, Sequence[Row]]) -> dict[Key, Spread]:
    """Means every statistic over training seeds.

    Args:
      tables: rows by backbone, those of one training seed each; a row's own "model" is not looked at.

    Returns:
      {(probe, arm, metric): its spread}, of what every seed has and is defined for every seed. The spread is that of
      seeds, not an interval of any of them: an interval of three seeds would say nothing.
    """
    values: dict[Key, list[float]] = {}
    for rows in tables.values():
        for row in rows:
            number = row["value"]
            if number is not None and math.isfinite(number):
                values.setdefault((row["probe"], row["arm"], row["metric"]), []).append(float(number))
    return {
        key: Spread(sum(found) / len(found), min(found), max(found), len(found))
        for key, found in values.items()
        if len(found) == len(tables)
    }


def headline_rows(tables: Mapping[str, Sequence[Row]], model: str) -> list[Row]:
    """Makes rows of the spreads: value is the mean, low and high the least and largest seed, n how many seeds."""
    rows = []
    for (probe, arm, metric), spread in headline(tables).items():
        value, low, high, seeds = spread
        row = {"probe": probe, "model": model, "arm": arm, "metric": metric}
        rows.append({**row, "value": value, "low": low, "high": high, "n": seeds})
    return rows


def is_headline(tables: Mapping[str, Sequence[Row]], rules: Rules = RULES) -> bool:
    """Says whether rows are of all the instances that the rules want, and of enough of them."""
    return set(rules.headline_backbones) <= set(tables) and len(tables) >= rules.headline_seeds_at_least


def smallest_rank_of_mean(
    tables: Mapping[str, Sequence[Row]], probe: str = "repair.visible", rules: Rules = RULES
) -> int | None:
    """Finds the smallest rank that is sufficient on the mean over seeds, by the rules; None where none is."""
    means = headline(tables)

    def gap(arm: str, kind: str) -> float:
        keys = [(probe, name, f"accuracy.{kind}") for name in (arm, "re-prefill")]
        return abs(means[keys[0]].mean - means[keys[1]].mean) if all(key in means for key in keys) else math.inf

    for rank in rules.arms.ranks:
        if all(gap(f"patch.rank={rank}", kind) <= rules.rank_tolerance + 1e-9 for kind in rules.rank_kinds):
            return rank
    return None
