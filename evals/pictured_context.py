"""One held-out context, read for the picture of the report and of the README."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models import ModelBackbone

from . import small_task
from .report.example import answer_in_words, example_figure, marks_of, question_in_words, swatches
from .rules import RULES
from .small_task import scenes


def read_example(backbone: ModelBackbone, folder: Path, seed: int, batch: int, patch: str) -> Callable[[], Path]:
    """Reads one held-out context: its images, a few questions, what re-prefill, blind reuse and a patch answer.

    `patch`: the arm that the first table shows ("patch.rank=4").

    Returns what draws the figure of it. The context is read `batch` times over, and asked as often as in the main
    comparison: by programs that are there already.
    """
    rng = np.random.default_rng([seed, 77])
    contexts = small_task.sample_contexts(rng, 1)
    questions = small_task.ask(contexts, rng, {"page": 1, "legend": 1, "chain": 3, "aggregate": 2})
    scene = scenes.load_scene(backbone, _repeated(contexts, batch), folder / "images")
    asked = _repeated(questions, batch)
    columns = np.arange(sum(RULES.questions.values())) % questions.answer.shape[1]
    asked = small_task.Questions(*(value[:, columns] for value in vars(asked).values()))
    page = scenes.reused_page(scene)
    caches = {
        "re-prefill": page.reference,
        "blind reuse": page.cache(),
        patch: page.cache(page.patch(rank=int(patch.rpartition("=")[2]))),
    }

    said = {}

    for arm, cache in caches.items():
        answers = scenes.read(scene, cache, asked, sees_legends=True)
        tokens = answers.predicted[0, : questions.answer.shape[1]]
        said[arm] = [answer_in_words(token) for token in tokens.tolist()]

    texts = []
    for kind, ask, argument in zip(questions.kind[0], questions.ask[0], questions.argument[0], strict=True):
        texts.append(f"{len(texts) + 1}  {question_in_words(int(kind), int(ask), int(argument))}")
    correct = [answer_in_words(token) for token in questions.answer[0].tolist()]
    legends, pages = small_task.render(contexts)
    path = folder / "figures" / "example.png"
    marks, colours = marks_of(contexts, questions), swatches()
    shown = list(legends[0]), pages[0]
    return functools.partial(example_figure, *shown, texts, said, path, correct, marks, colours)


def _repeated[T: (small_task.Contexts, small_task.Questions)](one: T, times: int) -> T:
    """Contexts or questions of one context as a batch of the same."""
    return dataclasses.replace(one, **{name: np.repeat(value, times, axis=0) for name, value in vars(one).items()})
