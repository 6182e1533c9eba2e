"""Sessions: an agent's window, with what reuse it may have, in a few calls.

`Session` is one agent's; `Sessions` are many, on one pool and one store; what they run on is a `Runtime`. A `Recorder`
writes down what happens in sessions, a `Trace` is what it wrote.
"""

from .answer_retrieval import RetrievalQuery
from .answers import Answer, Audit
from .disposability import AblatedAnswer, DisposabilityReport
from .runtime import PrivateRuntime, Runtime
from .session import Session
from .sessions import Sessions, SharedStats
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
    "Sessions",
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
