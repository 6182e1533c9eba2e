"""The main comparison: passages of text behind what stands in front of them, in every way of reuse."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from kvpatch_jax import deficit

from .arms import COSTS, Arms
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


def compared(
    backbone: Any,
    plan: SuitePlan,
    document: Document,
    other: Document,
    wide: bool,
    by_layer: Sequence[float] | None = None,
) -> Iterator[Record]:
    """A document's passages: every second one behind the text before it, the others behind another document's.

    Args:
      wide: all arms, spectra of the deficit, and greedy continuations.
      by_layer: as `Arms` takes it.
    """
    of = passages_of(backbone, plan, document, other)
    names = [{"passage": place, "antecedent": "far" if place % 2 == 0 else "near"} for place in range(of.rows)]
    for row, record in everything(of, wide, plan.greedy if wide else 0, by_layer):
        yield {"document": document.name, "domain": document.domain, "length": of.length, **names[row], **record}


def passages_of(backbone: Any, plan: SuitePlan, document: Document, other: Document) -> Passages:
    """A document's passages, as `compared` has them."""
    size, count = plan.chunk, plan.passages
    ids = document.ids[: count * size].reshape(count, size)
    behind = np.stack([document.ids[(place + 1) * size : (place + 1) * size + plan.scored] for place in range(count)])
    alone = backbone.prefill(placed(backbone.embed(np.concatenate([ids, other.ids[None, :size]])), 0)).kv
    in_front = [count if place % 2 == 0 else place - 1 for place in range(count)]
    front = {name: value[:, np.asarray(in_front)] for name, value in alone.items()}
    canonical = {name: value[:, :count] for name, value in alone.items()}
    return Passages(backbone, front, canonical, ids, behind)


def long_passage(
    backbone: Any, plan: SuitePlan, document: Document, length: int, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """One long passage behind the text in front of it."""
    size = plan.chunk
    ids = document.ids[None, : size + length + plan.scored]
    text = backbone.embed(ids)
    front = backbone.prefill(placed(text.take(0, size), 0)).kv
    alone = backbone.prefill(placed(text.take(size, size + length), 0)).kv
    of = Passages(backbone, front, alone, ids[:, size : size + length], ids[:, size + length :])
    about = {"document": document.name, "domain": document.domain, "length": length, "passage": 0}
    for _, record in everything(of, False, 0, by_layer):
        yield {**about, "antecedent": "near", **record}


def everything(
    of: Passages, wide: bool, greedy: int, by_layer: Sequence[float] | None = None
) -> Iterator[tuple[int, Record]]:
    """Records with the row they belong to: re-prefill, each arm with its costs, the deficit, greedy agreement."""
    arms = Arms(of, by_layer)
    said = None
    if greedy:
        reference = of.cache(of.turned(of.conditioned, of.start))
        said = continued(of, reference, greedy)
        yield from agreement(of, "re-prefill", reference, said)
    yield from enumerate({"arm": "re-prefill", **numbers} for numbers in of.scored(of.logits))
    for arm in (*arms.core(), *(arms.more() if wide else ())):
        logits = of.read(arm.cache) if arm.logits is None else arm.logits
        costs = {name: getattr(arm, name) for name in COSTS}
        yield from enumerate({"arm": arm.name, **numbers, **costs} for numbers in of.scored(logits))
        if said is not None and arm.name in GREEDY_ARMS:
            yield from agreement(of, arm.name, arm.cache, said)
    yield from enumerate(_profile(of, spectra=wide))


def continued(of: Passages, cache: KV, steps: int) -> np.ndarray:
    """What the model writes greedily behind the first of the tokens that follow, [B, steps]."""
    first = of.after.take(0, 1)
    return np.asarray(of.backbone.generate(first, steps, context=cache, stop=()))


def agreement(of: Passages, arm: str, cache: KV, said: np.ndarray) -> Iterator[tuple[int, Record]]:
    """How far an arm writes the same tokens: up to the first that it would not have chosen. One forward tells."""
    steps = said.shape[1]
    given = of.backbone.embed(np.concatenate([of.ids[:, :1], said[:, :-1]], axis=1))
    best = np.asarray(of.read(cache, placed(given, of.start + of.length))).argmax(-1)
    same = np.cumprod(best == said, axis=1).sum(1)
    for row in range(of.rows):
        yield row, {"arm": arm, "greedy_tokens": float(same[row]) / steps, "greedy_all": float(same[row] == steps)}


def _profile(of: Passages, spectra: bool) -> Sequence[Record]:
    """The deficit of each passage by layer: ‖Δ‖ / ‖KV‖; with spectra also e90, energy of ranks, spread over tokens."""
    reference = {name: jnp.asarray(value) for name, value in of.chunk.kv.items()}
    delta = {name: of.conditioned[name] - reference[name] for name in reference}
    found = _shape(delta, reference, spectra)
    whole = {metric: {name: np.asarray(value) for name, value in own.items()} for metric, own in found.items()}
    return [
        {
            "profile": {
                metric: {name: _short(value[row]) for name, value in own.items()} for metric, own in whole.items()
            }
        }
        for row in range(of.rows)
    ]


def _short(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in values]


def _shape(delta: KV, reference: KV, spectra: bool) -> dict[str, dict[str, Num[Array, "B L"]]]:
    return (_with_spectra if spectra else _norms)(delta, reference)


@jax.jit
def _norms(delta: KV, reference: KV):
    return {"relative_norm": jax.vmap(deficit.relative_norm, in_axes=1)(delta, reference)}


@jax.jit
def _with_spectra(delta: KV, reference: KV):
    found = {"relative_norm": jax.vmap(deficit.relative_norm, in_axes=1)(delta, reference)}
    curves = jax.vmap(deficit.energy_curve, in_axes=1)(delta)
    found["e90"] = {name: (curve < 0.9).sum(-1) + 1 for name, curve in curves.items()}
    found["energy_16"] = {name: curve[..., min(16, curve.shape[-1]) - 1] for name, curve in curves.items()}
    found["token_share_90"] = jax.vmap(deficit.token_spread, in_axes=1)(delta)
    return found
