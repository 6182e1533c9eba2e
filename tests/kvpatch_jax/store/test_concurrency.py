"""Several processes over one store: no deadlock, and forks."""

import time
from pathlib import Path

from store_processes import Process, processes, wait_until

from kvpatch_jax.store import Budget, ChunkStore

PATIENCE = 300
"""Seconds without a sign of life after which a thread counts as stuck; a busy machine may take many of them."""


def ended(started: list[Process]) -> None:
    """Waits for all; fails with what one of them failed by."""
    try:
        wait_until(lambda: not any(process.alive for process in started), 3600)
    finally:
        for process in started:
            process.kill()
    assert [process.error for process in started if process.error] == []


def under_stress(root: Path, workers: int, seconds: int) -> None:
    """Everything at once for so long; every thread of every process goes on until the end."""
    ChunkStore(root).close()
    started = [processes().start("stress", root, worker, steps=seconds) for worker in range(workers)]
    outputs = Path(f"{root}.outputs")
    beats: dict[Path, tuple[str, float]] = {}
    try:
        while any(process.alive for process in started):
            now = time.monotonic()
            for beat in outputs.glob("stress.*.[0-9]"):
                count = beat.read_text()
                if beat not in beats or beats[beat][0] != count:
                    beats[beat] = count, now
            stuck = [path.name for path, (count, since) in beats.items() if count != "end" and now - since > PATIENCE]
            assert not stuck, f"no sign of life of {stuck} for {PATIENCE} seconds"
            time.sleep(0.05)
    except BaseException:
        for process in started:
            process.kill()
        raise
    ended(started)
    beats_at_last = [beat.read_text() for beat in outputs.glob("stress.*.[0-9]")]
    assert beats_at_last == ["end"] * 3 * workers
    ends = [process.spoken.splitlines()[-1].split() for process in started]
    assert all(words[0] == "done" for words in ends)
    hits, _, evicted = (sum(int(words[at]) for words in ends) for at in (1, 2, 3))
    assert hits > 0
    assert evicted > 0
    with ChunkStore(root, budget=Budget(host=0)) as store:
        store.collect()
    assert list((root / "tmp").iterdir()) == []
    assert list((root / "quarantine").iterdir()) == []


def test_a_moment_of_stress(tmp_path: Path):
    under_stress(tmp_path / "store", 2, 2)


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path):
    """Helpers that sum large objects are threads, which a fork leaves behind: it must not wait for them."""
    process = processes().start("fork", tmp_path / "store")
    wait_until(lambda: "forked" in process.spoken or bool(process.error), 120)
    assert process.error == ""
    assert process.spoken == "forked True\n"


def test_a_forked_process_does_without_the_remote_store(tmp_path: Path):
    """TensorStore would end it. Reads are misses there, and what must reach the remote store raises."""
    process = processes().start("fork_remote", tmp_path / "store")
    wait_until(lambda: "parent" in process.spoken or bool(process.error), 120)
    assert process.error == ""
    says = ["child reads True None", "child True", "child True", "child True", "parent True"]
    assert process.spoken.splitlines() == says


def test_a_forked_process_does_not_wait_for_a_fetch_of_its_parent(tmp_path: Path):
    process = processes().start("fork_fetch", tmp_path / "store")
    wait_until(lambda: "parent" in process.spoken or bool(process.error), 120)
    assert process.error == ""
    assert process.spoken.splitlines() == ["child computed", "parent"]
