"""Arms on texts: chunks that were prefilled alone, repaired in every way, and what is read behind them.

Axis letters: B arms, T tokens of the context, Q of the prompt, A tokens behind it, L layers, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import LayerAttention, Tokens
from kvpatch_jax.repair import (
    Repaired,
    SplicedCache,
    attention_scores,
    fraction_to_count,
    infoflow,
    largest,
    reordered_by_question,
    repair_everywhere,
    rope_similarity,
)
from models import ModelBackbone

from ..pretrained.passages import placed
from ..small_task.scenes import divergence, log_probabilities
from .contexts import INDEPENDENT, TextContext
from .plan import (
    GEOMETRIES,
    METHODS,
    PASSAGES,
    RANDOM,
    REORDER,
    REORDERED_BASELINE,
    SHARE,
    SPLITS,
    InfoFlowPlan,
    arm_name,
    band_name,
    bands,
)
from .splits import Parts, block_mask, local_positions

Record = dict[str, Any]
DIGITS = 5
"""Significant digits in the file of parts."""
NEAR = 32
"""Tokens in front of the prompt: how many of the chosen ones are among them says how far a method looks back."""
READ_AT_ONCE = 7
"""Caches that are read in one forward."""


def splice_of(
    backbone: ModelBackbone, ids: Int[np.ndarray, " T"], parts: Parts, asked: Int[np.ndarray, " Q"]
) -> SplicedCache:
    """Prefills every chunk of a context alone, from its own start, and splices all where they stand; one row."""
    count = len(ids)
    tokens = placed(backbone.embed(np.concatenate([ids, asked])[None]), 0)
    own = tokens.take(0, count)
    alone = own._replace(positions=local_positions(parts)[None])
    kv = backbone.prefill(alone, mask=jnp.asarray(block_mask(parts)[None, None])).kv
    cache = dict(kvp.to_engine(backbone.layout, kv, own.positions, 0))
    slots = jnp.arange(count, dtype=jnp.int32)[None]
    return SplicedCache(own, cache, slots, question=tokens.take(count, count + len(asked)), chunks=parts)


def reference_logits(
    backbone: ModelBackbone, context: TextContext, follow: int, tokens: Tokens | None = None
) -> Float[np.ndarray, "A V"]:
    """Reads what follows the prompt behind a context that was prefilled whole: log-probabilities.

    Args:
      follow: tokens that are read.
      tokens: of the context where it stands in another order.
    """
    behind = backbone.embed(np.concatenate([context.asked, context.behind])[None])
    front = placed(backbone.embed(context.ids[None]), 0) if tokens is None else tokens
    whole = jnp.concatenate([front.embeddings, behind.embeddings], axis=1)
    wanted = _read_at(context, follow) + len(context.ids)
    out = backbone.prefill(placed(front._replace(embeddings=whole), 0), logits=wanted[None])
    return log_probabilities(out.logits)[0]


def read(
    backbone: ModelBackbone, context: TextContext, follow: int, caches: Sequence[Mapping[str, Array]]
) -> Float[np.ndarray, "B A V"]:
    """Reads what follows the prompt behind caches of one row each: log-probabilities of the tokens that follow."""
    tail = np.concatenate([context.asked, context.behind])[None]
    wanted, found = _read_at(context, follow), []
    for first in range(0, len(caches), READ_AT_ONCE):
        group = list(caches[first : first + READ_AT_ONCE])
        # The last group is filled up, so that one program reads all.
        filled = group + [group[-1]] * (READ_AT_ONCE - len(group))
        joined = {name: jnp.concatenate([cache[name] for cache in filled], axis=1) for name in backbone.layout.names}
        tokens = placed(backbone.embed(np.repeat(tail, len(filled), axis=0)), len(context.ids))
        logits = backbone.prefill(tokens, joined, logits=np.repeat(wanted[None], len(filled), axis=0)).logits
        found.append(log_probabilities(logits)[: len(group)])
    return np.concatenate(found)


def _read_at(context: TextContext, follow: int) -> Int[np.ndarray, " A"]:
    """Returns the tokens whose logits name what follows: the prompt's last one and those behind it."""
    first = len(context.asked) - 1
    return np.arange(first, first + follow, dtype=np.int32)


class ArmResult(NamedTuple):
    """A repaired cache of one row, and which of the context's tokens were recomputed in the deepest layer.

    Attributes:
      cache: {channel: [L,1,T,K,H]}.
      positions: of the chosen tokens [n].
    """

    cache: Mapping[str, Array]
    positions: Int[np.ndarray, " n"]


def result_of(splice: SplicedCache, repaired: Repaired) -> ArmResult:
    """Takes from a repair what is read and what is counted."""
    chosen = np.asarray(repaired.chosen)[-1, 0]
    return ArmResult(repaired.cache, np.asarray(splice.tokens.positions)[0][chosen])


def repairs_of(
    backbone: ModelBackbone, plan: InfoFlowPlan, context: TextContext, task: str, number: int = 0
) -> Iterator[tuple[str, SplicedCache, ArmResult]]:
    """Yields every arm with the splice it repaired. Nothing of what follows the prompt is read.

    Args:
      number: of the context, from which random tokens are drawn.
    """
    for split in SPLITS:
        splice = splice_of(backbone, context.ids, context.split(split, plan), context.asked)
        for name, repair in METHODS.items():
            own = functools.partial(repair, seed=number) if name == RANDOM else repair
            repaired = own(backbone, splice, SHARE if name != "blind" else 0.0)
            yield arm_name(split, name), splice, result_of(splice, repaired)
        if split != PASSAGES:
            continue

        for geometry in GEOMETRIES:
            repaired = infoflow(backbone, splice, SHARE, geometry=geometry)
            yield arm_name(split, f"infoflow.{geometry}"), splice, result_of(splice, repaired)
        if task in INDEPENDENT and len(splice.parts) > 1:
            ordered = reordered_by_question(backbone, splice, share=SHARE)
            yield arm_name(split, REORDER), ordered, result_of(ordered, infoflow(backbone, ordered, SHARE))
        for name, result in band_sweep(backbone, splice, plan.band).items():
            yield arm_name(split, name), splice, result


@functools.cache
def mass_of(context: int) -> Callable[[LayerAttention], Float[Array, "B context"]]:
    """Returns the attention mass of a context's keys as a reduction; the same function each time."""
    return functools.partial(attention_scores, reading="mass", context=context)


def band_sweep(backbone: ModelBackbone, splice: SplicedCache, width: int) -> dict[str, ArmResult]:
    """Recomputes what `infoflow` chooses by the attention of each band of layers, all bands in one forward.

    Args:
      splice: of one row. width: layers of a band.
    """
    assert splice.question is not None
    # As `question_scores` with these layers, but for one pass of the question instead of one for each band.
    layers, mass = tuple(range(backbone.layout.layers)), mass_of(splice.slots.shape[1])
    score = np.asarray(backbone.attention(splice.question, splice.cache, layers=layers, reduce=mass))[:, 0]
    depth = bands(len(layers), width)
    by_band = np.stack([score[first : last + 1].sum(axis=0) for first, last in depth])
    index = largest(jnp.asarray(by_band), fraction_to_count(SHARE, splice.cached_count))

    rows = len(depth)
    wide = SplicedCache(
        jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), rows, axis=0), splice.tokens),
        {name: jnp.repeat(value, rows, axis=1) for name, value in splice.cache.items()},
        jnp.repeat(splice.slots, rows, axis=0),
        chunks=splice.chunks,
    )
    cache = repair_everywhere(backbone, wide, index).cache
    positions, results = np.asarray(splice.tokens.positions)[0], {}
    for row, band in enumerate(depth):
        own = {name: value[:, row : row + 1] for name, value in cache.items()}
        results[band_name(band)] = ArmResult(own, positions[np.asarray(index)[row]])
    return results


def records_of(
    backbone: ModelBackbone, plan: InfoFlowPlan, task: str, number: int, context: TextContext
) -> Iterator[Record]:
    """Measures every arm on one context: KL and flips of what follows, right or wrong, and RoPE similarity."""
    arms = list(repairs_of(backbone, plan, context, task, number))
    expected = reference_logits(backbone, context, plan.follow)
    labels = {"task": task, "cluster": number}
    yield {**labels, "arm": "baseline", **compared(context, expected, expected)}

    found = read(backbone, context, plan.follow, [result.cache for _, _, result in arms])
    for (name, splice, result), answers in zip(arms, found, strict=True):
        if name == arm_name(PASSAGES, REORDER):
            own = reference_logits(backbone, context, plan.follow, splice.tokens)
            yield {**labels, "arm": arm_name(PASSAGES, REORDERED_BASELINE), **compared(context, expected, own)}
        record = {**labels, "arm": name, **compared(context, expected, answers), "count": len(result.positions)}
        question = splice.question
        if len(result.positions) and question is not None:
            prompt = np.asarray(question.positions)[0]
            mean, most = rope_similarity(backbone.layout.rope, prompt, result.positions)
            near = float((result.positions >= len(context.ids) - NEAR).mean())
            record |= {"mom": _rounded(mean), "max": _rounded(most), "near": _rounded(near)}
        yield record


def compared(
    context: TextContext, expected: Float[np.ndarray, "A V"], found: Float[np.ndarray, "A V"]
) -> dict[str, float]:
    """Compares log-probabilities of what follows the prompt with a reference's, over the tokens that count.

    kl: mean over tokens, in nats. flips: share of tokens whose best one differs. right: 1 where the answer is named:
    all its tokens are best, or with `choices` the first is likelier than the others.
    """
    expected, found = expected[: context.scored], found[: context.scored]
    if context.choices:
        likely = found[0, list(context.choices)]
        right = float(likely[0] > likely[1:].max())
    else:
        right = float((found.argmax(axis=-1) == context.behind[: context.scored]).all())
    return {
        "kl": _rounded(divergence(expected, found).mean()),
        "flips": _rounded((expected.argmax(axis=-1) != found.argmax(axis=-1)).mean()),
        "right": right,
    }


def _rounded(value: float | np.floating[Any]) -> float:
    return float(f"{float(value):.{DIGITS}g}")
