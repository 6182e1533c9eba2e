"""`python -m kvpatch_jax.store`: lists, counts, verifies and moves what is in a root, and says what is wrong."""

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.__main__ import main
from kvpatch_jax.store.metrics import COUNTERS, StoreCollector

KEY = b"k" * 32
OUTPUT = np.ones((4, 3), np.float32)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tenants; the second encrypts."""
    (tmp_path / "key").write_bytes(KEY)
    with (
        ChunkStore(tmp_path / "root", tenant="one") as one,
        ChunkStore(tmp_path / "root", tenant="two", key=KEY) as two,
    ):
        for number in range(3):
            one.put_encoder(f"B{number}", "tiny", OUTPUT)
        two.put_encoder("B", "tiny", OUTPUT)
        two.put_encoder("brief", "tiny", OUTPUT, ttl=1e-6)
    return tmp_path / "root"


@pytest.fixture
def call(root: Path, capsys: pytest.CaptureFixture[str]):
    def call(command: str, *options: str) -> tuple[int, list]:
        status = main([command, *options, str(root), "--json"])
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def first_file(root: Path, tenant: str, key: bytes | None = None) -> Path:
    with ChunkStore(root, tenant=tenant, key=key) as store:
        query = "SELECT file FROM objects WHERE tenant = ? ORDER BY name"
        return root / "data" / store.objects.index.rows(query, store.objects.tenant)[0][0]


def test_ls_lists_everything_or_a_tenants_objects(root: Path, call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvpatch_jax.store.objects.PAGE", 2)
    status, rows = call("ls")
    assert status == 0
    assert len(rows) == len({(row["tenant"], row["name"]) for row in rows}) == 5
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in (root / "data").glob("*/*"))
    assert {row["kind"] for row in rows} == {"encoder"}
    assert sum(row["expires"] is not None for row in rows) == 1
    _, mine = call("ls", "--tenant=one")
    with ChunkStore(root, tenant="one") as store:
        assert {row["name"] for row in mine} == {store.names.encoder("tiny", f"B{number}") for number in range(3)}


def test_stat_counts_by_tenant_and_kind(root: Path, call):
    _, (total,) = call("stat")
    _, (mine,) = call("stat", "--tenant=one")
    _, rows = call("ls", "--tenant=one")
    assert (total["objects"], mine["objects"], total["outbox"]) == (5, 3, 0)
    assert mine["bytes"] == sum(row["bytes"] for row in rows)
    assert [(row["kind"], row["objects"]) for row in mine["usage"]] == [("encoder", 3)]


def test_verify_reports_damage_by_its_exit_status_and_deletes_it_if_asked(root: Path, call):
    key = f"--key-file={root.parent / 'key'}"
    assert call("verify") == (0, [{"good": 3, "encrypted": 2, "damaged": 0, "unreadable": 0, "names": []}])
    assert call("verify", "--tenant=two", key)[1][0]["good"] == 2
    paths = [first_file(root, "one"), first_file(root, "two", KEY)]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    status, (report,) = call("verify")
    assert (status, report["good"], report["damaged"], len(report["names"])) == (1, 2, 2, 2)
    assert all(path.exists() for path in paths)
    assert call("verify", "--delete")[0] == 1
    assert not any(path.exists() for path in paths)
    assert call("verify")[0] == 0
    assert call("stat")[1][0]["objects"] == 3


def test_verify_reports_a_damaged_index_which_is_then_made_again(root: Path, call):
    path = root / "index.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        (size,) = db.execute("PRAGMA page_size").fetchone()
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'by_file'").fetchone()
    content = bytearray(path.read_bytes())
    content[page * size - 20] ^= 1  # no command but `verify` reads this entry
    path.write_bytes(content)
    status, (report,) = call("verify")
    assert (status, report["names"]) == (1, ["index.sqlite"])
    status, (report,) = call("verify")
    assert (status, report["good"], report["encrypted"]) == (0, 3, 2)


def test_collect_deletes_what_has_expired(root: Path, call):
    assert call("collect") == (0, [{"deleted": 1}])
    assert call("stat")[1][0]["objects"] == 4


def test_a_tenant_and_a_root_are_exported_and_imported(root: Path, call, capsys: pytest.CaptureFixture[str]):
    key = f"--key-file={root.parent / 'key'}"
    tenants, whole, new = (str(root.parent / name) for name in ("tenants", "whole", "new"))
    assert call("export", "--tenant=two", key, tenants)[1][0]["objects"] == 1
    assert call("export", whole)[1][0]["objects"] == 4
    assert main(["import", whole, new]) == 0
    assert main(["import", tenants, f"{new}er", "--tenant=third", key]) == 0
    capsys.readouterr()
    with ChunkStore(new, tenant="one") as one, ChunkStore(f"{new}er", tenant="third", key=KEY) as third:
        for output in (one.get_encoder("B2", "tiny"), third.get_encoder("B", "tiny")):
            assert output is not None
            assert output.tobytes() == OUTPUT.tobytes()
    assert main(["import", tenants, f"{new}er", "--tenant=third"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list", "ROOT"],
        ["ls"],
        ["ls", "ROOT", "--unknown"],
        ["ls", "ROOT/nothing"],
        ["ls", "ROOT", "--tenant=nobody"],
        ["verify", "ROOT", "--tenant=two", "--key-file=ROOT/nothing"],
        ["verify", "ROOT", "--key-file=ROOT/secret"],
        ["verify", "ROOT", "--tenant=two", "--key-file=ROOT/secret"],
        ["export", "ROOT", "ROOT"],
        ["import", "ROOT", "ROOT/new"],
    ],
)
def test_a_wrong_call_ends_with_one_line(root: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    before = sorted(root.iterdir())
    try:
        status = main([argument.replace("ROOT", str(root)) for argument in arguments])
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert sorted(root.iterdir()) == before


def test_the_program_prints_a_table_and_ends_when_nobody_reads_on(root: Path):
    with ChunkStore(root, tenant="one") as store:
        for number in range(20):
            store.put_encoder(f"more {number}", "tiny", OUTPUT)
    program = f"{sys.executable} -m kvpatch_jax.store ls {root} | head -n 2; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    heading, row = done.stdout.splitlines()
    assert heading.split() == ["bytes", "kind", "used", "expires", "tenant/name"]
    assert row.split()[1] == "encoder"
    assert max(map(len, (heading, row))) <= 100


def test_a_table_has_the_tenants_name_whole_where_it_was_given(root: Path, capsys):
    name = "a tenant of more than twenty-four letters"
    with ChunkStore(root, tenant=name) as store:
        store.put_encoder("one", "tiny", OUTPUT)
    assert main(["ls", str(root), f"--tenant={name}"]) == 0
    assert f"  {name}/" in capsys.readouterr().out


def test_prometheus_gets_all_counters_of_a_store(root: Path):
    with ChunkStore(root, tenant="one") as store:
        registry = CollectorRegistry()
        registry.register(StoreCollector(lambda: {"acme": store.statistics()}))
        store.get_encoder("B0", "tiny")
        store.get_encoder("unknown", "tiny")
        page = generate_latest(registry).decode().splitlines()
        bytes_on_disk = store.usage().bytes
        assert set(store.statistics().counts) <= set(COUNTERS)
    assert 'kvpatch_store_disk_hits_total{store="acme"} 1.0' in page
    assert 'kvpatch_store_misses_total{store="acme"} 1.0' in page
    assert f'kvpatch_store_disk_bytes{{store="acme"}} {float(bytes_on_disk)}' in page
    assert "# HELP kvpatch_store_evicted_total Objects evicted to make room." in page
