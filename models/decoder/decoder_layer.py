"""The parameters of one layer of a decoder, or of a stack of layers to scan over; `decoder` runs them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from .attention import GroupedAttention, LatentAttention
from .config import DecoderConfig, LayerKind
from .layers import GatedMLP, Linear, RMSNorm
from .linear_attention import LinearAttention
from .moe import Experts


class DecoderLayer(nnx.Module):
    """One layer, or with `lead=(L,)` a stack of layers to scan over."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        lead: tuple[int, ...] = (),
        dense: bool = True,
        kind: LayerKind | None = None,
    ):
        kind = config.layer_kinds[0] if kind is None else kind
        dtype = jnp.dtype(config.dtype)
        norm: dict[str, Any] = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        norm |= {"weight": config.norm_weight}
        mlp: dict[str, Any] = {"rngs": rngs, "activation": config.activation, "lead": lead, "dtype": dtype}
        self.input_norm = RMSNorm(config.width, **norm)
        attention = GroupedAttention if config.latent is None else LatentAttention
        self.attention: Any
        if kind.linear is None:
            self.attention = attention(config, rngs, lead, dtype, kind)
        else:
            own: dict[str, Any] = {"epsilon": config.norm_epsilon, "rngs": rngs, "lead": lead, "dtype": dtype}
            self.attention = LinearAttention(kind.linear, config.width, **own)
        self.mlp_norm = RMSNorm(config.width, **norm)

        mixture = None if dense else config.experts
        if mixture is None or mixture.beside:
            self.mlp = GatedMLP(config.width, kind.intermediate or config.intermediate, bias=config.mlp_bias, **mlp)
        else:
            self.mlp = Experts(mixture, config.width, **mlp)
        beside = mixture if mixture is not None and mixture.beside else None
        self.experts = Experts(beside, config.width, **mlp, epsilon=config.norm_epsilon) if beside else None
        self.experts_norm = RMSNorm(config.width, **norm) if beside else None
        self.experts_post_norm = RMSNorm(config.width, **norm) if beside else None
        self.mlp_inner_norm = RMSNorm(config.width, **norm) if beside else None

        self.attention_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None
        self.scale = nnx.Param(jnp.ones((*lead, 1), dtype)) if config.layer_scale else None
        # What the layer takes of each token beside the residual: gated by it, and added to it.
        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "lead": lead, "dtype": dtype}
        inner = config.per_layer
        self.token_gate = None if inner is None else Linear(config.width, inner, **linear)
        self.token_output = None if inner is None else Linear(inner, config.width, **linear)
        self.token_norm = None if inner is None else RMSNorm(config.width, **norm)
        self.activation = config.activation
