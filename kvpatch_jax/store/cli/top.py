"""`python -m kvpatch_jax.store top ROOT`: shows what the processes of a root do, again and again."""

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import InputError
from ..disk.usage import Usage, usage
from ..metrics import Statistics, StatisticsCollector
from ..process_statistics import ProcessList, read_processes, total_of

USAGE = """usage: python -m kvpatch_jax.store top ROOT [flags]

Shows tiers, evictions, tenants (by keyed name) and processes of a store, until it is interrupted.
"""
LEAST_INTERVAL = 0.5
TIERS = ("device", "host", "disk", "remote")
_EVICTED = re.compile(r"(device|host|disk)_evicted_(\w+)")
_CLEAR = "\x1b[H\x1b[2J"


@dataclasses.dataclass(frozen=True)
class RootView:
    """What is known of a root at one time.

    Attributes:
      at: the time, in seconds since the epoch.
      total: of all processes. tenants: by keyed name, of all processes.
      usage: what the tenants have on the disk.
      processes: the living processes.
    """

    at: float
    total: Statistics
    tenants: Mapping[str, Statistics]
    usage: Mapping[str, Usage]
    processes: ProcessList


def view_of(root: str, now: float) -> RootView:
    """Reads a root's statistics and its use of the disk. Raises StoreError."""
    processes, by_tenant = read_processes(root), dict[str, list[Statistics]]()
    for process in processes.processes:
        for tenant, statistics in process.tenants.items():
            by_tenant.setdefault(tenant, []).append(statistics)
    tenants = {tenant: total_of(several) for tenant, several in sorted(by_tenant.items())}
    return RootView(now, total_of(tenants.values()), tenants, usage(root), processes)


def as_json(view: RootView) -> dict[str, Any]:
    """Returns a view as JSON."""
    disk: dict[str, Any] = {tenant: own._asdict() for tenant, own in view.usage.items()}
    processes: list[dict[str, Any]] = []
    for process in view.processes.processes:
        counts = total_of(process.tenants.values()).counts
        processes.append({"name": process.name, "pid": process.pid, "began": process.began, "counts": counts})
    tenants = {tenant: {"counts": dict(own.counts), "held": dict(own.held)} for tenant, own in view.tenants.items()}
    return {
        "at": view.at,
        "counts": dict(view.total.counts),
        "held": dict(view.total.held),
        "gauges": dict(view.total.gauges),
        "disk": disk,
        "tenants": tenants,
        "processes": processes,
        "unreadable": view.processes.unreadable,
    }


def screen(root: str, view: RootView, before: RootView | None = None) -> Iterator[str]:
    """Yields the lines of a view; with one before it, rates in between."""
    total, seconds = view.total.counts, 0.0 if before is None else view.at - before.at
    earlier = {} if before is None else before.total.counts

    def rate(name: str) -> str:
        # A process that has ended takes its counts along.
        return f"{max(total.get(name, 0) - earlier.get(name, 0), 0) / seconds:,.1f}" if seconds > 0 else "-"

    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(view.at))
    unreadable = f", {view.processes.unreadable} unreadable files" if view.processes.unreadable else ""
    yield f"{root}  {when}  {len(view.processes.processes)} processes{unreadable}"
    yield ""

    reads = sum(total.get(f"{tier}_hits", 0) for tier in TIERS) + total.get("misses", 0)
    disk_bytes = sum(own.nbytes for own in view.usage.values())
    held = {**view.total.held, "disk": disk_bytes}
    yield f"{'tier':<10} {'bytes':>18} {'hits':>14} {'share':>7} {'per s':>10}  evicted"
    for tier in TIERS:
        hits = total.get(f"{tier}_hits", 0)
        size = f"{held[tier]:,}" if tier in held else "-"
        yield _tier_line(tier, size, hits, reads, rate(f"{tier}_hits"), _evictions(total, tier))
    yield _tier_line("missed", "-", total.get("misses", 0), reads, rate("misses"), "")

    yield ""
    yield f"puts {total.get('puts', 0):,} ({rate('puts')} per s)  idle buffers {held.get('pool', 0):,} bytes"
    gauges = view.total.gauges
    if "outbox_objects" in gauges:
        age, nbytes = gauges.get("outbox_age_seconds", 0), gauges.get("outbox_bytes", 0)
        yield f"outbox {gauges['outbox_objects']:,.0f} writes, {nbytes:,.0f} bytes, the oldest {_age(age)} old"
    shown = re.compile(r".*_hits|misses|puts|.*_evicted_.*|(?:put|get)_bytes")
    others = [f"{name} {value:,}" for name, value in sorted(total.items()) if value and not shown.fullmatch(name)]
    if others:
        yield "  ".join(others)

    yield ""
    yield f"{'tenant':<32} {'objects':>12} {'bytes':>18} {'oldest use':>11} {'hits':>12} {'misses':>12} {'evicted':>12}"
    for tenant in sorted(view.usage.keys() | view.tenants.keys()):
        yield _tenant_line(tenant, view)

    yield ""
    yield f"{'process':<28} {'since':>10} {'reads':>14} {'puts':>12}"
    for process in view.processes.processes:
        counts = total_of(process.tenants.values()).counts
        own = sum(counts.get(f"{tier}_hits", 0) for tier in TIERS) + counts.get("misses", 0)
        yield f"{process.name:<28} {_age(view.at - process.began):>10} {own:>14,} {counts.get('puts', 0):>12,}"


def _tier_line(tier: str, size: str, hits: int, reads: int, rate: str, evicted: str) -> str:
    share = f"{hits / reads:.1%}" if reads else "-"
    return f"{tier:<10} {size:>18} {hits:>14,} {share:>7} {rate:>10}  {evicted}".rstrip()


def _evictions(counts: Mapping[str, int], tier: str) -> str:
    """Formats the evictions of a tier by reason."""
    found: list[str] = []
    for name, value in sorted(counts.items()):
        match = _EVICTED.fullmatch(name)
        if match is not None and match[1] == tier and value:
            found.append(f"{match[2]} {value:,}")
    return ", ".join(found)


def _tenant_line(tenant: str, view: RootView) -> str:
    own, counts = view.usage.get(tenant), view.tenants.get(tenant, Statistics({}, {}, {})).counts
    hits = sum(counts.get(f"{tier}_hits", 0) for tier in TIERS)
    evicted = sum(value for name, value in counts.items() if name.startswith("disk_evicted_"))
    objects, nbytes, oldest = "0", "0", "-"
    if own is not None:
        objects, nbytes, oldest = f"{own.objects:,}", f"{own.nbytes:,}", _age(view.at - own.oldest)
    numbers = f"{hits:>12,} {counts.get('misses', 0):>12,} {evicted:>12,}"
    return f"{tenant:<32} {objects:>12} {nbytes:>18} {oldest:>11} {numbers}"


def _age(seconds: float | int) -> str:
    """Formats a time that has passed."""
    for unit, one in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * one:
            return f"{seconds / one:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def prometheus_page(root: str) -> str:
    """Returns the metrics of all processes of a root, labelled by process and keyed name of the tenant.

    Raises:
      ImportError: `prometheus_client` is not installed (the extra `operate`). StoreError: the root cannot be read.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    def read() -> Iterator[tuple[Statistics, dict[str, str]]]:
        for process in read_processes(root).processes:
            for tenant, statistics in process.tenants.items():
                yield statistics, {"process": process.name, "tenant": tenant}

    registry = CollectorRegistry()
    registry.register(StatisticsCollector(read))
    return generate_latest(registry).decode()


def _flags() -> tuple[Any, type[Exception]]:
    from absl import flags

    values = flags.FlagValues()
    flags.DEFINE_string("root", None, "The store's directory, in place of ROOT.", flag_values=values)
    flags.DEFINE_bool("once", False, "Show it once.", flag_values=values)
    flags.DEFINE_bool("json", False, "Print one JSON object, once.", flag_values=values)
    flags.DEFINE_bool("prometheus", False, "Print the metrics of all processes, once.", flag_values=values)
    flags.DEFINE_float("interval", 2.0, "Seconds between two readings.", lower_bound=LEAST_INTERVAL, flag_values=values)
    flags.DEFINE_bool("help", False, "Print this.", flag_values=values)
    return values, flags.Error


def lines(arguments: Sequence[str]) -> Iterator[str]:
    """Yields what the program prints; a live view never ends. Raises InputError if the flags are wrong, StoreError."""
    values, wrong = _flags()
    try:
        names = values(["top", *arguments])[1:]
    except wrong as error:
        raise InputError(f"top: {error}") from None
    if values.help:
        yield USAGE + values.get_help()
        return

    root = _root(names, values.root)
    if values.prometheus:
        yield prometheus_page(root)
    elif values.json:
        yield json.dumps(as_json(view_of(root, time.time())))
    elif values.once:
        yield from screen(root, view_of(root, time.time()))
    else:
        yield from _live(root, values.interval)


def _root(names: Sequence[str], flag: str | None) -> str:
    given = [*names, *([flag] if flag else [])]
    if len(given) != 1:
        raise InputError(f"top: got {len(given)} roots; expected one, as `top ROOT`")
    root = os.path.expanduser(given[0])
    if not os.path.isdir(f"{root}/obj"):
        raise InputError(f"store {root}: got no store there; expected a directory with obj/")
    return root


def _live(root: str, interval: float) -> Iterator[str]:
    before: RootView | None = None
    while True:
        view = view_of(root, time.time())
        clear = _CLEAR if sys.stdout.isatty() else ""
        yield clear + "\n".join(screen(root, view, before))
        before = view
        time.sleep(interval)
