"""Shipped small models' own tasks as data sets: contexts and questions that `evals.run` measures, in public formats.

Where `evals.measure` measures a model on them, accuracy and KL have to be those of `evals.run`: any difference is the
harness's own. Every chunk is reused, as `evals.measure` does; so is the small task's page with its legends here, of
which `evals.run` reuses the page alone. Questions that need several tokens (the sheets task's lists) are left out.
"""

import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from models import ModelBackbone, load

from ... import small_task
from ...arms.reused_page import joined
from ...datasets import PageReader
from ...probes.comparison import read_arms
from ...probes.results_table import ResultsTable
from ...results.rows import Row
from ...runner import RunSizes
from ...scene_jobs import QUESTIONS
from ...sheets_task.dataset import SHEETS_DATASET
from ...small_task import scenes
from ...small_task.reader import SceneReader
from ...small_task.sequences import CHUNKS, context_images, form_of
from ...trained import shipped
from ..exports import ExportedQuestion

ARMS = {
    "re-prefill": "re-prefill",
    "blind": "blind",
    **{f"patch.rank={rank}": f"patch.every_chunk.rank={rank}" for rank in (8, 16, 32)},
}
"""Arms of `evals.measure`, and the same ones under the names of `evals.run`."""
_SHEETS = "4"
"""The probe of the sheets task: contexts of four chunks."""


class OwnTask(NamedTuple):
    """A task of shipped models.

    Attributes:
      path: finds an instance by name.
      questions: of one batch of contexts, by model, seed and the batch's number and size; without ids.
      reader: of `evals.run`, of the same contexts and questions.
    """

    path: Callable[[str], Path]
    questions: Callable[[ModelBackbone, int, int, int], Iterator[ExportedQuestion]]
    reader: Callable[[ModelBackbone, int, int, int], PageReader]


def exported(task: OwnTask, path: Path, sizes: RunSizes) -> list[ExportedQuestion]:
    """Draws what a run of these sizes measures; ids are numbers in order."""
    backbone, made = load(path, dtype="float32"), list[ExportedQuestion]()
    for number in range(-(-sizes.contexts // sizes.batch)):
        for question in task.questions(backbone, sizes.seed, number, sizes.batch):
            made.append(dataclasses.replace(question, id=str(len(made))))
    return made


def rows_of_run(task: OwnTask, path: Path, sizes: RunSizes) -> list[Row]:
    """Measures `ARMS` as `evals.run` does: accuracy and KL by kind of question, of its first probe."""
    backbone, table = load(path, dtype="float32"), ResultsTable(path.name, metrics=("accuracy", "kl"))
    for number in range(-(-sizes.contexts // sizes.batch)):
        reader = task.reader(backbone, sizes.seed, number, sizes.batch)
        answers, probe = read_arms(table, reader, list(ARMS.values())), reader.probes[0]
        items = table.items(probe)
        items.kinds = reader.kinds
        items.add(reader.asked(probe), number * sizes.batch + np.arange(sizes.batch), answers[probe])
    return table.rows()


def encoded(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Returns an image as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _by_context(images: Sequence[np.ndarray], chunks: int) -> list[tuple[bytes, ...]]:
    files = [encoded(image) for image in images]
    return [tuple(files[first : first + chunks]) for first in range(0, len(files), chunks)]


# ------------------------------------------------------------------------------------------------- sheets task


def _sheets_questions(backbone: ModelBackbone, seed: int, number: int, batch: int) -> Iterator[ExportedQuestion]:
    # As `PackedDataset.reader` draws them.
    spec, size = SHEETS_DATASET.spec, SHEETS_DATASET.spec.sizes[SHEETS_DATASET.probes[_SHEETS].size]
    rng = np.random.default_rng([seed, number, size.sheets])
    contexts = spec.sample(rng, batch, size)
    questions = spec.ask(contexts, rng, SHEETS_DATASET.questions)
    names, counts = spec.vocabulary.names, SHEETS_DATASET.questions
    kinds = np.repeat(list(counts), list(counts.values())).tolist()
    for context, pieces in enumerate(_by_context(spec.images(contexts), size.sheets + 1)):
        for place, kind in enumerate(kinds):
            own = questions.own == place
            answers = questions.answer[context, own]
            if (answers >= 0).sum() == 1:
                words = [names[token] for token in questions.ids[context, own]]
                group = f"context {number * batch + context}"
                yield ExportedQuestion("", group, pieces, " ".join(words), (names[answers[-1]],), kind)


def _sheets_reader(backbone: ModelBackbone, seed: int, number: int, batch: int) -> PageReader:
    return SHEETS_DATASET.reader(backbone, _SHEETS, seed, number, batch)


# -------------------------------------------------------------------------------------------------- small task


def _small_questions(backbone: ModelBackbone, seed: int, number: int, batch: int) -> Iterator[ExportedQuestion]:
    # As `scenes.scene_at` and `SceneJobs` draw them.
    rng = np.random.default_rng([seed, number])
    contexts = small_task.sample_contexts(rng, batch)
    questions = small_task.ask(contexts, rng, QUESTIONS)
    form, names = form_of(backbone.config, backbone.image_config), small_task.VOCABULARY.names
    for context, pieces in enumerate(_by_context(context_images(form, contexts, "held_out"), CHUNKS)):
        for place in np.flatnonzero(questions.valid[context]):
            ask, argument, answer = (
                names[tokens[context, place]] for tokens in (questions.ask, questions.argument, questions.answer)
            )
            kind, group = small_task.KINDS[questions.kind[context, place]], f"context {number * batch + context}"
            yield ExportedQuestion("", group, pieces, f"{ask} {argument}", (answer,), kind)


def _small_reader(backbone: ModelBackbone, seed: int, number: int, batch: int) -> PageReader:
    with tempfile.TemporaryDirectory() as images:
        scene, rng = scenes.scene_at(backbone, seed, number, Path(images), batch)
    page = scenes.reused_page(scene)
    # The legends are reused as well, as chunks in front of the page.
    page.front = joined([page.placed(place=place) for place in range(CHUNKS)])
    return SceneReader(scene, small_task.ask(scene.contexts, rng, QUESTIONS), page)


TASKS = {
    "sheets": OwnTask(lambda name: SHEETS_DATASET.instances(name)[0], _sheets_questions, _sheets_reader),
    "small": OwnTask(shipped, _small_questions, _small_reader),
}
"""Tasks of `evals.run --task`, by name."""
