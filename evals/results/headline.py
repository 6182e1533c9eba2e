"""The headline: means over training seeds, with their spread, from rows that each seed's run made."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..harness.frame import VISIBLE, Row
from ..rules import RULES, Rules

MEAN = "mean"


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


def headline_results(results: Mapping[str, Any], rules: Rules = RULES) -> dict[str, Any] | None:
    """Makes results of the mean over training seeds, of the main comparison alone.

    Args:
      results: whose rows hold each seed's, by model.

    Returns:
      Results of one model, `MEAN`, whose intervals are the least and the largest seed, config["seeds"] their names;
      None where the rows lack one of the seeds that the rules want.
    """
    tables = {name: [] for name in rules.headline_backbones}
    for row in results["rows"]:
        if row["model"] in tables and row["probe"] == VISIBLE:
            tables[row["model"]].append(row)
    if not all(tables.values()) or len(tables) < rules.headline_seeds_at_least:
        return None
    config = {**results["config"], "model": MEAN, "seeds": list(tables)}
    return {"config": config, "rows": headline_rows(tables, MEAN)}


def headline_arms(mean: Mapping[str, Any], rules: Rules = RULES) -> list[str]:
    """Lists the arms that every seed was asked, in the rules' order."""
    asked = {row["arm"] for row in mean["rows"]}
    return [arm for arm in rules.headline_arms if arm in asked]


def seeds_of(results: Mapping[str, Any]) -> list[str]:
    """Lists the training seeds that results are the mean of; one or none: they are no mean."""
    return list(results.get("config", {}).get("seeds", []))
