"""Threads or processes that write and read shared stores, and a drill in which processes are killed at random moments.

Each name has one writer. Memory that processes share says which version of a name was begun last, and which was
acknowledged: odd ones are puts, even ones deletions.
"""

import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvpatch_jax.store import index
from kvpatch_jax.store.objects import Objects
from kvpatch_jax.store.remote import open_remote
from tests.store.store_cases import KEY, SECRET, name_of, object_of, value_of, wait_for

BUDGET = 8_000
PAIR = 1000
"""The distance of two numbers that are put in one transaction."""


class Versions:
    """Last version that was begun and that was acknowledged of each number, until the writers are told to end."""

    def __init__(self, count: int):
        memory = np.frombuffer(mmap.mmap(-1, 16 * count + 8), np.int64)
        self.begun, self.acknowledged, self._end = memory[:count], memory[count:-1], memory[-1:]

    @property
    def is_over(self) -> bool:
        return bool(self._end[0])

    def end(self, seconds: float) -> None:
        """Tells the writers to end after some seconds, or later if one of them has hardly begun by then."""
        time.sleep(seconds)
        wait_for(lambda: bool(self.acknowledged.min() > 1), 60)
        self._end[0] = 1


def write(store: Objects, versions: Versions, number: int, seed: int) -> None:
    """Puts and deletes an object again and again, also with a second one, and from the queue."""
    chance = random.Random(seed)
    while not versions.is_over:
        version = int(versions.begun[number]) + (1 if versions.begun[number] % 2 == 0 or chance.random() < 0.3 else 2)
        versions.begun[number] = version
        if version % 2 == 0:
            store.delete(f"{number:032x}")
        elif chance.random() < 0.5:
            assert all(store.put([(name_of(other), object_of(version)) for other in (number, PAIR + number)]))
        else:
            assert store.put_async(name_of(number), lambda version=version: object_of(version), 160).result()
        versions.acknowledged[number] = version


def check(store: Objects, versions: Versions, number: int, lossy: bool = False) -> None:
    """Reads, and compares with what was acknowledged before and begun until after the read.

    Args:
      lossy: whether objects may have been evicted.
    """
    first = int(versions.acknowledged[number])
    value = store.get(name_of(number), value_of)
    last = int(versions.begun[number])
    if value is None:
        assert lossy or first % 2 == 0 or last > first, (number, first, last)
    else:
        assert first <= value <= last, (number, first, value, last)
    assert not lossy or store.usage().bytes <= BUDGET


def read(store: Objects, versions: Versions, numbers: Sequence[int], seed: int, lossy: bool = False) -> int:
    """Checks all the time."""
    chance, count = random.Random(seed), 0
    while not versions.is_over:
        check(store, versions, chance.choice(numbers), lossy)
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
    try:
        task()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def drill(folder: str, seconds: float, processes: int, kills: int, seed: int) -> None:
    """Runs writers, and a reader beside each; kills writers, whose place others take. Then opens the stores anew."""
    os.mkdir(f"{folder}/remote")
    index.GRACE_SECONDS = 2.0  # living writers' files come near to be collected
    versions, chance = Versions(processes), random.Random(seed)
    kinds = ["plain", "encrypted", "small", "sent"]
    numbers = {kind: [number for number in range(processes) if kinds[number % 4] == kind] for kind in kinds}

    def writer(number: int, seed: int) -> None:
        write(opened(folder, number % 3 * 2000)[kinds[number % 4]], versions, number, seed)

    def reader(number: int) -> None:
        kind = kinds[number % 4]
        read(opened(folder, number % 2 * 2000)[kind], versions, numbers[kind], number, kind == "small")

    writers = [forked(lambda number=number: writer(number, seed)) for number in range(processes)]
    readers = [forked(lambda number=number: reader(number)) for number in range(processes)]
    wait_for(lambda: bool(versions.acknowledged.min() > 0), 60)
    for kill in range(kills):
        time.sleep(seconds / (kills + 1))
        number = chance.randrange(processes)
        os.kill(writers[number], signal.SIGKILL)
        os.waitpid(writers[number], 0)
        writers[number] = forked(lambda number=number, kill=kill: writer(number, seed + kill + 1))
    versions.end(0.0)
    assert [os.waitpid(pid, 0)[1] for pid in writers + readers] == [0] * 2 * processes

    stores = opened(folder)
    stores["sent"].flush()
    machine = Objects(f"{folder}/machine", secret=SECRET, remote=stores["sent"].remote)
    for kind, store in stores.items():
        for number in numbers[kind]:
            check(store, versions, number, kind == "small")
            values = [store.get(name_of(other), value_of) for other in (number, PAIR + number)]
            assert kind != "sent" or machine.get(name_of(number), value_of) == values[0]
            assert kind == "small" or values[1] is None or values[1] <= versions.begun[number]
        counted = store.index.rows("SELECT tenant, kind, SUM(size), COUNT(*) FROM objects GROUP BY 1, 2 ORDER BY 1")
        assert store.index.rows("SELECT * FROM usage WHERE count > 0 ORDER BY tenant") == counted
        assert (store.damaged(), store.counters["damaged"], store.counters["read_errors"]) == ([], 0, 0)
