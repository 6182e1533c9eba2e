"""Mixture-of-experts MLP: two routers, and the module of the experts that tokens choose and those that all share.

How the chosen experts are computed is `grouped`'s. Over a mesh each device computes the pairs of its own experts, and
the devices' results are summed.

Axis letters: B batch, T tokens, D model width, E experts, X chosen experts per token, I width inside an expert.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from .config import ExpertConfig
from .grouped import ExpertWeights, choose_implementation, expert_load, mix_experts
from .layers import ACTIVATIONS, GatedMLP, Linear, RMSNorm, normal
from .mesh_axes import auto_tensor_axes, device_count


class ExpertParam(nnx.Param):
    """Weights of all experts of a stack of layers: used from the whole stack, never cut out of it layer by layer."""


def choose_experts(
    config: ExpertConfig, logits: Float[Array, "*lead E"], correction: Float[Array, " E"] | None
) -> tuple[Int[Array, "*lead X"], Float[Array, "*lead X"]]:
    """Chooses each token's experts from router logits, and what their outputs are multiplied by (float32).

    `correction` is added for choosing, not for weighting (sigmoid router).
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1) if config.router == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if config.groups > 1:
        # Experts outside the best groups cannot be chosen. A group is as good as its best expert (DeepSeek-V2), or as
        # the sum of its best two (V3).
        grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
        best, _ = jax.lax.top_k(grouped, 1 if config.router == "softmax" else 2)
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), config.chosen_groups)
        kept = jnp.any(jax.nn.one_hot(groups, config.groups, dtype=bool), axis=-2)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)

    # The correction bias decides which experts are chosen, and does not enter their weights.
    _, index = jax.lax.top_k(choice, config.chosen)
    weights = jnp.take_along_axis(scores, index, axis=-1)
    if config.renormalise:
        # As DeepSeek's own code has it; sigmoid scores may all round to zero.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return index, weights * config.scaling


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
        epsilon: float = 1e-6,
    ):
        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "lead": lead, "dtype": dtype}
        into, out = (
            (*lead, config.experts, width, config.intermediate),
            (*lead, config.experts, config.intermediate, width),
        )
        self.router = Linear(width, config.experts, **linear)
        corrected = config.router == "sigmoid"
        self.correction = nnx.Param(jnp.zeros((*lead, config.experts), jnp.float32)) if corrected else None
        self.gate = ExpertParam(normal(rngs, into, width**-0.5, dtype))
        self.up = ExpertParam(normal(rngs, into, width**-0.5, dtype))
        self.down = ExpertParam(normal(rngs, out, config.intermediate**-0.5, dtype))
        self.shared = GatedMLP(width, config.shared, activation=activation, **linear) if config.shared else None
        self.shared_gate = Linear(width, 1, **linear) if config.shared_gate else None
        norm = {"epsilon": epsilon, "lead": lead, "dtype": dtype}
        self.router_norm = RMSNorm(width, **norm, weight="wide") if config.beside else None
        self.factors = nnx.Param(jnp.ones((*lead, config.experts), dtype)) if config.beside else None
        self.activation, self.config = activation, config

    def choose(self, x: Float[Array, "*lead D"]) -> tuple[Int[Array, "*lead X"], Float[Array, "*lead X"]]:
        """Returns each token's experts and their weights; products in float32 whatever the model's dtype."""
        kernel, x = self.router.kernel[...].astype(jnp.float32), x.astype(jnp.float32)
        if self.router_norm is not None:
            x = self.router_norm(x) * x.shape[-1] ** -0.5
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        correction = None if self.correction is None else self.correction[...]
        index, weights = choose_experts(self.config, logits, correction)
        return index, weights if self.factors is None else weights * self.factors[...].astype(jnp.float32)[index]

    def load(self, x: Float[Array, "B T D"], counted: Bool[Array, "B T"]) -> Int[Array, " E"]:
        """Returns how many of the counted tokens chose each expert, int32."""
        index = jnp.where(counted[..., None], self.choose(x)[0], self.config.experts)
        return expert_load(index.reshape(-1, self.config.chosen), self.config.experts)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer: Int[Array, ""] | None = None,
        implementation: str | None = None,
        chosen_by: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the weighted sum over the chosen experts, and the shared experts.

        Args:
          layer: which layer of the stack, where gate, up and down are a whole stack's; None where they are one layer's.
          implementation: how they are computed, of `grouped.IMPLEMENTATIONS`; None for what is best here.
          chosen_by: what the router reads, where that is not `x`.

        Raises:
          KernelUnavailableError: an unknown implementation.
        """

        def flat(part):
            return part.reshape(-1, part.shape[-1])

        index, weights = map(flat, self.choose(x if chosen_by is None else chosen_by))
        stack = ExpertWeights(self.gate[...], self.up[...], self.down[...])
        mixed = self._mix(flat(x), index, weights, stack, layer, implementation).astype(x.dtype).reshape(x.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        return mixed + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)

    def _mix(
        self,
        x: Float[Array, "T D"],
        index: Int[Array, "T X"],
        weights: Float[Array, "T X"],
        stack: ExpertWeights,
        layer: Int[Array, ""] | None,
        implementation: str | None,
    ) -> Float[Array, "T D"]:
        """Returns the chosen experts' sum, over the devices of the mesh that is set, each computing its own experts."""
        experts, activation = self.config.experts, ACTIVATIONS[self.activation]
        if implementation is None:
            implementation = choose_implementation(index.size, experts, self.config.chosen, x, stack)
        mix = functools.partial(mix_experts, activation=activation, implementation=implementation)
        # Devices of the mesh that is set, where the compiler finds its shardings. It spreads "dense" by itself.
        axes = auto_tensor_axes()
        devices = device_count(jax.sharding.get_abstract_mesh(), axes)
        if devices == 1 or experts % devices or implementation == "dense":
            return mix(x, index, weights, stack, layer=layer)

        # Numbers of other devices' experts fall outside 0 … E-1 and are left out; most blocks then hold nothing.
        def own(x: Array, index: Array, weights: Array, stack: ExpertWeights, layer: Array | None) -> Array:
            first = jax.lax.axis_index(axes) * (experts // devices)
            x = jax.lax.pcast(x, axes, to="varying")
            return jax.lax.psum(mix(x, index - first, weights, stack, layer=layer, skip=True), axes)

        over: Any = P(*(None,) * (stack.gate.ndim - 3), axes)
        places = (P(), P(), P(), ExpertWeights(over, over, over), P())
        spread_out = jax.shard_map(own, in_specs=places, out_specs=P(), axis_names=set(axes))
        return spread_out(x, index, weights, stack, layer)
