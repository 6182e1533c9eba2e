"""Every reader of a root gets what is acknowledged, never what preceded it, and what is refused changes nothing."""
# pyright: reportArgumentType=false

import concurrent.futures
import contextlib
import errno
import functools
import gc
import os
import shutil
import sqlite3
import tempfile
import threading
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpatch_jax.errors import KVPatchError, StoreError
from kvpatch_jax.store import index
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects
from tests.store.store_cases import SECRET, locked_index, name_of, object_of, run, value_of

names = strategies.integers(0, 3)


class Machine(RuleBasedStateMachine):
    """Several store objects of two tenants over one root, whose queues are halted and set going at any time.

    For each name, `written` is what is acknowledged, and `queued` the queued puts that may still take its place: each
    with the store that has it, which reads it at once.
    """

    stores = Bundle("stores")

    @initialize(target=stores)
    def begin(self):
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="kvpatch-test-", dir=memory)
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


def test_reads_follow_what_is_acknowledged():
    checks = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(stateful_step_count=30, suppress_health_check=checks)
    run_state_machine_as_test(Machine, settings=settings)


# ------------------------------------------------------------------------------------------------------------- forks


def fork_with_an_open_store(root: str) -> None:
    """A forked process goes on with its parent's store, also after the parent has closed it."""

    def write_all(numbers: range) -> None:
        for number in numbers:
            assert store.put([(name_of(number), object_of(number))]) == [True]

    def queue(number: int) -> concurrent.futures.Future[bool]:
        return store.put_async(name_of(number), lambda: object_of(number), 9)

    store = Objects(root, memory=1 << 20)
    write_all(range(5))
    acks = [queue(number) for number in range(100, 110)]
    (mine, yours), (inbox, outbox) = os.pipe(), os.pipe()
    if os.fork() == 0:
        assert all(store.get(name_of(number), value_of) == number for number in range(5))
        write_all(range(10, 20))
        os.write(yours, b"1")
        os.read(inbox, 1)  # the parent has closed its store, and another one opened the root
        write_all(range(20, 30))
        assert queue(30).result()
        store.close()
        os._exit(0)
    os.read(mine, 1)
    write_all(range(40, 45))
    store.close()
    assert all(ack.result() for ack in acks)
    Objects(root).close()
    os.write(outbox, b"1")
    assert os.wait()[1] == 0


def end_without_close(root: str) -> None:
    """The process ends with a full queue, which is written."""
    store = Objects(root)
    for number in range(50):
        store.put_async(name_of(number), lambda number=number: object_of(number), 9)


def test_a_fork_goes_on_with_its_parents_store_and_a_queue_is_written_at_the_end(folder: Path):
    code = """
    import sys
    from tests.store import test_shared_roots as roots
    roots.fork_with_an_open_store(sys.argv[1] + "/forked")
    roots.end_without_close(sys.argv[1] + "/ended")
    """
    assert run(code, str(folder)) == ""
    expected = {"forked": {*range(5), *range(10, 31), *range(40, 45), *range(100, 110)}, "ended": set(range(50))}
    for root, numbers in expected.items():
        with contextlib.closing(Objects(folder / root)) as store:
            assert {store.get(name, value_of) for name in store.with_prefix("")} == numbers
            assert store.damaged() == []


# --------------------------------------------------------------------------------------------------------- the queue


def test_a_queued_put_fails_alone_says_so_and_cannot_be_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    bad = Encoded("encoder", {}, {"leaf": np.zeros(3, np.complex64)})
    with contextlib.closing(Objects(folder / "root")) as store:

        def queue(numbers: range, wrong: int = -1) -> list[concurrent.futures.Future[bool]]:
            make = lambda number: bad if number == wrong else object_of(number)
            return [store.put_async(name_of(n), functools.partial(make, n), 9) for n in numbers]

        acks = queue(range(5), wrong=2)
        assert not any(ack.cancel() for ack in acks)
        assert [ack.exception() is None for ack in acks] == [True, True, False, True, True]
        with pytest.raises(KVPatchError, match="complex64"):
            store.flush()
        store.flush()  # it is raised once

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", refuse)
            acks = queue(range(10, 13))
            assert all("No space left" in str(ack.exception()) for ack in acks)
        with pytest.raises(StoreError, match="No space left") as failure:
            store.flush()
        assert len(failure.value.__notes__) == 2
        assert queue(range(20, 21))[0].result()
        assert sorted(store.with_prefix("")) == [name_of(number) for number in (0, 1, 3, 4, 20)]


def test_connections_end_with_their_threads_and_locks_with_their_store(folder: Path):
    store = Objects(folder / "root")
    store.put([(name_of(1), object_of(1))])
    counts = []
    for _ in range(20):
        thread = threading.Thread(target=store.get, args=(name_of(1), value_of))
        thread.start()
        thread.join()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) - min(counts) < 10
    del store, thread  # without close
    gc.collect()
    (folder / "root" / "damaged").touch()
    store = Objects(folder / "root")  # made again, which needs the root alone
    assert store.index.rebuilt == 1
    store.close()
    with pytest.raises(StoreError, match="after close"):
        store.put_async(name_of(1), lambda: object_of(1), 9)
    store.close()


# ------------------------------------------------------------------------------------------------------------- refusals


def put(store: Objects, number: int) -> None:
    assert store.put([(name_of(number), object_of(number))]) == [True]


def test_a_directory_of_something_else_is_left_alone(folder: Path):
    root = folder / "root"
    root.mkdir()
    (root / "notes.txt").write_text("{}")
    for path in (root, root / "notes.txt", root / "notes.txt" / "deeper"):
        with pytest.raises(StoreError, match="directory"):
            Objects(path)
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


def test_a_root_of_another_format_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "FORMAT", index.FORMAT + 1)
        Objects(folder / "whole").close()
    Objects(folder / "index").close()
    with contextlib.closing(sqlite3.connect(folder / "index" / "index.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {index.FORMAT + 1}")
    (folder / "whole" / "index.sqlite").unlink()  # its secret says it too
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in ("whole", "index"):
        with pytest.raises(StoreError, match=f"format {index.FORMAT + 1}; expected {index.FORMAT}"):
            Objects(folder / name)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == contents


def test_an_index_that_another_process_locks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    with contextlib.closing(Objects(folder / "root", memory=0)) as store:
        put(store, 1)
        with locked_index(store.root):
            for write in (lambda: put(store, 2), lambda: store.delete(f"{1:032x}")):
                with pytest.raises(StoreError, match="locked"):
                    write()
            assert store.get(name_of(1), value_of) == 1
            assert len([path for path in Path(store.root, "data").rglob("*") if path.is_file()]) == 1
        put(store, 2)
        assert store.with_prefix("") == [name_of(1), name_of(2)]


def test_a_root_that_is_removed_while_it_is_open(folder: Path):
    """Not even memory answers for the root that takes its place."""
    root, options = folder / "root", {"secret": SECRET, "memory": 1 << 20}
    old = Objects(root, **options)
    put(old, 1)
    assert old.get(name_of(1), value_of) == 1
    shutil.rmtree(root)
    for write in (lambda: put(old, 2), lambda: old.delete(f"{1:032x}")):
        with pytest.raises(StoreError, match=r"removed|No such file"):
            write()
    with pytest.raises(StoreError, match=r"No such file|unable to open"):
        old.put_async(name_of(3), lambda: object_of(3), 400).result()
    assert not root.exists()
    new = Objects(root, **options)
    new.put([(name_of(1), object_of(20))])
    assert new.get(name_of(1), value_of) == 20
    assert old.get(name_of(1), value_of) != 20
    with pytest.raises(StoreError, match="removed"):
        put(old, 2)
    with contextlib.suppress(StoreError):
        old.close()
    assert new.with_prefix("") == [name_of(1)]
    new.close()
