"""What processes of the tests do to a store. One program imports everything and forks them, so that they start fast."""

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import store_actors
import store_roles
from failing_system import OneKill
from store_cases import BACKBONE, host_chunk, patch_of, same, same_chunk
from store_roles import made, say

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import StoreFullError, StoreUnreachableError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    KeyValueStore,
    PatchKey,
    Request,
    StaticLibrary,
    fetch,
    load_snapshot,
    rotate_key,
)
from kvpatch_jax.store.disk import eviction
from kvpatch_jax.store.disk.eviction import make_room
from kvpatch_jax.store.disk.shard import Shard

ANTECEDENTS = (("A",), ("other",))
KEPT = 3 << 20
"""Bytes that the evictor leaves."""
KEY, NEW_KEY, SEALED, SHELVED = b"k" * 32, b"n" * 32, "sealed", "shelved"
SECRET = b"another secret of the names"
SEALED_IDS = [f"sealed.{number}" for number in range(6)]
"""What is in the snapshot that is restored."""
LEAST_ROUNDS = 20
"""Of every thread under stress, five actions each, on however busy a machine."""


BEHIND = (
    Antecedent.of("A"),
    Antecedent.of(Member("A", "version one")),
    Antecedent.of(Member("A", "version two")),
    Antecedent.of(Member("A", "version one", "bare:" + "0" * 32)),
    Antecedent.of(Member("A", "version one", "approximate:" + "0" * 32)),
    Antecedent.of(Member("A", None, "bare:" + "1" * 32)),
)
"""What the same id may stand for, each the antecedent of another patch."""


def form(root: str, worker: int, steps: int, **more: object) -> None:
    """Stores the patch behind one of `BEHIND`, again and again, and says whether it reads that and no other."""
    store, behind = ChunkStore(root, budget=Budget(host=0)), BEHIND[worker]
    chunk = made("page")
    patch = patch_of(chunk, behind, seed=worker, array=np.asarray)
    found: list[kvp.Patch] = []
    for _ in range(steps):
        store.put_patches([patch])
        found = store.get_patches(PatchKey("page", BACKBONE, behind))
        say(len(found), all(each.metadata.behind.difference(behind) is None for each in found))


def patches_made(id: str, array: Any = np.asarray) -> list[kvp.Patch]:
    """The patches of this id, likewise; on the host, so that a process needs no backend."""
    return [patch_of(made(id), antecedent, array=array) for antecedent in ANTECEDENTS]


# ---------------------------------------------------------------------------------------------- until it is killed


def write(root: str, worker: int, **more: object) -> None:
    """Puts chunks and patches for ever; says which once they are acknowledged."""
    store = ChunkStore(root, budget=Budget(host=0))
    born, rng = time.time_ns(), random.Random(time.time_ns())
    for count in itertools.count():
        id = f"w{worker}.{born}.{count}"
        what = rng.choice(["put", "async", "again", "patches"])
        if what == "patches":
            store.put_patches(patches_made(id))
            say("patch", id)
            continue
        if what == "async":
            store.put_async(made(id)).result()
        else:
            store.put(made(id))
        say("kv", id)
        if what == "again":  # an equal one in its place
            store.put(made(id))


def read(root: str, worker: int, output: str, **more: object) -> None:
    """Reads for ever what was acknowledged, and what may be next; says "bad" for what is not what its id says."""
    store = ChunkStore(root, budget=Budget(host=0))
    rng = random.Random(time.time_ns())
    while True:
        known = [line.split()[1] for line in lines_of(Path(output).parent, "write") if line.startswith("kv")]
        hits = 0
        for id in rng.sample(known, min(len(known), 20)):
            begin, _, count = id.rpartition(".")
            for each in (id, f"{begin}.{int(count) + 1}"):
                found = rng.choice((whole, layers))(store, each)
                hits += found is True
                if found is False:
                    say("bad", each)
        say("read", hits)


def lines_of(folder: Path, what: str) -> list[str]:
    """What all processes of one kind said, in order; whole lines only, since one may be killed while it speaks."""
    paths = [path for path in folder.glob(f"{what}.*") if path.suffix[1:].isdecimal()]
    texts = [path.read_text(encoding="utf-8") for path in sorted(paths, key=lambda path: int(path.suffix[1:]))]
    return [line for text in texts for line in text.split("\n")[:-1]]


def whole(store: ChunkStore, id: str) -> bool | None:
    """Whether the chunk is right; None where there is none."""
    found = store.get(id, BACKBONE)
    return None if found is None else same_chunk(found, made(id))


def layers(store: ChunkStore, id: str) -> bool | None:
    """As `whole`, layer by layer."""
    stream, chunk = store.stream(id, BACKBONE), made(id)
    if stream is None:
        return None
    return all(same(values[name], chunk.kv[name][layer]) for layer, values in stream for name in values)


def evict(root: str, **more: object) -> None:
    """Keeps the disk within KEPT for ever; says what goes before it goes."""
    disk, unlink_if = ChunkStore(root, budget=Budget(host=0)).disk, eviction.unlink_if

    def recorded(shard: Shard, file: str) -> bool:
        say("evicted", f"{shard.path}/{file}")
        return unlink_if(shard, file)

    eviction.unlink_if = recorded  # pyright: ignore[reportAttributeAccessIssue]
    while True:
        make_room(disk, KEPT, 0, lambda _: False)
        disk.sweep()
        say("kept")
        time.sleep(0.005)


def restore(root: str, **more: object) -> None:
    """Restores an encrypted snapshot, under another secret, for ever, and removes some of it; says both."""
    rng = random.Random(time.time_ns())
    while True:
        load_snapshot(f"{root}.snapshot", root, tenant=SEALED, key=KEY)
        for id in SEALED_IDS:
            say("restored", id)
        with ChunkStore(root, tenant=SEALED, key=KEY, budget=Budget(host=0)) as store:
            for id in SEALED_IDS:
                if whole(store, id) is False:
                    say("bad", id)
            for id in rng.sample(SEALED_IDS, 3):
                say("removing", id)
                store.delete(id, BACKBONE)


def text_of(name: str) -> str:
    return f"the text of {name}"


def shelve(root: str, **more: object) -> None:
    """Puts entries with chunks into an encrypted library, and deletes some, for ever; says what it does."""
    store = ChunkStore(root, tenant=SHELVED, key=KEY, budget=Budget(host=0))
    files, rng, born = StaticLibrary(store, quota=1 << 40), random.Random(time.time_ns()), time.time_ns()
    for count in itertools.count():
        name = f"f{born}.{count}"
        files.put(name, text_of(name), chunk=made(name))
        say("entry", name)
        found = files.get("TEXT", name)
        if found is None or found.content != text_of(name):
            say("bad", name)
        listed = [entry.reference.name for entry in files.entries()]
        if len(listed) > 8:
            for old in rng.sample(listed, 3):
                say("deleting", old)
                files.delete("TEXT", old)
                say("deleted", old)


# ------------------------------------------------------------------------------------------------- until it is done


def rotate(root: str, at: int, **more: object) -> None:
    """Rotates the key of a tenant, and is killed before the system call number `at`; says how many there were."""
    kill = OneKill(root, at)
    with kill.installed():
        rotate_key(root, old=KEY, new=NEW_KEY)
    say(kill.count)


def stress(root: str, worker: int, steps: int, output: str, **more: object) -> None:
    """Everything at once, on three threads, for `steps` seconds; each thread shows in a file that it goes on."""
    store = ChunkStore(root, budget=Budget(host=40_000, disk=200_000), queue=50_000)
    deadline, failed = time.monotonic() + steps, []

    def go(thread: int) -> None:
        actions, rng = actions_of(store), random.Random(100 * worker + thread)
        beat = Path(f"{output}.{thread}")
        try:
            for count in itertools.count():
                beat.write_text(str(count))
                if time.monotonic() > deadline and count >= LEAST_ROUNDS:
                    beat.write_text("end")
                    return
                for _ in range(5):
                    try:
                        rng.choice(actions)(f"S{rng.randrange(40)}")
                    except StoreFullError:  # of a budget this small, pins and others' writes may leave nothing
                        say("full")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    store.close()
    assert store.counters["quarantined"] == 0
    say("done", store.counters["disk_hits"], store.counters["host_hits"], store.counters["disk_evicted_budget"])


def actions_of(store: ChunkStore) -> list[Callable[[str], object]]:
    """What a process under stress does to one id; each checks what it is given."""

    def right(answer: bool | None) -> None:
        assert answer is not False, "a bad read"

    def pinned(id: str) -> None:
        with store.pin(id, BACKBONE):
            right(whole(store, id))

    def patches(id: str) -> None:
        first = patches_made(id)[0]
        found = store.get_patches(first.metadata)
        assert all(same(each.factors["k"][0], first.factors["k"][0]) for each in found)  # pyright: ignore

    return [
        lambda id: store.put(made(id)),
        lambda id: store.put(made(id), encoding="bfloat16", ttl=0.05),
        lambda id: store.put_async(made(id)).result(),
        lambda id: store.put_async(made(id)).exception(),
        lambda id: store.put_patches(patches_made(id)),
        lambda id: right(whole(store, id)),
        lambda id: right(whole(store, id)),
        lambda id: right(layers(store, id)),
        pinned,
        patches,
        lambda id: store.delete(id, BACKBONE),
        lambda id: store.contains(id, BACKBONE),
        lambda id: store.collect(),
        lambda id: store.flush(),
    ]


def fork(root: str, **more: object) -> None:
    """Puts a large chunk, which starts threads, and forks: the new process, which has none of them, does the same."""
    large = host_chunk("large", 1, tokens=16_384)
    ChunkStore(root, budget=Budget(host=0)).put(large)
    if os.fork():
        return
    store = ChunkStore(root, budget=Budget(host=0))
    store.put(large)
    say("forked", same_chunk(store.get("large", BACKBONE), large))


def fork_queue(root: str, **more: object) -> None:
    """Puts asynchronously, holds the writer up so that something waits in the queue, and forks."""
    store = ChunkStore(root, budget=Budget(host=0))
    store.put_async(made("first")).result()
    gate, reached, put_group = threading.Event(), threading.Event(), store.disk.put_group

    def held(items: Any, *more: Any) -> Any:
        reached.set()
        gate.wait(60)
        return put_group(items, *more)

    store.disk.put_group = held  # pyright: ignore[reportAttributeAccessIssue]
    waiting = [store.put_async(made(id)) for id in ("busy", "queued")]
    assert reached.wait(60)
    store.disk.put_group = put_group
    if os.fork():
        gate.set()
        store.flush()
        store.close()
        say("parent", *(same_chunk(store_of(root).get(id, BACKBONE), made(id)) for id in ("busy", "queued")))
        return
    errors = {type(ack.exception(timeout=60)).__name__ for ack in waiting}
    store.put_async(made("child")).result(timeout=60)
    store.flush()
    store.close()
    right = [same_chunk(store_of(root).get(id, BACKBONE), made(id)) for id in ("first", "child")]
    say("child", *right, *errors)


def fork_remote(root: str, **more: object) -> None:
    """Uses a remote store, whose threads a new process lacks, and forks: there it must not answer, and end nobody."""
    here, there = made("here"), made("there")
    remote = KeyValueStore({"driver": "file", "path": f"{root}.remote/"})
    opened = functools.partial(ChunkStore, secret=SECRET, remote=remote, write_behind=False)
    with opened(root) as store, opened(f"{root}.other") as other:
        store.put(here)
        if process := os.fork():
            with contextlib.suppress(ChildProcessError):  # nobody waits for it, so that its end is no news
                os.waitpid(process, 0)
            store.put(there)
            say("parent", same_chunk(store.get("there", BACKBONE), there))
            return
        say("child reads", same_chunk(store.get("here", BACKBONE), here), other.get("here", BACKBONE))
        for call in (
            lambda: store.put(there),
            lambda: store.delete("here", BACKBONE),
            lambda: KeyValueStore("memory://"),
        ):
            try:
                call()
            except StoreUnreachableError as error:
                say("child", "forked" in str(error))


def fork_fetch(root: str, **more: object) -> None:
    """Computes a chunk, and forks meanwhile: the new process does not wait for who is at it in the old one."""
    store = ChunkStore(root)
    request = Request("chunk", BACKBONE)
    gate, begun = threading.Event(), threading.Event()

    def compute(misses: Any) -> list[kvp.Chunk]:
        begun.set()
        gate.wait(60)
        return [made("chunk") for _ in misses]

    at_it = threading.Thread(target=fetch, args=(store, [request], compute))
    at_it.start()
    begun.wait(60)
    if process := os.fork():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
        gate.set()
        at_it.join()
        store.close()
        say("parent")
        return
    signal.alarm(30)  # or it would wait for ever
    (found,) = fetch(store, [request], lambda misses: [made("chunk")], keep=False)
    say("child", found.source)


def act(address: str, **more: object) -> None:
    """Uses a store on the command of the process that listens there."""
    store_actors.serve(address)


def store_of(root: str) -> ChunkStore:
    return ChunkStore(root, budget=Budget(host=0))


WORK = {
    work.__name__: work
    for work in (
        *(
            act,
            write,
            read,
            evict,
            restore,
            shelve,
            stress,
            fork,
            fork_queue,
            fork_remote,
            fork_fetch,
            form,
            rotate,
        ),
        *store_roles.ROLES,
    )
}


def serve() -> None:
    """Forks a process per line of JSON, whose output goes to a file, and says its number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        order = json.loads(line)
        if process := os.fork():
            print(process, flush=True)
            continue
        status = 1
        try:
            sys.stdout = os.fdopen(os.open(order["output"], os.O_WRONLY | os.O_CREAT), "w")
            functools.partial(WORK[order.pop("what")], **order)()
            sys.stdout.close()
            status = 0
        except BaseException as error:
            Path(order["output"] + ".error").write_text(repr(error))
        finally:
            os._exit(status)


if __name__ == "__main__":
    serve()
