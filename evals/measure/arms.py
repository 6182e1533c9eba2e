"""The arms of a measurement, by name: how a context that was cached piece by piece is served behind other pieces.

All but the patches are `kvpatch_jax.repair`'s, at the budgets that their authors report; patches are formed from the KV
of exactly this context. What an arm costs is counted as everywhere in `evals.results.costs`, summed over the pieces;
the vision tower is in none of it.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import KVLayout
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, KVPrecision, RepairBudget, fraction_to_count, infoflow_layers, quantised

from ..arms.reused_page import cut
from ..results.costs import METRICS, NUMBER_BITS, ArmCost, ChunkCosts
from .contexts import HostKV, MeasuredContext, on_host

REFERENCE, BLIND = "re-prefill", "blind"
SHARE = 0.15
"""Of the context's tokens: the ratio that CacheBlend, InfoFlow KV and VLCache report."""
RANKS = (8, 16, 32)
BITS = 4
FIRST_TOKENS = 32
"""MPIC's k (section 5.2)."""
QUESTION_STEP = 8
"""Questions choose tokens by as many of their last tokens as are a multiple of it, so that few lengths compile."""
_OF_FLOPS = ("serving_flops", "question_flops", "forming_flops")


class ServedContext(NamedTuple):
    """What an arm makes of a context.

    Attributes:
      cache: engine frame, [L,1,S,K,H]; None: re-prefill's, to which the arm is equal.
      costs: of each piece.
    """

    cache: HostKV | None
    costs: Sequence[ArmCost]


Serve = Callable[[MeasuredContext, Tokens], ServedContext]


@dataclasses.dataclass(frozen=True)
class MeasureArm:
    """One arm.

    Attributes:
      name: in flags and tables.
      about: one line of `--arms=help`.
      serve: serves a context to a question.
      asks: whether what is served depends on the question.
      exact: whether answers are re-prefill's, so that only costs tell it apart.
      uniform: whether it needs layers of one kind.
    """

    name: str
    about: str
    serve: Serve
    asks: bool = False
    exact: bool = False
    uniform: bool = False


def all_arms() -> list[MeasureArm]:
    """Lists every arm, the reference and blind reuse first, to which all others are compared."""
    arms = [
        MeasureArm(REFERENCE, "the whole prompt computed anew; nothing is kept", _reprefill, exact=True),
        MeasureArm(BLIND, "every piece as it was cached alone, moved to its place", _blind),
    ]
    for rank in RANKS:
        about = f"and a patch of rank {rank} of this very context, without a forward while serving"
        arms.append(MeasureArm(f"patch.rank={rank}", about, functools.partial(_patched, rank=rank)))

    tokens = RepairBudget(tokens=FIRST_TOKENS)
    for method, budget, about in (
        ("first_k", tokens, f"EPIC, MPIC-{FIRST_TOKENS}: the first {FIRST_TOKENS} tokens of each piece computed again"),
        ("vlcache", RepairBudget(share=SHARE), "VLCache at its static ratio: the first 15 % of each piece"),
        ("cacheblend", None, "CacheBlend: the 15 % of tokens whose KV deviates most at layer 1"),
    ):
        setting = f"tokens={FIRST_TOKENS}" if budget is tokens else f"budget={SHARE:g}"
        serve = functools.partial(_recomputed, method=method, budget=budget)
        arms.append(MeasureArm(f"{method}.{setting}", about, serve, uniform=True))
    for method, about in (
        ("infoflow", "InfoFlow KV: the 15 % of tokens that the question attends to most"),
        ("prophetkv", "ProphetKV: likewise, all layers weighing alike"),
    ):
        serve = functools.partial(_recomputed, method=method, budget=None, asks=True)
        arms.append(MeasureArm(f"{method}.budget={SHARE:g}", about, serve, asks=True, uniform=True))

    about = f"the KV of this very context in {BITS} bits (KIVI), kept in the canonical's place"
    return [
        *arms,
        MeasureArm(f"quantised.bits={BITS}", about, _quantised, uniform=True),
        MeasureArm("encoder_cached", "re-prefill from kept image features: no tower", _encoder_cached, exact=True),
        MeasureArm(
            "prefix_cache", "KV kept per prefix: exact, and a moved piece is computed anew", _prefix_cache, exact=True
        ),
    ]


def chosen_arms(patterns: Sequence[str], layout: KVLayout) -> tuple[list[MeasureArm], list[MeasureArm]]:
    """Returns the arms that match a pattern, with the reference and blind reuse, and those this model cannot be served.

    Raises:
      InputError: a pattern that no arm matches.
    """
    arms, wanted = all_arms(), {REFERENCE, BLIND}
    for pattern in patterns:
        matched = {arm.name for arm in arms if fnmatch.fnmatchcase(arm.name, pattern)}
        if not matched:
            names = ", ".join(arm.name for arm in arms)
            raise InputError(f"--arms: got {pattern!r}, which no arm matches; expected patterns of: {names}")
        wanted |= matched
    kept = [arm for arm in arms if arm.name in wanted]
    return (
        [arm for arm in kept if layout.uniform or not arm.uniform],
        [arm for arm in kept if not layout.uniform and arm.uniform],
    )


# ------------------------------------------------------------------------------------------------ what arms do


def _every(context: MeasuredContext) -> list[ChunkCosts]:
    return [context.costs(number) for number in range(len(context.pieces))]


def _reprefill(context: MeasuredContext, question: Tokens) -> ServedContext:
    return ServedContext(None, [ArmCost(canonical=0.0, serving=own.prefill) for own in _every(context)])


def _encoder_cached(context: MeasuredContext, question: Tokens) -> ServedContext:
    return ServedContext(None, [own.of_reprefill() for own in _every(context)])


def _prefix_cache(context: MeasuredContext, question: Tokens) -> ServedContext:
    costs = []
    for own in _every(context):
        costs.append(ArmCost(stored=NUMBER_BITS * own.numbers, canonical=0.0, serving=own.prefill))
    return ServedContext(None, costs)


def _blind(context: MeasuredContext, question: Tokens) -> ServedContext:
    return ServedContext(context.blind, [own.of_blind() for own in _every(context)])


def _patched(context: MeasuredContext, question: Tokens, rank: int) -> ServedContext:
    """Serves canonicals with patches; a piece that is exact has none.

    Where factors would take more than the deficit itself, all its directions are served and the deficit's bytes count.
    """
    placed, costs = [], []
    for number, (piece, own) in enumerate(zip(context.pieces, _every(context), strict=True)):
        if context.is_exact(number):
            placed.append(context.placed(number))
            costs.append(own.of_blind())
            continue

        whole, ranks, stored = context.largest_patch(number), {}, 0
        for name, have in whole.ranks.items():
            channel = own.layout.channel(name)
            rows = own.layout.layers if channel.layers is None else len(channel.layers)
            features = channel.features
            numbers = min(rank * (piece.length + features), piece.length * features)
            stored += NUMBER_BITS * rows * numbers
            ranks[name] = have if rank * (piece.length + features) >= piece.length * features else min(rank, have or 0)
        patch = kvp.truncate(whole, ranks)
        placed.append(context.placed(number, patch))
        costs.append(dataclasses.replace(own.of_patch(patch), stored=stored))
    return ServedContext(context.cache_of(placed), costs)


def _recomputed(
    context: MeasuredContext, question: Tokens, method: str, budget: RepairBudget | None, asks: bool = False
) -> ServedContext:
    """Computes some of the context's tokens again; without a budget, `SHARE` of all, wherever they are."""
    count = context.tokens - context.first
    budget = budget or RepairBudget(tokens=max(1, fraction_to_count(SHARE, count)))
    splice = context.splice()
    layers = 0
    if asks:
        layout, length = context.backbone.layout, question.embeddings.shape[1]
        splice = splice.replace(question=question.take(max(0, length % QUESTION_STEP if length > 8 else 0), length))
        layers = layout.layers if method == "prophetkv" else infoflow_layers(layout)[-1] + 1

    repaired = METHODS[method](context.backbone, splice, budget)
    cache = cut({name: np.asarray(value) for name, value in repaired.cache.items()}, slice(context.tokens))
    chosen, costs = np.asarray(repaired.chosen), []
    for number, own in enumerate(_every(context)):
        where = context.slots[number]
        marks = chosen[:, :, where.start - context.first : where.stop - context.first]
        slots = np.arange(where.start, where.stop, dtype=np.int32)[None]
        first = int(marks.any(axis=0).sum()) if method in ("first_k", "vlcache") else None
        cost = own.of_tokens(marks, slots, first)
        if asks:
            # The question's own pass that chooses is counted once, with the first piece.
            choosing = own.reading(question.embeddings.shape[1], context.tokens, layers) if number == 0 else 0
            again = cost.serving - own.rotation + choosing
            cost = dataclasses.replace(cost, serving=own.rotation, question=again)
        costs.append(cost)
    return ServedContext(cache, costs)


def _quantised(context: MeasuredContext, question: Tokens) -> ServedContext:
    """Serves each piece's KV in context in few bits."""
    placed, costs = [], []
    for number, (piece, own) in enumerate(zip(context.pieces, _every(context), strict=True)):
        if context.is_exact(number):
            placed.append(context.placed(number))
            costs.append(own.of_blind())
            continue
        repaired = quantised(
            context.backbone, context.piece_splice(number), RepairBudget(share=1.0), bits=f"k{BITS}v{BITS}"
        )
        placed.append(cut({name: np.asarray(value) for name, value in repaired.cache.items()}, slice(piece.length)))
        stored = 8 * KVPrecision(BITS, BITS).nbytes(own.layout, piece.length)
        # Two FLOPs a number: its product with the scale, and the least value added.
        costs.append(own.of_conditioned(stored, 2 * own.numbers))
    return ServedContext(context.cache_of(placed), costs)


def context_shares(context: MeasuredContext, costs: Sequence[ArmCost]) -> dict[str, float]:
    """Computes what an arm costs as shares of all pieces' KV and of re-prefilling them: `results.costs.METRICS`.

    Shares of one piece weigh as its KV has numbers, or as its re-prefill has FLOPs.
    """
    every = _every(context)
    by_piece = [own.shares(cost) for own, cost in zip(every, costs, strict=True)]
    found = {}
    for metric in METRICS:
        of_flops = metric.startswith(_OF_FLOPS)
        weights = np.array([own.prefill if of_flops else own.numbers for own in every], float)
        shares = np.array([shares[metric] for shares in by_piece])
        found[metric] = float((weights * shares).sum() / weights.sum())
    return found


def question_tokens(context: MeasuredContext, ids: np.ndarray) -> Tokens:
    """Embeds token ids behind a context, at their place."""
    tokens, length = context.backbone.embed_padded(np.asarray(ids, np.int32)[None])
    return on_host(tokens).take(0, length).shift(context.span)


def help_text() -> str:
    """Lists every arm with one line about it."""
    width = max(len(arm.name) for arm in all_arms())
    return "\n".join(f"{arm.name.ljust(width)}  {arm.about}" for arm in all_arms())
