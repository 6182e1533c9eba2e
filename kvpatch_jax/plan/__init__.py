"""Plans: which way of reuse each chunk of a window gets, what that costs, and what it was certified to lose."""

from .certificate import Certificate
from .certificate import is_promised as is_promised
from .certified_rows import CertifiedLoss, CertifiedPlan, RankChoice
from .device_costs import DeviceCosts, Rates
from .goal import Goal
from .inventory import AvailablePatch, PatchInventory
from .operating_points import MEANING, POINTS, Point
from .planning import Plan, PlannedChunk, plan

__all__ = [
    "MEANING",
    "POINTS",
    "AvailablePatch",
    "Certificate",
    "CertifiedLoss",
    "CertifiedPlan",
    "DeviceCosts",
    "Goal",
    "PatchInventory",
    "Plan",
    "PlannedChunk",
    "Point",
    "RankChoice",
    "Rates",
    "plan",
]
from .goal import DEFAULT_KL as DEFAULT_KL
