"""A shipped model on its own task, exported as a data set: the numbers of `evals.run`, so the harness adds nothing."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from evals.measure import exports, formats
from evals.measure.arms import chosen_arms
from evals.measure.frame import frame_of, speakable
from evals.measure.plan import contexts_of
from evals.measure.rows import rows_of
from evals.measure.suite import MeasureSetup, records_of
from evals.probes.comparison import read_arms
from evals.probes.results_table import ResultsTable
from evals.results.rows import Rows
from evals.sheets_task.dataset import SHEETS_DATASET
from evals.sheets_task.task import KINDS, VOCABULARY
from models import Buckets, load

SEED, COUNT = 5, 8
ARMS = {"re-prefill": "re-prefill", "blind": "blind", "patch.rank=8": "patch.every_chunk.rank=8"}
"""The same arms under the names of both."""
INSTRUCTION = "\nAnswer the question using a single word or phrase."
"""What the publishers' prompts add; the small model's vocabulary has no such words."""


@pytest.fixture(scope="module")
def path():
    return SHEETS_DATASET.instances("qwen2_5_vl")[0]


@pytest.fixture(scope="module")
def expected(path):
    """What the runner of packed tasks measures."""
    table = ResultsTable("m", metrics=("accuracy", "kl"))
    reader = SHEETS_DATASET.reader(load(path, dtype="float32"), "4", SEED, 0, COUNT)
    answers = read_arms(table, reader, list(ARMS.values()))
    (probe,) = reader.probes
    items = table.items(probe)
    items.kinds = reader.kinds
    items.add(reader.asked(probe), np.arange(COUNT), answers[probe])
    return {(row["arm"], row["metric"]): row["value"] for row in table.rows()}


def exported():
    """The same contexts and questions, drawn again, those that one answer ends."""
    spec = SHEETS_DATASET.spec
    rng = np.random.default_rng([SEED, 0, spec.sizes["4"].sheets])
    contexts = spec.sample(rng, COUNT, spec.sizes["4"])
    questions = spec.ask(contexts, rng, SHEETS_DATASET.questions)
    pages = []
    for pixels in spec.images(contexts):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        pages.append(file.getvalue())

    made, chunks = [], len(pages) // COUNT
    for context in range(COUNT):
        for number, kind in enumerate(questions.kind):
            own = questions.own == number
            ids, answer = questions.ids[context, own], questions.answer[context, own]
            if (answer >= 0).sum() != 1:
                continue
            made.append(
                exports.ExportedQuestion(
                    id=str(len(made)),
                    group=f"deck{context}",
                    pieces=tuple(pages[context * chunks : (context + 1) * chunks]),
                    question=" ".join(VOCABULARY.names[token] for token in ids),
                    answers=(VOCABULARY.names[answer[-1]],),
                    kind=KINDS[kind],
                )
            )
    return made


@pytest.mark.slow
@pytest.mark.parametrize("write", [exports.write_jsonl, exports.write_slidevqa, exports.write_mm_niah])
def test_an_exported_task_gives_the_runners_numbers_to_three_digits(path, expected, tmp_path, write):
    data = formats.read(write(tmp_path, exported()))
    kinds_of = {own.id: own.kind for own in exported()}
    bare = []
    for item in data.items:
        # MM-NIAH's kinds are its tasks.
        kind = kinds_of[item.id.rpartition("/")[2]]
        bare.append(dataclasses.replace(item, question=item.question.removesuffix(INSTRUCTION), kind=kind))
    data = dataclasses.replace(data, items=bare)
    backbone = load(path, dtype="float32", buckets=Buckets())
    frame = frame_of(backbone, "plain", "again")
    asked, refused = speakable(backbone, frame, data)
    assert not refused
    arms, _ = chosen_arms([*ARMS], backbone.layout)
    measurement = MeasureSetup(backbone, frame, arms, None, "answer")
    finished = []
    for part in contexts_of(asked):
        finished.append({"part": part.name, "records": list(records_of(measurement, part))})
    rows = Rows({"config": {"model": "m"}, "rows": rows_of(finished, "m")})

    kinds = [kind for kind in SHEETS_DATASET.questions if kind != "list"]
    assert sorted(rows.kinds("measure", "kl")) == sorted(["all", *kinds])
    for kind in kinds:
        for ours, theirs in ARMS.items():
            for metric in ("accuracy", "kl"):
                found = rows.get("measure", ours, f"{metric}.{kind}").value
                assert found == pytest.approx(expected[theirs, f"{metric}.{kind}"], abs=5e-4), (kind, ours, metric)
    assert rows.get("measure", "blind", "accuracy.chain").value < 1
