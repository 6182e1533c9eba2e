"""What the system refuses is a typed error that changes nothing, and the store works again when it is over."""

import contextlib
import errno
import itertools
import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import index
from kvpatch_jax.store.objects import Objects
from tests.store.store_cases import SECRET, locked_index, name_of, object_of, value_of


def put(store: Objects, *numbers: int) -> None:
    assert store.put([(name_of(number), object_of(number)) for number in numbers]) == [True] * len(numbers)


def numbers_of(store: Objects) -> list[int]:
    return sorted(int(name.partition("/")[0], 16) for name in store.with_prefix(""))


@pytest.fixture
def store(folder: Path) -> Iterator[Objects]:
    """A store with one object."""
    with contextlib.closing(Objects(folder / "root", secret=SECRET, memory=0)) as store:
        put(store, 1)
        yield store


class Refusing:
    """Stands for `os` in a module of the store; one call fails."""

    def __init__(self, code: int, call: str):
        self.code, self.call = code, call

    def __getattr__(self, name: str) -> Any:
        return self.refuse if name == self.call else getattr(os, name)

    def refuse(self, *_: object, **__: object) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "call"), [(errno.ENOSPC, "open"), (errno.EROFS, "mkdir"), (errno.EIO, "rename"), (errno.EIO, "fsync")]
)
def test_a_root_that_cannot_be_made_is_made_later(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str):
    with monkeypatch.context() as patch:
        patch.setattr(index, "os", Refusing(code, call))
        patch.setattr("kvpatch_jax.store.files.os", Refusing(code, call))
        with pytest.raises(StoreError):
            Objects(folder / "root")
    with contextlib.closing(Objects(folder / "root")) as store:
        put(store, 1)


@pytest.mark.parametrize("content", ["STORE.json", "index.sqlite", "notes.txt", "data"])
def test_a_directory_of_something_else_is_left_alone(folder: Path, content: str):
    root = folder / "root"
    root.mkdir()
    (root / content).write_text("{}")
    with pytest.raises(StoreError, match="directory"):
        Objects(root)
    assert [path.name for path in root.iterdir()] == [content]
    for path in (root / content, root / content / "deeper"):
        with pytest.raises(StoreError, match=rf"store\.root: got '.*', where '.*/{content}' is a file; expected a dir"):
            Objects(path)


def test_a_root_of_another_format_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "FORMAT", index.FORMAT + 1)
        Objects(folder / "whole").close()
    Objects(folder / "index").close()
    with contextlib.closing(sqlite3.connect(folder / "index" / "index.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {index.FORMAT + 1}")
    for root in (folder / "whole", folder / "index"):
        contents = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        with pytest.raises(StoreError, match=f"format {index.FORMAT + 1}; expected {index.FORMAT}"):
            Objects(root)
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == contents


def test_a_file_system_of_the_network_or_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "file_system", lambda _: "nfs4")
        with pytest.raises(StoreError, match="nfs4"):
            Objects(folder / "root")
    assert list((folder / "root").iterdir()) == []

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(index.fcntl, "flock", refuse)
        with pytest.raises(StoreError, match="No locks"):
            Objects(folder / "root")
    Objects(folder / "root").close()


def test_many_objects_are_put_at_once_with_few_descriptors(store: Objects):
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    most = list(itertools.islice((number for number in itertools.count() if number not in taken), 100))[-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        put(store, *range(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert numbers_of(store) == list(range(150))


def test_an_index_that_another_process_locks(store: Objects, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    store = Objects(store.root, secret=SECRET, memory=0)
    with locked_index(store.root):
        for write in (lambda: put(store, 2), lambda: store.delete(f"{1:032x}")):
            with pytest.raises(StoreError, match="locked"):
                write()
        assert store.get(name_of(1), value_of) == 1
        assert len([path for path in Path(store.root, "data").rglob("*") if path.is_file()]) == 1
    put(store, 2)
    assert numbers_of(store) == [1, 2]
    store.close()


def test_a_root_that_is_removed_while_it_is_open(folder: Path):
    """Not even memory answers for the root that takes its place."""
    root, options = folder / "root", {"secret": SECRET, "memory": 1 << 20}
    old = Objects(root, **options)
    put(old, 1)
    assert old.get(name_of(1), value_of) == 1
    shutil.rmtree(root)
    for write in (lambda: put(old, 2), lambda: old.delete(f"{1:032x}")):
        with pytest.raises(StoreError, match=r"removed|No such file"):
            write()
    with pytest.raises(StoreError, match=r"No such file|unable to open"):
        old.put_async(name_of(3), lambda: object_of(3), 400).result()
    assert not root.exists()
    new = Objects(root, **options)
    new.put([(name_of(1), object_of(20))])
    assert new.get(name_of(1), value_of) == 20
    assert old.get(name_of(1), value_of) != 20
    with pytest.raises(StoreError, match="removed"):
        put(old, 2)
    with contextlib.suppress(StoreError):
        old.close()
    assert numbers_of(new) == [1]
    new.close()
