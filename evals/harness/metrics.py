"""What is measured of an arm's answers, and what an arm costs; both as rows."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax import KVLayout
from kvpatch_jax.core import deficit
from kvpatch_jax.repair import Repaired, SplicedCache, canonical_of, input_bytes, kv_bytes, reprefill_flops

from . import intervals
from .frame import Row, measured_row, rounded
from .intervals import Interval
from .methods import BLIND, REFERENCE
from .parts import Record

ANTECEDENTS = (1, 2, 4, 16)
ESTIMATING = "all that estimate"
"""The arm of rows over all arms that estimate what they leave."""
DEFICIT = "deficit"
"""The arm of records that describe the deficit itself."""
PER_KIND = ("accuracy", "difference", "kl", "flips", "within", "eta", "flip_recover", "worse", "harmful", "estimate")
"""Metrics of every kind of question: rows "<metric>.<kind>".

accuracy: share of right answers. difference: accuracy minus the reference's. kl: KL(re-prefill ‖ arm) in nats. flips:
share of answers that differ from the reference's. within: share of answers that lose at most `SMALL_LOSS`. eta:
1 − Σ KL(arm) / Σ KL(blind). flip_recover: share brought back of the decisions that blind reuse flips. worse: share of
contexts whose mean KL is above blind reuse's. harmful: the same, by more than a tenth of `SMALL_LOSS`. estimate: the
correlation of a method's own estimate of what it leaves of blind reuse's loss with what it leaves, over contexts.
"""
SMALL_LOSS = 0.05
"""Nats of an answer that hardly matter."""
DAMAGE = 1e-3
"""Nats per question that blind reuse must lose for η to mean something: below, it would be a quotient of rounding."""


def answer_record(arm: str, answers: Any, reference: Any, valid: np.ndarray) -> Record:
    """Records what an arm answered to the questions that count, in the order of [B, Q]."""
    kl = answers.divergence_from(reference)[valid]
    return {
        "arm": arm,
        "predicted": answers.predicted[valid].tolist(),
        "kl": [rounded(value) for value in kl.tolist()],
    }


def cost_shares(repaired: Repaired, backbone: Any, splice: SplicedCache) -> dict[str, float]:
    """Computes what an arm costs, as shares of the chunk's served KV bytes and of its re-prefill's FLOPs.

    Args:
      splice: that the arm was given.

    Returns:
      stored_bytes (for one antecedent), canonical_bytes, input_bytes, shared_bytes, kept.antecedents=N (all that is
      kept for each of N antecedents), moved_bytes (read for one reuse), serving_flops, forming_flops (forwards and
      factorising before the first reuse).
    """
    tokens, behind = splice.slots.shape[1], int(splice.slots[0, 0])
    forward, whole = backbone.forward_costs, kv_bytes(backbone.layout, tokens)
    prefill, alone = forward.flops(tokens, behind), forward.flops(tokens)
    size = repaired.bytes
    forming = alone * bool(size.canonical) + prefill * bool(size.stored) + repaired.forming_flops
    shares = {
        "stored_bytes": size.stored / whole,
        "canonical_bytes": size.canonical / whole,
        "input_bytes": size.inputs / whole,
        "shared_bytes": size.shared / whole,
        "moved_bytes": size.moved / whole,
        "serving_flops": repaired.flops / reprefill_flops(backbone, splice),
        "forming_flops": forming / prefill,
    }
    in_all = {f"kept.antecedents={count}": size.per_antecedent(count) / whole for count in ANTECEDENTS}
    return {**shares, **in_all}


def reference_shares(backbone: Any, splice: SplicedCache) -> dict[str, float]:
    """Computes what re-prefill costs, as `cost_shares` does: it keeps what its tokens are run from alone."""
    tokens = splice.slots.shape[1]
    inputs = input_bytes(splice) * tokens / kv_bytes(backbone.layout, tokens)
    in_all = {f"kept.antecedents={count}": inputs / count for count in ANTECEDENTS}
    nothing = dict.fromkeys(("stored_bytes", "canonical_bytes", "shared_bytes", "forming_flops"), 0.0)
    return {**nothing, "input_bytes": inputs, "moved_bytes": inputs, "serving_flops": 1.0, **in_all}


@jax.jit
def _profile(delta: Mapping[str, Array], reference: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Computes every statistic of every context's deficit, [B,L] by channel."""
    by_context = {
        "relative_norm": jax.vmap(deficit.relative_norm, in_axes=1)(delta, reference),
        "e90": jax.vmap(deficit.e90, in_axes=1)(delta),
    }
    return {**by_context, "token_share_90": jax.vmap(deficit.token_spread, in_axes=1)(delta)}


def deficit_record(splice: SplicedCache, layout: KVLayout) -> Record:
    """Records the deficit of each context by layer and channel: ‖Δ‖ / ‖canonical‖ (relative_norm), how many directions
    hold 90 % of ‖Δ‖² (e90), and the smallest share of tokens that does (token_share_90).
    """
    assert splice.recorded is not None
    canonical = canonical_of(layout, splice)
    delta = {name: jnp.asarray(splice.recorded[name], jnp.float32) - value for name, value in canonical.items()}
    profile = jax.tree.map(lambda values: np.round(np.asarray(values, float), 5).tolist(), _profile(delta, canonical))
    return {"arm": DEFICIT, "profile": profile}


class ProbeRecords:
    """The records of one probe and model, joined over batches in the order of the contexts.

    Args:
      records: as `runner.measure_batch` yields them, those of a batch together, the reference's first.
      kinds: names of the kinds of question.
      groups: kinds that are measured together, by the name that rows have; none: each by itself.
    """

    def __init__(self, records: Iterable[Record], kinds: Sequence[str], groups: Mapping[str, Sequence[str]] = {}):
        together = groups or {kind: [kind] for kind in kinds}
        self.groups = {name: [kinds.index(kind) for kind in own] for name, own in together.items()}
        self.estimates: dict[str, list[float]] = {}
        asked: dict[str, list[np.ndarray]] = {"kind": [], "cluster": [], "answer": []}
        predicted: dict[str, list[np.ndarray]] = {}
        divergence: dict[str, list[np.ndarray]] = {}
        self.costs: dict[str, dict[str, float]] = {}
        self.profiles: list[Any] = []
        batches = 0
        for record in records:
            arm = record["arm"]
            if arm == REFERENCE:
                batches += 1
                for column, values in asked.items():
                    values.append(np.asarray(record[column]))
            if "predicted" in record:
                predicted.setdefault(arm, []).append(np.asarray(record["predicted"]))
                divergence.setdefault(arm, []).append(np.asarray(record["kl"], float))
            self.estimates.setdefault(arm, []).extend(record.get("estimate", ()))
            if arm == DEFICIT:
                self.profiles.append(record["profile"])
            else:
                self.costs.setdefault(arm, record.get("costs", {}))

        # An arm that some batch lacks would be compared on other questions.
        complete = [arm for arm, values in predicted.items() if len(values) == batches]
        self.asked = {name: np.concatenate(values) for name, values in asked.items()}
        self.predicted = {arm: np.concatenate(predicted[arm]) for arm in complete}
        self.divergence = {arm: np.concatenate(divergence[arm]) for arm in complete}

    def metrics(self, arm: str, kind: str, names: Collection[str] = PER_KIND) -> dict[str, Interval]:
        """Estimates an arm's metrics over the questions of a kind; those that need blind reuse only where it is."""
        here = np.isin(self.asked["kind"], self.groups[kind])
        cluster, answer = self.asked["cluster"][here], self.asked["answer"][here]
        predicted, kl = self.predicted[arm][here], self.divergence[arm][here]
        reference = self.predicted[REFERENCE][here]
        right, expected = (predicted == answer).astype(float), (reference == answer).astype(float)
        estimates = {
            "accuracy": intervals.mean(right, cluster),
            "difference": intervals.paired_difference(right, expected, cluster),
            "kl": intervals.mean(kl, cluster),
            "flips": intervals.mean((predicted != reference).astype(float), cluster),
            "within": intervals.mean(kl <= SMALL_LOSS, cluster),
        }
        if BLIND in self.predicted and set(names) - estimates.keys():
            blind, blind_kl = self.predicted[BLIND][here], self.divergence[BLIND][here]
            harmed = len(blind_kl) > 0 and blind_kl.mean() >= DAMAGE
            eta = intervals.eta(kl, blind_kl, cluster) if harmed else intervals.UNDEFINED
            estimates["eta"] = eta._replace(n=len(kl))
            estimates["flip_recover"] = intervals.flip_recover(reference, blind, predicted, cluster)
            estimates["worse"] = _worse(kl, blind_kl, cluster)
            estimates["harmful"] = _worse(kl, blind_kl, cluster, SMALL_LOSS / 10)
            estimates["estimate"] = self._estimate([arm], here)
        return {name: interval for name, interval in estimates.items() if name in names}

    def rows(self, probe: str, model: str, names: Collection[str] = PER_KIND) -> Iterator[Row]:
        """Yields a row per kind, arm and metric, then the costs."""
        asked = set(self.asked["kind"].tolist())
        for kind, numbers in self.groups.items():
            for arm in self.predicted if asked.intersection(numbers) else ():
                for metric, interval in self.metrics(arm, kind, names).items():
                    yield measured_row(probe, model, arm, f"{metric}.{kind}", interval)
            arms = [arm for arm in self.predicted if self.estimates.get(arm)]
            if arms and "estimate" in names and asked.intersection(numbers):
                together = self._estimate(arms, np.isin(self.asked["kind"], numbers))
                yield measured_row(probe, model, ESTIMATING, f"estimate.{kind}", together)
        for arm, shares in self.costs.items():
            for metric, share in shares.items():
                yield measured_row(probe, model, arm, metric, Interval(share, share, share, 1))
        yield from self._deficit_rows(probe, model)

    def _estimate(self, arms: Sequence[str], here: np.ndarray) -> Interval:
        """Correlates methods' own estimates of the loss that they leave with what they left, over contexts, in logs."""
        clusters, first = np.unique(self.asked["cluster"], return_index=True)
        # Estimates are in the order of contexts, as their first questions are.
        order = self.asked["cluster"][np.sort(first)]
        pairs = []
        for arm in arms:
            if len(self.estimates.get(arm, ())) != len(clusters):
                continue
            left = dict(zip(order.tolist(), self.estimates[arm], strict=True))
            for cluster in np.unique(self.asked["cluster"][here]):
                own = here & (self.asked["cluster"] == cluster)
                blind = self.divergence[BLIND][own].mean()
                if blind >= DAMAGE:
                    measured = max(self.divergence[arm][own].mean() / blind, 1e-6)
                    pairs.append((np.log(max(left[cluster], 1e-9)), np.log(measured)))
        if len(pairs) < 8:
            return intervals.UNDEFINED
        value = float(np.corrcoef(np.array(pairs).T)[0, 1])
        # Fisher's transformation.
        spread = 1.96 / np.sqrt(len(pairs) - 3)
        low, high = np.tanh(np.arctanh(np.clip(value, 1e-9 - 1, 1 - 1e-9)) + np.array([-spread, spread]))
        return Interval(value, float(low), float(high), len(pairs))

    def _deficit_rows(self, probe: str, model: str) -> Iterator[Row]:
        """Yields the deficit's statistics by layer and channel, the mean over contexts."""
        for metric, channels in self.profiles[0].items() if self.profiles else ():
            for channel in channels:
                values = np.concatenate([np.asarray(profile[metric][channel]) for profile in self.profiles])
                for layer in range(values.shape[1]):
                    interval = intervals.mean(values[:, layer], np.arange(len(values)))
                    yield measured_row(probe, model, f"layer={layer}.{channel}", metric, interval)


def _worse(kl: np.ndarray, blind: np.ndarray, cluster: np.ndarray, more: float = 1e-9) -> Interval:
    """Estimates the share of contexts in which an arm's mean KL is above blind reuse's, by more than `more` nats."""
    labels, where = np.unique(cluster, return_inverse=True)
    difference = np.bincount(where, kl - blind, len(labels)) / np.bincount(where, minlength=len(labels))
    return intervals.mean(difference > more, labels)


def mean_rows(rows: Iterable[Row], models: Sequence[str]) -> list[Row]:
    """Averages rows over training seeds: low and high are the least and the largest seed, n the number of seeds.

    A statistic that a seed lacks, or that is undefined for one, has no mean.
    """
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["model"] in models and row["value"] is not None and np.isfinite(row["value"]):
            values.setdefault((row["probe"], row["arm"], row["metric"]), []).append(float(row["value"]))
    means = []
    for (probe, arm, metric), seeds in values.items():
        if len(seeds) == len(models):
            spread = Interval(float(np.mean(seeds)), min(seeds), max(seeds), len(seeds))
            means.append(measured_row(probe, "mean", arm, metric, spread))
    return means
