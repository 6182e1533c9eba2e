"""Power cuts: what a disk may hold after one, from a record of changes and syncs (`file_log`).

What was synced is there. Of what was not: each name has any of the values that it had since its folder was synced,
independent of other names and of data (so names are lost, removed names are back, and renames are undone); the data of
a file is as it was synced, whole, cut short, zero-filled or without some of its pages. A rename never loses the file:
its removed name implies the new one.
"""

import dataclasses
import itertools
import os
import random
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from file_log import INDEX, Event, FileLog, Node, contents

PAGE = 4096
GARBAGE = b"SQLite format 3\0" + bytes(range(256)) * 40


@dataclasses.dataclass(frozen=True)
class DiskState:
    """What a disk may hold after a power cut.

    Attributes:
      point: number of events before the cut.
      nodes: inodes, from `root`.
      words: the operations' events before the cut.
      beside: what the folder that is not cut holds.
      index: files of the index, by path below the base; "garbage" has none that is right.
    """

    point: int
    root: int
    nodes: dict[int, Node] = dataclasses.field(repr=False)
    words: tuple[Event, ...] = dataclasses.field(repr=False)
    beside: dict[str, bytes] = dataclasses.field(repr=False)
    index: dict[str, bytes] = dataclasses.field(repr=False)

    @property
    def signature(self) -> Hashable:
        """Equal for states that no store can tell apart."""
        times = tuple(sorted((path, self.nodes[number].mtime) for path, number in self.numbers()))
        found = tuple(sorted(contents(self.root, self.nodes).items())), tuple(sorted(self.beside.items()))
        return hash((times, found, tuple((word.kind, word.inode) for word in self.words)))

    def numbers(self) -> list[tuple[str, int]]:
        """Path and inode of every file."""
        found: list[tuple[str, int]] = []
        waiting = [("", self.root)]
        while waiting:
            path, number = waiting.pop()
            names = self.nodes[number].names
            if names is None:
                found.append((path, number))
            else:
                waiting += [(f"{path}/{name}".removeprefix("/"), inner) for name, inner in names.items()]
        return found

    def build(self, base: Path, beside: Path | None = None) -> None:
        """Makes it, in a folder that does not exist yet."""
        made: dict[int, str] = {}
        folders = [(str(base), self.root)]
        for path, number in folders:
            os.mkdir(path)
            for name, inner in (self.nodes[number].names or {}).items():
                node, place = self.nodes[inner], f"{path}/{name}"
                if node.names is not None:
                    folders.append((place, inner))
                elif inner in made:
                    os.link(made[inner], place)
                else:
                    Path(place).write_bytes(node.content)
                    os.utime(place, ns=(node.mtime, node.mtime))
                    made[inner] = place
        for path, content in self.index.items():
            if (base / path).parent.is_dir():
                (base / path).write_bytes(content)
        for path, number in reversed(folders):
            if self.nodes[number].mtime:  # an index may compare it
                os.utime(path, ns=(self.nodes[number].mtime, self.nodes[number].mtime))
        if beside is not None:
            _write_tree(beside, self.beside)


def _write_tree(base: Path, contents: dict[str, bytes]) -> None:
    base.mkdir()
    for path, content in sorted(contents.items()):
        if path.endswith("/"):
            (base / path).mkdir(parents=True, exist_ok=True)
        else:
            (base / path).parent.mkdir(parents=True, exist_ok=True)
            (base / path).write_bytes(content)


@dataclasses.dataclass
class _Open:
    """What of one inode is not synced: the versions of its data, or the values of its names, the synced one first."""

    data: list[tuple[bytes, int]]
    names: dict[str, list[tuple[int | None, int, int]]]


def disk_states(log: FileLog, most: int = 48, seed: int = 0, only: Iterable[int] | None = None) -> Iterator[DiskState]:
    """Builds the states after a cut at every point of a record, each once.

    Args:
      most: states per point: all of them if there are no more, else those in which one thing alone is lost or kept,
        all or none, and others at random.
      only: numbers of events before the cut; None: every point.
    """
    rng, seen = random.Random(seed), set[Hashable]()
    indexes = _index_copies(log)
    turns = itertools.count()
    points = range(len(log.events) + 1) if only is None else only
    for point in points:
        synced, unsynced = _at(log, point)
        words = tuple(event for event in log.events[:point] if event.kind in ("begin", "end"))
        beside = log.besides[point - 1] if log.beside is not None and point else {}
        for nodes in _choices(synced, unsynced, most, rng):
            state = DiskState(point, log.root, nodes, words, beside, {})
            if state.signature not in seen:
                seen.add(state.signature)
                yield dataclasses.replace(state, index=indexes[next(turns) % len(indexes)])


def _index_copies(log: FileLog) -> list[dict[str, bytes]]:
    """The index: absent, as it was after each operation, and destroyed."""
    copies = [copy for copy in log.indexes if copy]
    if not copies:
        return [{}]
    return [{}, *copies, {path: GARBAGE for path in copies[-1] if path.endswith(INDEX)}]


def _at(log: FileLog, point: int) -> tuple[dict[int, Node], dict[int, _Open]]:
    """What is durable at a point, and what else there may be."""
    nodes = {number: _copy(node) for number, node in log.first.items()}
    unsynced: dict[int, _Open] = {}
    for event in log.events[:point]:
        if event.kind == "data":
            _entry(unsynced, event.inode).data.append((event.content, event.mtime))
        elif event.kind == "name":
            names = _entry(unsynced, event.inode).names
            names.setdefault(event.name, []).append((event.target, event.mtime, event.pair))
        elif event.kind in ("sync", "sync all"):
            for number in [event.inode] if event.kind == "sync" else list(unsynced):
                found = unsynced.pop(number, None)
                if found is not None:
                    _settle(nodes[number], found)
    return nodes, unsynced


def _copy(node: Node) -> Node:
    return dataclasses.replace(node, names=None if node.names is None else dict(node.names))


def _entry(unsynced: dict[int, _Open], number: int) -> _Open:
    return unsynced.setdefault(number, _Open([], {}))


def _settle(node: Node, found: _Open) -> None:
    if found.data:
        node.content, node.mtime = found.data[-1]
    for name, values in found.names.items():
        assert node.names is not None
        target, mtime, _ = values[-1]
        node.mtime = max(node.mtime, mtime)
        node.names.pop(name, None)
        if target is not None:
            node.names[name] = target


def _choices(
    synced: dict[int, Node], unsynced: dict[int, _Open], most: int, rng: random.Random
) -> Iterator[dict[int, Node]]:
    """Every choice of what of the unsynced is there, or some of them."""
    axes: list[tuple[int, str | None, int]] = []  # inode, name or None for data, number of options
    for number, found in unsynced.items():
        if found.data:
            axes.append((number, None, len(_versions(synced[number], found))))
        axes += [(number, name, len(values) + 1) for name, values in found.names.items()]
    sizes = [size for _, _, size in axes]
    if _product(sizes) <= most:
        chosen: Iterable[tuple[int, ...]] = itertools.product(*map(range, sizes))
    else:
        none, whole = [0] * len(sizes), [size - 1 for size in sizes]
        picked = [none, whole]
        for at, size in enumerate(sizes):
            picked += [[*whole[:at], option, *whole[at + 1 :]] for option in range(size - 1)]
            picked += [[*none[:at], option, *none[at + 1 :]] for option in range(1, size)]
        rng.shuffle(picked)
        picked = [none, whole, *picked[: most // 2]]
        picked += [[rng.randrange(size) for size in sizes] for _ in range(most - len(picked))]
        chosen = map(tuple, picked)
    for choice in chosen:
        yield _chosen(synced, unsynced, axes, choice)


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _versions(node: Node, found: _Open) -> list[tuple[bytes, int]]:
    """What the data of a file may be, the synced version first and the last one last."""
    last, mtime = found.data[-1]
    versions = [(node.content, node.mtime), *found.data[:-1]]
    pages = [last[at : at + PAGE] for at in range(0, len(last), PAGE)]
    if last != node.content:
        versions += [(b"\0" * len(last), mtime), (last[: len(last) // 2], mtime), (b"", mtime)]
        versions += [(last[:PAGE].ljust(len(last), b"\0"), mtime)]
        holes = [page if at % 2 else b"\0" * len(page) for at, page in enumerate(pages)]
        versions += [(b"".join(holes), mtime)]
    others = list(dict.fromkeys(version for version in versions[1:] if version[0] != last))
    times = [(last, node.mtime)] if node.mtime != mtime and node.mtime else []
    return [versions[0], *others, *times, (last, mtime)]


def _chosen(
    synced: dict[int, Node],
    unsynced: dict[int, _Open],
    axes: list[tuple[int, str | None, int]],
    choice: tuple[int, ...],
) -> dict[int, Node]:
    nodes = dict(synced)
    for number in unsynced:
        nodes[number] = _copy(synced[number])
    options = {(number, name): option for (number, name, _), option in zip(axes, choice, strict=True)}
    _join_renames(unsynced, options)
    for (number, name), option in options.items():
        node, found = nodes[number], unsynced[number]
        if name is None:
            node.content, node.mtime = _versions(synced[number], found)[option]
        elif option:
            assert node.names is not None
            target, mtime, _ = found.names[name][option - 1]
            node.mtime = max(node.mtime, mtime)
            node.names.pop(name, None)
            if target is not None:
                node.names[name] = target
    return nodes


def _join_renames(unsynced: dict[int, _Open], options: dict[tuple[int, str | None], int]) -> None:
    """Where the removed name of a rename is gone, the new one is there."""
    gone: set[int] = set()
    for (number, name), option in options.items():
        if name is not None:
            values = unsynced[number].names[name][:option]
            gone |= {pair for target, _, pair in values if pair and target is None}
    for number, found in unsynced.items():
        for name, values in found.names.items():
            for at, (target, _, pair) in enumerate(values):
                if target is not None and pair in gone:
                    options[number, name] = max(options[number, name], at + 1)
