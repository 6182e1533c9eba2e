"""Counts and latencies of a store, as numbers and as metrics of `prometheus_client` (the extra `operate`)."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import InputError
from .disk.counters import BOUNDS, Histogram

_PREFIX = "kvpatch_store"
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = ("tier", "reason", "direction", "operation", "le")
_FAMILIES: tuple[tuple[str, str, str], ...] = (
    (r"(?P<tier>host|disk|remote)_hits", "hits", "Reads that a tier answered."),
    (r"misses", "misses", "Reads that no tier answered."),
    (r"(?P<tier>host|disk)_evicted_(?P<reason>\w+)", "evictions", "Objects that left a tier, by reason."),
    (r"(?P<tier>host)_refused", "refused", "Objects that the host tier did not admit."),
    (r"(?P<direction>put|get)_bytes", "bytes", "Bytes of the files written (put) and read (get)."),
    (r"puts", "puts", "Objects written and acknowledged."),
    (r"quarantined", "quarantined", "Objects that did not verify and were moved away."),
    (r"unsteady_reads", "unsteady_reads", "Reads that did not verify, and did not fail in the same way again."),
    (r"other_format", "other_format", "Reads of objects of another version of the format."),
    (r"read_errors", "read_errors", "Reads that the file system failed."),
    (r"expired", "expired", "Reads of objects that were expired."),
    (r"unsealed", "unsealed", "Reads of unencrypted objects by a store with a key."),
    (r"remote_errors", "remote_errors", "Calls that the remote store failed, its tries included."),
    (r"remote_damaged", "remote_damaged", "Remote reads that did not verify, twice."),
    (r"promotions", "promotions", "Remote objects that the disk took."),
    (r"promotion_errors", "promotion_errors", "Remote objects that the disk did not take."),
    (r"fetch_errors", "fetch_errors", "Loads of a fetch that failed."),
    (r"outdated", "outdated", "Writes that did not take place: their name had a later revision."),
    (r"remote_sent", "remote_sent", "Writes and deletions that the remote store has got."),
    (r"outbox_damaged", "outbox_damaged", "Objects for the remote store that did not verify, and were not sent."),
    (r"mapped", "mapped", "Reads that mapped the file in place of copying it."),
    (r"lock_waits", "lock_waits", "Locks that were not free at once."),
    (r"lock_timeouts", "lock_timeouts", "Locks that were not got in time."),
    (r"index_rebuilds", "index_rebuilds", "Times that the index was made again of the files."),
)
_GAUGES: Mapping[str, str] = {
    "disk_bytes": "Bytes of the tenant's objects on the disk.",
    "disk_objects": "Objects of the tenant on the disk.",
    "oldest_use_seconds": "Seconds since the last use of the tenant's least recently used object.",
    "outbox_bytes": "Bytes of the writes that the remote store does not have yet.",
    "outbox_objects": "Writes that the remote store does not have yet.",
    "outbox_age_seconds": "Seconds since the oldest of them was acknowledged.",
}
_HELD = "Bytes held in memory now; pool: idle buffers."
_SECONDS = "How long calls took, by operation and by the tier that answered."

METRICS: Mapping[str, tuple[str, str]] = {
    **{f"{_PREFIX}_{family}_total": ("counter", text) for _, family, text in _FAMILIES},
    **{f"{_PREFIX}_{name}": ("gauge", text) for name, text in _GAUGES.items()},
    f"{_PREFIX}_held_bytes": ("gauge", _HELD),
    f"{_PREFIX}_seconds": ("histogram", _SECONDS),
}
"""All metrics by name: type and help. Counters that are not listed are exported under their own name."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts, latencies and bytes held of one store object since it was opened, of its own tenant only.

    Attributes:
      counts: counts by name, as in `ChunkStore.counters`.
      latencies: latencies by operation ("get", "put", "commit") and the tier that answered ("none": a miss).
      held: current bytes in "host" and "pool" (idle buffers).
      gauges: current values by name, of the tenant or the whole root: "disk_bytes", "disk_objects",
        "oldest_use_seconds", "outbox_bytes", "outbox_objects", "outbox_age_seconds".
    """

    counts: Mapping[str, int]
    latencies: Mapping[tuple[str, str], Histogram]
    held: Mapping[str, int]
    gauges: Mapping[str, float | int] = dataclasses.field(default_factory=dict)


class StatisticsCollector:
    """Collector for a registry of `prometheus_client` that reads stores' statistics for every page.

    `prometheus_client.REGISTRY.register(StatisticsCollector(lambda: [(store.statistics(), {"tenant": "acme"})]))`. Use
    one collector for all stores of a page, because a page may contain each metric only once.

    Args:
      read: returns the statistics of every store with the labels of its samples.

    Raises (while collecting):
      ImportError: `prometheus_client` is not installed.
      InputError: a label is invalid for Prometheus, or used by this library.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[Statistics, Mapping[str, str]]]]):
        self._read = read

    def describe(self) -> list[Any]:
        """Returns an empty list: the metrics depend on the operations of the stores."""
        return []

    def collect(self) -> list[Any]:
        """Returns the metrics, one `prometheus_client.Metric` per name."""
        make, metrics = _prometheus().Metric, {}
        for statistics, labels in self._read():
            wrong = [name for name in labels if not _LABEL.fullmatch(name) or name.startswith("__") or name in _TAKEN]
            if wrong:
                raise InputError(f"prometheus: got labels {wrong}; expected words other than {_TAKEN}")
            for sample in _samples(statistics):
                metric = metrics.setdefault(sample.family, make(sample.family, sample.text, sample.kind))
                metric.add_sample(f"{sample.family}{sample.ending}", {**labels, **sample.labels}, sample.value)
        return list(metrics.values())


def prometheus_text(statistics: Statistics, **labels: str) -> str:
    """Formats statistics in Prometheus's text exposition format, version 0.0.4.

    Args:
      labels: labels of every sample. Restrict access to the page if it has a label such as tenant="…".

    Raises:
      InputError: a label is invalid for Prometheus, or used by this library.
      ImportError: `prometheus_client` is not installed.
    """
    if not isinstance(statistics, Statistics):
        raise InputError(
            f"metrics: got a {type(statistics).__name__}; expected Statistics, as ChunkStore.statistics gives"
        )
    return _prometheus().generate_latest(StatisticsCollector(lambda: [(statistics, labels)])).decode()


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError("metrics: got no `prometheus_client`; expected the extra `operate`") from error
    return prometheus_client


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Sample of a metric: `text` is the metric's help, `ending` the suffix of the sample's name."""

    family: str
    kind: str
    text: str
    ending: str
    labels: Mapping[str, str]
    value: float | int


def _samples(statistics: Statistics) -> Iterator[_Sample]:
    """Yields all samples, grouped by family."""
    yield from _counted(statistics.counts)
    for tier, value in statistics.held.items():
        yield _Sample(f"{_PREFIX}_held_bytes", "gauge", _HELD, "", {"tier": tier}, value)
    for name, value in statistics.gauges.items():
        text = _GAUGES.get(name, "Of that name in the store's gauges.")
        yield _Sample(f"{_PREFIX}_{name}", "gauge", text, "", {}, value)
    for (operation, tier), histogram in statistics.latencies.items():
        yield from _timed({"operation": operation, "tier": tier}, histogram)


def _counted(counts: Mapping[str, int]) -> Iterator[_Sample]:
    left = dict(counts)
    for pattern, family, text in _FAMILIES:
        found = {name: match.groupdict() for name in left if (match := re.fullmatch(pattern, name))}
        for name, own in found.items():
            yield _Sample(f"{_PREFIX}_{family}", "counter", text, "_total", own, left.pop(name))
    for name, value in left.items():
        yield _Sample(f"{_PREFIX}_{name}", "counter", "Of that name in the store's counters.", "_total", {}, value)


def _timed(own: Mapping[str, str], histogram: Histogram) -> Iterator[_Sample]:
    def sample(ending: str, value: float | int, **more: str) -> _Sample:
        return _Sample(f"{_PREFIX}_seconds", "histogram", _SECONDS, ending, {**own, **more}, value)

    running = 0
    for bound, count in zip((*map(repr, BOUNDS), "+Inf"), histogram.counts, strict=True):
        running += count
        yield sample("_bucket", running, le=bound)
    yield sample("_sum", histogram.total)
    yield sample("_count", running)
