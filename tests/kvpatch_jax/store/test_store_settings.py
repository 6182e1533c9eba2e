"""What a root says about itself: its secret is found to be damaged, mended from its copy, and never made up anew."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from failing_system import read_only
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import StoreCorruptError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, load_snapshot, save_snapshot

NO_MEMORY = Budget(host=0)
FIRST, SECOND = "STORE.json", "STORE.copy.json"


def opened(root: Path, **more) -> ChunkStore:
    return ChunkStore(root, budget=NO_MEMORY, **more)


def filled(root: Path, count: int = 1) -> Path:
    with opened(root) as store:
        for number in range(count):
            store.put(chunk_of(f"B{number}", number))
    return root


def serves(root: Path, count: int = 1, **more) -> bool:
    with opened(root, **more) as store:
        return all(same_chunk(store.get(f"B{n}", BACKBONE), chunk_of(f"B{n}", n)) for n in range(count))


def damages(raw: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    at = rng.randrange(len(raw))
    kinds: list[Callable[[], bytes]] = [
        lambda: raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :],
        lambda: raw[:at],
        lambda: raw[:at] + bytes(rng.randrange(1, 9)) + raw[at:],
        lambda: raw[:at] + bytes(len(raw) - at),
        lambda: raw + bytes([rng.randrange(256)]),
        lambda: raw[:at] + raw[at + 1 :],
        lambda: b"",
        lambda: rng.randbytes(len(raw)),
    ]
    return kinds[seed % len(kinds)]()


def test_every_flip_of_one_file_is_mended_from_the_other(tmp_path: Path):
    root = filled(tmp_path / "store")
    good = {name: (root / name).read_bytes() for name in (FIRST, SECOND)}
    for name, raw in good.items():
        for bit in range(0, 8 * len(raw), 19):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            (root / name).write_bytes(changed)
            with opened(root) as store:
                assert store.contains("B0", BACKBONE), (name, bit)
            assert (root / name).read_bytes() == raw
    assert serves(root)


@pytest.mark.parametrize("both", [False, True])
def test_no_damage_is_silent(tmp_path: Path, both: bool):
    """Mended, or refused; never a store in which everything is a miss."""
    root = filled(tmp_path / "store")
    good = {name: (root / name).read_bytes() for name in (FIRST, SECOND)}
    outcomes = {"good": 0, "refused": 0}
    for seed in range(120):
        for name, raw in good.items():
            (root / name).write_bytes(damages(raw, seed) if both or name == FIRST else raw)
        try:
            with opened(root) as store:
                assert store.contains("B0", BACKBONE), seed
            outcomes["good"] += 1
        except StoreCorruptError:
            outcomes["refused"] += 1
    assert outcomes["refused" if not both else "good"] == 0


@pytest.mark.parametrize("lost", [[FIRST], [SECOND], [FIRST, SECOND]], ids=str)
@pytest.mark.parametrize("holds", ["chunk", "entry"])
def test_no_secret_is_made_up_over_objects(tmp_path: Path, lost: list[str], holds: str):
    root = tmp_path / "store"
    with opened(root) as store:
        if holds == "chunk":
            store.put(chunk_of())
        else:
            StaticLibrary(store, quota=1 << 20).put("DOC", "text")
        secret = store.names.secret
    for name in lost:
        (root / name).unlink(missing_ok=True)
    if len(lost) == 1:
        with opened(root) as store:
            assert store.names.secret == secret
        assert (root / lost[0]).exists()
        return
    before = sorted(os.listdir(root))
    with pytest.raises(StoreCorruptError, match=r"STORE\.json.*expected"):
        opened(root)
    assert sorted(os.listdir(root)) == before
    with opened(root, secret=secret) as store:  # who has it may say it
        assert store.contains("B", BACKBONE) == (holds == "chunk")


def test_a_root_without_objects_gets_a_secret(tmp_path: Path):
    with opened(tmp_path) as store:
        store.put(chunk_of("B0"))
        store.delete_tenant()
    for name in (FIRST, SECOND):
        (tmp_path / name).unlink()
    filled(tmp_path)
    assert serves(tmp_path)


def test_an_old_file_without_a_checksum_is_opened_and_written_again(tmp_path: Path):
    root = filled(tmp_path)
    secret = json.loads((root / FIRST).read_text())["secret"]
    (root / SECOND).unlink()
    (root / FIRST).write_text(json.dumps({"version": 1, "secret": secret}))
    assert serves(root)
    texts = [(root / name).read_bytes() for name in (FIRST, SECOND)]
    assert texts[0] == texts[1]
    (root / FIRST).write_text(json.dumps({"version": 1, "secret": "00" * 32}))  # no checksum vouches for this
    assert serves(root)


def test_two_files_of_two_secrets_are_refused(tmp_path: Path):
    one, other = filled(tmp_path / "one"), filled(tmp_path / "other")
    shutil.copy(one / SECOND, other / SECOND)
    with pytest.raises(StoreCorruptError, match="expected"):
        opened(other)


def test_a_root_that_may_only_be_read_is_not_mended_and_serves(tmp_path: Path):
    root = filled(tmp_path)
    (root / FIRST).write_bytes(b"{")
    with read_only():
        assert serves(root)
    assert (root / FIRST).read_bytes() == b"{"


# ------------------------------------------------------------------------------------------------- whole snapshots


@pytest.mark.parametrize("copy", [False, True])
def test_a_whole_snapshot_brings_the_secret_along(tmp_path: Path, copy: bool):
    root = filled(tmp_path / "store", 3)
    save_snapshot(root, tmp_path / "snapshot", copy=copy)
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "new").objects == 3
    assert serves(tmp_path / "new", 3)


def test_no_damage_of_a_snapshots_secret_is_silent(tmp_path: Path):
    root = filled(tmp_path / "store", 2)
    save_snapshot(root, tmp_path / "snapshot")
    good = {name: (tmp_path / "snapshot" / name).read_bytes() for name in (FIRST, SECOND)}
    refused = 0
    for seed in range(60):
        for name, raw in good.items():
            if seed % 3 != (0 if name == FIRST else 1):
                (tmp_path / "snapshot" / name).write_bytes(damages(raw, seed))
            else:
                (tmp_path / "snapshot" / name).write_bytes(raw)
        new = tmp_path / f"new{seed}"
        try:
            summary = load_snapshot(tmp_path / "snapshot", new, skip_damaged=True)
        except (StoreSnapshotError, StoreCorruptError):
            assert not list(new.glob("obj/*"))
            refused += 1
        else:
            assert summary.objects == 2
            assert serves(new, 2)
        shutil.rmtree(new, ignore_errors=True)
    assert refused == 20


def test_a_snapshot_without_its_secret_is_refused(tmp_path: Path):
    root = filled(tmp_path / "store", 2)
    secret = json.loads((root / FIRST).read_text())["secret"]
    save_snapshot(root, tmp_path / "snapshot")
    for name in (FIRST, SECOND):
        (tmp_path / "snapshot" / name).unlink()
    for skip in (False, True):
        with pytest.raises(StoreSnapshotError, match=r"STORE\.json.*expected"):
            load_snapshot(tmp_path / "snapshot", tmp_path / "new", skip_damaged=skip)
        assert not list(tmp_path.glob("new/obj/*"))
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "new", secret=bytes.fromhex(secret)).objects == 2
    assert serves(tmp_path / "new", 2, secret=bytes.fromhex(secret))


def test_another_secret_in_a_snapshot_is_refused(tmp_path: Path):
    root, other = filled(tmp_path / "store", 2), filled(tmp_path / "other")
    save_snapshot(root, tmp_path / "snapshot")
    for name in (FIRST, SECOND):
        shutil.copy(other / name, tmp_path / "snapshot" / name)
    with pytest.raises(StoreSnapshotError, match=r"STORE\.json.*expected"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "new")
    assert not list(tmp_path.glob("new/obj/*"))


def test_a_store_with_an_external_secret_is_restored_whole(tmp_path: Path):
    secret = b"from outside, 16 bytes or more"
    with opened(tmp_path / "store", secret=secret) as store:
        store.put(chunk_of("B0"))
    save_snapshot(tmp_path / "store", tmp_path / "snapshot")
    with pytest.raises(StoreSnapshotError, match=r"secret.*expected"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "new")
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "new", secret=secret).objects == 1
    with opened(tmp_path / "new", secret=secret) as store:
        assert same_chunk(store.get("B0", BACKBONE), chunk_of("B0"))


def test_a_root_that_lost_its_secret_gets_it_back_from_its_snapshot(tmp_path: Path):
    root = filled(tmp_path / "store", 3)
    save_snapshot(root, tmp_path / "snapshot")
    for name in (FIRST, SECOND):
        (root / name).unlink(missing_ok=True)
    assert load_snapshot(tmp_path / "snapshot", root).skipped == 3
    assert serves(root, 3)
    for name in (FIRST, SECOND):
        (root / name).write_bytes(b"damaged")
    assert load_snapshot(tmp_path / "snapshot", root).skipped == 3
    assert serves(root, 3)


def test_a_root_with_other_objects_does_not_adopt_a_snapshots_secret(tmp_path: Path):
    root, other = filled(tmp_path / "store", 3), filled(tmp_path / "other", 2)
    save_snapshot(root, tmp_path / "snapshot")
    for name in (FIRST, SECOND):
        (other / name).unlink()
    with pytest.raises(StoreSnapshotError, match="expected"):
        load_snapshot(tmp_path / "snapshot", other)
    assert not (other / FIRST).exists()


def test_an_older_snapshot_is_taken_over(tmp_path: Path):
    """Its list says nothing of the secret, whose file has no checksum."""
    from kvpatch_jax.store.snapshots.manifest import read_list, write_list

    root = filled(tmp_path / "store", 2)
    secret = json.loads((root / FIRST).read_text())["secret"]
    save_snapshot(root, tmp_path / "snapshot")
    listed = read_list(str(tmp_path / "snapshot" / "MANIFEST"))
    (tmp_path / "snapshot" / "MANIFEST").unlink()
    write_list(str(tmp_path / "snapshot" / "MANIFEST"), {k: listed[k] for k in ("version", "scope", "objects")})
    (tmp_path / "snapshot" / SECOND).unlink()
    (tmp_path / "snapshot" / FIRST).write_text(json.dumps({"version": 1, "secret": secret}))
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "new").objects == 2
    assert serves(tmp_path / "new", 2)
