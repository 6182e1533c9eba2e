"""Every way of reuse that the sheets task compares: patches of the page, and whatever could beat them."""

import fnmatch
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.repair import REPAIRS, fraction_to_count

from ..probes.by_question import question_arms
from ..probes.other_ways import Workshop, other_ways, residual_layers
from ..results.costs import ArmCost
from ..rules import RULES
from .by_question import by_question
from .reuse import Reuse

BUDGETS = (0.15, 0.50)
SHOWN = RULES.arms.shown_rank
ELSEWHERE = (
    "re-prefill",
    "blind",
    "patch.rank=*",
    "patch.every_chunk.*",
    "*.budget=0.15",
    "query_attention.*",
    "quantised.*",
    f"svd.rank={SHOWN}",
)
"""Patterns of the arms that are tried with contexts of every size; the others with four chunks alone."""
EVERY_CHUNK = tuple(f"patch.every_chunk.rank={rank}" for rank in RULES.arms.ranks if rank > SHOWN)
"""The same with larger ranks: a part of its own, with contexts of every size, behind those of `names_of`."""


class Answered(NamedTuple):
    """One arm over one batch: what it costs, and log-probabilities [B,N,V] behind every token."""

    name: str
    cost: ArmCost
    said: np.ndarray


def names_of(layout: kvp.KVLayout, everywhere: bool) -> list[str]:
    """Names the arms in the order of tables; `everywhere`: those alone that are tried with contexts of every size."""
    ranks = RULES.arms.ranks
    names = ["re-prefill", "blind", *(f"patch.rank={rank}" for rank in ranks)]
    names += [*(f"patch.{channel}_only.rank={SHOWN}" for channel in layout.names), f"patch.every_chunk.rank={SHOWN}"]
    names += [f"{method}.budget={budget:g}" for method in REPAIRS for budget in BUDGETS]
    names += question_arms()
    # Told which tokens show the same, which a page of this task never does.
    names += [name for name in other_ways(layout) if name != "class_mean"]
    wanted = ELSEWHERE if everywhere else ("*",)
    spared = () if everywhere else RULES.arms.only_among_all
    match = lambda name, patterns: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    return [name for name in names if match(name, wanted) and not match(name, spared)]


def arms_of(reuse: Reuse, names: list[str]) -> Iterator[Answered]:
    """Yields the arms of these names, re-prefill first."""
    yield from (Answered(name, *made) for name in names if (made := _patched(reuse, name)) is not None)
    splice = reuse.splice()
    for name in names:
        method, _, budget = name.partition(".budget=")
        if method in REPAIRS:
            count = fraction_to_count(float(budget), reuse.page.tokens)
            repaired = REPAIRS[method](reuse.backbone, splice, count)
            # Which tokens come first is known ahead; other choices may fall on any.
            inputs = count if method == "first_k" else None
            cost = reuse.costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots), inputs)
            yield Answered(name, cost, reuse.read(dict(repaired.cache)))
    yield from (Answered(*asked) for asked in by_question(reuse, [name for name in names if name in question_arms()]))
    shop = Workshop(reuse.as_page(), residual_layers(reuse.backbone.layout))
    for name, make in other_ways(reuse.backbone.layout).items():
        if name in names:
            made = make(shop)
            yield Answered(name, made.cost, reuse.read(dict(made.cache)))


def _patched(reuse: Reuse, name: str) -> tuple[ArmCost, np.ndarray] | None:
    """Answers from re-prefill, from canonicals, or with patches; None for other arms."""
    costs, last = reuse.costs, reuse.form.chunks - 1
    if name == "re-prefill":
        return costs.of_reprefill(), reuse.read(reuse.engine)
    if name == "blind":
        return costs.of_blind(), reuse.read(reuse.cache())
    way, _, rank = name.rpartition(".rank=")
    if way == "patch":
        patch = reuse.patch(last, int(rank))
        return costs.of_patch(patch), reuse.read(reuse.cache({last: patch}))
    if way == "patch.every_chunk":
        # The sheets absorb from one another too: their patches as well.
        every = {place: reuse.patch(place, int(rank)) for place in range(1, last + 1)}
        tokens = [where.stop - where.start for where in reuse.form.slices]
        sheets = [(patch, tokens[place]) for place, patch in every.items() if place != last]
        return costs.of_patch(every[last], sheets), reuse.read(reuse.cache(every))
    channel = way.removeprefix("patch.").removesuffix("_only")
    if way.startswith("patch.") and channel in reuse.backbone.layout.names:
        patch = reuse.patch(last, int(rank))
        part = kvp.Patch({channel: patch.factors[channel]}, patch.metadata)
        return costs.of_patch(part), reuse.read(reuse.cache({last: part}))
    return None
