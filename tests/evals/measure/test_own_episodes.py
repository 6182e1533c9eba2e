"""Plain episodes, and trajectories of the sheets task: what questions need, and what reuse does to the answers."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from evals.measure import formats
from evals.measure.episodes import question_of
from evals.measure.examples import own_episodes
from evals.measure.frame import frame_of
from evals.measure.trajectories.replayed import BLIND, NEVER, REFERENCE, SESSION, EpisodeReplay
from evals.measure.trajectories.report import kind_table
from evals.sheets_task.dataset import SHEETS_DATASET
from evals.sheets_task.task import SIZES, VOCABULARY
from models import Buckets, load

COUNT, SEED = 3, 7


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return folder, own_episodes.write(folder, "qwen2_5_vl", SEED, COUNT)


def test_episodes_read_back_as_they_are_written(written):
    episodes = formats.read_episodes(written[1], keep=own_episodes.KEEP).episodes
    lines = [json.loads(line) for line in written[1].read_text().splitlines()]
    assert [own.id for own in episodes] == [line["id"] for line in lines] == ["0", "1", "2"]
    for own, line in zip(episodes, lines, strict=True):
        assert [question_of(own, step) for step in own.steps] == [step["question"] for step in line["steps"]]
        assert [step.response for step in own.steps] == [step["answer"] for step in line["steps"]]
        assert [step.kind for step in own.steps] == [step["kind"] for step in line["steps"]]
        assert own.steps[-1].left == tuple(range(3 * own_episodes.ROUNDS - own_episodes.KEEP))
        names = [Path(str(screen.content)).name for step in own.steps for screen in step.screenshots]
        assert names == [name for step in line["steps"] for name in step["images"]]
        # Later rounds bring back what had left, and the page is one and the same.
        assert len(set(names)) == 9
        assert len(set(names[2::3])) == 1


def test_answers_are_those_of_the_sheets_and_gone_is_what_a_window_lacks(written):
    """Against a table written cell by cell from the drawn meaning, and the screens that the file names."""
    size = SIZES[own_episodes.SIZE]
    contexts = SHEETS_DATASET.spec.sample(np.random.default_rng([SEED, COUNT]), COUNT, size)
    kinds = []
    for number, line in enumerate(map(json.loads, written[1].read_text().splitlines())):
        steps = line["steps"]
        # Sheets are numbered in the order in which they were first shown.
        shown, numbers, page = [], {}, steps[2]["images"][0]
        for place, step in enumerate(steps):
            [name] = step["images"]
            shown.append(-1 if name == page else numbers.setdefault(name, len(numbers)))
            word, named = step["question"].split()
            if place % 3 < 2:
                row, column = map(int, named[1:].split("c"))
                address = 8 * row + column
            else:
                shape, ink = map(int, named[1:].split("i"))
                [cell] = np.flatnonzero(contexts.page_glyph[number] == 8 * ink + shape)
                address = contexts.page_address[number][cell]
            [(sheet, entry)] = np.argwhere(contexts.sheet_address[number] == address)
            colours = contexts.sheet_fill if word == "fill?" else contexts.sheet_stripe
            assert step["answer"] == f"{word[:-1]}{colours[number][sheet, entry]}"
            assert sheet in shown
            assert (sheet not in shown[-own_episodes.KEEP :]) == (step["kind"] == own_episodes.GONE)
            kinds.append(step["kind"])
    assert {own_episodes.SHEET, own_episodes.NEAR, own_episodes.GONE} == set(kinds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"goal": None}, "goal: got neither goal nor system"),
        ({"rule": "nearly"}, "rule: got 'nearly'; expected one of "),
        ({"steps": []}, "steps: got an empty list"),
        ({"steps": ["click"]}, r"steps\[0\]: got 'click'; expected an object"),
        ({"steps": [{"screens": []}]}, r"steps\[0\].screens: got a field of this name"),
        ({"steps": [{"images": ["no.png"], "answer": "a"}]}, r"steps\[0\].images\[0\]: got 'no.png'"),
        ({"steps": [{"answer": 3}]}, r"steps\[0\].answer: got 3; expected a text"),
    ],
)
def test_an_episode_is_refused_by_its_field(tmp_path, change, message):
    whole = {"id": "a", "goal": "Find it.", "steps": [{"text": "A page.", "answer": "click"}]}
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (whole, whole | {"id": "b"} | change)))
    data = formats.read_episodes(path, "episodes")
    assert [own.id for own in data.episodes] == ["a"]
    [refusal] = data.refusals
    assert refusal.where == "own.jsonl:2"
    assert re.search(message, refusal.reason), refusal.reason


def test_kinds_have_a_column_each():
    records = []
    for step, kind in enumerate("abb"):
        for way, score in ((REFERENCE, 1.0), (SESSION, 0.0 if kind == "b" else 1.0)):
            own = {"episode": "0", "step": step, "kind": kind, "way": way}
            records.append(own | {"score": score, "kl_first": 0.25, "agrees": True, "tokens": 3})
    table = kind_table(records)
    assert table is not None
    assert table[0] == ["way", "a, 1", "b, 2"]
    assert table[1][1] == [SESSION, "1.000; 0.25", "0.000; 0.25"]
    assert kind_table([own for own in records if own["kind"] == "a"]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_patches_of_full_rank_answer_as_re_prefill_and_blind_reuse_does_not(written):
    folder, data = written
    backbone = load(folder / "model", dtype="float32", buckets=Buckets())
    episode = formats.read_episodes(data).episodes[0]
    episode = dataclasses.replace(episode, steps=episode.steps[:9])
    replay = EpisodeReplay(backbone, frame_of(backbone, "plain", ""), own_episodes.KEEP, None, 1, True, (1, 128))
    by_way = {}
    for record in replay.records(episode):
        by_way.setdefault(record["way"], []).append(record)
    assert max(own["kl_first"] for own in by_way["patch, rank 128"]) < 1e-6
    assert max(own["kl_first"] for own in by_way[BLIND]) > 1e-3
    assert len(VOCABULARY.names) == backbone.config.text.vocabulary
    # The trained model reads what is in view, and canonicals are computed once.
    in_view = [own["score"] for own in by_way[REFERENCE] if own["kind"] != own_episodes.GONE]
    assert sum(in_view) == len(in_view)
    tokens = [own["tokens"] for own in by_way[BLIND]]
    # The page again: the question, and perhaps an answer that was not shown before.
    assert tokens[5] in (2, 3)
    assert len(by_way[NEVER]) == 9
