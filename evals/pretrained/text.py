"""The main comparison: passages of text after their antecedents, reused by every arm."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from kvpatch_jax import deficit

from .arms import COSTS, PassageArms
from .passages import KV, Passages, placed
from .plan import SuitePlan
from .texts import Document

Record = dict[str, Any]
GREEDY_ARMS = (
    "blind",
    "patch.rank=8",
    "patch.rank=16",
    "patch.rank=32",
    "first_k.budget=0.15",
    "cacheblend.budget=0.15",
    "kvshare.budget=0.15",
    "vlcache.budget=0.15",
    "query_aware.budget=0.15",
    "patch.rank=4",
    "patch.rank=64",
    "oracle_delta.budget=0.15",
)


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
    about = {"document": document.name, "domain": document.domain, "length": length, "passage": 0}
    for _, record in all_records(of, False, 0, by_layer):
        yield {**about, "antecedent": "near", **record}


def all_records(
    of: Passages, wide: bool, greedy: int, by_layer: Sequence[float] | None = None
) -> Iterator[tuple[int, Record]]:
    """Yields records with their row: re-prefill, each arm with its costs, the deficit, greedy agreement."""
    arms = PassageArms(of, by_layer)
    continuation = None
    if greedy:
        reference = of.cache(of.rotate(of.conditioned, of.start))
        continuation = continue_greedily(of, reference, greedy)
        yield from agreement(of, "re-prefill", reference, continuation)

    yield from enumerate({"arm": "re-prefill", **numbers} for numbers in of.scored(of.logits))
    for arm in (*arms.core(), *(arms.more() if wide else ())):
        logits = of.read(arm.cache) if arm.logits is None else arm.logits
        costs = {name: getattr(arm, name) for name in COSTS}
        yield from enumerate({"arm": arm.name, **numbers, **costs} for numbers in of.scored(logits))
        if continuation is not None and arm.name in GREEDY_ARMS:
            yield from agreement(of, arm.name, arm.cache, continuation)

    yield from enumerate(_deficit_records(of, spectra=wide))


def continue_greedily(of: Passages, cache: KV, steps: int) -> np.ndarray:
    """Decodes greedily after the first of the tokens that follow, [B, steps]."""
    first = of.after.take(0, 1)
    return np.asarray(of.backbone.generate(first, steps, context=cache, stop=()))


def agreement(of: Passages, arm: str, cache: KV, continuation: np.ndarray) -> Iterator[tuple[int, Record]]:
    """Measures how far an arm writes the same tokens: up to the first that it would not choose."""
    steps = continuation.shape[1]
    # One forward over the continuation is enough: up to the first difference an arm would have written the same.
    tokens = of.backbone.embed(np.concatenate([of.ids[:, :1], continuation[:, :-1]], axis=1))
    best = np.asarray(of.read(cache, placed(tokens, of.start + of.length))).argmax(-1)
    same = np.cumprod(best == continuation, axis=1).sum(1)
    for row in range(of.rows):
        yield row, {"arm": arm, "greedy_tokens": float(same[row]) / steps, "greedy_all": float(same[row] == steps)}


def _deficit_records(of: Passages, spectra: bool) -> Sequence[Record]:
    """Describes each passage's deficit by layer: ‖Δ‖ / ‖KV‖; with spectra also e90, energy of ranks, token spread."""
    reference = {name: jnp.asarray(value) for name, value in of.chunk.kv.items()}
    delta = {name: of.conditioned[name] - reference[name] for name in reference}
    profiles: list[dict[str, Any]] = [{} for _ in range(of.rows)]
    for metric, by_channel in _describe(delta, reference, spectra).items():
        for name, values in by_channel.items():
            for profile, layers in zip(profiles, np.asarray(values), strict=True):
                profile.setdefault(metric, {})[name] = [round(float(value), 4) for value in layers]
    return [{"profile": profile} for profile in profiles]


@functools.partial(jax.jit, static_argnames="spectra")
def _describe(delta: KV, reference: KV, spectra: bool) -> dict[str, dict[str, Num[Array, "B L"]]]:
    metrics = {"relative_norm": jax.vmap(deficit.relative_norm, in_axes=1)(delta, reference)}
    if spectra:
        curves = jax.vmap(deficit.energy_curve, in_axes=1)(delta)
        metrics["e90"] = {name: (curve < 0.9).sum(-1) + 1 for name, curve in curves.items()}
        metrics["energy_16"] = {name: curve[..., min(16, curve.shape[-1]) - 1] for name, curve in curves.items()}
        metrics["token_share_90"] = jax.vmap(deficit.token_spread, in_axes=1)(delta)
    return metrics
