"""The two kinds of attention a decoder layer may have, behind one small interface.

`project` gives queries and the tokens' phase-free KV by channel; `mix` attends with turned queries over turned keys.
Everything between them (rotation, context, writing into a cache) is the decoder's and the same for both kinds.

* `GroupedAttention`: grouped-query and multi-head attention, channels `k` and `v`.
* `LatentAttention`: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), channels `ckv` and
  `kpe`. It attends in absorbed form, straight from the latent: keys and values of the heads are never made.

Axis letters: B batch, T tokens, S keys, N query heads, K KV heads, H head width, D model width, C latent, R rope width,
U width of a head's position-free part, W width of a head's value.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.backbone import LayerAttention

from ..attention import Mask, attention
from .config import DecoderConfig, LayerKind
from .layers import Linear, RMSNorm
from .stacks import InStack

Attend = Callable[..., Array]
"""Computes attention as `models.attention.attention` does, with its arguments query, key, value, mask and scale."""
LATENT_EPSILON = 1e-6
"""Of the norms inside latent attention, whatever the configuration's own epsilon is."""


class GroupedAttention(nnx.Module):
    """Query, key, value and output projections of one layer (or a stack of layers)."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        kind: LayerKind | None = None,
    ):
        kind = config.layer_kinds[0] if kind is None else kind
        heads, kv_heads, head_dim, width = config.heads, kind.kv_heads, kind.head_dim, config.width
        bias, keeps = config.attention_bias, not kind.reads

        def kv(wanted):
            return Linear(width, kv_heads * head_dim, bias=bias, rngs=rngs, lead=lead, dtype=dtype) if wanted else None

        # With a gate a head's query and its gate lie side by side.
        queries = heads * head_dim * (2 if config.attention_gate else 1)
        self.query = Linear(width, queries, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.key, self.value = kv(keeps), kv(keeps and not kind.keys_are_values)
        self.output = Linear(heads * head_dim, width, bias=config.output_bias, rngs=rngs, lead=lead, dtype=dtype)
        norm: dict[str, Any] = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        norm |= {"weight": config.norm_weight}
        self.query_norm = RMSNorm(head_dim, **norm) if config.qk_norm else None
        self.key_norm = RMSNorm(head_dim, **norm) if config.qk_norm and keeps else None
        self.value_norm = RMSNorm(head_dim, **{**norm, "weight": "none"}) if config.value_norm and keeps else None
        self.head_dim, self.gated = head_dim, config.attention_gate
        self.scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale

    def project(self, x: Float[Array, "B T D"]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns queries {"turning": [B,T,N,H]} (and {"gate"}, alike) and KV {"k", "v": [B,T,K,H]}, without position.

        A layer that reads another's KV has none of its own: {}.
        """

        def heads(linear):
            return linear(x).reshape(*x.shape[:2], -1, self.head_dim)

        # The norm on each head comes before the rotation, so phase-free keys have it.
        query, gate = heads(self.query), {}
        if self.gated:
            query, own = query[:, :, 0::2], query[:, :, 1::2]
            gate = {"gate": own}
        query = query if self.query_norm is None else self.query_norm(query)
        if self.key is None:
            return {"turning": query, **gate}, {}
        key = heads(self.key)
        value = key if self.value is None else heads(self.value)
        key = key if self.key_norm is None else self.key_norm(key)
        value = value if self.value_norm is None else self.value_norm(value)
        return {"turning": query, **gate}, {"k": key, "v": value}

    def mix(
        self, query: Mapping[str, Array], kv: Mapping[str, Array], mask: Mask, attend: Attend = attention
    ) -> Float[Array, "B T D"]:
        """Attends with rotated queries over engine-frame KV, and projects out."""
        mixed = attend(query["turning"], kv["k"], kv["v"], mask, scale=self.scale)
        mixed = mixed * jax.nn.sigmoid(query["gate"]) if self.gated else mixed
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def compared(self, query: Mapping[str, Array], kv: Mapping[str, Array], mask: Mask) -> LayerAttention:
        """Returns the rotated queries and the keys that `mix` compares."""
        allowed = mask.dense(query["turning"].shape[1], kv["k"].shape[1])
        return LayerAttention(query["turning"], kv["k"], allowed, self.scale)


class LatentAttention(nnx.Module):
    """Projections to and from the latent of one layer (or a stack of layers)."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        kind: LayerKind | None = None,
    ):
        latent = config.latent
        assert latent is not None
        heads, width, bias = config.heads, config.width, config.attention_bias
        linear: dict[str, Any] = {"rngs": rngs, "lead": lead, "dtype": dtype}
        norm: dict[str, Any] = {"epsilon": LATENT_EPSILON, "lead": lead, "dtype": dtype}
        queries, rank = heads * (latent.plain_dim + latent.rope_dim), latent.query_rank
        self.query_down = None if rank is None else Linear(width, rank, bias=bias, **linear)
        self.query_norm = None if rank is None else RMSNorm(rank, **norm)
        self.query = Linear(width if rank is None else rank, queries, bias=False, **linear)
        self.down = Linear(width, latent.latent + latent.rope_dim, bias=bias, **linear)
        self.latent_norm = RMSNorm(latent.latent, **norm)
        self.up = Linear(latent.latent, heads * (latent.plain_dim + latent.value_dim), bias=False, **linear)
        self.output = Linear(heads * latent.value_dim, width, bias=config.output_bias, **linear)
        self.heads, self.latent = heads, latent

    def project(self, x: Float[Array, "B T D"]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns queries {"latent": [B,T,N,C], "turning": [B,T,N,R]} and KV {"ckv": [B,T,1,C], "kpe": [B,T,1,R]}."""
        latent = self.latent
        inner = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        query = self.query(inner).reshape(*x.shape[:2], self.heads, latent.plain_dim + latent.rope_dim)
        plain, turning = query[..., : latent.plain_dim], query[..., latent.plain_dim :]

        # A head's plain key is the latent times `up`, so its query is multiplied by `up` instead, once per token.
        up = self._up(x.dtype)[..., : latent.plain_dim]
        absorbed = jnp.einsum("BTNU,CNU->BTNC", plain, up, preferred_element_type=jnp.float32).astype(x.dtype)

        # One latent and one rotary key for all heads: an axis of a single KV head.
        down = self.down(x)[:, :, None]
        ckv, kpe = self.latent_norm(down[..., : latent.latent]), down[..., latent.latent :]
        if latent.reads_pairs:
            turning, kpe = _halves(turning), _halves(kpe)
        return {"latent": absorbed, "turning": turning}, {"ckv": ckv, "kpe": kpe}

    def mix(
        self, query: Mapping[str, Array], kv: Mapping[str, Array], mask: Mask, attend: Attend = attention
    ) -> Float[Array, "B T D"]:
        """Attends with absorbed and rotated queries over the cached latent, and projects out."""
        queries, keys = _joined_queries(query), _joined_keys(kv)
        # The latent is key and value of one head that all query heads share.
        mixed = attend(queries, keys, kv["ckv"], mask, scale=self.latent.scale)
        up = self._up(mixed.dtype)[..., self.latent.plain_dim :]
        values = jnp.einsum("BTNC,CNW->BTNW", mixed, up, preferred_element_type=jnp.float32).astype(mixed.dtype)
        return self.output(values.reshape(*values.shape[:2], -1))

    def compared(self, query: Mapping[str, Array], kv: Mapping[str, Array], mask: Mask) -> LayerAttention:
        """Returns the absorbed queries and the latent keys that `mix` compares, of one head that all queries share."""
        queries, keys = _joined_queries(query), _joined_keys(kv)
        allowed = mask.dense(queries.shape[1], keys.shape[1])
        return LayerAttention(queries, keys, allowed, self.latent.scale)

    def _up(self, dtype: jnp.dtype) -> Array:
        """Returns the latent's way up to every head's plain key and value, [C,N,U+W]."""
        kernel = self.up.kernel[...]
        kernel = kernel.whole() if isinstance(kernel, InStack) else kernel
        return kernel.astype(dtype).reshape(self.latent.latent, self.heads, -1)


def _joined_queries(query: Mapping[str, Array]) -> Array:
    return jnp.concatenate([query["latent"], query["turning"]], axis=-1)


def _joined_keys(kv: Mapping[str, Array]) -> Array:
    return jnp.concatenate([kv["ckv"], kv["kpe"]], axis=-1)


def _halves(x: Array) -> Array:
    """Reorders rotary pairs that lie side by side: all first members, then all second ones."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
