"""What did not verify and what was not finished: within a budget, for a while, and gone with what it was of."""

import io
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of, file_of, patch_of

from kvpatch_jax.errors import StoreFullError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, save_snapshot
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk import damage_rate

MARK = b"a text that nobody else has written"


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


def holding(root: Path, text: bytes) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and text in path.read_bytes()]


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


@pytest.mark.parametrize("way", ["delete", "put_and_delete", "withdraw"])
def test_an_entry_that_is_deleted_does_not_stay_in_quarantine(tmp_path: Path, way: str):
    with opened(tmp_path) as store:
        static, dynamic = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
        static.put("name", MARK)
        dynamic.publish("name", MARK)
        for path in (tmp_path / "lib").rglob("*.safetensors"):
            damage(path)
        assert static.get("FILE", "name") is None
        assert dynamic.open("FILE", "name") is None
        assert len(holding(tmp_path, MARK)) == 2
        if way == "withdraw":
            dynamic.publish("name", b"another")
            assert dynamic.withdraw("FILE", "name")
        elif way == "put_and_delete":
            static.put("name", b"another")
            assert static.delete("FILE", "name")
        else:
            assert not static.delete("FILE", "name")  # there is none to delete, and none is left
        (left,) = holding(tmp_path, MARK)
        assert (".entry." in left.name) == (way == "withdraw")


def test_a_quarantine_keeps_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(damage_rate, "MOST", 100)
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


def call(*arguments: str, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = main(arguments)
    return code, capsys.readouterr().out


def test_the_command_line_lists_and_purges_quarantine(tmp_path: Path, capsys):
    root = f"--root={tmp_path}"
    with opened(tmp_path) as one, opened(tmp_path, "two") as two:
        damaged(one, "B")
        damaged(two, "C")
        name = file_of(one, chunk_of("B")).name
    code, text = call("quarantine", "ls", root, "--tenant=one", "--json", capsys=capsys)
    (found,) = json.loads(text)["quarantined"]
    assert code == 0
    assert found["name"] == name
    assert found["nbytes"] == files(tmp_path)[0].stat().st_size
    assert abs(found["since"] - time.time()) < 300
    assert "checksum" in found["reason"]
    code, text = call("quarantine", "ls", root, capsys=capsys)
    assert code == 0
    assert text.count("checksum") == 2
    assert json.loads(call("stat", root, "--json", capsys=capsys)[1])["quarantined_bytes"] == nbytes(tmp_path)
    assert call("quarantine", "purge", root, "--tenant=one", "--yes", capsys=capsys)[0] == 0
    assert len(files(tmp_path)) == 1
    code, text = call("quarantine", "purge", root, "--yes", "--json", capsys=capsys)
    assert json.loads(text)["objects"] == 1
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert call("quarantine", root, capsys=capsys)[0] == 2
    assert call("quarantine", "empty", root, capsys=capsys)[0] == 2


def test_purge_requires_a_confirmation(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    with opened(tmp_path) as store:
        damaged(store, "B")
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    assert call("quarantine", "purge", f"--root={tmp_path}", capsys=capsys)[0] == 1
    assert len(files(tmp_path)) == 1


# ------------------------------------------------------------------------------------------ unfinished snapshots

KILLED = """
import os, signal, sys
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


SOME = (("whole", "collect"), ("whole", "gc"), ("tenant", "delete_tenant"), ("tenant", "collect"))
"""Of what is left and what takes it away, each once, and what a tenant's own collection takes; the rest is slow."""


@pytest.mark.parametrize(
    ("way", "by"),
    [
        pytest.param(way, by, marks=() if (way, by) in SOME else pytest.mark.slow)
        for by in ("collect", "gc", "delete_tenant")
        for way in ("tenant", "whole")
    ],
)
def test_files_of_a_killed_snapshot_are_removed(tmp_path: Path, way: str, by: str, capsys):
    root = tmp_path / "root"
    with opened(root) as store, opened(root, "two") as other:
        store.put(chunk_of())
        left = killed(root, tmp_path / "elsewhere" / "snapshot", way)
        other.collect()
        assert left.exists()  # it is not that tenant's
        if by == "gc":
            code, text = call("gc", f"--root={root}", "--json", capsys=capsys)
            assert (code, json.loads(text)["unfinished"]) == (0, 1)
        elif by == "collect":
            store.collect()
            assert left.exists() == (way == "whole")  # that is the operator's
            call("gc", f"--root={root}", capsys=capsys)
        else:
            store.delete_tenant()
        assert not left.exists()
        assert list((root / "unfinished").iterdir()) == []


def test_a_snapshot_that_is_being_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(tmp_path / "root") as store:
        store.put(chunk_of())
        seen = []

        def meanwhile(done: int, total: int) -> None:
            store.collect()
            seen.extend(tmp_path.glob("snapshot.unfinished-*"))

        save_snapshot(tmp_path / "root", tmp_path / "snapshot", tenant="one", progress=meanwhile)
        assert seen
        assert not list(tmp_path.glob("*.unfinished-*"))
        assert not list(tmp_path.rglob("UNFINISHED"))
        assert list((tmp_path / "root" / "unfinished").iterdir()) == []

        def full(done: int, total: int) -> None:
            raise StoreFullError("no room")

        with pytest.raises(StoreFullError):
            save_snapshot(tmp_path / "root", tmp_path / "again", tenant="one", progress=full)
        assert not list(tmp_path.glob("again*"))
        assert list((tmp_path / "root" / "unfinished").iterdir()) == []


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


def test_deleting_finds_content_nowhere(tmp_path: Path):
    """The bytes of a chunk, looked for in every file of root and snapshot folder."""
    root = tmp_path / "root"
    chunk = chunk_of("secret")
    needle = np.asarray(chunk.kv["k"]).tobytes()[:64]
    with opened(root) as store:
        damaged(store, "secret")
        assert len(holding(tmp_path, needle)) == 2
        store.delete("secret", BACKBONE)
        assert holding(tmp_path, needle) == []
