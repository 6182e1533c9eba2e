"""Sessions: an agent's window, with what reuse it may have, in a few calls.

`Session` is one agent's; `Sessions` are many, on one pool and one store; what they run on is a `Runtime`. A `Recorder`
writes down what happens in sessions, a `Trace` is what it wrote.
"""

from .answers import Answer, Audit
from .batch import BatchReport, answer_batch
from .batch_file import read_answers
from .batch_items import BatchItem
from .events import Event
from .looking import Looking
from .needs import Needs, Without
from .runtime import PrivateRuntime, Runtime
from .session import Session
from .sessions import Sessions, SharedStats
from .stats import Stats
from .trace import Recorder, Trace

__all__ = [
    "Answer",
    "Audit",
    "BatchItem",
    "BatchReport",
    "Event",
    "Looking",
    "Needs",
    "PrivateRuntime",
    "Recorder",
    "Runtime",
    "Session",
    "Sessions",
    "SharedStats",
    "Stats",
    "Trace",
    "Without",
    "answer_batch",
    "read_answers",
]
