"""Stores and remote stores that tests hold up at chosen moments."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorstore
from store_processes import wait_until

from kvpatch_jax.store import ChunkStore, KeyValueStore, RemoteStore, TensorStoreAdapter

PATIENCE = 120
"""Seconds that only a hang takes."""


class WriteGate:
    """Holds up whoever comes by until it is opened."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.go.wait(PATIENCE)


@contextlib.contextmanager
def in_a_thread[T](call: Callable[[], T]) -> Iterator[concurrent.futures.Future[T]]:
    """Calls a function in a thread, which has ended when this is left."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield future
        future.result(PATIENCE)


def soon(done: Callable[[], bool]) -> None:
    """Gives what must not happen a moment to happen."""
    with contextlib.suppress(AssertionError):
        wait_until(done, 0.2)


class GatedStore(ChunkStore):
    """A store whose asynchronous puts wait at a gate before anything of them is written."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.gate, put_group = WriteGate(), self.disk.put_group

        def gated(items: Any, *more: Any) -> Any:
            if threading.current_thread().name == "kvpatch-writer":
                self.gate.wait()
            return put_group(items, *more)

        self.disk.put_group = gated  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> "GatedStore":
        return self


def remote_through[S](make: Callable[[Any], S], spec: Any, **options: Any) -> tuple[S, KeyValueStore]:
    """Returns a stand-in for TensorStore's key-value store, made of it, and a remote store that calls the stand-in."""
    opening: concurrent.futures.Future[S] = concurrent.futures.Future()
    real = tensorstore.KvStore

    def open_through(*arguments: Any, **more: Any) -> concurrent.futures.Future[S]:
        opening.set_result(make(real.open(*arguments, **more).result()))
        return opening

    with pytest.MonkeyPatch.context() as patched:
        service = SimpleNamespace(open=open_through, KeyRange=real.KeyRange, Spec=real.Spec)
        patched.setattr(tensorstore, "KvStore", service)
        remote = KeyValueStore(spec, **options)
    return opening.result(), remote


class GatedRemote(RemoteStore):
    """A remote store whose objects wait at a gate when all of them was read; puts at gates before they begin."""

    def __init__(self) -> None:
        super().__init__(TensorStoreAdapter({"driver": "memory"}, context=tensorstore.Context()))
        self.read_gate: WriteGate | None = None
        self.put_gates: list[WriteGate] = []

    def put(self, name: Any, blob: Any) -> bool:
        if self.put_gates:
            self.put_gates.pop(0).wait()
        return super().put(name, blob)

    def open(self, name: Any, unsteady: Any = None) -> Any:
        found = super().open(name, unsteady)
        if found is None:
            return None

        def read(names: Any) -> Any:
            arrays = found.read(names)
            if self.read_gate is not None and names[-1] == list(found.header.leaves)[-1]:
                self.read_gate.wait()
            return arrays

        return found._replace(read=read)
