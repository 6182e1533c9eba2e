"""The memory tier beside a naive one that lists and sorts all of its entries in every call."""

import dataclasses
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import ManualClock

from kvpatch_jax.store.disk.counters import Counters
from kvpatch_jax.store.tiers.memory import CANONICAL, DERIVED, CacheEntry, MemoryTier

BUDGET = 20


@dataclasses.dataclass
class Kept:
    entry: CacheEntry[Any]
    born: int
    used: int


class NaiveTier:
    """What the tier's documentation says, by lists and sorts."""

    def __init__(self, pins: set[str], clock: ManualClock):
        self.pins, self.clock = pins, clock
        self.kept: dict[str, Kept] = {}
        self.ticks = itertools.count()

    def size(self) -> int:
        return sum(kept.entry.nbytes for kept in self.kept.values())

    def expired(self, kept: Kept) -> bool:
        return kept.entry.expires is not None and kept.entry.expires <= self.clock.now

    def get(self, key: str) -> CacheEntry[Any] | None:
        kept = self.kept.get(key)
        if kept is None or self.expired(kept):
            self.kept.pop(key, None)
            return None
        kept.used = next(self.ticks)
        return kept.entry

    def family(self, key: str) -> list[str]:
        entry = self.kept[key].entry
        if entry.rank != CANONICAL:
            return [key]
        others = [k for k, o in self.kept.items() if o.entry.chunk == entry.chunk and o.entry.rank == DERIVED]
        return [key, *others]

    def put(self, key: str, entry: CacheEntry[Any]) -> bool:
        self.kept.pop(key, None)
        if entry.nbytes > BUDGET:
            return False
        old = [k for k, kept in self.kept.items() if self.expired(kept) and kept.entry.chunk not in self.pins]
        for victim in sorted(old, key=lambda k: (self.kept[k].entry.expires, self.kept[k].born)):
            if victim in self.kept and self.size() + entry.nbytes > BUDGET:
                for other in self.family(victim):
                    del self.kept[other]

        order = [k for k, o in self.kept.items() if o.entry.rank <= entry.rank and o.entry.chunk not in self.pins]
        order.sort(key=lambda k: (self.kept[k].entry.rank, self.kept[k].used))
        victims: list[str] = []
        for victim in order:
            if self.size() - sum(self.kept[k].entry.nbytes for k in victims) + entry.nbytes <= BUDGET:
                break
            victims += [k for k in self.family(victim) if k not in victims] if victim not in victims else []
        if self.size() - sum(self.kept[k].entry.nbytes for k in victims) + entry.nbytes > BUDGET:
            return False
        for victim in victims:
            del self.kept[victim]
        born = next(self.ticks)
        self.kept[key] = Kept(entry, born, born)
        return True


STEPS = st.tuples(
    st.sampled_from("ggppppdxtn"),
    st.integers(0, 7),
    st.integers(0, 2),
    st.integers(0, 9),
    st.none() | st.integers(1, 6),
)


@settings(max_examples=300, deadline=None)
@given(st.sets(st.sampled_from("01"), max_size=1), st.lists(STEPS, max_size=100))
def test_every_call_does_what_a_naive_tier_does(pins: set[str], steps: list[tuple]):
    clock = ManualClock()
    counters = Counters()
    tier: MemoryTier[Any] = MemoryTier(BUDGET, lambda chunk: chunk in pins, counters, clock)
    naive = NaiveTier(pins, clock)
    puts = refused = gone = 0
    for what, chunk, rank, size, life in steps:
        key, before = f"{chunk}.{rank}", set(naive.kept)
        if what == "g":
            assert tier.get(key) is naive.get(key)
        elif what == "p":
            expires = None if life is None else clock.now + life
            entry: CacheEntry[Any] = CacheEntry(object(), size, rank, str(chunk), expires)
            added = tier.put(key, entry)
            assert added == naive.put(key, entry)
            puts, refused, gone = puts + added, refused + (not added), gone + (key in before)
            before.discard(key)
        elif what == "d":
            tier.drop(key)
            naive.kept.pop(key, None)
        elif what == "x":
            tier.drop_chunk(str(chunk))
            naive.kept = {k: kept for k, kept in naive.kept.items() if kept.entry.chunk != str(chunk)}
        elif what == "n" and key in naive.kept:
            old = naive.kept[key].entry
            tier.note_version(key, old, ("version", size))
            assert old.version == ("version", size)
        elif what == "t":
            clock.now += size / 2
        gone += len(before - set(naive.kept))
        assert all(key in tier for key in naive.kept)
        assert (tier.nbytes, len(tier)) == (naive.size(), len(naive.kept))

    counts = counters.read()
    assert counts.get("host_refused", 0) == refused
    assert sum(count for name, count in counts.items() if name.startswith("host_evicted")) == gone
    assert puts == gone + len(tier)
