"""The key check of an encrypted tenant: damaged or gone it locks nobody out, and lets nobody else in."""

import concurrent.futures
import json
import threading
from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import InputError, StoreKeyError
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk.key_check import KeyState, changing_keys, check_key, read_keys, write_keys

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def opened(root: Path, key: bytes | None = KEY, **more) -> ChunkStore:
    return ChunkStore(root, key=key, budget=Budget(host=0), **more)


def filled(root: Path) -> tuple[Path, Path]:
    """A root with an object of the owner's. Its key check and the copy."""
    with opened(root) as store:
        store.put(chunk_of())
        space = root / store.names.space
    return space / "KEY", space / "KEY.copy"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def expect_owner_alone(root: Path) -> None:
    """Other keys, and none, open nothing and change nothing; the owner reads, after which both files are whole."""
    before = files_of(root)
    for key in (OTHER_KEY, None):
        with pytest.raises(StoreKeyError, match="expected the one of this tenant's objects"):
            opened(root, key)
    assert files_of(root) == before
    with opened(root) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
    check, copy = (next(root.rglob(name)) for name in ("KEY", "KEY.copy"))
    assert check.read_text() == copy.read_text()


def damages(good: bytes) -> list[bytes | None]:
    """A file without any one of its bytes, with a bit of it flipped, and cut before it; None: no file."""
    damaged: list[bytes | None] = [None]
    for at in range(len(good)):
        flipped = bytes([good[at] ^ 1 << at % 8])
        damaged += [good[:at] + good[at + 1 :], good[:at] + flipped + good[at + 1 :], good[:at]]
    return damaged


@pytest.mark.parametrize(("which", "state"), [("KEY", "rotating"), ("KEY.copy", "settled")])
def test_no_damage_of_one_file_loses_what_both_state(tmp_path: Path, which: str, state: str):
    check, copy = filled(tmp_path)
    space = str(check.parent.relative_to(tmp_path))
    if state == "rotating":
        with changing_keys(str(tmp_path), space):
            write_keys(str(tmp_path), space, KeyState("n" * 32, checks(space, tmp_path)))
    good, damaged = check.read_bytes(), check.with_name(which)
    assert copy.read_bytes() == good
    value = json.loads(good)["retiring" if state == "rotating" else "check"]
    for raw in damages(good)[::7]:
        damaged.unlink(missing_ok=True)
        if raw is not None:
            damaged.write_bytes(raw)
        with pytest.raises(StoreKeyError):
            check_key(str(tmp_path), space, "another value".ljust(32), note=False)
        with pytest.raises(StoreKeyError):
            check_key(str(tmp_path), space, None)
        check_key(str(tmp_path), space, value)
        assert (check.read_bytes(), copy.read_bytes()) == (good, good)


def checks(space: str, root: Path) -> str:
    state = read_keys(str(root), space)
    assert state is not None
    return state.current


@pytest.mark.parametrize("gone", [("KEY",), ("KEY.copy",), ("KEY", "KEY.copy")], ids=["check", "copy", "both"])
@pytest.mark.parametrize("how", ["gone", "damaged", "empty"])
def test_a_damaged_or_missing_key_check_is_repaired_for_its_owner_only(tmp_path: Path, gone, how: str):
    check, _ = filled(tmp_path)
    for name in gone:
        path = check.with_name(name)
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(b"" if how == "empty" else bytes([path.read_bytes()[0] ^ 1, *path.read_bytes()[1:]]))
    expect_owner_alone(tmp_path)


def test_a_first_key_is_not_noted_over_plain_objects(tmp_path: Path):
    """They would all be misses from then on."""
    with opened(tmp_path, None) as plain, opened(tmp_path) as waiting:
        plain.put(chunk_of("plain"))
        before = files_of(tmp_path)
        with pytest.raises(StoreKeyError, match="old=None, new=key"):
            opened(tmp_path)
        with pytest.raises(StoreKeyError, match="old=None, new=key"):
            waiting.put(chunk_of())  # opened before there were any
        assert files_of(tmp_path) == before
        assert same_chunk(plain.get("plain", BACKBONE), chunk_of("plain"))


def test_of_first_keys_at_once_one_wins(tmp_path: Path):
    keys = [bytes([65 + number]) * 32 for number in range(6)]
    stores = [opened(tmp_path, key) for key in keys]
    ready = threading.Barrier(len(keys))

    def put(store: ChunkStore) -> bool:
        ready.wait(60)
        try:
            store.put(chunk_of())
        except StoreKeyError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(len(keys)) as pool:
        done = list(pool.map(put, stores))
    assert done.count(True) == 1
    for store, won in zip(stores, done, strict=True):
        store.close()
        assert not won or read_keys(str(tmp_path), store.names.space) == KeyState(str(store.disk.encryption.check))
    with opened(tmp_path, keys[done.index(True)]) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())


# --------------------------------------------------------------------------------------------------- the names' secret


def test_another_secret_than_the_roots_own_is_refused(tmp_path: Path, capsys):
    with ChunkStore(tmp_path) as store:
        store.put(chunk_of())
        own = store.names.secret
    before = files_of(tmp_path)
    with pytest.raises(InputError, match="another secret"):
        ChunkStore(tmp_path, secret=b"the secret of another root")
    assert files_of(tmp_path) == before
    with ChunkStore(tmp_path, secret=own) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
    wrong = tmp_path.parent / f"{tmp_path.name}.secret"
    wrong.write_bytes(b"the secret of another root")
    assert main(["ls", f"--root={tmp_path}", "--tenant=default", f"--secret-file={wrong}"]) == 2
    assert "another secret" in capsys.readouterr().err


def test_a_secret_opens_a_root_whose_own_is_damaged(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        store.put(chunk_of())
        own = store.names.secret
    for name in ("STORE.json", "STORE.copy.json"):
        (tmp_path / name).write_text("{")
    with ChunkStore(tmp_path, secret=own) as store:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
