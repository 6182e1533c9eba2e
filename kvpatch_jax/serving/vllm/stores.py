"""Stores of an engine's tenants, and the catalog of one store that a plan uses."""

import collections
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from ...cache import Chunk, Identities, Patch, slides
from ...errors import KVPatchError, StoreClosedError
from ...store import ChunkStore, PatchKey
from ...window import PatchNote, StoredPrefills
from .layouts import CacheFormat
from .messages import ChunkPayload
from .prompt_history import PromptHistory
from .request_plan import CANONICAL, ChunkStep, StockedPatch
from .settings import ConnectorConfig, RequestOptions
from .shared_stores import MAX_TENANTS, acquire_stores, release_stores
from .survivors import Survivor
from .weights import expect_weights


class Stores:
    """The stores of an engine's tenants as one side of the connector uses them. Safe for any number of threads.

    The sides of one configuration in a process share what is open (`shared_stores`).

    Args:
      config: names the root, the backbone, budgets, key and remote store.
      weights: digest of the engine's weights; a store with chunks of other weights is refused. None: not checked.

    Attributes:
      shared: what the sides share.

    Raises:
      ConfigError: the key cannot be read, or the remote store cannot be opened.
    """

    def __init__(self, config: ConnectorConfig, weights: str | None = None):
        self.config, self.weights = config, weights
        self.shared = acquire_stores(config)
        self._lock, self._closed = threading.Lock(), False
        self._prefills: collections.OrderedDict[tuple[str, str], StoredPrefills] = collections.OrderedDict()

    @property
    def backbone(self) -> str:
        """The name under which chunks are stored and looked up: the config's, until the engine's cache is reset."""
        return self.shared.backbone

    def of(self, tenant: str) -> ChunkStore:
        """Returns a tenant's store, whose chunks under the backbone's name are of the engine's weights.

        Raises:
          WeightsError: they are of other weights.
          StoreClosedError: after `close`.
          StoreError, InputError: as `ChunkStore`.
        """
        if self._closed:
            raise StoreClosedError(f"stores of {self.config.store}: got a call after close; expected open stores")
        store = self.shared.of(tenant)
        # Checked on each use: the record may be evicted, or deleted with its tenant, and then has to be written again.
        if self.weights is not None:
            expect_weights(store, self.backbone, self.weights)
        return store

    def close(self, patience: float | None = None) -> bool:
        """Ends this side's use of the stores, and closes them if it was the last. Idempotent.

        Args:
          patience: seconds to wait at most for pending writes; None: the config's.

        Returns:
          Whether every store that had to be closed was closed in time. The others are left to end by themselves.
        """
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        return release_stores(self.shared, self.config.patience if patience is None else patience)

    def has_canonical(self, tenant: str, id: str) -> bool:
        """Returns whether a canonical in the config's encoding is stored or queued, without reading it."""
        return self.of(tenant).contains(id, self.backbone, **self.encoding)

    def canonical(self, tenant: str, id: str) -> Chunk | None:
        """Reads a canonical in the config's encoding; None if there is none."""
        return self.of(tenant).get(id, self.backbone, **self.encoding)

    @property
    def encoding(self) -> dict[str, Any]:
        """The config's encoding as a keyword of stores; none of canonicals as they were prefilled."""
        return {} if self.config.encoding is None else {"encoding": self.config.encoding}

    def prefills(self, tenant: str, dtype: Any) -> StoredPrefills | None:
        """Returns a tenant's stored prefills of a pool of this dtype; None if canonicals are encoded.

        Whoever keeps canonicals in few bits to save room has none for prefills, which are never encoded. One object
        serves request after request, because it remembers for a while what a remote store lists.
        """
        if self.config.encoding is not None:
            return None
        store, backbone, key = self.of(tenant), self.backbone, (tenant, np.dtype(dtype).name)
        with self._lock:
            known = self._prefills.get(key)
            if known is None or known.store is not store or known.backbone != backbone:
                known = self._prefills[key] = StoredPrefills(store, backbone, dtype)
            self._prefills.move_to_end(key)
            if len(self._prefills) > MAX_TENANTS:
                self._prefills.popitem(last=False)
        return known

    def patches_behind(
        self, tenant: str, id: str, antecedent: tuple[str, ...], orbit: bool = False
    ) -> list[tuple[StockedPatch, Patch]]:
        """Returns a chunk's patches that were formed behind exactly this antecedent, with their catalog entries.

        Args:
          orbit: those of several orders of it instead.
        """
        key = PatchKey(chunk=id, backbone=self.backbone, antecedent=antecedent, orbit=orbit, **self.encoding)
        patches = []
        for patch in self.of(tenant).get_patches(key):
            if patch.metadata.encoding != self.config.encoding:
                continue
            note = PatchNote.of(patch)
            rank = note.rank
            # No certificate looks up patches of encoded canonicals, whose rank only says which is the largest.
            if self.config.encoding is not None:
                channels = patch.metadata.layout.channels
                rank = min(_rank_of(patch.ranks[channel.name], channel.features) for channel in channels)
            if rank:
                patches.append((StockedPatch(note.digest, rank, orbit), patch))
        return patches

    def is_formed(self, tenant: str, id: str, antecedent: tuple[str, ...]) -> bool:
        """Returns whether there is a canonical of a prompt's first chunk, or a patch of a later one."""
        if antecedent:
            return bool(self.patches_behind(tenant, id, antecedent))
        return self.has_canonical(tenant, id)


def _rank_of(rank: int | None, features: int) -> int:
    return features if rank is None else rank


class StoreCatalog:
    """Catalog of what one tenant's store has of one prompt, a `ChunkCatalog`: what is provided is kept in memory.

    So once the engine relies on a plan, no chunk of it can be evicted, turn out damaged, or not fit the engine's pool.

    Args:
      stores: the stores.
      options: of the request: its tenant, and the agent whose survivors may serve it.
      cache: the engine's cache format.
      history: the prompt's chunks.
      unplaced: ids of chunks that could not be placed before; the catalog has nothing of them.

    Attributes:
      unfit: errors of stored chunks and patches that do not fit the engine, and so are not in the catalog.
    """

    def __init__(
        self,
        stores: Stores,
        options: RequestOptions,
        cache: CacheFormat,
        history: PromptHistory,
        unplaced: Collection[str] = (),
    ):
        self._stores, self._options, self._cache = stores, options, cache
        self._history, self._unplaced = history, unplaced
        self._lengths = {segment.id: segment.end - segment.begin for segment in history.segments}
        self._canonicals: dict[str, Chunk | None] = {}
        self._patches: dict[str, Patch] = {}
        self._provided: dict[ChunkStep, Chunk] = {}
        self._left: dict[str, Survivor] = {}
        self.unfit: list[KVPatchError] = []

    @functools.cached_property
    def stored_prefills(self) -> StoredPrefills | None:
        """The tenant's stored prefills, which remember what a remote store has just listed; None: it keeps none."""
        return self._stores.prefills(self._options.tenant, self._cache.dtype)

    def has_canonical(self, id: str) -> bool:
        """Returns whether the store has an undamaged canonical that fits the engine's pool."""
        if id in self._unplaced:
            return False
        if id not in self._canonicals:
            self._canonicals[id] = self._fitting(self._stores.canonical(self._options.tenant, id))
        return self._canonicals[id] is not None

    def patches(self, id: str, antecedent: tuple[str, ...]) -> list[StockedPatch]:
        """Returns the stored patches of a chunk behind this antecedent, or orders of it, that fit its canonical."""
        chunk = self._canonicals[id]
        assert chunk is not None  # a plan calls `has_canonical` first
        found, fitting = list[tuple[StockedPatch, Patch]](), list[StockedPatch]()
        for orbit in (False, True)[: len(antecedent)]:  # of one chunk there is one order
            found += self._stores.patches_behind(self._options.tenant, id, antecedent, orbit)
        for entry, patch in found:
            if self._fits(self._cache.check_patch, patch, chunk, antecedent):
                self._patches[entry.digest] = patch
                fitting.append(entry)
        return fitting

    def prefills(self, index: int) -> dict[str, str]:
        """Returns the identities of a chunk's stored prefills by operating point."""
        id, exact = self._history.ids[index], self._history.exact[index]
        prefills = self.stored_prefills
        if prefills is None or id in self._unplaced:
            return {}
        # What is here serves exactly, so nothing better is elsewhere.
        exact_only = self._options.policy == "exact" or prefills.contains(id, exact)
        found = {"restored": exact} if prefills.may_have(id, exact) else {}
        for point, other in prefills.alike(id, {} if exact_only else self._history.alike(index)).items():
            if other not in found.values():
                found[point] = other
        return found

    def survivor(self, index: int, front: Identities) -> Survivor | None:
        """Returns what an earlier request of this agent left of a chunk, if this front is a part of that one's."""
        if self._history.ids[index] in self._unplaced:
            return None
        left = self._stores.shared.survivors.get(self._history.survivor_key(index, self._options))
        if left is None or slides(left.seen, front) is None:
            return None
        self._left[left.identity] = left
        return left

    def provide(self, step: ChunkStep) -> bool:
        """Reads what a step places. Returns whether it is there and fits the engine."""
        id, prefills = step.segment.id, self.stored_prefills
        if step.point in CANONICAL:
            chunk = self._canonicals[id]
        elif step.identity in self._left:
            left = self._left[step.identity].chunk
            chunk = self._fitting(left, left.lead)
        elif prefills is None:
            chunk = None
        else:
            chunk = self._fitting(prefills.get(id, step.identity), prefills.lead(step.identity))
        if chunk is None:
            return False
        self._provided[step] = chunk
        return True

    def payloads(self, steps: Sequence[ChunkStep]) -> tuple[ChunkPayload, ...]:
        """Returns what the steps of a plan place, in order."""
        payloads = []
        for step in steps:
            patch = None if step.patch is None else self._patches[step.patch]
            payloads.append(ChunkPayload(step, self._provided[step], patch))
        return tuple(payloads)

    def _fitting(self, chunk: Chunk | None, lead: str | None = None) -> Chunk | None:
        """Returns a chunk that fits the engine's pool, None otherwise."""
        if chunk is None or not self._fits(self._cache.check, chunk, self._lengths[chunk.id], lead):
            return None
        return chunk

    def _fits(self, check: Callable[..., None], *arguments: Any) -> bool:
        try:
            check(*arguments)
        except KVPatchError as error:
            self.unfit.append(error)
            return False
        return True
