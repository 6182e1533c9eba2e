"""Remote stores over any adapter: the order of writes by revision, tombstones, leases, time limits, lost answers.

The service is a dict with planned faults; what a reader sees is told by the number in an object's leaf.
"""

import contextlib
import json
import random
import threading
import time
from typing import Any

import pytest
from remote_cases import CHUNK, MemoryAdapter, MemoryService, blob_at, name_in
from store_cases import ManualClock

from kvpatch_jax.errors import StoreCorruptError, StoreIOError, StoreUnreachableError
from kvpatch_jax.store import Lease, LocalAdapter, RemoteStore, RetryPolicy
from kvpatch_jax.store.format.objects import blob_bytes
from kvpatch_jax.store.remotes.leases import SKEW
from kvpatch_jax.store.remotes.remote_store import GRACE, RETENTION

FAST = RetryPolicy(timeout=0.5, tries=3, pause=0.001, deadline=2)
NAME = name_in()
GONE = f"{CHUNK}.gone"


@pytest.fixture
def service() -> MemoryService:
    return MemoryService()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def adapter(service: MemoryService) -> MemoryAdapter:
    return MemoryAdapter(service)


@pytest.fixture
def remote(adapter: MemoryAdapter, clock: ManualClock) -> RemoteStore:
    return RemoteStore(adapter, clock=clock, patience=FAST)


def value_of(remote: RemoteStore, name: Any = NAME) -> float | None:
    """What a reader sees: the number in the leaf."""
    found = remote.open(name)
    return None if found is None else float(found.read(["k"])["k"][0])


# ----------------------------------------------------------------------------------------------- puts by revision


def test_a_put_takes_place_only_over_an_earlier_revision(remote: RemoteStore):
    assert remote.put(NAME, blob_at(5, 5))
    assert not remote.put(NAME, blob_at(4, 4))
    assert value_of(remote) == 5
    assert remote.put(NAME, blob_at(5, 5))  # the same write again
    assert remote.put(NAME, blob_at(6, 6))
    assert value_of(remote) == 6


@pytest.mark.parametrize("size", [100, 3_000_000], ids=["small", "large"])
def test_of_concurrent_puts_the_largest_revision_is_stored(service: MemoryService, size: int):
    """Whatever the order; each put says whether it was the one, and nobody sees the revision go down."""
    machines = [RemoteStore(MemoryAdapter(service)) for _ in range(4)]
    service.before = lambda method, path: time.sleep(random.random() * 1e-3)
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with contextlib.suppress(StoreIOError):  # replaced while it was read
                seen.append(value_of(machines[0]) or 0)

    def put(machine: RemoteStore, revisions: list[int]) -> None:
        for revision in revisions:
            machine.put(NAME, blob_at(revision, revision, size))

    order = random.Random(1).sample(range(1, 41), 40)
    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=put, args=(machines[i], order[i::4])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert value_of(machines[1]) == 40
    assert seen == sorted(seen)


@pytest.mark.parametrize("at", [3, 100, 400])
def test_a_damaged_header_is_replaced_after_a_second_read(remote: RemoteStore, adapter: MemoryAdapter, at: int):
    raw = bytearray(blob_bytes(blob_at(9, 9), NAME.file))
    raw[at] ^= 8
    adapter.write(NAME.path, bytes(raw))
    with pytest.raises(StoreCorruptError):
        remote.open(NAME)
    adapter.calls.clear()
    assert remote.put(NAME, blob_at(1, 1))
    assert adapter.calls[:4] == [("write", NAME.path), ("read", NAME.path), ("read", NAME.path), ("write", NAME.path)]
    assert value_of(remote) == 1


class Flipping(MemoryAdapter):
    """Its first reads of a path come with a flipped bit."""

    flips = 0

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Any:
        found = super().read(path, start, stop)
        if found is None or not found.data or self.flips <= 0:
            return found
        self.flips -= 1
        raw = bytearray(found.data)
        raw[min(len(raw) // 2, 2048)] ^= 1  # of an opening, in the header
        return found._replace(data=bytes(raw))


def test_a_read_that_was_damaged_once_decides_nothing(service: MemoryService):
    """Neither over the header nor over a leaf; it is reported as unsteady."""
    adapter, unsteady = Flipping(service), []
    remote = RemoteStore(adapter, patience=FAST)
    remote.put(NAME, blob_at(5, 5, size=8000))  # a small object's leaves are read with its header
    adapter.flips = 1
    found = remote.open(NAME, lambda: unsteady.append("header"))
    assert found is not None
    adapter.flips = 1
    assert found.read(["k"])["k"][0] == 5
    assert unsteady == ["header", "header"]
    for damaging in (1, 2):
        adapter.flips = damaging
        assert (remote.damaged(NAME) is None) == (damaging == 1)
    adapter.flips = 1
    assert not remote.put(NAME, blob_at(4, 4))
    adapter.flips = 1
    assert remote.bury(CHUNK, 4).deleted == 0
    assert value_of(RemoteStore(MemoryAdapter(service))) == 5
    adapter.flips = 2
    with pytest.raises(StoreCorruptError):
        found.read(["k"])


# ------------------------------------------------------------------------------------------------------ tombstones


def test_a_buried_chunk_is_gone_and_later_writes_are_not(remote: RemoteStore, adapter: MemoryAdapter):
    parts = ["kv", "kv.int8", "enc", "p.abc.def"]
    for revision, part in enumerate(parts, 1):
        remote.put(name_in(part=part), blob_at(revision, revision))
    neighbour = name_in(CHUNK[:-1] + "3")
    remote.put(neighbour, blob_at(1, 1))
    assert remote.buried(CHUNK) == -1
    assert remote.bury(CHUNK, 3) == (3, ())
    assert [value_of(remote, name_in(part=part)) for part in parts] == [None, None, None, 4]
    assert json.loads(adapter.read(GONE).data) == {"revision": 3}  # pyright: ignore[reportOptionalMemberAccess]
    assert remote.buried(CHUNK) == 3
    assert remote.bury(CHUNK, 2).deleted == 0  # no tombstone is lowered
    assert remote.buried(CHUNK) == 3
    assert not remote.put(NAME, blob_at(3, 3))
    assert remote.paths(f"{CHUNK}.") == [name_in(part="p.abc.def").path]
    assert remote.put(NAME, blob_at(4, 4))
    assert value_of(remote) == 4
    assert value_of(remote, neighbour) == 1


def test_machines_that_put_and_bury_end_where_the_largest_revision_says(service: MemoryService):
    """No order of puts and deletions by four machines shows anything that a later deletion covers."""
    machines = [RemoteStore(MemoryAdapter(service)) for _ in range(4)]
    service.before = lambda method, path: time.sleep(random.random() * 5e-4)
    rng = random.Random(3)
    for round in range(6):
        chunk = f"{CHUNK[:-2]}{round:02}"
        revisions = rng.sample(range(1, 25), 24)
        buried = set(rng.sample(revisions, 6))

        def work(machine: RemoteStore, own: list[int], chunk: str = chunk, buried: set[int] = buried) -> None:
            for revision in own:
                if revision in buried:
                    machine.bury(chunk, revision)
                else:
                    machine.put(name_in(chunk), blob_at(revision, revision))

        threads = [threading.Thread(target=work, args=(machines[i], revisions[i::4])) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last = max(revisions)
        assert value_of(machines[0], name_in(chunk)) == (None if last in buried else last)
        there = [
            int(json.loads(value)["revision"]) for path, (value, _) in service.values.items() if path == f"{chunk}.gone"
        ]
        assert there == [max(buried)]
        assert not [path for path in service.values if path == name_in(chunk).path and last in buried]


# -------------------------------------------------------------------------------------------------------- collection


def test_collections_reports_what_cannot_be_read_and_forgets_tombstones_and_leases(
    remote: RemoteStore, adapter: MemoryAdapter, clock: ManualClock
):
    adapter.write(NAME.path, b"no object")
    remote.bury(name_in(CHUNK[:-1] + "3").chunk_key, int(clock.now * 1e9))
    assert remote.lease("work", 10) is not None
    adapter.write("elsewhere/x", b"not ours")
    clock.now += GRACE + 20 + SKEW
    deleted, (error,) = remote.collect("")
    assert (deleted, type(error)) == (0, StoreCorruptError)
    assert sorted(adapter.service.values) == ["elsewhere/x", NAME.path, f"{CHUNK[:-1]}3.gone"]
    clock.now += RETENTION
    remote.collect("obj/")
    assert sorted(adapter.service.values) == ["elsewhere/x", NAME.path]


# ------------------------------------------------------------------------------------------------------------ leases


@pytest.fixture(params=["memory", "directory"])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Any, service: MemoryService, clock: ManualClock
) -> list[RemoteStore]:
    make = lambda: LocalAdapter(tmp_path) if request.param == "directory" else MemoryAdapter(service)
    return [RemoteStore(make(), clock=clock) for _ in range(2)]


def taken(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def test_one_machine_holds_a_lease_until_it_releases_it(fleet: list[RemoteStore]):
    one, two = fleet
    with taken(one.lease("chunk", 60)) as lease:
        assert lease.held
        assert two.lease("chunk", 60) is None
        assert one.lease("chunk", 60) is None
        assert two.lease("another", 60) is not None
        assert lease.renew(60)
    assert not lease.held
    assert not lease.renew(60)
    assert taken(two.lease("chunk", 60)).held


def test_a_lease_that_is_over_is_taken_after_the_clocks_differences(fleet: list[RemoteStore], clock: ManualClock):
    one, two = fleet
    lost = taken(one.lease("chunk", 60))
    clock.now += 60 + SKEW
    assert two.lease("chunk", 60) is None
    clock.now += 1
    lease = taken(two.lease("chunk", 60))
    assert not lost.renew(60)  # it learns that it was taken
    assert not lost.held
    assert not lost.release()
    assert lease.renew(60)
    assert one.lease("chunk", 60) is None


def test_of_many_takers_one_gets_the_lease_also_an_old_one(fleet: list[RemoteStore], clock: ManualClock):
    for round in range(5):
        begin, leases = threading.Barrier(6), []

        def take(machine: RemoteStore, begin: threading.Barrier = begin, leases: list[Any] = leases) -> None:
            begin.wait(60)
            leases.append(machine.lease("chunk", 60))

        threads = [threading.Thread(target=take, args=(fleet[i % 2],)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(lease is not None for lease in leases) == 1, round
        clock.now += 60 + SKEW + 1


# --------------------------------------------------------------------------------------- time limits, lost answers


def test_a_service_that_blocks_is_unreachable_in_time(service: MemoryService, adapter: MemoryAdapter):
    """When the service answers again, all goes on."""
    patience = RetryPolicy(timeout=0.05, deadline=0.2, tries=2, pause=0.001)
    remote, answers = RemoteStore(adapter, patience=patience), threading.Event()

    def block(method: str, path: str) -> None:
        answers.wait(60)

    service.before = block
    calls = [lambda: remote.open(NAME), lambda: remote.put(NAME, blob_at(1)), lambda: remote.paths("")]
    began = time.monotonic()
    for call in [*calls, lambda: remote.lease("chunk", 60), lambda: remote.bury(CHUNK, 1)]:
        with pytest.raises(StoreUnreachableError):
            call()
    assert time.monotonic() - began < 30
    answers.set()
    assert remote.put(NAME, blob_at(2, 2))
    assert value_of(remote) == 2


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError(), StoreUnreachableError("busy")])
def test_an_answer_that_was_lost_changes_no_result(service: MemoryService, remote: RemoteStore, error: Exception):
    """The call took place, the answer did not arrive: the retry finds out."""

    def lose(methods: set[str], count: int = 1) -> None:
        left = [count]

        def after(method: str, path: str) -> None:
            if method in methods and left[0]:
                left[0] -= 1
                raise error

        service.after = after

    lose({"write"})
    assert remote.put(NAME, blob_at(1, 1))
    lose({"write"}, 2)
    lose({"write"})
    lease = taken(remote.lease("chunk", 60))
    lose({"write"})
    assert lease.renew(60)
    lose({"delete"})
    assert lease.release()
    lose({"write", "delete"})
    assert remote.bury(CHUNK, 1) == (1, ())
    lose({"write"})
    assert remote.put(NAME, blob_at(2, 2))
    assert value_of(remote) == 2
