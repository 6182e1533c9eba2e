"""What a store did, as numbers for its process and as text for Prometheus."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from ..errors import InputError
from .counters import BOUNDS, Histogram

_PREFIX = "kvpatch_store"
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_FAMILIES: tuple[tuple[str, str, str], ...] = (
    (r"(?P<tier>device|host|disk|remote)_hits", "hits", "Reads that a tier answered."),
    (r"misses", "misses", "Reads that no tier answered."),
    (r"(?P<tier>device|host|disk)_evicted_(?P<reason>\w+)", "evictions", "Objects that left a tier, by reason."),
    (r"(?P<tier>device|host)_refused", "refused", "Objects that a memory tier did not admit."),
    (r"(?P<direction>put|get)_bytes", "bytes", "Bytes of the files written (put) and read (get)."),
    (r"puts", "puts", "Objects written and acknowledged."),
    (r"quarantined", "quarantined", "Objects that did not verify and were moved away."),
    (r"read_errors", "read_errors", "Reads that the file system failed."),
    (r"expired", "expired", "Reads of objects that were expired."),
    (r"unsealed", "unsealed", "Reads of unencrypted objects by a store with a key."),
    (r"promotion_errors", "promotion_errors", "Remote objects that the disk did not take."),
)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of one store object, since it was opened: its own tenant's alone.

    Attributes:
      counts: by name, as in `ChunkStore.counters`.
      latencies: by operation ("get", "put", "commit") and the tier that answered ("none": a miss).
      held: bytes now in "device", "host", and "pool" (idle buffers).
    """

    counts: Mapping[str, int]
    latencies: Mapping[tuple[str, str], Histogram]
    held: Mapping[str, int]


def prometheus_text(statistics: Statistics, **labels: str) -> str:
    """Prometheus's text exposition format, version 0.0.4.

    Args:
      labels: put on every sample, for several stores on one page (such as tenant="…", which only who may read the page
        should then see).

    Raises:
      InputError: a label that Prometheus does not take, or one of ours.
    """
    taken = ("tier", "reason", "direction", "operation", "le")
    wrong = [name for name in labels if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken]
    if wrong:
        raise InputError(f"prometheus_text: labels {wrong}; expected words other than {taken}")
    lines = [*_counters(statistics.counts, labels), *_gauges(statistics.held, labels)]
    return "\n".join([*lines, *_histograms(statistics.latencies, labels)]) + "\n"


def _sample(name: str, labels: Mapping[str, str], value: float | int) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    inside = ",".join(f'{key}="{text}"' for key, text in escaped.items())
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _opening(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _counters(counts: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[str]:
    left = dict(counts)
    for pattern, family, text in _FAMILIES:
        found = {name: match.groupdict() for name in left if (match := re.fullmatch(pattern, name))}
        name = f"{_PREFIX}_{family}_total"
        if found:
            yield from _opening(name, "counter", text)
            yield from (_sample(name, {**labels, **own}, left.pop(key)) for key, own in found.items())
    for key, value in left.items():
        name = f"{_PREFIX}_{key}_total"
        yield from [*_opening(name, "counter", "Of that name in the store's counters."), _sample(name, labels, value)]


def _gauges(held: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[str]:
    name = f"{_PREFIX}_held_bytes"
    yield from _opening(name, "gauge", "Bytes held in memory now; pool: idle buffers.")
    yield from (_sample(name, {**labels, "tier": tier}, value) for tier, value in held.items())


def _histograms(latencies: Mapping[tuple[str, str], Histogram], labels: Mapping[str, str]) -> Iterator[str]:
    name = f"{_PREFIX}_seconds"
    if latencies:
        yield from _opening(name, "histogram", "How long calls took, by operation and by the tier that answered.")
    for (operation, tier), histogram in latencies.items():
        own, running = {**labels, "operation": operation, "tier": tier}, 0
        for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
            running += count
            yield _sample(f"{name}_bucket", {**own, "le": bound if isinstance(bound, str) else repr(bound)}, running)
        yield _sample(f"{name}_sum", own, histogram.total)
        yield _sample(f"{name}_count", own, running)
