"""Which arms beat the patch: as right as it is, at no greater cost on one axis."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..harness.frame import VISIBLE, Rows
from ..rules import RULES, Rules
from .costs import AXES

REFERENCES = ("re-prefill", "blind", "mask_4d")
DIAGNOSTIC = ("oracle_delta", "class_mean")
"""Families that no server can have: they are told the answer, or what the images show."""


class DominatingArm(NamedTuple):
    """An arm that beats a patch on an axis: accuracy less the patch's, its least over the kinds; its cost, a share."""

    arm: str
    axis: str
    gain: float
    cost: float


def is_diagnostic(arm: str) -> bool:
    """Says whether an arm needs what a server does not have."""
    return arm.split(".")[0] in DIAGNOSTIC


def dominating_arms(rows: Rows, patch: str, probe: str = VISIBLE, rules: Rules = RULES) -> list[DominatingArm]:
    """Lists every arm that beats a patch on an axis, by axis, cheapest first.

    An arm beats it that is at most the rules' tolerance less accurate on each of the rules' kinds, and costs no more on
    this axis; where both cost the same, it must be more accurate on one kind. Other ranks and variants of the patch
    count too. References and arms that no server can have (`is_diagnostic`) are left out.
    """
    found = []
    for axis in rules.axes:
        limit = rows.get(probe, patch, axis).value
        here = []
        for arm in rows.arms(probe):
            cost = rows.get(probe, arm, axis).value
            gains = [
                rows.accuracy(arm, kind, probe).value - rows.accuracy(patch, kind, probe).value
                for kind in rules.beating_kinds
            ]
            if arm in (patch, *REFERENCES) or is_diagnostic(arm) or not all(map(math.isfinite, (cost, limit, *gains))):
                continue

            better = cost < limit or max(gains) > 0
            if cost <= limit and min(gains) >= -rules.beating_tolerance - 1e-9 and better:
                here.append(DominatingArm(arm, axis, min(gains), cost))

        found += sorted(here, key=lambda beats: (beats.cost, beats.arm))

    return found


def on_both(found: list[DominatingArm], stored: str, work: str = AXES[-1]) -> list[str]:
    """Lists the arms that beat the patch on an axis of stored bytes and on that of work at once."""
    axes: dict[str, set[str]] = {}
    for beats in found:
        axes.setdefault(beats.arm, set()).add(beats.axis)
    return [arm for arm, beaten in axes.items() if {stored, work} <= beaten]


def pareto_front(
    rows: Rows,
    axis: str,
    kind: str,
    probe: str = VISIBLE,
    costs: Mapping[str, float] | None = None,
) -> list[str]:
    """Lists the arms than which no other is both cheaper on an axis and as accurate on a kind, cheapest first.

    Diagnostic arms and the 4-D mask control are left out; re-prefill and blind reuse are not. `costs`: of the arms to
    look at, in place of all arms with the probe's own rows of the axis.
    """
    if costs is None:
        costs = {arm: rows.get(probe, arm, axis).value for arm in rows.arms(probe)}
    points = []

    for arm, cost in costs.items():
        right = rows.accuracy(arm, kind, probe).value
        if math.isfinite(cost + right) and arm != "mask_4d" and not is_diagnostic(arm):
            points.append((cost, -right, arm))

    front: list[str] = []
    best = -math.inf
    for _, wrong, arm in sorted(points):
        if -wrong > best:
            best = -wrong
            front.append(arm)

    return front
