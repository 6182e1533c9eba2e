"""The chunk store as a side of the comparison, and what is measured of it alone: the operator's commands, opening."""

import dataclasses
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from kvpatch_jax.store import Budget, ChunkStore, PatchKey
from kvpatch_jax.store.cli.commands import COMMANDS, Options

from .store_fill import MATCHING, put_chunks, small_chunk, stored_bytes, write_chunks, write_group
from .store_rivals import FIRST_ROWS, expect
from .store_workload import BACKBONE
from .timing import stopwatch

OURS = "kvpatch_jax"
NEIGHBOURS = 4
"""Processes that put beside the measured one."""
_AGAIN = 50


class ChunkStoreSide:
    """A `ChunkStore` without memory tiers, so that every read is from the page cache or the disk.

    Args:
      root: the store's directory.
      direct: whether `fill` writes object files without syncing them; False puts them.
    """

    name = OURS

    def __init__(self, root: Path, direct: bool = True):
        self.root, self._direct = str(root), direct
        self.most: int | None = None
        self.store = self._opened()
        self._small = small_chunk("small")

    def _opened(self) -> ChunkStore:
        return ChunkStore(self.root, budget=Budget(host=0, disk=self.most))

    def fill(self, keys: Sequence[str]) -> None:
        (write_chunks if self._direct else put_chunks)(self.root, keys)

    def fill_group(self, prefix: str, count: int) -> None:
        write_group(self.root, prefix, count)

    def put(self, key: str) -> float:
        chunk = dataclasses.replace(self._small, id=key)
        return stopwatch(lambda: self.store.put(chunk))

    def get(self, key: str) -> float:
        return stopwatch(lambda: expect(self.store.get(key, BACKBONE), "get"))

    def first_rows(self) -> float:
        def rows() -> list[object]:
            listed = COMMANDS["ls"].run(self._options()).rows
            return [] if listed is None else list(itertools.islice(listed[1], FIRST_ROWS))

        return stopwatch(lambda: expect(rows(), "ls"))

    def delete_group(self, prefix: str) -> float:
        seconds = stopwatch(lambda: expect(self.store.delete(prefix, BACKBONE), "delete"))
        expect(not self.store.patch_count(prefix, BACKBONE), "delete")
        return seconds

    def limit(self) -> None:
        self.store.close()
        self.most = stored_bytes(self.root)
        self.store = self._opened()

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    # ------------------------------------------------------------------------------------------- of the store alone

    def _options(self) -> Options:
        return Options(root=self.root, progress=_same, byte_progress=_ignore, ask=_refuse)

    def sums(self, least: int) -> float:
        """Times `stat`, which has to know of so many objects at least."""

        def objects() -> int:
            return COMMANDS["stat"].run(self._options()).result["objects"]

        return stopwatch(lambda: expect(objects() >= least, "stat"))

    def process(self, command: str) -> float:
        """Times a subcommand in a process of its own until its first rows were printed, or it has ended."""
        program = [sys.executable, "-m", "kvpatch_jax.store", *command.split(), f"--root={self.root}"]
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

        def run() -> None:
            with subprocess.Popen(program, stdout=subprocess.PIPE, env=variables) as child:
                assert child.stdout is not None
                lines = list(itertools.islice(child.stdout, FIRST_ROWS))
                child.stdout.close()
            expect(lines, command)

        return stopwatch(run)

    def patches(self, prefix: str) -> float:
        """Times reading the few patches of a group that serve one antecedent."""
        key = PatchKey(prefix, BACKBONE, ("0",))
        return stopwatch(lambda: expect(len(self.store.get_patches(key)) == MATCHING, "get_patches"))

    def opening(self, key: str) -> tuple[float, float]:
        """Times opening the root by another store object; and the first put of it that minds a budget."""
        opened: list[ChunkStore] = []
        budget = Budget(host=0, disk=1 << 50)
        seconds = stopwatch(lambda: opened.append(ChunkStore(self.root, budget=budget)))
        chunk = dataclasses.replace(self._small, id=key)
        with opened[0] as store:
            return seconds, stopwatch(lambda: store.put(chunk))

    def collect(self) -> float:
        """Times `collect` where nothing has expired."""
        return stopwatch(self.store.collect)

    @contextmanager
    def neighbours(self) -> Iterator[None]:
        """Runs processes that put into the root within its budget: new objects if it is limited, else the same ones."""
        context = multiprocessing.get_context("spawn")
        stop, ready = context.Event(), [context.Event() for _ in range(NEIGHBOURS)]
        workers = [
            context.Process(target=_keep_putting, args=(self.root, self.most, number, ready[number], stop))
            for number in range(NEIGHBOURS)
        ]
        for worker in workers:
            worker.start()
        try:
            for number, event in enumerate(ready):
                expect(event.wait(300), f"neighbour {number}")
            yield
        finally:
            stop.set()
            for worker in workers:
                worker.join()


def _keep_putting(root: str, most: int | None, number: int, ready: Event, stop: Event) -> None:
    small = small_chunk("small")
    with ChunkStore(root, budget=Budget(host=0, disk=most)) as store:
        for turn in itertools.count():
            if stop.is_set():
                break
            key = f"beside{number}.{turn % _AGAIN if most is None else f'{os.getpid()}.{turn}'}"
            store.put(dataclasses.replace(small, id=key))
            ready.set()


def _same[Item](items: Iterable[Item]) -> Iterable[Item]:
    return items


def _ignore(done: int, total: int) -> None:
    del done, total


def _refuse(question: str) -> str:
    return f"no: {question}"
