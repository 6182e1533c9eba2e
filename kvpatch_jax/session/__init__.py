"""Sessions: the window of an agent, with what may be reused in it, in a few calls.

`Session` is the window of one agent, `SessionConfig` its options. `Sessions` are many, on one pool and one store. What
they run on is a `Runtime`. `kvpatch_jax.traces` records what happens in sessions.
"""

from .answer_retrieval import RetrievalQuery
from .answers import Answer, Audit
from .disposability import AblatedAnswer, DisposabilityReport
from .runtime import PrivateRuntime, Runtime
from .session import Session
from .session_config import SessionConfig
from .sessions import Sessions, SharedStats
from .shared_runtime import SharedConfig
from .stats import Stats

__all__ = [
    "AblatedAnswer",
    "Answer",
    "Audit",
    "DisposabilityReport",
    "PrivateRuntime",
    "RetrievalQuery",
    "Runtime",
    "Session",
    "SessionConfig",
    "Sessions",
    "SharedConfig",
    "SharedStats",
    "Stats",
]
from .argument_checks import check_backbone as check_backbone
from .argument_checks import check_rank as check_rank
from .argument_checks import float_dtype as float_dtype
from .disposability import UNCHANGED as UNCHANGED
from .logit_comparison import compared as compared
from .logit_comparison import prefilled_logits as prefilled_logits
from .session_input import EmbeddedInput as EmbeddedInput
from .session_input import embedded as embedded
