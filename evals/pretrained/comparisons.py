"""Passages of text, reused by every arm: after their antecedents, after other antecedents, and after some have left.

*text*: a document's passages after the text before them or after another document's. *reorder* and *drift*: three
pieces precede a passage, in other orders, one dropped and one doubled, one to three replaced by pieces of another
document; each antecedent is a row of a batch, the passage is the same in all. *slide*: the first of three pieces
leaves. Every function yields records; `rows` makes rows of them.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

import kvpatch_jax as kvp
from kvpatch_jax import deficit

from ..arms.reused_page import KV, cut, joined
from ..texts.corpus import Document
from .arms import COSTS, PassageArms
from .passages import Passages, placed
from .plan import SuitePlan

Record = dict[str, Any]
GREEDY_ARMS = (
    "blind",
    *(f"patch.rank={rank}" for rank in (4, 8, 16, 32, 64)),
    *(f"{name}.budget=0.15" for name in ("first_k", "cacheblend", "kvshare", "vlcache", "query_aware", "oracle_delta")),
)
ORDERS = ("012", "120", "201", "210")
DRIFTS = ("dropped and doubled", "replaced 1", "replaced 2", "replaced 3")
RANK = 16


# ------------------------------------------------------------------------------------------------------------- text


def compare(
    backbone: Any,
    plan: SuitePlan,
    document: Document,
    other: Document,
    wide: bool,
    by_layer: Sequence[float] | None = None,
) -> Iterator[Record]:
    """Compares arms on a document's passages: every second one after the text before it, the others after another's.

    Args:
      wide: all arms, spectra of the deficit, and greedy continuations.
      by_layer: as `PassageArms` takes it.
    """
    of = passages_of(backbone, plan, document, other)
    for row, record in all_records(of, wide, plan.greedy if wide else 0, by_layer):
        yield {**labels_of(document, of.length, row), **record}


def labels_of(document: Document, length: int, place: int) -> Record:
    """Labels a record of one of a document's passages."""
    labels = {"document": document.name, "domain": document.domain, "length": length}
    return labels | {"passage": place, "antecedent": "far" if place % 2 == 0 else "near"}


def antecedents_of(count: int) -> np.ndarray:
    """Returns which text precedes each of `count` passages: number `count`, another document's, or the one before."""
    return np.array([count if place % 2 == 0 else place - 1 for place in range(count)])


def cut_passages(plan: SuitePlan, document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a document's passages [B, T], and the tokens that are read after each [B, n]."""
    size, count = plan.chunk, plan.passages
    ids = document.ids[: count * size].reshape(count, size)
    after = [document.ids[(place + 1) * size : (place + 1) * size + plan.scored] for place in range(count)]
    return ids, np.stack(after)


def passages_of(backbone: Any, plan: SuitePlan, document: Document, other: Document) -> Passages:
    """Prefills a document's passages, as `compare` has them."""
    ids, after = cut_passages(plan, document)
    # The passages are each other's antecedents: one forward gives all canonicals.
    alone = backbone.prefill(placed(backbone.embed(np.concatenate([ids, other.ids[None, : plan.chunk]])), 0)).kv
    front = {name: value[:, antecedents_of(len(ids))] for name, value in alone.items()}
    canonical = {name: value[:, : len(ids)] for name, value in alone.items()}
    return Passages(backbone, front, canonical, ids, after)


def compare_long(
    backbone: Any, plan: SuitePlan, document: Document, length: int, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Compares arms on one long passage after the text in front of it."""
    size = plan.chunk
    ids = document.ids[None, : size + length + plan.scored]
    text = backbone.embed(ids)
    front = backbone.prefill(placed(text.take(0, size), 0)).kv
    alone = backbone.prefill(placed(text.take(size, size + length), 0)).kv
    of = Passages(backbone, front, alone, ids[:, size : size + length], ids[:, size + length :])
    labels = {**labels_of(document, length, 0), "antecedent": "near"}
    for _, record in all_records(of, False, 0, by_layer):
        yield {**labels, **record}


def all_records(
    of: Passages, wide: bool, greedy: int, by_layer: Sequence[float] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yields records with their row: re-prefill, each arm with its costs, the deficit, greedy agreement."""
    arms, continuation = PassageArms(of, by_layer), None
    if greedy:
        continuation = continue_greedily(of, greedy)
        yield from agreement(of, "re-prefill", of.page.reference, continuation)
    yield from enumerate({"arm": "re-prefill", **numbers} for numbers in of.scored(of.logits))

    for arm in (*arms.core(), *(arms.more() if wide else ())):
        logits = of.read(arm.cache)
        costs = {name: getattr(arm, name) for name in COSTS}
        yield from enumerate({"arm": arm.name, **numbers, **costs} for numbers in of.scored(logits))
        if continuation is not None and arm.name in GREEDY_ARMS:
            yield from agreement(of, arm.name, arm.cache, continuation)

    profiles: list[dict[str, Any]] = [{} for _ in range(of.rows)]
    for metric, by_channel in _describe(of.page.delta, dict(of.chunk.kv), spectra=wide).items():
        for name, values in by_channel.items():
            for profile, layers in zip(profiles, np.asarray(values), strict=True):
                profile.setdefault(metric, {})[name] = [round(float(value), 4) for value in layers]
    yield from enumerate({"profile": profile} for profile in profiles)


@functools.partial(jax.jit, static_argnames="spectra")
def _describe(delta: KV, reference: KV, spectra: bool) -> dict[str, dict[str, Num[Array, "B L"]]]:
    """Describes each passage's deficit by layer: ‖Δ‖ / ‖KV‖; with spectra also e90, energy of ranks, token spread."""
    metrics = {"relative_norm": jax.vmap(deficit.relative_norm, in_axes=1)(delta, reference)}
    if spectra:
        curves = jax.vmap(deficit.energy_curve, in_axes=1)(delta)
        metrics["e90"] = {name: (curve < 0.9).sum(-1) + 1 for name, curve in curves.items()}
        metrics["energy_16"] = {name: curve[..., min(16, curve.shape[-1]) - 1] for name, curve in curves.items()}
        metrics["token_share_90"] = jax.vmap(deficit.token_spread, in_axes=1)(delta)
    return metrics


def continue_greedily(of: Passages, steps: int) -> np.ndarray:
    """Decodes greedily after a re-prefill and the first of the tokens that follow, [B, steps]."""
    return np.asarray(of.backbone.generate(of.after.take(0, 1), steps, context=of.page.reference, stop=()))


def agreement(of: Passages, arm: str, cache: KV, continuation: np.ndarray) -> Iterator[tuple[int, Record]]:
    """Measures how far an arm writes the same tokens: up to the first that it would not choose."""
    steps = continuation.shape[1]
    # One forward over the continuation is enough: up to the first difference an arm would have written the same.
    tokens = of.backbone.embed(np.concatenate([of.ids[:, :1], continuation[:, :-1]], axis=1))
    best = np.asarray(of.read(cache, placed(tokens, of.start + of.length))).argmax(-1)
    same = np.cumprod(best == continuation, axis=1).sum(1)
    for row in range(of.rows):
        yield row, {"arm": arm, "greedy_tokens": float(same[row]) / steps, "greedy_all": float(same[row] == steps)}


# --------------------------------------------------------------------------------------------- changed antecedents


def vary_antecedents(backbone: Any, plan: SuitePlan, document: Document, other: Document) -> Iterator[Record]:
    """Measures reorder and drift of one document's passage: a record per antecedent and arm."""
    size, chunk = plan.piece, plan.chunk
    old = [document.ids[place * size : (place + 1) * size] for place in range(3)]
    new = [other.ids[place * size : (place + 1) * size] for place in range(3)]
    passage = document.ids[3 * size : 3 * size + chunk]
    behind = document.ids[3 * size + chunk : 3 * size + chunk + plan.scored]
    orders = np.stack(old)[np.array([list(map(int, order)) for order in ORDERS])].reshape(len(ORDERS), -1)
    drifts = [[old[0], old[0], old[2]], [new[0], old[1], old[2]], [new[0], new[1], old[2]], new]
    drifted = np.array(drifts).reshape(len(DRIFTS), -1)

    ordered = _of_antecedents(backbone, orders, passage, behind)
    rank = min(RANK, ordered.most)
    first = {name: value[:, :1] for name, value in ordered.conditioned.items()}
    transferred = {name: jnp.repeat(value, len(ORDERS), axis=1) for name, value in first.items()}
    # The mean of the others' conditioned KV has the mean of their deficits.
    others = {
        name: (value.sum(1, keepdims=True) - value) / (ordered.rows - 1) for name, value in ordered.conditioned.items()
    }
    arms = {"re-prefill": ordered.logits, "blind": ordered.read(ordered.page.cache())}
    for arm, kv in {"transfer": transferred, "orbit": others, "oracle": ordered.conditioned}.items():
        arms[f"{arm}.rank={RANK}"] = ordered.read(ordered.page.cache(ordered.patch(rank, kv)))
    # The first order is the one that the transferred patch was formed in.
    for arm, logits in arms.items():
        for case, numbers in list(zip(ORDERS, ordered.scored(logits), strict=True))[1:]:
            yield {"probe": "reorder", "case": case, "arm": arm, **numbers}

    whole = sum(_energy(value[:, 0] - ordered.chunk.kv[name][:, 0]) for name, value in ordered.conditioned.items())
    for place, order in enumerate(ORDERS[1:], 1):
        moved = sum(_energy(value[:, place] - value[:, 0]) for value in ordered.conditioned.values())
        yield {"probe": "reorder", "case": order, "arm": "order", "relative_order_effect": (moved / whole) ** 0.5}

    drifting = _of_antecedents(backbone, drifted, passage, behind)
    stored = {name: jnp.repeat(value, len(DRIFTS), axis=1) for name, value in first.items()}
    patches = {"blind": None, f"stored.rank={RANK}": drifting.patch(rank, stored)}
    patches[f"oracle.rank={RANK}"] = drifting.patch(rank)
    arms = {"re-prefill": drifting.logits}
    arms |= {arm: drifting.read(drifting.page.cache(patch)) for arm, patch in patches.items()}
    for arm, logits in arms.items():
        for case, numbers in zip(DRIFTS, drifting.scored(logits), strict=True):
            yield {"probe": "drift", "case": case, "arm": arm, **numbers}


def _of_antecedents(
    backbone: Any, fronts: Int[np.ndarray, "B A"], passage: Int[np.ndarray, " T"], behind: Int[np.ndarray, " n"]
) -> Passages:
    """Prefills one passage after several antecedents, a row each."""
    passages, after = (np.repeat(ids[None], len(fronts), axis=0) for ids in (passage, behind))
    front = backbone.prefill(placed(backbone.embed(fronts), 0)).kv
    alone = backbone.prefill(placed(backbone.embed(passages), 0)).kv
    return Passages(backbone, front, alone, passages, after)


def _energy(value: Array) -> float:
    """Sums the squares of KV."""
    return float(jnp.square(value).sum())


def slide(backbone: Any, plan: SuitePlan, documents: Sequence[Document]) -> Iterator[Record]:
    """Lets the first of three pieces leave, with no pinned lead: passages are kept as they are, or with a patch.

    Scored against a re-prefill of what is left. A record per document and arm.
    """
    size, chunk = plan.piece, plan.chunk
    ids = np.stack([document.ids[: 3 * size + chunk + plan.scored] for document in documents])
    text = backbone.embed(ids)
    before = backbone.prefill(placed(text.take(0, 3 * size + chunk), 0)).kv
    kept_front, kept = cut(before, slice(size, 3 * size)), cut(before, slice(3 * size, 3 * size + chunk))

    left = backbone.prefill(placed(text.take(size, 3 * size), 0)).kv
    alone = backbone.prefill(placed(text.take(3 * size, 3 * size + chunk), 0)).kv
    of = Passages(backbone, left, alone, ids[:, 3 * size : 3 * size + chunk], ids[:, 3 * size + chunk :])
    rank, page = min(RANK, of.most), of.page

    # The removal patch is formed of the reference, so it says what a patch can do at best.
    removal = kvp.removal_patch(of.chunk, of.conditioned, kept, rank, ["left"], ["gone", "left"])
    base: dict[str, Any] = {"base": kept, "base_antecedent": ["gone", "left"]}
    patched = dict(kvp.apply_patch(kvp.Placed(of.chunk, removal, of.start, ["left"], **base)))
    exact_front = cut(page.reference, slice(of.start))
    caches = {
        "blind": page.cache(),
        "keep": joined([of.rotate(kept_front, 0), of.rotate(kept, of.start)]),
        "keep, passage alone": page.served(kept),
        f"removal.rank={RANK}": joined([exact_front, patched]),
        f"oracle.rank={RANK}": page.cache(of.patch(rank)),
    }
    arms = {"re-prefill": of.logits, **{arm: of.read(cache) for arm, cache in caches.items()}}
    for arm, logits in arms.items():
        for document, numbers in zip(documents, of.scored(logits), strict=True):
            yield {"probe": "slide", "document": document.name, "arm": arm, **numbers}
