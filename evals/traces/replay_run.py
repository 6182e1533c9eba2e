"""Replay of one trace in every mode; each answer is compared with what the windows promise."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import numpy as np

from kvpatch_jax.core import Buckets
from kvpatch_jax.traces import Trace
from kvpatch_jax.window import Costs, Entry
from models import ModelBackbone

from ..bench.shapes import with_buckets
from ..compilation import Compilations
from ..harness import intervals
from ..harness.environment import environment
from .held_prompts import HoldingRule
from .prefix_cache import divergence
from .replay_modes import (
    PAGE,
    HeldReplay,
    PrefixReplay,
    PromptReplay,
    ReplayPatches,
    ReplayStep,
    WindowPolicy,
    WindowReplay,
)
from .window_tracker import (
    Moment,
    TraceConfig,
    TraceContents,
    TracedQuestion,
    TraceSizes,
    config_of,
    drawn_tokens,
    moments,
)

RANKS = (1, 2, 4, 8, 16, 32)
RANK = 16
PREFILL, PREFIX, WINDOW = "re-prefill", "prefix cache", "window"
FIRST, AGAIN, BLIND = "patches, first time", "patches, met before", "blind"
BATCHED, PLACEHOLDER = "batched eviction", "placeholders, texts kept"
MODES = (PREFILL, PREFIX, BATCHED, PLACEHOLDER, WINDOW, FIRST, AGAIN, BLIND)
OWN_EVERY = 10
"""Of drawn traces, one answer in so many is compared with a re-prefill of what the mode itself showed."""
COARSE = Buckets(64, 1)
"""Buckets of drawn traces: powers of two, so that prompts of hundreds of lengths compile few programs."""
PLACEHOLDER_TOKENS = 3
"""Of the text that takes the place of a screenshot that left."""
LEFT = Entry("left", "[left]", PLACEHOLDER_TOKENS, PLACEHOLDER_TOKENS, "text")
"""The placeholder, whose tokens are drawn by its name."""
EXACT = 1e-6
"""Nats; a mode with a smaller KL to its own window's re-prefill is exact."""
ROUNDING = 1e-9
"""Nats; a smaller KL is shown without its interval."""
Field = Literal["forwards", "flops", "bytes", "tokens"]
FIELDS: tuple[Field, ...] = get_args(Field)
Record = dict[str, Any]


@runtime_checkable
class ReplayMode(Protocol):
    """A mode of serving a trace's windows."""

    def see(self, moment: Moment) -> ReplayStep | None:
        """Answers a question, or prepares for one; None: nothing was done."""
        ...


class DrawnTrace(NamedTuple):
    """A trace of which numbers of tokens alone are replayed.

    Prefix caches then know every token, not blocks of 16, and programs are counted that no earlier mode compiled.

    Attributes:
      sizes: of all that it shows and asks.
      high: chunks that make those that have left leave together, where they do so in batches.
      left: the placeholder.
    """

    sizes: TraceSizes
    high: int
    left: Entry


@dataclasses.dataclass
class ReplayResult:
    """Steps of one mode over a whole trace.

    Attributes:
      steps: one for each question, including the forks before it.
      compiled: number of programs.
    """

    steps: list[ReplayStep]
    compiled: int = 0

    def total(self, field: Field) -> int:
        """Returns a sum over all questions."""
        return sum(getattr(step, field) for step in self.steps)


def replay_mode(
    mode: ReplayMode, seen: Sequence[Moment], compilations: Compilations | None = None, *, fresh: bool = True
) -> ReplayResult:
    """Serves a trace's moments in one mode.

    Args:
      compilations: counts the programs compiled; None: nothing is counted, and what is compiled stays.
      fresh: whether they are counted from an empty cache, and not from what other modes left.
    """
    before = 0
    if compilations is not None:
        if fresh:
            jax.clear_caches()
        before = compilations.count

    steps, pending = [], ReplayResult([])
    for moment in seen:
        step = mode.see(moment)
        if step is None:
            continue
        pending.steps.append(step)
        if isinstance(moment, TracedQuestion):
            totals = {field: pending.total(field) for field in FIELDS}
            steps.append(step._replace(**totals))
            pending = ReplayResult([])

    return ReplayResult(steps, 0 if compilations is None else compilations.count - before)


def replay(
    trace: Trace,
    backbone: ModelBackbone,
    *,
    rank: int = RANK,
    ranks: Sequence[int] = RANKS,
    drawn: DrawnTrace | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Record:
    """Replays a trace in every mode.

    Args:
      backbone: without buckets; every mode runs it with the default ones, and of drawn tokens with `COARSE`.
      rank: of the patches.
      ranks: tried one by one, on patches that have met the trace.
      drawn: tokens in place of the trace's contents, and what else then differs.
      report: called with the name of each mode that is done.

    Returns:
      {"kind", "parameters", "model", "rank", "asks", "ways": {mode: sums, and numbers of each question}, "ranks": a
      record each, "stock": what was formed in the background, "unpinned": the slide without a pinned lead (if images
      slide), "environment"}.

    Raises:
      TraceError: a trace that cannot be replayed.
    """
    padded = with_buckets(backbone)
    if drawn is not None:
        padded.buckets = COARSE
    config, left, block, every = config_of(trace), LEFT, PAGE, 1
    if drawn is None:
        contents = TraceContents.of(trace, padded)
    else:
        contents, left, block, every = TraceContents.drawn(drawn.sizes, padded), drawn.left, 1, OWN_EVERY
    seen = list(moments(trace, contents, Costs.of(padded, np.float32)))
    high = 2 * most_chunks(seen) if drawn is None else drawn.high
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
    contents.pieces[left.content or ""] = drawn_tokens(padded, left.content or "", left.tokens)
    rules = {BATCHED: HoldingRule(high), PLACEHOLDER: HoldingRule(high, texts=True, placeholder=left)}

    for name in MODES:
        if name in policies:
            mode = WindowReplay(padded, contents, config, policies[name])
        elif name in rules:
            mode = HeldReplay(padded, contents, rules[name], block, every)
        else:
            mode = PromptReplay(padded, contents) if name == PREFILL else PrefixReplay(padded, contents, block)

        results[name] = replay_mode(mode, seen, compilations, fresh=drawn is None)
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
    row: Record = {field: result.total(field) for field in FIELDS}
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

    # What a mode showed: the trace's window, or that and what has not left yet.
    own = [divergence(step.own, step.logits)[0] for step in result.steps if step.own is not None]
    row["own_kl"] = statistics.fmean(own) if own else row["forget_kl"]

    row["each"] = {}
    for field in FIELDS:
        row["each"][field] = [getattr(step, field) for step in result.steps]
    return row


def most_chunks(seen: Sequence[Moment]) -> int:
    """Returns the largest number of chunks that a question's window shows; 1 at least."""
    asked = [moment for moment in seen if isinstance(moment, TracedQuestion)]
    return max([1, *(sum(entry.kind == "chunk" for entry in moment.pieces) for moment in asked)])


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
    head = ("way", "forwards", "tokens", "GFLOP", "MB of KV", "programs", "KL to what is promised", "flips")
    head = (*head, "KL to re-prefill", "KL to its own window's")
    lines = []
    for name, row in record["ways"].items():
        costs = [str(row["forwards"]), str(row["tokens"]), f"{row['flops'] / 1e9:.2f}", f"{row['bytes'] / 1e6:.0f}"]
        kls = [_format_kl(row), f"{100 * row['flips']:.0f} %", f"{row['forget_kl']:.2g}", f"{row['own_kl']:.2g}"]
        lines.append([name, *costs, str(row["compiled"]), *kls])
    return head, lines


def winners(record: Record) -> str:
    """Says which mode takes the fewest FLOPs, of those that compute every answer as a re-prefill of what they show
    does, and of all; and which share of the questions each mode is the cheapest at."""
    exact = [name for name, row in record["ways"].items() if row["own_kl"] < EXACT]
    parts = []
    for title, names in (("exact", exact), ("all", list(record["ways"]))):
        # Of equal modes the classic one counts, which comes first.
        each = np.array([record["ways"][name]["each"]["flops"] for name in names])
        shares = Counter(names[place] for place in each.argmin(axis=0))
        best = min(names, key=lambda name: record["ways"][name]["flops"])
        questions = ", ".join(f"{name} {100 * count / record['asks']:.0f} %" for name, count in shares.most_common())
        parts.append(f"fewest FLOPs of {title} ways: {best}; cheapest at the questions: {questions}")
    return "\n".join(parts)


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
