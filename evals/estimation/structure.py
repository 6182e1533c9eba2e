"""Probes of a deficit's structure: landmark keys, injections into one layer, tokens by cheap scores, cells of heads.

Axis letters: B contexts, T tokens of the chunk, S antecedent keys, L layers, N query heads, C
cells of a layer: its KV heads.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import LayerAttention

from ..arms.query_aware import mean_over_heads
from .negatives import key_similarity
from .served_chunk import Deficit, MeasuredChunk, ServedChunk, energy, flat

# ------------------------------------------------------------------------------------------------ landmark keys


@functools.lru_cache(maxsize=8)
def link_reducer(behind: int) -> Callable[[LayerAttention], dict[str, Array]]:
    """Makes what reduces a layer's attention to that on the first `behind` keys. One function a size: it compiles."""

    def reduce(attention: LayerAttention) -> dict[str, Array]:
        link = attention.weights()[..., :behind]
        spectrum = jnp.square(jnp.linalg.svd(link, compute_uv=False))
        received = link.sum(axis=2)
        return {
            "by_key": received.sum(axis=1),
            "by_head": jax.vmap(_fewest, in_axes=0)(received.reshape(-1, behind)).reshape(received.shape[:2]),
            "by_token": link.sum(axis=-1).mean(axis=1),
            "rank": jax.vmap(_fewest)(spectrum.reshape(-1, spectrum.shape[-1])).reshape(spectrum.shape[:2]),
        }

    return reduce


def _fewest(values: Float[Array, " n"], share: float = 0.9) -> Int[Array, ""]:
    """Counts the fewest of non-negative values that hold `share` of their sum."""
    ordered = jnp.sort(values, descending=True)
    return (jnp.cumsum(ordered) < share * ordered.sum()).sum() + 1


def fewest_holding(values: Float[np.ndarray, "*rows n"], share: float = 0.9) -> Int[np.ndarray, "*rows"]:
    """Counts the fewest of non-negative values that hold `share` of their sum; 0 where the sum is 0."""
    ordered = -np.sort(-np.asarray(values, np.float64), axis=-1)
    whole = ordered.sum(axis=-1, keepdims=True)
    return np.where(whole[..., 0] > 0, (np.cumsum(ordered, axis=-1) < share * whole).sum(axis=-1) + 1, 0)


class AntecedentLink:
    """What a chunk's tokens attend to in their antecedents, in context.

    Kamera's Figure 3c counts "about 25 landmark keys" that carry 90 %, and does not say of what they are the keys: here
    the attention weights on an antecedent key are summed over the chunk's tokens and over heads, layer by layer, and
    the fewest keys that hold 90 % of all that goes to antecedents are counted.

    Attributes:
      keys: that count, [L,B]. keys_by_head: the same of each head alone, the mean over heads, [L,B].
      rank: squared singular values that hold 90 % of a head's [T,S] block of weights, the mean over heads, [L,B].
      mass: of each token on the antecedents, the mean over heads, [L,B,T].
    """

    def __init__(self, served: ServedChunk):
        layers = range(served.backbone.layout.layers)
        found = served.backbone.attention(
            served.tokens, dict(served.front), layers=layers, reduce=link_reducer(served.behind)
        )
        self.keys = fewest_holding(np.asarray(found["by_key"]))
        self.keys_by_head = np.asarray(found["by_head"], np.float64).mean(axis=-1)
        self.rank = np.asarray(found["rank"], np.float64).mean(axis=-1)
        self.mass = np.asarray(found["by_token"], np.float64)


# ---------------------------------------------------------------------------------------------------- injection


def injected_residual(measured: MeasuredChunk, layer: int) -> Float[np.ndarray, " B"]:
    """Computes the share of the last layer's deficit that the conditioned residual at one layer brings.

    The residual of the chunk in context enters `layer`, and the layers from there on run without the antecedents. Below
    nothing changes. 1 − ‖Δ − Δ̂‖² / ‖Δ‖² of the last layer's KV, all channels: 0 at layer 0, where both residuals are
    the embeddings, 1 at the last layer. Kamera §4 gives 27 % shallow and 97 % deep, and does not say what is injected.
    """
    served = measured.served
    residual = served.backbone.prefill(served.tokens, dict(served.front), hidden_at=(layer,)).hidden[layer]
    kv = served.backbone.prefill(served.alone._replace(embeddings=residual), start_layer=layer).kv
    return _share_of_last(measured, dict(kv))


def injected_kv(measured: MeasuredChunk, layer: int) -> Float[np.ndarray, " B"]:
    """Computes the share of the last layer's deficit that conditioned KV at one layer alone brings.

    At `layer` the chunk's tokens, with the residuals of the chunk alone, attend to the chunk's conditioned KV in place
    of their own; the layers above run on from there, without the antecedents. `layer` is below the last one.
    """
    served = measured.served
    backbone, alone = served.backbone, served.alone
    where = np.arange(served.length)
    slots = np.broadcast_to(where, (served.rows, served.length)).astype(np.int32)
    cache = dict(kvp.to_engine(backbone.layout, dict(measured.conditioned), np.asarray(alone.positions), 0))

    # Nothing is written, so that the tokens see the cache as it is.
    unwritten = np.zeros((backbone.layout.layers, served.rows, served.length), bool)
    tokens = alone._replace(embeddings=served.residuals[layer])
    run = backbone.recompute(
        tokens, cache, slots, unwritten, start_layer=layer, stop_layer=layer + 1, hidden_at=(layer + 1,)
    )
    kv = backbone.prefill(alone._replace(embeddings=run.hidden[layer + 1]), start_layer=layer + 1).kv
    return _share_of_last(measured, dict(kv))


def _share_of_last(measured: MeasuredChunk, kv: Mapping[str, Any]) -> np.ndarray:
    error = whole = 0.0
    for name, value in kv.items():
        delta = np.asarray(measured.delta[name][-1], np.float64)
        found = np.asarray(value[-1], np.float64) - np.asarray(measured.served.canonical[name][-1], np.float64)
        error = error + np.square(delta - found).sum(axis=(1, 2, 3))
        whole = whole + np.square(delta).sum(axis=(1, 2, 3))
    return 1 - error / np.maximum(whole, 1e-30)


# ----------------------------------------------------------------------------------------------------- selectors


def token_scores(measured: MeasuredChunk, link: AntecedentLink, seed: int) -> dict[str, Float[np.ndarray, "B T"]]:
    """Scores the chunk's tokens by every cheap signal; higher is chosen first.

    The attention to antecedents is given twice: in context, which takes the conditioned forward, and as the residuals
    of the chunk alone would attend, which does not. The KV distance is CacheBlend's, at layer 1.
    """
    served = measured.served
    layout, canonical = served.backbone.layout, served.canonical
    rotating = [channel.name for channel in layout.channels if channel.rotates]
    rows, length = served.rows, served.length
    norm = {name: np.sqrt(np.square(np.asarray(kv, np.float64)).sum(axis=(3, 4))) for name, kv in canonical.items()}
    keys = [value for name, value in norm.items() if name in rotating]
    values = [value for name, value in norm.items() if name not in rotating]
    embeddings = np.asarray(served.tokens.embeddings, np.float64)
    # What layers 0 and 1 are in context depends on nothing above them: the truth stands for a forward of two layers.
    lowest = {name: value[:2] for name, value in measured.delta.items()}
    return {
        "attention to antecedents, in context": link.mass.mean(axis=0),
        "attention to antecedents, of the chunk alone": alone_attention(served),
        "key similarity": key_similarity(served),
        "key norm": np.mean(keys, axis=(0, 1)),
        "value norm": np.mean(values, axis=(0, 1)),
        "embedding norm": np.linalg.norm(embeddings, axis=-1),
        "KV distance at layer 1": energy({name: value[1:] for name, value in lowest.items()}),
        "attention from the question": measured.attended(),
        "first tokens": np.broadcast_to(-np.arange(length, dtype=float), (rows, length)),
        "random": np.random.default_rng([seed, int(measured.clusters[0])]).random((rows, length)),
    }


def alone_attention(served: ServedChunk) -> Float[np.ndarray, "B T"]:
    """Computes the attention on antecedents that the residuals of the chunk alone give, the mean over layers and heads.

    Queries come from the canonical's own forward; keys are the antecedents' and the canonical's at its place.
    """
    rows, length = served.rows, served.length
    slots = np.broadcast_to(served.behind + np.arange(length, dtype=np.int32), (rows, length))
    own = jax.tree.map(jnp.asarray, served.tokens)._replace(positions=served.tokens.positions)
    mass = np.zeros((rows, length))
    for layer in range(served.backbone.layout.layers):
        # The residual of the chunk alone enters every layer, so that none sees what a layer below made of antecedents.
        tokens = own._replace(embeddings=jnp.asarray(served.residuals[layer]))
        weights = served.backbone.attention(
            tokens, served.blind, layers=(layer,), reduce=mean_over_heads, slots=slots, start_layer=layer
        )
        mass += np.asarray(weights[0, ..., : served.behind].sum(axis=-1), np.float64)
    return mass / served.backbone.layout.layers


def recall(scores: Float[np.ndarray, "B T"], truth: Float[np.ndarray, "B T"], share: float) -> Float[np.ndarray, " B"]:
    """Computes which share of the tokens with the largest truth is among as many with the largest scores."""
    count = max(1, round(share * scores.shape[1]))
    chosen, wanted = (np.argsort(-array, axis=1, kind="stable")[:, :count] for array in (scores, truth))
    marked = np.zeros(scores.shape, bool)
    np.put_along_axis(marked, chosen, True, axis=1)
    return np.take_along_axis(marked, wanted, axis=1).mean(axis=1)


# --------------------------------------------------------------------------------------------------------- heads


def cell_energy(delta: Mapping[str, Any]) -> Float[np.ndarray, "B L C"]:
    """Sums ‖Δ‖² by context, layer and KV head; keys and values of a head are one cell.

    Channels of one head each (MLA) are a cell each: C is then the number of channels.
    """
    parts = [np.square(np.asarray(value, np.float64)).sum(axis=(2, 4)) for value in delta.values()]
    single = all(part.shape[-1] == 1 for part in parts) and len(parts) > 1
    cells = np.concatenate(parts, axis=-1) if single else np.sum(parts, axis=0)
    return np.moveaxis(cells, 1, 0)


def best_cells(energies: Float[np.ndarray, "B L C"], share: float) -> Bool[np.ndarray, "B L C"]:
    """Marks the cells with the most energy of each context, a share of all."""
    rows = energies.reshape(len(energies), -1)
    count = max(1, round(share * rows.shape[1]))
    marked = np.zeros(rows.shape, bool)
    np.put_along_axis(marked, np.argsort(-rows, axis=1, kind="stable")[:, :count], True, axis=1)
    return marked.reshape(energies.shape)


def within_cells(delta: Deficit, cells: Bool[np.ndarray, "B L C"]) -> dict[str, np.ndarray]:
    """Keeps the deficit of marked cells, and sets the rest to 0."""
    by_layer = np.moveaxis(cells, 0, 1)
    kept, single = {}, all(value.shape[3] == 1 for value in delta.values()) and len(delta) > 1
    for number, (name, value) in enumerate(delta.items()):
        own = by_layer[:, :, number : number + 1] if single else by_layer
        kept[name] = np.where(own[:, :, None, :, None], value, 0).astype(np.float32)
    return kept


def feature_norm(delta: Mapping[str, Any], reference: Mapping[str, Any]) -> Float[np.ndarray, " B"]:
    """Computes ‖Δ‖ / ‖reference‖ of each layer, all channels, and its mean over layers."""
    part, whole = (np.sqrt(np.square(flat(kv), dtype=np.float64).sum(axis=(2, 3))) for kv in (delta, reference))
    return (part / np.maximum(whole, 1e-30)).mean(axis=0)
