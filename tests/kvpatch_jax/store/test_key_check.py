"""The key check of an encrypted tenant: damaged or gone it locks nobody out, and lets nobody else in."""

import concurrent.futures
import json
import threading
from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import InputError, StoreCorruptError, StoreKeyError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk import root_config
from kvpatch_jax.store.disk.key_check import KeyState, changing_keys, check_key, read_keys, write_keys
from kvpatch_jax.store.disk.root_config import secret_of

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


@pytest.mark.parametrize("state", ["rotating", pytest.param("settled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["KEY", pytest.param("KEY.copy", marks=pytest.mark.slow)])
def test_no_damage_of_one_file_loses_what_both_state(tmp_path: Path, which: str, state: str):
    check, copy = filled(tmp_path)
    space = str(check.parent.relative_to(tmp_path))
    if state == "rotating":
        with changing_keys(str(tmp_path), space):
            write_keys(str(tmp_path), space, KeyState("n" * 32, checks(space, tmp_path)))
    good, damaged = check.read_bytes(), check.with_name(which)
    assert copy.read_bytes() == good
    value = json.loads(good)["retiring" if state == "rotating" else "check"]
    for raw in damages(good):
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


def test_no_flip_of_both_files_locks_the_owner_of_objects_out(tmp_path: Path):
    check, copy = filled(tmp_path)
    good = check.read_bytes()
    for at in range(0, len(good), 5):
        for path in (check, copy):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(StoreKeyError):
            opened(tmp_path, OTHER_KEY)
        with opened(tmp_path) as store:
            assert same_chunk(store.get("B", BACKBONE), chunk_of())
        assert (check.read_bytes(), copy.read_bytes()) == (good, good)


@pytest.mark.parametrize("with_copy", [True, False])
def test_the_bare_value_of_the_version_before_is_read_and_replaced_on_opening(tmp_path: Path, with_copy: bool):
    check, copy = filled(tmp_path)
    good = check.read_bytes()
    bare = json.loads(good)["check"].encode()
    for bit in (None, *range(0, 256, 9)):
        raw = bytearray(bare)
        if bit is not None:
            raw[bit // 8] ^= 1 << bit % 8
        check.write_bytes(raw)
        if not with_copy:
            copy.unlink()
        with pytest.raises(StoreKeyError):
            opened(tmp_path, OTHER_KEY)
        with opened(tmp_path) as store:
            assert same_chunk(store.get("B", BACKBONE), chunk_of())
        assert (check.read_bytes(), copy.read_bytes()) == (good, good)


def test_a_put_leaves_the_bare_value_beside_an_intact_copy(tmp_path: Path):
    """Libraries of the version before, which share the root, write it: neither replaces the other's at each put."""
    check, copy = filled(tmp_path)
    good = copy.read_bytes()
    with opened(tmp_path) as store:
        bare = json.loads(good)["check"].encode()
        check.write_bytes(bare)
        store.put(chunk_of("C"))
        assert (check.read_bytes(), copy.read_bytes()) == (bare, good)
        copy.unlink()  # now nothing has a digest
        store.put(chunk_of("D"))
        assert (check.read_bytes(), copy.read_bytes()) == (good, good)


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


def test_a_damaged_key_check_is_reported(tmp_path: Path):
    check, _ = filled(tmp_path)
    check.write_text("x" * 32)
    with pytest.raises(StoreKeyError, match="KEY is damaged"):
        opened(tmp_path, OTHER_KEY)


def test_a_library_entry_states_the_key_too(tmp_path: Path):
    with opened(tmp_path) as store:
        StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
    for path in list(tmp_path.rglob("KEY*")):
        path.unlink()
    with pytest.raises(StoreKeyError):
        opened(tmp_path, OTHER_KEY)


def test_a_root_of_an_older_version_gets_a_copy_when_it_is_opened(tmp_path: Path):
    check, copy = filled(tmp_path)
    good = check.read_bytes()
    copy.unlink()
    opened(tmp_path).close()
    assert (check.read_bytes(), copy.exists()) == (good, True)
    copy.unlink()
    with pytest.raises(StoreKeyError, match="another key"):
        opened(tmp_path, OTHER_KEY)
    assert not copy.exists()


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


def test_a_first_key_is_not_noted_over_plain_entries(tmp_path: Path):
    with opened(tmp_path, None) as plain:
        StaticLibrary(plain, quota=1 << 20).put("NAME", "a text", kind="TEXT")
    with pytest.raises(StoreKeyError, match="old=None, new=key"):
        opened(tmp_path)
    assert list(tmp_path.rglob("KEY*")) == []


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


def test_of_secrets_generated_at_once_one_wins(tmp_path: Path):
    ready = threading.Barrier(8)

    def opened_at_once(_: int) -> bytes:
        ready.wait(60)
        return secret_of(str(tmp_path))

    (tmp_path / "obj").mkdir()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(opened_at_once, range(8)))) == 1
    assert (tmp_path / "STORE.json").read_bytes() == (tmp_path / "STORE.copy.json").read_bytes()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["chunk", "entry"])
def test_no_secret_is_generated_over_objects(tmp_path: Path, key: bytes | None, kind: str):
    with opened(tmp_path, key) as store:
        if kind == "chunk":
            store.put(chunk_of())
        else:
            StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
    for name in ("STORE.json", "STORE.copy.json"):
        (tmp_path / name).unlink()
    before = files_of(tmp_path)
    ready = threading.Barrier(4)

    def refused(_: int) -> bool:
        ready.wait(60)
        with pytest.raises(StoreCorruptError, match="named by its secret"):
            opened(tmp_path, key)
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(refused, range(4)))
    assert files_of(tmp_path) == before


def test_a_secret_that_is_generated_while_objects_are_written_is_found(tmp_path: Path, monkeypatch):
    """Another process generates it and writes objects between the two looks of this one."""
    look, others = root_config.find_secret, list[bytes]()

    def late(root: str, **more: bool) -> bytes | None:
        found = look(root, **more)
        if found is None and not others:
            monkeypatch.setattr(root_config, "find_secret", look)
            with ChunkStore(tmp_path) as store:
                store.put(chunk_of())
                others.append(store.names.secret)
        return found

    monkeypatch.setattr(root_config, "find_secret", late)
    with ChunkStore(tmp_path) as store:
        assert [store.names.secret] == others
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
