"""The index of a root against listings of its folders: whatever happens, rows, sums and order are the files'."""

import contextlib
import os
import random
import re
import shutil
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of

from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.disk.eviction import make_room
from kvpatch_jax.store.disk.index import Index
from kvpatch_jax.store.disk.index_rows import IndexedObject

TENANTS = ("acme", "other")
BYTES = 1 << 40
OBJECT = re.compile(r"obj/[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}\.[a-z0-9_.]+\.safetensors")


def listing(root: Path) -> dict[str, os.stat_result]:
    """What the folders hold, by the directory alone."""
    found = {}
    for above, _, files in os.walk(root / "obj"):
        for file in files:
            path = os.path.relpath(os.path.join(above, file), root)
            if OBJECT.fullmatch(path):
                found[path] = os.lstat(root / path)
    return found


def turns(paths: dict[str, os.stat_result]) -> dict[str, int]:
    """The class of each object in the order of eviction, from the names alone.

    1: patches, and reduced canonicals whose unreduced one is there; 2: canonicals with an encoder output; 3: the rest.
    """
    right = {}
    for path in paths:
        chunk, _, rest = path.removesuffix(".safetensors").partition(".")
        words = rest.split(".")
        encoding = [word for word in words[1:] if not word.startswith("behind_")]
        whole = [word for word in words if word not in encoding]
        if words[0] == "p" or (words[0] == "kv" and encoding and f"{chunk}.{'.'.join(whole)}.safetensors" in paths):
            right[path] = 1
        elif words[0] == "kv" and f"{chunk}.enc.safetensors" in paths:
            right[path] = 2
        else:
            right[path] = 3
    return right


def expect_agreement(root: Path, index: Index) -> None:
    """After a refresh, all that the index says is what the folders say."""
    index.refresh()
    there = listing(root)
    rows = index.below("obj")
    assert [one.path for one in rows] == sorted(there, key=lambda path: path.rpartition("/")[::2])
    for one in rows:
        stat = there[one.path]
        assert one.written == (stat.st_ino, stat.st_mtime_ns, stat.st_size), one.path
    assert {one.path: one.turn for one in rows} == turns(there)
    assert index.usage() == (len(there), sum(stat.st_size for stat in there.values()))
    for tenant, sums in index.usage_by_tenant().items():
        own = [stat.st_size for path, stat in there.items() if path.split("/")[1] == tenant]
        assert sums == index.usage(f"obj/{tenant}") == (len(own), sum(own))
    kinds = index.usage_by_kind()
    assert sum(objects for objects, _ in kinds.values()) == len(there)
    assert kinds.get("patch", (0, 0))[0] == sum(".p." in path for path in there)
    paged: list[IndexedObject] = []
    while page := index.below("obj", paged[-1].path if paged else "", 3):
        paged += page
    assert paged == rows


def expect_folders(root: Path, index: Index) -> None:
    """Without a refresh, one folder's rows are that folder's."""
    there = listing(root)
    for above in {path.rpartition("/")[0] for path in there}:
        own = sorted(path for path in there if path.rpartition("/")[0] == above)
        assert [one.path for one in index.in_folder(above)] == own
        key = os.path.basename(own[0]).partition(".")[0]
        assert [one.path for one in index.in_folder(above, f"{key}.p.")] == [p for p in own if f"/{key}.p." in p]


class History:
    """Random changes of a root, by its stores, by other indexes' processes and behind their backs."""

    def __init__(self, root: Path, rng: random.Random, aside: Path):
        self.root, self.rng, self.aside, self.number = root, rng, aside, 0
        self.stores = [ChunkStore(root, tenant=tenant, budget=Budget(host=0, disk=BYTES)) for tenant in TENANTS]
        self.views = [Index(str(root)), Index(str(root))]
        self.copies: list[Path] = []

    def close(self) -> None:
        for each in (*self.stores, *self.views):
            each.close()

    def put(self) -> None:
        store, id = self.rng.choice(self.stores), f"chunk {self.rng.randrange(6)}"
        encoder = np.ones(3, np.float32) if self.rng.random() < 0.4 else None
        encoding = self.rng.choice((None, None, "bfloat16", "int8"))
        store.put(chunk_of(id, self.rng.randrange(3), encoder=encoder), encoding=encoding)
        if self.rng.random() < 0.4:
            store.put_patches([patch_of(chunk_of(id), ("A",), rank=self.rng.randrange(1, 3))])

    def delete(self) -> None:
        self.rng.choice(self.stores).delete(f"chunk {self.rng.randrange(6)}", BACKBONE)

    def evict(self) -> None:
        store = self.rng.choice(self.stores)
        size = sum(stat.st_size for stat in listing(self.root).values())
        if size:
            make_room(store.disk, int(size * self.rng.uniform(0.5, 1.0)) + 1, 0, lambda chunk: False)

    def copy_in(self) -> None:
        """A file from elsewhere, under a free name of an object."""
        there = sorted(listing(self.root))
        if there:
            path = self.root / self.rng.choice(there)
            self.number += 1
            other = path.with_name(f"{self.number:064x}.kv.safetensors")
            shutil.copyfile(path, other)

    def replace_in_place(self) -> None:
        """A file that is renamed over an object, as an older release or an operator may."""
        there = sorted(listing(self.root))
        if len(there) > 1:
            first, second = self.rng.sample(there, 2)
            aside = (self.root / first).with_name("aside")
            shutil.copyfile(self.root / second, aside)
            os.rename(aside, self.root / first)

    def remove(self) -> None:
        there = sorted(listing(self.root))
        if there:
            (self.root / self.rng.choice(there)).unlink()

    def remove_folder(self) -> None:
        there = sorted(listing(self.root))
        if there:
            shutil.rmtree((self.root / self.rng.choice(there)).parent)

    def stranger(self) -> None:
        there = sorted(listing(self.root))
        if there:
            (self.root / there[0]).with_name("notes.txt").write_text("a stranger")

    def delete_tenant(self) -> None:
        if self.rng.random() < 0.2:
            self.rng.choice(self.stores).delete_tenant()

    def drop_index(self) -> None:
        for end in ("", "-wal", "-shm"):
            (self.root / f"index.sqlite{end}").unlink(missing_ok=True)
        self.reopen()

    def keep_copy(self) -> None:
        """A backup of the index, which comes back later, when much has changed."""
        copy = self.aside / f"copy {len(self.copies)}"
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(self.root / "index.sqlite")) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
            self.copies.append(copy)

    def old_copy(self) -> None:
        if self.copies:
            self.drop_index()
            shutil.copyfile(self.rng.choice(self.copies), self.root / "index.sqlite")

    def tear(self) -> None:
        """Noise in the middle of the file."""
        self.reopen()
        path = self.root / "index.sqlite"
        size = path.stat().st_size if path.exists() else 0
        if size > 8192:
            with path.open("r+b") as file:
                file.seek(self.rng.randrange(1, size // 4096) * 4096)
                file.write(self.rng.randbytes(4096))

    def reopen(self) -> None:
        """As in processes that begin."""
        for view in self.views:
            view.close()
        for store in self.stores:
            store.disk.index.close()

    def step(self) -> str:
        often = (self.put, self.put, self.put, self.delete, self.evict, self.copy_in, self.remove)
        seldom = (
            self.replace_in_place,
            self.remove_folder,
            self.stranger,
            self.delete_tenant,
            self.drop_index,
            self.keep_copy,
            self.old_copy,
            self.tear,
            self.reopen,
        )
        change = self.rng.choice(often if self.rng.random() < 0.7 else seldom)
        change()
        return change.__name__


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    (tmp_path / "aside").mkdir()
    return tmp_path / "aside"


def run_history(root: Path, aside: Path, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    history, done = History(root, rng, aside), []
    with contextlib.closing(history):
        for _ in range(steps):
            done.append(history.step())
            try:
                view = rng.choice([*history.views, history.stores[0].disk.index])
                expect_folders(root, view)
                if rng.random() < 0.4:
                    expect_agreement(root, view)
            except AssertionError as error:
                error.add_note(f"seed {seed}, after {done}")
                raise
        for view in history.views:
            expect_agreement(root, view)


@pytest.mark.parametrize("seed", [0, 3])
def test_rows_and_sums_are_those_of_a_listing(tmp_path: Path, aside: Path, seed: int):
    run_history(tmp_path / "root", aside, seed, 40)


# ----------------------------------------------------------------------------------------------------------- damage


def test_a_flipped_byte_of_the_index_loses_nothing(tmp_path: Path):
    """SQLite keeps no checksums. Whatever it reads then: no untyped error, no lost object, right after an audit."""
    rng, root = random.Random(0), tmp_path / "root"
    budget = Budget(host=0, disk=BYTES)
    with ChunkStore(root, budget=budget) as store:
        for number in range(12):
            store.put(chunk_of(str(number), number % 3))
        store.disk.index.refresh()
    held, path = set(listing(root)), root / "index.sqlite"
    whole = path.read_bytes()
    for _ in range(25):
        path.write_bytes(whole)
        with path.open("r+b") as file:
            file.seek(place := rng.randrange(len(whole)))
            file.write(bytes([whole[place] ^ 1 << rng.randrange(8)]))
        with ChunkStore(root, budget=budget) as store:
            store.put(chunk_of("new", 5))
            assert store.delete("new", BACKBONE)
            store.collect()
            assert all(store.get(str(number), BACKBONE) is not None for number in range(12)), place
            index = store.disk.index
            index.audit()
            there = listing(root)
            assert set(there) == held, place
            assert {one.path: one.size for one in index.below("obj")} == {
                path: stat.st_size for path, stat in there.items()
            }, place
            assert index.usage()[0] == len(there), place
        for end in ("-wal", "-shm"):
            (root / f"index.sqlite{end}").unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- order of eviction


def used(root: Path, path: str, when: float) -> None:
    """A use that the index is not told of: reads of other processes set the access time."""
    os.utime(root / path, ns=(int(when * 1e9), os.lstat(root / path).st_mtime_ns))


@pytest.mark.parametrize("told", ["before", "never", "half"])
def test_what_leaves_is_what_was_used_least_recently(tmp_path: Path, told: str):
    """In exact order, by class and last use, whether or not the index was told of the last uses."""
    rng, root, began = random.Random(0), tmp_path / "root", time.time() + 100
    with ChunkStore(root, budget=Budget(host=0)) as store:
        for number in range(30):
            encoder = np.ones(3, np.float32) if rng.random() < 0.3 else None
            store.put(chunk_of(str(number), number % 3, encoder=encoder))
            if rng.random() < 0.3:
                store.put(chunk_of(str(number), number % 3), encoding="bfloat16")
        paths = sorted(listing(root))

        def use(some: list[str], step: float) -> None:
            for when, path in enumerate(rng.sample(some, len(some))):
                used(root, path, began + step * (when + 0.25))

        use(paths, 1.0)
        if told != "never":
            for path in (root / "obj").rglob("*"):
                if path.is_dir():
                    os.utime(path)  # so that every folder is listed again
        store.disk.index.refresh()
        if told == "half":
            use(rng.sample(paths, len(paths) // 2), 1.0 + 2**-9)  # each at another time than all others
            assert len({stat.st_atime_ns for stat in listing(root).values()}) == len(paths)

        before = listing(root)
        order = sorted(before, key=lambda path: (turns(before)[path], before[path].st_atime_ns))
        sizes = {path: before[path].st_size for path in order}
        for share in (0.9, 0.6, 0.3):
            budget = int(share * sum(sizes.values()))
            make_room(store.disk, budget, 0, lambda chunk: False)
            left = listing(root)
            gone = [path for path in order if path not in left]
            assert gone == order[: len(gone)], f"{len(gone)} went"
            assert sum(stat.st_size for stat in left.values()) <= budget
            kept = sum(sizes[path] for path in order[max(len(gone) - 1, 0) :])
            assert kept > budget - int(0.05 * budget)  # no more than it needs
