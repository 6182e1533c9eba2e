"""Interface of a service that a remote store keeps its objects in: four methods over whole values."""

import enum
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from .time_limit import seconds_left as seconds_left


class Condition(enum.Enum):
    """Condition of a write, beside a generation."""

    ANY = "any"
    """Whatever is there."""
    ABSENT = "absent"
    """There is no value."""


ANY, ABSENT = Condition.ANY, Condition.ABSENT

Expected = bytes | Condition
"""What a write expects at its path: a generation, ABSENT, or ANY."""


class RemoteValue(NamedTuple):
    """A value that was read, or a range of it.

    Attributes:
      data: its bytes.
      generation: identifies the whole value that they belong to; opaque, never empty.
    """

    data: bytes
    generation: bytes


@runtime_checkable
class RemoteAdapter(Protocol):
    """Interface of a key-value service. `conformance.check_adapter` checks what is promised here.

    Paths are `words/with/slashes` of ASCII letters, digits, `.`, `-` and `_`, without empty words and without words
    that begin with a dot. An adapter promises, to all of its users on all machines together:

    **Whole values.** A value appears, is replaced and is deleted at once, whatever its size and whoever dies. A
    range never mixes two values, and comes with the generation of the value that it was cut from.

    **Generations.** Two values that a path ever had have different generations if their bytes differ, also with a
    deletion in between. A generation is reported by the write that made it and by every read of it.

    **Order.** The operations of a path are linearizable: each takes effect at one moment between call and return,
    so that a read that begins after a write returned sees it, on any machine. Of several conditional writes that
    expect one generation, or ABSENT, at most one takes place.

    **Durability.** A write that returned survives what the service promises to survive.

    **Lists.** `paths` gives every path that had a value during the whole call and none that had none.

    **Threads.** All methods may be called at the same time.

    **Errors.** StoreUnreachableError for what may pass (no connection, no answer, overload): the call may have
    taken place, and is repeated. StoreIOError for what a repetition cannot help (no permission, a full service).
    Nothing else, except for bad arguments.

    Time limits and repetitions are the caller's (`RemoteStore`). An adapter that can end a call early asks
    `seconds_left()`.
    """

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        """Reads bytes `start:stop` of a value, cut as a slice of Python cuts them; None if there is no value."""
        ...

    def write(self, path: str, data: bytes, expected: Expected = ANY) -> bytes | None:
        """Writes a value if the path has what is expected.

        Returns:
          The value's generation; None if the condition did not hold, and nothing was written.
        """
        ...

    def delete(self, path: str, expected: bytes | Literal[Condition.ANY] = ANY) -> bool:
        """Deletes a value if it has the expected generation. Returns whether it had; with ANY always True."""
        ...

    def paths(self, prefix: str) -> Iterable[str]:
        """Lists the paths that begin with a prefix, in any order. The prefix may end within a word, and may be ""."""
        ...
