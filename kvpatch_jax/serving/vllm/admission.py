"""What is worth storing of exactly prefilled requests, and which requests are prefilled exactly for that."""

import collections
import threading
from typing import NamedTuple

from ...window import StoredPrefills
from .plan import PromptHistory, RequestPlan
from .stores import Stores

MOST_HISTORIES = 8
"""Histories behind which a chunk is stored when it is first met there, where only exact requests ask for it."""
MOST_NAMES = 1 << 16
"""Names that are remembered, the latest ones: 16 MB of memory."""
PROMPTS_IN_ADVANCE = 3
"""What learning may cost a tenant before it has saved anything, in prompts."""


class WantedChunks(NamedTuple):
    """Indices of the segments that are to be stored of a request, as in `SaveCommand`.

    Attributes:
      lacking: chunks that were met before, and that are not stored behind what is nearest to them now.
    """

    formed: tuple[int, ...] = ()
    prefills: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()


class Admission:
    """Decides what to store of exactly prefilled requests, and which are prefilled exactly for that. Thread-safe.

    Args:
      store_after: as of `ConnectorConfig`.
    """

    def __init__(self, stores: Stores, store_after: int):
        self._stores, self._store_after = stores, store_after
        self._asked: collections.OrderedDict[tuple[str, str, str], int] = collections.OrderedDict()
        self._histories: collections.Counter[tuple[str, str]] = collections.Counter()
        self._accounts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def wanted(self, history: PromptHistory, prefills: StoredPrefills, exact_only: bool) -> WantedChunks:
        """Returns what to store of a prompt.

        The first chunk becomes a canonical. A later one is kept as it was prefilled if nothing of it is stored behind
        what is nearest to it now. All else is kept when it is asked for behind this front as often as the settings say:
        the chunk's patch, where its canonical is stored, and otherwise its prefill.

        Args:
          prefills: the tenant's, which a plan has looked at just now.
          exact_only: whether the request takes nothing approximate. Then what is nearest is of less use, and only the
            first histories of a chunk are kept when they are met.

        Raises:
          StoreError, WeightsError: as `Stores.of`.
        """
        formed, kept, lacking, stores, tenant = [], [], [], self._stores, history.tenant
        for index, (id, exact) in enumerate(zip(history.ids, history.exact, strict=True)):
            if index == 0:
                if not stores.has_canonical(tenant, id):
                    formed.append(index)
                continue
            times, histories = self._note(tenant, id, exact)
            if prefills.may_have(id, exact):
                continue
            is_asked = times >= self._store_after
            if is_asked and stores.has_canonical(tenant, id):
                if not stores.has_patch(tenant, id, history.ids[:index]):
                    formed.append(index)
                continue
            near = history.alike(index)["near"]
            lacks_near = not prefills.alike(id, {"near": near})
            if lacks_near and histories > (times == 1):
                lacking.append(index)
            if is_asked or (lacks_near and (not exact_only or histories <= MOST_HISTORIES)):
                kept.append(index)
        return WantedChunks(tuple(formed), tuple(kept), tuple(lacking))

    def _note(self, tenant: str, id: str, history: str) -> tuple[int, int]:
        """Notes that a chunk was asked for behind a history. Returns how often by now, and behind how many of them."""
        key = tenant, id, history
        with self._lock:
            times = self._asked[key] = self._asked.get(key, 0) + 1
            self._asked.move_to_end(key)
            self._histories[tenant, id] += times == 1
            if len(self._asked) > MOST_NAMES:
                (other, oldest, _), _ = self._asked.popitem(last=False)
                self._histories[other, oldest] -= 1
                if not self._histories[other, oldest]:
                    del self._histories[other, oldest]
            return times, self._histories[tenant, id]

    def note_saved(self, tenant: str, plan: RequestPlan) -> None:
        """Credits a tenant with the tokens that stored prefills of like histories have saved it."""
        segments = [step.segment for step in plan.steps if step.point in ("near", "mean")]
        if segments:
            with self._lock:
                self._accounts[tenant] += sum(segment.end - segment.begin for segment in segments)

    def learns(self, history: PromptHistory, plan: RequestPlan, lacking: tuple[int, ...]) -> int | None:
        """Finds a chunk for which a request is better prefilled exactly, so that what it leaves can be stored.

        What is prefilled behind approximate chunks is not stored. Where a plan of those ends in front of a chunk that
        comes again, every request like this one would prefill that chunk anew. Learning never costs a tenant more
        tokens than it has saved, but for a few prompts.

        Returns:
          The index of the chunk; None if the plan is to be carried out.
        """
        index = next((index for index in lacking if index >= len(plan.steps)), None)
        if index is None:
            return None
        extra = plan.matched - plan.exact_part("").matched
        with self._lock:
            advance = PROMPTS_IN_ADVANCE * history.segments[-1].end
            if extra > self._accounts[history.tenant] + advance:
                return None
            self._accounts[history.tenant] -= extra
        return index
