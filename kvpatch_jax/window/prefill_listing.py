"""Listings of stored prefills: one small array per chunk names its prefills, and by what each is found.

A listing is uint8 [records, 57]. A record is three digests of 16 bytes (what the prefill was computed behind, then its
key of each likeness, zeros where it has none), the time it was stored at in nanoseconds since the epoch (8 bytes,
little-endian), and of how many prefills it is the mean.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

import numpy as np

from .entry import Likeness

TIME_TO_LIVE = 7 * 24 * 3600.0
"""Seconds that a prefill is kept: histories that nobody repeats would fill a store without a budget."""
MOST_LISTED = 64
"""Prefills and means that a listing names. An engine keeps eight histories of a chunk when they are first met, each
with a mean at most; as many leads, or histories that were asked for again, have room beside them."""

_LIKENESSES: tuple[Likeness, ...] = get_args(Likeness)
_DIGEST, _DAY = 16, 86400 * 10**9
_WIDTH = _DIGEST * (1 + len(_LIKENESSES)) + 8 + 1


class ListedPrefill(NamedTuple):
    """One stored prefill of a chunk, or the mean of several.

    Attributes:
      front: digest of what it was computed behind, under which it is stored; a mean has a digest of its own.
      keys: what it is found by; a mean by "mean" alone, and nothing else by that.
      stored: when it was stored, in nanoseconds since the epoch.
      count: how many prefills are in it.
    """

    front: str
    keys: Mapping[Likeness, str]
    stored: int
    count: int = 1


def merged_listings(listings: Iterable[Iterable[ListedPrefill]], now: int) -> list[ListedPrefill]:
    """Merges listings of one chunk: the latest records, the first stored one first.

    Left out are records whose time is over or far ahead, means that a later mean replaces, and what exceeds
    `MOST_LISTED`.

    Args:
      now: nanoseconds since the epoch.
    """
    latest = dict[str, ListedPrefill]()
    for record in sorted(itertools.chain.from_iterable(listings), key=lambda record: (record.stored, record.count)):
        if now - TIME_TO_LIVE * 1e9 < record.stored < now + _DAY:
            latest[record.front] = record

    means = dict[str, ListedPrefill]()
    for record in latest.values():
        if "mean" in record.keys:
            means[record.keys["mean"]] = record
    kept = [record for record in latest.values() if "mean" not in record.keys or means[record.keys["mean"]] is record]
    return sorted(kept, key=lambda record: (record.stored, record.front))[-MOST_LISTED:]


def pack_listing(records: Iterable[ListedPrefill]) -> np.ndarray:
    """Packs a listing into an array, as the module says."""
    rows = list[bytes]()
    for record in records:
        digests = [record.front, *(record.keys.get(likeness, "00" * _DIGEST) for likeness in _LIKENESSES)]
        rows.append(bytes.fromhex("".join(digests)) + record.stored.to_bytes(8, "little") + bytes([record.count]))
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, _WIDTH)


def unpack_listing(saved: np.ndarray | None) -> list[ListedPrefill]:
    """Unpacks a listing. What is stored may be of anybody's making: anything but a listing is one without records."""
    if saved is None or saved.dtype != np.uint8 or saved.ndim != 2 or saved.shape[1] != _WIDTH:
        return []
    records = list[ListedPrefill]()
    for row in saved[:MOST_LISTED]:
        raw = row.tobytes()
        front, *keys = [raw[begin : begin + _DIGEST].hex() for begin in range(0, _WIDTH - 9, _DIGEST)]
        named = dict[Likeness, str](zip(_LIKENESSES, keys, strict=True))
        named = dict(item for item in named.items() if item[1].strip("0"))
        records.append(ListedPrefill(front, named, int.from_bytes(raw[-9:-1], "little"), max(raw[-1], 1)))
    return records
