"""What an estimator is: it makes a deficit of a served chunk, and says what that costs. The oracles are apart."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..results.costs import NUMBER_BITS, ArmCost
from .fitting import SharedDirections
from .served_chunk import Deficit, MeasuredChunk, ServedChunk


class Estimate(NamedTuple):
    """An estimated deficit, and what the estimate costs."""

    delta: Deficit
    cost: ArmCost


class Estimator(Protocol):
    """Estimates deficits without the conditioned forward."""

    def estimate(self, served: ServedChunk) -> Estimate:
        """Estimates the deficit of a batch of served chunks."""
        ...


class FirstTokens:
    """The first tokens recomputed in context (first-k), as many as cost no more FLOPs than are given."""

    def __init__(self, flops: float | int):
        self.flops = flops

    def count(self, served: ServedChunk) -> int:
        """Finds how many tokens that is."""
        allowed = self.flops - served.costs.rotation
        low, high = 0, served.length
        while low < high:
            middle = (low + high + 1) // 2
            fits = served.rerun_flops(np.arange(middle)[None]) <= allowed
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def estimate(self, served: ServedChunk) -> Estimate:
        """Recomputes them; of no tokens the estimate is 0."""
        count = self.count(served)
        if count == 0:
            nothing = {name: np.zeros(value.shape, np.float32) for name, value in served.canonical.items()}
            return Estimate(nothing, served.costs.of_blind())
        index = np.broadcast_to(np.arange(count), (served.rows, count))
        serving = served.costs.rotation + served.rerun_flops(index)
        cost = ArmCost(inputs=count, serving=serving, forming=served.costs.alone)
        return Estimate(served.recomputed(index), cost)


def oracle_patch(measured: MeasuredChunk, rank: int) -> Estimate:
    """Truncates the true deficit to its best `rank` directions in each channel, layer and context: a fresh patch."""
    delta, stored, adding = {}, 0, 0
    costs = measured.served.costs
    for name, value in measured.delta.items():
        matrix = value.reshape(*value.shape[:3], -1)
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        own = min(rank, s.shape[-1])
        delta[name] = ((u[..., :own] * s[..., None, :own]) @ v[..., :own, :]).reshape(value.shape)
        stored += NUMBER_BITS * len(value) * own * sum(matrix.shape[2:])
        adding += 2 * len(value) * own * matrix.shape[2] * matrix.shape[3]
    forming = costs.alone + costs.prefill + costs.factorising()
    return Estimate(delta, ArmCost(stored=stored, serving=costs.rotation + adding, forming=forming))


def oracle_in_directions(measured: MeasuredChunk, directions: SharedDirections) -> Estimate:
    """Projects the true deficit on shared directions: what an estimate of coefficients could reach at most."""
    costs, layers = measured.served.costs, measured.served.backbone.layout.layers
    adding = costs.tokens * directions.product_flops
    cost = ArmCost(
        stored=NUMBER_BITS * layers * costs.tokens * directions.count,
        shared=NUMBER_BITS * directions.product_flops / 2,
        serving=costs.rotation + adding,
        forming=costs.alone + costs.prefill + adding,
    )
    return Estimate(directions.deficit(directions.coefficients(measured.delta)), cost)


def explained(estimates: Sequence[Deficit], truths: Sequence[Deficit]) -> tuple[np.ndarray, np.ndarray]:
    """Computes ‖Δ − Δ̂‖² and ‖Δ‖² of every context, [contexts] each."""
    error, whole = [], []
    for found, true in zip(estimates, truths, strict=True):
        error.append(sum(np.square(true[name] - found[name], dtype=np.float64).sum(axis=(0, 2, 3, 4)) for name in true))
        whole.append(sum(np.square(true[name], dtype=np.float64).sum(axis=(0, 2, 3, 4)) for name in true))
    return np.concatenate(error), np.concatenate(whole)
