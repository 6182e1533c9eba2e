"""Processes killed at random moments: two writers, two readers, one evictor, over one store."""

import random
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from store_cases import BACKBONE, same, same_chunk
from store_child import ANTECEDENTS, lines_of, made, patches_made
from store_processes import Process, processes, wait_until

from kvpatch_jax.store import Budget, ChunkStore

ROLES = [("write", 0), ("write", 1), ("read", 0), ("read", 1), ("evict", 0)]
OFTEN = [4, 4, 1, 1, 3]
"""How often each is killed, of 13: those that change something more often."""


def killed(root: Path, kills: int) -> None:
    """SIGKILLs one process after the other while the rest go on; each is started again at once."""
    rng = random.Random(0)
    running: list[Process] = []
    try:
        running += [processes().start(what, root, worker) for what, worker in ROLES]
        for _ in range(kills):
            (at,) = rng.choices(range(len(ROLES)), OFTEN)
            if rng.random() < 0.8:  # the others are killed while they start
                wait_until(lambda at=at: bool(running[at].spoken or running[at].error))
                time.sleep(rng.random() * 0.1)
            running[at].kill()
            assert running[at].error == ""
            what, worker = ROLES[at]
            running[at] = processes().start(what, root, worker)
        for process in running:
            wait_until(lambda process=process: bool(process.spoken or process.error))
    finally:
        for process in running:
            process.kill()


def check_all(root: Path) -> tuple[int, int]:
    """Nothing acknowledged is lost, nothing was read wrong, nothing is left. Objects acknowledged, and kept."""
    outputs = Path(f"{root}.outputs")
    assert [path.read_text() for path in outputs.glob("*.error")] == []
    reads = [line.split() for line in lines_of(outputs, "read")]
    assert [words for words in reads if words[0] == "bad"] == []
    assert sum(int(words[1]) for words in reads) > 0, "no reader found anything"
    gone = {line.split()[1] for line in lines_of(outputs, "evict") if line.startswith("evicted")}
    acknowledged = [line.split() for line in lines_of(outputs, "write")]
    with ChunkStore(root, budget=Budget(host=0)) as store:
        kept = sum(check(store, kind, id, gone) for kind, id in acknowledged)
        store.collect()
        assert store.counters["quarantined"] == 0
    assert sorted(path.name for path in root.iterdir()) == NAMES
    assert list((root / "tmp").iterdir()) == []
    assert list((root / "quarantine").iterdir()) == []
    assert all(path.name.endswith(".safetensors") for path in (root / "obj").rglob("*") if path.is_file())
    return sum(1 if kind == "kv" else len(ANTECEDENTS) for kind, _ in acknowledged), kept


NAMES = ["STORE.copy.json", "STORE.json", "evict.lock", "names.lock", "obj", "quarantine", "tmp"]


def check(store: ChunkStore, kind: str, id: str, gone: set[str]) -> int:
    """How many of the objects that were acknowledged together are there: all but those the evictor took."""
    if kind == "kv":
        chunk = made(id)
        there = store._names.canonical(chunk.backbone, id).path not in gone
        assert not there or same_chunk(store.get(id, BACKBONE), chunk), f"{id}: acknowledged and lost"
        return int(there)
    kept = [patch for patch in patches_made(id, jnp.asarray) if store._names.patch(patch).path not in gone]
    for patch in kept:
        found = store.get_patches(patch.stamp)
        assert len(found) == 1, f"a patch of {id}: acknowledged and lost"
        assert same(found[0].factors["k"][0], patch.factors["k"][0])  # pyright: ignore
    return len(kept)


def test_ten_kills_lose_nothing(tmp_path: Path):
    killed(tmp_path / "store", 10)
    acknowledged, kept = check_all(tmp_path / "store")
    assert acknowledged >= 10
    assert kept > 0


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing(tmp_path: Path):
    killed(tmp_path / "store", 200)
    acknowledged, kept = check_all(tmp_path / "store")
    assert acknowledged >= 400
    assert 0 < kept < acknowledged, "the evictor took nothing"
