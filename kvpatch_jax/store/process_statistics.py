"""Statistics that every process publishes in its roots, `stats/<pid>-<token>.json`, and that an operator sums.

One thread of a process writes them, at most once in `EVERY` seconds and only what has changed; calls of a store do
nothing for it. A file is replaced whole and is locked by its process, so that the file of a dead one is known and
removed. Nothing depends on these files: they are not durable, and what cannot be read in them is skipped.
"""

import atexit
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..errors import InputError, StoreError
from ..utils import strict_json
from ..utils.kinds import is_whole
from .disk.counters import BOUNDS, Histogram
from .io.files import folder, open_regular_in, typed_errors, write_all
from .io.thread_pool import register_fork_guard
from .metrics import Statistics

EVERY = 2.0
"""Seconds between two writes, and before the first, so that short programs write nothing."""
FOLDER = "stats"
LARGEST = 1 << 20
"""Bytes of a file; a longer one is not read."""
MOST_FILES, MOST_TENANTS, MOST_NAMES = 4096, 64, 256
"""Files of a root; tenants of a file, after which they are summed as `OTHERS`; names of counts of a tenant."""
OTHERS = "others"

_NAME = re.compile(r"[1-9][0-9]{0,9}-[0-9a-f]{16}\.json")
_UNFINISHED = re.compile(r"[1-9][0-9]{0,9}-[0-9a-f]{16}\.tmp")
_TENANT = re.compile(rf"[0-9a-f]{{32}}|{OTHERS}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")


_AGES = re.compile(rb'"[a-z_]+_seconds": ?[0-9.e+-]+')
"""Gauges that change with time alone."""


@runtime_checkable
class StatisticsSource(Protocol):
    """Part of a store that is published."""

    def statistics(self) -> Statistics:
        """Returns counts, latencies and bytes held."""
        ...


@dataclasses.dataclass(frozen=True)
class ProcessStatistics:
    """What a living process says of its stores of a root.

    Attributes:
      name: of its file, `<pid>-<token>`, which no other process has.
      pid: as the process itself sees it. began: when it first wrote, in seconds since the epoch.
      tenants: statistics by keyed name of the tenant, since then, of closed stores too.
    """

    name: str
    pid: int
    began: float
    tenants: Mapping[str, Statistics]


class ProcessList(NamedTuple):
    """Living processes of a root; `unreadable` is the number of further files, which say nothing valid."""

    processes: list[ProcessStatistics]
    unreadable: int


def total_of(statistics: Iterable[Statistics]) -> Statistics:
    """Sums counts, latencies and bytes held; of gauges, which describe the root, the largest counts."""
    counts: dict[str, int] = {}
    held: dict[str, int] = {}
    gauges: dict[str, float | int] = {}
    latencies: dict[tuple[str, str], Histogram] = {}
    for one in statistics:
        for name, value in one.counts.items():
            counts[name] = counts.get(name, 0) + value
        for name, value in one.held.items():
            held[name] = held.get(name, 0) + value
        for name, value in one.gauges.items():
            gauges[name] = max(gauges.get(name, value), value)
        for key, own in one.latencies.items():
            before = latencies.get(key, Histogram((0,) * (len(BOUNDS) + 1), 0.0))
            sums = tuple(first + second for first, second in zip(before.counts, own.counts, strict=True))
            latencies[key] = Histogram(sums, before.total + own.total)
    return Statistics(counts, latencies, held, gauges)


# ---------------------------------------------------------------------------------------------------------- publishing


class _RootFile:
    """The file of this process in a root, and what it is made of.

    Attributes:
      sources: open stores and their tenants' keyed names.
      closed: sums of the counts of closed stores, by tenant.
    """

    def __init__(self, root: str):
        self.root, self.began = root, time.time()
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.sources: weakref.WeakKeyDictionary[StatisticsSource, str] = weakref.WeakKeyDictionary()
        self.closed: dict[str, Statistics] = {}
        self._last = b""
        self._held: int | None = None  # descriptor that holds the lock of the file as it was last written
        self._writing, self._withdrawn = threading.Lock(), False

    def add_closed(self, tenant: str, final: Statistics) -> None:
        """Adds the counts of a store that is closed."""
        final = Statistics(final.counts, final.latencies, {})
        tenant = tenant if tenant in self.closed or len(self.closed) < MOST_TENANTS else OTHERS
        self.closed[tenant] = total_of([self.closed.get(tenant, Statistics({}, {}, {})), final])

    def text(self) -> bytes:
        """Returns the file's content."""
        by_tenant: dict[str, list[Statistics]] = {tenant: [one] for tenant, one in self.closed.items()}
        for source, tenant in list(self.sources.items()):
            tenant = tenant if tenant in by_tenant or len(by_tenant) < MOST_TENANTS else OTHERS
            by_tenant.setdefault(tenant, []).append(source.statistics())
        tenants = {tenant: _plain(total_of(several)) for tenant, several in by_tenant.items()}
        found = {"version": 1, "pid": os.getpid(), "began": self.began, "tenants": tenants}
        return json.dumps(found, separators=(",", ":")).encode()

    def publish(self, text: bytes) -> None:
        """Writes the file if something has changed. Failures are ignored: the next time may succeed."""
        with self._writing, contextlib.suppress(OSError, StoreError):
            if _AGES.sub(b"", text) == _AGES.sub(b"", self._last) or len(text) > LARGEST or self._withdrawn:
                return
            if not self._last:
                with folder(self.root) as top, contextlib.suppress(FileExistsError):
                    os.mkdir(FOLDER, 0o700, dir_fd=top)
                read_processes(self.root)  # removes what dead processes left
            with folder(self.root, FOLDER) as parent:
                self._write(parent, text)

    def _write(self, parent: int, text: bytes) -> None:
        unfinished = f"{self.name}.tmp"
        try:
            with open_regular_in(parent, unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                # Locked before it has its name, so that it is never without a lock while this process lives.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_all(fd, [text], 0)
                os.rename(unfinished, f"{self.name}.json", src_dir_fd=parent, dst_dir_fd=parent)
                held = os.dup(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=parent)
            raise
        self.release()
        self._held, self._last = held, text

    def release(self) -> None:
        """Closes the descriptor that holds the lock of the file."""
        if self._held is not None:
            with contextlib.suppress(OSError):
                os.close(self._held)
        self._held = None

    def withdraw(self) -> None:
        """Removes the file, for good."""
        with self._writing:
            self._withdrawn = True
            self.release()
            if self._last:
                with contextlib.suppress(OSError), folder(self.root, FOLDER) as parent:
                    os.unlink(f"{self.name}.json", dir_fd=parent)


class _Publisher:
    """The process's files of all roots, and the thread that writes them while there are open stores."""

    def __init__(self) -> None:
        self._files: dict[str, _RootFile] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        register_fork_guard(self)
        atexit.register(self.withdraw)

    def forked(self) -> None:
        """Forgets the parent's stores: it publishes them. A forked process publishes those that it opens."""
        for file in self._files.values():
            file.release()
        self._files, self._thread = {}, None
        self._lock, self._ended = threading.Lock(), threading.Event()

    def add(self, root: str, tenant: str, source: StatisticsSource) -> None:
        with self._lock:
            file = self._files.setdefault(root, _RootFile(root))
            file.sources[source] = tenant
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._ended,), name="kvpatch-statistics", daemon=True
                )
                self._thread.start()

    def remove(self, root: str, source: StatisticsSource) -> None:
        with self._lock:
            file = self._files.get(root)
            tenant = None if file is None else file.sources.pop(source, None)
            if file is None or tenant is None:
                return
            file.add_closed(tenant, source.statistics())
            gone = None if file.sources else self._files.pop(root)
            if not self._files:
                self._ended.set()
                self._thread = None
        if gone is not None:
            gone.withdraw()

    def publish(self) -> None:
        # Files are written without the lock: a root that hangs must not keep others from being opened.
        with self._lock:
            living = [(file, file.text()) for file in self._files.values() if file.sources]
            ended = [self._files.pop(root) for root, file in list(self._files.items()) if not file.sources]
        for file, text in living:
            file.publish(text)
        for file in ended:  # of stores that nobody closed
            file.withdraw()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY):
            self.publish()

    def withdraw(self) -> None:
        """Removes all files of this process."""
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
            self._ended.set()
            self._thread = None
        for file in files:
            file.withdraw()


_publisher = _Publisher()


def publish_statistics(root: str, tenant: str, source: StatisticsSource) -> None:
    """Begins to publish the statistics of a store, which is held weakly.

    Args:
      tenant: keyed name of its tenant.
    """
    _publisher.add(root, tenant, source)


@contextlib.contextmanager
def withdrawing_statistics(root: str, source: StatisticsSource) -> Iterator[None]:
    """Ends it after the block, which closes the store. With the last one of a root, the process's file is removed."""
    try:
        yield
    finally:
        _publisher.remove(root, source)


def publish_now() -> None:
    """Writes what has changed in all roots of this process."""
    _publisher.publish()


# ------------------------------------------------------------------------------------------------------------- reading


def read_processes(root: str) -> ProcessList:
    """Returns the statistics of all living processes of a root, and removes the files of dead ones.

    Raises:
      StoreError: the root cannot be read.
    """
    found: list[ProcessStatistics] = []
    unreadable = 0
    with (
        typed_errors(f"store {root}: statistics"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        folder(root, FOLDER) as parent,
    ):
        for name in sorted(os.listdir(parent))[:MOST_FILES]:
            if not _NAME.fullmatch(name) and not _UNFINISHED.fullmatch(name):
                continue
            try:
                text = _text_of(parent, name)
                if text is not None and name.endswith(".json"):
                    found.append(_parsed(name.removesuffix(".json"), text))
            except FileNotFoundError:
                continue
            except (OSError, InputError):
                unreadable += 1
    return ProcessList(found, unreadable)


def _text_of(parent: int, name: str) -> bytes | None:
    """Returns the content of a file; None if its process is dead, after which the file is removed."""
    with open_regular_in(parent, name) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, LARGEST + 1, 0)
            if len(text) > LARGEST:
                raise InputError(f"statistics: got more than {LARGEST} bytes; expected fewer") from None
            return text
        with contextlib.suppress(OSError):  # another user's, or a root that is read alone
            os.unlink(name, dir_fd=parent)
        return None


def _plain(statistics: Statistics) -> dict[str, Any]:
    latencies: dict[str, list[float]] = {}
    for (operation, tier), histogram in statistics.latencies.items():
        latencies[f"{operation} {tier}"] = [*histogram.counts, histogram.total]
    counts, held = dict(statistics.counts), dict(statistics.held)
    return {"counts": counts, "latencies": latencies, "held": held, "gauges": dict(statistics.gauges)}


def _parsed(name: str, text: bytes) -> ProcessStatistics:
    """Parses a file strictly, since anybody who can write the root may have written it. Raises InputError."""
    found = strict_json.object_of(text, "statistics", InputError)
    _expect(found.keys() == {"version", "pid", "began", "tenants"} and found["version"] == 1, "fields of version 1")
    _expect(is_whole(found["pid"], 1) and _is_number(found["began"]), "a process and when it began")
    tenants = found["tenants"]
    _expect(isinstance(tenants, dict) and len(tenants) <= MOST_TENANTS + 1, "tenants")
    _expect(all(_TENANT.fullmatch(tenant) for tenant in tenants), "keyed names of tenants")
    return ProcessStatistics(
        name, found["pid"], float(found["began"]), {tenant: _statistics_in(own) for tenant, own in tenants.items()}
    )


def _statistics_in(own: Any) -> Statistics:
    _expect(isinstance(own, dict) and own.keys() == {"counts", "latencies", "held", "gauges"}, "a tenant's statistics")
    for part in own.values():
        _expect(isinstance(part, dict) and len(part) <= MOST_NAMES, "names with numbers")
    for part in ("counts", "held"):
        whole = all(_WORD.fullmatch(name) and is_whole(value, 0) for name, value in own[part].items())
        _expect(whole, "words with whole numbers")
    _expect(all(_WORD.fullmatch(name) and _is_number(value) for name, value in own["gauges"].items()), "gauges")

    latencies: dict[tuple[str, str], Histogram] = {}
    for key, values in own["latencies"].items():
        operation, _, tier = key.partition(" ")
        _expect(bool(_WORD.fullmatch(operation) and _WORD.fullmatch(tier)), "an operation and a tier")
        _expect(isinstance(values, list) and len(values) == len(BOUNDS) + 2, "a number for each bucket, and seconds")
        _expect(all(is_whole(value, 0) for value in values[:-1]) and _is_number(values[-1]), "counts and seconds")
        latencies[operation, tier] = Histogram(tuple(values[:-1]), float(values[-1]))
    return Statistics(own["counts"], latencies, own["held"], own["gauges"])


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < 1 << 62 and math.isfinite(value)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise InputError(f"statistics: got another file; expected {what}")
