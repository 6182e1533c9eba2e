"""The comparison of arms over one batch of a data set, and the control that belongs to the small task's."""

import fnmatch
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp

from ..arms import arm_makers, make_arms, make_query_aware, query_aware_names
from ..arms.reused_page import cut
from ..datasets import PageReader
from ..results.costs import ArmCost
from ..rules import RULES
from ..small_task import scenes
from ..small_task.reader import VISIBLE, SceneReader
from .results_table import ResultsTable


def read_arms(
    table: ResultsTable, reader: PageReader, names: Collection[str], tick: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Asks every question over every arm's cache, adds what arms cost, and returns the answers by probe and arm.

    Args:
      tick: called with an arm's name when it is done.
    """
    answers: dict[str, dict[str, Any]] = {probe: {} for probe in reader.probes}
    costs = reader.page.costs

    def record(name: str, cost: ArmCost, share: float | None, probes: Collection[str]) -> None:
        shares = costs.shares(cost)
        for probe in probes:
            table.cost(probe, name, shares, len(reader.page))
        table.cost(
            reader.probes[0], name, {"bytes": shares["stored_bytes"] if share is None else share}, len(reader.page)
        )
        tick(name)

    for name, arm in make_arms(reader.page, names):
        for probe in reader.probes:
            answers[probe][name] = reader.read(arm.cache, probe)
        record(name, arm.cost, arm.share, reader.probes)

    # Once the chunks in front have left the window, nothing is left to recompute behind: the first probe alone.
    first = reader.probes[0]
    for arm in make_query_aware(reader, [name for name in query_aware_names(reader.page.page.layout) if name in names]):
        answers[first][arm.name] = arm.answers
        record(arm.name, arm.cost, 0.0, [first])
    return answers


def all_arms(layout: kvp.KVLayout) -> list[str]:
    """Names the arms of the small task's comparison, in the order of tables, the mask's control left out."""
    makers = [name for name in arm_makers(layout) if not name.startswith("patch.every_chunk.")]
    return [*makers, *query_aware_names(layout)]


def main_arms(layout: kvp.KVLayout) -> list[str]:
    """Names those of them that a run tries unless it is asked for all."""
    names = []
    for name in all_arms(layout):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in RULES.arms.only_among_all):
            names.append(name)
    return names


def compare_repairs(
    table: ResultsTable,
    reader: SceneReader,
    clusters: np.ndarray,
    names: Collection[str],
    tick: Callable[[str], None] = lambda _: None,
) -> None:
    """Compares arms on a scene, with the legends in view and with the page alone in the window.

    Adds items "repair.visible" and "repair.evicted", costs, and a control: one forward over everything in which the
    page may not look at the legends, which must equal blind reuse.
    """
    answers = read_arms(table, reader, names, tick)

    scene, page = reader.scene, reader.page
    masked = dict(scene.backbone.prefill(page.tokens, mask=scenes.prefix_mask(scene, page_sees_legends=False)).kv)
    control = reader.read(scenes.engine(scene, masked, page.tokens))
    blind = answers[VISIBLE]["blind"]
    apart = np.abs(np.exp(control.log_probabilities) - np.exp(blind.log_probabilities)).max()
    table.largest("mask", "mask_4d", "probability_difference", float(apart), len(scene))
    of_page, canonical = cut(masked, scene.page), page.page.kv
    apart = [jnp.abs(of_page[name] - canonical[name]).max() / jnp.abs(canonical[name]).max() for name in canonical]
    table.largest("mask", "mask_4d", "kv_difference", max(map(float, apart)), len(scene))
    answers[VISIBLE]["mask_4d"] = control

    for probe in reader.probes:
        table.items(probe).add(reader.asked(probe), clusters, answers[probe])
