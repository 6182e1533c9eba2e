"""Plans: which way of reuse each chunk of a window gets, what that costs, and what it was certified to lose."""

from .cascade import Cascade, Dependent, Rebuild
from .certificate import Certificate, CertifiedLoss, CertifiedPlan, RankChoice
from .device_costs import DeviceCosts, Rates
from .goal import Goal
from .inventory import AvailablePatch, PatchInventory
from .operating_points import MEANING, POINTS, Point
from .placement import Placement, StoredPatches, place
from .planning import Plan, PlannedChunk, plan
from .serving_options import Way

__all__ = [
    "MEANING",
    "POINTS",
    "AvailablePatch",
    "Cascade",
    "Certificate",
    "CertifiedLoss",
    "CertifiedPlan",
    "Dependent",
    "DeviceCosts",
    "Goal",
    "PatchInventory",
    "Placement",
    "Plan",
    "PlannedChunk",
    "Point",
    "RankChoice",
    "Rates",
    "Rebuild",
    "StoredPatches",
    "Way",
    "place",
    "plan",
]
from .cascade import rebuild as rebuild
from .certificate import Promise as Promise
from .goal import DEFAULT_KL as DEFAULT_KL
from .offline_schedule import optimum as optimum
from .schedule import ARRIVAL as ARRIVAL
from .schedule import LEAST_RECENT as LEAST_RECENT
from .schedule import ONLINE as ONLINE
from .schedule import ServedWindow as ServedWindow
from .schedule import Terms as Terms
from .schedule import WindowRequest as WindowRequest
from .schedule import replay as replay
from .schedule import total as total
