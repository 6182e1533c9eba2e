"""MPIC's insights 1 to 3 as probes: sparse attention, sinks at the beginning of images, keys that differ there.

Source: MPIC (Zhao et al. 2025), section 2.3 (Figure 4), section 4.2 (Figure 8), Appendix B.2 (Figure 12). Theirs is one
image of 1176 tokens; ours are smaller, so thresholds and numbers of tokens are used as they are and by their share.
Axis letters: B contexts, T tokens of an image, S keys, L layers, N query heads.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import LayerAttention
from kvpatch_jax.core import EngineKV
from kvpatch_jax.repair import behind_substitute

from .contexts import ImagePrompts

THEIR_TOKENS, THEIR_SCORE, THEIR_TOP, THEIR_FIRST = 1176, 1e-3, 50, 500
"""Tokens of the paper's image; the score that "affects the output"; tokens of Figure 8; of "approximately 80 %"."""
FIRST_TENTH = 0.1
HostKV = Mapping[str, np.ndarray]
"""{channel: [L,B,T,K,H]}."""


class AttentionInsights(NamedTuple):
    """What the first output token's attention to one image looks like, [B,L] each, from 0 to 1.

    Scores are the mean over heads, normalised over the image's tokens.

    Attributes:
      above: share of tokens whose score is above 1e-3.
      above_scaled: share above the same multiple of the mean score, 1.18.
      first: scores of the first 500 / 1176 of the tokens together.
      tenth: scores of the first tenth of the tokens together.
      rank: share of all keys of the prompt that the image's first token exceeds, the mean over heads.
    """

    above: Float[np.ndarray, "B L"]
    above_scaled: Float[np.ndarray, "B L"]
    first: Float[np.ndarray, "B L"]
    tenth: Float[np.ndarray, "B L"]
    rank: Float[np.ndarray, "B L"]


def last_weights(attention: LayerAttention) -> Float[Array, "B N S"]:
    """Reduces a layer's attention to the weights of the last token."""
    return attention.weights()[:, :, -1]


def first_output_attention(prompts: ImagePrompts, number: int) -> Float[np.ndarray, "L B N S"]:
    """Measures the attention weights of the first output token behind one question, over images and question."""
    backbone, reader = prompts.backbone, prompts.reader
    ids = prompts.question(number)
    start = np.asarray(reader.behind).reshape(len(ids), -1)[:, 0]
    tokens = prompts.at(ids, start)
    out = backbone.prefill(tokens, EngineKV(dict(prompts.reference)))
    own = kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)
    cache = {
        name: jnp.concatenate([jnp.asarray(value), own[name]], axis=2) for name, value in prompts.reference.items()
    }
    output = prompts.at(np.asarray(out.logits.argmax(-1)), start + ids.shape[1])
    layers = range(backbone.layout.layers)
    return np.asarray(backbone.attention(output, EngineKV(cache), layers=layers, reduce=last_weights))


def attention_insights(weights: Float[np.ndarray, "L B N S"], image: slice) -> AttentionInsights:
    """Describes the attention to one image.

    Args:
      weights: of the first output token, over the whole prompt.
    """
    own = weights[..., image].mean(axis=2)
    own = np.swapaxes(own / own.sum(axis=-1, keepdims=True), 0, 1)
    count = own.shape[-1]
    leading = lambda share: own[..., : max(1, round(share * count))].sum(axis=-1)  # noqa: E731
    exceeded = (weights[..., image.start, None] > weights).mean(axis=-1)
    return AttentionInsights(
        above=(own > THEIR_SCORE).mean(axis=-1),
        above_scaled=(own > THEIR_SCORE * THEIR_TOKENS / count).mean(axis=-1),
        first=leading(THEIR_FIRST / THEIR_TOKENS),
        tenth=leading(FIRST_TENTH),
        rank=exceeded.mean(axis=2).T,
    )


def key_rank_layers(before: HostKV, behind: HostKV, keys: str, share: float) -> Float[np.ndarray, "B T"]:
    """Counts, for each token, the share of layers where it is among those whose keys differ most (Figure 8).

    Args:
      before, behind: phase-free KV of an image before a text and behind it, {channel: [L,B,T,K,H]}.
      keys: the channel compared.
      share: of the tokens, the most different ones.
    """
    difference = np.asarray(behind[keys], np.float64) - np.asarray(before[keys], np.float64)
    distance = np.sqrt(np.square(difference).sum(axis=(-2, -1)))
    count = max(1, round(share * distance.shape[-1]))
    order = np.argsort(-distance, axis=-1, kind="stable")[..., :count]
    among = np.zeros(distance.shape, bool)
    np.put_along_axis(among, order, True, axis=-1)
    return among.mean(axis=0)


def key_distances(prompts: ImagePrompts, place: int, number: int) -> tuple[HostKV, HostKV]:
    """Prefills one image before a question and behind it: its phase-free KV both times."""
    alone = prompts.alone(place)
    before = prompts.backbone.prefill(alone).kv
    behind = behind_substitute(prompts.backbone, prompts.at(prompts.question(number), 0), alone)
    return jax.tree.map(np.asarray, dict(before)), jax.tree.map(np.asarray, dict(behind))


def insight_records(prompts: ImagePrompts) -> list[dict[str, Any]]:
    """Measures all three insights of a batch: one record per context and image (the first one and the page)."""
    number = int(np.flatnonzero(prompts.reader.asked("").kind[0] == prompts.reader.questions.kind[0])[0])
    weights = first_output_attention(prompts, number)
    keys = prompts.backbone.layout.names[0]
    records = []
    for name, place in (("first image", 0), ("last image", len(prompts.parts) - 1)):
        found = attention_insights(weights, slice(*prompts.parts[place]))
        before, behind = key_distances(prompts, place, number)
        top = key_rank_layers(before, behind, keys, FIRST_TENTH)
        few = key_rank_layers(before, behind, keys, THEIR_TOP / THEIR_TOKENS)
        size = top.shape[1]
        leading = max(1, round(FIRST_TENTH * size))
        for row, cluster in enumerate(prompts.clusters):
            record: dict[str, Any] = {"image": name, "tokens": size, "cluster": int(cluster)}
            record |= {metric: np.round(value[row], 5).tolist() for metric, value in found._asdict().items()}
            # Of a tenth that are far, a tenth of all would be at the beginning by chance.
            record["far at the beginning"] = float(top[row, :leading].sum() / top[row].sum())
            record["layers of the first token"] = float(few[row, 0])
            record["layers of the others"] = float(few[row, 1:].mean())
            records.append(record)
    return records
