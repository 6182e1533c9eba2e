"""Actors that use stores over one root on command, in this process and in others, and stop in the middle of it.

An actor has a store object. It carries out one call at a time, and stops before a chosen one of its system calls
until it is let go on: whatever it holds then, others have to cope with. A call that does not end soon stays in flight.
"""

import contextlib
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, Pipe
from pathlib import Path
from typing import Any

import pytest
from store_cases import BACKBONE, host_chunk

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, load_snapshot

STEPS = ("open", "rename", "link", "unlink", "fsync", "pwritev", "mkdir", "scandir", "stat", "lstat", "utime")
WRITER = "kvpatch-writer"
"""Name of the threads that write what was queued."""
SECRET = b"the secret of the names"
SIZE, FILLER = 100, "filler"
"""Tokens of the objects, and the id of one that evicts all others."""


class _Stop:
    """Stops a thread before one of its system calls."""

    def __init__(self, left: int, reached: Callable[[str], None]) -> None:
        self._left, self._reached, self._go = left, reached, threading.Event()

    def passing(self, step: str) -> None:
        self._left -= 1
        if self._left == -1:
            self._reached(step)
            self._go.wait(120)

    def go(self) -> None:
        self._left = -2
        self._go.set()


_stops: dict[int | str, _Stop] = {}
"""By the number of a thread, or the name of all writers."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """The threads of this process stop where they are told to."""

    def wrapped(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*arguments: Any, **more: Any) -> Any:
            stop = _stops.get(threading.get_ident())
            if stop is None and threading.current_thread().name == WRITER:
                stop = _stops.get(WRITER)
            if stop is not None:
                stop.passing(step)
            return call(*arguments, **more)

        return passing

    with pytest.MonkeyPatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, wrapped(name, getattr(os, name)))
        patched.setattr(fcntl, "flock", wrapped("flock", fcntl.flock))
        yield


class _Actor:
    """What carries out the calls; `serve` reads them from a connection, and says what came of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._saying = connection, threading.Lock()
        self._orders: queue.Queue[tuple[int, str, tuple[Any, ...], int | None] | None] = queue.Queue()
        self._stops: list[_Stop] = []
        self._store: ChunkStore | None = None
        self._root = ""
        self._seeds: dict[bytes, int] = {}

    def serve(self) -> None:
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        with contextlib.suppress(EOFError, OSError):
            while (order := self._connection.recv()) is not None:
                if order == "go":
                    for stop in self._stops:
                        stop.go()
                else:
                    self._orders.put(order)
        self._orders.put(None)
        thread.join()

    def _say(self, number: int, word: str, value: Any = None) -> None:
        with self._saying, contextlib.suppress(OSError):
            self._connection.send((number, word, time.monotonic_ns(), value))

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            number, what, words, at = order
            place = WRITER if what == "queue" else threading.get_ident()
            if at is not None:
                _stops[place] = _Stop(at, lambda step, number=number: self._say(number, "stopped", step))
                self._stops = [*self._stops[-8:], _stops[place]]
            try:
                value = getattr(self, what)(number, *words)
                self._say(number, "placed" if what == "queue" else "done", value)
            except StoreError as error:
                self._say(number, "failed", repr(error))
            except BaseException as error:
                self._say(number, "broken", repr(error))
            finally:
                if what != "queue":
                    _stops.pop(place, None)

    # ------------------------------------------------------------------------------------------------------ calls

    def open(self, number: int, root: str, remote: str) -> None:
        self._root = root
        beside = KeyValueStore({"driver": "file", "path": f"{remote}/"})
        self._store = ChunkStore(root, secret=SECRET, budget=Budget(host=1 << 20), remote=beside)

    def close(self, number: int) -> None:
        _stops.pop(WRITER, None)
        with contextlib.suppress(StoreError):
            self._at.close()

    @property
    def _at(self) -> ChunkStore:
        assert self._store is not None
        return self._store

    def put(self, number: int, id: str, seed: int) -> None:
        self._at.put(self._chunk(id, seed))

    def queue(self, number: int, id: str, seed: int) -> None:
        ack = self._at.put_async(self._chunk(id, seed))
        ack.add_done_callback(lambda done: self._say(number, "failed" if done.exception() else "done"))

    def flush(self, number: int) -> None:
        self._at.flush()

    def get(self, number: int, id: str) -> int | None:
        return self._seed(self._at.get(id, BACKBONE))

    def stream(self, number: int, id: str) -> int | None:
        stream = self._at.stream(id, BACKBONE)
        return None if stream is None else self._seed(stream.chunk(lambda *_: None))

    def delete(self, number: int, id: str) -> None:
        self._at.delete(id, BACKBONE)

    def delete_tenant(self, number: int) -> None:
        self._at.delete_tenant()

    def collect(self, number: int) -> None:
        self._at.collect()

    def evict(self, number: int) -> None:
        """Puts an object within a budget that has no room for another."""
        filler = host_chunk(FILLER, 0, tokens=SIZE)
        budget = Budget(host=0, disk=int(1.2 * filler.nbytes) + 4096)
        with ChunkStore(self._root, secret=SECRET, budget=budget) as small:
            small.put(filler)

    def restore(self, number: int, snapshot: str) -> None:
        load_snapshot(snapshot, self._root, tenant="default", secret=SECRET)

    def _chunk(self, id: str, seed: int) -> Any:
        return host_chunk(id, seed, tokens=SIZE)

    def _seed(self, chunk: Any) -> int | None:
        """The seed of a chunk that was read; 0 to 999 may have been written."""
        if chunk is None:
            return None
        key = chunk.kv["k"].tobytes()
        while key not in self._seeds:
            assert len(self._seeds) < 1000, "content that nobody wrote"
            seed = len(self._seeds)
            self._seeds[self._chunk("any", seed).kv["k"].tobytes()] = seed
        return self._seeds[key]


def serve(address: str) -> None:
    """An actor of a process of its own, that listens to another process."""
    with stoppable(), Client(address, family="AF_UNIX") as connection:
        _Actor(connection).serve()


_SOON, _LONG = 0.06, 60
"""Seconds to wait for a call that may be held up by another, and for one that is not."""


class Actors:
    """Actors over one root: some of this process, then some of other processes.

    Attributes:
      said: called with what an actor says: the actor, its call's number, the word, the time and a value.
    """

    def __init__(self, here: int, start: Callable[[str], Any], elsewhere: int, folder: Path) -> None:
        self.connections: list[Connection] = []
        self._busy: dict[int, int] = {}  # number of the call, by actor
        self.stopped: dict[int, int] = {}  # number of the call that has stopped, by actor
        self._numbers = 0
        self.said: Callable[[int, int, str, int, Any], None] = lambda *_: None
        for _ in range(here):
            ours, theirs = Pipe()
            threading.Thread(target=_Actor(theirs).serve, daemon=True).start()
            self.connections.append(ours)
        for at in range(elsewhere):
            address = str(folder / f"actor{at}")
            with Listener(address, family="AF_UNIX") as listener:
                start(address)
                self.connections.append(listener.accept())

    def is_busy(self, actor: int) -> bool:
        """Whether an actor's call is in flight."""
        return actor in self._busy

    @property
    def next_number(self) -> int:
        """Number of the next call."""
        return self._numbers

    def call(self, actor: int, what: str, *words: Any, at: int | None = None) -> int:
        """Begins a call of an actor that is not busy, and waits until it ends or stops, if that is soon.

        Args:
          at: number of the system call before which it stops; None: it does not.

        Returns:
          The call's number.
        """
        number = self._numbers
        self._numbers += 1
        self._busy[actor] = number
        self.connections[actor].send((number, what, words, at))
        self.wait(actor, _LONG)
        return number

    def wait(self, actor: int, seconds: float) -> bool:
        """Waits until an actor's call ends or stops. Returns whether it did."""
        deadline = time.monotonic() + seconds
        while actor in self._busy and self.stopped.get(actor) != self._busy[actor]:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._hear(actor, min(left, _SOON))
            self.hear()
            if self.stopped:  # it may hold what this waits for
                deadline = min(deadline, time.monotonic() + _SOON / 2)
        self.hear()
        return True

    def hear(self) -> None:
        """Notes what all actors have said until now."""
        for actor in range(len(self.connections)):
            self._hear(actor, 0)

    def _hear(self, actor: int, seconds: float) -> None:
        connection = self.connections[actor]
        while connection.poll(seconds):
            number, word, moment, value = connection.recv()
            if word == "stopped":
                self.stopped[actor] = number
            elif self._busy.get(actor) == number:
                del self._busy[actor]
            self.said(actor, number, word, moment, value)
            seconds = 0

    def go(self, actor: int) -> None:
        """Lets an actor go on that has stopped, and waits for it, if that is soon."""
        self.stopped.pop(actor, None)
        self.connections[actor].send("go")
        self.wait(actor, _LONG)

    def go_all(self) -> None:
        """Lets all actors go on until no call is in flight."""
        self.hear()
        while self._busy or self.stopped:
            for actor in list(self.stopped):
                self.stopped.pop(actor, None)
                self.connections[actor].send("go")
            ended = [self.wait(actor, _LONG) for actor in range(len(self.connections))]
            assert all(ended) or self.stopped, f"actors {sorted(self._busy)}: hang"
