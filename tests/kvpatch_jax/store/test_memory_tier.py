"""The memory tier beside a naive one that lists and sorts all of its entries in every call."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import ManualClock

from kvpatch_jax.store.disk.counters import Counters
from kvpatch_jax.store.tiers.memory import CANONICAL, DERIVED, CacheEntry, MemoryTier, Policy

BUDGET = 20


@dataclasses.dataclass
class Kept:
    entry: CacheEntry[Any]
    born: int
    used: int
    protected: bool = False


class NaiveTier:
    """What the tier's documentation says, by lists and sorts."""

    def __init__(self, policy: str, pins: set[str], clock: ManualClock):
        self.policy, self.pins, self.clock = policy, pins, clock
        self.kept: dict[str, Kept] = {}
        self.asked: dict[str, int] = {}
        self.ticks = itertools.count()

    def size(self, **wanted: Any) -> int:
        chosen = [kept for kept in self.kept.values() if not wanted or kept.protected]
        return sum(kept.entry.nbytes for kept in chosen if wanted.get("rank", kept.entry.rank) == kept.entry.rank)

    def expired(self, kept: Kept) -> bool:
        return kept.entry.expires is not None and kept.entry.expires <= self.clock.now

    def get(self, key: str) -> CacheEntry[Any] | None:
        self.asked[key] = self.asked.get(key, 0) + 1
        kept = self.kept.get(key)
        if kept is None or self.expired(kept):
            self.kept.pop(key, None)
            return None
        kept.used, rank = next(self.ticks), kept.entry.rank
        kept.protected = self.policy == "slru"
        while self.size(rank=rank) > 0.8 * BUDGET:
            upper = [other for other in self.kept.values() if other.protected and other.entry.rank == rank]
            if len(upper) == 1:
                break
            oldest = min(upper, key=lambda other: other.used)
            oldest.protected, oldest.used = False, next(self.ticks)
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
        order.sort(key=lambda k: (self.kept[k].entry.rank, self.kept[k].protected, self.kept[k].used))
        victims: list[str] = []
        for victim in order:
            if self.size() - sum(self.kept[k].entry.nbytes for k in victims) + entry.nbytes <= BUDGET:
                break
            victims += [k for k in self.family(victim) if k not in victims] if victim not in victims else []
        if self.size() - sum(self.kept[k].entry.nbytes for k in victims) + entry.nbytes > BUDGET:
            return False
        rivals = sum(self.asked.get(k, 0) for k in victims if self.kept[k].entry.rank == entry.rank)
        if self.policy == "slru" and rivals > self.asked.get(key, 0):
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
@given(st.sampled_from(["lru", "slru"]), st.sets(st.sampled_from("01"), max_size=1), st.lists(STEPS, max_size=100))
def test_every_call_does_what_a_naive_tier_does(policy: Policy, pins: set[str], steps: list[tuple]):
    clock = ManualClock()
    counters = Counters()
    tier: MemoryTier[Any] = MemoryTier("host", BUDGET, policy, lambda chunk: chunk in pins, counters, clock)
    naive = NaiveTier(policy, pins, clock)
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
            noted = tier._slots[key].held
            assert (noted.version, noted.value, noted.nbytes) == (("version", size), old.value, old.nbytes)
            naive.kept[key].entry = noted
        elif what == "t":
            clock.now += size / 2
        gone += len(before - set(naive.kept))
        assert {k: slot.held for k, slot in tier._slots.items()} == {k: kept.entry for k, kept in naive.kept.items()}
        assert (tier.nbytes, len(tier)) == (naive.size(), len(naive.kept))

    counts = counters.read()
    assert counts.get("host_refused", 0) == refused
    assert sum(count for name, count in counts.items() if name.startswith("host_evicted")) == gone
    assert puts == gone + len(tier)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_put_examines_few_entries_however_many_there_are(policy: Policy):
    """Counted, not timed: the entries whose pins are asked for are those that a put examines."""
    examined = list[str]()

    def pinned(chunk: str) -> bool:
        examined.append(chunk)
        return False

    clock = ManualClock()
    tier: MemoryTier[Any] = MemoryTier("host", 10_000, policy, pinned, clock=clock)
    for number in range(12_000):
        tier.get(f"{number}")
        tier.put(f"{number}", CacheEntry(None, 1, CANONICAL, f"{number}", clock.now + number))
        if number % 3 == 0:
            tier.get(f"{number}")
    assert (len(tier), tier.nbytes) == (10_000, 10_000)
    assert len(examined) <= 2 * 2_000
    examined.clear()
    clock.now += 20_000
    tier.put("new", CacheEntry(None, 5, CANONICAL, "new", None))
    assert len(examined) <= 5


def test_memory_of_expired_entries_that_were_replaced_is_freed():
    tier: MemoryTier[Any] = MemoryTier("host", 10, clock=ManualClock())
    for number in range(10_000):
        tier.put("one", CacheEntry(None, 1, CANONICAL, "one", 1e12 + number))
    assert len(tier) == 1
    assert len(tier._expiries) < 200
    assert len(tier._chunks) == 1
