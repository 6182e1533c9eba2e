"""Listings of stored prefills: what a look costs, and what writers at once, other machines and hostile bytes do."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remote_cases import MemoryAdapter, MemoryService
from store_cases import BACKBONE, chunk_of

from kvpatch_jax.errors import StoreKeyError, StoreUnreachableError
from kvpatch_jax.store import ChunkStore, RemoteStore, RetryPolicy
from kvpatch_jax.window import StoredPrefills, keys_behind
from kvpatch_jax.window.prefill_listing import (
    MOST_LISTED,
    TIME_TO_LIVE,
    ListedPrefill,
    merged_listings,
    pack_listing,
    unpack_listing,
)

SECRET = b"the same on all machines"
FAST = RetryPolicy(timeout=5.0, tries=1, deadline=5.0)


def front_of(number: int) -> str:
    return f"{number + 1:032x}"


def keys_of(nearest: str) -> Any:
    return keys_behind(front_of(0), nearest)


class Machine:
    """A store on a disk of its own, and its client of the service."""

    def __init__(self, folder: Path, service: MemoryService):
        self.adapter = MemoryAdapter(service)
        remote = RemoteStore(self.adapter, patience=FAST)
        self.store = ChunkStore(folder, secret=SECRET, remote=remote)

    @property
    def prefills(self) -> StoredPrefills:
        """As a request of an engine opens them."""
        return StoredPrefills(self.store, BACKBONE, "float32")

    def put(self, number: int, keys: Any, id: str = "B", **more: Any) -> int:
        prefills, front = self.prefills, front_of(number)
        stored = prefills.put(chunk_of(id, number, lead=prefills.lead(front)), front, keys, **more)
        self.store.flush()
        return stored

    def calls(self, work: Any) -> int:
        """Counts the calls of the service that work makes."""
        self.adapter.calls.clear()
        work()
        return len(self.adapter.calls)


@pytest.fixture
def service() -> MemoryService:
    return MemoryService()


@pytest.fixture
def machines(tmp_path: Path, service: MemoryService) -> Iterator[list[Machine]]:
    made = [Machine(tmp_path / name, service) for name in ("one", "two")]
    yield made
    for machine in made:
        machine.store.close()


# ----------------------------------------------------------------------------------------------- what a look costs


def test_a_plan_asks_the_remote_store_once_of_an_unknown_chunk_and_twice_of_a_known_one(machines: list[Machine]):
    one, two = machines
    keys = keys_of("near")

    def planned(machine: Machine, number: int, found: Any) -> None:
        """What a plan and then what is to be kept asks of a chunk."""
        prefills = machine.prefills
        assert prefills.find("B", front_of(number), keys) == found
        assert prefills.may_have("B", front_of(number)) == ("restored" in found)
        assert prefills.alike("B", keys) == {name: front for name, front in found.items() if name != "restored"}

    assert one.calls(lambda: planned(one, 7, {})) == 1
    one.put(1, keys, mean=True)
    like = {"near": front_of(1)}
    assert two.calls(lambda: planned(two, 7, like)) == 2
    assert one.calls(lambda: planned(one, 7, like)) == 2, "another machine may have added what is exact"
    assert one.calls(lambda: one.prefills.find("B", front_of(1), {})) == 0
    assert two.calls(lambda: two.prefills.may_have("B", front_of(1))) == 2
    assert two.calls(lambda: two.prefills.may_have("another", front_of(1))) == 1


def test_what_one_machine_prefilled_another_serves(machines: list[Machine]):
    one, two = machines
    keys = keys_of("near")
    for number in (1, 2):
        one.put(number, keys, mean=True)
    prefills = two.prefills
    found = prefills.find("B", front_of(2), keys)
    assert (found["restored"], found["near"]) == (front_of(2), front_of(1))
    mean, exact = prefills.get("B", found["mean"]), prefills.get("B", front_of(2))
    assert mean is not None
    assert exact is not None
    expected = np.mean([chunk_of("B", number).kv["k"] for number in (1, 2)], axis=0)[:, :8]
    np.testing.assert_allclose(mean.kv["k"], expected, atol=1e-6)
    assert np.array_equal(exact.kv["k"], chunk_of("B", 2).kv["k"])


def test_listings_of_encrypted_stores_are_shared_by_those_with_the_key(tmp_path: Path, service: MemoryService):
    pytest.importorskip("cryptography")
    keys, front = keys_of("near"), front_of(1)

    def opened(name: str, key: bytes | None) -> ChunkStore:
        remote = RemoteStore(MemoryAdapter(service), patience=FAST)
        return ChunkStore(tmp_path / name, secret=SECRET, remote=remote, key=key)

    with opened("one", b"k" * 32) as one, opened("two", b"k" * 32) as two, opened("three", None) as three:
        prefills = StoredPrefills(one, BACKBONE, "float32")
        prefills.put(chunk_of("B", 1, lead=prefills.lead(front)), front, keys)
        one.flush()
        assert StoredPrefills(two, BACKBONE, "float32").find("B", front, keys)["restored"] == front
        with pytest.raises(StoreKeyError):
            StoredPrefills(three, BACKBONE, "float32").find("B", front, keys)


def test_a_service_that_does_not_answer_leaves_what_is_here(machines: list[Machine], service: MemoryService):
    one, _ = machines
    keys = keys_of("near")
    one.put(1, keys)

    def refuse(method: str, path: str) -> None:
        raise StoreUnreachableError("got no answer; expected one")

    service.before = refuse
    prefills = one.prefills
    assert prefills.find("B", front_of(1), keys)["restored"] == front_of(1)
    assert prefills.find("B", front_of(2), keys)["near"] == front_of(1)
    assert one.prefills.put(chunk_of("B", 2, lead=prefills.lead(front_of(2))), front_of(2), keys) == 1
    assert one.prefills.may_have("B", front_of(2))
    service.before = lambda method, path: None


# ---------------------------------------------------------------------------------------------- writers at once


def listed(store: ChunkStore, **more: Any) -> set[str]:
    name = StoredPrefills(store, BACKBONE, "float32").name("B")
    return {record.front for record in unpack_listing(store.get_encoder(name, BACKBONE, **more))}


def test_machines_that_write_in_turn_lose_nothing(machines: list[Machine]):
    for number in range(6):
        machines[number % 2].put(number, keys_of(f"near {number}"))
    everything = {front_of(number) for number in range(6)}
    for machine in machines:
        assert listed(machine.store, tier="remote") == everything
        for number in range(6):
            assert machine.prefills.may_have("B", front_of(number))


def test_a_write_that_another_overtakes_begins_again(tmp_path: Path):
    """Between its look and its commit; also where there was nothing, and after an eviction."""
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        seen = list[list[int]]()
        stored = lambda: np.asarray(store.get_encoder("own", BACKBONE)).tolist()

        def adding(value: int, meanwhile: Any = None) -> Any:
            def amend(copies: list[np.ndarray]) -> np.ndarray:
                old = [int(number) for copy in copies for number in copy]
                seen.append(old)
                if meanwhile is not None and len(seen) == 1:
                    meanwhile()
                return np.array([*old, value])

            return amend

        store.amend_encoder("own", BACKBONE, adding(1, lambda: other.put_encoder("own", BACKBONE, np.array([7]))))
        assert (seen, stored()) == ([[], [7]], [7, 1])
        seen.clear()
        eight = lambda copies: np.array([8])
        store.amend_encoder("own", BACKBONE, adding(2, lambda: other.amend_encoder("own", BACKBONE, eight)))
        assert (seen, stored()) == ([[7, 1], [8]], [8, 2])
        seen.clear()
        path = tmp_path / store.names.encoder(BACKBONE, "own").path
        store.amend_encoder("own", BACKBONE, adding(3, path.unlink))
        assert (seen, stored()) == ([[8, 2], []], [3])


# ------------------------------------------------------------------------------------------ the listing itself


def test_a_listing_keeps_the_latest_and_drops_what_is_over_or_ahead():
    now = time.time_ns()
    week = int(TIME_TO_LIVE * 1e9)
    keys: Any = {"near": front_of(1)}
    records = [ListedPrefill(front_of(number), keys, now - number) for number in range(MOST_LISTED + 9)]
    over = ListedPrefill(front_of(900), {}, now - week)
    ahead = ListedPrefill(front_of(901), {}, now + 2 * week)
    kept = merged_listings([records[::2], [over, ahead], records[1::2], records[:3]], now)
    assert [record.front for record in kept] == [front_of(number) for number in reversed(range(MOST_LISTED))]
    assert unpack_listing(pack_listing(kept)) == kept
    assert len(pack_listing(kept).tobytes()) < 8192, "with its header it is read by one call"


def test_a_later_mean_takes_the_place_of_an_earlier_one():
    now = time.time_ns()
    key: Any = {"mean": front_of(50)}
    means = [ListedPrefill(front_of(number), key, now + number, number + 2) for number in range(3)]
    other = ListedPrefill(front_of(9), {"mean": front_of(51)}, now, 2)
    assert merged_listings([means[:2], [means[2], other], means[:1]], now) == [other, means[2]]


HOSTILE = {
    "nothing": np.zeros((0, 89), np.uint8),
    "numbers": np.zeros((4, 89), np.float64),
    "narrow": np.zeros((4, 88), np.uint8),
    "flat": np.zeros(89, np.uint8),
    "deep": np.zeros((1, 1, 89), np.uint8),
    "zeros": np.zeros((4, 89), np.uint8),
    "ones": np.full((4, 89), 255, np.uint8),
    "long": np.full((5000, 89), 255, np.uint8),
    "noise": np.random.default_rng(3).integers(0, 256, (64, 57)).astype(np.uint8),
}


@pytest.mark.parametrize("saved", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_listing_is_no_listing(machines: list[Machine], saved: np.ndarray):
    one, two = machines
    name = one.prefills.name("B")
    one.store.put_encoder(name, BACKBONE, saved)
    one.store.flush()
    for machine in machines:
        assert machine.prefills.find("B", front_of(1), keys_of("near")) == {}
    two.put(1, keys_of("near"))
    for machine in machines:
        assert machine.prefills.find("B", front_of(1), keys_of("near"))["restored"] == front_of(1)


def test_a_record_that_points_elsewhere_serves_nothing(machines: list[Machine]):
    """A front that nothing is stored under, listed as the nearest of all."""
    one, two = machines
    keys = keys_of("near")
    forged = pack_listing([ListedPrefill("ab" * 16, keys, time.time_ns())])
    one.store.put_encoder(one.prefills.name("B"), BACKBONE, forged)
    one.store.flush()
    prefills = two.prefills
    assert set(prefills.alike("B", keys).values()) == {"ab" * 16}
    assert prefills.get("B", "ab" * 16) is None
    assert prefills.alike("B", keys) == {}
