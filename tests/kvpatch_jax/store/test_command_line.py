"""`python -m kvpatch_jax.store`, called in this process, and once as a program."""

import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of, file_of, patch_of

from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary
from kvpatch_jax.store.cli.commands import COMMANDS
from kvpatch_jax.store.cli.main import main

KEY = b"k" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tenants; the second encrypts."""
    root = tmp_path / "root"
    (tmp_path / "key").write_bytes(KEY)
    with ChunkStore(root, tenant="one") as one, ChunkStore(root, tenant="two", key=KEY) as two:
        for store in (one, two):
            store.put(chunk_of(encoder=np.ones(5, np.float32)))
            store.put_patches([patch_of(chunk_of())])
        two.put(chunk_of("brief"), ttl=1e-6)
    return root


@pytest.fixture
def call(root: Path, capsys):
    def call(command: str, *flags: str) -> tuple[int, dict]:
        status = main([command, f"--root={root}", "--json", *flags])
        return status, json.loads(capsys.readouterr().out or "null")

    return call


def damage(root: Path, tenant: str, key: bytes | None = None) -> Path:
    with ChunkStore(root, tenant=tenant, key=key) as store:
        path = file_of(store, chunk_of())
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_ls_and_stat_show_the_operator_all_and_a_tenant_its_own(root: Path, call):
    status, everything = call("ls")
    assert status == 0
    kinds = sorted((each["kind"], each["encrypted"]) for each in everything["objects"])
    both = [(kind, encrypted) for kind in ("enc", "kv", "patch") for encrypted in (False, True)]
    assert kinds == sorted([*both, ("kv", True)])
    _, own = call("ls", "--tenant=one")
    spaces = {each["tenant"] for each in own["objects"]}
    assert len(spaces) == 1
    assert len(own["objects"]) == 3
    assert all(each in everything["objects"] for each in own["objects"])
    assert sum(each["expires"] is not None for each in everything["objects"]) == 1
    assert all(each["nbytes"] == (root / each["path"]).stat().st_size for each in everything["objects"])
    _, sums = call("stat", "--deep")
    assert (sums["objects"], sums["expired"], sums["encrypted"]) == (7, 1, 4)
    assert sums["bytes"] == sum(each["nbytes"] for each in everything["objects"])
    assert sums["kinds"]["kv"]["objects"] == 3
    _, sums = call("stat", "--tenant=two", "--deep")
    assert (sums["objects"], sums["encrypted"], len(sums["tenants"])) == (4, 4, 1)
    assert call("ls", "--tenant=nobody") == (1, {"objects": []})


def test_verify_reports_damaged_objects_by_its_exit_status(root: Path, call):
    key = f"--key-file={root.parent / 'key'}"
    assert call("verify")[1] | {"nbytes": 0} == {
        "good": 3,
        "unopened": 4,
        "nbytes": 0,
        "bad": [],
        "left": [],
        "unreadable": [],
    }
    status, found = call("verify", "--tenant=two", key)
    assert (status, found["good"], found["unopened"]) == (0, 4, 0)
    path = damage(root, "one")
    status, found = call("verify", "--tenant=two", key)
    assert (status, found["bad"]) == (0, [])
    status, found = call("verify")
    assert (status, found["good"], found["bad"]) == (1, 2, [str(path.relative_to(root))])
    assert not path.exists()
    assert call("stat")[1]["quarantined"] == 1
    assert call("verify")[0] == 0  # it is in quarantine now
    damage(root, "two", KEY)
    assert call("verify", "--tenant=two", key)[0] == 1


def test_gc_deletes_expired_objects_and_evicts_to_a_budget(root: Path, call):
    (root / "tmp" / "dead").write_bytes(b"half")
    (root / "deleted" / "0.1-2").mkdir(parents=True)
    status, found = call("gc")
    assert (status, found["objects_before"], found["objects"], found["expired"]) == (0, 7, 6, 1)
    assert not any((root / "tmp").iterdir())
    assert not any((root / "deleted").iterdir())
    status, found = call("gc", f"--budget={found['bytes'] // 2}")
    assert status == 0
    assert 0 < found["objects"] < 6
    assert found["bytes"] <= found["bytes_before"] // 2
    assert found["evicted"] == 6 - found["objects"]
    assert call("gc", "--tenant=one", "--budget=0")[1]["objects"] == 0


def test_rm_tenant_asks_and_keeps_other_tenants(root: Path, call, monkeypatch, capsys):
    for answer in ("", "no\n", "y\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert call("rm-tenant", "--tenant=one") == (1, {"deleted": False})
    assert main(["rm-tenant", f"--root={root}", "--yes"]) == 2
    assert "expected --tenant" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    status, found = call("rm-tenant", "--tenant=one")
    assert (status, found["deleted"], found["objects"]) == (0, True, 3)
    assert call("ls", "--tenant=one")[1]["objects"] == []
    assert len(call("ls")[1]["objects"]) == 4
    assert call("rm-tenant", "--tenant=one", "--yes")[1]["objects"] == 0


def test_invalid_command_lines_say_why(root: Path, capsys, tmp_path: Path):
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"w" * 32)
    for arguments, words in (
        (["ls", f"--root={tmp_path}/nowhere"], "got no store there"),
        (["ls"], "error: no root; expected --root=DIR\n\nusage"),
        (["unknown", f"--root={root}"], "error: unknown command 'unknown'; expected one of ls, stat"),
        (["verfy", f"--root={root}"], "error: unknown command 'verfy'; expected 'verify'?\n\nusage"),
        ([f"--root={root}"], "error: no command; expected one of ls, stat"),
        (["ls", "stat", f"--root={root}"], "error: got 'stat' after the command; expected flags only\n\nusage"),
        (["ls", f"--rot={root}"], "Did you mean: root"),
        (["export", f"--root={root}", f"--directory={tmp_path}/x", "--tenant=nobody"], "nothing of it in"),
        (["ls", f"--root={root}", "--what=1"], "Unknown command line flag"),
        (["gc", f"--root={root}", "--budget=-1"], "budget"),
        (["verify", f"--root={root}", f"--key-file={wrong}"], "expected --tenant"),
        (["verify", f"--root={root}", "--tenant=two", f"--key-file={wrong}"], "another key"),
        (["verify", f"--root={root}", "--tenant=two", "--key-file=/nowhere"], "expected a file"),
    ):
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.out == ""
    assert not (tmp_path / "nowhere").exists()
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_the_program_exits_with_1_for_damage_and_draws_no_bar_unseen(root: Path):
    damage(root, "one")
    program = [PYTHON, "-m", "kvpatch_jax.store", "verify", f"--root={root}", "--json"]
    done = subprocess.run(program, env=child_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    assert len(json.loads(done.stdout)["bad"]) == 1
    assert done.stderr == ""  # no bar where nobody looks


@pytest.mark.parametrize("flags", [[], ["--tenant=one"], ["--tenant=one", "--copy"]], ids=["all", "tenant", "copy"])
def test_export_and_import_move_objects_to_another_root(root: Path, call, tmp_path: Path, flags: list[str], capsys):
    directory, other = tmp_path / "snapshot", tmp_path / "other"
    status, exported = call("export", f"--directory={directory}", *flags)
    assert (status, exported["objects"]) == (0, 3 if flags else 6)  # the seventh is expired
    status = main(["import", f"--root={other}", f"--directory={directory}", "--json", *flags])
    assert (status, json.loads(capsys.readouterr().out)["objects"]) == (0, exported["objects"])
    with ChunkStore(other, tenant="one") as store:
        found = store.get(chunk_of().id, BACKBONE)
    assert found is not None
    assert np.array_equal(found.kv["k"], chunk_of().kv["k"])
    assert call("export", f"--directory={directory}", *flags)[0] == 2  # it is there


def test_a_damaged_snapshot_is_refused(root: Path, call, tmp_path: Path, capsys):
    directory = tmp_path / "snapshot"
    assert call("export", f"--directory={directory}", "--tenant=one", "--copy")[0] == 0
    path = next(directory.rglob("*.kv.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    flags = [f"--root={tmp_path / 'other'}", f"--directory={directory}", "--tenant=one"]
    assert main(["import", *flags]) == 2
    assert "snapshot" in capsys.readouterr().err
    assert call("export", "--arrays", f"--directory={tmp_path / 'new'}")[0] == 2  # no tenant
    assert call("import")[0] == 2  # no directory


# ---------------------------------------------------------------------------------------------------------- libraries


@pytest.fixture
def shelves(root: Path) -> Path:
    """Both tenants have libraries: three static entries of which one is expired, a reference with an old version."""
    for tenant, key in (("one", None), ("two", KEY)):
        with ChunkStore(root, tenant=tenant, key=key) as store:
            files, references = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
            files.put("A", "text")
            files.put("B", "more text")
            files.put("brief", "gone", ttl=1e-6)
            references.publish("R", "first")
            held = references.open("TEXT", "R")
            assert held is not None
            references.publish("R", "second")
            del held  # not closed: as a reader that dies
    return root


def test_ls_stat_and_verify_take_libraries(shelves: Path, call):
    _, everything = call("ls")
    kinds = sorted(each["kind"] for each in everything["objects"] if each["path"].startswith("lib/"))
    assert kinds == ["dynamic"] * 4 + ["static"] * 6
    _, own = call("ls", "--tenant=one")
    assert len(own["objects"]) == 3 + 5
    assert len({each["tenant"] for each in own["objects"]}) == 1
    _, sums = call("stat", "--deep")
    assert (sums["objects"], sums["expired"], sums["encrypted"]) == (7 + 10, 1 + 2, 4 + 5)
    assert sums["kinds"]["static"]["objects"] == 6
    assert call("stat", "--tenant=two")[1]["kinds"]["dynamic"]["objects"] == 2
    status, found = call("verify")
    assert (status, found["good"], found["unopened"]) == (0, 3 + 5, 4 + 5)
    key = f"--key-file={shelves.parent / 'key'}"
    assert call("verify", "--tenant=two", key)[1]["good"] == 4 + 5
    path = shelves / next(each["path"] for each in own["objects"] if each["kind"] == "dynamic")
    path.write_bytes(path.read_bytes()[:-1])
    status, found = call("verify", "--tenant=one")
    assert (status, found["bad"]) == (1, [str(path.relative_to(shelves))])
    assert call("verify")[0] == 0
    assert call("stat", "--tenant=one")[1]["quarantined"] == 1
