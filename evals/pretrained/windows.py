"""One passage after many antecedents: order and drift; and antecedents that leave.

A document's three pieces precede a passage: in other orders, one dropped and one doubled, one to three replaced by
pieces of another document. Each antecedent is a row of a batch; the passage is the same in all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvpatch_jax as kvp

from .passages import Passages, cut, joined, placed, scores
from .plan import SuitePlan
from .texts import Document

KV = Mapping[str, Array]
Record = dict[str, Any]
ORDERS = ("012", "120", "201", "210")
DRIFTS = ("dropped and doubled", "replaced 1", "replaced 2", "replaced 3")
RANK = 16


def vary_antecedents(backbone: Any, plan: SuitePlan, document: Document, other: Document) -> Iterator[Record]:
    """Measures reorder and drift of one document's passage: a record per antecedent and arm."""
    size, chunk = plan.piece, plan.chunk
    old = [document.ids[place * size : (place + 1) * size] for place in range(3)]
    new = [other.ids[place * size : (place + 1) * size] for place in range(3)]
    passage = document.ids[3 * size : 3 * size + chunk]
    behind = document.ids[3 * size + chunk : 3 * size + chunk + plan.scored]

    orders = np.stack([np.concatenate([old[int(place)] for place in order]) for order in ORDERS])
    drifts = [[old[0], old[0], old[2]], [new[0], old[1], old[2]], [new[0], new[1], old[2]], new]
    drifted = np.stack([np.concatenate(pieces) for pieces in drifts])

    ordered = of_antecedents(backbone, orders, passage, behind)
    for arm, logits in _reordered(ordered):
        yield from _records("reorder", ORDERS, arm, ordered.scored(logits))
    names = backbone.layout.names
    whole = sum(_difference(ordered.conditioned[name], 0, jnp.asarray(ordered.chunk.kv[name])) for name in names)
    for place, order in enumerate(ORDERS[1:], 1):
        moved = sum(_difference(ordered.conditioned[name], place) for name in names)
        yield {"probe": "reorder", "case": order, "arm": "order", "relative_order_effect": (moved / whole) ** 0.5}

    drifting = of_antecedents(backbone, drifted, passage, behind)
    stored = {name: jnp.repeat(value[:, :1], len(DRIFTS), axis=1) for name, value in ordered.conditioned.items()}
    arms = {
        "re-prefill": drifting.logits,
        "blind": drifting.read(drifting.serve()),
        f"stored.rank={RANK}": drifting.read(drifting.serve(drifting.patch(rank_of(drifting), stored))),
        f"oracle.rank={RANK}": drifting.read(drifting.serve(drifting.patch(rank_of(drifting)))),
    }
    for arm, logits in arms.items():
        yield from _records("drift", DRIFTS, arm, drifting.scored(logits))


def of_antecedents(
    backbone: Any, fronts: Int[np.ndarray, "B A"], passage: Int[np.ndarray, " T"], behind: Int[np.ndarray, " n"]
) -> Passages:
    """Prefills one passage after several antecedents, a row each."""
    rows = len(fronts)
    passages, after = (np.repeat(ids[None], rows, axis=0) for ids in (passage, behind))
    front = backbone.prefill(placed(backbone.embed(fronts), 0)).kv
    alone = backbone.prefill(placed(backbone.embed(passages), 0)).kv
    return Passages(backbone, front, alone, passages, after)


def rank_of(passages: Passages) -> int:
    """Returns the rank of these probes, or the most that there is."""
    return min(RANK, passages.length, *(channel.features for channel in passages.backbone.layout.channels))


def _reordered(of: Passages) -> Iterator[tuple[str, Array]]:
    """Yields arms of other orders: the first order's patch, one of the other three's mean, the order's own."""
    yield "re-prefill", of.logits
    yield "blind", of.read(of.serve())
    first = {name: jnp.repeat(value[:, :1], of.rows, axis=1) for name, value in of.conditioned.items()}
    # The mean of the others' conditioned KV has the mean of their deficits.
    others = {name: (value.sum(1, keepdims=True) - value) / (of.rows - 1) for name, value in of.conditioned.items()}
    for arm, kv in {"transfer": first, "orbit": others, "oracle": of.conditioned}.items():
        yield f"{arm}.rank={RANK}", of.read(of.serve(of.patch(rank_of(of), kv)))


def _difference(value: Array, row: int, other: Array | None = None) -> float:
    """Computes the energy of row `row` less row 0 of KV [L,B,T,K,H], or of row 0 less that of `other`."""
    apart = value[:, row] - value[:, 0] if other is None else value[:, 0] - other[:, 0]
    return float(jnp.square(apart).sum())


def _records(probe: str, cases: Sequence[str], arm: str, found: Sequence[dict[str, float]]) -> Iterator[Record]:
    for case, numbers in zip(cases, found, strict=True):
        if probe == "reorder" and case == ORDERS[0]:
            continue  # the order that the transferred patch was formed in
        yield {"probe": probe, "case": case, "arm": arm, **numbers}


def slide(backbone: Any, plan: SuitePlan, documents: Sequence[Document]) -> Iterator[Record]:
    """Lets the first of three pieces leave, with no pinned lead: passages are kept as they are, or with a patch.

    Scored against a re-prefill of what is left. A record per document and arm.
    """
    size, chunk, rows = plan.piece, plan.chunk, len(documents)
    ids = np.stack([document.ids[: 3 * size + chunk + plan.scored] for document in documents])
    text = backbone.embed(ids)
    before = backbone.prefill(placed(text.take(0, 3 * size + chunk), 0)).kv
    kept_front, kept = cut(before, size, 2 * size), cut(before, 3 * size, chunk)

    left = backbone.prefill(placed(text.take(size, 3 * size), 0)).kv
    alone = backbone.prefill(placed(text.take(3 * size, 3 * size + chunk), 0)).kv
    of = Passages(backbone, left, alone, ids[:, 3 * size : 3 * size + chunk], ids[:, 3 * size + chunk :])
    front = of.rotate(kept_front, 0)
    contexts = {
        "blind": of.serve(),
        "keep": joined(front, of.rotate(kept, of.start)),
        "keep, passage alone": of.cache(of.rotate(kept, of.start)),
        f"removal.rank={RANK}": of.cache(_without_removed(of, kept)),
        f"oracle.rank={RANK}": of.serve(of.patch(rank_of(of))),
    }
    arms = {"re-prefill": of.logits, **{arm: of.read(cache) for arm, cache in contexts.items()}}

    for arm, logits in arms.items():
        found = scores(of.logits, logits, of.ids)
        for row in range(rows):
            yield {"probe": "slide", "document": documents[row].name, "arm": arm, **found[row]}


def _without_removed(of: Passages, kept: KV) -> KV:
    """Serves the passages kept with a removal patch of what left, formed from the reference."""
    patch = kvp.removal_patch(of.chunk, of.conditioned, dict(kept), rank_of(of), ["left"], ["gone", "left"])
    return kvp.apply_patch(
        kvp.Placed(of.chunk, patch, of.start, ["left"], base=dict(kept), base_antecedent=["gone", "left"])
    )
