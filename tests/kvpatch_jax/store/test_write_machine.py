"""Programs of puts, reads and deletions over one root, some held up, against a dictionary.

Two store objects share a root and a remote store. The first one's queue is held up for a while, and so are reads from
the remote store that end in a copy on the disk. A read never gives what is older than what was acknowledged, and what
was deleted never comes back.
"""

import concurrent.futures
import os
import shutil
import tempfile
import threading
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from store_cases import BACKBONE, chunk_of, name_of
from store_gates import PATIENCE, GatedRemote, WriteGate

from kvpatch_jax.store import Budget, ChunkStore, RemoteStore

IDS, SEEDS = ("a", "b"), range(4)
CHUNKS = {(id, seed): chunk_of(id, seed, tokens=2) for id in IDS for seed in SEEDS}
ids, seeds, numbers = st.sampled_from(IDS), st.sampled_from(SEEDS), st.sampled_from((0, 1))


class GatedByThread(GatedRemote):
    """A remote store at whose gate only the threads of the machine wait."""

    def open(self, name: Any, unsteady: Any = None) -> Any:
        held = threading.current_thread().name.startswith("held")
        return super().open(name, unsteady) if held else RemoteStore.open(self, name, unsteady)


class Machine(RuleBasedStateMachine):
    """Attributes: durable, queued: seeds by id, of what was acknowledged and of what waits in the first one's queue."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.remote = tempfile.mkdtemp(), GatedByThread()
        self.stores = [
            ChunkStore(f"{self.folder}/store", budget=Budget(host=1 << 20), remote=self.remote, write_behind=False)
            for _ in range(2)
        ]
        self.durable: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self.open = threading.Event()
        self.open.set()
        writer, commit = self.stores[0]._writer, self.stores[0]._writer._put
        writer._put = lambda items: self.open.wait(PATIENCE) and commit(items)
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="held")
        self.read: concurrent.futures.Future[Any] | None = None

    def teardown(self) -> None:
        if self.read is not None:
            self.end_a_read()
        self.open.set()
        for store in self.stores:
            store.close()
        self.pool.shutdown()
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------------------- writes

    @rule(id=ids, seed=seeds, by=numbers)
    def put(self, id: str, seed: int, by: int) -> None:
        self.stores[by].put(CHUNKS[id, seed])
        self.durable[id] = seed
        self.queued.pop(id, None)

    @rule(id=ids, seed=seeds)
    def put_in_the_background(self, id: str, seed: int) -> None:
        self.stores[1].put_async(CHUNKS[id, seed]).result(PATIENCE)
        self.durable[id] = seed
        self.queued.pop(id, None)

    @rule(id=ids, seed=seeds)
    def queue(self, id: str, seed: int) -> None:
        self.open.clear()
        self.stores[0].put_async(CHUNKS[id, seed])
        self.queued[id] = seed

    @rule()
    def let_the_queue_go(self) -> None:
        self.open.set()
        self.stores[0].flush()
        self.durable |= self.queued
        self.queued.clear()

    @rule(id=ids, by=numbers)
    def delete(self, id: str, by: int) -> None:
        self.stores[by].delete(id, BACKBONE)
        self.durable.pop(id, None)
        self.queued.pop(id, None)

    @rule()
    def delete_tenant(self) -> None:
        self.stores[1].delete_tenant()
        self.durable.clear()
        self.queued.clear()

    @rule(id=ids)
    def evict(self, id: str) -> None:
        """As eviction does, or another process's: the remote store has it still."""
        if id in self.durable:
            self.stores[1].disk.delete(name_of(self.stores[1], CHUNKS[id, 0]).path)

    # -------------------------------------------------------------------------------------------- reads held up

    @precondition(lambda self: self.read is None)
    @rule(id=ids, seed=seeds, by=numbers, layers=st.booleans())
    def begin_a_read(self, id: str, seed: int, by: int, layers: bool) -> None:
        """Evicts a chunk and reads it from the remote store; all of it is here, but for the copy on the disk."""
        if id not in self.durable or id in self.queued:
            self.put(id, seed, by)
        self.evict(id)
        self.remote.read_gate = gate = WriteGate()
        store = self.stores[by]

        def read() -> Any:
            stream = store.stream(id, BACKBONE) if layers else None
            return store.get(id, BACKBONE) if stream is None else stream.chunk(lambda *_: None)

        self.read = self.pool.submit(read)
        assert gate.reached.wait(PATIENCE)
        self.asked = id, self.durable[id]

    @precondition(lambda self: self.read is not None)
    @rule()
    def end_a_read(self) -> None:
        assert self.read is not None
        assert self.remote.read_gate is not None
        self.remote.read_gate.go.set()
        assert (self.asked[0], seed_of(self.read.result(PATIENCE))) == self.asked
        self.read = None

    # -------------------------------------------------------------------------------------------------- reads

    @rule(id=ids, by=numbers, layers=st.booleans())
    def get(self, id: str, by: int, layers: bool) -> None:
        store = self.stores[by]
        stream = store.stream(id, BACKBONE) if layers else None
        found = store.get(id, BACKBONE) if stream is None else stream.chunk(lambda *_: None)
        assert seed_of(found) == self.expected(id, by)

    @invariant()
    def everything_is_as_it_was_said(self) -> None:
        """But while a read is held up, which must find what it finds."""
        if self.read is None:
            for id in IDS:
                for by in (0, 1):
                    self.get(id, by, False)

    def expected(self, id: str, by: int) -> int | None:
        own = self.queued if by == 0 else {}  # nobody else is shown what is not durable
        return own.get(id, self.durable.get(id))


def seed_of(chunk: Any) -> int | None:
    if chunk is None:
        return None
    (seed,) = (seed for seed in SEEDS if np.array_equal(chunk.kv["k"], CHUNKS[chunk.id, seed].kv["k"]))
    return seed


def test_programs_of_writes_and_reads_are_those_of_a_dictionary():
    more = int(os.environ.get("KVPATCH_MACHINE_EXAMPLES", "10"))
    run_state_machine_as_test(Machine, settings=settings(max_examples=more, stateful_step_count=20, deadline=None))
