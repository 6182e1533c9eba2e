"""The order of a window's pieces, of whole traces' windows, and what to rebuild behind a change: pure functions.

`place` orders one window so that stored patches stay valid; `replay`, `schedule` and `optimum` serve a whole trace;
`cascade` lists what to rebuild behind a chunk that came back, moved or was replaced. `suite` measures what they save.
"""

from .offline_schedule import OfflineSchedule, optimum, schedule
from .piece_order import Front
from .rebuild_cascade import Cascade, Dependent, Rebuild, carried_out, cascade, dependents, rebuild
from .trace_replay import (
    ARRIVAL,
    LEAST_RECENT,
    OFFLINE,
    ONLINE,
    Policy,
    ServedWindow,
    Terms,
    WindowRequest,
    replay,
    total,
)
from .window_placement import Placement, StoredPatches, note_of, place

__all__ = [
    "ARRIVAL",
    "LEAST_RECENT",
    "OFFLINE",
    "ONLINE",
    "Cascade",
    "Dependent",
    "Front",
    "OfflineSchedule",
    "Placement",
    "Policy",
    "Rebuild",
    "ServedWindow",
    "StoredPatches",
    "Terms",
    "WindowRequest",
    "carried_out",
    "cascade",
    "dependents",
    "note_of",
    "optimum",
    "place",
    "rebuild",
    "replay",
    "schedule",
    "total",
]
