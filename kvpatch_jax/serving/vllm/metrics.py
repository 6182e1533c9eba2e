"""What the connector counts: the metrics, their collection in the engine, and their way to Prometheus.

    sides ── collect_scheduler, collect_worker ──► a payload per step ── merge ──► PrometheusRecorder, in the server

A payload is plain data, because the engine sends it to the server's process: `{"counts": {metric: {word: number}},
"gauges": {…}}`. Words are values of the metric's only label. There are few of them: no tenant,
id or number is one.
"""

import collections
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PREFIX = "vllm:kvpatch_"
"""Beginning of all names. vLLM unregisters what has its name in it, so that a process can make several engines."""

POINTS = ("leading", "restored", "stored", "orbit", "survivor", "mean", "near", "bare")
REUSES = ("exact", "certified", "patched", "blind", "invalid")
OUTCOMES = (
    "canonicals",
    "prefills",
    "patches",
    "survivors",
    "known",
    "refused",
    "failed",
    "over_budget",
    "dropped",
    "unsaved",
)

_REASONS: tuple[tuple[str, str], ...] = (
    ("not_stored_exactly", r"is not stored behind those in front"),
    ("not_stored", r"is not stored"),
    ("beyond_certificate", r"is not certified within .*: "),
    ("not_certified", r"is not certified within"),
    ("learning", r"is prefilled behind exact ones"),
    ("other_weights", r"other weights"),
    ("reads_no_cache", r"reads no cache"),
    ("unread", r"could not be read"),
    ("cached", r"in its own cache"),
    ("not_allowed", r"the operator does not allow"),
    ("invalid_request", r"kv_transfer_params|segments: got|cache_salt: got"),
)
REASONS = (*(word for word, _ in _REASONS), "lora", "embeddings", "other")
"""Why the stored chunks of a request end before its question, or none are served to it."""


class Metric(NamedTuple):
    """One metric.

    Attributes:
      kind: "counter" or "gauge".
      text: its help.
      label: name of its label; "" if it has none.
      words: values of the label, which the page has from the start, so that the first increase is seen as one. Without
        any, those that are counted: names in this project's code.
    """

    kind: str
    text: str
    label: str = ""
    words: Sequence[str] = ("",)


METRICS: Mapping[str, Metric] = {
    "requests": Metric("counter", "Requests that asked for stored chunks, by what they may reuse.", "reuse", REUSES),
    "served_chunks": Metric("counter", "Chunks placed in the engine's pool, by operating point.", "point", POINTS),
    "saved_tokens": Metric("counter", "Prompt tokens placed in place of a prefill, by point.", "point", POINTS),
    "refusals": Metric("counter", "Plans that end before the question, by reason.", "reason", REASONS),
    "formed": Metric("counter", "Chunks by what became of forming them; dropped: prefills.", "outcome", OUTCOMES),
    "failed_loads": Metric("counter", "Requests whose chunks could not be placed."),
    "unfit_chunks": Metric("counter", "Stored chunks and patches that do not fit the engine."),
    "hook_failures": Metric("counter", "Exceptions caught in the engine's hooks.", "hook", ()),
    "forming_jobs": Metric("gauge", "Prefills that wait to be formed or are in work."),
    "forming_bytes": Metric("gauge", "Bytes on the device that wait to be formed or are in work."),
    "reading_requests": Metric("gauge", "Requests that wait for a read or hold its data.", "state", ("wait", "held")),
    "host_bytes": Metric("gauge", "Bytes of stored chunks in host memory."),
    "host_limit_bytes": Metric("gauge", "Limit of stored chunks in host memory."),
    "survivor_bytes": Metric("gauge", "Bytes of host memory that requests left to their agents' next ones."),
    "open_tenants": Metric("gauge", "Tenants whose stores are open."),
}
"""All metrics by name, without `PREFIX`. Prometheus adds `_total` to the names of counters."""

type Counts = Mapping[str, Mapping[str, int]]
type Gauges = Mapping[str, Mapping[str, float | int]]


def reason_of(why: str) -> str:
    """Returns the word of `REASONS` for a text that says why a plan ends; "other" for an unknown text."""
    return next((word for word, pattern in _REASONS if re.search(pattern, why)), "other")


class EngineMetrics:
    """Counts of one side of the connector since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, collections.Counter[str]] = {}
        self._totals: dict[tuple[str, str], int] = {}
        self._gauges: dict[tuple[str, str], float | int] = {}
        self._lock = threading.Lock()

    def add(self, metric: str, word: str = "", amount: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts.setdefault(metric, collections.Counter())[_fixed(metric, word)] += amount

    def add_served(self, steps: Sequence[Any], first: int) -> None:
        """Counts the chunks of a plan that are placed from the token `first` on, and their tokens, by point."""
        for step in steps:
            tokens = step.segment.end - max(step.segment.begin, first)
            if tokens > 0:
                self.add("served_chunks", step.point)
                self.add("saved_tokens", step.point, tokens)

    def take(self, totals: Counts, gauges: Gauges) -> dict[str, Any]:
        """Returns what was counted since the last call, and the gauges that have changed; empty if nothing has.

        Args:
          totals: counts since the start that are kept elsewhere; what they grew by is added.
          gauges: current values.
        """
        with self._lock:
            counts, self._counts = self._counts, {}
            for metric, by_word in totals.items():
                for word, total in by_word.items():
                    grown = total - self._totals.get((metric, word), 0)
                    if grown > 0:
                        self._totals[metric, word] = total
                        counts.setdefault(metric, collections.Counter())[_fixed(metric, word)] += grown

            changed: dict[str, dict[str, float | int]] = {}
            for metric, by_word in gauges.items():
                for word, value in by_word.items():
                    if self._gauges.get((metric, word)) != value:
                        self._gauges[metric, word] = value
                        changed.setdefault(metric, {})[word] = value

        payload: dict[str, Any] = {}
        if counts:
            payload["counts"] = {metric: dict(by_word) for metric, by_word in counts.items()}
        if changed:
            payload["gauges"] = changed
        return payload


def _fixed(metric: str, word: str) -> str:
    """Returns a word of the metric's label; "other" for one that it does not have."""
    words = METRICS[metric].words
    return word if not words or word in words else "other"


def collect_scheduler(side: Any, failures: Mapping[str, int]) -> dict[str, Any]:
    """Returns the payload of the scheduler's side since the last call. Waits for nothing.

    Args:
      side: a `SchedulerSide`.
      failures: exceptions caught in hooks, counted as "HOOK: TYPE".
    """
    stores, (waiting, reading) = side.stores, side.reading
    unfit = sum(count for kind, count in list(side.counts.items()) if kind.startswith("unfit"))
    totals = {
        "failed_loads": {"": side.counts["failed"]},
        "unfit_chunks": {"": unfit},
        "formed": {"unsaved": side.counts["unsaved"]},
        "hook_failures": by_hook(failures),
    }
    gauges = {
        "reading_requests": {"wait": waiting, "held": reading},
        "host_bytes": {"": stores.host_bytes},
        "host_limit_bytes": {"": side.config.store.memory},
        "survivor_bytes": {"": stores.survivors.nbytes},
        "open_tenants": {"": stores.tenants},
    }
    return side.metrics.take(totals, gauges)


def collect_worker(side: Any, failures: Mapping[str, int]) -> dict[str, Any]:
    """Returns the payload of the worker's side, a `WorkerSide`, since the last call, as `collect_scheduler`."""
    totals = {
        "formed": {**side.former.counts, "unsaved": side.counts["unsaved"]},
        "hook_failures": by_hook(failures),
    }
    gauges = {"forming_jobs": {"": side.former.jobs}, "forming_bytes": {"": side.former.held_bytes}}
    return side.metrics.take(totals, gauges)


def by_hook(failures: Mapping[str, int]) -> dict[str, int]:
    """Sums exceptions that are counted as "HOOK: TYPE" by hook."""
    sums: collections.Counter[str] = collections.Counter()
    for kind, count in list(failures.items()):
        sums[kind.partition(":")[0]] += count
    return dict(sums)


# ---------------------------------------------------------------------------------------------------------- payloads


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the payload of two in order: counts are added, gauges are the later ones. Changes neither."""
    result = {part: {metric: dict(words) for metric, words in metrics.items()} for part, metrics in first.items()}
    for metric, words in second.get("counts", {}).items():
        own = result.setdefault("counts", {}).setdefault(metric, {})
        for word, count in words.items():
            own[word] = own.get(word, 0) + count
    for metric, words in second.get("gauges", {}).items():
        result.setdefault("gauges", {}).setdefault(metric, {}).update(words)
    return result


def flattened(payload: Mapping[str, Any]) -> dict[str, float | int]:
    """Returns the numbers of a payload by readable names, for the engine's log."""
    numbers: dict[str, float | int] = {}
    for part in ("counts", "gauges"):
        for metric, words in payload.get(part, {}).items():
            for word, value in words.items():
                numbers[f"kvpatch {metric} {word}".strip()] = value
    return numbers


class PrometheusRecorder:
    """Records payloads in metrics of `prometheus_client`, or of classes with its interface.

    Args:
      counter, gauge: classes of metrics.
      labelnames: labels that the engine gives all its metrics.
      engines: values of these labels by the engine's number.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Mapping[int, Sequence[object]],
    ):
        self._engines = {number: list(values) for number, values in engines.items()}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, int, str], Any] = {}
        for name, metric in METRICS.items():
            labels = [*labelnames, *([metric.label] if metric.label else [])]
            is_counter = metric.kind == "counter"
            more = {} if is_counter else {"multiprocess_mode": "mostrecent"}
            kind = counter if is_counter else gauge
            self._metrics[name] = kind(name=PREFIX + name, documentation=metric.text, labelnames=labels, **more)
            for engine in self._engines:
                for word in metric.words if is_counter else ():
                    self._child(name, engine, word)

    def observe(self, payload: Mapping[str, Any], engine: int = 0) -> None:
        """Adds the counts of a payload and sets its gauges. Skips metrics that this version does not have.

        Args:
          engine: number of the engine that sent it.
        """
        for name, words in payload.get("counts", {}).items():
            if name in METRICS and METRICS[name].kind == "counter":
                for word, count in words.items():
                    self._child(name, engine, word).inc(count)
        for name, words in payload.get("gauges", {}).items():
            if name in METRICS and METRICS[name].kind == "gauge":
                for word, value in words.items():
                    self._child(name, engine, word).set(value)

    def _child(self, name: str, engine: int, word: str) -> Any:
        key = (name, engine, word)
        if key not in self._children:
            values = [*self._engines[engine], *([word] if METRICS[name].label else [])]
            self._children[key] = self._metrics[name].labels(*values) if values else self._metrics[name]
        return self._children[key]
