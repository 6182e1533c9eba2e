"""Sessions: the window of an agent, with what may be reused in it, in a few calls.

`Session` is the window of one agent, `SessionConfig` its options. `Sessions` are many, on one pool and one store. What
they run on is a `Runtime`. `kvpatch_jax.traces` records what happens in sessions.
"""

from .answers import Answer, Comparison
from .config import SessionConfig
from .guard import AuditStats
from .needs import DisposabilityReport
from .questions import RetrievalQuery
from .runtime import Runtime
from .session import Session
from .sessions import Sessions, SharedStats
from .stats import Stats, StepStats

__all__ = [
    "Answer",
    "AuditStats",
    "Comparison",
    "DisposabilityReport",
    "RetrievalQuery",
    "Runtime",
    "Session",
    "SessionConfig",
    "Sessions",
    "SharedStats",
    "Stats",
    "StepStats",
]
from .answers import compared as compared
from .answers import prefilled_logits as prefilled_logits
from .answers import served_logits as served_logits
from .config import check_backbone as check_backbone
from .config import check_rank as check_rank
from .config import float_dtype as float_dtype
from .inputs import embedded as embedded
