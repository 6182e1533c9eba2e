"""Adapters of remote services: all keep the promises of the interface, and the conformance kit sees who does not."""

import concurrent.futures
import contextlib
import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import tensorstore
from remote_cases import MemoryAdapter, MemoryService, blob_at, name_in
from store_cases import child_environment

from kvpatch_jax.errors import InputError, MissingExtraError, StoreIOError, StoreUnreachableError
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
from kvpatch_jax.store.remotes.time_limit import call_within

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


class Overwriting(MemoryAdapter):
    """Compares generations, but takes absence for granted."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        return super().write(path, data, ANY if expected is ABSENT else expected)


class Racing(MemoryAdapter):
    """Compares, and then writes."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        if not self._holds(path, expected):
            return None
        time.sleep(1e-3)
        return super().write(path, data)


class Deleting(MemoryAdapter):
    """Deletes whatever is expected."""

    def delete(self, path: str, expected: Any = ANY) -> bool:
        return super().delete(path)


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


class Growing(MemoryAdapter):
    """Writes in two steps."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        if super().write(path, data[: len(data) // 2], expected) is None:
            return None
        time.sleep(1e-3)
        return super().write(path, data)


class Inclusive(MemoryAdapter):
    """Takes the end of a range for its last byte."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        return super().read(path, start, None if stop is None else stop + 1)


class Refusing(MemoryAdapter):
    """Has no value where a range ends behind it."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        found = super().read(path, start, stop)
        return None if found is not None and stop is not None and len(found.data) < stop - start else found


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


class OnePage(MemoryAdapter):
    """Lists the first page alone."""

    def paths(self, prefix: str) -> list[str]:
        return sorted(super().paths(prefix))[:1000]


class ByFolder(MemoryAdapter):
    """Lists by whole words."""

    def paths(self, prefix: str) -> list[str]:
        return [path for path in super().paths("") if not prefix or f"{path}/".startswith(f"{prefix.rstrip('/')}/")]


class LateList(MemoryAdapter):
    """Lists what was there at the last listing."""

    def paths(self, prefix: str) -> list[str]:
        before = getattr(self, "listed", [])
        self.listed = list(super().paths(""))
        return [path for path in before if path.startswith(prefix)]


class Counting(MemoryAdapter):
    """Counts generations anew after a deletion."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        with self.service.lock:
            if not self._holds(path, expected):
                return None
            number = int(self.service.values.get(path, (b"", b"0"))[1]) + 1
            self.service.values[path] = bytes(data), b"%d" % number
            return b"%d" % number


class Forgetful(MemoryAdapter):
    """Reports no generation."""

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        return b"written" if super().write(path, data, expected) else None


class Impatient(MemoryAdapter):
    """Raises for what is not there."""

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        if path not in self.service.values:
            raise KeyError(path)
        return super().read(path, start, stop)


BROKEN: dict[type[MemoryAdapter], set[str]] = {
    Unconditional: {"conditions", "no lost update", "one winner"},
    Overwriting: {"conditions", "one winner"},
    Racing: {"no lost update"},
    Deleting: {"conditions"},
    Torn: {"untorn values"},
    Growing: {"untorn values"},
    Inclusive: {"ranges"},
    Refusing: {"ranges"},
    Stale: {"fresh reads"},
    OnePage: {"lists"},
    ByFolder: {"lists"},
    LateList: {"fresh reads", "lists"},
    Counting: {"generations"},
    Forgetful: {"whole values", "generations", "conditions"},
    Impatient: {"absence"},
}
"""What is broken, beside what follows from it."""


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_the_kit_names_the_promises_that_are_broken(kind: type[MemoryAdapter]):
    service = MemoryService()
    with pytest.raises(ConformanceError) as raised:
        check_adapter(lambda: kind(service))
    assert {line.partition(":")[0] for line in raised.value.broken} >= BROKEN[kind]


def test_what_lacks_a_method_is_no_adapter(unchecked: None):
    class Listless:
        read = write = delete = lambda *_: None

    with pytest.raises(ConformanceError, match="expected read, write, delete and paths"):
        check_adapter(Listless)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="expected read, write, delete and paths"):
        RemoteStore(Listless())  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------------------------------------------- directory


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a//b", "a/./b", "", ".locks/00", "a/.hidden", "a\0b", "a/", "ä"])
def test_a_directory_has_no_paths_outside(path: str, tmp_path: Path):
    adapter = LocalAdapter(tmp_path / "root")
    for call in (lambda: adapter.read(path), lambda: adapter.write(path, b"x"), lambda: adapter.delete(path)):
        with pytest.raises(InputError, match="expected words"):
            call()
    assert list(adapter.paths("")) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["root"]


def test_a_directory_follows_no_links_and_reads_no_pipes(tmp_path: Path):
    adapter = LocalAdapter(tmp_path / "root")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "root" / "pipe")
    for path in ("link", "pipe"):
        with pytest.raises(StoreIOError):
            adapter.read(path)
    assert adapter.write("link", b"own")
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_stopped_holder_of_a_lock_is_an_error_in_time(tmp_path: Path):
    """Reads need no lock."""
    adapter = LocalAdapter(tmp_path)
    adapter.write("a", b"1")
    with contextlib.ExitStack() as stack:
        for number in range(256):
            file = stack.enter_context((tmp_path / ".locks" / f"{number:02x}").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreUnreachableError, match="held by another"):
            call_within(0.2, lambda: adapter.write("a", b"2"))
        value = adapter.read("a")
        assert value is not None
        assert value.data == b"1"
    assert adapter.write("a", b"2")


def test_generations_differ_where_the_clock_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Inodes are used again, and sizes are equal."""
    adapter, now = LocalAdapter(tmp_path), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    generations = [adapter.write("a", b"%02d" % number) for number in range(40)]
    assert len(set(generations)) == 40


def test_unfinished_writes_are_swept_and_never_listed(tmp_path: Path):
    LocalAdapter(tmp_path).write("a", b"1")
    old, young = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "young"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    adapter = LocalAdapter(tmp_path)
    assert (old.exists(), young.exists()) == (False, True)
    assert list(adapter.paths("")) == ["a"]


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


def counted(kind: str, where: str, processes: int, rounds: int) -> None:
    """Several processes add to one counter."""
    command = [sys.executable, "-c", COUNT, kind, where, str(rounds)]
    running = [subprocess.Popen(command, env=child_environment()) for _ in range(processes)]
    assert [process.wait(300) for process in running] == [0] * processes


def test_processes_lose_no_update_of_a_directory(tmp_path: Path):
    adapter = LocalAdapter(tmp_path)
    adapter.write("counter", b"0")
    counted("local", str(tmp_path), 3, 50)
    value = adapter.read("counter")
    assert value is not None
    assert value.data == b"150"


ALTERNATE = """
import itertools, sys
from kvpatch_jax.store import LocalAdapter
adapter = LocalAdapter(sys.argv[1])
for letter in itertools.cycle(b"ab"):
    adapter.write("value", bytes([letter]) * 2_000_000)
    print(chr(letter), flush=True)
"""


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


def test_prefixes_separate_the_stores_of_a_server():
    server = fakeredis.FakeServer()
    one, two = (ValkeyAdapter(fakeredis.FakeRedis(server=server), prefix=prefix) for prefix in ("one:", "two:"))
    assert one.write("a", b"1", ABSENT)
    assert two.write("a", b"2", ABSENT)
    assert two.delete("a")
    assert list(one.paths("")) == ["a"]
    assert list(two.paths("")) == []


def test_objects_end_on_the_server_an_hour_after_they_expire():
    client = fakeredis.FakeRedis()
    remote = RemoteStore(ValkeyAdapter(client, ttl=True))
    now = time.time()
    assert remote.put(name_in(part="kv"), blob_at(1, expires=now + 100))
    assert remote.put(name_in(part="kv.int8"), blob_at(1))
    assert remote.put_if_absent("leases/x", b"{}")
    keys: Any = client.keys("kvpatch:v:*")
    ends = {key.decode().rpartition("/")[2]: client.ttl(key) for key in keys}
    assert 3690 <= ends.pop(name_in().file) <= 3702
    assert set(ends.values()) == {-1}


def test_paths_of_values_that_the_server_dropped_are_not_listed_and_forgotten():
    client = fakeredis.FakeRedis()
    adapter = ValkeyAdapter(client)
    for number in range(30):
        adapter.write(f"p/{number:02}", b"x")
    for number in range(0, 30, 3):
        client.delete(f"kvpatch:v:p/{number:02}")
    kept = [f"p/{number:02}" for number in range(30) if number % 3]
    assert list(adapter.paths("p/")) == kept
    assert client.zcard("kvpatch:paths") == len(kept)
    assert adapter.write("p/00", b"y", ABSENT)
    assert next(iter(adapter.paths("p/"))) == "p/00"


def test_clients_that_decode_and_other_objects_are_refused(unchecked: None):
    with pytest.raises(InputError, match="expected decode_responses=False"):
        ValkeyAdapter(fakeredis.FakeRedis(decode_responses=True))
    with pytest.raises(InputError, match="expected a valkey"):
        ValkeyAdapter(object())


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


def test_a_port_where_nobody_listens_is_unreachable():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    adapter = ValkeyAdapter.from_url(f"valkey://127.0.0.1:{port}/0", timeout=1)
    with pytest.raises(StoreUnreachableError):
        adapter.read("a")


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(MissingExtraError, match=r"kvpatch_jax\[valkey\]"):
        open_remote("valkey://nowhere:6379/0")


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Starts a server of its own on a socket in a folder; skips the test if none is installed."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("got neither valkey-server nor redis-server; expected one on the path")
    path = str(folder / "s")
    command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not os.path.exists(path):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        yield f"unix://{path}?db=0"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
def test_a_real_server_keeps_every_promise_and_loses_no_update(tmp_path: Path):
    """Two clients of eight threads each, then three processes, compare and set the same paths."""
    with running_server(tmp_path) as url:
        check_adapter(lambda: ValkeyAdapter.from_url(url, ttl=True))
        clients = [ValkeyAdapter.from_url(url), ValkeyAdapter.from_url(url)]
        for number in range(4):
            clients[0].write(f"counters/{number}", b"0")
        until = time.monotonic() + 8

        def add(thread: int) -> list[int]:
            adapter, added = clients[thread % 2], [0] * 4
            while time.monotonic() < until:
                number = (thread + sum(added)) % 4
                found = adapter.read(f"counters/{number}")
                assert found is not None
                value = b"%d" % (int(found.data) + 1)
                added[number] += adapter.write(f"counters/{number}", value, found.generation) is not None
            return added

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            added = list(pool.map(add, range(16)))
        values = [clients[1].read(f"counters/{number}") for number in range(4)]
        assert [value and int(value.data) for value in values] == [sum(column) for column in zip(*added, strict=True)]
        assert sum(map(sum, added)) > 1000

        clients[0].write("counter", b"0")
        counted("valkey", url, 3, 500)
        value = clients[0].read("counter")
        assert value is not None
        assert value.data == b"1500"


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
