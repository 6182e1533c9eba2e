"""The main comparison: the page reused behind legends, by every arm, read with and without the legends in view."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.repair import REPAIRS, cacheblend, check_by_layer

from ..results.costs import ArmCost
from ..rules import RULES
from ..small_task import KINDS, Questions, scenes
from ..small_task.scenes import KV
from .by_question import by_question, question_arms
from .other_ways import Workshop, other_ways, residual_layers
from .repair import PageReuse, patch_arms, patch_names, token_arms, token_names
from .results_table import ResultsTable

SETTINGS = {"repair.visible": True, "repair.evicted": False}


class Arm(NamedTuple):
    """One way of reuse, made: its name, what it costs, its bytes as a share of the page's KV, the prefix's cache."""

    name: str
    cost: ArmCost
    share: float
    cache: KV


def made_arms(reuse: PageReuse, arms: Iterable[str] | None = None) -> Iterator[Arm]:
    """Makes the arms asked for (all for None)."""
    wanted, costs = lambda name: arms is None or name in arms, reuse.costs
    if wanted("re-prefill"):
        yield Arm("re-prefill", costs.of_reprefill(), 1.0, reuse.engine)
    if wanted("blind"):
        yield Arm("blind", costs.of_blind(), 0.0, reuse.cache())
    for name, patch in patch_arms(reuse, wanted):
        if wanted(name):
            yield Arm(name, costs.of_patch(patch), patch.nbytes / reuse.page.nbytes, reuse.cache(patch))

    splice, backbone, checked = reuse.splice(), reuse.scene.backbone, None
    for name, method, count in token_arms(reuse):
        if wanted(name):
            if method == "cacheblend":
                # What the check finds does not depend on the budget.
                checked = check_by_layer(backbone, splice) if checked is None else checked
                repaired = cacheblend(backbone, splice, count, checked=checked)
            else:
                repaired = REPAIRS[method](backbone, splice, count)
            # Which tokens come first is known ahead; other choices may fall on any.
            inputs = count if method == "first_k" else None
            cost = costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots), inputs)
            yield Arm(name, cost, count / reuse.page.tokens, dict(repaired.cache))

    layers = [layer for layer in residual_layers(reuse.page.layout) if wanted(f"residual.layer={layer}")]
    shop = Workshop(reuse, layers)
    for name, make in other_ways(reuse.page.layout).items():
        if wanted(name):
            cost, cache = make(shop)
            yield Arm(name, cost, costs.shares(cost)["stored_bytes"], cache)


def all_arms(layout: kvp.KVLayout) -> list[str]:
    """Names the arms of the main comparison, in the order of tables, the mask's control left out."""
    return ["re-prefill", "blind", *patch_names(layout), *token_names(), *other_ways(layout), *question_arms()]


def main_arms(layout: kvp.KVLayout) -> list[str]:
    """Names those of them that a run tries unless it is asked for all."""
    dear = RULES.arms.only_among_all
    return [name for name in all_arms(layout) if not any(fnmatch.fnmatchcase(name, pattern) for pattern in dear)]


def compare_repairs(
    table: ResultsTable,
    reuse: PageReuse,
    questions: Questions,
    clusters: np.ndarray,
    tick: Callable[[str], None] = lambda _: None,
    arms: Iterable[str] | None = None,
) -> None:
    """Asks every question over every arm's cache, with the legends in view and with the page alone in the window.

    Adds items "repair.visible" and "repair.evicted", each arm's bytes, and the control of `_mask_control`. `tick` is
    called with an arm's name when it is done.
    """
    scene = reuse.scene
    answers: dict[str, dict[str, scenes.Answers]] = {probe: {} for probe in SETTINGS}
    known = {row["arm"] for row in table.plain if row["metric"] == "stored_bytes"}

    def note(name: str, cost: ArmCost, share: float, probes: Iterable[str] = SETTINGS) -> None:
        # Every batch has the same shapes: the first one says what an arm takes.
        for probe in () if name in known else probes:
            for metric, value in reuse.costs.shares(cost).items():
                table.value(probe, name, metric, value, len(scene))
        if name not in known:
            table.value("repair.visible", name, "bytes", share, len(scene))
        tick(name)

    for name, cost, share, cache in made_arms(reuse, arms):
        for probe, sees in SETTINGS.items():
            answers[probe][name] = scenes.read(scene, cache, questions, sees_legends=sees)
        note(name, cost, share)
    wanted = lambda name: arms is None or name in arms
    for name, (cost, said) in by_question(reuse, questions, wanted):
        answers["repair.visible"][name] = said
        note(name, cost, 0.0, ["repair.visible"])

    answers["repair.visible"]["mask_4d"] = _mask_control(table, reuse, questions, answers["repair.visible"]["blind"])
    for probe in SETTINGS:
        table.items(probe).add(_askable(questions, probe), clusters, answers[probe])


def _askable(questions: Questions, probe: str) -> Questions:
    """Questions about a legend make no sense once the legends have left the window."""
    if SETTINGS[probe]:
        return questions
    return dataclasses.replace(questions, valid=questions.valid & (questions.kind != KINDS.index("legend")))


def _mask_control(table: ResultsTable, reuse: PageReuse, questions: Questions, blind: scenes.Answers) -> scenes.Answers:
    """One forward over everything in which the page may not look at the legends; must equal blind reuse."""
    scene = reuse.scene
    mask = scenes.prefix_mask(scene, page_sees_legends=False)
    masked = scene.backbone.prefill(reuse.tokens, mask=mask).kv
    answers = scenes.read(scene, scenes.engine(scene, masked, reuse.tokens), questions, sees_legends=True)
    apart = np.abs(np.exp(answers.log_probabilities) - np.exp(blind.log_probabilities)).max()
    table.largest("mask", "mask_4d", "probability_difference", float(apart), len(scene))

    page, canonical = scenes.cut(masked, scene.page), reuse.page.kv
    apart = [jnp.abs(page[name] - canonical[name]).max() / jnp.abs(canonical[name]).max() for name in canonical]
    table.largest("mask", "mask_4d", "kv_difference", max(map(float, apart)), len(scene))
    return answers
