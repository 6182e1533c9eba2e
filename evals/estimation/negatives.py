"""The five estimates of a deficit that Kamera rules out. Of each the paper gives a name and no definition (Table 2):

"the attention-sink prosthesis, a per-antecedent linear operator, key-similarity selection, A-side streaming, and a
shallow-seed predictor of the deep patch, all failing because the deficit's coefficients are item-specific even though
its directions are universal." Each class says how the name is read here. Axis letters: B contexts, T tokens, L layers,
F features of KV, M directions, n samples.
"""

import functools
from collections.abc import Sequence

import numpy as np

import kvpatch_jax as kvp

from ..arms.reused_page import cut, difference
from ..results.costs import NUMBER_BITS, ArmCost
from .estimate import Estimate
from .fitting import LinearMap, SharedDirections, fit_linear, width_of
from .served_chunk import Deficit, MeasuredChunk, ServedChunk, flat, host


class SinkProsthesis:
    """The deficit behind the first tokens of the sequence alone, where attention sinks are.

    A chunk that is prefilled alone has its sink in its own first tokens; behind others the sequence has it. The
    prosthesis gives the chunk the sequence's first `count` tokens and nothing else of its antecedents. Where these
    tokens are the same everywhere, it is formed once per chunk; its FLOPs are counted all the same.
    """

    def __init__(self, count: int):
        self.count = count

    def estimate(self, served: ServedChunk) -> Estimate:
        """Prefills the chunk behind the first tokens."""
        kv = served.behind_others(cut(served.front, slice(self.count)))
        costs = served.costs
        serving = costs.rotation + costs.forward.flops(costs.tokens, self.count)
        cost = ArmCost(inputs=costs.tokens, serving=serving, forming=costs.alone)
        return Estimate(host(difference(kv, served.canonical)), cost)


class AntecedentOperator:
    """A linear operator per antecedent: the canonical of a token, times a matrix of each layer, is its deficit.

    The matrices of an antecedent are fitted on `others` other chunks behind the same antecedent, here those of the
    following contexts of the batch, and applied to a chunk that they have not seen. They map to coefficients in shared
    directions, so that the estimate has a patch's rank. Forming costs the other chunks' forwards, once per antecedent.
    """

    def __init__(self, directions: SharedDirections, others: int):
        self.directions, self.others = directions, others

    def estimate(self, served: ServedChunk) -> Estimate:
        """Fits the operator of each context's antecedents, and applies it to its chunk."""
        shifts = range(1, min(self.others, served.rows - 1) + 1)
        features, targets = [], []
        for by in shifts:
            canonical = {name: np.roll(np.asarray(value), -by, axis=1) for name, value in served.canonical.items()}
            delta = host(difference(served.behind_others(served.front, by), canonical))
            features.append(flat(canonical))
            targets.append(self.directions.coefficients(delta))

        # [L, B, others · T, …]: a chunk's tokens stand together.
        x, y = np.concatenate(features, axis=2), np.concatenate(targets, axis=2)
        found = []
        for row in range(served.rows):
            found.append(fit_linear(x[:, row], y[:, row])(served.features[:, row]))
        coefficients = np.stack(found, axis=1)

        layers, width, costs = served.backbone.layout.layers, x.shape[-1], served.costs
        numbers = layers * (width + 1) * self.directions.count
        cost = ArmCost(
            stored=NUMBER_BITS * numbers,
            shared=NUMBER_BITS * self.directions.product_flops / 2,
            serving=costs.rotation + costs.tokens * (2 * numbers + self.directions.product_flops),
            forming=costs.alone + len(shifts) * costs.prefill,
        )
        return Estimate(self.directions.deficit(coefficients), cost)


class KeySimilarity:
    """The tokens of the chunk whose keys are most like a key of the antecedents, recomputed in context.

    Keys are canonical and phase-free; a token's score is its largest cosine with an antecedent's key, the mean over
    layers and heads. The rotating channels are compared; of MLA also the latent, which keys are made of.
    """

    def __init__(self, share: float):
        self.share = share

    def estimate(self, served: ServedChunk) -> Estimate:
        """Recomputes the share of tokens with the highest scores."""
        count = max(1, round(self.share * served.length))
        index = np.sort(np.argsort(-key_similarity(served), axis=1, kind="stable")[:, :count], axis=1)
        costs = served.costs
        # Scores: a product of every key with every key in front.
        width = sum(channel.features for channel in _compared(served))
        scoring = 2 * served.backbone.layout.layers * costs.tokens * costs.behind * width
        serving = costs.rotation + scoring + served.rerun_flops(index)
        cost = ArmCost(inputs=costs.tokens, serving=serving, forming=costs.alone)
        return Estimate(served.recomputed(index), cost)


def key_similarity(served: ServedChunk) -> np.ndarray:
    """Computes each token's largest cosine with a key of the antecedents, the mean over layers and heads, [B,T]."""
    layout = served.backbone.layout
    front = dict(kvp.to_phase_free(layout, dict(served.front), served.front_positions))
    scores = []
    for channel in _compared(served):
        own, other = (np.asarray(kv[channel.name], np.float32) for kv in (served.canonical, front))
        own, other = (
            value / np.maximum(np.linalg.norm(value, axis=-1, keepdims=True), 1e-12) for value in (own, other)
        )
        cosine = np.einsum("lbtkh,lbskh->lbkts", own, other, optimize=True)
        scores.append(cosine.max(axis=-1).mean(axis=(0, 2)))
    return np.mean(scores, axis=0)


def _compared(served: ServedChunk) -> list[kvp.Channel]:
    layout = served.backbone.layout
    return [channel for channel in layout.channels if channel.rotates or layout.kind == "mla"]


class AntecedentStream:
    """A state of fixed size that the antecedents leave as they stream by, read without attending to them.

    Of every layer it is the mean and the second moment of the antecedents' phase-free KV, as linear attention would
    keep. Features of a token are its canonical, the mean, and its canonical times the second moment; a map that is
    fitted on other contexts makes coefficients in shared directions of them.
    """

    def __init__(self, directions: SharedDirections, fitted: Sequence[MeasuredChunk]):
        self.directions = directions
        self.map = fit_coefficients(directions, fitted, [stream_features(own.served) for own in fitted])

    def estimate(self, served: ServedChunk) -> Estimate:
        """Reads the state by the canonical."""
        features = stream_features(served)
        costs, layout = served.costs, served.backbone.layout
        width = width_of(layout)
        state = layout.layers * (width + 1) * width
        mapped = layout.layers * features.shape[-1] * self.directions.count
        cost = ArmCost(
            stored=NUMBER_BITS * state,
            shared=NUMBER_BITS * (mapped + self.directions.product_flops / 2),
            serving=costs.rotation + costs.tokens * (2 * (state + mapped) + self.directions.product_flops),
            forming=costs.alone,
        )
        return Estimate(self.directions.deficit(self.map(features)), cost)


def stream_features(served: ServedChunk) -> np.ndarray:
    """Computes the features that `AntecedentStream` maps, [L, B, T, 3 F]."""
    layout = served.backbone.layout
    front = flat(dict(kvp.to_phase_free(layout, dict(served.front), served.front_positions)))
    mean = front.mean(axis=2, keepdims=True)
    moment = np.swapaxes(front, 2, 3) @ front / front.shape[2]
    own = served.features
    return np.concatenate([own, np.broadcast_to(mean, own.shape), own @ moment], axis=-1)


class ShallowSeed:
    """The deficit of deep layers predicted from that of the layers below `stop`, which are run in context.

    Features of a token in a deep layer are the coefficients of its deficit in all layers below `stop` and its canonical
    in that layer; the map is fitted on other contexts. The layers below keep what they were found to be.
    """

    def __init__(self, directions: SharedDirections, fitted: Sequence[MeasuredChunk], stop: int):
        self.directions, self.stop = directions, stop
        # Exact below `stop`, so that the true deficit of fitted contexts stands for a forward of these layers.
        seeds = [self._features(own.served, own.delta) for own in fitted]
        self.map = fit_coefficients(directions, fitted, seeds, start=stop)

    def _features(self, served: ServedChunk, lower: Deficit) -> np.ndarray:
        seed = self.directions.coefficients(lower)[: self.stop]
        seed = np.moveaxis(seed, 0, 2).reshape(*seed.shape[1:3], -1)
        own = served.features[self.stop :]
        return np.concatenate([np.broadcast_to(seed, (len(own), *seed.shape)), own], axis=-1)

    def estimate(self, served: ServedChunk) -> Estimate:
        """Runs the lower layers in context, and predicts the others."""
        lower = served.lower_layers(self.stop)
        features = self._features(served, lower)
        found = self.map(features)
        below = np.zeros((self.stop, *found.shape[1:]), np.float32)
        delta = self.directions.deficit(np.concatenate([below, found]))
        for name, value in delta.items():
            value[: self.stop] = lower[name][: self.stop]

        costs = served.costs
        mapped = len(features) * features.shape[-1] * self.directions.count
        forward = costs.prefill - costs.forward.flops(costs.tokens, costs.behind, self.stop)
        cost = ArmCost(
            inputs=costs.tokens,
            shared=NUMBER_BITS * (mapped + self.directions.product_flops / 2),
            serving=costs.rotation + forward + costs.tokens * (2 * mapped + self.directions.product_flops),
            forming=costs.alone,
        )
        return Estimate(delta, cost)


def fit_coefficients(
    directions: SharedDirections, fitted: Sequence[MeasuredChunk], features: Sequence[np.ndarray], start: int = 0
) -> LinearMap:
    """Fits coefficients of the true deficits of contexts, of the layers from `start` on, to features [L', B, T, P]."""
    targets = [directions.coefficients(own.delta)[start:] for own in fitted]
    join = functools.partial(np.concatenate, axis=1)
    rows = [array.reshape(len(array), -1, array.shape[-1]) for array in (join(list(features)), join(targets))]
    return fit_linear(rows[0], rows[1])
