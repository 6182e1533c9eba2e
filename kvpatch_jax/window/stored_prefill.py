"""Stored prefills: the KV that a forward of a chunk left behind other pieces, kept to serve the chunk again.

A store keeps it as a chunk of its own, whose lead is everything that preceded it. Behind the very same pieces, served
in the same way, it is what a forward would compute, bit for bit. Behind the same *nearest* piece it is close to that,
because the nearest antecedent carries most of the deficit; then the chunk is approximate. Closer is the mean over
several histories that share the nearest piece, in which what they do not share averages out.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np

from ..cache import Chunk
from ..core import PARTS
from .entry import Likeness, PlacedPiece, short_digest
from .prefill_listing import TIME_TO_LIVE, ListedPrefill, merged_listings, pack_listing, unpack_listing

MOST_OF_A_MEAN = 8
"""Histories that a mean is taken over; more of them hardly change it."""
FRESH_SECONDS = 2.0
"""Time for which a remote store's listing of a chunk is remembered, and what it named in vain."""
_MOST_REMEMBERED = 1024


def likeness_keys(pieces: Sequence[PlacedPiece], index: int, lead: int) -> dict[Likeness, str]:
    """Returns the keys under which a prefill at an index is found again behind other pieces, the most alike first.

    Args:
      pieces: of a window.
      lead: how many are pinned at the front.

    Returns:
      Nothing at the front of a window.
    """
    if not index:
        return {}

    return keys_behind(pieces[min(lead, index)].front, pieces[index - 1].entry.key)


def keys_behind(pinned: str, nearest: str) -> dict[Likeness, str]:
    """Returns the keys under which a prefill is found again behind other chunks, the most alike first.

    Args:
      pinned: digest of the pinned lead in front of it.
      nearest: key of what stands directly in front of it.
    """
    return {likeness: short_digest(f"{likeness} {pinned} {nearest}") for likeness in get_args(Likeness)}


class StoredPrefills:
    """Stored prefills of one backbone's chunks in one store, never encoded: they are served bit for bit.

    One small object per chunk lists them (`prefill_listing`), so one read finds all. With a remote store that is its
    version together with the one here: other machines add to it. Thread-safe.

    Attributes:
      store: a `ChunkStore`, or anything that keeps chunks and arrays under names as one does.
      backbone: fingerprint of the weights.
    """

    def __init__(self, store: Any, backbone: str, dtype: jax.typing.DTypeLike):
        """Names prefills of this backbone that read KV of a pool of this dtype: another rounding is another KV."""
        self.store, self.backbone = store, backbone
        self._dtype = np.dtype(dtype).name
        self._remote, self._missing = _Remembered[list[ListedPrefill]](), _Remembered[bool]()

    @staticmethod
    def supports(store: Any) -> bool:
        """Returns whether a store can keep prefills: it says what it may have, and amends arrays by name."""
        return all(hasattr(store, name) for name in ("contains", "may_have", "get_encoder", "amend_encoder"))

    def lead(self, front: str) -> str:
        """Returns what a prefill is stored under as its lead, from the chain digest of what preceded it."""
        return short_digest(f"prefill {self._dtype} {front}")

    def contains(self, id: str, front: str) -> bool:
        """Returns whether a chunk's prefill behind exactly this front is stored here, without reading it."""
        return self.store.contains(id, self.backbone, lead=self.lead(front))

    def get(self, id: str, front: str) -> Chunk | None:
        """Reads a chunk's prefill behind exactly this front; None if it is not stored."""
        chunk = self.store.get(id, self.backbone, lead=self.lead(front))
        # An encoded one would be no prefill.
        if chunk is None or chunk.encoding is not None:
            self._missing.put((id, front), True)
            return None
        return chunk

    def may_have(self, id: str, front: str) -> bool:
        """Returns whether `get` may succeed: the prefill is stored here, or listed where a remote store may have it."""
        if self.contains(id, front):
            return True
        return self._is_reached(id, front) and any(record.front == front for record in self._listing(id))

    def find(self, id: str, front: str, keys: Mapping[Likeness, str]) -> dict[str, str]:
        """Finds a chunk's stored prefills, each with the digest of what it was computed behind, or a mean's own.

        Returns:
          "restored" with this very front, if there is one behind it; and as `alike` those behind others.
        """
        # What is here serves exactly, so nothing better is in the remote store.
        here = self.contains(id, front)
        found = {"restored": front} if here or self.may_have(id, front) else {}
        others = self.alike(id, keys, far=not here)
        return found | {likeness: other for likeness, other in others.items() if other != front}

    def alike(self, id: str, keys: Mapping[Likeness, str], *, far: bool = True) -> dict[Likeness, str]:
        """Finds by each of these keys the chunk's stored prefill that was stored first, as far as there is one.

        A mean has a digest of its own, another one for each history that is added to it.

        Args:
          far: whether the remote store's listing is read too.
        """
        listing, found = self._listing(id, far) if keys else [], dict[Likeness, str]()
        for likeness, key in keys.items():
            for record in listing:
                if record.keys.get(likeness) == key and self._is_available(id, record.front):
                    found[likeness] = record.front
                    break
        return found

    def is_listed(self, id: str) -> bool:
        """Returns whether a prefill of a chunk was stored, behind whatever."""
        return bool(self._listing(id))

    def put(self, chunk: Chunk, front: str, keys: Mapping[Likeness, str], mean: bool = False) -> int:
        """Stores a prefill, `chunk.lead` being `lead(front)`, to be found by its front and by these keys.

        Args:
          mean: also adds it to the mean of those behind the same lead and nearest piece, once there are two: more to
            write, for those who may serve it.

        Returns:
          How many times the size of a prefill was stored.
        """
        self.store.put(chunk, ttl=TIME_TO_LIVE)
        found_by: dict[Likeness, str] = {likeness: key for likeness, key in keys.items() if likeness != "mean"}
        own = [ListedPrefill(front, found_by, time.time_ns())]
        if mean and "mean" in keys:
            own += self._means_with(chunk, front, keys)

        def amend(copies: list[np.ndarray]) -> np.ndarray:
            return pack_listing(merged_listings([*map(unpack_listing, copies), own], time.time_ns()))

        self.store.amend_encoder(self.name(chunk.id), self.backbone, amend, ttl=TIME_TO_LIVE)
        return len(own)

    def _means_with(self, chunk: Chunk, front: str, keys: Mapping[Likeness, str]) -> list[ListedPrefill]:
        """Stores the mean of a prefill and those before it; none of one alone, nor where there are enough.

        The version before that stays until its time is over: a window may name it.
        """
        saved = [record for record in self._listing(chunk.id) if record.front != front]
        means = [record for record in saved if record.keys.get("mean") == keys["mean"]]
        first = [record for record in saved if record.keys.get("near") == keys["near"]]
        old = next((record for record in (*means, *first) if self._is_available(chunk.id, record.front)), None)
        if old is None or old.count >= MOST_OF_A_MEAN:
            return []
        before = self.get(chunk.id, old.front)
        if before is None or before.length != chunk.length:
            return []

        kv, length, count = {}, chunk.length, old.count + 1
        for name, value in chunk.kv.items():
            # A mean of transitions is that of the states which they make.
            both = (value, before.kv[name])
            both = both if name in PARTS else (each[:, :length] for each in both)
            own, others = (np.asarray(each, np.float32) for each in both)
            kv[name] = (others + (own - others) / count).astype(value.dtype)
        new = short_digest(f"mean {count} {old.front} {front}")
        local = np.asarray(chunk.local)[:length]
        mean = dataclasses.replace(chunk, kv=kv, local=local, lead=self.lead(new))
        self.store.put(mean, ttl=TIME_TO_LIVE)
        return [ListedPrefill(new, {"mean": keys["mean"]}, time.time_ns(), count)]

    def _is_available(self, id: str, front: str) -> bool:
        return self.contains(id, front) or self._is_reached(id, front)

    def _is_reached(self, id: str, front: str) -> bool:
        """Returns whether a remote store may have a prefill; not if it was just read in vain."""
        if self._missing.get((id, front)):
            return False
        return self.store.may_have(id, self.backbone, lead=self.lead(front))

    def _listing(self, id: str, far: bool = True) -> list[ListedPrefill]:
        """Returns what is listed of a chunk here, and in the remote store, the first stored one first."""
        name = self.name(id)
        listings = [unpack_listing(self.store.get_encoder(name, self.backbone, tier="here"))]
        if far:
            remote = self._remote.get(id)
            if remote is None:
                remote = unpack_listing(self.store.get_encoder(name, self.backbone, tier="remote"))
                self._remote.put(id, remote)
            listings.append(remote)
        return merged_listings(listings, time.time_ns())

    def name(self, id: str) -> str:
        """Returns the name under which a store lists the prefills of a chunk."""
        return f"prefills {short_digest(f'{self._dtype} {id}')}"


class _Remembered[T]:
    """Values by key for `FRESH_SECONDS`, the latest ones. Thread-safe."""

    def __init__(self) -> None:
        self._values: collections.OrderedDict[Any, tuple[float, T]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> T | None:
        with self._lock:
            until, value = self._values.get(key, (0.0, None))
        return value if time.monotonic() < until else None

    def put(self, key: Any, value: T) -> None:
        with self._lock:
            now = time.monotonic()
            self._values[key] = now + FRESH_SECONDS, value
            self._values.move_to_end(key)
            while len(self._values) > _MOST_REMEMBERED or next(iter(self._values.values()))[0] < now:
                self._values.popitem(last=False)
