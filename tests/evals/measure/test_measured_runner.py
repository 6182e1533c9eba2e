"""A shipped model on its own task, written as a data set: the numbers of `evals.run`, so the harness adds nothing."""

import json

import numpy as np
import pytest
from PIL import Image

from evals.harness.frame import Rows
from evals.measure import formats
from evals.measure.arms import chosen_arms
from evals.measure.frame import frame_of, speakable
from evals.measure.plan import contexts_of
from evals.measure.rows import rows_of
from evals.measure.suite import MeasureSetup, records_of
from evals.probes.comparison import read_arms
from evals.probes.results_table import ResultsTable
from evals.sheets_task.dataset import SHEETS_DATASET
from evals.sheets_task.task import KINDS, VOCABULARY
from models import Buckets, load

SEED, COUNT = 5, 8
ARMS = {"re-prefill": "re-prefill", "blind": "blind", "patch.rank=8": "patch.every_chunk.rank=8"}
"""The same arms under the names of both."""


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


def written(folder):
    """Writes the same contexts and questions, drawn again: those that one answer ends."""
    spec = SHEETS_DATASET.spec
    rng = np.random.default_rng([SEED, 0, spec.sizes["4"].sheets])
    contexts = spec.sample(rng, COUNT, spec.sizes["4"])
    questions = spec.ask(contexts, rng, SHEETS_DATASET.questions)
    images = spec.images(contexts)
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(folder / f"{number}.png")

    lines, chunks = [], len(images) // COUNT
    for context in range(COUNT):
        names = [f"{number}.png" for number in range(context * chunks, (context + 1) * chunks)]
        for number, kind in enumerate(questions.kind):
            own = questions.own == number
            ids, answer = questions.ids[context, own], questions.answer[context, own]
            if (answer >= 0).sum() != 1:
                continue
            asked = " ".join(VOCABULARY.names[token] for token in ids)
            record = {"id": str(len(lines)), "cluster": f"c{context}", "kind": KINDS[kind], "images": names}
            lines.append(json.dumps(record | {"question": asked, "answer": VOCABULARY.names[answer[-1]]}))
    path = folder / "items.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_a_written_task_gives_the_runners_numbers_to_three_digits(path, expected, tmp_path):
    data = formats.read(written(tmp_path))
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
