"""Processes that share two roots and are killed at random moments, with a log of what was acknowledged.

As a command: `python crash_drill.py FOLDER [--kills 300] [--processes 32] [--seed 0]` prints the faults as JSON.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import index
from kvpatch_jax.store.files import Encoded, Stored
from kvpatch_jax.store.objects import Objects

BUDGET = 20_000
NAMES = 12
COUNTERS = 2
PARTS = {"chunk": "kv", "patch": "p.0123.4567", "encoder": "enc"}


def object_of(value: int, kind: str = "encoder") -> Encoded:
    """An object whose leaves all repeat its value, of about 1 to 4 kB."""
    size = 100 + value % 800
    leaves = {"first": np.full(size, value, np.int32), "second": np.full((3, 5), value % 251, np.uint8)}
    return Encoded(kind, {"id": str(value), "backbone": "drill"}, leaves)


def value_of(stored: Stored) -> int:
    """Returns an object's value, after a look at every leaf."""
    value = int(stored.body["id"])
    assert len(stored.arrays["first"]) == 100 + value % 800
    assert (stored.arrays["first"] == value).all()
    assert (stored.arrays["second"] == value % 251).all()
    return value


def name_of(number: int) -> str:
    """Returns a name; neighbours are of different kinds."""
    return f"{number:032x}/{PARTS[kind_of(number)]}"


def kind_of(number: int) -> str:
    """Returns the kind of the object of a name's number."""
    return list(PARTS)[number % len(PARTS)]


def chunk_of(number: int) -> str:
    """Returns the chunk of a name's number."""
    return f"{number:032x}"


# ------------------------------------------------------------------------------------------------ one process' life


class Worker:
    """Does random operations and logs each before it begins, when it is queued, and when it is acknowledged."""

    def __init__(self, folder: str, token: int):
        self.random, self.token, self.count = random.Random(token), token, 0
        self.log = os.open(f"{folder}/{token}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self.plain = Objects(f"{folder}/plain", memory=20_000)
        self.wiped = Objects(f"{folder}/plain", "wiped", key=b"k" * 32)
        self.small = Objects(f"{folder}/small", root_budget=BUDGET, memory=20_000)
        self.stores = {"plain": self.plain, "wiped": self.wiped, "small": self.small}

    def note(self, event: str, operation: int, *more: Any) -> None:
        line = json.dumps([time.monotonic_ns(), event, operation, *more])
        os.write(self.log, line.encode() + b"\n")

    def fresh(self) -> int:
        """Returns a number that no operation of any process has had."""
        self.count += 1
        return self.token * 100_000 + self.count

    def step(self) -> None:
        """Does one operation. One that fails is not acknowledged."""
        store = self.random.choices(["plain", "wiped", "small"], [5, 2, 3])[0]
        number = self.random.randrange(NAMES)
        actions = [self.put, self.put_many, self.put_async, self.delete, self.delete_tenant, self.amend, self.collect]
        action = self.random.choices(actions, [6, 2, 6, 3, 1, 2, 0.3])[0]
        try:
            action(store, number)
            if self.random.random() < 0.3:
                self.stores[store].get(name_of(number), value_of)
        except StoreError as error:
            self.note("error", 0, repr(error))

    def put(self, store: str, number: int) -> None:
        value = self.fresh()
        self.note("begin", value, store, [number], value)
        if self.stores[store].put([(name_of(number), object_of(value, kind_of(number)))])[0]:
            self.note("done", value)

    def put_many(self, store: str, number: int) -> None:
        value, numbers = self.fresh(), self.random.sample(range(NAMES), 3)
        self.note("begin", value, store, numbers, value)
        self.stores[store].put([(name_of(other), object_of(value, kind_of(other))) for other in numbers])
        self.note("done", value)

    def put_async(self, store: str, number: int) -> None:
        for other in (number, *self.random.sample(range(NAMES), 5)):  # many, so that others overtake them
            self.put_one_async(store, other)

    def put_one_async(self, store: str, number: int) -> None:
        value = self.fresh()
        self.note("begin", value, store, [number], value)
        ack = self.stores[store].put_async(name_of(number), lambda: object_of(value, kind_of(number)), 2000)
        self.note("queued", value)

        def acknowledge(done: Any) -> None:
            if done.exception() is None:
                self.note("done" if done.result() else "late", value)

        ack.add_done_callback(acknowledge)

    def delete(self, store: str, number: int) -> None:
        operation = self.fresh()
        self.note("begin", operation, store, [number], None)
        self.stores[store].delete(chunk_of(number))
        self.note("done", operation)

    def delete_tenant(self, _: str, __: int) -> None:
        operation = self.fresh()
        self.note("begin", operation, "wiped", list(range(NAMES)), None)
        self.wiped.delete_tenant()
        self.note("done", operation)

    def amend(self, _: str, number: int) -> None:
        operation = self.fresh()
        counter = 1_000_000 + number % COUNTERS
        self.note("begin", operation, "counter", [counter], None)
        name = f"{counter:032x}/enc"
        self.plain.amend(name, lambda before: object_of(1 + sum(map(value_of, before))))
        self.note("done", operation)

    def collect(self, store: str, _: int) -> None:
        self.stores[store].index.collect()


def work(folder: str, token: int) -> None:
    """Works until killed."""
    index.GRACE_SECONDS = 2.0  # living writers' files come near to be collected
    worker = Worker(folder, token)
    while True:
        worker.step()


def watch(folder: str) -> None:
    """Notes the most bytes there ever are in the root with a budget."""
    log = os.open(f"{folder}/watch", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    objects, peak = Objects(f"{folder}/small", root_budget=BUDGET), 0
    while True:
        (total,) = objects.index.row("SELECT COALESCE(SUM(size), 0) FROM objects") or (0,)
        if total > peak:
            os.write(log, f"{total}\n".encode())
        peak = max(peak, total)
        time.sleep(0.005)


# --------------------------------------------------------------------------------------------------------- verdicts


class Operation(NamedTuple):
    """An operation of the logs: when it began, when it counts as over for deletions and for others (inf: never)."""

    begin: float
    queued: float
    done: float
    numbers: list[int]
    value: int | None
    is_late: bool


def operations(folder: str) -> Iterator[tuple[str, Operation]]:
    """Reads the logs; the last line of a killed process may be missing, but not torn."""
    for entry in sorted(os.listdir(folder)):
        if not entry.endswith(".log"):
            continue
        begun, events = {}, {}
        with open(f"{folder}/{entry}", encoding="utf-8") as lines:
            for line in lines:
                at, event, operation, *more = json.loads(line)
                if event == "begin":
                    begun[operation] = at, more
                elif event != "error":
                    events[operation, event] = at
        for operation, (at, (store, numbers, value)) in begun.items():
            done = events.get((operation, "done"), float("inf"))
            queued = events.get((operation, "queued"), done)
            yield store, Operation(at, queued, done, numbers, value, (operation, "late") in events)


def faults(folder: str) -> list[str]:
    """Opens the roots after all processes are dead, and lists what is wrong."""
    histories: dict[tuple[str, int], list[Operation]] = {}
    for store, operation in operations(folder):
        for number in operation.numbers:
            histories.setdefault((store, number), []).append(operation)
    with open(f"{folder}/watch", encoding="utf-8") as lines:
        peak = max(map(int, lines))
    bad = [f"a budget of {BUDGET} had {peak} bytes"] * (not 0.5 * BUDGET < peak <= BUDGET)
    stores = {
        "plain": Objects(f"{folder}/plain"),
        "wiped": Objects(f"{folder}/plain", "wiped", key=b"k" * 32),
        "small": Objects(f"{folder}/small"),
    }
    for (store, number), history in histories.items():
        if store == "counter":
            done = sum(operation.done < float("inf") for operation in history)
            value = stores["plain"].get(f"{number:032x}/enc", value_of) or 0
            if not done <= value <= len(history):
                bad.append(f"counter {number}: {value} after {done} acknowledged of {len(history)} amendments")
            continue
        value = stores[store].get(name_of(number), value_of)
        bad += [f"{store} {number}: {fault}" for fault in _faults_of(value, history, may_evict=store == "small")]
    for name, objects in stores.items():
        bad += [f"{name}: {key} {objects.counters[key]}" for key in ("damaged", "read_errors") if objects.counters[key]]
        bad += [f"{name}: damaged {damaged}" for damaged in objects.damaged()]
    for name in ("plain", "small"):
        bad += [f"{name}: {fault}" for fault in _index_faults(stores[name])]
    return bad


def _faults_of(value: int | None, history: list[Operation], may_evict: bool) -> Iterator[str]:
    """Compares a name's value with its history: some operation that nothing later follows must have left it."""
    if value is None and (may_evict or not any(operation.done < float("inf") for operation in history)):
        return
    sources = [operation for operation in history if operation.value == value and not operation.is_late]
    for source in sources:
        overtaken = False
        for other in history:
            end = source.queued if other.value is None else source.done
            overtaken |= other.done < float("inf") and other.begin > end
        if not overtaken:
            return
    yield f"got {value}, which something acknowledged has replaced or deleted" if sources else f"got {value}: lost"


def _index_faults(objects: Objects) -> Iterator[str]:
    database = objects.index
    if (check := database.row("PRAGMA integrity_check")) != ("ok",):
        yield f"integrity: {check}"
    counted = database.rows("SELECT tenant, kind, SUM(size), COUNT(*) FROM objects GROUP BY 1, 2 ORDER BY 1, 2")
    usage = database.rows("SELECT tenant, kind, bytes, count FROM usage WHERE count > 0 ORDER BY 1, 2")
    if counted != usage:
        yield f"usage: {usage}; counted {counted}"
    for file, size in database.rows("SELECT file, size FROM objects"):
        if os.stat(f"{objects.root}/data/{file}").st_size != size:
            yield f"file {file}: of another size"
    if sum(row[2] for row in usage) > BUDGET and objects.root.endswith("/small"):
        yield f"over budget: {usage}"


# ------------------------------------------------------------------------------------------------------------- drill


def _forked(task: Any, *arguments: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        task(*arguments)
    except BaseException as error:
        print(f"{task.__name__}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def drill(folder: str, kills: int, processes: int, seed: int, pause: float) -> dict[str, Any]:
    """Runs processes and kills one after another, then all. Returns counts and faults."""
    chance, token, begun = random.Random(seed), seed * 1000, time.monotonic()
    workers, died = list[int](), 0
    for _ in range(processes):
        token += 1
        workers.append(_forked(work, folder, token))
    watcher = _forked(watch, folder)
    for _ in range(kills):
        time.sleep(chance.expovariate(1 / pause))
        victim = workers.pop(chance.randrange(len(workers)))
        os.kill(victim, signal.SIGKILL)
        died += not os.WIFSIGNALED(os.waitpid(victim, 0)[1])
        token += 1
        workers.append(_forked(work, folder, token))
    time.sleep(pause)
    for pid in [*workers, watcher]:
        os.kill(pid, signal.SIGKILL)
        died += not os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    acknowledged = sum(operation.done < float("inf") for _, operation in operations(folder))
    bad = faults(folder) + [f"{died} processes ended by themselves"] * bool(died)
    return {"kills": kills, "acknowledged": acknowledged, "seconds": time.monotonic() - begun, "faults": bad}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.1, help="mean seconds between kills")
    options = parser.parse_args()
    print(json.dumps(drill(options.folder, options.kills, options.processes, options.seed, options.pause)))
