"""Plans: which way of reuse each chunk gets, what that costs, and what it was certified to lose.

`choose` decides, for windows (`plan`, which sessions call) and for prompts of engines. `Certificate` has the bounds.
"""

from .certificate import POINTS, Certificate, CertifiedLoss, CertifiedPlan, Point, RankChoice
from .certificate import is_promised as is_promised
from .choice import ALLOWED as ALLOWED
from .choice import DEFAULT_KL as DEFAULT_KL
from .choice import FORWARD as FORWARD
from .choice import Choice, Goal, Losses, Option, Place, Reuse, Stock, choose, options_at
from .device_costs import DeviceCosts, Rates
from .inventory import Inventory
from .kinds import ReuseKind
from .kinds import approximate_kinds as approximate_kinds
from .kinds import is_inherited as is_inherited
from .kinds import is_ruled_out as is_ruled_out
from .planning import Plan, PlannedChunk, plan

__all__ = [
    "POINTS",
    "Certificate",
    "CertifiedLoss",
    "CertifiedPlan",
    "Choice",
    "DeviceCosts",
    "Goal",
    "Inventory",
    "Losses",
    "Option",
    "Place",
    "Plan",
    "PlannedChunk",
    "Point",
    "RankChoice",
    "Rates",
    "Reuse",
    "ReuseKind",
    "Stock",
    "choose",
    "options_at",
    "plan",
]
