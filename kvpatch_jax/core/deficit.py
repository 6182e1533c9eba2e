"""Statistics of a deficit per channel and layer: depth profile, effective rank, spread over tokens and heads.

Kamera §4 finds deficits deep, low-rank in features and diffuse over tokens. Functions take Δ as {channel:
[L, T, K, H]} (float32, phase-free) and a `length` from which on tokens are padding, and return {channel: array over
layers}. The parts of a transition have their own rows in place of tokens, and no padding.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .layout import PARTS
from .ops import flatten_heads, token_mask

Delta = Mapping[str, Float[Array, "L T _ _"]]
Length = Int[Array, ""] | int | None


def _masked(delta: Delta, length: Length) -> dict[str, Array]:
    """Returns Δ as float32 with zeros on padding."""
    result = {}
    for name, value in delta.items():
        value = jnp.asarray(value).astype(jnp.float32)
        own = None if name in PARTS else length
        result[name] = value if own is None else jnp.where(token_mask(value, own, -3), value, 0.0)
    return result


def _share(part: Array, total: Array) -> Array:
    """Returns part / total, and 0 where the total is 0. The inner `where` keeps NaN out of derivatives."""
    return jnp.where(total > 0, part / jnp.where(total > 0, total, 1.0), 0.0)


def relative_norm(delta: Delta, reference: Delta, length: Length = None) -> dict[str, Float[Array, " L"]]:
    """Computes the depth profile ‖Δ‖ / ‖reference‖ by layer (Frobenius); 0 where the reference is 0."""
    part, whole = _masked(delta, length), _masked(reference, length)
    profile = {}
    for name, value in part.items():
        norms = [jnp.sqrt(jnp.square(own).sum((1, 2, 3))) for own in (value, whole[name])]
        profile[name] = _share(*norms)
    return profile


def energy_curve(delta: Delta, length: Length = None) -> dict[str, Float[Array, "L _"]]:
    """Computes the share of ‖Δ‖² in the best m directions, m = 1 … min(T, F), heads joined; zeros where Δ is 0."""
    curves = {}
    for name, value in _masked(delta, length).items():
        # Squared singular values are the energies of the best directions, the largest first.
        energy = jnp.square(jnp.linalg.svd(flatten_heads(value), compute_uv=False))
        curves[name] = _share(jnp.cumsum(energy, -1), energy.sum(-1, keepdims=True))
    return curves


def e90(delta: Delta, length: Length = None, share: float = 0.9) -> dict[str, Int[Array, " L"]]:
    """Counts the fewest directions that hold `share` of ‖Δ‖²; 0 where Δ is 0."""
    return {
        name: jnp.where(curve[:, -1] > 0, (curve < share).sum(-1) + 1, 0)
        for name, curve in energy_curve(delta, length).items()
    }


def token_spread(delta: Delta, length: Length = None, share: float = 0.9) -> dict[str, Float[Array, " L"]]:
    """Computes the smallest fraction of tokens that holds `share` of ‖Δ‖²; 0 where Δ is 0. A transition has none."""
    result = {}
    for name, value in _masked({name: own for name, own in delta.items() if name not in PARTS}, length).items():
        energy = jnp.sort(jnp.square(value).sum((2, 3)), axis=-1, descending=True)
        total = energy.sum(-1, keepdims=True)
        count = (_share(jnp.cumsum(energy, -1), total) < share).sum(-1) + 1
        # Of the tokens that are no padding.
        tokens = value.shape[1] if length is None else length
        result[name] = jnp.where(total[:, 0] > 0, count / jnp.asarray(tokens, jnp.float32), 0.0)
    return result
