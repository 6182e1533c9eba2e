"""Scores of context tokens by a question's attention: which tokens InfoFlow KV recomputes (section 4.2).

The paper and the code that its authors released differ. The paper's equation 7 is attention mass; it names no reduction
over heads. The code (github.com/tx467/InfoFlow-KV) takes norms: of the mean over heads for its language models, over
heads and queries for its vision-language models. (Its other choice, entropies, is left out.)
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..backbone import KV, LayerAttention
from ..core import KVLayout

Reading = Literal["mass", "norm", "head_norm"]
"""How attention weights A [N heads, T question tokens, S keys] of a layer become one score per key.

"mass": Σ_q mean_h A (equation 7, the mean over heads ours). "norm": sqrt(Σ_q (mean_h A)²), the code's for language
models. "head_norm": sqrt(Σ_{h,q} A²), the code's for vision-language models.
"""
READINGS: tuple[str, ...] = get_args(Reading)


def attention_scores(
    seen: LayerAttention, reading: Reading, context: int, axis: str | None = None
) -> Float[Array, "B context"]:
    """Scores the first `context` keys of one layer by the attention that they get.

    The softmax runs over all that the question sees: the context and the question's own earlier tokens. Over a mesh its
    mass is summed over devices. (The released code leaves each device its own softmax, so that its scores of two
    devices do not compare; here selection is that of one device.)

    Args:
      seen: a question over its context; over a mesh, over the keys of this device.
      axis: the mesh axis that keys lie over, inside `jax.shard_map`; None: all keys are here.
    """
    scores = seen.scores()
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = top if axis is None else jax.lax.pmax(top, axis)
    weights = jnp.exp(scores - top)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    mass = mass if axis is None else jax.lax.psum(mass, axis)
    weights = weights[..., :context] / mass

    if reading == "mass":
        return weights.mean(1).sum(1)
    if reading == "norm":
        weights = weights.mean(1, keepdims=True)
    return jnp.sqrt(jnp.square(weights).sum((1, 2)))


def scaled_queries(layer: LayerAttention) -> Float[Array, "B T N H"]:
    """Returns queries in the engine frame times the scale of scores."""
    return layer.query * layer.scale


def attended_keys(layout: KVLayout, cache: KV, layer: int) -> Float[Array, "B S K H"]:
    """Returns the keys that queries meet at a layer; for MLA the latent and the rotary key of one head."""
    if layout.kind == "mla":
        return jnp.concatenate([cache["ckv"][layer], cache["kpe"][layer]], axis=-1)
    return cache["k"][layer]
