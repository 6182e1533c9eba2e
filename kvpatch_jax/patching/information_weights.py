"""Weights of features by how much an error in them changes predictions, by which a `ByteBudget` is spent.

Position rotates the two features of a rotary pair into one another, so both have one weight, the same in every frame.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from ..backbone import Backbone, Tokens, check_is_backbone
from ..cache import Chunk, same_storage
from ..core import AnyArray, Channel, KVLayout, check_uniform, to_engine
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .canonical import unit_tokens


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InformationWeights:
    """Weights of every feature of a backbone's KV: an error in it counts that many times in a `ByteBudget`.

    Attributes:
      weights: {channel: float32 [L, F]}, positive; equal for the two features of a rotary pair.
      layout, backbone: of the KV.
    """

    weights: Mapping[str, Float[AnyArray, "L F"]]
    layout: KVLayout
    backbone: str

    def __repr__(self) -> str:
        return f"InformationWeights({list(self.weights)}, backbone {self.backbone[:16]!r})"

    @classmethod
    def of_information(
        cls, information: Mapping[str, Float[np.ndarray, "L F"]], layout: KVLayout, backbone: str
    ) -> "InformationWeights":
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
        return cls(weights, layout, backbone)

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


def calibrate_sensitivity(
    backbone: Backbone,
    prompts: Sequence[Sequence[Any] | Tokens],
    *,
    samples: int = 2,
    key: Key[Array, ""] | None = None,
) -> InformationWeights:
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
    check_uniform(backbone.layout, "calibrate_sensitivity")
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
    return InformationWeights.of_information(information, layout, backbone.fingerprint)


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


def check_weights(weights: Any) -> None:
    """Raises InputError unless weights are `InformationWeights`."""
    expect_kind(
        weights, InformationWeights, "patch: weights", "InformationWeights, as calibrate_sensitivity measures them"
    )
