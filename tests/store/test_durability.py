"""What a store has acknowledged survives the kill of its process at any moment, and a power cut at any step.

`Disk` stands for `os` in the store's modules and notes what is durable: the bytes of a file since its fsync, its name
since the fsync of its folder, a name's removal never, as nothing syncs it. Before and after every call it keeps the
directories that a cut may leave. SQLite has its own crash tests; its files are copied as they are at the moment, as its
transactions are durable when they end.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import files, index
from kvpatch_jax.store.objects import Objects
from tests.store.store_cases import SECRET, name_of, object_of, opened, run, value_of

BUDGET = 8_500
States = list[dict[int, set[int | None]]]

# ------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.parametrize(
    ("seconds", "processes", "kills", "seed"),
    [(1.5, 4, 6, 0), *(pytest.param(30.0, 12, 200, seed, marks=pytest.mark.nightly) for seed in range(3))],
)
def test_processes_that_are_killed_while_others_read(
    folder: Path, seconds: float, processes: int, kills: int, seed: int
):
    """Nothing acknowledged is lost, torn, back, over budget, or missing for another machine."""
    code = f"""
    import sys
    from tests.store import store_drill
    store_drill.drill(sys.argv[1], {seconds}, {processes}, {kills}, {seed})
    """
    assert run(code, str(folder), timeout=300) == ""


class Killed(BaseException):
    """Stands for the end of the process."""


class System:
    """Stands for `os` in a module of the store; the process ends before its call number `limit` of those that write."""

    NAMES = ("open", "rename", "unlink", "fsync", "writev", "makedirs")

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if name not in self.NAMES:
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count > self.limit:
                raise Killed
            return value(*arguments, **options)

        return call


@pytest.mark.parametrize("damage", ["new", "lost index", "marked"])
def test_an_end_at_any_step_of_a_roots_creation_or_its_indexs_remaking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    steps = 0
    for limit in range(60):
        root = folder / str(limit)
        if damage != "new":
            store = Objects(root, secret=SECRET)
            store.put([(name_of(0), object_of(5))])
            store.close()
        if damage == "lost index":
            (root / "index.sqlite").unlink()
        elif damage == "marked":
            (root / "damaged").touch()

        system = System(limit)
        with monkeypatch.context() as patch:
            patch.setattr(index, "os", system)
            patch.setattr(files, "os", system)
            try:
                Objects(root, secret=SECRET).close()
                break
            except Killed:
                steps += 1

        store = Objects(root, secret=SECRET)
        if damage == "new":
            assert store.put([(name_of(0), object_of(5))]) == [True]
        assert store.get(name_of(0), value_of) == 5
        store.close()
    assert 10 < steps < 60


# ------------------------------------------------------------------------------------------------------- power cuts


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

    def __getattr__(self, name: str) -> Any:
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
                    length = [0, size // 2, size, size][choice]
                    content[length:] = [b"", b"", b"", bytes(len(content) - length)][choice]
                    if choice == 3:
                        content[: size // 2] = bytes(size // 2)  # later blocks were written, earlier ones not
                    file.write_bytes(content)
            for path, content in self.removed.items():
                if choice in (1, 3):
                    (copy / os.path.relpath(path, self.root)).write_bytes(content)
            self.cuts.append((copy, self.acknowledged))


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    root, numbers = folder / "root", itertools.count()
    opened(root, root_budget=BUDGET).close()
    for shard in (root / "data").iterdir():
        if shard.name != "00":
            shard.rmdir()  # copies are quick
    disk = Disk(root, folder)
    tokens: Callable[[int], str] = lambda size: f"{next(numbers):0{2 * size}x}"
    monkeypatch.setattr("kvpatch_jax.store.objects.secrets.token_hex", tokens)
    for module in ("index", "files", "objects"):
        monkeypatch.setattr(f"kvpatch_jax.store.{module}.os", disk)
    return disk


def check_cuts(disk: Disk, states: States) -> None:
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


def test_cuts_while_objects_are_put_and_replaced(disk: Disk):
    store = opened(disk.root)
    store.put([(name_of(1), object_of(10))])
    disk.acknowledged = 1
    store.put([(name_of(1), object_of(11)), (name_of(2), object_of(20))])
    disk.acknowledged = 2
    store.put_async(name_of(1), lambda: object_of(12), 1000).result()
    disk.acknowledged = 3
    disk.cut()
    states: States = [
        {1: {None, 10}, 2: {None}},
        {1: {10, 11}, 2: {None, 20}},
        {1: {11, 12}, 2: {20}},
        {1: {12}, 2: {20}},
    ]
    assert len(disk.cuts) > 60
    check_cuts(disk, states)
    store.close()


def test_cuts_while_objects_are_deleted_and_put_again(disk: Disk):
    store = opened(disk.root)
    disk.is_active = False
    store.put([(name_of(1), object_of(10)), (name_of(2), object_of(20))])
    disk.is_active = True
    store.delete(f"{1:032x}")
    disk.acknowledged = 1
    disk.cut()
    store.put([(name_of(1), object_of(11))])
    disk.acknowledged = 2
    store.delete_tenant()
    disk.acknowledged = 3
    disk.cut()
    states: States = [
        {1: {10, None}, 2: {20}},
        {1: {None, 11}, 2: {20}},
        {1: {11, None}, 2: {20, None}},
        {1: {None}, 2: {None}},
    ]
    check_cuts(disk, states)
    store.close()


def test_cuts_while_objects_are_evicted(disk: Disk):
    store = opened(disk.root)
    disk.is_active = False
    for number in range(1, 7):
        store.put([(name_of(number), object_of(number))])
    disk.is_active = True
    states: States = [{number: {number, None} for number in range(1, 7)}]
    for number in range(7, 9):
        store.put([(name_of(number), object_of(number))])
        disk.acknowledged += 1
        states[-1][number] = {None, number}
        state: dict[int, set[int | None]] = {other: {other, None} for other in range(1, number)}
        state[number] = {number}
        states.append(state)
    disk.cut()
    assert store.counters["evicted"] > 0
    check_cuts(disk, states)
    store.close()


def test_a_put_that_the_disk_fails_changes_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch):
    """The old object stays, and the next put takes place."""
    disk.is_active = False
    store = opened(disk.root)
    store.put([(name_of(1), object_of(10))])
    for method, code in (("fsync", errno.EIO), ("writev", errno.ENOSPC), ("open", errno.EDQUOT)):

        def fail(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(disk, method, fail)
            with pytest.raises(StoreError):
                store.put([(name_of(1), object_of(11)), (name_of(2), object_of(20))])
        assert store.get(name_of(1), value_of) == 10
        assert not store.contains(name_of(2))
        assert sorted(path.name for path in (disk.root / "data").rglob("*") if path.is_file()) == ["0" * 24]
    assert store.put([(name_of(1), object_of(12))]) == [True]
    assert store.get(name_of(1), value_of) == 12
    store.close()
