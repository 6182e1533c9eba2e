"""Mixture-of-experts MLP: two routers, shared experts, and every expert computed for every token.

Computing all experts and weighting the unchosen ones with zero is exact, has static shapes and shards over experts; it
costs experts / chosen times the arithmetic of a grouped kernel.

Axis letters: B batch, T tokens, D model width, E experts, I width inside an expert, Q groups of experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .config import ExpertConfig
from .layers import ACTIVATIONS, GatedMLP, Linear, normal


def route(config: ExpertConfig, logits: Float[Array, "*lead E"], correction: Array | None) -> Float[Array, "*lead E"]:
    """Router logits [..., E] to each expert's weight, float32: zero for all but the chosen ones.

    `correction` [E] is added for choosing, not for weighting (sigmoid router).
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1) if config.router == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if config.groups > 1:
        choice = _best_groups(config, choice)
    _, index = jax.lax.top_k(choice, config.chosen)
    chosen = jnp.sum(jax.nn.one_hot(index, config.experts, dtype=jnp.float32), axis=-2)
    weights = scores * chosen
    if config.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * config.scaling


def _best_groups(config: ExpertConfig, choice: Array) -> Array:
    """-inf for the experts outside the best groups."""
    grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
    best, _ = jax.lax.top_k(grouped, 1 if config.router == "softmax" else 2)
    _, index = jax.lax.top_k(jnp.sum(best, axis=-1), config.chosen_groups)
    kept = jnp.any(jax.nn.one_hot(index, config.groups, dtype=bool), axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


class Experts(nnx.Module):
    """Router, stacked experts and (where there are any) shared experts of one layer, or of a stack of layers."""

    def __init__(
        self,
        config: ExpertConfig,
        width: int,
        *,
        rngs: nnx.Rngs,
        activation: str = "silu",
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
    ):
        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "lead": lead, "dtype": dtype}
        into, out = (
            (*lead, config.experts, width, config.intermediate),
            (*lead, config.experts, config.intermediate, width),
        )
        self.router = Linear(width, config.experts, **linear)
        sigmoid = config.router == "sigmoid"
        self.correction = nnx.Param(jnp.zeros((*lead, config.experts), jnp.float32)) if sigmoid else None
        self.gate = nnx.Param(normal(rngs, into, width**-0.5, dtype))
        self.up = nnx.Param(normal(rngs, into, width**-0.5, dtype))
        self.down = nnx.Param(normal(rngs, out, config.intermediate**-0.5, dtype))
        self.shared = GatedMLP(width, config.shared, activation=activation, **linear) if config.shared else None
        self.activation, self.config = activation, config

    def weights(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Each expert's weight for each token, float32; products in float32 whatever the model's dtype."""
        kernel = self.router.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel, preferred_element_type=jnp.float32)
        return route(self.config, logits, None if self.correction is None else self.correction[...])

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The weighted sum over experts, and the shared experts."""
        product = lambda string, *parts: jnp.einsum(string, *parts, preferred_element_type=jnp.float32)
        gate, up = (product("BTD,EDI->BTEI", x, w[...].astype(x.dtype)) for w in (self.gate, self.up))
        inner = ACTIVATIONS[self.activation](gate.astype(x.dtype)) * up.astype(x.dtype)
        inner = (inner * self.weights(x)[..., None]).astype(x.dtype)
        mixed = product("BTEI,EID->BTD", inner, self.down[...].astype(x.dtype)).astype(x.dtype)
        return mixed if self.shared is None else mixed + self.shared(x)
