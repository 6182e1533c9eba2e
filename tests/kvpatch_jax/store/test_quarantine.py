"""What did not verify and what was not finished: within a budget, for a while, and gone with what it was of."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of, file_of, patch_of

from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.cli.main import main


def opened(root: Path, tenant: str = "one", **more) -> ChunkStore:
    return ChunkStore(root, tenant=tenant, budget=Budget(host=0, **more))


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def damaged(store: ChunkStore, id: str, **more) -> None:
    """A chunk in quarantine, and on the disk again."""
    chunk = chunk_of(id, **more)
    store.put(chunk)
    damage(file_of(store, chunk))
    assert store.get(id, BACKBONE) is None
    store.put(chunk)


def files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "quarantine").iterdir() if path.suffix != ".reason")


def nbytes(root: Path) -> int:
    return sum(path.stat().st_size for path in files(root))


# ----------------------------------------------------------------------------------------------------- quarantine


def test_deletion_includes_the_quarantine(tmp_path: Path):
    with opened(tmp_path) as store:
        for id in ("gone", "kept"):
            damaged(store, id)
        store.put_patches([patch_of(chunk_of("gone"))])
        (patch,) = [entry for entry in store.disk.scan() if entry.part.startswith("p.")]
        damage(tmp_path / patch.path)
        assert store.get_patches(patch_of(chunk_of("gone")).metadata) == []
        assert len(files(tmp_path)) == 3
        assert store.delete("gone", BACKBONE)
        (left,) = files(tmp_path)
        assert file_of(store, chunk_of("kept")).name in left.name
        assert len(list((tmp_path / "quarantine").iterdir())) == 2  # with its reason


def test_a_quarantine_keeps_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(tmp_path) as store:
        damaged(store, "measure")
        size = nbytes(tmp_path)
    with opened(tmp_path, quarantine=int(2.5 * size)) as store, opened(tmp_path, "other") as other:
        damaged(other, "others")
        for number in range(6):
            damaged(store, f"B{number}")
            assert nbytes(tmp_path) <= 3.5 * size  # the other tenant's too
        newest = [file_of(store, chunk_of(f"B{number}")).name for number in (4, 5)]
        own = [path.name for path in files(tmp_path) if path.name.startswith(store.names.tenant_name)]
        assert len(own) == 2
        assert all(any(name.endswith(wanted) for name in own) for wanted in newest)
        assert len(files(tmp_path)) == 3
    with opened(tmp_path, quarantine=0) as store:
        damaged(store, "C")
        assert not [path for path in files(tmp_path) if path.name.startswith(store.names.tenant_name)]


def test_collect_deletes_expired_and_old_quarantined_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    with ChunkStore(tmp_path, tenant="one", budget=Budget(host=0), clock=lambda: now[0]) as store:
        for id, ttl in (("short", 10), ("long", None)):
            store.put(chunk_of(id), ttl=ttl)
            damage(file_of(store, chunk_of(id)))
            assert store.get(id, BACKBONE) is None
        store.collect()
        assert len(files(tmp_path)) == 2
        now[0] = 1011.0
        store.collect()
        (left,) = files(tmp_path)
        assert file_of(store, chunk_of("long")).name in left.name
        late = time.time() + 8 * 24 * 3600
        monkeypatch.setattr(time, "time", lambda: late)
        with opened(tmp_path, "other") as other:
            other.collect()
        assert files(tmp_path) == [left]
        store.collect()
        assert list((tmp_path / "quarantine").iterdir()) == []


# ------------------------------------------------------------------------------------------ unfinished snapshots

KILLED = """
import os, signal, sys
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store import ChunkStore, save_snapshot
root, directory, way = sys.argv[1:]
die = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)
save_snapshot(root, directory, tenant=None if way == "whole" else "one", copy=True, progress=die)
"""


def killed(root: Path, directory: Path, way: str) -> Path:
    """Kills a process while it makes a snapshot. What it left."""
    command = [PYTHON, "-c", KILLED, str(root), str(directory), way]
    assert subprocess.run(command, env=child_environment()).returncode == -9
    (left,) = directory.parent.glob(f"{directory.name}.unfinished-*")
    assert any(path.is_file() for path in left.rglob("*"))
    return left


@pytest.mark.parametrize(("way", "by"), [("whole", "gc"), ("tenant", "delete_tenant"), ("tenant", "collect")])
def test_files_of_a_killed_snapshot_are_removed(tmp_path: Path, way: str, by: str, capsys):
    root = tmp_path / "root"
    with opened(root) as store, opened(root, "two") as other:
        store.put(chunk_of())
        left = killed(root, tmp_path / "elsewhere" / "snapshot", way)
        other.collect()
        assert left.exists()  # it is not that tenant's
        if by == "gc":
            assert main(["gc", f"--root={root}", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["unfinished"] == 1
        elif by == "collect":
            store.collect()
        else:
            store.delete_tenant()
        assert not left.exists()
        assert list((root / "unfinished").iterdir()) == []


def test_forged_notes_in_a_root_remove_no_other_files(tmp_path: Path):
    """Who writes the root names other people's directories in it."""
    root, token = tmp_path / "root", "0123456789abcdef"
    with opened(root) as store:
        victims = [tmp_path / "precious", tmp_path / f"precious.unfinished-{token}", tmp_path / "another.unfinished-"]
        for victim in victims:
            victim.mkdir()
            (victim / "file").write_text("mine")
        (victims[1] / "UNFINISHED").write_text("another token")
        (tmp_path / f"link.unfinished-{token}").symlink_to(victims[0])
        (victims[0] / "UNFINISHED").write_text(token)
        named = [
            *map(str, victims),
            "/a\0b",
            str(tmp_path / f"link.unfinished-{token}"),
            f"precious.unfinished-{token}",
            "",
        ]
        (root / "unfinished").mkdir()
        for number, text in enumerate(named):
            ending = "" if text.endswith("-") else token
            (root / "unfinished" / f"{store.names.tenant_name}.{number}.{ending}").write_text(text)
        os.mkfifo(root / "unfinished" / f"{store.names.tenant_name}.fifo")
        (root / "unfinished" / f"{store.names.tenant_name}.folder").mkdir()
        store.collect()
        assert all((victim / "file").read_text() == "mine" for victim in victims)
