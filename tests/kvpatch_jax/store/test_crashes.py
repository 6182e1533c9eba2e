"""Processes killed at random moments over one store: two writers, two readers, an evictor; of tenants that encrypt, one
that restores a snapshot again and again, and one that puts into a library and deletes from it; and the roles of
`store_roles`: tenants that delete, leave, fill a budget, collect, and read what another machine has put."""

import random
import time
from pathlib import Path

import jax.numpy as jnp
from store_cases import BACKBONE, same, same_chunk
from store_child import (
    ANTECEDENTS,
    KEY,
    SEALED,
    SEALED_IDS,
    SHELVED,
    lines_of,
    patches_made,
    text_of,
)
from store_processes import Process, processes, wait_until
from store_roles import check_roles, made

from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, load_snapshot, save_snapshot

ROLES = [("write", 0), ("write", 1), ("read", 0), ("read", 1), ("evict", 0), ("restore", 0), ("shelve", 0)]
ROLES += [("change", 0), ("leave", 0), ("promote", 0), ("crowd", 0), ("sweep", 0)]
OFTEN = [3, 3, 1, 1, 3, 4, 4, 5, 4, 4, 3, 3]
"""How often each is killed, of 38: those that change something more often."""


def enough_done(outputs: Path) -> bool:
    """Whether each role has done once what the checks look at; on a busy machine none may live long enough at first."""
    found = any(line.startswith("read ") and line != "read 0" for line in lines_of(outputs, "read"))
    restored = any(line.startswith("restored") for line in lines_of(outputs, "restore"))
    said = [lines_of(outputs, what) for what in ("shelve", "change", "leave", "promote")]
    return found and restored and all(any(line.startswith("deleted") for line in lines) for lines in said)


def killed(root: Path, kills: int) -> None:
    """SIGKILLs one process after the other while the rest go on; each is started again at once."""
    rng = random.Random(0)
    running: list[Process] = []
    with ChunkStore(f"{root}.source", tenant=SEALED, key=KEY) as source:
        for id in SEALED_IDS:
            source.put(made(id))
        StaticLibrary(source, quota=1 << 20).put("restored", "with its chunk", chunk=made(SEALED_IDS[0]))
    save_snapshot(f"{root}.source", f"{root}.snapshot", tenant=SEALED)
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
        outputs = Path(f"{root}.outputs")
        for process in running:
            wait_until(lambda process=process: bool(process.spoken or process.error))
        wait_until(lambda: enough_done(outputs) or any(process.error for process in running))
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
    check_restored(root, lines_of(outputs, "restore"), gone)
    check_shelved(root, lines_of(outputs, "shelve"), gone)
    check_roles(root, lambda what: lines_of(outputs, what), gone)
    with ChunkStore(root, budget=Budget(host=0)) as store:
        kept = sum(check(store, kind, id, gone) for kind, id in acknowledged)
        store.collect()
        assert store.counters["quarantined"] == 0
    names = {path.name for path in root.iterdir() if not path.name.startswith("index.sqlite")}
    assert sorted(names) == NAMES
    assert list((root / "tmp").iterdir()) == []
    assert list((root / "quarantine").iterdir()) == []
    files = [path.name for path in (root / "obj").rglob("*") if path.is_file()]
    assert all(name.endswith((".safetensors", ".gone")) or name in ("KEY", "KEY.copy") for name in files)
    assert files.count("KEY") == 2  # of the two tenants that encrypt
    return sum(1 if kind == "kv" else len(ANTECEDENTS) for kind, _ in acknowledged), kept


NAMES = ["STORE.copy.json", "STORE.json", "deleted", "lib", "obj", "quarantine", "tmp"]


def last_words(lines: list[str]) -> dict[str, str]:
    """What was said last of each thing."""
    return {thing: word for word, thing in map(str.split, lines) if word != "bad"}


def check_restored(root: Path, lines: list[str], gone: set[str]) -> None:
    """What an encrypted restore brought, and nobody took away since, is there; whatever is there is right."""
    assert [line for line in lines if line.startswith("bad")] == []
    assert any(line.startswith("restored") for line in lines), "no restore came to its end"
    with ChunkStore(root, tenant=SEALED, key=KEY, budget=Budget(host=0)) as store:
        for id, word in last_words(lines).items():
            found = store.get(id, BACKBONE)
            taken = word == "removing" or store.names.canonical(BACKBONE, id).path in gone
            assert same_chunk(found, made(id)) or (found is None and taken), f"{id}: restored and lost"
        load_snapshot(f"{root}.snapshot", root, tenant=SEALED, key=KEY)
        assert all(same_chunk(store.get(id, BACKBONE), made(id)) for id in SEALED_IDS)
        assert store.counters["quarantined"] == 0
        store.collect()


def check_shelved(root: Path, lines: list[str], gone: set[str]) -> None:
    """Entries that were acknowledged are there, with their chunks; those whose deletion was acknowledged are not."""
    assert [line for line in lines if line.startswith("bad")] == []
    assert any(line.startswith("deleted") for line in lines), "nothing was deleted from a library"
    with ChunkStore(root, tenant=SHELVED, key=KEY, budget=Budget(host=0)) as store:
        files = StaticLibrary(store, quota=1 << 40)
        for name, word in last_words(lines).items():
            found = files.get("TEXT", name)
            assert found is None or found.content == text_of(name), f"{name}: a bad read"
            assert word != "entry" or found is not None, f"{name}: acknowledged and lost"
            assert word != "deleted" or found is None, f"{name}: deleted and there"
            if word == "entry" and store.names.canonical(BACKBONE, name).path not in gone:
                assert same_chunk(store.get(name, BACKBONE), made(name)), f"the chunk of {name}: acknowledged and lost"
            if word == "deleted":
                assert store.get(name, BACKBONE) is None, f"the chunk of {name}: deleted and there"
        assert store.counters["quarantined"] == 0
        store.collect()


def check(store: ChunkStore, kind: str, id: str, gone: set[str]) -> int:
    """How many of the objects that were acknowledged together are there: all but those the evictor took."""
    if kind == "kv":
        chunk = made(id)
        there = store.names.canonical(chunk.backbone, id).path not in gone
        assert not there or same_chunk(store.get(id, BACKBONE), chunk), f"{id}: acknowledged and lost"
        return int(there)
    kept = [patch for patch in patches_made(id, jnp.asarray) if store.names.patch(patch).path not in gone]
    for patch in kept:
        found = store.get_patches(patch.metadata)
        assert len(found) == 1, f"a patch of {id}: acknowledged and lost"
        assert same(found[0].factors["k"][0], patch.factors["k"][0])  # pyright: ignore
    return len(kept)


def test_a_dozen_kills_lose_nothing(tmp_path: Path):
    killed(tmp_path / "store", 12)
    acknowledged, kept = check_all(tmp_path / "store")
    assert acknowledged >= 10
    assert kept > 0
