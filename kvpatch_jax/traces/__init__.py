"""Traces of what happened in the windows of agents, written and read as JSONL."""

from .events import PLACING as PLACING
from .events import Event as Event
from .events import Op as Op
from .trace import Recorder as Recorder
from .trace import Trace as Trace
from .trace import Watcher as Watcher
