"""What processes that will be killed do for ever to one store, each saying before and after what it changes.

"putting", "put", "deleting" and "deleted", each with an id: what was said last decides what must be there. "bad" is a
wrong read. Each role has a tenant of its own, and ids that no earlier process of the role had.
"""

import itertools
import os
import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from store_cases import BACKBONE, host_chunk, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore

CHANGED, LEAVING, PROMOTED, CROWDED, SWEPT, STOPPED = "changed", "leaving", "promoted", "crowded", "swept", "stopped"
"""Tenants of the roles."""
ALL = "everything"
"""In place of an id."""
REMOTE_SECRET = b"the secret of both machines"


def made(id: str) -> kvp.Chunk:
    """The chunk of this id: its content is a function of it, so that whoever reads it can tell whether it is right."""
    return host_chunk(id, zlib.crc32(id.encode()))


def say(*words: object) -> None:
    print(*words, flush=True)


def _ids(word: str, worker: int) -> Iterator[str]:
    born = time.time_ns()
    return (f"{word}{worker}.{born}.{count}" for count in itertools.count())


def _expect(store: ChunkStore, id: str) -> None:
    """Says so if what is there is wrong."""
    found = store.get(id, BACKBONE)
    if found is not None and not same_chunk(found, made(id)):
        say("bad", id)


def change(root: str, worker: int, **more: object) -> None:
    """Puts in every way, deletes, and puts again under the same names."""
    store, rng = ChunkStore(root, tenant=CHANGED, budget=Budget(host=0)), random.Random(time.time_ns())
    living: list[str] = []
    ways: list[Callable[[kvp.Chunk], Any]] = [
        store.put,
        lambda chunk: store.put_async(chunk).result(),
        lambda chunk: store.put_many([chunk, made(f"{chunk.id}.beside")]),
        lambda chunk: (store.put(chunk), store.put_patches([patch_of(chunk, array=np.asarray)])),
    ]
    for id in _ids("c", worker):
        say("putting", id)
        rng.choice(ways)(made(id))
        say("put", id)
        living.append(id)
        if len(living) > 4:
            old = living.pop(rng.randrange(len(living)))
            say("deleting", old)
            store.delete(old, BACKBONE)
            say("deleted", old)
            if store.get(old, BACKBONE) is not None or store.patch_count(old, BACKBONE):
                say("bad", old)
            if rng.random() < 0.3:  # the name is used again
                say("putting", old)
                store.put(made(old))
                say("put", old)
                living.append(old)
        _expect(store, rng.choice(living))


def leave(root: str, worker: int, **more: object) -> None:
    """Puts some objects and deletes the whole tenant, again and again."""
    store = ChunkStore(root, tenant=LEAVING, budget=Budget(host=0))
    names = _ids("l", worker)
    while True:
        ids = list(itertools.islice(names, 3))
        for id in ids:
            say("putting", id)
            store.put(made(id))
            say("put", id)
        say("deleting", ALL)
        store.delete_tenant()
        say("deleted", ALL)


def far_store(root: str) -> ChunkStore:
    """Opens the tenant's store on another machine, which shares the remote store."""
    remote = KeyValueStore({"driver": "file", "path": f"{root}.remote/"})
    common = {"secret": REMOTE_SECRET, "budget": Budget(host=0), "write_behind": False}
    return ChunkStore(f"{root}.far", tenant=PROMOTED, remote=remote, **common)


def near_store(root: str) -> ChunkStore:
    """Opens the tenant's store here: of another root, because the secrets of both must be the same."""
    remote = KeyValueStore({"driver": "file", "path": f"{root}.remote/"})
    return ChunkStore(f"{root}.near", tenant=PROMOTED, secret=REMOTE_SECRET, budget=Budget(host=0), remote=remote)


def promote(root: str, worker: int, **more: object) -> None:
    """Reads what another machine has put, so that a copy is kept here; deletes some of it."""
    far, near, rng = far_store(root), near_store(root), random.Random(time.time_ns())
    for id in _ids("p", worker):
        say("putting", id)
        far.put(made(id))
        say("put", id)
        if not same_chunk(near.get(id, BACKBONE), made(id)):
            say("bad", id)
        if rng.random() < 0.3:
            say("deleting", id)
            near.delete(id, BACKBONE)
            say("deleted", id)
            if near.get(id, BACKBONE) is not None:
                say("bad", id)


def crowd(root: str, worker: int, **more: object) -> None:
    """Puts into a budget for a few objects, of which others go each time: what is there must be right."""
    store = ChunkStore(root, tenant=CROWDED, budget=Budget(host=0, tenant=60_000))
    rng, known = random.Random(time.time_ns()), list[str]()
    for id in _ids("b", worker):
        store.put(made(id))
        known.append(id)
        for each in rng.sample(known, min(len(known), 5)):
            _expect(store, each)
        say("kept", id)


def sweep(root: str, worker: int, **more: object) -> None:
    """Puts objects that have expired beside one that has not, and collects."""
    late = ChunkStore(root, tenant=SWEPT, budget=Budget(host=0))
    early = ChunkStore(root, tenant=SWEPT, budget=Budget(host=0), clock=lambda: 1.0)
    for id in _ids("s", worker):
        say("putting", id)
        early.put(made(f"{id}.brief"), ttl=1)
        late.put(made(id), ttl=1e6)
        say("put", id)
        late.collect()
        if late.get(f"{id}.brief", BACKBONE) is not None:
            say("bad", id)


def stop_inside(root: str, worker: int, call: str, **more: object) -> None:
    """Puts or deletes an object, and stops for ever before its name is there or gone, with every lock that this takes.

    Args:
      call: "put" of "within", or "delete" of "before".
    """
    store = ChunkStore(root, tenant=STOPPED, budget=Budget(host=0))
    store.put(made("before"))
    rename, unlink = os.rename, os.unlink

    def stop(name: Any) -> None:
        if str(name).endswith(".safetensors"):
            say("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping_rename(source: Any, target: Any, **places: Any) -> None:
        stop(target)
        rename(source, target, **places)

    def stopping_unlink(path: Any, **places: Any) -> None:
        stop(path)
        unlink(path, **places)

    os.rename, os.unlink = stopping_rename, stopping_unlink
    store.put(made("within")) if call == "put" else store.delete("before", BACKBONE)
    say("done")


ROLES = (change, leave, promote, crowd, sweep, stop_inside)


def last_words(lines: list[str]) -> dict[str, str]:
    """What was said last of each id; what was said of all concerns those that were named before."""
    said: dict[str, str] = {}
    for word, id in (line.split() for line in lines):
        if id == ALL:
            said.update(dict.fromkeys(said, word))
        elif word in ("putting", "put", "deleting", "deleted"):
            said[id] = word
    return said


def check_words(store: ChunkStore, lines: list[str], gone: set[str]) -> tuple[int, int]:
    """Fails unless a store has what was said of it last. Returns how many objects are there, and how many deleted.

    Args:
      gone: paths of what was evicted.
    """
    assert [line for line in lines if line.startswith("bad")] == []
    there = deleted = 0
    for id, word in last_words(lines).items():
        found = store.get(id, BACKBONE)
        assert found is None or same_chunk(found, made(id)), f"{id}: a bad read"
        if word == "put" and store.names.canonical(BACKBONE, id).path not in gone:
            assert found is not None, f"{id}: acknowledged and lost"
            there += 1
        if word == "deleted":
            assert found is None, f"{id}: deleted and there"
            deleted += 1
        for patch in store.get_patches(patch_of(made(id)).metadata):
            assert same(patch.factors["k"][0], patch_of(made(id)).factors["k"][0])  # pyright: ignore
            assert word != "deleted", f"a patch of {id}: deleted and there"
    return there, deleted


def check_roles(root: Path, lines: Callable[[str], list[str]], gone: set[str]) -> None:
    """Checks what the roles have said; `lines` gives what all processes of one role said."""
    for role, tenant in ((change, CHANGED), (leave, LEAVING), (sweep, SWEPT)):
        with ChunkStore(root, tenant=tenant, budget=Budget(host=0)) as store:
            check_words(store, lines(role.__name__), gone)
            assert store.counters["quarantined"] == 0
            store.collect()
    with ChunkStore(root, tenant=CROWDED, budget=Budget(host=0)) as store:
        store.collect()
    with near_store(str(root)) as store:
        there, _ = check_words(store, lines("promote"), set())
        assert there > 0, "nothing was promoted"
        assert store.counters["quarantined"] == 0
    assert [line for line in lines("crowd") if line.startswith("bad")] == []
