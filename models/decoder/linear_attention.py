"""Linear attention of a decoder layer: the gated delta rule behind a causal convolution (Qwen3-Next, Qwen3.5).

Such a layer keeps no row per token. What it reads of the tokens in front is a state and the last inputs of its
convolution; what it leaves behind is the transition of its own tokens (`kvpatch_jax.core.transitions`).

Source: transformers' Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet.

Axis letters: B batch, T tokens, D model width, C inputs of the convolution, R inputs that it reads of the tokens in
front, N key heads, K value heads, H width of a key, V width of a value.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from .config import LinearConfig
from .delta_rule import delta_rule
from .layers import Linear, RMSNorm, normal

NORM_EPSILON = 1e-6
"""Of the norm of queries and keys, beside the sum of their squares."""


class LinearAttention(nnx.Module):
    """Projections, convolution, rule and gated norm of one layer (or a stack of layers)."""

    def __init__(
        self,
        config: LinearConfig,
        width: int,
        *,
        epsilon: float,
        rngs: nnx.Rngs,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
    ):
        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "lead": lead, "dtype": dtype}
        heads, values = config.value_heads, config.widths["value"]
        if config.fused:
            self.inputs = Linear(width, sum(config.widths.values()) + values, **linear)
            self.rates = Linear(width, 2 * heads, **linear)
        else:
            self.query, self.key = (Linear(width, config.widths[part], **linear) for part in ("query", "key"))
            self.value, self.gate = (Linear(width, values, **linear) for _ in range(2))
            self.strength, self.decay = (Linear(width, heads, **linear) for _ in range(2))
        self.query_taps, self.key_taps, self.value_taps = (
            nnx.Param(normal(rngs, (*lead, own, config.convolution), config.convolution**-0.5, dtype))
            for own in config.widths.values()
        )
        self.decay_rate = nnx.Param(jnp.zeros((*lead, heads), jnp.float32))
        self.decay_bias = nnx.Param(jnp.ones((*lead, heads), jnp.float32))
        self.norm = RMSNorm(config.value_width, epsilon=epsilon, lead=lead, dtype=dtype)
        self.output = Linear(values, width, **linear)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T D"],
        before: Mapping[str, Array] | None = None,
        filled: Bool[Array, "B T"] | None = None,
        composed: bool = False,
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Mixes tokens with what is in front of them.

        Args:
          before: the transition of the tokens in front, [B,R,K,W] by part; its map is read where `composed`.
          filled: which tokens there are; the others are padding, wherever they stand. None: all.
          composed: whether the transition that is returned is that of the tokens in front and these; else these alone.

        Returns:
          What the layer adds to the residual, and a transition, {part: [B,R,K,W]}, map and state in float32.
        """
        config, (B, T, _) = self.config, x.shape
        inputs, gate, strength, decay = self._project(x)
        tail = None if before is None else before["tail"][:, :, 0]
        mixed = self._convolve(inputs, tail, filled)
        # Of these tokens alone: zeros in front of fewer than the convolution reads.
        last = self._last(inputs, tail if composed else None, filled)

        def heads(part: Array, count: int) -> Array:
            return part.reshape(B, T, count, -1)

        edges = (config.widths["query"], config.widths["query"] + config.widths["key"])
        query, key, value = jnp.split(mixed, edges, axis=-1)
        query, key = (_normed(heads(part, config.key_heads)) for part in (query, key))
        # Neighbouring value heads share a key head.
        group = config.value_heads // config.key_heads
        query, key = (jnp.repeat(part, group, axis=2) if group > 1 else part for part in (query, key))
        query, value = query * config.key_width**-0.5, heads(value, config.value_heads)

        strength = jax.nn.sigmoid(strength.astype(jnp.float32))
        rate = -jnp.exp(self.decay_rate[...].astype(jnp.float32))
        decay = rate * jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32))
        state = None if before is None else before["state"].astype(jnp.float32)
        if composed:
            # A map follows the rule of the state, with values of zeros: both are columns of one state.
            assert state is not None
            assert before is not None
            state = jnp.concatenate([state, before["map"].astype(jnp.float32)], axis=-1)
            value = jnp.pad(value, [(0, 0)] * 3 + [(0, config.key_width)])
        ran = delta_rule(query, key, value, decay, strength, state, counted=filled, with_map=not composed)
        if composed:
            after, map_ = jnp.split(ran.after, [config.value_width], axis=-1)
        else:
            after, map_ = ran.state, ran.map
        assert map_ is not None

        output = self.norm(ran.output[..., : config.value_width].astype(x.dtype))
        output = output.astype(jnp.float32) * jax.nn.silu(heads(gate, config.value_heads).astype(jnp.float32))
        transition = {"map": map_, "state": after, "tail": last[:, :, None]}
        return self.output(output.astype(x.dtype).reshape(B, T, -1)), transition

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array]:
        """Returns what the convolution reads [B,T,C], the gate of the output, and the two rates [B,T,K]."""
        if not self.config.fused:
            inputs = jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)
            return inputs, self.gate(x), self.strength(x), self.decay(x)

        # Key head by key head: its query, its key, the values of its value heads, and their gates.
        config, lead = self.config, x.shape[:2]
        values = config.widths["value"] // config.key_heads
        edges = [config.key_width, 2 * config.key_width, 2 * config.key_width + values]
        parts = jnp.split(self.inputs(x).reshape(*lead, config.key_heads, -1), edges, axis=-1)
        query, key, value, gate = (part.reshape(*lead, -1) for part in parts)
        strength, decay = jnp.split(self.rates(x).reshape(*lead, config.key_heads, -1), 2, axis=-1)
        return (
            jnp.concatenate([query, key, value], axis=-1),
            gate,
            strength.reshape(*lead, -1),
            decay.reshape(*lead, -1),
        )

    def _convolve(
        self, inputs: Float[Array, "B T C"], tail: Float[Array, "B R C"] | None, filled: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T C"]:
        """Returns the convolution of tokens behind a tail, in float32."""
        taps = jnp.concatenate([self.query_taps[...], self.key_taps[...], self.value_taps[...]]).astype(jnp.float32)
        tokens, rows = inputs.shape[1], self._rows(inputs, tail, filled)
        wide = rows.astype(jnp.float32)
        mixed = sum(wide[:, tap : tap + tokens] * taps[:, tap] for tap in range(taps.shape[1]))
        mixed = jax.nn.silu(jnp.asarray(mixed))
        if filled is not None:
            # Back to where the tokens stand; what padding gets means nothing.
            places = jnp.maximum(jnp.cumsum(filled, axis=1) - 1, 0)
            mixed = jnp.take_along_axis(mixed, places[:, :, None], axis=1)
        return mixed

    def _rows(self, inputs: Array, tail: Array | None, filled: Array | None) -> Float[Array, "B RT C"]:
        """Returns what the convolution reads: a tail (zeros without one), and the tokens that count, one by one."""
        if filled is not None:
            order = jnp.argsort(~filled, axis=1, stable=True)
            inputs = jnp.take_along_axis(inputs, order[:, :, None], axis=1)
        shape = (len(inputs), self.config.convolution - 1, inputs.shape[-1])
        tail = jnp.zeros(shape, inputs.dtype) if tail is None else tail.astype(inputs.dtype)
        return jnp.concatenate([tail, inputs], axis=1)

    def _last(self, inputs: Array, tail: Array | None, filled: Array | None) -> Float[Array, "B R C"]:
        """Returns the last inputs behind the tokens that count."""
        rows, many = self._rows(inputs, tail, filled), self.config.convolution - 1
        if filled is None:
            return rows[:, rows.shape[1] - many :]
        places = jnp.sum(filled, axis=1)[:, None] + jnp.arange(many)
        return jnp.take_along_axis(rows, places[:, :, None], axis=1)


def _normed(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Divides vectors by their length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)
