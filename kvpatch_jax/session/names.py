"""Names that a session gave out."""

from collections.abc import Iterable, Iterator

MOST_NAMES = 1 << 14
"""How many are remembered: a few megabytes, however long a session lives."""


class UsedNames:
    """The names that were given out last, so that none of them comes to stand for something else.

    Those of pieces that a session still knows are in its own books. This remembers the others, for whoever may have
    written them down: so many, and then the oldest goes.
    """

    def __init__(self, names: Iterable[str] = (), most: int = MOST_NAMES):
        """Takes names, the oldest first."""
        self._most = most
        self._names: dict[str, None] = {}
        self._times: dict[str, int] = {}
        self.add(*names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, *names: str) -> None:
        """Remembers names as the last ones given out."""
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        for table in (self._names, self._times):
            while len(table) > self._most:
                del table[next(iter(table))]

    def number(self, content: str) -> int:
        """The number that the name of a content was given out with last, by which the next one is looked for."""
        return self._times.get(content, 1)

    def numbered(self, content: str, number: int) -> None:
        """Remembers that number: else each copy of one image would be counted from the first one on."""
        if number > 1:
            self._times.pop(content, None)
            self._times[content] = number

    def copy(self) -> "UsedNames":
        """The same names, for a branch that gives out its own from now on."""
        made = UsedNames(self, self._most)
        made._times = dict(self._times)
        return made
