"""What is worth keeping of the chunks that requests bring: what is new, and what traffic asks for again."""

import collections
import threading
from typing import NamedTuple

from ...window import StoredPrefills
from .layouts import CacheFormat
from .prompt_history import PromptHistory
from .settings import ConnectorConfig
from .stores import Stores

MOST_HISTORIES = 8
"""Histories of a chunk that are kept when they are first met; further ones when they come again."""
MOST_NAMES = 1 << 16
"""Names that are remembered, the latest ones: 16 MB of memory."""


class WantedChunks(NamedTuple):
    """Indices of the segments that are to be stored of a request, as in `SaveCommand`.

    Attributes:
      lacking: those among `prefills` that were asked for behind their nearest chunk as often as the config says, while
        nothing is stored of them behind it.
    """

    formed: tuple[int, ...] = ()
    prefills: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()


class Admission:
    """Decides what to store of exactly prefilled requests. Thread-safe.

    Args:
      config, stores, cache: of the engine.
    """

    def __init__(self, config: ConnectorConfig, stores: Stores, cache: CacheFormat):
        self._config, self._stores, self._cache = config, stores, cache
        self._demand, self._near_demand = Demand(), Demand()

    def wanted(self, tenant: str, history: PromptHistory, prefills: StoredPrefills | None = None) -> WantedChunks:
        """Returns what to store of a prompt.

        The first chunk becomes a canonical. A later one is kept as it was prefilled if nothing of it is stored yet,
        or, for its first histories, nothing behind what is nearest to it now. All else is kept when it
        is asked for as often as the config says, behind this front or behind what is nearest: the chunk's patch, where
        its canonical is stored, and otherwise its prefill.

        Args:
          prefills: the tenant's, which a plan has looked at just now.

        Raises:
          StoreError, WeightsError: as `Stores.of`.
        """
        formed, kept, lacking, stores = [], [], [], self._stores
        prefills = stores.prefills(tenant, self._cache.dtype) if prefills is None else prefills
        for index, (id, exact) in enumerate(zip(history.ids, history.exact, strict=True)):
            if index == 0:
                if not stores.has_canonical(tenant, id):
                    formed.append(index)
                continue
            times = self._demand.note(tenant, id, exact)
            if prefills is not None and prefills.may_have(id, exact):
                continue
            is_asked = times >= self._config.patch_after
            if is_asked and stores.has_canonical(tenant, id):
                if not stores.is_formed(tenant, id, history.ids[:index]):
                    formed.append(index)
            elif prefills is not None:
                near = history.alike(index)["near"]
                lacks_near = not prefills.alike(id, {"near": near})
                comes_again = lacks_near and self._near_demand.note(tenant, id, near) >= self._config.patch_after
                if comes_again:
                    lacking.append(index)
                # Of a chunk that is met everywhere, most neighbours do not come again.
                is_first = self._demand.histories(tenant, id) <= MOST_HISTORIES
                is_new = lacks_near and (is_first or not prefills.is_listed(id))
                if is_asked or is_new or comes_again:
                    kept.append(index)
        return WantedChunks(tuple(formed), tuple(kept), tuple(lacking))


class Demand:
    """Remembers which histories of which chunks requests have asked for. Thread-safe."""

    def __init__(self):
        self._asked: collections.OrderedDict[tuple[str, str, str], int] = collections.OrderedDict()
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.Lock()

    def note(self, tenant: str, id: str, history: str) -> int:
        """Notes that a chunk was asked for behind a history. Returns how often it was by now."""
        key = tenant, id, history
        with self._lock:
            times = self._asked[key] = self._asked.get(key, 0) + 1
            self._asked.move_to_end(key)
            self._counts[tenant, id] += times == 1
            if len(self._asked) > MOST_NAMES:
                (tenant, id, _), _ = self._asked.popitem(last=False)
                self._counts[tenant, id] -= 1
                if not self._counts[tenant, id]:
                    del self._counts[tenant, id]
            return times

    def histories(self, tenant: str, id: str) -> int:
        """Counts the histories that a chunk was asked for behind, as far as they are remembered."""
        with self._lock:
            return self._counts[tenant, id]
