"""Whether what stores over one root have answered has an explanation: a register per name, which may lose its value.

As `histories`, but writes have a place in an order before they are acknowledged, and a read may miss what was evicted.
Every value is written once. A history is right if each call can be given one moment between its beginning and its end
so that every read finds the value of that moment, where writes take place in the order of their places: one that had
its place before another began is before that, however late it is acknowledged. So a read is never older than what was
acknowledged before it began, and what was deleted never returns. Nobody but the store object that has queued a write
may see it before it is acknowledged, so its early reads of it say nothing about what others see.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

FOREVER = 1 << 62


@dataclasses.dataclass
class RegisterCall:
    """One call on one name, with times of one clock.

    Attributes:
      what: "evict" may lose the value. "restore" writes where there is none; in place of one that was evicted here, it
        may be read as well as that one, which another tier may have.
      key: the name.
      value: what was written, restored or read; None: nothing was found.
      begin, end: its time; FOREVER: it was never acknowledged, so it may have had no effect.
      placed: when its place among the writes was certain at the latest: of a queued one, when it was queued.
      store: who called.
    """

    what: Literal["put", "delete", "get", "evict", "restore"]
    key: str
    value: int | None
    begin: int
    end: int = FOREVER
    placed: int = FOREVER
    store: int = 0

    @property
    def writes(self) -> bool:
        """Whether it changes the value, for good."""
        return self.what in ("put", "delete")

    def precedes(self, other: "RegisterCall") -> bool:
        """Whether it was before another in every explanation."""
        return self.end < other.begin or (self.writes and other.writes and self.placed < other.begin)

    def __str__(self) -> str:
        value = "" if self.what in ("delete", "evict") else f" {self.value}"
        return f"store {self.store}: {self.what} {self.key}{value}"


_State = tuple[int | None, bool, int | None]
"""Value, whether it may be missed since it was evicted, and what was restored in its place, which may be read too."""


def unexplained(calls: Iterable[RegisterCall]) -> str:
    """Returns what is wrong with a history; "" if all has an explanation."""
    keys: dict[str, list[RegisterCall]] = collections.defaultdict(list)
    for call in calls:
        keys[call.key].append(call)
    for own in keys.values():
        own.sort(key=lambda call: call.begin)
        early = [call for call in own if _is_early(call, own)]
        stale = next((call for call in early if _is_behind_its_queue(call, own)), None)
        if stale is not None:
            return f"{_listed(own)}\n{stale}: older than what this store had queued"
        if not _one_key([call for call in own if call not in early]):
            return f"{_listed(own)}\nno order explains it"
    return ""


def _writer(read: RegisterCall, calls: Sequence[RegisterCall]) -> RegisterCall | None:
    return next((call for call in calls if call.what == "put" and call.value == read.value), None)


def _is_early(call: RegisterCall, calls: Sequence[RegisterCall]) -> bool:
    """Whether a store reads what it has queued itself, before that was acknowledged."""
    if call.what != "get" or call.value is None:
        return False
    write = _writer(call, calls)
    return write is not None and write.store == call.store and write.begin < call.end and write.end > call.begin


def _is_behind_its_queue(read: RegisterCall, calls: Sequence[RegisterCall]) -> bool:
    """Whether the same store had written something later before the read began."""
    write = _writer(read, calls)
    later = (call for call in calls if call.writes and call.store == read.store and call.placed < read.begin)
    return write is not None and any(write.precedes(call) for call in later)


def _one_key(calls: Sequence[RegisterCall]) -> bool:
    first: _State = (None, False, None)
    before = [
        frozenset(at for at, other in enumerate(calls) if other is not call and other.precedes(call)) for call in calls
    ]
    needed = frozenset(at for at, call in enumerate(calls) if call.end < FOREVER)
    waiting: list[tuple[frozenset[int], _State]] = [(frozenset(), first)]
    seen = set(waiting)
    while waiting:
        done, state = waiting.pop()
        if needed <= done:
            return True
        for at, call in enumerate(calls):
            if at in done or not before[at] <= done:
                continue
            for then in _after(call, state):
                if (reached := (done | {at}, then)) not in seen:
                    seen.add(reached)
                    waiting.append(reached)
    return False


def _after(call: RegisterCall, state: _State) -> list[_State]:
    """What a register may hold after a call; nothing if it would not have answered so."""
    value, lost, restored = state
    match call.what:
        case "put":
            return [(call.value, False, None)]
        case "delete":
            return [(None, False, None)]
        case "evict":
            return [(value, True, restored)]
        case "restore" if value is None:
            return [state, (call.value, False, None)]
        case "restore":
            return [state, (value, True, call.value)] if lost else [state]
        case "get":
            found = call.value in (value, restored) if call.value is not None else value is None or lost
            return [state] if found else []


def _listed(calls: Sequence[RegisterCall]) -> str:
    times = sorted({time for call in calls for time in (call.begin, call.placed, call.end) if time < FOREVER})
    step = {time: at for at, time in enumerate(times)} | {FOREVER: "never"}
    return "\n".join(f"{step[call.begin]}-{step[call.placed]}-{step[call.end]} {call}" for call in calls)
