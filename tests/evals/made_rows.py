"""Rows of results that tests make up."""

import math

from evals.harness.frame import Row, measured_row, without_nan
from evals.harness.intervals import Interval


def as_row(probe: str, model: str, arm: str, metric: str, interval: Interval | float) -> Row:
    """One row of results.json; a bare number has no interval and n = 1."""
    if not isinstance(interval, Interval):
        interval = Interval(float(interval), math.nan, math.nan, 1)
    return without_nan([measured_row(probe, model, arm, metric, interval)])[0]
