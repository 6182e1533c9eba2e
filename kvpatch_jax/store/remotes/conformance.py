"""Conformance of adapters: checks of everything that `RemoteAdapter` promises, for any service that has an adapter."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import random
import secrets
import threading
import time
from collections.abc import Callable

from .adapter import ABSENT, ANY, RemoteAdapter, RemoteValue

_SECONDS = 0.5
"""How long readers look for torn values."""


class ConformanceError(AssertionError):
    """An adapter that breaks promises.

    Attributes:
      broken: one line per promise, `<promise>: got <what>; expected <what>`.
    """

    def __init__(self, broken: tuple[str, ...]):
        super().__init__("adapter: got broken promises; expected none\n" + "\n".join(broken))
        self.broken = broken


class _BrokenError(Exception):
    """A promise that is not kept; the message says what was got and expected."""


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise _BrokenError(f"{what}: got {found!r:.120}; expected {expected!r:.120}")


@dataclasses.dataclass(frozen=True)
class _Service:
    """Two clients of one service, as two machines have them, and a folder of it for one check."""

    one: RemoteAdapter
    two: RemoteAdapter
    folder: str

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def _data(found: RemoteValue | None) -> bytes | None:
    return None if found is None else bytes(found.data)


def _written(adapter: RemoteAdapter, path: str, data: bytes) -> bytes:
    """Writes without a condition, and returns the generation."""
    generation = adapter.write(path, data)
    if not isinstance(generation, bytes) or not generation:
        raise _BrokenError(f"unconditional write: got generation {generation!r:.60}; expected bytes, not empty")
    return generation


def _absence(service: _Service) -> None:
    """What is not there."""
    path = service.path("absent")
    _expect(service.one.read(path), None, "read of an absent path")
    _expect(service.one.read(path, 3, 9), None, "range of an absent path")
    _expect(service.one.delete(path), True, "delete of an absent path")
    _expect(service.one.delete(path, b"0123456789abcdef"), False, "conditional delete of an absent path")
    _expect(list(service.one.paths(path)), [], "paths of an absent path")


def _whole_values(service: _Service) -> None:
    """Values of all sizes come back, with the generation that the write reported."""
    for size in (0, 1, 4095, 4096, 3_000_001):
        data = secrets.token_bytes(size)
        generation = _written(service.one, service.path(f"whole-{size}"), data)
        for client in (service.one, service.two):
            found = client.read(service.path(f"whole-{size}"))
            _expect(_data(found) == data, True, f"value of {size} bytes is equal")
            _expect(found and found.generation, generation, "generation of a read")


def _fresh_reads(service: _Service) -> None:
    """A read sees every write and delete that returned before, on any machine."""
    path = service.path("fresh")
    clients = (service.one, service.two)
    for number in range(16):
        writer, data = clients[number // 4 % 2], b"%d" % number
        _written(writer, path, data)
        for reader in clients:
            _expect(_data(reader.read(path)), data, "read after a write that returned")
            _expect(list(reader.paths(path)), [path], "paths after a write that returned")
        if number % 3 == 2:
            writer.delete(path)
            for reader in clients:
                _expect(_data(reader.read(path)), None, "read after a delete that returned")
                _expect(list(reader.paths(path)), [], "paths after a delete that returned")


def _ranges(service: _Service) -> None:
    """Ranges are cut as slices are, and name the generation of the whole value."""
    path, data = service.path("ranges"), bytes(range(256)) * 40
    generation = _written(service.one, path, data)
    for start, stop in [(0, 4096), (1, 2), (5000, 9000), (0, 0), (7, 7), (9, 3), (10_000, None), (0, 99_999)]:
        found = service.two.read(path, start, stop)
        _expect(_data(found), data[start:stop], f"bytes {start}:{stop} of {len(data)}")
        _expect(found and found.generation, generation, f"generation of bytes {start}:{stop}")
    for start, stop in [(len(data), None), (len(data), len(data) + 9), (99_999, 100_000)]:
        _expect(_data(service.two.read(path, start, stop)), b"", f"bytes {start}:{stop} of {len(data)}")


def _generations(service: _Service) -> None:
    """Values of one path with other bytes have other generations, also with deletions in between."""
    path, seen = service.path("generations"), {}
    for number in range(60):
        data = b"%03d" % number
        generation = _written(service.one, path, data)
        _expect(seen.get(generation), None, "earlier value of this generation")
        seen[generation] = data
        found = service.two.read(path)
        _expect(found and found.generation, generation, "generation of a value that did not change")
        if number % 2:
            service.two.delete(path, generation)


def _conditions(service: _Service) -> None:
    """Conditional writes and deletes take place exactly if the condition holds."""
    one, two, path = service.one, service.two, service.path("conditions")
    first = one.write(path, b"first", ABSENT)
    _expect(bool(first), True, "write that expects absence of an absent path took place")
    _expect(two.write(path, b"no", ABSENT), None, "write that expects absence of a value")
    _expect(two.write(path, b"no", b"0123456789abcdef"), None, "write that expects a generation that never was")
    _expect(_data(one.read(path)), b"first", "value after writes whose conditions did not hold")

    second = two.write(path, b"second", first or b"")
    _expect(bool(second), True, "write that expects the current generation took place")
    _expect(one.write(path, b"no", first or b""), None, "write that expects an earlier generation")
    _expect(one.delete(path, first or b""), False, "delete that expects an earlier generation")
    _expect(_data(two.read(path)), b"second", "value after changes whose conditions did not hold")

    _expect(one.delete(path, second or b""), True, "delete that expects the current generation")
    _expect(two.write(path, b"no", second or b""), None, "write that expects the generation of a deleted value")
    _expect(_data(one.read(path)), None, "value after a conditional delete")
    _written(two, path, b"third")
    _expect(one.delete(path, ANY), True, "delete without a condition")
    _expect(_data(two.read(path)), None, "value after a delete without a condition")


def _untorn_values(service: _Service) -> None:
    """Readers never see a part of one value and a part of another."""
    path, stop = service.path("torn"), threading.Event()
    size = 200_000

    def write(client: RemoteAdapter, letters: bytes) -> None:
        for letter in itertools.cycle(letters):
            if stop.is_set():
                return
            client.write(path, bytes([letter]) * (size + letter))

    def read(client: RemoteAdapter, start: int, end: int | None) -> None:
        until, letters = time.monotonic() + _SECONDS, {}
        while time.monotonic() < until:
            found = client.read(path, start, end)
            data = _data(found) or b""
            _expect(len(set(data)), 1, f"writers whose bytes are in {start}:{end}")
            _expect(len(data), (size + data[0] if end is None else end) - start, f"length of {start}:{end}")
            _expect(letters.setdefault(found and found.generation, data[0]), data[0], "bytes of a generation")

    _written(service.one, path, b"a" * (size + ord("a")))
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        writers = [pool.submit(write, service.one, b"ab"), pool.submit(write, service.two, b"cd")]
        readers = [pool.submit(read, *call) for call in [(service.one, 0, None), (service.two, 1000, size)]]
        readers.append(pool.submit(read, service.two, 0, None))
        concurrent.futures.wait(readers)
        stop.set()
        for job in [*readers, *writers]:
            job.result()


def _no_lost_update(service: _Service) -> None:
    """Of writers that read, add one and write if nothing changed, none undoes another's."""
    path, rounds, clients = service.path("counter"), 20, [service.one, service.two] * 2
    service.one.write(path, b"0")
    begin = threading.Barrier(len(clients))

    def count(client: RemoteAdapter) -> None:
        begin.wait(60)
        for _ in range(rounds):
            while True:
                found = client.read(path)
                if found is None:
                    raise _BrokenError("counter: got no value; expected a number")
                time.sleep(random.random() * 1e-3)  # so that others come in between, however fast the service is
                if client.write(path, b"%d" % (int(found.data) + 1), found.generation) is not None:
                    break

    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        for job in [pool.submit(count, client) for client in clients]:
            job.result()
    _expect(_data(service.one.read(path)), b"%d" % (rounds * len(clients)), "counter after all increments")


def _one_winner(service: _Service) -> None:
    """Of changes that expect the same, at the same time, one takes place."""
    clients = [service.one, service.two] * 2
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        for number in range(20):
            path, begin = service.path(f"race-{number}"), threading.Barrier(len(clients))

            def create(client: RemoteAdapter, name: int, path: str = path, begin: threading.Barrier = begin) -> bool:
                begin.wait(60)
                return client.write(path, b"%d" % name, ABSENT) is not None

            wins = list(pool.map(create, clients, range(len(clients))))
            _expect(wins.count(True), 1, "writers that found the path absent")
            found = service.one.read(path)
            _expect(_data(found), b"%d" % wins.index(True), "value of the one that won")
            generation = b"" if found is None else found.generation

            def change(
                client: RemoteAdapter,
                name: int,
                path: str = path,
                old: bytes = generation,
                begin: threading.Barrier = begin,
            ) -> bool:
                begin.wait(60)
                return client.delete(path, old) if name % 2 else client.write(path, b"next", old) is not None

            wins = list(pool.map(change, clients, range(len(clients))))
            _expect(wins.count(True), 1, "writes and deletes that found the generation")
            _expect(
                _data(service.two.read(path)), None if wins.index(True) % 2 else b"next", "what the one that won left"
            )


def _lists(service: _Service) -> None:
    """Lists are complete and exact for any prefix."""
    names = [f"{folder}/{number:04d}.x" for folder in ("aa", "ab", "b-") for number in range(350)]
    names += ["aa.y", "a", "ab/deeper/still/it.x"]
    paths = [service.path(name) for name in names]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(service.one.write, paths, itertools.repeat(b"x")))
    for prefix in ("", "a", "aa", "aa/", "aa/00", "ab/deeper/", "b-/0349.x", "b-/0349.xy", "c", "aa/0001.x/"):
        expected = [path for path in paths if path.startswith(service.path(prefix))]
        _expect(sorted(service.two.paths(service.path(prefix))), sorted(expected), f"paths that begin with {prefix!r}")
    _expect(set(paths) <= set(service.one.paths("")), True, "all paths of the service contain those written")
    for path in paths[::2]:
        service.two.delete(path)
    _expect(sorted(service.one.paths(service.folder + "/")), sorted(paths[1::2]), "paths after deletions")


_CHECKS: dict[str, Callable[[_Service], None]] = {
    "absence": _absence,
    "whole values": _whole_values,
    "fresh reads": _fresh_reads,
    "ranges": _ranges,
    "generations": _generations,
    "conditions": _conditions,
    "untorn values": _untorn_values,
    "no lost update": _no_lost_update,
    "one winner": _one_winner,
    "lists": _lists,
}


def check_adapter(make: Callable[[], RemoteAdapter]) -> None:
    """Checks that an adapter keeps the promises of `RemoteAdapter`, with two clients and several threads.

    It writes below `conformance-<random>/` and deletes that at the end. Durability and errors of a service that fails
    are not checked: both need the service's help.

    Args:
      make: returns a client of the service; each call another one, as on another machine.

    Raises:
      ConformanceError: it breaks some; `broken` names each.
    """
    broken: list[str] = []
    one, two = make(), make()
    for client in (one, two):
        if not isinstance(client, RemoteAdapter):
            raise ConformanceError((f"adapter: got {client!r:.80}; expected read, write, delete and paths",))
    for name, check in _CHECKS.items():
        service = _Service(one, two, f"conformance-{secrets.token_hex(8)}")
        try:
            check(service)
        except _BrokenError as error:
            broken.append(f"{name}: {error}")
        except Exception as error:
            broken.append(f"{name}: got {error!r:.300}; expected no error")
        with contextlib.suppress(Exception):  # what cannot be deleted was reported
            for path in list(one.paths(f"{service.folder}/")):
                one.delete(path)
    if broken:
        raise ConformanceError(tuple(broken))
