"""Sessions: an agent's window, with what reuse it may have, in a few calls.

`Session` is one agent's; what it runs on is a `Runtime`. A `Recorder` writes down what happens in sessions, a
`Trace` is what it wrote.
"""

from .batch import BatchReport, answer_batch
from .batch_file import read_answers
from .batch_items import BatchItem
from .events import Event
from .runtime import PrivateRuntime, Runtime
from .session import Session
from .trace import Recorder, Trace

__all__ = [
    "BatchItem",
    "BatchReport",
    "Event",
    "PrivateRuntime",
    "Recorder",
    "Runtime",
    "Session",
    "Trace",
    "answer_batch",
    "read_answers",
]
