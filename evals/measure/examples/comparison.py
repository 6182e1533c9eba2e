"""A model on its own task, exported: the folder of a comparison, and the numbers of `evals.measure` and `evals.run`."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.strict_json import object_of

from ...runner import RunSizes
from .. import formats
from ..exports import ExportedQuestion, write_file, write_jsonl, write_mm_niah, write_slidevqa
from ..formats.cua_trace import OMITTED
from ..report import ANSWERS
from .own_tasks import ARMS, TASKS, exported, rows_of_run

ABOUT, DATA, MODEL, MEASURED = "about.json", "data", "model", "measured"
"""In the folder of a comparison: what was exported, the data, the model, and what `evals.measure` writes."""
METRICS = ("accuracy", "kl")


class ComparedNumber(NamedTuple):
    """One number, measured twice.

    Attributes:
      kind: of question. arm: as `evals.measure` names it. metric: one of `METRICS`. items: of both means.
      measured: by `evals.measure`. run: by `evals.run`.
    """

    kind: str
    arm: str
    metric: str
    items: int
    measured: float
    run: float


def write_trace(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes computer-use traces as AIPerf reads them: all images in a session's first request, one answer behind."""
    lines = []
    for question in questions:
        images: list[dict[str, Any]] = []
        for image in question.images:
            url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
            images.append({"type": "image_url", "image_url": {"url": url}})
        goal = {"type": "text", "text": question.question}
        gone = [{"type": "text", "text": OMITTED}] * len(images)
        said = {"role": "assistant", "content": question.answers[0]}
        for messages in (
            [{"role": "user", "content": [*images, goal]}],
            [{"role": "user", "content": [*gone, goal]}, said],
        ):
            record = {"session_id": question.id, "messages": messages, "tools": [], "output_length": 1}
            lines.append(json.dumps(record) + "\n")
    return write_file(folder / "traces.jsonl", "".join(lines).encode())


FORMATS: dict[str, Callable[[Path, Sequence[ExportedQuestion]], Path]] = {
    "jsonl": write_jsonl,
    "slidevqa": write_slidevqa,
    "mm_niah": lambda folder, questions: write_mm_niah(folder, questions, "retrieval-image"),
    "cua_trace": write_trace,
}
"""Writers by the names that `formats` has."""


def write(out: Path, task: str, model: str, name: str, sizes: RunSizes) -> Path:
    """Writes data and model; returns the data's path.

    A small model's vocabulary has no words for what a format writes around a question, such as "Answer the question
    using a single word or phrase.": the copy's tokenizer takes these texts for nothing.

    Raises:
      InputError: a folder that holds another export.
    """
    path = TASKS[task].path(model)
    questions = exported(TASKS[task], path, sizes)
    about = {"task": task, "model": model, "format": name, **sizes._asdict()}
    about["kinds"] = [question.kind for question in questions]
    write_file(out / ABOUT, json.dumps(about).encode())
    data = FORMATS[name](out / DATA, questions)

    around = dict[str, None]()
    items = formats.read(data).items
    if len(items) != len(questions):
        raise InputError(f"{data}: got {len(items)} items; expected {len(questions)}")
    for item in items:
        before, _, behind = item.question.partition(questions[_number(item.id)].question)
        around |= dict.fromkeys(text for text in (before, behind) if text)
    copy_model(path, out / MODEL, list(around))
    return data


def _number(identity: str) -> int:
    """Returns the number of a question in the id that a format makes of it."""
    return int(next(part for part in identity.split("/") if part.isdecimal()))


def copy_model(path: Path, folder: Path, nothing: Sequence[str]) -> None:
    """Copies a model; its tokenizer then takes the texts `nothing` for nothing."""
    for file in path.iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "tokenizer.json":
            write_file(folder / file.name, file.read_bytes())
    tokenizer = dict(object_of((path / "tokenizer.json").read_bytes(), "tokenizer.json", InputError))
    replaced = [{"type": "Replace", "pattern": {"String": text}, "content": ""} for text in nothing]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": replaced}
    write_file(folder / "tokenizer.json", json.dumps(tokenizer).encode())


def compared(out: Path) -> list[ComparedNumber]:
    """Computes each mean of what `evals.measure` answered in a folder, and reads `evals.run`'s of the same contexts.

    Raises:
      InputError: answers are missing.
    """
    about = json.loads((out / ABOUT).read_text())
    sizes = RunSizes(*(about[name] for name in RunSizes._fields))
    columns: dict[tuple[str, str, str], list[float]] = {}
    for line in (out / MEASURED / ANSWERS).read_text().splitlines():
        answer = json.loads(line)
        kind = about["kinds"][_number(answer["item"])]
        for metric, field in zip(METRICS, ("score", "kl"), strict=True):
            columns.setdefault((kind, answer["arm"], metric), []).append(answer[field])

    task, found = TASKS[about["task"]], []
    rows = {(row["arm"], row["metric"]): row for row in rows_of_run(task, task.path(about["model"]), sizes)}
    for kind in dict.fromkeys(about["kinds"]):
        for arm, other in ARMS.items():
            for metric in METRICS:
                values, row = columns.get((kind, arm, metric), []), rows[other, f"{metric}.{kind}"]
                if len(values) != row["n"]:
                    raise InputError(f"{out}: got {len(values)} answers of {arm} to {kind}; expected {row['n']}")
                found.append(ComparedNumber(kind, arm, metric, len(values), sum(values) / len(values), row["value"]))
    return found
