"""The commands and metrics of a store count, verify and move exactly what is in a root."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.store import ChunkStore, StoreCollector
from kvpatch_jax.store.__main__ import main
from tests.store.store_cases import KEY, MODEL, file_of, same

OUTPUT = np.ones((4, 3), np.float32)


@pytest.fixture
def root(folder: Path) -> Path:
    """Two tenants; the second encrypts."""
    (folder / "key").write_bytes(KEY)
    with (
        ChunkStore(folder / "root", tenant="one") as one,
        ChunkStore(folder / "root", tenant="two", key=KEY) as two,
    ):
        for number in range(3):
            one.put_encoder(f"B{number}", MODEL, OUTPUT)
        two.put_encoder("B", MODEL, OUTPUT)
        two.put_encoder("brief", MODEL, OUTPUT, ttl=1e-6)
    return folder / "root"


def test_objects_are_listed_counted_verified_and_moved(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def call(command: str, *options: str) -> tuple[int, list]:
        status = main([command, *options, str(root), "--json"])
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setattr("kvpatch_jax.store.objects.PAGE", 2)
    status, rows = call("ls")
    assert (status, len(rows), len({(row["tenant"], row["name"]) for row in rows})) == (0, 5, 5)
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in (root / "data").glob("*/*"))
    assert sum(row["expires"] is not None for row in rows) == 1
    _, mine = call("ls", "--tenant=one")
    with ChunkStore(root, tenant="one") as store:
        assert {row["name"] for row in mine} == {store.names.encoder(MODEL, f"B{number}") for number in range(3)}
    (total,), (part,) = call("stat")[1], call("stat", "--tenant=one")[1]
    assert (total["objects"], part["objects"], total["outbox"]) == (5, 3, 0)
    assert part["bytes"] == sum(row["bytes"] for row in mine)
    assert [(row["kind"], row["objects"]) for row in part["usage"]] == [("encoder", 3)]
    assert call("verify") == (0, [{"good": 3, "encrypted": 2, "damaged": 0, "unreadable": 0, "names": []}])
    assert call("collect") == (0, [{"deleted": 1}])

    # A tenant and a root become new roots.
    key, snapshots = f"--key-file={root.parent / 'key'}", [str(root.parent / name) for name in ("tenant", "complete")]
    assert call("verify", "--tenant=two", key)[1][0]["good"] == 1
    assert call("export", "--tenant=two", key, snapshots[0])[1][0]["objects"] == 1
    assert call("export", snapshots[1])[1][0]["objects"] == 4
    assert main(["import", snapshots[1], f"{root}1"]) == 0
    assert main(["import", snapshots[0], f"{root}2", "--tenant=third", key]) == 0
    with ChunkStore(f"{root}1", tenant="one") as one, ChunkStore(f"{root}2", tenant="third", key=KEY) as third:
        assert same(one.get_encoder("B2", MODEL), OUTPUT)
        assert same(third.get_encoder("B", MODEL), OUTPUT)
    assert main(["import", snapshots[0], f"{root}2", "--tenant=third"]) == 2
    capsys.readouterr()

    # The exit status reports damage, which stays until its deletion is asked for.
    with ChunkStore(root, tenant="one") as one, ChunkStore(root, tenant="two", key=KEY) as two:
        paths = [file_of(store.objects, store.names.encoder(MODEL, id)) for store, id in ((one, "B0"), (two, "B"))]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    status, (report,) = call("verify")
    assert (status, report["good"], report["damaged"], len(report["names"])) == (1, 2, 2, 2)
    assert all(path.exists() for path in paths)
    assert call("verify", "--delete")[0] == 1
    assert not any(path.exists() for path in paths)
    assert call("verify")[0] == 0
    assert call("stat")[1][0]["objects"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        "ls ROOT --unknown",
        "ls ROOT/nothing",
        "verify ROOT --tenant=two --key-file=ROOT/nothing",
        "export ROOT ROOT",
    ],
)
def test_a_wrong_call_ends_with_one_line(root: Path, arguments: str, capsys: pytest.CaptureFixture[str]):
    before = sorted(root.iterdir())
    try:
        status = main(arguments.replace("ROOT", str(root)).split())
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert (status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("error: ")
    assert sorted(root.iterdir()) == before


def test_prometheus_gets_all_counters_of_a_store(root: Path):
    prometheus_client = pytest.importorskip("prometheus_client")
    with ChunkStore(root, tenant="one") as store:
        registry = prometheus_client.CollectorRegistry()
        registry.register(StoreCollector(lambda: {"acme": store.statistics()}))
        store.get_encoder("B0", MODEL)
        store.get_encoder("unknown", MODEL)
        page = prometheus_client.generate_latest(registry).decode().splitlines()
        counts = store.statistics().counts
        for count, value in counts.items():
            assert f'kvpatch_store_{count}_total{{store="acme"}} {float(value)}' in page
        assert (counts["disk_hits"], counts["misses"]) == (1, 1)
        assert f'kvpatch_store_disk_bytes{{store="acme"}} {float(store.usage().bytes)}' in page
