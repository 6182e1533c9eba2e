"""What others would keep small objects in: files, safetensors, diskcache, LMDB; behind one interface with the store.

Every timed method returns its seconds; what it prepares is not timed. All writes are durable when they return.
"""

import collections
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import numpy as safetensors

from kvpatch_jax.errors import InputError

from .store_fill import small_chunk
from .timing import stopwatch

FIRST_ROWS = 20
"""Rows of a listing that are waited for."""
_BATCH = 10_000
_SHARDS = 256


@runtime_checkable
class StoreSide(Protocol):
    """A directory of small objects by key, and of groups of objects with a common prefix."""

    name: str

    def fill(self, keys: Sequence[str]) -> None:
        """Writes objects quickly."""
        ...

    def fill_group(self, prefix: str, count: int) -> None:
        """Writes a group of objects quickly."""
        ...

    def put(self, key: str) -> float:
        """Writes one object durably; evicts others for it after `limit`."""
        ...

    def get(self, key: str) -> float:
        """Reads one object whole."""
        ...

    def first_rows(self) -> float:
        """Lists the first objects with their sizes, by name."""
        ...

    def delete_group(self, prefix: str) -> float:
        """Deletes a group durably."""
        ...

    def limit(self) -> None:
        """Makes what is held now the most that may be held."""
        ...

    def close(self) -> None:
        """Frees what is open."""
        ...


def expect(condition: object, what: str) -> None:
    """Raises InputError where a timed call did not do what is timed."""
    if not condition:
        raise InputError(f"benchmark: {what}: got another result; expected what was put")


def leaves() -> dict[str, np.ndarray]:
    """Returns the arrays of a small object."""
    return {name: np.asarray(value) for name, value in small_chunk("small").kv.items()}


class FileSide:
    """A file per object in 256 folders: written, synced, renamed; evicted by an ordered dictionary in memory.

    Args:
      encode: makes an object's bytes.
      read: reads a file whole.
    """

    def __init__(self, name: str, folder: Path, encode: Callable[[], bytes], read: Callable[[Path], object]):
        self.name, self._folder, self._encode, self._read = name, folder, encode, read
        self._order: collections.OrderedDict[str, int] | None = None
        self._held = self._most = 0
        for shard in range(_SHARDS):
            (folder / f"{shard:02x}").mkdir(parents=True)

    def _path(self, key: str) -> Path:
        # Objects of a group are in the folder of their prefix.
        return self._folder / f"{hash_of(key.partition('.')[0]) % _SHARDS:02x}" / key

    def fill(self, keys: Sequence[str]) -> None:
        data = self._encode()
        for key in keys:
            self._path(key).write_bytes(data)

    def fill_group(self, prefix: str, count: int) -> None:
        self.fill([f"{prefix}.{number:05}" for number in range(count)])

    def put(self, key: str) -> float:
        path = self._path(key)

        def write() -> None:
            data = self._encode()
            partial = self._folder / f"{key}.part"
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(partial, path)
            if self._order is not None:
                self._order[key] = len(data)
                self._held += len(data)
                while self._held > self._most:
                    oldest, nbytes = self._order.popitem(last=False)
                    self._path(oldest).unlink()
                    self._held -= nbytes

        return stopwatch(write)

    def get(self, key: str) -> float:
        path = self._path(key)
        return stopwatch(lambda: expect(self._read(path), self.name))

    def first_rows(self) -> float:
        def rows() -> list[tuple[str, int]]:
            found: list[tuple[str, int]] = []
            for shard in sorted(os.listdir(self._folder)):
                for name in sorted(os.listdir(self._folder / shard)):
                    found.append((name, os.stat(self._folder / shard / name).st_size))
                    if len(found) == FIRST_ROWS:
                        return found
            return found

        return stopwatch(lambda: expect(rows(), self.name))

    def delete_group(self, prefix: str) -> float:
        folder = self._path(prefix).parent

        def delete() -> int:
            names = [name for name in os.listdir(folder) if name.startswith(f"{prefix}.")]
            for name in names:
                os.unlink(folder / name)
            return len(names)

        return stopwatch(lambda: expect(delete(), self.name))

    def limit(self) -> None:
        self._order = collections.OrderedDict()
        for shard in os.listdir(self._folder):
            for entry in os.scandir(self._folder / shard):
                self._order[entry.name] = entry.stat().st_size
        self._held = self._most = sum(self._order.values())

    def close(self) -> None:
        shutil.rmtree(self._folder)


def hash_of(key: str) -> int:
    """Returns a number of a key that is the same in every process."""
    return int.from_bytes(key.encode()[-6:]) * 2654435761 >> 7


def raw_files(folder: Path) -> FileSide:
    """Makes a side of raw files: the leaves' bytes."""
    arrays = leaves()
    return FileSide("raw files", folder, lambda: b"".join(map(bytes, map(memoryview_of, arrays.values()))), read_bytes)


def memoryview_of(array: np.ndarray) -> memoryview:
    """Returns an array's bytes."""
    return memoryview(array.reshape(-1).view(np.uint8))


def read_bytes(path: Path) -> bytes:
    """Reads a file."""
    return path.read_bytes()


def safetensors_files(folder: Path) -> FileSide:
    """Makes a side of safetensors files."""
    arrays = leaves()
    return FileSide("safetensors", folder, lambda: safetensors.save(arrays), safetensors.load_file)


class DiskcacheSide:
    """A `diskcache.Cache`, least recently used, synced at every commit; a group is a tag, which it indexes."""

    name = "diskcache"

    def __init__(self, folder: Path):
        import diskcache  # pyright: ignore[reportMissingImports]

        self._folder = folder
        self._cache: Any = diskcache.Cache(
            str(folder),
            eviction_policy="least-recently-used",
            size_limit=1 << 50,
            tag_index=True,
            sqlite_synchronous=2,  # by default a commit may be lost in a power cut
        )
        self._data = b"".join(map(bytes, map(memoryview_of, leaves().values())))

    def fill(self, keys: Sequence[str]) -> None:
        for batch in itertools.batched(keys, _BATCH):
            with self._cache.transact():
                for key in batch:
                    self._cache.set(key, self._data)

    def fill_group(self, prefix: str, count: int) -> None:
        with self._cache.transact():
            for number in range(count):
                self._cache.set(f"{prefix}.{number:05}", self._data, tag=prefix)

    def put(self, key: str) -> float:
        return stopwatch(lambda: self._cache.set(key, self._data))

    def get(self, key: str) -> float:
        return stopwatch(lambda: expect(self._cache.get(key) == self._data, self.name))

    def first_rows(self) -> float:
        return stopwatch(lambda: expect(list(itertools.islice(self._cache.iterkeys(), FIRST_ROWS)), self.name))

    def delete_group(self, prefix: str) -> float:
        return stopwatch(lambda: expect(self._cache.evict(prefix), self.name))

    def limit(self) -> None:
        self._cache.reset("size_limit", self._cache.volume())

    def close(self) -> None:
        self._cache.close()
        shutil.rmtree(self._folder)


class LmdbSide:
    """One LMDB environment; the order of use is a second database that every write keeps in the same transaction."""

    name = "LMDB"

    def __init__(self, folder: Path, room: int = 1 << 36):
        import lmdb  # pyright: ignore[reportMissingImports]

        self._folder = folder
        self._env: Any = lmdb.open(str(folder), map_size=room, max_dbs=2)
        self._values: Any = self._env.open_db(b"values")
        self._turns: Any = self._env.open_db(b"turns")
        self._data = b"".join(map(bytes, map(memoryview_of, leaves().values())))
        self._turn, self._held, self._most = itertools.count(1), 0, 1 << 60

    def _add(self, txn: Any, key: str) -> None:
        txn.put(key.encode(), self._data, db=self._values)
        txn.put(next(self._turn).to_bytes(8), key.encode(), db=self._turns)
        self._held += len(self._data)

    def fill(self, keys: Sequence[str]) -> None:
        for batch in itertools.batched(keys, _BATCH):
            with self._env.begin(write=True) as txn:
                for key in batch:
                    self._add(txn, key)

    def fill_group(self, prefix: str, count: int) -> None:
        with self._env.begin(write=True) as txn:
            for number in range(count):
                txn.put(f"{prefix}.{number:05}".encode(), self._data, db=self._values)

    def put(self, key: str) -> float:
        def write() -> None:
            with self._env.begin(write=True) as txn:
                self._add(txn, key)
                while self._held > self._most:
                    cursor = txn.cursor(db=self._turns)
                    cursor.first()
                    txn.delete(cursor.value(), db=self._values)
                    cursor.delete()
                    self._held -= len(self._data)

        return stopwatch(write)

    def get(self, key: str) -> float:
        def read() -> bool:
            with self._env.begin() as txn:
                return txn.get(key.encode(), db=self._values) == self._data

        return stopwatch(lambda: expect(read(), self.name))

    def first_rows(self) -> float:
        def rows() -> list[tuple[bytes, int]]:
            with self._env.begin() as txn:
                cursor = txn.cursor(db=self._values)
                return [(key, len(value)) for key, value in itertools.islice(cursor, FIRST_ROWS)]

        return stopwatch(lambda: expect(rows(), self.name))

    def delete_group(self, prefix: str) -> float:
        begin = f"{prefix}.".encode()

        def delete() -> int:
            count = 0
            with self._env.begin(write=True) as txn:
                cursor = txn.cursor(db=self._values)
                there = cursor.set_range(begin)
                while there and cursor.key().startswith(begin):
                    there = cursor.delete()
                    count += 1
            return count

        return stopwatch(lambda: expect(delete(), self.name))

    def limit(self) -> None:
        self._most = self._held

    def close(self) -> None:
        self._env.close()
        shutil.rmtree(self._folder)


OTHERS: dict[str, tuple[str | None, Callable[[Path], StoreSide]]] = {
    "raw files": (None, raw_files),
    "safetensors": (None, safetensors_files),
    "diskcache": ("diskcache", DiskcacheSide),
    "LMDB": ("lmdb", LmdbSide),
}
"""The package that each needs, and how it is made."""


def installed() -> tuple[list[str], dict[str, str]]:
    """Returns the names of the others that can be measured, and why the rest cannot."""
    absent: dict[str, str] = {}
    for name, (package, _) in OTHERS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            absent[name] = f"the package {package} is not installed (extra `bench`)"
    return [name for name in OTHERS if name not in absent], absent
