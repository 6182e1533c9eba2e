"""Sessions: an agent's window, with what reuse it may have, in a few calls.

`Session` is one agent's; what it runs on is a `Runtime`. A `Recorder` writes down what happens in sessions, a
`Trace` is what it wrote.
"""

from .events import Event
from .runtime import PrivateRuntime, Runtime
from .session import Session
from .trace import Recorder, Trace

__all__ = ["Event", "PrivateRuntime", "Recorder", "Runtime", "Session", "Trace"]
