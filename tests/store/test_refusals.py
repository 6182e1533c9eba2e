"""What the system refuses is a typed error that changes nothing, and the store works again when it is over."""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import index
from kvpatch_jax.store.objects import Objects
from tests.store.store_cases import SECRET, locked_index, name_of, object_of, value_of


def put(store: Objects, number: int) -> None:
    assert store.put([(name_of(number), object_of(number))]) == [True]


def test_a_directory_of_something_else_is_left_alone(folder: Path):
    root = folder / "root"
    root.mkdir()
    (root / "notes.txt").write_text("{}")
    for path in (root, root / "notes.txt", root / "notes.txt" / "deeper"):
        with pytest.raises(StoreError, match="directory"):
            Objects(path)
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_a_root_of_another_format_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "FORMAT", index.FORMAT + 1)
        Objects(folder / "whole").close()
    Objects(folder / "index").close()
    with contextlib.closing(sqlite3.connect(folder / "index" / "index.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {index.FORMAT + 1}")
    (folder / "whole" / "index.sqlite").unlink()  # its secret says it too
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in ("whole", "index"):
        with pytest.raises(StoreError, match=f"format {index.FORMAT + 1}; expected {index.FORMAT}"):
            Objects(folder / name)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == contents


def test_an_index_that_another_process_locks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    with contextlib.closing(Objects(folder / "root", memory=0)) as store:
        put(store, 1)
        with locked_index(store.root):
            for write in (lambda: put(store, 2), lambda: store.delete(f"{1:032x}")):
                with pytest.raises(StoreError, match="locked"):
                    write()
            assert store.get(name_of(1), value_of) == 1
            assert len([path for path in Path(store.root, "data").rglob("*") if path.is_file()]) == 1
        put(store, 2)
        assert store.with_prefix("") == [name_of(1), name_of(2)]


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
    assert new.with_prefix("") == [name_of(1)]
    new.close()
