"""Replay of one trace in every mode; each answer is compared with what the windows promise."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from kvpatch_jax.traces import Trace
from kvpatch_jax.window import Costs
from models import ModelBackbone

from ..bench.loop_workload import with_buckets
from ..bench.window_loop import divergence
from ..compilation import Compilations
from ..results import intervals
from ..results.environment import environment
from .replay_modes import PrefixReplay, PromptReplay, ReplayPatches, ReplayStep, WindowPolicy, WindowReplay
from .window_tracker import Moment, TraceConfig, TraceContents, TracedQuestion, config_of, moments

RANKS = (1, 2, 4, 8, 16, 32)
RANK = 16
PREFILL, PREFIX, WINDOW = "re-prefill", "prefix cache", "window"
FIRST, AGAIN, BLIND = "patches, first time", "patches, met before", "blind"
MODES = (PREFILL, PREFIX, WINDOW, FIRST, AGAIN, BLIND)
ROUNDING = 1e-9
"""Nats; a smaller KL is shown without its interval."""
Record = dict[str, Any]


@runtime_checkable
class ReplayMode(Protocol):
    """A mode of serving a trace's windows."""

    def see(self, moment: Moment) -> ReplayStep | None:
        """Answers a question, or prepares for one; None: nothing was done."""
        ...


@dataclasses.dataclass
class ReplayResult:
    """Steps of one mode over a whole trace.

    Attributes:
      steps: one for each question, including the forks before it.
      compiled: number of programs.
    """

    steps: list[ReplayStep]
    compiled: int = 0

    def total(self, field: Literal["forwards", "flops", "bytes"]) -> int:
        """Returns a sum over all questions."""
        return sum(getattr(step, field) for step in self.steps)


def replay_mode(mode: ReplayMode, seen: Sequence[Moment], compilations: Compilations | None = None) -> ReplayResult:
    """Serves a trace's moments in one mode.

    Args:
      compilations: counts the programs compiled, from an empty cache; None keeps what is compiled.
    """
    before = 0
    if compilations is not None:
        jax.clear_caches()
        before = compilations.count

    steps, pending = [], ReplayResult([])
    for moment in seen:
        step = mode.see(moment)
        if step is None:
            continue
        pending.steps.append(step)
        if isinstance(moment, TracedQuestion):
            totals = {field: pending.total(field) for field in ("forwards", "flops", "bytes")}
            steps.append(step._replace(**totals))
            pending = ReplayResult([])

    return ReplayResult(steps, 0 if compilations is None else compilations.count - before)


def replay(
    trace: Trace,
    backbone: ModelBackbone,
    *,
    rank: int = RANK,
    ranks: Sequence[int] = RANKS,
    report: Callable[[str], None] = lambda text: None,
) -> Record:
    """Replays a trace in every mode.

    Args:
      backbone: without buckets; every mode runs it with the default ones.
      rank: of the patches.
      ranks: tried one by one, on patches that have met the trace.
      report: called with the name of each mode that is done.

    Returns:
      {"kind", "parameters", "model", "rank", "asks", "ways": {mode: sums, and numbers of each question}, "ranks": a
      record each, "stock": what was formed in the background, "unpinned": the slide without a pinned lead (if images
      slide), "environment"}.

    Raises:
      TraceError: a trace that cannot be replayed.
    """
    padded = with_buckets(backbone)
    contents, config = TraceContents.of(trace, padded), config_of(trace)
    seen = list(moments(trace, contents, Costs.of(padded, np.float32)))
    compilations, patches = Compilations(), ReplayPatches(padded, contents)
    patching = WindowPolicy("patch", patches, rank)
    policies = {
        WINDOW: WindowPolicy("prefill"),
        FIRST: patching,
        AGAIN: patching,
        BLIND: WindowPolicy("blind", patches, learn=False),
    }

    # Modes run in order, because AGAIN meets what FIRST left in `patches`. Each is made when its turn comes, because a
    # pool takes memory.
    results, counts, formed = dict[str, ReplayResult](), dict[str, Record](), Record()

    for name in MODES:
        if name in policies:
            mode = WindowReplay(padded, contents, config, policies[name])
        else:
            mode = PromptReplay(padded, contents) if name == PREFILL else PrefixReplay(padded, contents)

        results[name] = replay_mode(mode, seen, compilations)
        counts[name] = {"hits": getattr(mode, "hits", 0), "misses": getattr(mode, "misses", 0)}
        if name == FIRST:
            formed = {"forwards": patches.forwards, "flops": patches.flops}
        report(name)

    # The reference: a re-prefill, or what windows remember, on plain arrays.
    forget = results[PREFILL]
    promised = forget
    if config.promise == "remember":
        promised = replay_mode(WindowReplay(padded, contents, config, WindowPolicy("prefill", host=True)), seen)
        report("what was promised, on plain arrays")

    rows = []
    for tried in ranks:
        policy = WindowPolicy("patch", patches, tried, learn=False)
        row = summary(replay_mode(WindowReplay(padded, contents, config, policy), seen), promised, forget)
        canonicals, nbytes, count = patches.sizes(tried)
        sizes = {"rank": tried, "patch_bytes": nbytes, "patches": count, "canonical_bytes": canonicals}
        rows.append(sizes | {field: row[field] for field in ("kl", "kl_low", "kl_high", "flips", "kls")})
        report(f"patches of rank {tried}")

    record: Record = {
        "kind": trace.kind,
        "parameters": dict(trace.parameters),
        "promise": config.promise,
        "rank": rank,
        "asks": len(forget.steps),
        "window": window_sizes(seen),
        "ways": {name: summary(result, promised, forget) | counts[name] for name, result in results.items()},
        "ranks": rows,
        "stock": formed,
    }
    if trace.kind in ("screenshots", "video"):
        record["unpinned"] = unpinned(trace, padded, contents)
        report("nothing pinned")

    record["environment"] = environment()
    return record


def summary(result: ReplayResult, promised: ReplayResult, forget: ReplayResult) -> Record:
    """Returns a mode's sums, its numbers question by question, and KL and flips against both references."""
    row: Record = {field: result.total(field) for field in ("forwards", "flops", "bytes")}
    row["compiled"] = result.compiled
    for prefix, reference in (("", promised), ("forget_", forget)):
        kls, flips = [], []
        for true, own in zip(reference.steps, result.steps, strict=True):
            kl, flip = divergence(true.logits, own.logits)
            kls.append(kl)
            flips.append(flip)
        interval = intervals.mean(np.asarray(kls), np.arange(len(kls)))
        row |= {f"{prefix}kl": interval.value, f"{prefix}kl_low": interval.low, f"{prefix}kl_high": interval.high}
        row |= {f"{prefix}flips": statistics.fmean(flips), f"{prefix}kls": kls}

    row["each"] = {}
    for field in ("forwards", "flops", "bytes"):
        row["each"][field] = [getattr(step, field) for step in result.steps]
    return row


def window_sizes(seen: Sequence[Moment]) -> Record:
    """Returns tokens and pieces of the windows that were asked."""
    pieces, tokens = [], []
    for moment in seen:
        if isinstance(moment, TracedQuestion):
            pieces.append(len(moment.pieces))
            tokens.append(sum(entry.tokens for entry in moment.pieces))
    return {
        "pieces": statistics.fmean(pieces),
        "tokens": statistics.fmean(tokens),
        "largest": max(tokens),
    }


def unpinned(trace: Trace, padded: ModelBackbone, contents: TraceContents) -> Record:
    """Replays a trace with nothing pinned: KL of kept survivors to a re-prefill of what is left."""
    without = dataclasses.replace(trace, parameters={**trace.parameters, "lead": 0})
    seen = list(moments(without, contents, Costs.of(padded, np.float32)))
    forget = replay_mode(PromptReplay(padded, contents), seen)
    windows = WindowReplay(padded, contents, TraceConfig("remember", 0), WindowPolicy("prefill"))
    row = summary(replay_mode(windows, seen), forget, forget)
    return {field: row[field] for field in ("kl", "kl_low", "kl_high", "flips", "kls")}


# --------------------------------------------------------------------------------------------------------- tables


def table(record: Record) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns what every mode took: the head and the lines of a table."""
    head = ("way", "forwards", "GFLOP", "MB of KV", "programs", "KL to what is promised", "flips", "KL to re-prefill")
    lines = []
    for name, row in record["ways"].items():
        costs = [str(row["forwards"]), f"{row['flops'] / 1e9:.2f}", f"{row['bytes'] / 1e6:.0f}", str(row["compiled"])]
        lines.append([name, *costs, _format_kl(row), f"{100 * row['flips']:.0f} %", f"{row['forget_kl']:.2g}"])
    return head, lines


def rank_table(record: Record) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns what patches of each rank lose: the head and the lines of a table."""
    head = ("rank", "KL to what is promised", "flips", "KB of patches", "patches", "KB of canonicals")
    lines = []
    for row in record["ranks"]:
        sizes = f"{row['patch_bytes'] / 1e3:.0f}", str(row["patches"]), f"{row['canonical_bytes'] / 1e3:.0f}"
        lines.append([str(row["rank"]), _format_kl(row), f"{100 * row['flips']:.0f} %", *sizes])
    return head, lines


def _format_kl(row: Record) -> str:
    if row["kl"] < ROUNDING:
        return f"{row['kl']:.2g}"
    return f"{row['kl']:.2g} [{row['kl_low']:.2g}, {row['kl_high']:.2g}]"


def out_of(folder: Path, kind: str) -> Path:
    """Returns where a kind's results are written."""
    return folder / f"replay_{kind}.json"
