"""What each step of a trace costs in every way of keeping its window, by formulas alone: nothing runs.

A window is bounded to so many chunks, whatever the trace let leave, and every way serves the same questions. FLOPs and
bytes are those of `Costs`, seconds at the rates of a device. Prefix caches are as good as one can be: they know every
prefix of pieces that the session ever computed.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from kvpatch_jax.errors import TraceError
from kvpatch_jax.plan import DeviceCosts
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import KEEP, Costs, Edit, Edits, Entry, Prefill, Window, arrange
from kvpatch_jax.window import PREFILL as BY_FORWARD

from .held_prompts import HeldPrompt, HoldingRule
from .window_tracker import NO_COSTS, TracedQuestion, TraceSizes, moments

PREFILL, PREFIX, NEVER, DROPPED = "re-prefill", "prefix cache, one by one", "never evict", "drop old, texts kept"
BATCHED, PLACEHOLDER, PLACEHOLDERS = "batched eviction", "placeholder", "batched placeholders"
SLIDE, BATCHED_SLIDE = "slide, rotated (ours)", "batched slide, rotated (ours)"
PROMPTS = (PREFILL, PREFIX, NEVER, DROPPED, PLACEHOLDER, BATCHED, PLACEHOLDERS)
"""Ways of agents without this library: exact for what they show, the classic ones first."""
WAYS = (*PROMPTS, SLIDE, BATCHED_SLIDE)
LEFT = Entry("left", "[left]", 6, 6, "text")
"""The placeholder."""
Unit = Literal["flops", "seconds", "tokens"]


class StepPrice(NamedTuple):
    """Price of one step: of what enters, of what is computed again, and of the question."""

    flops: int
    seconds: float
    tokens: int


def bounded(trace: Trace, keep: int) -> Trace:
    """Returns a trace whose windows show the newest `keep` chunks after the lead, whatever it let leave.

    The lead is the texts before the first chunk, or without them that chunk. A chunk that comes back is recalled where
    it has left such a window.

    Raises:
      TraceError: an event that reorders, replaces or forks.
    """
    events, shown, leads = list[Event](), dict[str, list[str]](), set[int]()
    started: dict[str, int] = {}
    for place, event in enumerate(trace):
        chunks = shown.setdefault(event.session, [])
        if event.op in ("reorder", "replace", "fork"):
            raise TraceError(f"event {place}: got {event.op!r}; expected what adds, recalls, lets leave and asks")
        if event.op in ("evict", "slide"):
            continue
        if event.op == "add" and event.session not in started:
            # Texts in front are counted until the first chunk settles the lead.
            texts = sum(1 for other in events if other.session == event.session)
            if event.kind == "chunk":
                started[event.session] = texts or 1
                leads.add(started[event.session])
                if not texts:
                    events.append(event)
                    continue
        if event.op in ("add", "recall") and event.kind == "chunk":
            if event.op == "recall" and (event.chunk or "") in chunks:
                continue
            chunks.append(event.chunk or "")
            del chunks[:-keep]
            event = dataclasses.replace(event, keep=keep)
        events.append(event)
    if len(leads) > 1:
        raise TraceError(f"trace: got sessions with leads of {sorted(leads)} pieces; expected one number")
    parameters = {**trace.parameters, "promise": "remember", "lead": next(iter(leads), 0)}
    return dataclasses.replace(trace, events=tuple(events), parameters=parameters)


def questions_of(trace: Trace, sizes: TraceSizes) -> list[TracedQuestion]:
    """Returns the questions of a trace with the windows that they are asked of."""
    return [moment for moment in moments(trace, sizes, NO_COSTS) if isinstance(moment, TracedQuestion)]


def rules(keep: int, left: Entry = LEFT) -> dict[str, HoldingRule]:
    """Returns the rules of the ways that show more than the last `keep` chunks, or texts of what has left.

    Args:
      left: the placeholder.
    """
    return {
        NEVER: HoldingRule(None),
        DROPPED: HoldingRule(keep, texts=True),
        PLACEHOLDER: HoldingRule(keep, texts=True, placeholder=left),
        BATCHED: HoldingRule(2 * keep),
        PLACEHOLDERS: HoldingRule(2 * keep, texts=True, placeholder=left),
        BATCHED_SLIDE: HoldingRule(2 * keep, once=True),
    }


def shown_pieces(asked: Sequence[TracedQuestion], keep: int, left: Entry = LEFT) -> dict[str, list[Sequence[Entry]]]:
    """Returns what every way shows at each question, of windows that show at most `keep` chunks after the lead.

    Args:
      left: the placeholder.
    """
    by_rule, found = rules(keep, left), dict[str, list[Sequence[Entry]]]()
    # A chunk that is the lead is shown by every way, beyond those that a rule counts.
    lead = int(bool(asked and asked[0].pieces) and asked[0].pieces[0].kind == "chunk")
    for way in WAYS:
        rule, held = by_rule.get(way), dict[str, HeldPrompt]()
        if rule is not None and rule.high is not None:
            rule = rule._replace(high=rule.high + lead)
        found[way] = []
        for question in asked:
            prompt = None if rule is None else held.setdefault(question.session, HeldPrompt(rule))
            found[way].append(question.pieces if prompt is None else prompt.show(question.pieces))
    return found


def step_prices(
    asked: Sequence[TracedQuestion],
    shown: Mapping[str, Sequence[Sequence[Entry]]],
    sizes: TraceSizes,
    *,
    costs: Costs,
    devices: DeviceCosts,
) -> Mapping[str, list[StepPrice]]:
    """Prices each step of a trace in every way.

    Args:
      asked: the questions. shown: what every way shows at each, as `shown_pieces` returns it.
      sizes: of the questions.
    """
    prices = dict[str, list[StepPrice]]()
    for way, pieces in shown.items():
        steps = _window(asked, pieces, costs) if way in (SLIDE, BATCHED_SLIDE) else _prompts(asked, pieces, costs, way)
        prices[way] = []
        for question, entries, (edits, tokens) in zip(asked, pieces, steps, strict=True):
            behind, count = sum(entry.tokens for entry in entries), sizes.asked(question.event)
            spent: list[Edit] = [*edits, Prefill("question", behind, **costs.prefill(count, behind, logits=1))]
            flops = sum(edit.flops for edit in spent)
            prices[way].append(StepPrice(flops, devices.seconds(spent), tokens + count))
    return prices


def _prompts(
    asked: Sequence[TracedQuestion], shown: Sequence[Sequence[Entry]], costs: Costs, way: str
) -> Iterable[tuple[Edits, int]]:
    """Yields the forward over what no earlier prompt of the session began with, and its tokens."""
    known: dict[str, set[int]] = {}
    for question, pieces in zip(asked, shown, strict=True):
        prefixes = known.setdefault(question.session, set())
        chain, hit, unbroken = 0, 0, way != PREFILL
        for entry in pieces:
            chain = hash((chain, entry.content))
            unbroken = unbroken and chain in prefixes
            hit += entry.tokens if unbroken else 0
            prefixes.add(chain)
        rest = sum(entry.tokens for entry in pieces) - hit
        yield ((Prefill("prompt", hit, **costs.prefill(rest, hit)),) if rest else ()), rest


def _window(
    asked: Sequence[TracedQuestion], shown: Sequence[Sequence[Entry]], costs: Costs
) -> Iterable[tuple[Edits, int]]:
    """Yields the edits of windows that remember: what stays is rotated, what enters is prefilled behind it."""
    windows: dict[str, Window] = {}
    for question, pieces in zip(asked, shown, strict=True):
        window = windows.get(question.session)
        if window is None:
            window = Window.empty(costs, promise="remember", lead=0)
        arranged, choices = arrange(window, pieces), []
        for index, (piece, kept) in enumerate(zip(arranged.window.pieces, arranged.kept, strict=True)):
            # A piece has seen all that stands in front of it, unless that came later.
            stays = kept and (not index or arranged.window.pieces[index - 1].latest <= piece.born)
            choices.append(KEEP if stays else BY_FORWARD)
        windows[question.session], edits = arranged.serve(choices)
        computed = {edit.id for edit in edits if isinstance(edit, Prefill)}
        # An executor reads one logit behind each forward, by which it knows that all is finite. The last piece and the
        # question behind it are one forward.
        spent: list[Edit] = []
        for edit in edits:
            fused = edit is edits[-1] and isinstance(edit, Prefill) and edit.id == pieces[-1].id
            read = costs.forward.logit if isinstance(edit, Prefill) and not fused else 0
            spent.append(dataclasses.replace(edit, flops=edit.flops + read) if read else edit)
        yield tuple(spent), sum(entry.tokens for entry in pieces if entry.id in computed)


def shares(prices: Mapping[str, list[StepPrice]], ways: Sequence[str], unit: Unit) -> dict[str, float]:
    """Returns at which share of the steps each way is the cheapest; of equal ways the first counts."""
    each = np.array([[getattr(price, unit) for price in prices[way]] for way in ways])
    best = each.argmin(axis=0)
    return {way: float((best == place).mean()) for place, way in enumerate(ways)}


def means(prices: Mapping[str, list[StepPrice]], unit: Unit) -> dict[str, float]:
    """Returns each way's mean over the steps."""
    return {way: float(np.mean([getattr(price, unit) for price in steps])) for way, steps in prices.items()}
