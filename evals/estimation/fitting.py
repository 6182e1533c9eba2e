"""Fits that estimators share: directions of many deficits, ridge regression layer by layer, spreading of samples.

Axis letters: L layers, n samples, P features of a sample, B contexts, T tokens, M directions, F features of KV.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.patching import fit_basis

from .served_chunk import MeasuredChunk

RIDGES = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Ridge penalties that are tried, per sample and per feature of variance 1."""


@dataclasses.dataclass(frozen=True, eq=False)
class SharedDirections:
    """Directions of deficits of other contexts, orthonormal in each layer and channel: {channel: [L, M, F]}."""

    directions: Mapping[str, Float[np.ndarray, "L M F"]]
    heads: Mapping[str, int]

    @property
    def count(self) -> int:
        """Coefficients of a token in a layer, all channels together."""
        return sum(value.shape[1] for value in self.directions.values())

    @property
    def product_flops(self) -> int:
        """FLOPs of multiplying one token's coefficients by the directions, all layers."""
        return sum(2 * value.size for value in self.directions.values())

    def coefficients(self, delta: Mapping[str, Any]) -> Float[np.ndarray, "L B T M"]:
        """Projects deficits {channel: [L,B,T,K,H]}; the channels' coefficients are joined."""
        parts = []
        for name, rows in self.directions.items():
            value = np.asarray(delta[name], np.float32)
            parts.append(np.einsum("lbtf,lmf->lbtm", value.reshape(*value.shape[:3], -1), rows, optimize=True))
        return np.concatenate(parts, axis=-1)

    def deficit(self, coefficients: Float[np.ndarray, "L B T M"]) -> dict[str, np.ndarray]:
        """Computes the deficits {channel: [L,B,T,K,H]} of coefficients."""
        delta, first = {}, 0
        for name, rows in self.directions.items():
            own = coefficients[..., first : first + rows.shape[1]]
            first += rows.shape[1]
            value = np.einsum("lbtm,lmf->lbtf", own, rows, optimize=True)
            delta[name] = value.reshape(*value.shape[:3], self.heads[name], -1).astype(np.float32)
        return delta


def fit_directions(fitted: Sequence[MeasuredChunk], rank: int) -> SharedDirections:
    """Computes the `rank` strongest directions of the fitted contexts' deficits; narrow channels get all they have."""
    layout = fitted[0].served.backbone.layout
    ranks = {channel.name: min(rank, channel.features) for channel in layout.channels}
    basis = fit_basis([(own.chunk, own.conditioned) for own in fitted], ranks)
    directions = {name: np.asarray(value, np.float32) for name, value in basis.directions.items()}
    return SharedDirections(directions, {channel.name: channel.heads for channel in layout.channels})


class LinearMap(NamedTuple):
    """Affine maps, one a layer: (x − centre) / scale · weights + offset, and the ridge penalty that was chosen."""

    centre: Float[np.ndarray, "L 1 P"]
    scale: Float[np.ndarray, "L 1 P"]
    weights: Float[np.ndarray, "L P M"]
    offset: Float[np.ndarray, "L 1 M"]
    ridge: float

    def __call__(self, features: Float[np.ndarray, "L *rows P"]) -> Float[np.ndarray, "L *rows M"]:
        """Maps features of every layer."""
        rows = features.shape[1:-1]
        x = features.reshape(len(features), -1, features.shape[-1])
        y = ((x - self.centre) / self.scale) @ self.weights + self.offset
        return y.reshape(len(features), *rows, -1).astype(np.float32)


def fit_linear(
    features: Float[np.ndarray, "L n P"], targets: Float[np.ndarray, "L n M"], ridges: Sequence[float] = RIDGES
) -> LinearMap:
    """Fits targets to features by ridge regression in each layer.

    The penalty is the same in all layers: that which predicts the last quarter of the samples best when the others are
    fitted. Samples of one context stand together, so the last quarter is of other contexts but for one at the edge.
    """
    edge = max(1, features.shape[1] * 3 // 4)
    best = ridges[0]
    if len(ridges) > 1 and edge < features.shape[1]:
        first = _moments(features[:, :edge], targets[:, :edge])
        errors = []
        for ridge in ridges:
            found = _solved(first, ridge)(features[:, edge:])
            errors.append(float(np.square(found - targets[:, edge:]).sum()))
        best = ridges[int(np.argmin(errors))]
    return _solved(_moments(features, targets), best)


class _Moments(NamedTuple):
    """Means and second moments of standardised features, and of centred targets."""

    centre: np.ndarray
    scale: np.ndarray
    offset: np.ndarray
    square: np.ndarray
    cross: np.ndarray


def _moments(features: np.ndarray, targets: np.ndarray) -> _Moments:
    layers = []
    # Layer by layer: of all at once, copies in float64 would take gigabytes.
    for own, wanted in zip(features, targets, strict=True):
        x, y = own.astype(np.float64), wanted.astype(np.float64)
        centre, offset, scale = x.mean(axis=0, keepdims=True), y.mean(axis=0, keepdims=True), x.std(axis=0)[None]
        # A feature that never varies says nothing, and is left as it is.
        scale = np.where(scale > 1e-12, scale, 1.0)
        x = (x - centre) / scale
        layers.append((centre, scale, offset, x.T @ x / len(x), x.T @ (y - offset) / len(x)))
    return _Moments(*map(np.stack, zip(*layers, strict=True)))


def _solved(moments: _Moments, ridge: float) -> LinearMap:
    penalty = ridge * np.eye(moments.square.shape[-1])
    weights = np.linalg.solve(moments.square + penalty, moments.cross)
    return LinearMap(moments.centre, moments.scale, weights, moments.offset, ridge)


# ------------------------------------------------------------------------------------------------------- samples


def spread_tokens(features: Float[np.ndarray, "B T F"], count: int) -> Int[np.ndarray, "B count"]:
    """Chooses tokens that represent all: each next one is the farthest from those chosen, in cosine distance.

    The first is the token most like the mean (Gonzalez 1985, k-centre). Sorted by their place in the chunk.
    """
    unit = features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), 1e-12)
    rows = np.arange(len(unit))
    chosen = np.empty((len(unit), count), np.int64)
    chosen[:, 0] = np.einsum("btf,bf->bt", unit, unit.mean(axis=1)).argmax(axis=1)
    nearest = np.full(unit.shape[:2], -np.inf)
    for number in range(1, count):
        last = unit[rows, chosen[:, number - 1]]
        nearest = np.maximum(nearest, np.einsum("btf,bf->bt", unit, last))
        nearest[rows, chosen[:, number - 1]] = np.inf
        chosen[:, number] = nearest.argmin(axis=1)
    return np.sort(chosen, axis=1)


class KernelSettings(NamedTuple):
    """Settings of `spread_values`: how fast similarity falls off, and the noise of samples."""

    sharpness: float
    noise: float


def spread_values(
    similarity: Float[np.ndarray, "B T n"],
    among: Float[np.ndarray, "B n n"],
    values: Float[np.ndarray, "B n M"],
    settings: KernelSettings,
) -> Float[np.ndarray, "B T M"]:
    """Spreads values of sampled tokens to all by kernel regression; the kernel is exp(sharpness · (cosine − 1)).

    Args:
      similarity, among: cosines of all tokens with the samples, and of these among each other.
    """
    sharpness, noise = settings
    kernel = np.exp(sharpness * (among.astype(np.float64) - 1)) + noise * np.eye(among.shape[-1])
    return (np.exp(sharpness * (similarity - 1)) @ np.linalg.solve(kernel, values)).astype(np.float32)


def cosines(features: Float[np.ndarray, "B T F"], index: Int[np.ndarray, "B n"]) -> tuple[np.ndarray, np.ndarray]:
    """Computes cosines of all tokens with chosen ones [B,T,n], and of these among each other [B,n,n]."""
    unit = features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), 1e-12)
    chosen = np.take_along_axis(unit, index[..., None], axis=1)
    columns = np.swapaxes(chosen, 1, 2)
    return unit @ columns, chosen @ columns


def width_of(layout: kvp.KVLayout) -> int:
    """Counts the features of a token's KV in one layer, all channels."""
    return sum(channel.features for channel in layout.channels)
