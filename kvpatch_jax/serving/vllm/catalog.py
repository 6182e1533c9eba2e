"""What one tenant has stored of the chunks of one prompt: the options of a plan, and what the plan places."""

import functools
from collections.abc import Collection, Iterator, Sequence

from ...cache import Antecedent, Chunk, Patch, slides
from ...errors import KVPatchError
from ...plan import ALLOWED, FORWARD, Goal, Inventory, Option, Place, is_promised, options_at
from ...plan.choice import Options
from ...window import Entry, Promise
from .engine import CacheFormat
from .messages import ChunkPayload
from .plan import ChunkStep, PromptHistory, Survivor
from .stores import Stores


class StoreCatalog(Inventory):
    """Offers the stored chunks of one prompt, and keeps in memory what a plan takes of them.

    So once the engine relies on a plan, no chunk of it can be evicted, turn out damaged, or not fit the engine's pool.

    Args:
      stores: the stores.
      history: the prompt's chunks, and whose they are.
      cache: the engine's cache format.
      unplaced: ids of chunks that could not be placed before; the catalog has nothing of them.

    Attributes:
      unfit: errors of stored chunks and patches that do not fit the engine, and so are offered no more.
      prefills: the tenant's stored prefills, which remember what a remote store has just listed.
      forwards: a forward of every chunk.
    """

    def __init__(self, stores: Stores, history: PromptHistory, cache: CacheFormat, unplaced: Collection[str] = ()):
        tenant = history.tenant
        super().__init__(stores.of(tenant), stores.backbone, cache.layout, stores.prefills(tenant, cache.dtype))
        self._stores, self._format, self._history, self._unplaced = stores, cache, history, unplaced
        self.forwards = [FORWARD._replace(cost=segment.end - segment.begin) for segment in history.segments]
        self._options = dict[int, list[Option]]()
        self._left = functools.cache(self._left_by_agent)
        self._lacking = set[tuple[str, str]]()
        self._provided = dict[tuple[int, str], tuple[Chunk, Patch | None]]()
        self.unfit: list[KVPatchError] = []

    def options(self, goal: Goal, promise: Promise) -> Options:
        """Returns the options of every chunk, as `choose` takes them; costs are tokens to prefill."""
        points = ALLOWED[goal.reuse]

        def options(index: int, chosen: Sequence[Option]) -> Iterator[Option]:
            survivor = self._survivor(index, chosen, promise)
            # Where it is what is promised, it goes first: a window that remembers goes on with what it has.
            if survivor is not None and not survivor.ways:
                yield survivor
            stored = self._stored(index, points)
            yield from (option for option in stored if not option.ways)
            if survivor is not None and survivor.ways:
                yield survivor
            yield from (option for option in stored if option.ways)
            yield self.forwards[index]

        return options

    def _stored(self, index: int, points: Collection[str]) -> list[Option]:
        """Returns the stored options of a chunk, looked up when they are first asked for."""
        if index not in self._options:
            segment, target = self._history.segments[index], self._history.exact[:index]
            length = segment.end - segment.begin
            entry = Entry(segment.id, None, length, length, modality=segment.modality)
            antecedent = functools.partial(Antecedent.of, *self._history.ids[:index])
            place = Place(entry, self._history.exact[index], target, antecedent, self._history.alike(index))
            found = self._options[index] = list[Option]()
            for option in options_at(place, self, points) if segment.id not in self._unplaced else ():
                if not option.is_forward and (segment.id, option.made) not in self._lacking:
                    found.append(option)
                    if not option.ways:  # nothing serves better
                        break
        return self._options[index]

    def _survivor(self, index: int, chosen: Sequence[Option], promise: Promise) -> Option | None:
        """Returns what an earlier request of this agent left of a chunk, if this front is a part of that one's."""
        left = self._left(index) if index else None
        if left is None:
            return None
        front = tuple(option.made for option in chosen)
        count = slides(left.seen, front)
        if count is None or (self._history.ids[index], left.identity) in self._lacking:
            return None
        # Where nothing has left, it is what the engine would compute behind chunks that are served so.
        ways = tuple(way for way in left.ways if not is_promised(way[0], promise))
        if count and not is_promised("survivor", promise):
            ways = tuple(sorted({*ways, ("survivor", count)}))
        is_exact = left.identity == self._history.exact[index] and front == self._history.exact[:index]
        return Option("restored" if is_exact else "survivor", left.identity, ways, inherits=not count, detail=left)

    def _left_by_agent(self, index: int) -> Survivor | None:
        """Returns what an earlier request of this agent left of a chunk."""
        is_lost = self._history.ids[index] in self._unplaced
        return None if is_lost else self._stores.survivors.get(self._history.survivor_key(index))

    # ------------------------------------------------------------------------------------------------ what is placed

    def provide(self, chosen: Sequence[Option]) -> bool:
        """Reads what options place, from the first chunk on.

        Returns:
          False: some of it is lacking, or does not fit the engine, and is offered no more.
        """
        # All are read, so that a prompt with many damaged chunks is not planned once for each of them.
        is_complete = True
        for index, option in enumerate(chosen):
            if (index, option.made) in self._provided:
                continue
            read = self._read(index, option)
            if read is None:
                self._lacking.add((self._history.ids[index], option.made))
                self._options.clear()
                is_complete = False
            else:
                self._provided[index, option.made] = read
        return is_complete

    def payloads(self, steps: Sequence[ChunkStep]) -> tuple[ChunkPayload, ...]:
        """Returns what the steps of a plan place, in order."""
        return tuple(ChunkPayload(step, *self._provided[index, step.identity]) for index, step in enumerate(steps))

    def _read(self, index: int, option: Option) -> tuple[Chunk, Patch | None] | None:
        """Reads the chunk and the patch of an option; None if they are not there, or do not fit."""
        segment, patch = self._history.segments[index], None
        if isinstance(option.detail, Survivor):
            chunk = option.detail.chunk
            lead = chunk.lead
        elif option.point in ("restored", "mean", "near"):
            assert self.prefills is not None
            assert option.stored is not None
            chunk, lead = self.prefills.get(segment.id, option.stored), self.prefills.lead(option.stored)
        else:
            chunk, lead = self._stores.canonical(self._history.tenant, segment.id), None
            patch = None if option.stored is None or option.point == "leading" else self.patch(option.stored)
        if chunk is None:
            return None
        try:
            self._format.check(chunk, segment.end - segment.begin, lead)
            if patch is not None:
                self._format.check_patch(patch, chunk, self._history.ids[:index])
        except KVPatchError as error:
            self.unfit.append(error)
            return None
        return chunk, patch
