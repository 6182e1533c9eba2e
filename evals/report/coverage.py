"""The rows that docs/experiments/coverage.md names, and those of them that a run lacks.

    python -m evals.report.coverage default=out/run/results.json

The page sets five papers' tables and figures beside rows of ours, named as results.json names them:
*suite* `probe`, `metric`: `arm`, `arm`. Those of "engine" are in tests/serving/results.json: its part, the number, and
how the engine served.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "experiments" / "coverage.md"
ROWS = re.compile(r"\*(\w+)\* `([^`]+)`, `([^`]+)`: (`[^`]+`(?:, `[^`]+`)*)")
RowName = tuple[str, str, str, str]


def names(suite: str) -> list[RowName]:
    """Lists the rows of a suite that the page names: (suite, probe, arm, metric)."""
    found = []
    for named, probe, metric, arms in ROWS.findall(PAGE.read_text(encoding="utf-8")):
        if named == suite:
            found += [(suite, probe, arm, metric) for arm in arms.strip("`").split("`, `")]
    return list(dict.fromkeys(found))


def of_the_engine(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lists what tests/serving/results.json has of the trained model, as rows."""
    ways = found["trained"]["ways"]
    return [{"probe": "trained", "arm": arm, "metric": metric} for arm, own in ways.items() for metric in own]


def missing(suite: str, rows: Iterable[Mapping[str, Any]]) -> list[RowName]:
    """Lists the rows that the page names and a run of the suite does not have."""
    have = {(row["probe"], row["arm"], row["metric"]) for row in rows}
    return [row for row in names(suite) if row[1:] not in have]


def main(arguments: list[str]) -> None:
    """Prints, for each SUITE=FILE, how many of the page's rows the results have, and those that they lack."""
    for argument in arguments:
        suite, _, path = argument.partition("=")
        found = json.loads(Path(path).read_text())
        lacking = missing(suite, of_the_engine(found) if suite == "engine" else found["rows"])
        count = len(names(suite))
        print(f"{path}: {count - len(lacking)} of the {count} rows of {suite} that the page names are there")
        print("".join(f"  not: {', '.join(row[1:])}\n" for row in lacking), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
