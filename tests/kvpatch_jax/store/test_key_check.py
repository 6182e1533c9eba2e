"""The key check of an encrypted tenant: damaged or gone it locks nobody out, and lets nobody else in."""

import json
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import InputError, StoreKeyError, StoreVersionError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.cli.main import main

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
    assert check.read_text() == json.loads(copy.read_text())["check"]


def test_no_flip_of_the_key_check_locks_its_owner_out(tmp_path: Path):
    check, copy = filled(tmp_path)
    good = check.read_bytes()
    assert len(good) == 32  # as older versions read it
    for with_copy in (True, False):
        for bit in range(0, 256, 9):
            raw = bytearray(good)
            raw[bit // 8] ^= 1 << bit % 8
            check.write_bytes(raw)
            if not with_copy:
                copy.unlink()
            with opened(tmp_path) as store:
                assert same_chunk(store.get("B", BACKBONE), chunk_of())
            assert check.read_bytes() == good
            assert copy.exists()


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


def test_a_key_check_of_a_later_version_stays(tmp_path: Path):
    _, copy = filled(tmp_path)
    text = json.dumps({"version": 2, "checks": []})
    copy.write_text(text)
    with pytest.raises(StoreVersionError):
        opened(tmp_path)
    assert copy.read_text() == text


def test_a_tenant_with_plain_objects_may_add_a_key(tmp_path: Path):
    with opened(tmp_path, None) as plain:
        plain.put(chunk_of("plain"))
        plain.put_encoder("plain", BACKBONE, np.ones(3, np.float32))
    with opened(tmp_path) as store:
        store.put(chunk_of())
    expect_owner_alone(tmp_path)


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
