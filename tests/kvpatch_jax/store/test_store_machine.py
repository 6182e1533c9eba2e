"""Calls of several store objects and processes over one root and one remote store, each held up at any system call.

Whatever they answer must have an explanation (`register_histories`): a read never goes back behind what was
acknowledged before it began, and what was deleted never returns, unless it was put or restored.
"""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from register_histories import FOREVER, RegisterCall, unexplained
from store_actors import SECRET, SIZE, Actors, stoppable
from store_cases import host_chunk
from store_processes import processes

from kvpatch_jax.store import ChunkStore, save_snapshot

IDS = ("a", "b")
HERE, ELSEWHERE = 2, 2
"""Actors in this process and in others."""
READS = ("get", "stream")
RESTORED = 0
"""Seed of what is in the snapshot."""


class Scene:
    """Actors over a new root, and the history of what they did."""

    def __init__(self, actors: Actors, base: Path):
        self.actors, self.base = actors, base
        self.calls: dict[int, RegisterCall] = {}
        self.shared: dict[int, list[RegisterCall]] = {}
        self.done: list[RegisterCall] = []
        self.broken: list[str] = []
        self.seed = RESTORED
        self.folder = Path(tempfile.mkdtemp(dir=base))
        actors.said = self._said
        for actor in range(HERE + ELSEWHERE):
            actors.call(actor, "open", str(self.folder / "root"), str(self.folder / "remote"))

    def _said(self, actor: int, number: int, word: str, moment: int, value: Any) -> None:
        if word == "broken":
            self.broken.append(f"store {actor}: {value}")
        for call in self.shared.get(number, ()):
            if word in ("placed", "done"):
                call.placed = min(call.placed, moment)
            if word == "done":
                call.end = moment
                if call.what == "get":
                    call.value = value

    def run(self, actor: int, what: str, id: str = "", at: int | None = None) -> None:
        """Lets an actor make a call, unless it is still at another."""
        actors = self.actors
        actors.hear()
        if what == "go":
            if actor in actors.stopped:
                actors.go(actor)
            return
        if actors.is_busy(actor):
            return
        words: tuple[Any, ...] = (id,) if id else ()
        if what in ("put", "queue"):
            self.seed += 1
            words = (id, self.seed)
        if what == "restore":
            words = (str(self.base / "snapshot"),)
        self._note(actors.next_number, actor, what, id)
        actors.call(actor, what, *words, at=at)

    def _note(self, number: int, actor: int, what: str, id: str) -> None:
        kind = {"queue": "put", "stream": "get", "delete_tenant": "delete"}.get(what, what)
        if kind not in ("put", "get", "delete", "evict", "restore"):
            return
        value = self.seed if kind == "put" else RESTORED if kind == "restore" else None
        begin = time.monotonic_ns()
        calls = [RegisterCall(kind, key, value, begin, store=actor) for key in ([id] if id else IDS)]
        self.shared[number] = calls
        self.done += calls

    def end(self) -> None:
        """Lets everything go on, reads everything everywhere, and looks for an explanation."""
        actors = self.actors
        try:
            actors.go_all()
            for actor in range(HERE + ELSEWHERE):
                self.run(actor, "flush")
            for actor in range(HERE + ELSEWHERE):
                for id in IDS:
                    self.run(actor, "get", id)
            assert self.broken == []
            calls = [call for call in self.done if call.what != "get" or call.end < FOREVER]
            wrong = unexplained(calls)
            assert wrong == "", wrong
        finally:
            actors.go_all()
            for actor in range(HERE + ELSEWHERE):
                actors.call(actor, "close")
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A folder of a file system that is fast to sync, if there is one, with a snapshot."""
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast) as folder:
        source, base = Path(folder) / "source", Path(folder)
        with ChunkStore(source, secret=SECRET) as store:
            store.put_many([host_chunk(id, RESTORED, tokens=SIZE) for id in IDS])
        save_snapshot(source, base / "snapshot", tenant="default", secret=SECRET)
        yield base


@pytest.fixture(scope="module")
def actors(base: Path) -> Iterator[Actors]:
    started = []

    def start(address: str) -> None:
        started.append(processes().start("act", base / "root", address=address))

    with stoppable():
        yield Actors(HERE, start, ELSEWHERE, base)
    for process in started:
        process.kill()


def machine(actors: Actors, base: Path) -> type[RuleBasedStateMachine]:
    """A machine of calls of these actors."""
    anybody = st.integers(0, HERE + ELSEWHERE - 1)
    names, points = st.sampled_from(IDS), st.one_of(st.none(), st.integers(0, 30))

    class Calls(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.scene = Scene(actors, base)

        def teardown(self) -> None:
            self.scene.end()

        @rule(by=anybody, id=names, at=points)
        def put(self, by: int, id: str, at: int | None) -> None:
            self.scene.run(by, "put", id, at)

        @rule(by=st.sampled_from([0, *range(HERE, HERE + ELSEWHERE)]), id=names, at=points)
        def queue(self, by: int, id: str, at: int | None) -> None:
            self.scene.run(by, "queue", id, at)

        @rule(by=anybody, id=names, at=points)
        def delete(self, by: int, id: str, at: int | None) -> None:
            self.scene.run(by, "delete", id, at)

        @rule(by=anybody, id=names, at=points, how=st.sampled_from(READS))
        def read(self, by: int, id: str, at: int | None, how: str) -> None:
            self.scene.run(by, how, id, at)

        @rule(by=anybody, at=points, what=st.sampled_from(["evict", "evict", "collect", "restore", "delete_tenant"]))
        def keep(self, by: int, at: int | None, what: str) -> None:
            self.scene.run(by, what, at=at)

        @rule(by=anybody)
        def flush(self, by: int) -> None:
            self.scene.run(by, "flush")

        @rule(by=anybody)
        def go(self, by: int) -> None:
            self.scene.run(by, "go")

    return Calls


def explore(actors: Actors, base: Path, examples: int, steps: int, *, shrink: bool) -> None:
    """Runs programs at random; shortens one that fails only if there is time for it."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=not shrink,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine(actors, base), settings=chosen)


def test_programs_of_several_processes_have_an_explanation(actors: Actors, base: Path):
    explore(actors, base, 25, 15, shrink=False)


def _id_for(what: str) -> str:
    return "" if what in ("evict", "restore", "delete_tenant") else "a"


def held_at_every_call(actors: Actors, base: Path, held: str, meanwhile: str, every: int, first: str) -> None:
    """Holds a call of one process before each of its system calls, while another process does something whole.

    Then it goes on, everything is read, evicted, and read from the remote store.

    Args:
      first: what is there: "" nothing, "put" an object, "evict" one that is in the remote store alone.
    """
    at, stopped = 0, True
    while stopped:
        scene = Scene(actors, base)
        if first:
            scene.run(1, "put", "a")
        if first == "evict":
            scene.run(1, "evict")
        scene.run(2, held, _id_for(held), at)
        if held == "queue":
            time.sleep(0.02)  # the writer is another thread
            actors.hear()
        stopped = 2 in actors.stopped
        scene.run(0, meanwhile, _id_for(meanwhile))
        scene.run(0, "flush")
        scene.run(1, "get", "a")
        scene.run(2, "go")
        scene.run(2, "flush")
        for what in ("get", "evict", "get"):
            scene.run(3, what, _id_for(what))
        try:
            scene.end()
        except AssertionError as error:
            error.add_note(f"{held} held at its system call {at}, {meanwhile} meanwhile, after {first or 'nothing'}")
            raise
        at += every


@pytest.mark.parametrize(
    ("held", "meanwhile"), list(itertools.product(["put", "queue", "delete", "get"], ["put", "delete"]))
)
def test_a_call_that_is_held_has_an_explanation(actors: Actors, base: Path, held: str, meanwhile: str):
    held_at_every_call(actors, base, held, meanwhile, 5, "evict" if held == "get" else "put")
