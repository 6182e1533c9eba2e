"""Names that a session gave to its pieces."""

from collections.abc import Iterable, Iterator

MOST_NAMES = 1 << 14
"""How many are remembered: a few megabytes, however long a session lives."""


class UsedNames:
    """Names given out last, oldest first, so that none of them is given to another piece.

    The registry knows the names of its pieces. This remembers names of pieces that it has forgotten, which callers may
    have written down. Beyond `most` names, the oldest is dropped.
    """

    def __init__(self, names: Iterable[str] = (), most: int = MOST_NAMES):
        """Takes names, the oldest first."""
        self.most = most
        self._names: dict[str, None] = {}
        self._copies: dict[str, int] = {}
        self.add(*names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, *names: str) -> None:
        """Adds names as the latest ones."""
        for name in names:
            # Dictionaries keep the order of insertion, so a name that is used again becomes the latest.
            self._names.pop(name, None)
            self._names[name] = None
        for table in (self._names, self._copies):
            while len(table) > self.most:
                del table[next(iter(table))]

    def copy_number(self, content: str) -> int:
        """Returns the number of the latest copy of a content that was named, from which the next is searched."""
        return self._copies.get(content, 1)

    def set_copy_number(self, content: str, number: int) -> None:
        """Sets the number of the latest copy, without which each further copy would be counted from the first."""
        if number > 1:
            self._copies.pop(content, None)
            self._copies[content] = number

    def copy(self) -> "UsedNames":
        """Returns an independent copy, for a fork."""
        branch = UsedNames(self, self.most)
        branch._copies = dict(self._copies)
        return branch
