"""A rotation encrypts all of a tenant again; nothing is lost or read wrong, wherever it stops and whoever works on."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from store_cases import BACKBONE, chunk_of, file_of, name_of, patch_of, same, same_chunk
from store_child import KEY, NEW_KEY
from store_processes import processes, wait_until

from kvpatch_jax.errors import StoreKeyError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    DynamicLibrary,
    KeyValueStore,
    StaticLibrary,
    rotate_key,
)
from kvpatch_jax.store.disk.key_check import KeyState, read_keys
from kvpatch_jax.store.format.buffers import Buffers
from kvpatch_jax.store.format.codec import chunk_blob
from kvpatch_jax.store.format.encryption import AesGcm

THIRD = b"t" * 32
PATCH = patch_of(chunk_of())
ENCODER = np.arange(21, dtype=np.float32).reshape(3, 7)
EXPIRES = 4e9


def check_of(key: bytes) -> str:
    return AesGcm(key, "default", Buffers()).check


def opened(root: Path, key: bytes | None = NEW_KEY, **more: Any) -> ChunkStore:
    return ChunkStore(root, key=key, budget=Budget(host=0), **more)


def fill(root: Path, key: bytes | None = KEY) -> int:
    """One object of each kind, one with a revision and an expiry. Returns the number of objects and floors."""
    with opened(root, key) as store:
        store.put(chunk_of())
        store.put(chunk_of(), encoding="int8")
        store.put_encoder("B", BACKBONE, ENCODER)
        store.put_patches([PATCH])
        blob = dataclasses.replace(chunk_blob(chunk_of("C")), revision=12345, expires=EXPIRES)
        name = name_of(store, chunk_of("C"))
        store.disk.put(name, store.disk.encryption.sealed(blob, name.file))
        StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
        DynamicLibrary(store).publish("NAME", "a reference", kind="TEXT")
    return 7


def set_aside(root: Path, key: bytes | None = KEY) -> None:
    """Moves an intact object to quarantine, as a faulty reader does."""
    with opened(root, key) as store:
        store.put(chunk_of("aside"))
        path, status = name_of(store, chunk_of("aside")), file_of(store, chunk_of("aside")).stat()
        file = status.st_ino, status.st_ctime_ns, status.st_size
        assert store.disk.quarantine(path, file, "a faulty reader")


def expect_all(root: Path, key: bytes = NEW_KEY) -> None:
    """All of `fill` is there for the key, and nothing but that has any key."""
    with opened(root, key) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        assert store.get("B", BACKBONE, encoding="int8") is not None
        found = store.get_encoder("B", BACKBONE)
        assert found is not None
        assert same(found, ENCODER)
        (patch,) = store.get_patches(PATCH.metadata)
        assert same(patch.factors["k"][0], PATCH.factors["k"][0])  # pyright: ignore
        assert same_chunk(store.get("C", BACKBONE), chunk_of("C"))
        text = StaticLibrary(store, quota=1 << 20).get("TEXT", "NAME")
        assert text is not None
        assert text.content == "a text"
        reference = DynamicLibrary(store).open("TEXT", "NAME")
        assert reference is not None
        assert store.counters["quarantined"] == store.counters["unsealed"] == 0
        metadata = metadata_of(file_of(store, chunk_of("C")))
        assert (metadata["revision"], metadata["expires"]) == ("12345", repr(EXPIRES))
        assert read_keys(str(root), store.names.space) == KeyState(check_of(key))
    assert states(root) == {check_of(key)}
    for other in {KEY, NEW_KEY, THIRD, None} - {key}:
        with pytest.raises(StoreKeyError):
            opened(root, other)


def metadata_of(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def objects(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.safetensors") if path.parent.name != "tmp"]


def states(root: Path) -> set[str | None]:
    """The keys of all objects and quarantined files, by their check values."""
    return {json.loads(metadata_of(path)["body"]).get("check") for path in objects(root)}


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_rotation_encrypts_everything_again(tmp_path: Path):
    count = fill(tmp_path)
    set_aside(tmp_path)
    assert states(tmp_path) == {check_of(KEY)}
    os.utime(
        file := next(path for path in objects(tmp_path) if ".p." in path.name), ns=(10**18, file.stat().st_mtime_ns)
    )
    report = rotate_key(tmp_path, old=KEY, new=NEW_KEY)
    assert (report.objects, report.dropped, report.left, report.finished) == (count, 1, [], True)
    assert file.stat().st_atime_ns == 10**18
    expect_all(tmp_path)
    before = files_of(tmp_path)
    again = rotate_key(tmp_path, old=KEY, new=NEW_KEY)
    assert (again.objects, again.finished) == (0, True)
    assert files_of(tmp_path) == before


def test_what_is_not_encrypted_yet_is_encrypted(tmp_path: Path):
    fill(tmp_path, None)
    with opened(tmp_path, None) as plain:
        assert rotate_key(tmp_path, old=None, new=NEW_KEY).finished
        with pytest.raises(StoreKeyError):
            plain.put(chunk_of("later"))
        with pytest.raises(StoreKeyError):
            plain.get("B", BACKBONE)
    expect_all(tmp_path)


@pytest.mark.parametrize("old", [THIRD, None], ids=["another", "none"])
def test_a_wrong_old_key_changes_nothing(tmp_path: Path, old: bytes | None):
    fill(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(StoreKeyError, match="expected the one of this tenant's objects"):
        rotate_key(tmp_path, old=old, new=NEW_KEY)
    for path in tmp_path.rglob("KEY*"):
        path.unlink()
        before.pop(str(path.relative_to(tmp_path)))
    with pytest.raises(StoreKeyError, match="expected the one of this tenant's objects"):
        rotate_key(tmp_path, old=old, new=NEW_KEY)
    assert files_of(tmp_path) == before
    assert rotate_key(tmp_path, old=KEY, new=NEW_KEY).finished
    expect_all(tmp_path)


# ----------------------------------------------------------------------------------------------------- interruptions


class Stop(BaseException):
    """Ends a rotation."""


def interrupted(root: Path, after: int, old: bytes | None = KEY, new: bytes = NEW_KEY) -> None:
    """A rotation that ends after so many objects."""

    def some(entries: list[Any]):
        yield from entries[:after]
        raise Stop

    with pytest.raises(Stop):
        rotate_key(root, old=old, new=new, progress=some)


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupted_rotation_is_taken_up(tmp_path: Path, after: int):
    count = fill(tmp_path)
    interrupted(tmp_path, after)
    with pytest.raises(StoreKeyError, match="another rotation"):
        rotate_key(tmp_path, old=THIRD, new=NEW_KEY)
    with pytest.raises(StoreKeyError):
        rotate_key(tmp_path, old=KEY, new=THIRD)
    assert rotate_key(tmp_path, old=KEY, new=NEW_KEY).objects == count - after
    expect_all(tmp_path)


def readable_by_one_key(root: Path) -> None:
    """After a kill: each chunk is right for exactly one of the keys, or for the one that may open the root."""
    stores: list[ChunkStore] = []
    for key in (KEY, NEW_KEY):
        with contextlib.suppress(StoreKeyError):
            stores.append(opened(root, key))
    assert stores
    for id in ("B", "C"):
        found = []
        for store in stores:
            with contextlib.suppress(StoreKeyError):
                found.append(store.get(id, BACKBONE))
        assert len(found) == 1
        assert same_chunk(found[0], chunk_of(id))
    for store in stores:
        assert store.counters["quarantined"] == 0
        store.close()


def killed_at(original: Path, root: Path, at: int) -> int:
    """Kills a rotation at its call number `at`, checks the root, and ends it. Returns the number of calls, or 0."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(original, root)
    process = processes().start("rotate", root, at=at)
    wait_until(lambda: not process.alive)
    assert process.error == ""
    readable_by_one_key(root)
    assert rotate_key(root, old=KEY, new=NEW_KEY).finished
    expect_all(root)
    return int(process.spoken or 0)


@pytest.mark.slow
def test_a_rotation_that_is_killed_loses_nothing(tmp_path: Path):
    kills = 8
    fill(tmp_path / "original")
    set_aside(tmp_path / "original")
    calls = killed_at(tmp_path / "original", tmp_path / "root", -1)
    assert calls > 300
    for number in range(kills):
        at = (2 * number + 1) * calls // (2 * kills)
        assert killed_at(tmp_path / "original", tmp_path / "root", at) == 0


# ------------------------------------------------------------------------------------------------------------- others


@pytest.mark.slow
def test_readers_and_writers_of_either_key_get_what_is_right_or_a_typed_error(tmp_path: Path):
    ids = [f"I{number}" for number in range(12)]
    with opened(tmp_path, KEY) as store:
        for id in ids:
            store.put(chunk_of(id))
    first, last = opened(tmp_path, KEY), threading.Event()
    wrong: list[str] = []
    done: dict[str, int] = {"old": 0, "new": 0, "refused": 0, "put": 0}
    acknowledged: set[str] = set()

    def use(word: str, make: Callable[[], ChunkStore]) -> None:
        store = None
        for number in itertools.count():
            if last.is_set():
                break
            id = ids[number % len(ids)]
            try:
                store = make() if store is None else store
                if number % 5 == 4:
                    fresh = f"{word}{number}"
                    store.put(chunk_of(fresh))
                    acknowledged.add(fresh)
                    done["put"] += 1
                found = store.get(id, BACKBONE)
                done[word] += 1
                if not same_chunk(found, chunk_of(id)):
                    wrong.append(f"{word} {id} {found}")
            except StoreKeyError:
                done["refused"] += 1
        if store is not None:
            store.close()

    threads = [threading.Thread(target=use, args=("old", lambda: first))]
    threads += [threading.Thread(target=use, args=("new", lambda: opened(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: done["old"] > 20 and done["put"] > 3)
    report = rotate_key(tmp_path, old=KEY, new=NEW_KEY)
    seen = done["new"]
    wait_until(lambda: done["new"] > seen + 20)
    last.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert report.finished
    assert min(done.values()) > 0
    assert states(tmp_path) == {check_of(NEW_KEY)}
    with opened(tmp_path) as store:
        assert all(same_chunk(store.get(id, BACKBONE), chunk_of(id)) for id in [*ids, *acknowledged])


def test_a_remote_store_is_rotated_too(tmp_path: Path):
    spec, context = {"driver": "memory", "path": "store/"}, tensorstore.Context()
    remote = KeyValueStore(spec, context=context)
    service = tensorstore.KvStore.open(spec, context=context).result()
    common: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote}
    with opened(tmp_path / "one", KEY, **common) as one:
        one.put(chunk_of())
        one.put_patches([PATCH])
        path = name_of(one, chunk_of()).path
    report = rotate_key(tmp_path / "one", old=KEY, new=NEW_KEY, secret=common["secret"], remote=remote)
    assert (report.objects, report.remote, report.finished) == (2, 2, True)
    with opened(tmp_path / "two", **common) as two:
        assert same_chunk(two.get("B", BACKBONE), chunk_of())
        assert len(two.get_patches(PATCH.metadata)) == 1

    # The root alone first; then what is damaged there keeps its key, and is named.
    more: dict[str, Any] = {"old": NEW_KEY, "new": KEY, "secret": common["secret"]}
    assert rotate_key(tmp_path / "one", **more).finished
    good = bytes(service.read(path).result().value)
    service.write(path, good[:-1] + bytes([good[-1] ^ 1])).result()
    report = rotate_key(tmp_path / "one", **more, remote=remote)
    assert (report.remote, report.left, report.finished) == (1, [path], False)
    service.write(path, good).result()
    report = rotate_key(tmp_path / "one", **more, remote=remote)
    assert (report.remote, report.left, report.finished) == (1, [], True)
    with opened(tmp_path / "three", KEY, **common) as three:
        assert same_chunk(three.get("B", BACKBONE), chunk_of())


# ------------------------------------------------------------------------------------------------------- command line
