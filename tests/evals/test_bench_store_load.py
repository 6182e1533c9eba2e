"""The load's check of a read accepts what some order explains, nothing else; the verdict follows from the samples."""

import collections
import dataclasses
import itertools
import json
import math
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from evals.bench import store_load
from evals.bench.store_load_log import DELETE, DEPTH, FAILED_DELETE, FAILED_PUT, PUT, LoadLog
from evals.bench.store_load_worker import LoadCounts, LoadWorker, chunk_of_write, number_in, patch_of_write, pattern
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import ChunkStore


@pytest.fixture
def log() -> LoadLog:
    return LoadLog.shared(4, multiprocessing.get_context("spawn"))


def write(log: LoadLog, kind: int = PUT, ended: int | None = 0) -> int:
    """One whole write; with None it stays under way, with another kind it failed."""
    number = log.begin(1, kind)
    if ended is not None:
        log.end(1, number, ended or None)
    return number


def now() -> int:
    return time.monotonic_ns() + 1


def test_the_last_acknowledged_write_is_right_and_those_before_are_stale(log: LoadLog):
    first, second = write(log), write(log)
    assert log.judge(1, second, now(), evictable=False) is None
    assert log.judge(1, first, now(), evictable=False) == "stale"


def test_what_was_acknowledged_after_the_read_began_may_be_missed(log: LoadLog):
    first = write(log)
    began = now()
    time.sleep(1e-4)
    second = write(log)
    assert log.judge(1, first, began, evictable=False) is None
    assert log.judge(1, second, began, evictable=False) is None


def test_of_writes_at_the_same_time_either_may_be_last(log: LoadLog):
    first = log.begin(1, PUT)
    second = log.begin(1, PUT)
    log.end(1, second)
    log.end(1, first)
    assert log.judge(1, first, now(), evictable=False) is None
    assert log.judge(1, second, now(), evictable=False) is None


def test_a_write_under_way_may_be_read_or_not(log: LoadLog):
    first, second = write(log), write(log, ended=None)
    assert log.judge(1, first, now(), evictable=False) is None
    assert log.judge(1, second, now(), evictable=False) is None


def test_what_was_deleted_is_not_read(log: LoadLog):
    first = write(log)
    write(log, DELETE)
    assert log.judge(1, first, now(), evictable=False) == "deleted"
    assert log.judge(1, None, now(), evictable=False) is None
    assert log.judge(1, write(log), now(), evictable=False) is None


def test_a_miss_is_a_loss_only_where_nothing_may_have_removed_it(log: LoadLog):
    assert log.judge(1, None, now(), evictable=False) is None
    write(log)
    assert log.judge(1, None, now(), evictable=False) == "lost"
    assert log.judge(1, None, now(), evictable=True) is None
    write(log, FAILED_PUT, FAILED_PUT)
    assert log.judge(1, None, now(), evictable=False) == "lost"
    write(log, DELETE, ended=None)
    assert log.judge(1, None, now(), evictable=False) is None


def test_a_deletion_before_the_put_explains_no_miss(log: LoadLog):
    write(log, DELETE, FAILED_DELETE)
    assert log.judge(1, None, now(), evictable=False) is None
    write(log)
    assert log.judge(1, None, now(), evictable=False) == "lost"


def test_a_failed_write_supersedes_nothing_and_may_itself_be_read_until_another_is_acknowledged(log: LoadLog):
    first, failed = write(log), write(log, PUT, FAILED_PUT)
    assert log.judge(1, first, now(), evictable=False) is None
    assert log.judge(1, failed, now(), evictable=False) is None
    write(log)
    assert log.judge(1, failed, now(), evictable=False) == "stale"


def test_numbers_that_nobody_wrote_are_unknown(log: LoadLog):
    last = write(log)
    assert log.judge(1, last + 1, now(), evictable=True) == "unknown"
    assert log.judge(0, last, now(), evictable=True) == "unknown"  # another name


def test_a_write_that_is_no_longer_remembered_is_stale(log: LoadLog):
    first = write(log)
    for _ in range(DEPTH):
        last = write(log)
    assert log.judge(1, first, now(), evictable=True) == "stale"
    assert log.judge(1, last, now(), evictable=True) is None


def test_values_of_two_writes_do_not_pass_as_one():
    whole = [np.asarray(value) for value in chunk_of_write(3, 9, 5).kv.values()]
    assert number_in(3, whole) == 9
    assert number_in(4, whole) == -1
    assert number_in(3, [whole[0], pattern(3, 10, whole[0].size)]) == -1
    bent = whole[0].copy()
    bent.reshape(-1)[-1] += 1
    assert number_in(3, [bent, whole[1]]) == -1
    factors = patch_of_write(3, 9, 5).factors
    assert number_in(3, [np.asarray(own[1]) for own in factors.values()]) == 9


def test_a_store_that_returns_old_values_is_found_out(tmp_path: Path, monkeypatch):
    """The worker itself, on a store whose reads give the first value again."""
    tenant = dataclasses.replace(store_load.tenants_of(tmp_path, None)[0], chunks=2)
    shared = LoadLog.shared(2 * store_load.CHUNKS, multiprocessing.get_context("spawn"))
    first: dict[str, object] = {}
    read = ChunkStore.get

    def stuck(self: ChunkStore, id: str, backbone: str, **options: object) -> object:
        found = read(self, id, backbone, **options)  # pyright: ignore[reportArgumentType]
        return first.setdefault(id, found) if found is not None else None

    for broken in (False, True):
        if broken:
            monkeypatch.setattr(ChunkStore, "get", stuck)
        counts = LoadWorker(tenant, shared, seed=2).run(math.inf, most=120)
        assert counts.reads["get: hit"] > 0
        assert not counts.failures
        if not broken:
            assert not counts.wrong
    assert counts.wrong["stale"] > 0


def test_every_tenant_has_processes_and_two_have_the_remote_store(tmp_path: Path):
    tenants = store_load.tenants_of(tmp_path, "valkey://here")
    assigned = collections.Counter(tenant.name for tenant in store_load.assigned_tenants(tenants, 32))
    assert assigned == {"remote": 2, "limited": 6, "kept": 6, "sealed": 6, "east": 6, "west": 6}
    spans = sorted((tenant.first, tenant.first + 2 * tenant.chunks) for tenant in tenants)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_memory_is_judged_by_its_second_half():
    seconds = list(range(20))
    warming = [100 + 50 * min(second, 10) for second in seconds]
    assert store_load.growth(seconds, warming) == pytest.approx(0, abs=0.03)
    assert store_load.growth(seconds, [100 + second for second in seconds]) == pytest.approx(9 / 114.5)
    assert store_load.growth([], []) == 0


def test_the_verdict_names_what_was_missed():
    samples = store_load.LoadSamples([0.0, 1.0, 2.0, 3.0], [[10, 10]] * 4, {"root shared": [0.5, 1.2, 0.9, 0.9]})
    counts = LoadCounts(reads=collections.Counter({"get: hit": 5}), wrong=collections.Counter({"stale": 1}))
    rows = {row["metric"]: row for row in store_load.verdict_rows(counts, samples, hung=0)}
    missed = {name for name, row in rows.items() if row.get("passed") is False}
    assert missed == {"wrong reads: stale", "bytes over the budget, most, root shared"}


def test_too_few_processes_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="expected 4 or more"):
        store_load.run(workers=3, out=str(tmp_path))


@pytest.mark.slow
def test_the_load_runs_from_end_to_end(tmp_path: Path):
    program = [sys.executable, "-m", "evals.bench", "--suite=store_load", "--quick", f"--out={tmp_path}"]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "bench_store_load.json").read_text())
    wrong = [row for row in result["rows"] if row["metric"].startswith("wrong reads")]
    assert len(wrong) == len(store_load.WRONG)
    assert all(row["passed"] for row in wrong), result["counts"]["examples"]
    assert {"put", "get"} <= result["counts"]["calls"].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bench_store_load.json",
        "bench_store_load.md",
        "bench_store_load.png",
    ]
