"""Keeping order among ever more small objects, beside others: put, get, evicting put, listing, deleting a group.

At every number of objects all sides are measured in turns, batch by batch, if their directories fit together; beyond
`TOGETHER` objects one side after another, each removed before the next. Values of a put are a KiB. Beside that, what
does not depend on the number of objects: reads beside safetensors, and entries of the host tier.
"""

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors

from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
from kvpatch_jax.store.tiers.memory import CANONICAL, CacheEntry, MemoryTier

from .benchmark import Row, comparison_row, measured_row
from .store_fill import stored_bytes
from .store_rivals import OTHERS, StoreSide, expect, installed
from .store_side import OURS, ChunkStoreSide
from .store_workload import BACKBONE, StoreSizes, chunk_of, leaves_of
from .timing import interleave, stopwatch

PUT, GET, EVICTING, LISTED, GROUP = "put", "get", "evicting put", "ls, first rows", "delete a chunk with its patches"
STAT, PATCHES, OPENING, COLLECT = "stat", "get_patches, few of them match", "opening", "collect, nothing expired"
FIRST_PUT, FIRST_LIST = "the first put after opening", "ls, first rows, right after filling"
LIBRARY, HOST_PUT = "library put", "host tier: a put that evicts"
BARS = {LISTED: 0.05, STAT: 0.1, GROUP: 1.0, PATCHES: 0.001, OPENING: 0.25, COLLECT: 1.0, LIBRARY: 0.01}
"""Seconds that the store may take."""
EVICTING_BAR = 2.0
"""An evicting put's 99th percentile over a plain put's median."""

TOGETHER = 200_000
_LEAST_BATCH, _MOST_SECONDS = 100, 6.0
_HOST_ENTRIES, _HOST_PUTS = 50_000, 200

MEGABYTE = StoreSizes(layers=8, tokens=64, heads=8, width=64)
SMALL_READ = StoreSizes(layers=2, tokens=16, heads=2, width=64)


@dataclasses.dataclass(frozen=True)
class ScaleOptions:
    """What is measured at one number of objects.

    Attributes:
      folder: where the directories are made.
      count: objects of each side.
      place: file system of the folder, for the rows.
      group: patches of a chunk that is deleted with them.
      repeats: batches of each operation.
      direct: whether the store is filled by writing files in place of putting objects.
      quick: leaves out what starts processes.
    """

    folder: Path
    count: int
    place: str
    group: int
    repeats: int
    direct: bool = True
    quick: bool = False

    @property
    def puts(self) -> int:
        """Objects of a batch of plain puts."""
        return max(1, min(_LEAST_BATCH, self.count // (2 * self.repeats)))

    @property
    def evicting(self) -> int:
        """Objects of a batch of evicting puts: all together are more than a sixteenth of what is held."""
        return 5 if self.quick else max(_LEAST_BATCH, self.count // (15 * self.repeats))


def count_and_place(word: str, place: Path) -> tuple[int, Path]:
    """Parses a number of objects and where they are, such as "1000000@/dev/shm".

    Raises:
      InputError: it is no positive number.
    """
    number, _, folder = word.partition("@")
    if not number.isdigit() or not int(number):
        raise InputError(f"--objects: got {word!r:.80}; expected a number such as 1000, or 1000000@/dev/shm")
    return int(number), Path(folder) if folder else place


def rows(options: ScaleOptions) -> Iterator[Row]:
    """Yields the rows of all sides at one number of objects."""
    present, _ = installed()
    makers: dict[str, Callable[[Path], StoreSide]] = {OURS: lambda folder: ChunkStoreSide(folder, options.direct)}
    makers |= {name: OTHERS[name][1] for name in present}

    together = options.count <= TOGETHER
    for names in [list(makers)] if together else [[name] for name in makers]:
        sides: list[StoreSide] = []
        try:
            sides += (makers[name](options.folder / f"side-{name.replace(' ', '-')}") for name in names)
            yield from _rows_of(sides, options, together)
        finally:
            for side in sides:
                side.close()


def _rows_of(sides: Sequence[StoreSide], options: ScaleOptions, together: bool) -> Iterator[Row]:
    """Fills some sides and measures them in turns."""
    labels = {"objects": options.count, "place": options.place, "turns": together}
    keys = [f"small{number:08}" for number in range(max(1, options.count - options.repeats * options.puts))]
    fresh = (f"late{number:08}" for number in itertools.count())
    chosen = random.Random(0)

    filled: dict[str, float] = {}
    for side in sides:
        filled[side.name] = stopwatch(lambda side=side: side.fill(keys))

    def row(operation: str, side: str, batches: Sequence[Sequence[float]], **more: object) -> Row:
        bar = BARS.get(operation) if side == OURS else None
        return operation_row(operation, side, batches, at_most=bar, **labels, **more)  # pyright: ignore

    for side in sides:
        if isinstance(side, ChunkStoreSide):
            yield row(FIRST_LIST, side.name, [[side.first_rows()]], fill_seconds=filled[side.name])
            yield from _store_rows(side, options, row, len(keys))

    listed = batches_of({side.name: side.first_rows for side in sides}, options.repeats, 1)
    plain = batches_of({side.name: lambda side=side: side.put(next(fresh)) for side in sides},
                       options.repeats, options.puts)  # fmt: skip
    reads = {side.name: lambda side=side: side.get(chosen.choice(keys)) for side in sides}
    got = batches_of(reads, options.repeats, options.puts)
    for operation, samples in ((LISTED, listed), (PUT, plain), (GET, got)):
        for name, batches in samples.items():
            yield row(operation, name, batches)
    for name, batches in plain.items():
        yield tail_row("plain put's p99 over its median", name, batches, batches, None, labels)

    yield from _group_rows(sides, options, row)

    beside: dict[str, list[list[float]]] = {}
    ours = [side for side in sides if isinstance(side, ChunkStoreSide) and not options.quick]
    for side in ours:
        with side.neighbours():
            beside |= batches_of({side.name: lambda side=side: side.put(next(fresh))}, options.repeats, options.puts)
        yield row(f"{PUT}, beside 4 processes that put", side.name, beside[side.name])

    for side in sides:
        side.limit()
    evicting = batches_of({side.name: lambda side=side: side.put(next(fresh)) for side in sides},
                          options.repeats, options.evicting)  # fmt: skip
    for name, batches in evicting.items():
        yield row(EVICTING, name, batches)
        bar = EVICTING_BAR if name == OURS else None
        yield tail_row("evicting put's p99 over a plain put's median", name, batches, plain[name], bar, labels)

    for side in ours:
        with side.neighbours():
            crowded = batches_of({side.name: lambda side=side: side.put(next(fresh))}, options.repeats,
                                 options.evicting)[side.name]  # fmt: skip
        yield row(f"{EVICTING}, beside 4 processes that evict", side.name, crowded)
        metric = "evicting put's p99 over a plain put's median, each beside 4 such processes"
        yield tail_row(metric, side.name, crowded, beside[side.name], EVICTING_BAR, labels)
        metric = "evicting put's p99 beside 4 such processes over a lone plain put's median"
        yield tail_row(metric, side.name, crowded, plain[side.name], None, labels)
        yield side_budget_row(side, labels)


RowMaker = Callable[..., Row]


def _store_rows(side: ChunkStoreSide, options: ScaleOptions, row: RowMaker, count: int) -> Iterator[Row]:
    """Measures what only the store has: the operator's commands, opening and collecting."""
    yield row(STAT, side.name, repeated(lambda: side.sums(count), options.repeats))
    yield row(COLLECT, side.name, repeated(side.collect, options.repeats))
    opened = [side.opening(f"opened{number}") for number in range(options.repeats)]
    yield row(OPENING, side.name, [[seconds] for seconds, _ in opened])
    yield row(FIRST_PUT, side.name, [[seconds] for _, seconds in opened])
    if not options.quick:
        for command in ("ls", "stat", "--help"):
            yield row(f"process: {command}", side.name, repeated(lambda word=command: side.process(word), 3))


def _group_rows(sides: Sequence[StoreSide], options: ScaleOptions, row: RowMaker) -> Iterator[Row]:
    """Measures reading few of a chunk's many patches, and deleting the chunk with all of them."""
    groups = [f"group{number}" for number in range(min(3, options.repeats))]
    for side in sides:
        for group in groups:
            side.fill_group(group, options.group)
        if isinstance(side, ChunkStoreSide):
            first = side.patches(groups[0])
            yield row("get_patches, the first time", side.name, [[first]], patches=options.group)
            batches = [[side.patches(groups[0]) for _ in range(10)] for _ in range(options.repeats)]
            yield row(PATCHES, side.name, batches, patches=options.group)

    deleted: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for group in groups:
        for side in sides:
            deleted[side.name].append([side.delete_group(group)])
    for name, batches in deleted.items():
        yield row(GROUP, name, batches, patches=options.group)


# -------------------------------------------------------------------------------------------------------------- rows


def batches_of(
    sides: Mapping[str, Callable[[], float]], batches: int, size: int, most: float = _MOST_SECONDS
) -> dict[str, list[list[float]]]:
    """Times batches of calls of each side, in turns.

    Args:
      most: seconds after which a batch ends early.

    Returns:
      Seconds by side, batch and call.
    """
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(batches):
        for name, call in sides.items():
            batch: list[float] = []
            end = time.perf_counter() + most
            while len(batch) < size and (not batch or time.perf_counter() < end):
                batch.append(call())
            samples[name].append(batch)
    return samples


def repeated(call: Callable[[], float], repeats: int, most: float = 3 * _MOST_SECONDS) -> list[list[float]]:
    """Times calls as batches of one, until there are enough or they have taken long together."""
    batches = [[call()]]
    while len(batches) < repeats and sum(seconds for (seconds,) in batches) < most:
        batches.append([call()])
    return batches


def percentile(seconds: Sequence[float], share: float) -> float:
    """Returns the smallest of the values that at least this share of them does not exceed."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def operation_row(
    operation: str,
    side: str,
    batches: Sequence[Sequence[float]],
    *,
    objects: int,
    at_most: float | None = None,
    **labels: object,
) -> Row:
    """Makes the row of an operation: the median of all calls within those of the batches, 99th percentile, longest."""
    calls = list(itertools.chain.from_iterable(batches))
    more = {"operation": operation, "side": side, "objects": objects, "calls": len(calls), **labels}
    more |= {"p99": percentile(calls, 0.99), "longest": max(calls)}
    medians = [statistics.median(batch) for batch in batches]
    metric = f"{operation}, at {objects} objects"
    value = statistics.median(calls)
    return measured_row(metric, medians, value=value, at_most=at_most, against=side, unit=" s", **more)


def tail_row(
    metric: str,
    side: str,
    slow: Sequence[Sequence[float]],
    plain: Sequence[Sequence[float]],
    bar: float | None,
    labels: Mapping[str, object],
) -> Row:
    """Makes the row of a 99th percentile over a median: of all calls, within that of each batch."""
    each = [percentile(batch, 0.99) / statistics.median(other) for batch, other in zip(slow, plain, strict=True)]
    calls, others = list(itertools.chain.from_iterable(slow)), list(itertools.chain.from_iterable(plain))
    value = percentile(calls, 0.99) / statistics.median(others)
    more = {"operation": metric, "side": side, **labels}
    return measured_row(f"{metric}, at {labels['objects']} objects", each, value=value, at_most=bar, against=side,
                        unit="×", **more)  # fmt: skip


def side_budget_row(side: ChunkStoreSide, labels: Mapping[str, object]) -> Row:
    """Makes the row of the bytes that are stored after evictions, over the budget."""
    assert side.most is not None
    share = stored_bytes(side.root) / side.most
    metric = "stored bytes over the budget, after 5 processes evicted"
    more = {"operation": metric, "side": side.name, **labels}
    return measured_row(f"{metric}, at {labels['objects']} objects", [share], at_most=1.0, against=side.name,
                        unit="×", **more)  # fmt: skip


# ------------------------------------------------------------------------------- what the number does not matter for


def fixed_rows(folder: Path, repeats: int, seed: int, entries: int, host_entries: int = _HOST_ENTRIES) -> Iterator[Row]:
    """Times small reads beside safetensors, a put of a full host tier, and a large library."""
    with ChunkStore(folder / "reads", budget=Budget(host=0)) as store:
        for word, sizes, bar in (("1 MB", MEGABYTE, 1.2), ("16 KB", SMALL_READ, 2.0)):
            chunk = chunk_of(sizes, seed, word)
            store.put(chunk)
            forms = {"layer by layer": (leaves_of(chunk), bar), "layers stacked": (dict(chunk.kv), None)}
            for form, (arrays, at_most) in forms.items():
                path = folder / f"{word} {form}"
                safetensors.save_file({name: np.asarray(value) for name, value in arrays.items()}, path)

                def ours(word: str = word) -> float:
                    return stopwatch(lambda: expect(store.get(word, BACKBONE), "get"))

                def theirs(path: Path = path) -> float:
                    return stopwatch(lambda: expect(safetensors.load_file(path), "load_file"))

                samples = interleave({"ours": ours, "theirs": theirs}, 20 * repeats, warm_ups=3, pause=0)
                options = {"at_most": at_most, "sense": "at most"}
                yield comparison_row(f"get of {word}", samples, against=f"safetensors load_file, {form}", **options)

        yield from _library_rows(store, entries, repeats)
    yield _host_row(host_entries, repeats)


def _host_row(entries: int, repeats: int) -> Row:
    """Times puts into a host tier that is full."""
    tier: MemoryTier[int] = MemoryTier(entries)
    numbers = itertools.count()

    def put() -> None:
        number = next(numbers)
        entry = CacheEntry(number, 1, CANONICAL, f"chunk{number}", None)
        expect(tier.put(f"key{number}", entry), "host tier")

    for _ in range(entries):
        put()
    batches = batches_of({OURS: lambda: stopwatch(put)}, repeats, _HOST_PUTS, most=2)[OURS]
    return operation_row(HOST_PUT, OURS, batches, objects=entries)


def _library_rows(store: ChunkStore, entries: int, repeats: int) -> Iterator[Row]:
    """Times a library of many entries: a put by one that has read it before; and the first read of a new process."""
    library = StaticLibrary(store, quota=1 << 40)
    for number in range(entries):
        library.put(f"N{number}", f"text {number}")

    def put_again(number: int) -> float:
        return stopwatch(lambda: library.put(f"N{number % entries}", "another text"))

    puts = [[put_again(7919 * turn)] for turn in range(repeats)]
    looks = [[stopwatch(lambda: StaticLibrary(store, quota=1 << 40).used)] for _ in range(repeats)]
    yield operation_row(LIBRARY, OURS, puts, objects=entries, at_most=BARS[LIBRARY])
    yield operation_row("library, the first look", OURS, looks, objects=entries)
