"""The remote tier, over TensorStore's file and memory drivers."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import numpy as np
import pytest
import tensorstore
from store_cases import BACKBONE, ManualClock, chunk_of, name_of, patch_of, same, same_chunk
from store_gates import remote_through

from kvpatch_jax.errors import StoreIOError, StoreUnreachableError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    KeyValueStore,
    LocalAdapter,
    RemoteStore,
    RetryPolicy,
    ValkeyAdapter,
)


@pytest.fixture(params=["memory", "file"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What a service is opened by."""
    path = "store/" if request.param == "memory" else f"{tmp_path}/remote/"
    return {"spec": {"driver": request.param, "path": path}, "context": tensorstore.Context()}


@pytest.fixture
def remote(service: dict[str, Any]) -> KeyValueStore:
    return KeyValueStore(**service)


@pytest.fixture
def values(service: dict[str, Any]) -> tensorstore.KvStore:
    """What is in the service, past the store."""
    return tensorstore.KvStore.open(service["spec"], context=service["context"]).result()


def machine(folder: Path, remote: RemoteStore, key: bytes | None = None) -> ChunkStore:
    """A store on another machine: its own disk, the same names."""
    return ChunkStore(
        folder, budget=Budget(host=0), secret=b"shared by the machines", remote=remote, write_behind=False, key=key
    )


def test_another_machine_reads_remote_objects(remote: KeyValueStore, tmp_path: Path):
    chunk, patch = chunk_of(), patch_of(chunk_of())
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk)
        one.put_patches([patch, patch_of(chunk, rank=1)])
        assert not two.contains("B", BACKBONE)
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert [found.ranks["k"] for found in two.get_patches(patch.metadata)] == [2, 1]
        assert two.counters["remote_hits"] == 3
        assert two.contains("B", BACKBONE)  # and has its own copy now
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert two.counters["remote_hits"] == 3
        assert two.delete("B", BACKBONE)
        for entry in one.disk.scan():
            one.disk.delete(entry.path)
        assert one.get("B", BACKBONE) is None
        assert one.get_patches(patch.metadata) == []


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "encrypted"])
@pytest.mark.parametrize("where", ["directory", "valkey"])
def test_any_adapter_carries_chunks_between_machines(where: str, key: bytes | None, tmp_path: Path):
    server, chunk = fakeredis.FakeServer(), chunk_of()
    make = lambda: ValkeyAdapter(fakeredis.FakeValkey(server=server), ttl=True)
    shared = [RemoteStore(LocalAdapter(tmp_path / "shared") if where == "directory" else make()) for _ in range(2)]
    with machine(tmp_path / "one", shared[0], key) as one, machine(tmp_path / "two", shared[1], key) as two:
        one.put(chunk, ttl=1000)
        one.put_patches([patch_of(chunk), patch_of(chunk, rank=1)])
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert [found.ranks["k"] for found in two.get_patches(patch_of(chunk).metadata)] == [2, 1]
        assert two.counters["remote_hits"] == 3
        assert two.delete("B", BACKBONE)
        assert shared[0].paths("") == []


@pytest.mark.parametrize("at", [3, 100, 5000])
def test_a_damaged_remote_object_is_a_miss_and_stays(remote: KeyValueStore, values, tmp_path: Path, at: int):
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk_of())
        name = name_of(one, chunk_of())
        raw = bytearray(values.read(name.path).result().value)
        raw[at] ^= 16
        values.write(name.path, bytes(raw)).result()
        assert two.get("B", BACKBONE) is None
        assert two.counters["remote_damaged"] == 1
        assert two.collect() == 0
        assert remote.paths(name.path) == [name.path]
        one.put(chunk_of())
        assert same_chunk(two.get("B", BACKBONE), chunk_of())


class Flaky:
    """A service that fails calls when it is told to."""

    def __init__(self, values: Any):
        self._values, self._left, self._word, self.calls = values, 0, "", 0

    def fail(self, count: int, word: str = "UNAVAILABLE: busy") -> None:
        """Fails the next calls with a word, and counts calls from now on."""
        self._left, self._word, self.calls = count, word, 0

    def __getattr__(self, name: str):
        def called(*arguments, **more):
            self.calls += 1
            if self._left:
                self._left -= 1
                raise ValueError(self._word)
            return getattr(self._values, name)(*arguments, **more)

        return called


def test_expired_objects_and_failing_services(service: dict[str, Any], tmp_path: Path):
    now = ManualClock()
    flaky, remote = remote_through(Flaky, **service, clock=now)
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk_of(), ttl=5)
        now.now = 1e11
        assert two.get("B", BACKBONE) is None
        flaky.fail(1000, "UNAVAILABLE")
        with pytest.raises(StoreIOError, match="UNAVAILABLE; expected"):
            one.put(chunk_of("C"))
        assert same_chunk(one.get("C", BACKBONE), chunk_of("C"))  # on this disk, though not acknowledged
        assert two.get("C", BACKBONE) is None
    with pytest.raises(StoreIOError, match="open"):
        KeyValueStore({"driver": "no such driver"})


# ------------------------------------------------------------------------------------- layers, expiry, many at a time


def test_layers_come_from_beyond_and_the_disk_has_them_then(remote: KeyValueStore, tmp_path: Path):
    chunk = chunk_of(hidden={1: np.full((9, 8), 0.5, np.float32)})
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk)
        stream = two.stream("B", BACKBONE)
        assert stream is not None
        with stream:
            assert same(stream.layer(2)["v"], chunk.kv["v"][2])
        assert not two.contains("B", BACKBONE)  # one layer is not the object
        stream = two.stream("B", BACKBONE)
        assert stream is not None
        assert same_chunk(stream.chunk(lambda *_: None), chunk)
        assert two.contains("B", BACKBONE)
        assert two.counters["remote_hits"] == 2
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert two.counters["disk_hits"] == 1


def test_expired_remote_objects_are_misses_and_deleted_by_collect_after_an_hour(
    service: dict[str, Any], tmp_path: Path
):
    now = ManualClock()
    remote = KeyValueStore(**service, clock=now)
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        for number in range(3):
            one.put(chunk_of(f"B{number}", number), ttl=5)
        one.put(chunk_of("kept", 7))
        now.now = time.time() + 3000
        assert two.get("B0", BACKBONE) is None
        assert two.collect() == 0  # this clock may be ahead
        assert len(remote.paths("obj/")) == 4
        now.now += 3000
        assert two.collect() == 3
        assert remote.paths("obj/") == [name_of(one, chunk_of("kept")).path]
        assert same_chunk(two.get("kept", BACKBONE), chunk_of("kept", 7))


# --------------------------------------------------------------------------------------------- services that fail


@pytest.fixture(params=["silent", "closed"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """A service that takes connections and says nothing, or one where nobody listens."""
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if request.param == "silent":
            listening.listen(64)
            taking = threading.Thread(target=take_all, args=(listening, stack))
            taking.start()
            stack.callback(taking.join)
            stack.callback(listening.shutdown, socket.SHUT_RDWR)
        else:
            listening.close()
        yield url


def take_all(listening: socket.socket, stack: contextlib.ExitStack) -> None:
    taken: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(listening.accept()[0])
    for each in taken:
        each.close()


def unanswering(url: str, **patience: Any) -> KeyValueStore:
    credentials = {"type": "anonymous"}
    bucket = {"driver": "s3", "bucket": "bucket", "path": "store/", "endpoint": url, "aws_region": "nowhere"}
    return KeyValueStore({**bucket, "aws_credentials": credentials}, patience=RetryPolicy(**patience))


def test_a_put_without_an_answer_fails_within_its_time_limit(endpoint: str, tmp_path: Path):
    remote = unanswering(endpoint, timeout=0.3, deadline=0.6, pause=0.01)
    with machine(tmp_path, remote) as store:
        began = time.monotonic()
        with pytest.raises(StoreUnreachableError, match="expected the service to do it"):
            store.put(chunk_of())
        ack = store.put_async(chunk_of("C"))
        assert isinstance(ack.exception(300), StoreUnreachableError)
        assert time.monotonic() - began < 30
        with pytest.raises(StoreUnreachableError):
            store.flush()


def test_pauses_grow_and_differ_and_a_deadline_ends_the_tries():
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    policy = RetryPolicy(tries=50, pause=1, deadline=20)
    limits = []

    def fail(seconds: float) -> None:
        limits.append(seconds)
        raise StoreUnreachableError("no")

    with pytest.raises(StoreUnreachableError):
        policy.attempt(fail, clock=lambda: now[0], sleep=sleep)
    assert all(2**n / 2 <= pause <= 2**n for n, pause in enumerate(pauses))
    assert 3 <= len(pauses) <= 5
    assert now[0] < 20
    assert all(0 < limit <= 5 for limit in limits)
    first = len(limits)
    with pytest.raises(StoreUnreachableError):
        policy.attempt(fail, nbytes=60_000_000, clock=lambda: now[0], sleep=sleep)
    assert limits[first] > 60  # bytes have their time
