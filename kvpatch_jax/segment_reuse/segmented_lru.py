"""Segmented LRU eviction with a budget in bytes (SLRU; segment reuse, proposal, §6)."""

from collections import OrderedDict
from collections.abc import Hashable

from ..errors import ConfigError
from ..utils.kinds import is_whole


class SegmentedLRU:
    """Order of eviction of keys with sizes: new keys are on probation, and used ones are protected.

    A hit moves a key to the protected part; what no longer fits there goes back to probation, as its most recent key.
    Evicted is the least recent key on probation, then the least recent protected one. A key larger than the budget is
    not admitted.

    Args:
      budget: bytes of all keys. protected_share: share of them that protected keys take at most.

    Raises:
      ConfigError: a budget below 1, or a share outside 0 … 1.
    """

    def __init__(self, budget: int, protected_share: float = 0.8):
        if not is_whole(budget, 1) or not 0.0 <= protected_share <= 1.0:
            raise ConfigError(
                f"SLRU: got a budget of {budget!r:.80} bytes and protected share {protected_share!r:.80}; expected at "
                "least 1 byte, and a share of 0 to 1"
            )
        self.budget, self.protected_budget = budget, int(budget * protected_share)
        # Least recent first.
        self._probation: OrderedDict[Hashable, int] = OrderedDict()
        self._protected: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._probation or key in self._protected

    @property
    def bytes(self) -> int:
        """Bytes of all keys."""
        return sum(self._probation.values()) + sum(self._protected.values())

    @property
    def keys(self) -> tuple[list[Hashable], list[Hashable]]:
        """Keys on probation and protected keys, least recent first."""
        return list(self._probation), list(self._protected)

    def admit(self, key: Hashable, size: int) -> list[Hashable] | None:
        """Adds a key and returns the keys that are evicted for it; None: it is larger than the budget, or known."""
        if key in self or size > self.budget:
            return None
        self._probation[key] = size

        evicted = []
        while self.bytes > self.budget:
            part = self._probation if len(self._probation) > 1 else self._protected
            evicted.append(part.popitem(last=False)[0])
        return evicted

    def hit(self, key: Hashable) -> None:
        """Protects a key as the most recent one; unknown keys are ignored."""
        size = self._probation.pop(key, None)
        size = self._protected.pop(key, None) if size is None else size
        if size is None:
            return

        self._protected[key] = size
        while self._protected and sum(self._protected.values()) > self.protected_budget:
            demoted, of_size = self._protected.popitem(last=False)
            self._probation[demoted] = of_size

    def remove(self, key: Hashable) -> None:
        """Removes a key; unknown keys are ignored."""
        self._probation.pop(key, None)
        self._protected.pop(key, None)
