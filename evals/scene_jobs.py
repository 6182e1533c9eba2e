"""The main job's measurements on one backbone: which probes run over which scenes, in two threads.

Compiling, drawing images and factorising keep one core busy, so that a second thread pays. Each job fills a results
table of its own; the tables are merged in one order, whichever job is done first.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from models import Buckets, ModelBackbone, load

from . import probes, small_task
from .arms import ReusedPage
from .console import Progress
from .probes.results_table import ResultsTable
from .probes.window import FULL, ProbeParts, WindowSizes, measure_window, work_of
from .rules import RULES
from .small_task import scenes
from .small_task.reader import SceneReader
from .small_task.scenes import Scene
from .trained import CONTROL, MAIN, shipped

WINDOW = "window"
SUITES = ("repair", "reorder", "slide", "recall", "deficit", "control", "seeds")
WINDOW_PROBES = ("reorder", "slide", "recall")
CONTROL_ARMS = ("re-prefill", "blind", "patch.rank=8", "patch.rank=16", "first_k.budget=0.15", "cacheblend.budget=0.15")
QUESTIONS = dict(RULES.questions)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run measures.

    Attributes:
      backbone: a shipped instance or a checkpoint directory.
      suite: the parts to run, of `SUITES` and `WINDOW`.
      seed: of the contexts.
      contexts: in the main comparison. window_contexts: in reorder, slide, recall and control.
      batch: contexts of one scene.
      arms: "main" or "all".
      window: sizes of the window's own suite.
    """

    backbone: str
    suite: tuple[str, ...]
    seed: int
    contexts: int = RULES.contexts
    window_contexts: int = RULES.window_contexts
    batch: int = RULES.batch
    arms: str = "main"
    window: WindowSizes = FULL

    @property
    def name(self) -> str:
        """The backbone's name in tables."""
        return Path(self.backbone).name

    @property
    def scenes(self) -> range:
        """Numbers of the scenes in the main comparison."""
        return range(-(-self.contexts // self.batch))

    @property
    def window_scenes(self) -> range:
        """Numbers of the scenes that the probes of windows and the control take."""
        return range(min(self.window_contexts, self.contexts) // self.batch)

    def clusters(self, scene: int) -> np.ndarray:
        """Returns the numbers of a scene's contexts."""
        return scene * self.batch + np.arange(self.batch)


def arms_of(config: RunConfig, backbone: ModelBackbone) -> list[str]:
    """Names the arms of a run's main comparison."""
    return (probes.all_arms if config.arms == "all" else probes.main_arms)(backbone.layout)


def planned_ticks(config: RunConfig, arms: int) -> dict[str, int]:
    """Counts how often each probe of a run reports progress; `arms`: how many the main comparison has."""
    batches = len(config.scenes)
    window = -(-config.window_contexts // config.batch)
    ticks = {
        "repair": batches * arms,
        "reorder": 6 * window,
        "slide": window,
        "recall": 4 * window,
        "control": window * len(CONTROL_ARMS),
        "seeds": batches * len(RULES.headline_arms) * len(other_seeds()),
        WINDOW: work_of(config.window),
    }
    return {suite: ticks[suite] for suite in config.suite if suite in ticks}


def measure(
    backbone: ModelBackbone, config: RunConfig, folder: Path, progress: Progress, parts: ProbeParts | None = None
) -> list[ResultsTable]:
    """Runs the probes of a backbone.

    Args:
      parts: of the window's suite, where an earlier run left some.

    Returns:
      The backbone's table, and those of other training seeds and of the control where they were asked for.
    """
    images, tables = folder / "images", [ResultsTable(config.name)]
    if set(config.suite) & set(SUITES):
        tables = SceneJobs(backbone, config, images, progress).run()
    if WINDOW in config.suite:
        # Windows of many sizes: padded to a few sizes, so that few programs are compiled.
        padded = load(shipped(config.backbone), dtype="float32", buckets=Buckets())
        measure_window(tables[0], padded, config.window, config.seed, images, progress, parts)
    return tables


class SceneJobs:
    """The probes over scenes as jobs of two threads.

    A job fills a table of its own; what it needs of another job it gets as an argument, so no job waits for one.
    """

    def __init__(self, backbone: ModelBackbone, config: RunConfig, images: Path, progress: Progress):
        self.backbone, self.config, self.images, self.progress = backbone, config, images, progress
        self.jobs: dict[tuple[str, int], Future[ResultsTable]] = {}
        self.pages: dict[int, ReusedPage] = {}
        self.pool = ThreadPoolExecutor(2)

    def run(self) -> list[ResultsTable]:
        """Runs all jobs; returns the backbone's table, and those of seeds and control where they were asked for."""
        config = self.config
        try:
            # Every other job is submitted by the jobs of the scenes that it needs.
            self._submit("repair", 0, self._repair)
            table = self._joined("repair", config.scenes)
            for number in config.window_scenes:
                for probe in WINDOW_PROBES:
                    table.take(self._joined(probe, [number]))

            if "deficit" in config.suite:
                table.plain += self._joined("deficit", [0]).plain
            probes.orbit_against_exact(table)
            tables = [table]
            if "seeds" in config.suite:
                tables += [self._joined(name, config.scenes) for name in other_seeds()]
            if "control" in config.suite:
                tables.append(self._joined(CONTROL, config.window_scenes))
            return tables
        finally:
            self.pool.shutdown(cancel_futures=True)

    def _submit(self, job: str, number: int, run: Callable[..., ResultsTable], *arguments: Any) -> None:
        self.jobs[job, number] = self.pool.submit(run, number, *arguments)

    def _joined(self, job: str, numbers: Sequence[int]) -> ResultsTable:
        """Waits for a job of each of the scenes, and merges their tables."""
        first, *others = (self.jobs[job, number].result() for number in numbers)
        for other in others:
            first.take(other)
        return first

    def _repair(self, number: int) -> ResultsTable:
        """Reads a scene and compares the arms over it; submits the jobs that need the scene."""
        config, table = self.config, ResultsTable(self.config.name)
        scene, rng = scenes.scene_at(self.backbone, config.seed, number, self.images, config.batch)
        page = scenes.reused_page(scene)

        if number in config.window_scenes:
            self.pages[number] = page
            for probe in WINDOW_PROBES:
                self._submit(probe, number, self._window, scene, probe)
            if "deficit" in config.suite and len(self.pages) == len(config.window_scenes):
                self._submit("deficit", 0, self._deficit)

        if number == 0:
            # Programs that all scenes run are compiled by now, so that no two threads compile the same program.
            self._submit_others()

        if "repair" in config.suite:
            reader = SceneReader(scene, small_task.ask(scene.contexts, rng, QUESTIONS), page)
            arms = arms_of(config, self.backbone)
            probes.compare_repairs(table, reader, config.clusters(number), arms, self.progress)

        return table

    def _submit_others(self) -> None:
        """Submits the other scenes, and the other instances that the run compares."""
        config = self.config
        for number in config.scenes[1:]:
            self._submit("repair", number, self._repair)
        others = {name: (config.scenes, RULES.headline_arms) for name in other_seeds() if "seeds" in config.suite}
        if "control" in config.suite:
            others[CONTROL] = (config.window_scenes, CONTROL_ARMS)

        for name, (numbers, arms) in others.items():
            backbone = sibling(self.backbone, load(shipped(name), dtype="float32"))
            for number in numbers:
                self._submit(name, number, self._other_instance, name, backbone, arms)

    def _window(self, number: int, scene: Scene, probe: str) -> ResultsTable:
        """Runs a small probe of windows over a scene."""
        config, clusters, table = self.config, self.config.clusters(number), ResultsTable(self.config.name)
        if probe not in config.suite:
            return table

        # A generator per probe, so that a probe draws the same questions whichever others are run.
        rng = np.random.default_rng([config.seed, int(clusters[0]), WINDOW_PROBES.index(probe) + 1])
        probes.measure_small(table, probe, scene, rng, clusters, self.images, self.progress)
        return table

    def _other_instance(self, number: int, name: str, other: ModelBackbone, arms: Sequence[str]) -> ResultsTable:
        """Runs the main comparison, with fewer arms, on another instance: a training seed, or the control."""
        table = ResultsTable(name)
        # In a folder of its own: the other thread may read what would be written here.
        scene, rng = scenes.scene_at(other, self.config.seed, number, self.images / name, self.config.batch)
        reader = SceneReader(scene, small_task.ask(scene.contexts, rng, QUESTIONS))
        probes.compare_repairs(table, reader, self.config.clusters(number), arms, self.progress)
        return table

    def _deficit(self, _: int) -> ResultsTable:
        """Measures the shape of the deficits of all scenes."""
        table = ResultsTable(self.config.name)
        probes.deficit_shape(table, [self.pages[number] for number in self.config.window_scenes])
        return table


def other_seeds() -> list[str]:
    """Lists the training seeds of the main instance that the headline means besides it."""
    return [name for name in RULES.headline_backbones if name != MAIN]


def sibling(backbone: ModelBackbone, other: ModelBackbone) -> ModelBackbone:
    """Returns the other backbone, run by the programs of this one where their configurations are the same."""
    return backbone.replaced(other.parameters) if other.config == backbone.config else other
