"""Threads or processes that write and read shared stores, and a drill in which processes are killed at random moments.

Each name has one writer. Memory that processes share says which version of a name was begun last, and which was
acknowledged: odd ones are puts, even ones deletions.
"""

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvpatch_jax.store import index
from kvpatch_jax.store.objects import Objects
from kvpatch_jax.store.remote import open_remote
from tests.store.store_cases import KEY, SECRET, name_of, object_of, value_of

BUDGET = 8_000
PAIR = 1000
"""The distance of two numbers that are put in one transaction."""


class Versions:
    """Last version that was begun and that was acknowledged of each number."""

    def __init__(self, count: int):
        self.begun, self.acknowledged = np.frombuffer(mmap.mmap(-1, 16 * count), np.int64).reshape(2, count)


def write(store: Objects, versions: Versions, number: int, seed: int, end: float) -> None:
    """Puts and deletes an object again and again, also with a second one, and from the queue."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        version = int(versions.begun[number]) + (1 if versions.begun[number] % 2 == 0 or chance.random() < 0.3 else 2)
        versions.begun[number] = version
        if version % 2 == 0:
            store.delete(f"{number:032x}")
        elif chance.random() < 0.5:
            assert all(store.put([(name_of(other), object_of(version)) for other in (number, PAIR + number)]))
        else:
            assert store.put_async(name_of(number), lambda version=version: object_of(version), 160).result()
        versions.acknowledged[number] = version


def read(store: Objects, versions: Versions, numbers: Sequence[int], seed: int, end: float, lossy: bool = False) -> int:
    """Reads all the time, and compares with what was acknowledged before and begun until after the read.

    Args:
      lossy: whether objects may have been evicted.
    """
    chance, count = random.Random(seed), 0
    while time.monotonic() < end:
        number = chance.choice(numbers)
        first = int(versions.acknowledged[number])
        value = store.get(name_of(number), value_of)
        last = int(versions.begun[number])
        if value is None:
            assert lossy or first % 2 == 0 or last > first, (number, first, last)
        else:
            assert first <= value <= last, (number, first, value, last)
        assert not lossy or store.usage().bytes <= BUDGET
        count += 1
    return count


def opened(folder: str, memory: int = 0) -> Mapping[str, Objects]:
    """The stores of the drill: two tenants of a root, one with a budget, and one that sends to another machine."""
    remote = open_remote(f"file://{folder}/remote")
    return {
        "plain": Objects(f"{folder}/plain", memory=memory),
        "encrypted": Objects(f"{folder}/plain", "other", key=KEY, memory=memory),
        "small": Objects(f"{folder}/small", root_budget=BUDGET, memory=memory),
        "sent": Objects(f"{folder}/sent", secret=SECRET, remote=remote, memory=memory),
    }


def forked(task: Callable[[], object]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        task()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def drill(folder: str, seconds: float, processes: int, kills: int, seed: int) -> None:
    """Runs writers, and a reader beside each; kills writers, whose place others take. Then opens the stores anew."""
    os.mkdir(f"{folder}/remote")
    index.GRACE_SECONDS = 2.0  # living writers' files come near to be collected
    versions, end, chance = Versions(processes), time.monotonic() + seconds, random.Random(seed)
    kinds = ["plain", "encrypted", "small", "sent"]
    numbers = {kind: [number for number in range(processes) if kinds[number % 4] == kind] for kind in kinds}

    def writer(number: int, seed: int) -> None:
        write(opened(folder, number % 3 * 2000)[kinds[number % 4]], versions, number, seed, end)

    def reader(number: int) -> None:
        kind = kinds[number % 4]
        read(opened(folder, number % 2 * 2000)[kind], versions, numbers[kind], number, end, kind == "small")

    writers = [forked(lambda number=number: writer(number, seed)) for number in range(processes)]
    readers = [forked(lambda number=number: reader(number)) for number in range(processes)]
    for kill in range(kills):
        time.sleep(seconds / (kills + 1))
        number = chance.randrange(processes)
        os.kill(writers[number], signal.SIGKILL)
        os.waitpid(writers[number], 0)
        writers[number] = forked(lambda number=number, kill=kill: writer(number, seed + kill + 1))
    assert [os.waitpid(pid, 0)[1] for pid in writers + readers] == [0] * 2 * processes
    assert versions.acknowledged.min() > 0

    stores = opened(folder)
    stores["sent"].flush()
    machine = Objects(f"{folder}/machine", secret=SECRET, remote=stores["sent"].remote)
    for kind, store in stores.items():
        read(store, versions, numbers[kind], 0, time.monotonic() + 0.1, kind == "small")
        for number in numbers[kind]:
            values = [store.get(name_of(other), value_of) for other in (number, PAIR + number)]
            assert kind != "sent" or machine.get(name_of(number), value_of) == values[0]
            assert kind == "small" or values[1] is None or values[1] <= versions.begun[number]
        counted = store.index.rows("SELECT tenant, kind, SUM(size), COUNT(*) FROM objects GROUP BY 1, 2 ORDER BY 1")
        assert store.index.rows("SELECT * FROM usage WHERE count > 0 ORDER BY tenant") == counted
        assert (store.damaged(), store.counters["damaged"], store.counters["read_errors"]) == ([], 0, 0)


if __name__ == "__main__":
    path, length, *rest = sys.argv[1:]
    drill(path, float(length), *map(int, rest))
