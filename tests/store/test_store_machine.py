"""A read never goes back behind what was acknowledged: on one machine, by any store object, thread or process."""
# pyright: reportArgumentType=false

import concurrent.futures
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpatch_jax.store.files import Encoded, Stored
from kvpatch_jax.store.objects import Objects

SECRET = b"s" * 16
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def name_of(number: int) -> str:
    return f"{number:032x}/enc"


def object_of(value: int) -> Encoded:
    return Encoded("encoder", {}, {"output": np.full(20, value, np.int64)})


def value_of(stored: Stored) -> int:
    assert len(set(stored.arrays["output"].tolist())) == 1
    return int(stored.arrays["output"][0])


names = strategies.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Several store objects of two tenants over one root, whose queues are halted and set going at any time.

    For each name, `written` is what is acknowledged, and `queued` the queued puts that may still take its place: each
    with the store that has it, which reads it at once.
    """

    stores = Bundle("stores")

    @initialize(target=stores)
    def begin(self):
        self.folder = tempfile.mkdtemp(prefix="kvpatch-test-", dir=MEMORY)
        self.count, self.gates = 0, dict[int, threading.Event]()
        self.all: list[Objects] = []
        self.written: dict[tuple[str, int], int | None] = {}
        self.queued: dict[tuple[str, int], list[tuple[Objects, int, concurrent.futures.Future]]] = {}
        return self.new(0, "one")

    def new(self, memory: int, tenant: str) -> Objects:
        store = Objects(f"{self.folder}/root", tenant, memory=memory, secret=SECRET)
        self.all.append(store)
        gate = self.gates[id(store)] = threading.Event()
        gate.set()
        commit = store.queue._commit

        def halted(jobs):
            gate.wait()
            return commit(jobs)

        store.queue._commit = halted
        return store

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def settled(self, key: tuple[str, int]) -> list[tuple[Objects, int, concurrent.futures.Future]]:
        """Moves queued puts that are done to what is written, and returns the others."""
        waiting = []
        for store, value, ack in self.queued.get(key, []):
            if not ack.done():
                waiting.append((store, value, ack))
            elif ack.result():
                self.written[key] = value
        self.queued[key] = waiting
        return waiting

    @rule(target=stores, memory=strategies.sampled_from([0, 1 << 20]), tenant=strategies.sampled_from(["one", "two"]))
    def open(self, memory, tenant):
        return self.new(memory, tenant)

    @rule(store=stores, number=names)
    def put(self, store, number):
        value, key = self.fresh(), (store.tenant, number)
        assert store.put([(name_of(number), object_of(value))]) == [True]
        self.overtake(key, value)
        self.check(store, number, [value])

    @rule(store=stores, numbers=strategies.lists(names, min_size=1, max_size=4))
    def put_many(self, store, numbers):
        value = self.fresh()
        store.put([(name_of(number), object_of(value)) for number in numbers])
        for number in numbers:
            self.overtake((store.tenant, number), value)

    @rule(store=stores, number=names)
    def put_async(self, store, number):
        value, key = self.fresh(), (store.tenant, number)
        ack = store.put_async(name_of(number), lambda: object_of(value), 160)
        self.queued.setdefault(key, []).append((store, value, ack))

    @rule(store=stores)
    def halt(self, store):
        self.gates[id(store)].clear()

    @rule(store=stores)
    def flush(self, store):
        self.gates[id(store)].set()
        store.flush()
        for key in list(self.queued):
            self.settled(key)

    @rule(store=stores, number=names)
    def delete(self, store, number):
        store.delete(f"{number:032x}")
        self.overtake((store.tenant, number), None)
        self.check(store, number, [None])

    @rule(store=stores)
    def delete_tenant(self, store):
        store.delete_tenant()
        for number in range(4):
            self.overtake((store.tenant, number), None)
            self.check(store, number, [None])

    def overtake(self, key: tuple[str, int], value: int | None) -> None:
        """Notes what is acknowledged. Puts that still wait began before: they are without effect."""
        self.settled(key)
        self.written[key] = value
        self.queued[key] = []

    @rule(store=stores, number=names)
    def amend(self, store, number):
        value, key = self.fresh(), (store.tenant, number)
        seen: list[int] = []

        def make(before):
            seen[:] = map(value_of, before)
            return object_of(value)

        allowed = self.allowed(store, number)
        store.amend(name_of(number), make)
        assert (seen[0] if seen else None) in [*allowed, self.allowed(store, number)[0]]
        self.overtake(key, value)

    @rule(store=stores, number=names)
    def get(self, store, number):
        self.check(store, number, self.allowed(store, number))

    @rule(store=stores)
    def collect(self, store):
        store.index.collect()

    def allowed(self, store: Objects, number: int) -> list[int | None]:
        """What a read may return now: what is acknowledged, or a queued put that has not been overtaken."""
        waiting = self.settled((store.tenant, number))
        return [self.written.get((store.tenant, number)), *(value for _, value, _ in waiting)]

    def check(self, store: Objects, number: int, allowed: list[int | None]) -> None:
        value = store.get(name_of(number), value_of)
        self.settled((store.tenant, number))
        assert value in [*allowed, self.written.get((store.tenant, number))]

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        try:
            self.end()
        finally:
            for store in self.all:
                store.close()
            shutil.rmtree(self.folder)

    def end(self) -> None:
        """Writes all that is queued. Then every store reads the same."""
        for gate in self.gates.values():
            gate.set()
        for store in self.all:
            store.flush()
        for tenant, number in list(self.queued):
            self.settled((tenant, number))
            for store in self.all:
                if store.tenant == tenant:
                    assert store.get(name_of(number), value_of) == self.written.get((tenant, number))


def run_machine(examples: int, steps: int) -> None:
    checks = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks, database=None
    )
    run_state_machine_as_test(Machine, settings=settings)


def test_reads_follow_what_is_acknowledged():
    run_machine(25, 30)


@pytest.mark.nightly
def test_reads_follow_what_is_acknowledged_in_many_programs():
    run_machine(1500, 60)


# ---------------------------------------------------------------------------------------------- threads and processes


class Versions:
    """Last version that was begun and that was acknowledged of each name, in memory that processes share.

    Odd versions are puts, even ones deletions. Each name has one writer.
    """

    def __init__(self, names: int):
        shared = mmap.mmap(-1, 16 * names)
        self.begun, self.acknowledged = np.frombuffer(shared, np.int64).reshape(2, names)


def write(store: Objects, versions: Versions, number: int, seed: int, end: float) -> None:
    """Puts and deletes an object again and again."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        version = int(versions.begun[number]) + (1 if versions.begun[number] % 2 == 0 or chance.random() < 0.3 else 2)
        versions.begun[number] = version
        if version % 2 == 0:
            store.delete(f"{number:032x}")
        elif chance.random() < 0.5:
            store.put([(name_of(number), object_of(version))])
        else:
            assert store.put_async(name_of(number), lambda version=version: object_of(version), 160).result()
        versions.acknowledged[number] = version


def read(store: Objects, versions: Versions, seed: int, end: float) -> int:
    """Reads all the time, and compares with what was acknowledged before and begun until after the read."""
    chance, count = random.Random(seed), 0
    while time.monotonic() < end:
        number = chance.randrange(len(versions.begun))
        first = int(versions.acknowledged[number])
        value = store.get(name_of(number), value_of)
        last = int(versions.begun[number])
        if value is None:
            assert first == 0 or first % 2 == 0 or last > first
        else:
            assert first <= value <= last
        count += 1
    return count


def test_threads_read_what_is_acknowledged(folder):
    versions, end = Versions(3), time.monotonic() + 3
    stores = [Objects(folder / "root", secret=SECRET, memory=memory) for memory in (0, 0, 3000, 1 << 20)]
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        writers = [pool.submit(write, stores[number], versions, number, number, end) for number in range(3)]
        readers = [pool.submit(read, store, versions, seed, end) for seed, store in enumerate(stores)]
        for writer in writers:
            writer.result()
        assert min(reader.result() for reader in readers) > 20
    assert versions.acknowledged.min() > 4
    for store in stores:
        assert store.counters["damaged"] == 0
        store.close()


def run_processes(folder: str, seconds: float, processes: int) -> int:
    """Runs writers, and a reader beside each, in processes of their own. Returns the number of those that failed."""
    versions, end, pids = Versions(processes), time.monotonic() + seconds, list[int]()
    for number in range(2 * processes):
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            store = Objects(f"{folder}/root", secret=SECRET, memory=[0, 1 << 20][number % 3 > 0])
            if number < processes:
                write(store, versions, number, number, end)
            else:
                read(store, versions, number, end)
            code = 0
        finally:
            os._exit(code)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


@pytest.mark.parametrize(("seconds", "processes"), [(3, 2), pytest.param(60, 12, marks=pytest.mark.nightly)])
def test_processes_read_what_is_acknowledged(folder, seconds, processes):
    command = [sys.executable, __file__, str(folder), str(seconds), str(processes)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")


if __name__ == "__main__":
    sys.exit(run_processes(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
