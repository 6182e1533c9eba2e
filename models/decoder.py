"""One decoder for every language tower with a KV cache: grouped-query and multi-head attention behind switches.

Layers are stacked on a leading axis and scanned. The decoder works on embeddings and positions; it never sees token
ids or images. Its KV comes out phase-free (after bias and qk-norm, before rotation); its cached context comes in in
the engine frame, as an ordinary attention kernel reads it.

Axis letters: B batch, T tokens, S keys, L layers, N query heads, K KV heads, H head width, D model width, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.errors import ConfigError, ShapeError
from kvpatch_jax.layout import KVLayout
from kvpatch_jax.rope import Rope, rope_tables, rotate

from .layers import GatedMLP, Linear, RMSNorm, attend

KV = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that tells one language tower from another.

    `rope` holds frequencies, cached layout, partial width and M-RoPE sections. `qk_norm` puts an RMS norm on each
    head before rotation (Qwen3), `post_norms` adds norms after attention and MLP (GLM-4-0414), `attention_bias` puts
    biases on query, key and value (Qwen2).
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope: Rope
    norm_epsilon: float = 1e-6
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    tied_embeddings: bool = False
    attention: str = "gqa"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.attention != "gqa":
            raise ConfigError(
                f"attention kind {self.attention!r} is not built; this decoder knows 'gqa' (MHA included)"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"query heads {self.heads} are not a multiple of KV heads {self.kv_heads}")

    @property
    def layout(self) -> KVLayout:
        """The KV layout that follows from this configuration."""
        make = KVLayout.mha if self.heads == self.kv_heads else KVLayout.gqa
        heads = {"heads": self.heads} if self.heads == self.kv_heads else {"kv_heads": self.kv_heads}
        return make(layers=self.layers, head_dim=self.head_dim, rope=self.rope, **heads)


class Attention(nnx.Module):
    """Query, key, value and output projections of one layer (or a stack of layers)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, lead: tuple[int, ...], dtype: jnp.dtype):
        heads, kv_heads, head_dim, width = config.heads, config.kv_heads, config.head_dim, config.width
        bias = config.attention_bias
        self.query = Linear(width, heads * head_dim, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.key = Linear(width, kv_heads * head_dim, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.value = Linear(width, kv_heads * head_dim, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.output = Linear(heads * head_dim, width, bias=config.output_bias, rngs=rngs, lead=lead, dtype=dtype)
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        self.query_norm = RMSNorm(head_dim, **norm) if config.qk_norm else None
        self.key_norm = RMSNorm(head_dim, **norm) if config.qk_norm else None
        self.head_dim = head_dim

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        """Query [B,T,N,H], key and value [B,T,K,H], all without position."""
        query, key, value = (
            linear(x).reshape(*x.shape[:2], -1, self.head_dim) for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


class DecoderLayer(nnx.Module):
    """One layer, or with `lead=(L,)` a stack of layers to scan over."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, lead: tuple[int, ...] = ()):
        dtype = jnp.dtype(config.dtype)
        norm = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        self.input_norm = RMSNorm(config.width, **norm)
        self.attention = Attention(config, rngs, lead, dtype)
        self.mlp_norm = RMSNorm(config.width, **norm)
        self.mlp = GatedMLP(
            config.width,
            config.intermediate,
            bias=config.mlp_bias,
            rngs=rngs,
            activation=config.activation,
            lead=lead,
            dtype=dtype,
        )
        self.attention_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None


class LayerState(NamedTuple):
    """What a run over some layers leaves behind.

    hidden [B,T,D]: the residual after the last layer run. kv: phase-free KV of the tokens, per channel
    [L,B,T,K,H] over the layers run. cache: the context with the tokens written into it (engine frame), or None.
    taps: {layer: residual [B,T,D] as it enters that layer}.
    """

    hidden: Array
    kv: KV
    cache: KV | None
    taps: dict[int, Array]


class _Step(NamedTuple):
    cos: Array
    sin: Array
    mask: Array
    slots: Array | None


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final norm and (tied or own) output head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        table = 0.02 * jax.random.normal(rngs.params(), (config.vocabulary, config.width), jnp.float32)
        self.embedding = nnx.Param(table.astype(dtype))
        self.layers = DecoderLayer(config, rngs, lead=(config.layers,))
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        own_head = lambda: Linear(config.width, config.vocabulary, bias=False, rngs=rngs, dtype=dtype)
        self.head = None if config.tied_embeddings else own_head()
        self.config = config

    def embed(self, input_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings."""
        return jnp.take(self.embedding[...], input_ids, axis=0)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Final norm and output head, float32."""
        hidden = self.norm(hidden)
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def run(
        self,
        hidden: Float[Array, "B T D"],
        positions: Array,
        mask: Bool[Array, "B 1 T S"],
        *,
        context: Mapping[str, Array] | None = None,
        slots: Int[Array, "B T"] | None = None,
        keep: Bool[Array, "L B T"] | None = None,
        start_layer: int = 0,
        stop_layer: int | None = None,
        hidden_at: tuple[int, ...] = (),
    ) -> LayerState:
        """Run layers start_layer … stop_layer-1 over the tokens.

        Args:
          hidden: residual entering `start_layer` (the embeddings when it is 0).
          positions: int or float positions [B,T] or [B,T,3] (M-RoPE: time, height, width).
          mask: True where a token may look. Keys are [context, tokens] in that order without `slots`; with `slots`
            they are the context alone, into which the tokens are written first.
          context: engine-frame KV per channel, [L,B,S,K,H], over all layers of the decoder.
          slots: where in the context each token is written; out of range means nowhere.
          keep: which tokens are written at which layer (all of them when None).
          hidden_at: layers whose entering residual is to be returned (up to stop_layer, which taps the output).

        Raises:
          ShapeError: a layer range or tap outside the decoder.
        """
        stop = self.config.layers if stop_layer is None else stop_layer
        if not 0 <= start_layer <= stop <= self.config.layers:
            raise ShapeError(f"layers {start_layer}…{stop} are outside this decoder's 0…{self.config.layers}")
        if any(not start_layer <= tap <= stop for tap in hidden_at):
            raise ShapeError(f"hidden_at {hidden_at} asks for layers outside {start_layer}…{stop}")
        cos, sin = rope_tables(self.config.rope, positions)
        step = _Step(cos, sin, mask, slots)
        bounds = sorted({start_layer, stop, *hidden_at})
        taps = {start_layer: hidden} if start_layer in hidden_at else {}
        pieces, caches = [], []
        for first, last in itertools.pairwise(bounds):
            hidden, kv, cache = self._scan(hidden, step, context, keep, first, last)
            pieces.append(kv)
            caches.append(cache)
            if last in hidden_at:
                taps[last] = hidden
        return LayerState(hidden, _join(pieces), _join(caches) if slots is not None else None, taps)

    def _scan(self, hidden: Array, step: _Step, context, keep, first: int, last: int):
        graph, state = nnx.split(self.layers)
        cut = lambda tree: jax.tree.map(lambda leaf: leaf[first:last], tree)

        def body(carry: Array, per_layer):
            state, cached, kept = per_layer
            return self._layer(nnx.merge(graph, state), carry, step, cached, kept)

        hidden, (kv, cache) = jax.lax.scan(body, hidden, (cut(state), cut(context), cut(keep)))
        return hidden, kv, cache

    def _layer(self, layer: DecoderLayer, hidden: Array, step: _Step, cached, kept):
        rope = self.config.rope
        query, key, value = layer.attention.project(layer.input_norm(hidden))
        turn = lambda x: rotate(x, step.cos, step.sin, rope.cached, rope.attention_scaling)
        turned_query, turned_key = turn(query), turn(key)
        keys, values, cache = _gather_keys(turned_key, value, cached, step.slots, kept)
        mixed = attend(turned_query, keys, values, step.mask, self.config.head_dim**-0.5)
        mixed = layer.attention.output(mixed.reshape(*hidden.shape[:2], -1))
        if layer.attention_post_norm is not None:
            mixed = layer.attention_post_norm(mixed)
        hidden = hidden + mixed
        update = layer.mlp(layer.mlp_norm(hidden))
        if layer.mlp_post_norm is not None:
            update = layer.mlp_post_norm(update)
        return hidden + update, ({"k": key, "v": value}, cache)


def _gather_keys(key: Array, value: Array, cached, slots: Array | None, kept: Array | None):
    """Keys and values to attend over, and the cache with the tokens written into it (None without slots)."""
    if cached is None:
        return key, value, None
    if slots is None:
        join = lambda name, new: jnp.concatenate([cached[name].astype(new.dtype), new], axis=1)
        return join("k", key), join("v", value), None
    size = cached["k"].shape[1]
    slots = slots if kept is None else jnp.where(kept, slots, size)
    rows = jnp.arange(slots.shape[0])[:, None]
    write = lambda name, new: cached[name].at[rows, slots].set(new.astype(cached[name].dtype), mode="drop")
    cache = {"k": write("k", key), "v": write("v", value)}
    return cache["k"].astype(key.dtype), cache["v"].astype(value.dtype), cache


def _join(pieces: list):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *pieces) if pieces else {}
