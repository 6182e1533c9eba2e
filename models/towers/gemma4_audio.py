"""Gemma 4's audio tower: two convolutions, conformer layers that look back over a few tokens, two maps.

Source: transformers' Gemma4AudioModel and Gemma4MultimodalEmbedder. transformers pads sounds to one length; here they
lie one behind the other in a row of frames, with a token of silence between them. Nothing looks ahead but the
convolutions, which see the zeros behind a sound in either form.

Axis letters: F frames, M mel bins, T tokens (a quarter of the frames), B tokens that one looks back over, N heads,
H head width, D tower width, E tokens that count.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..checkpoints import ParamPath, TensorEntry, module_entries
from ..decoder.layers import ACTIVATIONS, Linear, RMSNorm, check_activation, normal
from .bounded import BoundedLinear, bounded_entries, clip_to
from .common import Convolution, LayerNorm, check_heads, scan_blocks

EPSILON = 1e-6
"""Of norms that do not take the configuration's."""
REDUCED = 4
"""Frames per token."""
HIDDEN = -1e9
"""The score of a token that is not seen."""
NORMS = {
    "first.norm": "feed_forward1.pre_layer_norm",
    "first.post_norm": "feed_forward1.post_layer_norm",
    "second.norm": "feed_forward2.pre_layer_norm",
    "second.post_norm": "feed_forward2.post_layer_norm",
    "attention_norm": "norm_pre_attn",
    "attention_post_norm": "norm_post_attn",
    "conv_norm": "lconv1d.pre_layer_norm",
    "conv_post_norm": "lconv1d.conv_norm",
    "norm": "norm_out",
}
MAPS = {
    "first.inner": "feed_forward1.ffw_layer_1",
    "first.outer": "feed_forward1.ffw_layer_2",
    "second.inner": "feed_forward2.ffw_layer_1",
    "second.outer": "feed_forward2.ffw_layer_2",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.post",
    "conv_in": "lconv1d.linear_start",
    "conv_out": "lconv1d.linear_end",
}


@dataclasses.dataclass(frozen=True)
class Gemma4AudioConfig:
    """Sizes and switches of the tower and the map behind it.

    Attributes:
      inner_width: what the tower gives to the map behind it (`output_proj_dims`).
      channels: of the two convolutions; the first number is also that of mel bins.
      kernel: tokens of the convolution inside a layer.
      reach: how many tokens one sees, itself included (`attention_context_left` − 1).
      cap: bounds scores softly. share: of a feed-forward update that is added. bound: of what enters and leaves parts.
      bounded: maps cut their inputs and outputs.
    """

    depth: int
    width: int
    heads: int
    output_width: int
    inner_width: int = 1536
    channels: tuple[int, int] = (128, 32)
    kernel: int = 5
    reach: int = 12
    cap: float = 50.0
    share: float = 0.5
    bound: float = 1e10
    activation: str = "silu"
    bounded: bool = True
    epsilon: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        check_activation(self.activation, "audio hidden_act")

    @property
    def mels(self) -> int:
        """Mel bins of a frame."""
        return self.channels[0]


def plan_audio(features: Float[np.ndarray, "sounds F M"], mask: Bool[np.ndarray, "sounds F"]) -> dict[str, np.ndarray]:
    """Lays sounds out in one row of frames.

    Returns:
      `inputs` float32 [F,M], `valid` (int32 [F], 1 of frames that count), `starts` (int32 [F], where each one's sound
      begins) and `tokens` (int32 [E], those that count).
    """
    parts, valid, starts, tokens, first = [], [], [], [], 0
    for sound, counts in zip(features, mask, strict=True):
        # Room for whole tokens, and one of silence.
        size = -(-len(sound) // REDUCED) * REDUCED + REDUCED
        room = size - len(sound)
        parts.append(np.pad(np.where(counts[:, None], sound, 0), ((0, room), (0, 0))))
        valid.append(np.pad(counts, (0, room)))
        starts.append(np.full(size, first))
        tokens.append(first // REDUCED + np.arange(int(counts[::2][::2].sum())))
        first += size
    return {
        "inputs": np.concatenate(parts).astype(np.float32),
        "valid": np.concatenate(valid).astype(np.int32),
        "starts": np.concatenate(starts).astype(np.int32),
        "tokens": np.concatenate(tokens).astype(np.int32),
    }


def _behind(x: Array, count: int, starts: Int[Array, " T"]) -> tuple[Array, Array]:
    """Returns each token's `count` latest ones, itself first, [T,B,…], and which of these are of its sound [T,B]."""
    back = jnp.arange(len(x))[:, None] - jnp.arange(count)
    inside = back >= starts[:, None]
    return x[jnp.maximum(back, 0)], inside


class _FeedForward(nnx.Module):
    """An MLP with norms around it, of which a share is added."""

    def __init__(self, config: Gemma4AudioConfig, rngs: nnx.Rngs):
        lead, width, dtype = (config.depth,), config.width, jnp.dtype(config.dtype)
        norm = {"epsilon": EPSILON, "lead": lead, "dtype": dtype, "weight": "wide"}
        linear = {"bounded": config.bounded, "rngs": rngs, "lead": lead, "dtype": dtype}
        self.norm, self.post_norm = RMSNorm(width, **norm), RMSNorm(width, **norm)
        self.inner, self.outer = BoundedLinear(width, 4 * width, **linear), BoundedLinear(4 * width, width, **linear)
        self.config = config

    def __call__(self, hidden: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the residual after it."""
        config = self.config
        x = self.inner(self.norm(clip_to(hidden, config.bound)))
        x = clip_to(self.outer(ACTIVATIONS[config.activation](x)), config.bound)
        return hidden + self.post_norm(x) * config.share


class ConformerLayer(nnx.Module):
    """Feed-forward, attention over the latest tokens, a convolution over them, feed-forward: a stack to scan over."""

    def __init__(self, config: Gemma4AudioConfig, rngs: nnx.Rngs):
        lead, width, dtype = (config.depth,), config.width, jnp.dtype(config.dtype)
        norm = {"lead": lead, "dtype": dtype, "weight": "wide"}
        linear = {"bounded": config.bounded, "rngs": rngs, "lead": lead, "dtype": dtype}
        self.first, self.second = _FeedForward(config, rngs), _FeedForward(config, rngs)
        self.attention_norm, self.attention_post_norm, self.norm = (
            RMSNorm(width, epsilon=EPSILON, **norm) for _ in range(3)
        )
        self.query, self.key, self.value, self.output = (BoundedLinear(width, width, **linear) for _ in range(4))
        self.relative = Linear(width, width, bias=False, rngs=rngs, lead=lead, dtype=dtype)
        self.scale = nnx.Param(jnp.zeros((*lead, width // config.heads), dtype))
        self.conv_norm, self.conv_post_norm = (RMSNorm(width, epsilon=config.epsilon, **norm) for _ in range(2))
        self.conv_in, self.conv_out = BoundedLinear(width, 2 * width, **linear), BoundedLinear(width, width, **linear)
        self.conv = nnx.Param(normal(rngs, (*lead, config.kernel, 1, width), config.kernel**-0.5, dtype))
        self.config = config

    def run(
        self, hidden: Float[Array, "T D"], starts: Int[Array, " T"], distances: Float[Array, "B D"]
    ) -> Float[Array, "T D"]:
        """Returns the residual after this layer; `distances` are sines and cosines of 0 … B−1 tokens back."""
        bound = self.config.bound
        hidden = self.first(hidden)
        mixed = self._attend(self.attention_norm(clip_to(hidden, bound)), starts, distances)
        hidden = hidden + self.attention_post_norm(clip_to(mixed, bound))
        hidden = self.second(hidden + self._convolve(hidden, starts))
        return self.norm(clip_to(hidden, bound))

    def _attend(self, x: Array, starts: Array, distances: Array) -> Array:
        config, shape = self.config, (len(x), self.config.heads, -1)
        query, key, value = (part(x).astype(jnp.float32).reshape(shape) for part in (self.query, self.key, self.value))
        # Softplus of zeros is ln 2, by which the factor of queries is divided.
        factor = jax.nn.softplus(self.scale[...].astype(jnp.float32)) / math.log(2)
        query = query * (query.shape[-1] ** -0.5 * factor)
        key = key * (math.log(1 + math.e) / math.log(2))
        relative = self.relative(distances.astype(x.dtype)).astype(jnp.float32).reshape(config.reach, config.heads, -1)

        keys, inside = _behind(key, config.reach, starts)
        values, _ = _behind(value, config.reach, starts)
        scores = jnp.einsum("TNH,TBNH->TBN", query, keys) + jnp.einsum("TNH,BNH->TBN", query, relative)
        scores = config.cap * jnp.tanh(scores / config.cap)
        weights = jax.nn.softmax(jnp.where(inside[..., None], scores, HIDDEN), axis=1)
        return self.output(jnp.einsum("TBN,TBNH->TNH", weights, values).reshape(len(x), -1).astype(x.dtype))

    def _convolve(self, hidden: Array, starts: Array) -> Array:
        config = self.config
        x, gate = jnp.split(self.conv_in(self.conv_norm(hidden)), 2, axis=-1)
        latest, inside = _behind(x * jax.nn.sigmoid(gate), config.kernel, starts)
        # The kernel's last place is the token's own.
        kernel = self.conv[...][::-1, 0].astype(jnp.float32)
        mixed = jnp.einsum("TBD,BD->TD", jnp.where(inside[..., None], latest, 0).astype(jnp.float32), kernel)
        mixed = self.conv_post_norm(clip_to(mixed.astype(hidden.dtype), config.bound))
        return self.conv_out(ACTIVATIONS[config.activation](mixed))


class Gemma4AudioTower(nnx.Module):
    """Log-mel frames to embeddings of the language tower, one for four frames."""

    def __init__(self, config: Gemma4AudioConfig, rngs: nnx.Rngs):
        dtype, (one, two) = jnp.dtype(config.dtype), config.channels
        linear = {"rngs": rngs, "dtype": dtype}
        norm = {"epsilon": config.epsilon, "dtype": dtype}
        self.first, self.second = Convolution(1, one, stride=2, **linear), Convolution(one, two, stride=2, **linear)
        self.first_norm, self.second_norm = LayerNorm(one, bias=False, **norm), LayerNorm(two, bias=False, **norm)
        self.joined = Linear(one // REDUCED * two, config.width, bias=False, **linear)
        self.blocks = ConformerLayer(config, rngs)
        self.output = Linear(config.width, config.inner_width, bias=True, **linear)
        self.norm = RMSNorm(config.inner_width, **norm, weight="none")
        self.projector = Linear(config.inner_width, config.output_width, bias=False, **linear)
        self.config = config

    def __call__(
        self,
        mel: Float[Array, "F M"],
        valid: Int[Array, " F"],
        starts: Int[Array, " F"],
        tokens: Int[Array, " E"],
    ) -> Float[Array, "E D"]:
        """Embeds a row of frames; the index arrays come from `plan_audio`."""
        config = self.config
        x = mel.astype(jnp.dtype(config.dtype))[None, ..., None]
        for convolution, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            # What a convolution leaves behind a sound's end would reach its last tokens through the next one.
            x = jax.nn.relu(norm(convolution(jnp.where(valid[None, :, None, None] > 0, x, 0))))
            valid = valid[::2]
        hidden = self.joined(x[0].reshape(x.shape[1], -1))
        starts = starts[::REDUCED] // REDUCED

        half = config.width // 2
        step = math.log(1e4) / max(half - 1, 1)
        rates = np.exp(-np.float32(step) * np.arange(half, dtype=np.float32))
        angles = np.arange(config.reach, dtype=np.float32)[:, None] * rates
        distances = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))

        def run(layer: ConformerLayer, hidden: Array) -> Array:
            return layer.run(hidden, starts, distances)

        hidden = scan_blocks(self.blocks, run, hidden, 0, config.depth)
        return self.projector(self.norm(self.output(hidden[tokens])))


def gemma4_audio_entries(prefix: str, glue: str, path: ParamPath = ("audio",)) -> list[TensorEntry]:
    """Maps the tower and the map behind it, `glue`."""
    layer, place, stem = f"{prefix}.layers.{{layer}}", (*path, "blocks"), "subsample_conv_projection"
    names = {"joined": f"{stem}.input_proj_linear", "output": "output_proj"}
    names |= {"first_norm": f"{stem}.layer0.norm", "second_norm": f"{stem}.layer1.norm"}
    return [
        *module_entries(prefix, path, names),
        *module_entries(glue, path, {"projector": "embedding_projection"}),
        # [out, in, frame, mel bin] to [frame, mel bin, in, out].
        TensorEntry(f"{prefix}.{stem}.layer0.conv.weight", (*path, "first", "kernel"), (2, 3, 1, 0)),
        TensorEntry(f"{prefix}.{stem}.layer1.conv.weight", (*path, "second", "kernel"), (2, 3, 1, 0)),
        *module_entries(layer, place, NORMS | {"relative": "self_attn.relative_k_proj"}),
        *bounded_entries(layer, place, MAPS),
        TensorEntry(f"{layer}.self_attn.per_dim_scale", (*place, "scale")),
        TensorEntry(f"{layer}.lconv1d.depthwise_conv1d.weight", (*place, "conv"), (2, 1, 0)),
    ]
