"""A power cut at any step of put, delete and eviction: what was acknowledged is there afterwards, and right.

`Disk` stands for `os` in the store's modules and notes what is durable: the bytes of a file since its fsync, its name
since the fsync of its folder, a name's removal never, as nothing syncs it. Before and after every call it keeps the
directories that a cut may leave. SQLite has its own crash tests; its files are copied as they are at the moment, as its
transactions are durable when they end.
"""
# pyright: reportArgumentType=false

import errno
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import files, index
from kvpatch_jax.store.files import Encoded, Stored
from kvpatch_jax.store.objects import Objects

BUDGET = 12_000


def name_of(number: int) -> str:
    return f"{number:032x}/enc"


def object_of(value: int) -> Encoded:
    return Encoded("encoder", {}, {"output": np.full(300, value, np.int32)})


def value_of(stored: Stored) -> int:
    assert len(set(stored.arrays["output"].tolist())) == 1
    return int(stored.arrays["output"][0])


class Disk:
    """Stands for `os`, and keeps what a power cut at each moment may leave of a root.

    Attributes:
      cuts: copies of the root, each with the number of acknowledgements before it.
    """

    def __init__(self, root: Path, copies: Path):
        self.root, self.copies, self.cuts = root, copies, list[tuple[Path, int]]()
        self.acknowledged, self.is_active, self.numbers = 0, True, itertools.count()
        self.paths, self.written = dict[int, str](), dict[str, int]()
        self.synced, self.linked, self.removed = set[str](), set[str](), dict[str, bytes]()

    def __getattr__(self, name: str):
        return getattr(os, name)

    def open(self, path: str, flags: int, *mode: int) -> int:
        fd = os.open(path, flags, *mode)
        self.paths[fd] = path
        if "/data/" in path and flags & os.O_CREAT:
            self.written[path] = 0
            self.cut()
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)
        self.paths.pop(fd, None)

    def writev(self, fd: int, parts: list) -> int:
        """Writes less than it is asked to, as it may."""
        count = os.writev(fd, [parts[0][:1000]])
        self.written[self.paths[fd]] += count
        self.cut()
        return count

    def fsync(self, fd: int) -> None:
        self.cut()
        os.fsync(fd)
        path = self.paths[fd]
        self.synced.add(path)
        self.linked |= {file for file in self.written if os.path.dirname(file) == path}
        self.cut()

    def unlink(self, path: str) -> None:
        content = Path(path).read_bytes() if "/data/" in path else b""
        self.cut()
        os.unlink(path)
        if content:
            self.removed[path] = content
        self.cut()

    def cut(self) -> None:
        """Keeps the directories that a cut now may leave: the fewest and the most of what is not durable, and mixes."""
        for choice in range(4 if self.is_active else 0):
            copy = self.copies / f"{next(self.numbers)}"
            shutil.copytree(self.root, copy, ignore=shutil.ignore_patterns("*-shm"))
            for path, size in self.written.items():
                if not os.path.exists(path):
                    continue
                file = copy / os.path.relpath(path, self.root)
                if path not in self.linked and choice in (0, 2):
                    file.unlink()
                elif path not in self.synced:
                    content = bytearray(file.read_bytes())
                    kept = [0, size // 2, size, size][choice]
                    content[kept:] = [b"", b"", b"", bytes(len(content) - kept)][choice]
                    if choice == 3:
                        content[: size // 2] = bytes(size // 2)  # later blocks were written, earlier ones not
                    file.write_bytes(content)
            for path, content in self.removed.items():
                if choice in (1, 3):
                    (copy / os.path.relpath(path, self.root)).write_bytes(content)
            self.cuts.append((copy, self.acknowledged))


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    root = folder / "root"
    Objects(root, secret=b"s" * 16, root_budget=BUDGET, memory=0).close()
    for shard in (root / "data").iterdir():
        if shard.name != "00":
            shard.rmdir()  # copies are quick
    disk = Disk(root, folder)
    monkeypatch.setattr("kvpatch_jax.store.objects.secrets.token_hex", _token_hex())
    monkeypatch.setattr(index, "os", disk)
    monkeypatch.setattr(files, "os", disk)
    monkeypatch.setattr("kvpatch_jax.store.objects.os", disk)
    return disk


def _token_hex():
    numbers = itertools.count()
    return lambda size: f"{next(numbers):0{2 * size}x}"


def opened(root: Path, **options) -> Objects:
    return Objects(root, secret=b"s" * 16, memory=0, **options)


def check_cuts(disk: Disk, states: list[dict[int, set[int | None]]]) -> None:
    """Opens every cut. After `acknowledged` operations each name has one of the values that the state then allows."""
    disk.is_active = False
    for copy, acknowledged in disk.cuts:
        store = opened(copy)
        for number, values in states[acknowledged].items():
            assert store.get(name_of(number), value_of) in values, (copy.name, number)
        assert store.damaged() == []
        assert store.index.row("PRAGMA integrity_check") == ("ok",)
        assert store.usage().bytes <= BUDGET
        assert store.put([(name_of(99), object_of(99))]) == [True]
        assert store.get(name_of(99), value_of) == 99
        store.close()
        shutil.rmtree(copy)


def test_put_and_replace(disk):
    store = opened(disk.root)
    store.put([(name_of(1), object_of(10))])
    disk.acknowledged = 1
    store.put([(name_of(1), object_of(11)), (name_of(2), object_of(20))])
    disk.acknowledged = 2
    store.put_async(name_of(1), lambda: object_of(12), 1000).result()
    disk.acknowledged = 3
    disk.cut()
    states = [{1: {None, 10}, 2: {None}}, {1: {10, 11}, 2: {None, 20}}, {1: {11, 12}, 2: {20}}, {1: {12}, 2: {20}}]
    assert len(disk.cuts) > 60
    check_cuts(disk, states)
    store.close()


def test_delete_and_put_again(disk):
    store = opened(disk.root)
    store.put([(name_of(1), object_of(10)), (name_of(2), object_of(20))])
    disk.cuts.clear()
    disk.acknowledged = 0
    store.delete(f"{1:032x}")
    disk.acknowledged = 1
    disk.cut()
    store.put([(name_of(1), object_of(11))])
    disk.acknowledged = 2
    store.delete_tenant()
    disk.acknowledged = 3
    disk.cut()
    states = [
        {1: {10, None}, 2: {20}},
        {1: {None, 11}, 2: {20}},
        {1: {11, None}, 2: {20, None}},
        {1: {None}, 2: {None}},
    ]
    check_cuts(disk, states)
    store.close()


def test_evict(disk):
    store = opened(disk.root)
    for number in range(1, 6):
        store.put([(name_of(number), object_of(number))])
    disk.cuts.clear()
    states: list[dict[int, set[int | None]]] = [{number: {number, None} for number in range(1, 6)}]
    for number in range(6, 9):
        store.put([(name_of(number), object_of(number))])
        disk.acknowledged += 1
        states[-1][number] = {None, number}
        states.append({other: {other, None} for other in range(1, number)} | {number: {number}})
    disk.cut()
    assert store.counters["evicted"] > 0
    check_cuts(disk, states)
    store.close()


def test_a_put_that_the_disk_fails_changes_nothing(disk, monkeypatch):
    """The old object stays, and the next put takes place."""
    disk.is_active = False
    store = opened(disk.root)
    store.put([(name_of(1), object_of(10))])
    for method, code, error in (
        ("fsync", errno.EIO, StoreError),
        ("writev", errno.ENOSPC, StoreError),
        ("open", errno.EDQUOT, StoreError),
    ):

        def fail(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(disk, method, fail)
            with pytest.raises(error):
                store.put([(name_of(1), object_of(11)), (name_of(2), object_of(20))])
        assert store.get(name_of(1), value_of) == 10
        assert not store.contains(name_of(2))
        assert sorted(path.name for path in (disk.root / "data").rglob("*") if path.is_file()) == ["0" * 24]
    assert store.put([(name_of(1), object_of(12))]) == [True]
    assert store.get(name_of(1), value_of) == 12
    store.close()
