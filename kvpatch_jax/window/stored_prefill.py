"""Stored prefills: the KV that a forward of a chunk left behind other pieces, kept to serve the chunk again.

A store keeps it under the identity of that KV. Behind the very same KV it is what a forward would compute, bit for bit.
Behind the same *nearest* chunk it is close to that, because the nearest antecedent carries most of the deficit. Closer
is the mean over several histories that share the nearest chunk, in which what they do not share averages out.

One small object per chunk lists its prefills, as JSON in bytes: rows of [identity, {likeness: key}, time, count].
"""

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..cache import Chunk, Likeness, text_digest
from ..core import PARTS
from ..utils import strict_json

TIME_TO_LIVE = 7 * 24 * 3600.0
"""Seconds that a prefill is kept: histories that nobody repeats would fill a store without a budget."""
MOST_LISTED = 64
"""Prefills and means that a listing names. An engine keeps eight histories of a chunk when they are first met, each
with a mean at most; as many leads, or histories that were asked for again, have room beside them."""
MOST_OF_A_MEAN = 8
"""Histories that a mean is taken over; more of them hardly change it."""
FRESH_SECONDS = 2.0
"""Time for which a remote store's listing of a chunk is remembered, and what it named in vain."""
_MOST_REMEMBERED = 1024
_DAY = 86400 * 10**9
_DIGEST = re.compile("[0-9a-f]{32}")


class ListedPrefill(NamedTuple):
    """One stored prefill of a chunk, or the mean of several.

    Attributes:
      made: identity of its KV, under which it is stored; a mean has a digest of its own.
      keys: what it is found by; a mean by "mean" alone, and nothing else by that.
      stored: when it was stored, in nanoseconds since the epoch.
      count: how many prefills are in it.
    """

    made: str
    keys: Mapping[str, str]
    stored: int
    count: int = 1


def packed_listing(records: Iterable[ListedPrefill]) -> np.ndarray:
    """Packs a listing into an array of bytes."""
    return np.frombuffer(json.dumps([list(record) for record in records]).encode(), np.uint8)


def unpacked_listing(saved: np.ndarray | None) -> list[ListedPrefill]:
    """Unpacks a listing. What is stored may be of anybody's making: anything but a listing is one without records."""
    records = list[ListedPrefill]()
    try:
        rows = [] if saved is None else strict_json.loads(np.asarray(saved, np.uint8).tobytes())
        for made, keys, stored, count in rows[:MOST_LISTED]:
            digests = [made, *keys.values()]
            if type(stored) is type(count) is int and all(map(_DIGEST.fullmatch, digests)):
                records.append(ListedPrefill(made, keys, stored, max(count, 1)))
    except (ValueError, TypeError, AttributeError, OverflowError, LookupError):
        return []
    return records


def merged_listings(listings: Iterable[Iterable[ListedPrefill]], now: int) -> list[ListedPrefill]:
    """Merges listings of one chunk: the latest records, the first stored one first.

    Left out are records whose time is over or far ahead, means that a later mean replaces, and what exceeds
    `MOST_LISTED`.

    Args:
      now: nanoseconds since the epoch.
    """
    everything = [record for listing in listings for record in listing]
    latest, means = dict[str, ListedPrefill](), dict[str, ListedPrefill]()
    for record in sorted(everything, key=lambda record: (record.stored, record.count)):
        if now - TIME_TO_LIVE * 1e9 < record.stored < now + _DAY:
            latest[record.made] = record
    for record in latest.values():
        if "mean" in record.keys:
            means[record.keys["mean"]] = record
    current = [record for record in latest.values() if "mean" not in record.keys or record in means.values()]
    return sorted(current, key=lambda record: (record.stored, record.made))[-MOST_LISTED:]


class StoredPrefills:
    """Stored prefills of one backbone's chunks in one store, never encoded: they are served bit for bit.

    With a remote store a chunk's listing is its version together with the one here: other machines add to it.
    Thread-safe.

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

    def lead(self, made: str) -> str:
        """Returns what a prefill is stored under as its lead, from the identity of its KV."""
        return text_digest(f"prefill {self._dtype} {made}")

    def name(self, id: str) -> str:
        """Returns the name under which a store lists the prefills of a chunk."""
        return f"prefills {text_digest(f'{self._dtype} {id}')}"

    def contains(self, id: str, made: str) -> bool:
        """Returns whether a chunk's prefill of this identity is stored here, without reading it."""
        return self.store.contains(id, self.backbone, lead=self.lead(made))

    def get(self, id: str, made: str) -> Chunk | None:
        """Reads a chunk's prefill of this identity; None if it is not stored."""
        chunk = self.store.get(id, self.backbone, lead=self.lead(made))
        # An encoded one would be no prefill.
        if chunk is None or chunk.encoding is not None:
            self._missing.put((id, made), True)
            return None
        return chunk

    def may_have(self, id: str, made: str) -> bool:
        """Returns whether `get` may succeed: the prefill is stored here, or listed where a remote store may have it."""
        if self.contains(id, made):
            return True
        return self._is_available(id, made) and any(record.made == made for record in self._listing(id))

    def alike(self, id: str, keys: Mapping[Likeness, str]) -> dict[Likeness, str]:
        """Finds by each of these keys the chunk's stored prefill that was stored first, as far as there is one.

        A mean has a digest of its own, another one for each history that is added to it.
        """
        listing, stored = self._listing(id) if keys else [], dict[Likeness, str]()
        for likeness, key in keys.items():
            records = (record for record in listing if record.keys.get(likeness) == key)
            available = next((record.made for record in records if self._is_available(id, record.made)), None)
            if available is not None:
                stored[likeness] = available
        return stored

    def is_listed(self, id: str) -> bool:
        """Returns whether a prefill of a chunk was stored, behind whatever."""
        return bool(self._listing(id))

    def put(self, chunk: Chunk, made: str, keys: Mapping[Likeness, str], mean: bool = False) -> int:
        """Stores a prefill, `chunk.lead` being `lead(made)`, to be found by its identity and by these keys.

        Args:
          mean: also adds it to the mean of those behind the same lead and nearest chunk, once there are two: more to
            write, for those who may serve it.

        Returns:
          How many times the size of a prefill was stored.
        """
        self.store.put(chunk, ttl=TIME_TO_LIVE)
        found_by = {likeness: key for likeness, key in keys.items() if likeness != "mean"}
        records = [ListedPrefill(made, found_by, time.time_ns())]
        if mean and "mean" in keys:
            records += self._means_with(chunk, made, keys)

        def amend(copies: list[np.ndarray]) -> np.ndarray:
            return packed_listing(merged_listings([*map(unpacked_listing, copies), records], time.time_ns()))

        self.store.amend_encoder(self.name(chunk.id), self.backbone, amend, ttl=TIME_TO_LIVE)
        return len(records)

    def _means_with(self, chunk: Chunk, made: str, keys: Mapping[Likeness, str]) -> list[ListedPrefill]:
        """Stores the mean of a prefill and those before it; none of one alone, nor where there are enough.

        The version before that stays until its time is over: a window may name it.
        """
        saved = [record for record in self._listing(chunk.id) if record.made != made]
        means = [record for record in saved if record.keys.get("mean") == keys["mean"]]
        first = [record for record in saved if record.keys.get("near") == keys["near"]]
        old = next((record for record in (*means, *first) if self._is_available(chunk.id, record.made)), None)
        if old is None or old.count >= MOST_OF_A_MEAN:
            return []
        before = self.get(chunk.id, old.made)
        if before is None or before.length != chunk.length:
            return []

        kv, length, count = {}, chunk.length, old.count + 1
        for name, value in chunk.kv.items():
            # A mean of transitions is that of the states which they make.
            pair = (value, before.kv[name])
            pair = pair if name in PARTS else (array[:, :length] for array in pair)
            latest, others = (np.asarray(array, np.float32) for array in pair)
            kv[name] = (others + (latest - others) / count).astype(value.dtype)
        mean_made = text_digest(f"mean {count} {old.made} {made}")
        local = np.asarray(chunk.local)[:length]
        self.store.put(dataclasses.replace(chunk, kv=kv, local=local, lead=self.lead(mean_made)), ttl=TIME_TO_LIVE)
        return [ListedPrefill(mean_made, {"mean": keys["mean"]}, time.time_ns(), count)]

    def _is_available(self, id: str, made: str) -> bool:
        """Returns whether a prefill is here, or a remote store may have it: not if it was just read in vain."""
        if self._missing.get((id, made)):
            return self.contains(id, made)
        return self.store.may_have(id, self.backbone, lead=self.lead(made))

    def _listing(self, id: str) -> list[ListedPrefill]:
        """Returns what is listed of a chunk here and in the remote store, the first stored one first."""
        name, remote = self.name(id), self._remote.get(id)
        here = unpacked_listing(self.store.get_encoder(name, self.backbone, tier="here"))
        if remote is None:
            remote = unpacked_listing(self.store.get_encoder(name, self.backbone, tier="remote"))
            self._remote.put(id, remote)
        return merged_listings([here, remote], time.time_ns())


class _Remembered[T]:
    """Values by key for `FRESH_SECONDS`. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[Any, tuple[float, T]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any) -> T | None:
        with self._lock:
            until, value = self._values.get(key, (0.0, None))
        return value if time.monotonic() < until else None

    def put(self, key: Any, value: T) -> None:
        with self._lock:
            if len(self._values) >= _MOST_REMEMBERED:
                self._values.clear()
            self._values[key] = time.monotonic() + FRESH_SECONDS, value
