"""Whether what several processes saw of a store has an explanation: linearizability, key by key.

A history is linearizable if every call can be given one moment between its beginning and its end so that the answers
are those of a plain dictionary (Herlihy and Wing, 1990). Keys are independent, so each is checked alone. The search is
Wing and Gong's (1993) with Lowe's memory of (what is done, what is there).
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Call:
    """One call on one key, with its beginning and end on a clock that all processes share.

    Attributes:
      value: of a put, the version that it wrote; of a get, the version that it found or None; of a delete, 1 if it says
        that there was something, else 0.
    """

    what: Literal["put", "get", "delete"]
    key: int
    value: int | None
    begin: int
    end: int


def after(call: Call, there: int | None) -> tuple[bool, int | None]:
    """Whether a dictionary that holds `there` would have answered so, and what it holds afterwards."""
    if call.what == "put":
        return True, call.value
    if call.what == "get":
        return call.value == there, there
    return call.value == int(there is not None), None


def linearizable(calls: Iterable[Call]) -> bool:
    """Whether an order explains all answers, each key absent at first."""
    keys: dict[int, list[Call]] = collections.defaultdict(list)
    for call in calls:
        keys[call.key].append(call)
    return all(_one_key(sorted(own, key=lambda call: call.begin)) for own in keys.values())


def _one_key(calls: Sequence[Call]) -> bool:
    """`calls` by their beginnings. A state is: all before `first` are done, those in `done` too, `there` is there."""
    waiting: list[tuple[int, frozenset[int], int | None]] = [(0, frozenset(), None)]
    seen = set(waiting)
    while waiting:
        first, done, there = waiting.pop()
        if first == len(calls):
            return True
        for i in _next(calls, first, done):
            fits, then = after(calls[i], there)
            if fits and (state := (*_with(first, done, i), then)) not in seen:
                seen.add(state)
                waiting.append(state)
    return False


def _next(calls: Sequence[Call], first: int, done: frozenset[int]) -> list[int]:
    """Calls that may be next: none that is not done had ended before they began."""
    chosen: list[int] = []
    earliest = calls[first].end
    for i in range(first, len(calls)):
        if calls[i].begin > earliest:
            break
        if i not in done:
            chosen.append(i)
            earliest = min(earliest, calls[i].end)
    return [i for i in chosen if calls[i].begin <= earliest]


def _with(first: int, done: frozenset[int], i: int) -> tuple[int, frozenset[int]]:
    done = done | {i}
    while first in done:
        done, first = done - {first}, first + 1
    return first, done
