"""Weights of features by how queries read them, for factors whose error is small where it is read.

A query q reads an error δ of a key as the error q·δ of a score. With queries taken as uncorrelated, its expected square
is Σ_h E[q_h²]·δ_h², so a feature weighs as much as the root mean square of the queries that read it. Position rotates
the two features of a rotary pair into one another, so both have one weight, which is the same in every frame.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ..backbone import Backbone, LayerAttention, Tokens, check_is_backbone
from ..cache import Chunk, digest_of, encoded, fingerprint_of, same_storage
from ..core import AnyArray, Channel, FormPlan, KVLayout, check_uniform, is_low_rank, ops, to_engine
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .canonical import unit_tokens

_LEAST = 1e-2
"""Least weight as a share of the channel's root mean square: features that no query read may be read later."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ReadingWeights:
    """Weights of every feature of a backbone's KV: an error in it counts that many times in `form_patch(weights=)`.

    Attributes:
      weights: {channel: float32 [L, F]}, positive; equal for the two features of a rotary pair.
      layout, backbone: of the KV.
      compare_layers: whether weights of different layers and channels compare, so that a `ByteBudget` may spend more on
        some layers than on others.

    Raises:
      LayoutError: an unknown channel. ShapeError: weights of another shape, or of fewer channels than the layout.
      InputError: weights that are not positive and finite, or differ within a rotary pair.
    """

    weights: Mapping[str, Float[AnyArray, "L F"]]
    layout: KVLayout
    backbone: str
    compare_layers: bool = False

    def __post_init__(self) -> None:
        fingerprint_of(self.backbone, "weights")
        check_uniform(self.layout, "weights")
        if set(self.weights) != set(self.layout.names):
            raise ShapeError(f"weights: got channels {sorted(self.weights)}; expected {sorted(self.layout.names)}")
        kept = {}
        for channel in self.layout.channels:
            value = np.asarray(self.weights[channel.name], np.float32)
            if value.shape != (self.layout.layers, channel.features):
                raise ShapeError(
                    f"weights: got {channel.name!r} of shape {value.shape}; expected "
                    f"[{self.layout.layers}, {channel.features}]"
                )
            if not (np.isfinite(value).all() and (value > 0).all()):
                raise InputError(f"weights: got {channel.name!r} with numbers that are not positive; expected positive")
            if not np.allclose(value, _over_pairs(value, channel, self.layout), rtol=1e-4):
                raise InputError(f"weights: got {channel.name!r} with unequal rotary pairs; expected one weight a pair")
            kept[channel.name] = value
        object.__setattr__(self, "weights", kept)

    def __repr__(self) -> str:
        return f"ReadingWeights({list(self.weights)}, backbone {self.backbone[:16]!r}, {self.digest})"

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the weights and the backbone, 32 hexadecimal digits."""
        fields = [b"weights", encoded(self.backbone)]
        for name, value in sorted(self.weights.items()):
            fields += [encoded(name), np.ascontiguousarray(value, "<f4").tobytes()]
        return digest_of(fields, size=16)

    def arrays(self) -> dict[str, Float[np.ndarray, "L F"]]:
        """Returns the weights as plain arrays, to be kept beside a certificate (`np.savez`)."""
        return {name: np.array(value) for name, value in self.weights.items()}

    @classmethod
    def equal(cls, layout: KVLayout, backbone: str) -> "ReadingWeights":
        """Returns weights of 1: the factors are those of the plain decomposition."""
        ones = {channel.name: np.ones((layout.layers, channel.features), np.float32) for channel in layout.channels}
        return cls(ones, layout, backbone)

    @classmethod
    def of_information(
        cls, information: Mapping[str, Float[np.ndarray, "L F"]], layout: KVLayout, backbone: str
    ) -> "ReadingWeights":
        """Returns the weights of measured Fisher information, as `calibrate_sensitivity` makes them.

        A rotary pair has one weight, and a feature that hardly mattered a tenth of its layer's root mean square: it may
        matter to other prompts. All together have a mean square of 1 but for these.

        Args:
          information: by channel, the diagonal: mean squares of gradients.
        """
        mean = np.mean(np.concatenate([value.ravel() for value in information.values()]))
        weights = {}
        for channel in layout.channels:
            square = _over_pairs(information[channel.name], channel, layout) / max(mean, np.finfo(np.float64).tiny)
            least = 0.1 * np.sqrt(square.mean(axis=1, keepdims=True)) + np.finfo(np.float32).tiny
            weights[channel.name] = np.maximum(np.sqrt(square), least).astype(np.float32)
        return cls(weights, layout, backbone, compare_layers=True)

    def of_layers(self, chunk: Chunk, layers: Sequence[int]) -> dict[str, Float[Array, "L F"]]:
        """Returns the weights of some layers, for a chunk.

        Raises:
          PatchMismatchError: a chunk of another backbone or layout.
        """
        if chunk.backbone != self.backbone or not same_storage(chunk.layout, self.layout):
            raise PatchMismatchError(
                f"weights: got those of backbone {self.backbone!r:.40}, {self.layout}; expected those of chunk "
                f"{chunk.id!r}, {chunk.backbone!r:.40}, {chunk.layout}"
            )
        return {name: jax.device_put(np.asarray(value)[np.asarray(layers)]) for name, value in self.weights.items()}


def calibrate_weights(backbone: Backbone, prompts: Sequence[Sequence[Any] | Tokens]) -> ReadingWeights:
    """Measures how queries read each feature of a backbone's keys, over prompts such as it will serve.

    The second half of every prompt reads the first. A key feature's weight is the root mean square of the queries of
    its group of heads, a rotary pair having one; each layer's and channel's weights have a mean square of 1, so that
    layers keep their part in a `ByteBudget`. Values have weights of 1: what an output projection makes of them is not
    part of the `Backbone` Protocol. A latent (MLA) is read as key, by absorbed queries, and as value; both count alike.

    Args:
      prompts: each the items of one, as `Backbone.prepare` takes them, or `Tokens`; of two tokens or more.

    Raises:
      InputError: no prompts, or as `prepare`. ShapeError: a prompt of one token.
    """
    check_is_backbone(backbone, "calibrate_weights")
    check_uniform(backbone.layout, "calibrate_weights")
    layout, total, count = backbone.layout, 0.0, 0
    for prompt in prompts:
        tokens = unit_tokens(backbone, prompt, "calibrate_weights")
        rows, length = tokens.embeddings.shape[:2]
        if length < 2:
            raise ShapeError(f"calibrate_weights: got a prompt of {length} token; expected at least 2")
        half = length // 2
        first, rest = tokens.take(0, half), tokens.take(half, length)
        context = to_engine(layout, backbone.prefill(first).kv, jnp.asarray(first.positions), 0)
        power = backbone.attention(rest, context, layers=range(layout.layers), reduce=query_power)
        total = total + np.asarray(power, np.float64) * rows * (length - half)
        count += rows * (length - half)
    if not count:
        raise InputError("calibrate_weights: got no prompts; expected at least one")

    # Keys of an MLA are the latent and the rotary key, side by side.
    power = np.asarray(total) / count
    parts = {"k": power} if layout.kind != "mla" else dict(zip(layout.names, _split_latent(power, layout), strict=True))
    weights = {}
    for channel in layout.channels:
        own = parts.get(channel.name)
        square = np.ones((layout.layers, channel.features)) if own is None else own.reshape(layout.layers, -1)
        square = square / np.maximum(square.mean(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        if layout.kind == "mla" and not channel.rotates:
            square = (square + 1) / 2
        square = _over_pairs(square, channel, layout)
        weights[channel.name] = np.maximum(np.sqrt(square), _LEAST).astype(np.float32)
    return ReadingWeights(weights, layout, backbone.fingerprint)


def calibrate_sensitivity(
    backbone: Backbone,
    prompts: Sequence[Sequence[Any] | Tokens],
    *,
    samples: int = 2,
    key: Key[Array, ""] | None = None,
) -> ReadingWeights:
    """Measures how much an error in each feature of the cached KV changes what the backbone predicts.

    The second half of every prompt reads the first. Let p be the predicted distribution of each next token; then to
    second order an error δ in the cached KV costs a KL divergence of ½ δᵀ F δ, F being the Fisher information
    E[∇ log p(y) ∇ log p(y)ᵀ] over y drawn from p. A feature's weight is the root of its diagonal entry, the mean over
    tokens, a rotary pair having one. Layers and channels keep their relation to one another, so that a `ByteBudget`
    is spent where predictions depend on it; all weights together have a mean square of 1.

    Args:
      prompts: each the items of one, as `Backbone.prepare` takes them, or `Tokens`; of two tokens or more.
      samples: draws of y for each prompt.
      key: a typed PRNG key of the draws; None is `jax.random.key(0)`.

    Raises:
      InputError: no prompts or samples, or as `prepare`. ShapeError: a prompt of one token.
    """
    check_is_backbone(backbone, "calibrate_sensitivity")
    if not is_whole(samples, 1):
        raise InputError(f"calibrate_sensitivity: got samples {samples!r:.80}; expected a whole number from 1")
    layout, key = backbone.layout, jax.random.key(0) if key is None else key
    total, count = {channel.name: np.zeros((layout.layers, channel.features)) for channel in layout.channels}, 0

    for number, prompt in enumerate(prompts):
        tokens = unit_tokens(backbone, prompt, "calibrate_sensitivity")
        rows, length = tokens.embeddings.shape[:2]
        if length < 2:
            raise ShapeError(f"calibrate_sensitivity: got a prompt of {length} token; expected at least 2")
        first, rest = tokens.take(0, length // 2), tokens.take(length // 2, length)
        kv, positions = dict(backbone.prefill(first).kv), jnp.asarray(first.positions)

        def logits_of(kv: Any, positions: Array = positions, rest: Tokens = rest) -> Array:
            context = to_engine(layout, kv, positions, 0)
            return jax.nn.log_softmax(backbone.prefill(rest, context=context, logits="all").logits)

        def log_probability(kv: Any, drawn: Array, logits_of: Callable[..., Array] = logits_of) -> Array:
            return jnp.take_along_axis(logits_of(kv), drawn[..., None], -1).sum()

        predicted = logits_of(kv)
        for sample in range(samples):
            drawn = jax.random.categorical(jax.random.fold_in(key, number * samples + sample), predicted)
            gradient = jax.grad(log_probability)(kv, drawn)
            for name, value in gradient.items():
                square = np.square(np.asarray(value, np.float64)).sum((1, 2))
                total[name] += square.reshape(layout.layers, -1)
            count += rows * (length // 2)
    if not count:
        raise InputError("calibrate_sensitivity: got no prompts; expected at least one")

    information = {name: value / count for name, value in total.items()}
    return ReadingWeights.of_information(information, layout, backbone.fingerprint)


def query_power(layer: LayerAttention) -> Float[Array, "K H"]:
    """Averages the squares of scaled queries over rows, tokens and the query heads of each KV head."""
    B, T, _, H = layer.query.shape
    query = layer.query.astype(jnp.float32).reshape(B, T, layer.keys.shape[2], -1, H) * layer.scale
    return jnp.square(query).mean((0, 1, 3))


def _split_latent(power: np.ndarray, layout: KVLayout) -> list[np.ndarray]:
    edges = np.cumsum([channel.width for channel in layout.channels])[:-1]
    return np.split(power, edges, axis=-1)


def _over_pairs(value: np.ndarray, channel: Channel, layout: KVLayout) -> np.ndarray:
    """Gives both features of every rotary pair of [L, F] their mean."""
    R = channel.rotary
    if not R:
        return value
    heads = value.reshape(len(value), channel.heads, channel.width).copy()
    first, second = (slice(0, R // 2), slice(R // 2, R))
    if layout.rope.cached == "pairs":
        first, second = slice(0, R, 2), slice(1, R, 2)
    mean = (heads[..., first] + heads[..., second]) / 2
    heads[..., first], heads[..., second] = mean, mean
    return heads.reshape(value.shape)


@functools.partial(jax.jit, static_argnames=("plan",))
def factorise_weighted(
    delta: dict[str, Float[Array, "L *B T _ _"]],
    weights: dict[str, Float[Array, "L F"]],
    key: Key[Array, ""],
    length: Int[Array, ""],
    *,
    plan: FormPlan,
) -> ops.Factors:
    """Factorises a deficit so that ‖(Δ − u v)·W‖ is least, W having the weights on its diagonal.

    Factors of Δ·W, whose v is divided by W. Dense channels are as they are.

    Args:
      delta: of the plan's layers. weights: of the same layers.
      plan: all of the layers of `delta`.
    """
    scaled = {}
    for name, value in delta.items():
        scaled[name] = value * _broadcast(weights[name], value.ndim, value.shape[-2:])
    # Rounded to the dtype once, after the weights were taken out again.
    found = ops.factorise_deficit(scaled, key, length, plan=dataclasses.replace(plan, dtype="float32"))

    factors: ops.Factors = {}
    for name, own in found.items():
        if not is_low_rank(own):
            factors[name] = ops.stored(delta[name], plan.dtype, -1)
            continue
        u, v = (ops.value_of(leaf) for leaf in own)  # pyright: ignore[reportGeneralTypeIssues]
        features = v.shape[-1]
        weight = weights[name].reshape(len(weights[name]), *[1] * (v.ndim - 2), features)
        factors[name] = ops.stored(u, plan.dtype, -2), ops.stored(v / weight, plan.dtype, -1)
    return factors


def _broadcast(weights: Array, ndim: int, ends: tuple[int, ...]) -> Array:
    """Shapes weights [L, K·H] to broadcast over [L, ..., T, K, H]."""
    return weights.reshape(len(weights), *[1] * (ndim - 3), *ends)


def check_weights(weights: Any) -> None:
    """Raises InputError unless weights are `ReadingWeights`."""
    expect_kind(weights, ReadingWeights, "patch: weights", "ReadingWeights, as calibrate_weights measures them")
