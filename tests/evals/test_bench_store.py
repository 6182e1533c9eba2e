"""The store's benchmark runs from end to end and judges rightly. How fast anything is, is never tested."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from evals.bench import store
from kvpatch_jax.errors import InputError

METRICS = {
    ("durable put", "raw write and sync"): ("at least", 0.6),
    ("durable put", "safetensors save and sync"): ("at least", 1.5),
    ("asynchronous put returns", "durable put"): ("at most", 0.5),
    ("verified get", "raw read, pooled"): ("at least", 0.4),
    ("verified get on a device", "Orbax, leaf by leaf"): ("at least", 4),
    ("one layer, verified", "verified get"): ("at most", 0.1),
    ("patch put", "raw write and sync of one"): ("at most", 2.5),
    ("patch put, grouped", "raw write and sync of one"): ("at most", 0.6),
    ("opening 40 objects", ""): ("at most", 0.25),
    ("evicting put, at 20 objects", ""): ("at most", 0.1),
    ("evicting put, at 40 objects", ""): ("at most", 0.1),
    ("collect, nothing expired, at 20 objects", ""): ("at most", 1.0),
    ("collect, nothing expired, at 40 objects", ""): ("at most", 1.0),
    ("library put, at 20 entries", ""): ("at most", 0.01),
    ("get over heads on 8 devices", "Orbax, layers stacked"): ("at least", 3),
    ("fetch of both halves, disk", "the longer half alone"): ("at most", 1.5),
    ("fetch of both halves, latency", "the longer half alone"): ("at most", 1.15),
}


@pytest.mark.slow
def test_the_suite_runs_from_end_to_end(tmp_path: Path):
    program = [sys.executable, "-m", "evals.bench", "--suite=store", "--quick", f"--out={tmp_path}"]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "bench_store.json").read_text())
    barred = {(row["metric"], row["against"]): row for row in result["rows"] if "bar" in row}
    assert {key: (row["sense"], row["bar"]) for key, row in barred.items()} == METRICS
    for row in result["rows"]:
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row["seconds"].values())
        assert row["low"] <= row["value"] <= row["high"]
        assert math.isfinite(row["value"])
    assert result["config"]["quick"]
    assert result["config"]["file_system"]
    text = (tmp_path / "bench_store.md").read_text()
    assert text.count("\n| ") == len(result["rows"]) + 1
    assert "not a measurement" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bench_store.json",
        "bench_store.md",
        "bench_store.png",
    ]
    assert {"patch put, grouped, beside a busy writer"} <= {row["metric"] for row in result["rows"]}


def test_memory_is_no_disk(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(store, "file_system", lambda folder: "tmpfs")
    with pytest.raises(InputError, match="tmpfs; expected a directory on a disk"):
        store.run(out=str(tmp_path))


def test_a_miss_is_not_timed_as_a_hit():
    with pytest.raises(InputError, match="expected a hit"):
        store.expect_hit(None)
