"""Adapters of remote services: all keep the promises of the interface, and the conformance kit sees who does not."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import tensorstore
from remote_cases import MemoryAdapter, MemoryService, blob_at, name_in
from store_cases import child_environment

from kvpatch_jax.errors import InputError, StoreIOError, StoreUnreachableError
from kvpatch_jax.store import (
    ABSENT,
    ANY,
    LocalAdapter,
    RemoteAdapter,
    RemoteStore,
    RemoteValue,
    RetryPolicy,
    TensorStoreAdapter,
    ValkeyAdapter,
    open_remote,
)
from kvpatch_jax.store.format.objects import blob_bytes
from kvpatch_jax.store.remotes.conformance import ConformanceError, check_adapter
from kvpatch_jax.store.remotes.retrying_adapter import RetryingAdapter

Make = Callable[[], RemoteAdapter]


def local(folder: Path) -> Make:
    return lambda: LocalAdapter(folder / "local")


def memory_driver(folder: Path) -> Make:
    context = tensorstore.Context()
    return lambda: TensorStoreAdapter({"driver": "memory", "path": "store/"}, context=context)


def file_driver(folder: Path) -> Make:
    return lambda: TensorStoreAdapter(f"file://{folder}/file/")


def fake_redis(folder: Path) -> Make:
    server = fakeredis.FakeServer()
    return lambda: ValkeyAdapter(fakeredis.FakeRedis(server=server))


def fake_valkey(folder: Path) -> Make:
    server = fakeredis.FakeServer(server_type="valkey")
    return lambda: ValkeyAdapter(fakeredis.FakeValkey(server=server), prefix="{one}:", ttl=True)


def in_memory(folder: Path) -> Make:
    service = MemoryService()
    return lambda: MemoryAdapter(service)


def retrying(folder: Path) -> Make:
    service = MemoryService()
    return lambda: RetryingAdapter(MemoryAdapter(service), RetryPolicy())


@pytest.mark.parametrize(
    "adapter",
    [in_memory, retrying, local, memory_driver, file_driver, fake_redis, fake_valkey],
    ids=lambda f: f.__name__,
)
def test_an_adapter_keeps_every_promise(adapter: Callable[[Path], Make], tmp_path: Path):
    make = adapter(tmp_path)
    make().write("of/others", b"stays")
    check_adapter(make)
    assert list(make().paths("")) == ["of/others"]  # it cleans up, and touches nothing else


# ------------------------------------------------------------------------------------------------- broken adapters


class Unconditional(MemoryAdapter):
    """Ignores what is expected."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        return super().write(path, data)


class Racing(MemoryAdapter):
    """Compares, and then writes."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        if not self._holds(path, expected):
            return None
        time.sleep(1e-3)
        return super().write(path, data)


class Torn(MemoryAdapter):
    """Reads in two requests, and says the second one's generation."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        first = super().read(path, start, stop)
        time.sleep(1e-3)  # as on a network
        second = super().read(path, start, stop)
        if first is None or second is None:
            return second
        half = len(second.data) // 2
        return RemoteValue(first.data[:half] + second.data[half:], second.generation)


class Stale(MemoryAdapter):
    """Caches what this client has read, until it writes itself."""

    def __init__(self, service: MemoryService):
        super().__init__(service)
        self._cache: dict[Any, Any] = {}

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        if (path, start, stop) not in self._cache:
            self._cache[path, start, stop] = super().read(path, start, stop)
        return self._cache[path, start, stop]

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        self._cache.clear()
        return super().write(path, data, expected)

    def delete(self, path: str, expected: Any = ANY) -> bool:
        self._cache.clear()
        return super().delete(path, expected)


class LateList(MemoryAdapter):
    """Lists what was there at the last listing."""

    def paths(self, prefix: str) -> list[str]:
        before = getattr(self, "listed", [])
        self.listed = list(super().paths(""))
        return [path for path in before if path.startswith(prefix)]


BROKEN: dict[type[MemoryAdapter], set[str]] = {
    Unconditional: {"conditions", "no lost update", "one winner"},
    Racing: {"no lost update"},
    Torn: {"untorn values"},
    Stale: {"fresh reads"},
    LateList: {"fresh reads", "lists"},
}
"""What is broken, beside what follows from it."""


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_the_kit_names_the_promises_that_are_broken(kind: type[MemoryAdapter]):
    service = MemoryService()
    with pytest.raises(ConformanceError) as raised:
        check_adapter(lambda: kind(service))
    assert {line.partition(":")[0] for line in raised.value.broken} >= BROKEN[kind]


# -------------------------------------------------------------------------------------------------------- directory


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a//b", "a/./b", "", ".locks/00", "a/.hidden", "a\0b", "a/", "ä"])
def test_a_directory_has_no_paths_outside(path: str, tmp_path: Path):
    adapter = LocalAdapter(tmp_path / "root")
    for call in (lambda: adapter.read(path), lambda: adapter.write(path, b"x"), lambda: adapter.delete(path)):
        with pytest.raises(InputError, match="expected words"):
            call()
    assert list(adapter.paths("")) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


COUNT = """
import sys
from kvpatch_jax.store import LocalAdapter, ValkeyAdapter
kind, where, rounds = sys.argv[1:]
adapter = LocalAdapter(where) if kind == "local" else ValkeyAdapter.from_url(where)
for _ in range(int(rounds)):
    while True:
        found = adapter.read("counter")
        if adapter.write("counter", b"%d" % (int(found.data) + 1), found.generation) is not None:
            break
"""


ALTERNATE = """
import itertools, sys
from kvpatch_jax.store import LocalAdapter
adapter = LocalAdapter(sys.argv[1])
for letter in itertools.cycle(b"ab"):
    adapter.write("value", bytes([letter]) * 2_000_000)
    print(chr(letter), flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_value(tmp_path: Path):
    """The last acknowledged one, or the one after it; its lock is free."""
    rng = random.Random(0)
    for _ in range(6):
        command = [sys.executable, "-c", ALTERNATE, str(tmp_path)]
        with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(rng.randrange(1, 5))]
            time.sleep(rng.random() * 0.02)
            process.kill()
            said += process.stdout.readlines()
        value = LocalAdapter(tmp_path).read("value")
        assert value is not None
        assert len(value.data) == 2_000_000
        assert set(value.data) <= {ord("a"), ord("b")}
        assert len(set(value.data)) == 1
        assert all(said)
        assert LocalAdapter(tmp_path).write("value", b"free", value.generation)


# ----------------------------------------------------------------------------------------------------------- Valkey


@pytest.mark.parametrize("kind", [fakeredis.FakeRedis, fakeredis.FakeValkey])
def test_a_server_that_is_away_is_unreachable_and_one_that_refuses_is_an_error(kind: Any):
    server = fakeredis.FakeServer()
    client = kind(server=server)
    adapter = ValkeyAdapter(client)
    server.connected = False
    calls = [lambda: adapter.read("a"), lambda: adapter.write("a", b""), lambda: adapter.write("a", b"", ABSENT)]
    for call in [*calls, lambda: adapter.delete("a"), lambda: list(adapter.paths(""))]:
        with pytest.raises(StoreUnreachableError):
            call()
    server.connected = True
    client.set("kvpatch:paths", "no sorted set")
    with pytest.raises(StoreIOError, match="WRONGTYPE") as refused:
        list(adapter.paths(""))
    assert not isinstance(refused.value, StoreUnreachableError)


# ------------------------------------------------------------------------------------------------------------- URLs


def test_urls_open_the_adapters_that_they_name(tmp_path: Path):
    remote = open_remote(f"file://{tmp_path}/with%20space", patience=RetryPolicy(tries=1))
    assert remote.put(name_in(), blob_at(1))
    stored = tmp_path / "with space" / name_in().path
    assert stored.read_bytes() == blob_bytes(blob_at(1), name_in().file)  # the same bytes as on a store's disk
    assert open_remote("memory://some/where/").put(name_in(), blob_at(1))
    assert isinstance(open_remote("redis://localhost:1/0?prefix=a:&ttl=1"), RemoteStore)


@pytest.mark.parametrize("url", ["", "store", "file://elsewhere/x", "file:", "valkey://host:port/x"])
def test_urls_that_name_nothing_are_refused(url: str):
    with pytest.raises(InputError, match="remote store: got URL"):
        open_remote(url)
