"""Counters and gauges of stores for `prometheus_client` (the extra `operate`), with fixed names and help texts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..utils.optional_packages import require
from .store import Statistics

PREFIX = "kvpatch_store_"
COUNTERS: Mapping[str, str] = {
    "memory_hits": "Reads answered from memory.",
    "disk_hits": "Reads answered from the disk.",
    "remote_hits": "Reads answered by the remote store.",
    "misses": "Reads that found nothing.",
    "expired": "Reads of objects that had expired.",
    "get_bytes": "Bytes of files read.",
    "puts": "Objects written and acknowledged.",
    "put_bytes": "Bytes of files written.",
    "evicted": "Objects evicted to make room.",
    "damaged": "Reads of objects that did not verify.",
    "other_format": "Reads of objects of another format.",
    "read_errors": "Reads that the file system failed.",
    "fetch_errors": "Loads of a fetch that failed.",
    "keep_errors": "Remote objects that could not be kept on the disk.",
    "remote_damaged": "Remote objects that did not verify.",
    "remote_errors": "Calls that the remote store failed.",
    "remote_sent": "Writes and deletions sent to the remote store.",
}
GAUGES: Mapping[str, str] = {
    "root_bytes": "Bytes of all tenants' objects on the disk.",
    "disk_bytes": "Bytes of the tenant's objects on the disk.",
    "disk_objects": "Objects of the tenant on the disk.",
    "memory_bytes": "Bytes of decoded objects in memory, of all tenants of the root.",
    "outbox_bytes": "Bytes of objects that the remote store does not have yet.",
    "outbox_objects": "Writes and deletions that the remote store does not have yet.",
    "outbox_age_seconds": "Seconds since the oldest of them was acknowledged.",
}


class StoreCollector:
    """Collector of stores' statistics: `prometheus_client.REGISTRY.register(StoreCollector(...))`.

    Args:
      read: called for each page; returns statistics by the value of the label `store`, such as
        `lambda: {"acme": store.statistics()}`. A page may hold each metric once, so one collector reads all its stores.

    Raises:
      MissingExtraError: when it collects, `prometheus_client` is not installed.
    """

    def __init__(self, read: Callable[[], Mapping[str, Statistics]]):
        self._read = read

    def describe(self) -> list[Any]:
        """Returns nothing, so that a registry does not collect while it registers."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields all metrics; those that have not occurred are zero."""
        core = require("prometheus_client.core", "prometheus_client", "operate")
        statistics = self._read()
        families = [(core.CounterMetricFamily, name, text) for name, text in COUNTERS.items()]
        families += [(core.GaugeMetricFamily, name, text) for name, text in GAUGES.items()]
        for family, name, text in families:
            metric = family(PREFIX + name, text, labels=["store"])
            for label, numbers in statistics.items():
                metric.add_metric([label], {**numbers.counts, **numbers.gauges}.get(name, 0))
            yield metric
