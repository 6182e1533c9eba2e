"""What a root says about itself: its secret is found to be damaged, mended from its copy, and never made up anew."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
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


def test_two_files_of_two_secrets_are_refused(tmp_path: Path):
    one, other = filled(tmp_path / "one"), filled(tmp_path / "other")
    shutil.copy(one / SECOND, other / SECOND)
    with pytest.raises(StoreCorruptError, match="expected"):
        opened(other)


# ------------------------------------------------------------------------------------------------- whole snapshots


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
