"""Estimates of our own: coefficients in shared directions from parts of a forward, and patches of single antecedents.

Axis letters: B contexts, T tokens, L layers, F features of KV, M directions, n recomputed tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arms.reused_page import difference
from ..results.costs import NUMBER_BITS, ArmCost
from .estimate import Estimate
from .fitting import KernelSettings, SharedDirections, cosines, spread_tokens, spread_values
from .negatives import fit_coefficients
from .served_chunk import Deficit, MeasuredChunk, ServedChunk, host

SHARPNESS, NOISE = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), (1e-5, 1e-4, 0.001, 0.01, 0.1)
"""Settings of the kernel that are tried on contexts that are not measured."""


class DeepForward:
    """A forward of the layers from `start` on, in context, from the residual of the chunk alone.

    Without directions the deficit is what that forward finds ("residual" among the main job's arms). With directions it
    is projected on them; with fitted contexts, a map that was fitted on these corrects the coefficients for what the
    residual lacks. Its features are the coefficients that were found in a layer (below `start`: in layer `start`) and
    the canonical there, so the layers below get an estimate too.
    """

    def __init__(
        self, start: int, directions: SharedDirections | None = None, fitted: Sequence[MeasuredChunk] | None = None
    ):
        self.start, self.directions, self.map = start, directions, None
        if directions is not None and fitted is not None:
            features = [self._features(own.served, own.served.upper_layers(start), directions) for own in fitted]
            self.map = fit_coefficients(directions, fitted, features)

    def _features(self, served: ServedChunk, upper: Deficit, directions: SharedDirections) -> np.ndarray:
        found = directions.coefficients(upper)
        found[: self.start] = found[self.start]
        return np.concatenate([found, served.features], axis=-1)

    def estimate(self, served: ServedChunk) -> Estimate:
        """Runs the upper layers, and projects or corrects what they find."""
        upper, costs = served.upper_layers(self.start), served.costs
        serving = costs.rotation + costs.forward.flops(costs.tokens, costs.behind, self.start)
        width = served.alone.embeddings.shape[-1]
        inputs = costs.tokens * width / costs.input_width
        if self.directions is None:
            return Estimate(host(upper), ArmCost(inputs=inputs, serving=serving, forming=costs.alone))

        directions, mapped = self.directions, 0
        if self.map is None:
            coefficients = directions.coefficients(upper)
        else:
            features = self._features(served, upper, directions)
            coefficients = self.map(features)
            mapped = len(features) * features.shape[-1] * directions.count
        cost = ArmCost(
            inputs=inputs,
            shared=NUMBER_BITS * (mapped + directions.product_flops / 2),
            serving=serving + costs.tokens * (2 * mapped + 2 * directions.product_flops),
            forming=costs.alone,
        )
        return Estimate(directions.deficit(coefficients), cost)


class SingleAntecedents:
    """The sum of the deficits behind each antecedent alone, Σ Δ(B|Aᵢ): patches that were formed pair by pair.

    Args:
      rank: of each patch, truncated by its own SVD; None: whole deficits.
    """

    def __init__(self, rank: int | None = None):
        self.rank = rank

    def estimate(self, served: ServedChunk) -> Estimate:
        """Adds the deficits; each antecedent stands where it does in the whole sequence."""
        total = {name: np.zeros(value.shape, np.float32) for name, value in served.canonical.items()}
        stored, adding, layers = 0, 0, served.backbone.layout.layers
        for piece in served.pieces:
            delta = host(difference(served.behind_others(piece), served.canonical))
            for name, value in delta.items():
                matrix = value.reshape(*value.shape[:3], -1)
                T, F = matrix.shape[2:]
                rank = min(T, F)
                if self.rank is not None:
                    rank = min(self.rank, rank)
                    u, s, v = np.linalg.svd(matrix, full_matrices=False)
                    matrix = (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]
                total[name] += matrix.reshape(value.shape)
                # Whole deficits are kept and added as they are.
                stored += NUMBER_BITS * layers * (T * F if self.rank is None else rank * (T + F))
                adding += layers * T * F * (1 if self.rank is None else 2 * rank)
        costs = served.costs
        forming = costs.alone + sum(costs.forward.flops(costs.tokens, piece_length(piece)) for piece in served.pieces)
        return Estimate(total, ArmCost(stored=stored, serving=costs.rotation + adding, forming=forming))


def piece_length(piece: Mapping[str, Any]) -> int:
    """Counts the tokens of an antecedent."""
    return next(iter(piece.values())).shape[2]


class RecomputedSample:
    """Coefficients of all tokens from a few that are recomputed in context.

    The sample is spread over the chunk's canonical KV of the last layer (`spread_tokens`). Recomputed tokens keep what
    was found; the others get it by `spread`:

    * "nothing": no estimate, the sample is all (a token repair);
    * "nearest": the deficit of the sampled token whose canonical is most like theirs in that layer;
    * "kernel": a prediction from the canonical alone, fitted on other contexts, plus what the sample deviates from it,
      spread by kernel regression over cosines of the canonical, in shared directions. Sharpness and noise of the kernel
      are those that explain most of the fitted contexts' deficits.
    """

    def __init__(
        self,
        share: float,
        spread: str,
        directions: SharedDirections | None = None,
        fitted: Sequence[MeasuredChunk] = (),
    ):
        self.share, self.spread, self.directions = share, spread, directions
        if spread == "kernel":
            if directions is None or not fitted:
                raise ValueError("spread: got 'kernel' without directions and fitted contexts; expected both")
            features = [own.served.features for own in fitted]
            self.prior = fit_coefficients(directions, fitted, features)
            # The last quarter chooses the settings.
            self.settings = self._choose(directions, fitted[-max(1, len(fitted) // 4) :])

    def sample(self, served: ServedChunk) -> np.ndarray:
        """Chooses the tokens to recompute, [B,n]."""
        count = max(1, round(self.share * served.length))
        return spread_tokens(served.features[-1], count)

    def estimate(self, served: ServedChunk) -> Estimate:
        """Recomputes the sample, and spreads it."""
        index = self.sample(served)
        exact, costs = served.recomputed(index), served.costs
        layers, width = served.backbone.layout.layers, served.features.shape[-1]
        serving = costs.rotation + served.rerun_flops(index)
        # Cosines with the sample: in the last layer to choose it, in each to spread it.
        comparing = 2 * costs.tokens * index.shape[1] * width
        shared = 0.0
        if self.spread == "nothing":
            delta, serving = exact, serving + comparing
        elif self.spread == "nearest":
            delta, serving = nearest_sampled(served, exact, index), serving + (layers + 1) * comparing
        else:
            assert self.directions is not None
            directions = self.directions
            found = self._spread(served, directions.coefficients(exact), index, self.settings)
            delta = directions.deficit(found)
            mapped = layers * width * directions.count
            # The kernel's product with the samples, and the factorisation of the kernel among them.
            n = index.shape[1]
            spreading = layers * (2 * costs.tokens * n * directions.count + n**3)
            per_token = 2 * mapped + directions.product_flops
            serving += (layers + 1) * comparing + spreading + costs.tokens * per_token
            shared = NUMBER_BITS * (mapped + directions.product_flops / 2)

        rows = np.arange(len(index))[:, None]
        for name, value in delta.items():
            value[:, rows, index] = exact[name][:, rows, index]
        return Estimate(delta, ArmCost(inputs=costs.tokens, shared=shared, serving=serving, forming=costs.alone))

    def _spread(
        self, served: ServedChunk, exact: np.ndarray, index: np.ndarray, settings: KernelSettings
    ) -> np.ndarray:
        prior = self.prior(served.features)
        found = np.empty_like(prior)
        for layer, guess in enumerate(prior):
            similar, among = cosines(served.features[layer], index)
            residual = np.take_along_axis(exact[layer] - guess, index[..., None], axis=1)
            found[layer] = guess + spread_values(similar, among, residual, settings)
        return found

    def _choose(self, directions: SharedDirections, held_out: Sequence[MeasuredChunk]) -> KernelSettings:
        samples = []
        for own in held_out:
            index = self.sample(own.served)
            exact = directions.coefficients(own.served.recomputed(index))
            samples.append((own, index, exact, directions.coefficients(own.delta)))

        best, least = KernelSettings(SHARPNESS[0], NOISE[0]), np.inf
        for settings in _grid():
            error = 0.0
            for own, index, exact, truth in samples:
                error += float(np.square(self._spread(own.served, exact, index, settings) - truth).sum())
            if error < least:
                best, least = settings, error
        return best


def _grid() -> Iterator[KernelSettings]:
    for sharpness in SHARPNESS:
        for noise in NOISE:
            yield KernelSettings(sharpness, noise)


def nearest_sampled(served: ServedChunk, exact: Deficit, index: np.ndarray) -> dict[str, np.ndarray]:
    """Copies to every token the deficit of the sampled one whose canonical is most like its own, layer by layer."""
    delta = {name: np.zeros(value.shape, np.float32) for name, value in served.canonical.items()}
    rows = np.arange(len(index))[:, None]
    for layer, features in enumerate(served.features):
        nearest = cosines(features, index)[0].argmax(axis=-1)
        source = index[rows, nearest]
        for name, value in exact.items():
            delta[name][layer] = value[layer][rows, source]
    return delta
