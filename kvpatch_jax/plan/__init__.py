"""Plans: which way of reuse each chunk of a window gets, what that costs, and what it was certified to lose."""

from .cascade import Cascade, Dependent, Rebuild
from .certificate import Certificate, Certified, CertifiedPlan, Rank
from .device_costs import DeviceCosts, Rates
from .goal import Goal
from .menu import Way
from .placement import Placement, StoredPatches, place
from .planning import Plan, PlannedChunk, plan
from .points import MEANING, POINTS, Point
from .stock import Stock, Stocked

__all__ = [
    "MEANING",
    "POINTS",
    "Cascade",
    "Certificate",
    "Certified",
    "CertifiedPlan",
    "Dependent",
    "DeviceCosts",
    "Goal",
    "Placement",
    "Plan",
    "PlannedChunk",
    "Point",
    "Rank",
    "Rates",
    "Rebuild",
    "Stock",
    "Stocked",
    "StoredPatches",
    "Way",
    "place",
    "plan",
]
