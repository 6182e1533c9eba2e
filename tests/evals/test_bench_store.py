"""The store's benchmark runs from end to end and judges rightly. How fast anything is, is never tested."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from evals.bench import store
from kvpatch_jax.errors import InputError

PAIRS = {
    ("durable put", "raw write and sync"): ("at least", 0.6),
    ("durable put", "safetensors save and sync"): ("at least", 1.5),
    ("asynchronous put returns", "durable put"): ("at most", 0.5),
    ("verified get", "raw read, pooled"): ("at least", 0.4),
    ("verified get on a device", "Orbax, leaf by leaf"): ("at least", 4),
    ("one layer, verified", "verified get"): ("at most", 0.1),
    ("patch put", "raw write and sync of one"): ("at most", 2.5),
    ("patch put, grouped", "raw write and sync of one"): ("at most", 0.6),
    ("library put, at 20 objects", "kvpatch_jax"): ("at most", 0.01),
    ("get of 1 MB", "safetensors load_file, layer by layer"): ("at most", 1.2),
    ("get of 16 KB", "safetensors load_file, layer by layer"): ("at most", 2),
    ("get over heads on 8 devices", "Orbax, layers stacked"): ("at least", 3),
}
OPERATIONS = {
    "ls, first rows": 0.05,
    "stat": 0.1,
    "collect, nothing expired": 1,
    "opening": 0.25,
    "get_patches, few of them match": 0.001,
    "delete a chunk with its patches": 1,
    "evicting put's p99 over a plain put's median": 2,
}
"""At every number of objects."""


@pytest.mark.slow
def test_the_suite_runs_from_end_to_end(tmp_path: Path):
    program = [sys.executable, "-m", "evals.bench", "--suite=store", "--quick", f"--out={tmp_path}"]
    done = subprocess.run(program, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "bench_store.json").read_text())
    pairs = [row for row in result["rows"] if "place" not in row]
    barred = {(row["metric"], row["against"]): row for row in pairs if "bar" in row}
    assert {key: (row["sense"], row["bar"]) for key, row in barred.items()} == PAIRS
    scale = [row for row in result["rows"] if "place" in row]
    bars = {(row["operation"], row["objects"]): row["bar"] for row in scale if "bar" in row}
    expected = {(operation, count): bar for operation, bar in OPERATIONS.items() for count in (20, 40)}
    assert bars == expected
    assert {"kvpatch_jax", "raw files", "safetensors"} <= {row["side"] for row in scale}
    for row in result["rows"]:
        assert all(min(seconds) > 0 for seconds in row.get("seconds", {}).values())
        assert math.isfinite(row["value"])
        assert row["value"] > 0
    assert result["config"]["quick"]
    assert result["config"]["file_system"]
    text = (tmp_path / "bench_store.md").read_text()
    lines = {(row["operation"], row["side"]) for row in scale}
    assert text.count("\n| ") == len(pairs) + len(lines) + 3  # both headings, and a rule of the second
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
