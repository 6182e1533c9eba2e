"""What processes publish of their stores, what is read of it, and `store top` and its page of metrics."""

import fcntl
import gc
import json
import math
import os
import re
import subprocess
import threading
import time
import types
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from store_cases import BACKBONE, PYTHON, child_environment, chunk_of

from kvpatch_jax.store import Budget, ChunkStore, Statistics, process_statistics
from kvpatch_jax.store.cli import top
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk.counters import BOUNDS, Histogram
from kvpatch_jax.store.disk.usage import usage
from kvpatch_jax.store.process_statistics import publish_now, read_processes, total_of

CHILD = """
import os, sys
from store_cases import host_chunk
from kvpatch_jax.store import ChunkStore, process_statistics
store = ChunkStore(sys.argv[1], tenant="child")
store.put(host_chunk("C", 3))
process_statistics.publish_now()
print("published", flush=True)
sys.stdin.readline()
"""

FORKING = """
import os, sys
from store_cases import host_chunk
from kvpatch_jax.store import ChunkStore, process_statistics
root = sys.argv[1]
stats = lambda: os.listdir(root + "/stats")
store = ChunkStore(root)
store.put(host_chunk("C", 3))
process_statistics.publish_now()
if not (child := os.fork()):
    status = 1
    try:
        store.close()  # the parent's, too
        process_statistics.publish_now()
        assert len(stats()) == 1
        with ChunkStore(root, tenant="child"):
            process_statistics.publish_now()
            assert len(stats()) == 2
        assert len(stats()) == 1
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
(process,) = process_statistics.read_processes(root).processes
assert process.pid == os.getpid()
"""


def files(root: Path) -> list[Path]:
    return sorted((root / "stats").iterdir()) if (root / "stats").exists() else []


def only(root: Path):
    (process,) = read_processes(str(root)).processes
    return process


def test_a_process_publishes_the_sums_of_its_stores_and_takes_them_back(tmp_path: Path):
    with ChunkStore(tmp_path, tenant="acme") as one:
        one.put(chunk_of())
        with ChunkStore(tmp_path, tenant="acme") as again, ChunkStore(tmp_path, tenant="two") as two:
            again.get("B", BACKBONE)
            two.get("B", BACKBONE)
            publish_now()
            (path,) = files(tmp_path)
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            found = only(tmp_path)
            assert found.pid == os.getpid()
            counts = {tenant: own.counts for tenant, own in found.tenants.items()}
            assert counts[one.names.tenant_name]["puts"] == 1
            assert counts[one.names.tenant_name]["disk_hits"] == 1
            assert counts[two.names.tenant_name] == two.counters.read()
            own = found.tenants[one.names.tenant_name]
            assert own.latencies["get", "disk"] == again.counters.latencies()["get", "disk"]
            assert own.held["host"] == again.statistics().held["host"] > 0
        # Counts of closed stores stay, so that sums never fall; their memory does not.
        publish_now()
        own = only(tmp_path).tenants[one.names.tenant_name]
        assert own.counts["disk_hits"] == 1
        assert own.held["host"] == 0
        text = path.read_bytes()
        assert b"acme" not in text
        assert b'"B"' not in text
    assert files(tmp_path) == []


def test_nothing_is_written_while_nothing_changes_or_before_the_first_time(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        store.put(chunk_of())
        assert files(tmp_path) == []
        publish_now()
        (path,) = files(tmp_path)
        before = path.stat()
        publish_now()
        assert path.stat().st_ino == before.st_ino
        store.get("B", BACKBONE)
        publish_now()
        assert [path.name for path in files(tmp_path)] == [path.name]
        assert path.stat().st_ino != before.st_ino


def test_one_thread_publishes_by_itself_and_ends_with_the_last_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "kvpatch-statistics"]

    gc.collect()
    publish_now()  # stores that other tests did not close
    before = running()
    monkeypatch.setattr(process_statistics, "EVERY", 0.01)
    with ChunkStore(tmp_path / "a") as store, ChunkStore(tmp_path / "b"):
        store.put(chunk_of())
        mine = set(running()) - set(before)
        assert len(mine) == (0 if before else 1)
        for thread in running() if not before else ():
            while not files(tmp_path / "a"):
                thread.join(0.01)
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()


def test_a_store_that_nobody_closes_is_forgotten(tmp_path: Path):
    store = ChunkStore(tmp_path)
    publish_now()
    assert len(files(tmp_path)) == 1
    del store
    gc.collect()
    publish_now()
    assert files(tmp_path) == []


def test_a_dead_process_is_not_counted_and_its_file_is_removed(tmp_path: Path):
    arguments = [PYTHON, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment(), text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "published\n"
        assert only(tmp_path).pid == child.pid
        child.kill()
        child.wait()
    assert len(files(tmp_path)) == 1
    assert read_processes(str(tmp_path)) == ([], 0)
    assert files(tmp_path) == []


def test_a_forked_process_leaves_its_parent_s_file(tmp_path: Path):
    subprocess.run([PYTHON, "-c", FORKING, str(tmp_path)], env=child_environment(), check=True, timeout=300)
    assert files(tmp_path) == []


GOOD = {
    "version": 1,
    "pid": 7,
    "began": 5.0,
    "tenants": {
        "0" * 32: {
            "counts": {"puts": 2},
            "held": {"host": 3},
            "gauges": {"outbox_bytes": 1.5},
            "latencies": {"get disk": [1] * (len(BOUNDS) + 1) + [0.5]},
        }
    },
}


def changed(*path: str, value: object) -> str:
    found = json.loads(json.dumps(GOOD))
    inner = found
    for word in path[:-1]:
        inner = inner[word]
    inner[path[-1]] = value
    return json.dumps(found)


OWN = ("tenants", "0" * 32)
HOSTILE = {
    "no JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "a name twice": '{"version": 1, "version": 1}',
    "not a number": json.dumps(GOOD).replace("5.0", "NaN"),
    "version": changed("version", value=2),
    "one more field": changed("more", value=1),
    "process": changed("pid", value=True),
    "time": changed("began", value=1e400),
    "tenant": changed("tenants", "../../etc", value=GOOD["tenants"]["0" * 32]),
    "tenants": changed("tenants", value={f"{n:032x}": GOOD["tenants"]["0" * 32] for n in range(100)}),
    "a negative count": changed(*OWN, "counts", "puts", value=-1),
    "a large count": changed(*OWN, "counts", "puts", value=1 << 80),
    "a word": changed(*OWN, "counts", 'x"} 1\n', value=1),
    "escape": changed(*OWN, "held", "\x1b[2J", value=1),
    "many": changed(*OWN, "counts", value={f"c{n}": 1 for n in range(300)}),
    "buckets": changed(*OWN, "latencies", "get disk", value=[1]),
    "operation": changed(*OWN, "latencies", "get", value=[1] * (len(BOUNDS) + 2)),
    "gauge": changed(*OWN, "gauges", "outbox_bytes", value="1"),
    "long": json.dumps(GOOD) + " " * (1 << 20),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_anybody_wrote_are_skipped(tmp_path: Path, what: str):
    folder = tmp_path / "stats"
    folder.mkdir()
    good, bad = folder / f"7-{'a' * 16}.json", folder / f"8-{'b' * 16}.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text(HOSTILE[what])
    with good.open() as first, bad.open() as second:  # as of living processes
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        found, unreadable = read_processes(str(tmp_path))
    assert unreadable == 1
    (process,) = found
    own = process.tenants["0" * 32]
    assert (process.pid, own.counts, own.held, own.gauges) == (7, {"puts": 2}, {"host": 3}, {"outbox_bytes": 1.5})
    assert own.latencies["get", "disk"] == Histogram((1,) * (len(BOUNDS) + 1), 0.5)


def test_what_is_no_file_is_neither_opened_nor_followed_nor_removed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    root = tmp_path / "root"
    folder = root / "stats"
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"1-{'a' * 16}.json")
    (folder / f"2-{'a' * 16}.json").symlink_to(outside)
    (folder / f"3-{'a' * 16}.json").mkdir()
    (folder / "notes.txt").write_text("kept")
    assert read_processes(str(root)) == ([], 3)
    assert outside.read_text() == "kept"
    assert len(files(root)) == 4
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "stats").symlink_to(folder)
    assert read_processes(str(linked)) == ([], 0)


def test_a_root_that_is_read_only_or_gone_stops_no_store(tmp_path: Path):
    with ChunkStore(tmp_path / "root") as store:
        store.put(chunk_of())
        (tmp_path / "root" / "stats").write_text("no folder")
        publish_now()
        (tmp_path / "root").rename(tmp_path / "moved")
        publish_now()


def test_sums_add_counts_and_take_the_largest_gauge():
    buckets = (1, *(0,) * len(BOUNDS))
    one = Statistics({"puts": 1}, {("get", "disk"): Histogram(buckets, 0.5)}, {"host": 5}, {"outbox_objects": 4})
    two = Statistics({"puts": 2, "misses": 1}, {("get", "disk"): Histogram(buckets, 1.5)}, {}, {"outbox_objects": 3})
    total = total_of([one, two])
    assert (total.counts, total.held, total.gauges) == ({"puts": 3, "misses": 1}, {"host": 5}, {"outbox_objects": 4})
    assert total.latencies == {("get", "disk"): Histogram((2, *(0,) * len(BOUNDS)), 2.0)}


def test_more_tenants_than_a_file_names_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_statistics, "MOST_TENANTS", 2)
    stores = [ChunkStore(tmp_path, tenant=f"t{number}") for number in range(4)]
    for store in stores:
        store.get("absent", BACKBONE)
    publish_now()
    tenants = only(tmp_path).tenants
    assert len(tenants) == 3
    assert tenants["others"].counts["misses"] == 2
    for store in stores:
        store.close()


# ---------------------------------------------------------------------------------------------------------------- top


def test_usage_is_what_the_files_take(tmp_path: Path):
    with ChunkStore(tmp_path, tenant="one") as one, ChunkStore(tmp_path, tenant="two") as two:
        one.put_many([chunk_of("B", 1), chunk_of("C", 2)])
        two.put(chunk_of())
        sizes = {store.names.tenant_name: [] for store in (one, two)}
        for path in (tmp_path / "obj").rglob("*.safetensors"):
            sizes[path.relative_to(tmp_path / "obj").parts[0]].append(path.stat())
        found = usage(str(tmp_path))
        for tenant, stats in sizes.items():
            assert found[tenant][:2] == (len(stats), sum(stat.st_size for stat in stats))
            assert math.isclose(found[tenant].oldest, min(stat.st_atime for stat in stats))


@pytest.fixture
def shown(tmp_path: Path):
    """A root with two tenants, evictions and a miss, while its stores are open."""
    one_chunk = chunk_of().nbytes
    with (
        ChunkStore(tmp_path, tenant="one", budget=Budget(disk=2 * (one_chunk + 4160))) as one,
        ChunkStore(tmp_path, tenant="two") as two,
    ):
        for number in range(5):
            one.put(chunk_of(f"B{number}", number))
        one.get("B4", BACKBONE)
        two.get("absent", BACKBONE)
        publish_now()
        yield tmp_path, one, two


def test_top_shows_tiers_tenants_and_processes(shown, capsys):
    root, one, two = shown
    assert main(["top", str(root), "--once"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    (disk,) = [line.split() for line in text.splitlines() if line.startswith("disk")]
    size = sum(path.stat().st_size for path in (root / "obj").rglob("*.safetensors"))
    assert disk[:4] == ["disk", f"{size:,}", "1", "50.0%"]
    evicted = one.counters["disk_evicted_budget"]
    assert disk[-2:] == ["budget", str(evicted)]
    assert evicted > 0
    lines = {line.split()[0]: line.split() for line in text.splitlines() if re.match("[0-9a-f]{32}", line)}
    assert lines[one.names.tenant_name][-3:] == ["1", "0", str(evicted)]
    assert lines[two.names.tenant_name][1:] == ["0", "0", "-", "0", "1", "0"]
    assert f"{os.getpid()}-" in text
    assert "puts 5" in text


def test_top_as_json_has_the_same_numbers(shown, capsys):
    root, one, two = shown
    assert main(["top", f"--root={root}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["puts"] == 5
    assert found["tenants"][two.names.tenant_name]["counts"] == {"misses": 1}
    assert found["disk"][one.names.tenant_name]["objects"] == 5 - one.counters["disk_evicted_budget"]
    assert [process["pid"] for process in found["processes"]] == [os.getpid()]
    assert found["unreadable"] == 0


def test_the_page_of_metrics_has_every_process(shown, capsys):
    root, one, _ = shown
    assert main(["top", str(root), "--prometheus"]) == 0
    samples = {}
    for family in text_string_to_metric_families(capsys.readouterr().out):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("tenant")] = (sample.value, sample.labels["process"])
    assert samples["kvpatch_store_puts_total", one.names.tenant_name] == (5, only(root).name)


def test_top_refuses_what_it_cannot_show(tmp_path: Path, capsys):
    for arguments in ([], [str(tmp_path)], [str(tmp_path), "another"], [str(tmp_path), "--interval=0"], ["--wrong"]):
        assert main(["top", *arguments]) == 2
        assert "error: " in capsys.readouterr().err
    assert main(["top", "--help"]) == 0
    assert "--interval" in capsys.readouterr().out


def test_the_live_view_has_rates_between_two_readings(shown, monkeypatch: pytest.MonkeyPatch):
    root, one, _ = shown
    times = iter([1000.0, 1004.0])
    clock = types.SimpleNamespace(time=lambda: next(times), sleep=lambda seconds: None)
    clock.strftime, clock.gmtime = time.strftime, time.gmtime
    monkeypatch.setattr(top, "time", clock)
    view = top.lines([str(root)])
    (first,) = [line.split() for line in next(view).splitlines() if line.startswith("disk")]
    assert first[4] == "-"
    for _ in range(6):
        one.get("B4", BACKBONE)  # from memory
    publish_now()
    second = next(view).splitlines()
    (host,) = [line.split() for line in second if line.startswith("host")]
    assert (host[2], host[4]) == ("6", "1.5")
