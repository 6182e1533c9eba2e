"""A service in memory, with a client per machine, and faults that tests plan; objects for remote stores."""

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvpatch_jax.store import ABSENT, ANY, RemoteValue
from kvpatch_jax.store.format.naming import Name
from kvpatch_jax.store.format.objects import Blob

CHUNK = "obj/" + "0" * 32 + "/" + "1" * 32 + "/ab/ab" + "2" * 62


def name_in(chunk: str = CHUNK, part: str = "kv") -> Name:
    folder, _, stem = chunk.rpartition("/")
    return Name(folder, stem, f"{stem}.{part}.safetensors", "patch" if part.startswith("p.") else "kv")


def blob_at(revision: int, value: float = 0.0, size: int = 100, **more: Any) -> Blob:
    """An object whose leaf has one value, so that a reader sees which it is."""
    return Blob("kv", {"test": 1}, {"k": np.full(size, value, np.float32)}, revision=revision, **more)


class MemoryService:
    """Values by path, with a generation each. `before` and `after` are called around every call of every client."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[bytes, bytes]] = {}
        self.lock, self.numbers = threading.RLock(), itertools.count(1)
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.after: Callable[[str, str], None] = lambda method, path: None


class MemoryAdapter:
    """A client of a service in memory."""

    def __init__(self, service: MemoryService):
        self.service, self.calls = service, []

    def _around[T](self, method: str, path: str, call: Callable[[], T]) -> T:
        self.calls.append((method, path))
        self.service.before(method, path)
        with self.service.lock:
            result = call()
        self.service.after(method, path)
        return result

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        def call() -> RemoteValue | None:
            data, generation = self.service.values.get(path, (b"", b""))
            return RemoteValue(data[start:stop], generation) if generation else None

        return self._around("read", path, call)

    def _holds(self, path: str, expected: Any) -> bool:
        generation = self.service.values.get(path, (b"", b""))[1]
        return expected is ANY or generation == (b"" if expected is ABSENT else expected)

    def write(self, path: str, data: bytes, expected: Any = ANY) -> bytes | None:
        def call() -> bytes | None:
            if not self._holds(path, expected):
                return None
            generation = b"%d" % next(self.service.numbers)
            self.service.values[path] = bytes(data), generation
            return generation

        return self._around("write", path, call)

    def delete(self, path: str, expected: Any = ANY) -> bool:
        def call() -> bool:
            held = self._holds(path, expected)
            if held:
                self.service.values.pop(path, None)
            return held

        return self._around("delete", path, call)

    def paths(self, prefix: str) -> Iterable[str]:
        return self._around("paths", prefix, lambda: [path for path in self.service.values if path.startswith(prefix)])
