"""Replays one trace in every way, and holds each answer against what the windows promise."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvpatch_jax.traces import Trace
from kvpatch_jax.window import Costs
from models import ModelBackbone

from ..bench.loop_workload import with_buckets
from ..compilation import Compilations
from ..results import intervals
from ..results.environment import environment
from .tracking import Asked, Contents, Moment, Shape, moments, shape_of
from .ways import Prefixes, Prompts, Stock, Taken, Windows, divergence

RANKS = (1, 2, 4, 8, 16, 32)
RANK = 16
PREFILL, PREFIX, WINDOW = "re-prefill", "prefix cache", "window"
FIRST, AGAIN, BLIND = "patches, first time", "patches, met before", "blind"
WAYS = (PREFILL, PREFIX, WINDOW, FIRST, AGAIN, BLIND)
Record = dict[str, Any]


@dataclasses.dataclass
class Run:
    """What one way took over a whole trace.

    Attributes:
      taken: of each question, in order, with what forks before it took. compiled: programs.
    """

    taken: list[Taken]
    compiled: int = 0

    def total(self, word: str) -> int:
        """A sum over all."""
        return sum(getattr(each, word) for each in self.taken)


def run_way(way: Any, seen: Sequence[Moment], compilations: Compilations | None = None) -> Run:
    """Serves a trace's moments in one way.

    Args:
      compilations: counts what is compiled, from nothing compiled; None: whatever is compiled stays.
    """
    before = 0
    if compilations is not None:
        jax.clear_caches()
        before = compilations.count
    run, forks = Run([]), list[Taken]()
    for moment in seen:
        taken = way.see(moment)
        if taken is None:
            continue
        forks.append(taken)
        if isinstance(moment, Asked):
            sums = {word: sum(getattr(each, word) for each in forks) for word in ("forwards", "flops", "bytes")}
            run.taken.append(taken._replace(**sums))
            forks.clear()
    run.compiled = 0 if compilations is None else compilations.count - before
    return run


def replay(
    trace: Trace,
    backbone: ModelBackbone,
    *,
    rank: int = RANK,
    ranks: Sequence[int] = RANKS,
    say: Callable[[str], None] = lambda text: None,
) -> Record:
    """Replays a trace in every way.

    Args:
      backbone: without buckets; every way runs it with the default ones.
      rank: of the patches. ranks: that are tried one by one, on a stock that has met the trace.
      say: told of each way that is done.

    Returns:
      {"kind", "parameters", "model", "rank", "asks", "ways": {way: sums, and numbers of each question}, "ranks": a
      record each, "stock": what was formed behind the answers' back, "unpinned": the slide without a pinned lead
      (where images slide), "environment"}.

    Raises:
      TraceError: a trace that cannot be replayed.
    """
    padded = with_buckets(backbone)
    contents, shape = Contents.of(trace, padded), shape_of(trace)
    seen = list(moments(trace, contents, Costs.of(padded, np.float32)))
    compilations, stock = Compilations(), Stock(padded, contents)
    windows = lambda policy, **more: Windows(padded, contents, shape, policy, **more)
    makers: dict[str, Callable[[], Any]] = {
        PREFILL: lambda: Prompts(padded, contents),
        PREFIX: lambda: Prefixes(padded, contents),
        WINDOW: lambda: windows("prefill"),
        FIRST: lambda: windows("patch", stock=stock, rank=rank),
        AGAIN: lambda: windows("patch", stock=stock, rank=rank),
        BLIND: lambda: windows("blind", stock=stock, learn=False),
    }
    runs, counts = dict[str, Run](), dict[str, Record]()
    for name, make in makers.items():
        way = make()
        runs[name] = run_way(way, seen, compilations)
        counts[name] = {"hits": getattr(way, "hits", 0), "misses": getattr(way, "misses", 0)}
        if name == FIRST:
            counts["formed"] = {"forwards": stock.forwards, "flops": stock.flops}
        say(name)

    forget = runs[PREFILL]
    promised = forget
    if shape.promise == "remember":
        promised = run_way(windows("prefill", host=True), seen)
        say("what was promised, on plain arrays")
    found: Record = {
        "kind": trace.kind,
        "parameters": dict(trace.parameters),
        "promise": shape.promise,
        "rank": rank,
        "asks": len(forget.taken),
        "window": window_sizes(seen),
        "ways": {name: summary(run, promised, forget) | counts.get(name, {}) for name, run in runs.items()},
    }
    found["ranks"] = []
    for each in ranks:
        way = windows("patch", stock=stock, rank=each, learn=False)
        row = summary(run_way(way, seen), promised, forget)
        canonicals, patches, count = stock.nbytes(each)
        more = {"rank": each, "patch_bytes": patches, "patches": count, "canonical_bytes": canonicals}
        found["ranks"].append(more | {word: row[word] for word in ("kl", "kl_low", "kl_high", "flips", "kls")})
        say(f"patches of rank {each}")
    found["stock"] = counts["formed"]
    if trace.kind in ("screenshots", "video"):
        found["unpinned"] = unpinned(trace, padded, contents)
        say("nothing pinned")
    found["environment"] = environment()
    return found


def summary(run: Run, promised: Run, forget: Run) -> Record:
    """Sums of a run, its numbers question by question, KL and flips against both references."""
    row: Record = {word: run.total(word) for word in ("forwards", "flops", "bytes")}
    row["compiled"] = run.compiled
    for name, reference in (("", promised), ("forget_", forget)):
        pairs = [divergence(true.logits, own.logits) for true, own in zip(reference.taken, run.taken, strict=True)]
        kls, flips = [kl for kl, _ in pairs], [flip for _, flip in pairs]
        interval = intervals.mean(np.asarray(kls), np.arange(len(kls)))
        row |= {f"{name}kl": interval.value, f"{name}kl_low": interval.low, f"{name}kl_high": interval.high}
        row |= {f"{name}flips": statistics.fmean(flips), f"{name}kls": kls}
    row["each"] = {word: [getattr(each, word) for each in run.taken] for word in ("forwards", "flops", "bytes")}
    return row


def window_sizes(seen: Sequence[Moment]) -> Record:
    """Tokens and pieces of the windows that were asked."""
    asked = [moment for moment in seen if isinstance(moment, Asked)]
    tokens = [sum(entry.tokens for entry in each.pieces) for each in asked]
    return {
        "pieces": statistics.fmean(len(each.pieces) for each in asked),
        "tokens": statistics.fmean(tokens),
        "largest": max(tokens),
    }


def unpinned(trace: Trace, padded: ModelBackbone, contents: Contents) -> Record:
    """The same trace where nothing is pinned: KL of kept survivors to a re-prefill of what is left."""
    free = Shape("remember", 0)
    without = dataclasses.replace(trace, parameters={**trace.parameters, "lead": 0})
    seen = list(moments(without, contents, Costs.of(padded, np.float32)))
    forget = run_way(Prompts(padded, contents), seen)
    own = run_way(Windows(padded, contents, free, "prefill"), seen)
    row = summary(own, forget, forget)
    return {word: row[word] for word in ("kl", "kl_low", "kl_high", "flips", "kls")}


def table(found: Record) -> tuple[tuple[str, ...], list[list[str]]]:
    """What every way took, as a table."""
    head = ("way", "forwards", "GFLOP", "MB of KV", "programs", "KL to what is promised", "flips", "KL to re-prefill")
    lines = []
    for name, row in found["ways"].items():
        lines.append(
            [
                name,
                str(row["forwards"]),
                f"{row['flops'] / 1e9:.2f}",
                f"{row['bytes'] / 1e6:.0f}",
                str(row["compiled"]),
                _kl(row),
                f"{100 * row['flips']:.0f} %",
                f"{row['forget_kl']:.2g}",
            ]
        )
    return head, lines


def rank_table(found: Record) -> tuple[tuple[str, ...], list[list[str]]]:
    """What patches of each rank lose, as a table."""
    head = ("rank", "KL to what is promised", "flips", "KB of patches", "patches", "KB of canonicals")
    lines = []
    for row in found["ranks"]:
        sizes = f"{row['patch_bytes'] / 1e3:.0f}", str(row["patches"]), f"{row['canonical_bytes'] / 1e3:.0f}"
        lines.append([str(row["rank"]), _kl(row), f"{100 * row['flips']:.0f} %", *sizes])
    return head, lines


def _kl(row: Record) -> str:
    """A mean KL with its interval, where it is more than rounding."""
    if row["kl"] < 1e-9:
        return f"{row['kl']:.2g}"
    return f"{row['kl']:.2g} [{row['kl_low']:.2g}, {row['kl_high']:.2g}]"


def out_of(folder: Path, kind: str) -> Path:
    """Where a kind's results lie."""
    return folder / f"replay_{kind}.json"
