"""Plans: which way of reuse each chunk of a window gets, what that costs, and what it was certified to lose."""

from .certificate import Certificate, Certified, CertifiedPlan, Rank
from .device_costs import DeviceCosts, Rates
from .goal import Goal
from .planning import Plan, PlannedChunk, plan
from .points import MEANING, POINTS, Point
from .stock import Stock, Stocked

__all__ = [
    "MEANING",
    "POINTS",
    "Certificate",
    "Certified",
    "CertifiedPlan",
    "DeviceCosts",
    "Goal",
    "Plan",
    "PlannedChunk",
    "Point",
    "Rank",
    "Rates",
    "Stock",
    "Stocked",
    "plan",
]
