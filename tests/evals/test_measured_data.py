"""A user's records are read as released and scored as published; a bad one is refused by its line and column."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from evals.measure import fields
from evals.measure.items import Item
from evals.measure.scoring import SCORERS
from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

CLICK = '{"action_type": "click", "x": 500, "y": 500}'
SCROLL = '{"action_type": "scroll", "direction": "Up"}'
PATHS = {
    "mmlongbench_doc": "mmlongbench_doc/samples.json",
    "slidevqa": "slidevqa/annotations/test.jsonl",
    "mp_docvqa": "mp_docvqa/val.json",
    "docvqa": "docvqa/val.json",
    "hotpotqa": "hotpotqa/dev_distractor.json",
    "musique": "musique/musique_ans_dev.jsonl",
    "jsonl": "jsonl/items.jsonl",
}
"""What is read of each data set in released.tar.xz, ten items laid out as released; all were drawn for this."""


def unpack(folder: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("released.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def png() -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (96, 64), "white").save(buffer, "png")
    return buffer.getvalue()


GOOD = {"images": ["ok.png"], "question": "Q", "answer": "A"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = unpack(tmp_path_factory.mktemp("data"))
    return {name: root / path for name, path in PATHS.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "ok.png").write_bytes(png())
    return tmp_path


def lines(folder: Path, *records: object, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


@pytest.mark.parametrize("name", PATHS)
def test_a_data_set_is_recognised_read_and_scores_its_own_answers(data, name):
    read = fields.read(data[name])
    assert (read.name, read.refusals) == (name, [])
    assert len(read.items) == len({item.id for item in read.items}) == 10
    for item in read.items:
        assert item.pieces
        assert item.question
        assert SCORERS[item.scorer].score(item.answers[0], item) == 1, item


def test_a_sample_is_drawn_by_its_seed_and_the_digest_knows_questions_and_no_places(data, tmp_path):
    names = [item.id for item in fields.read(data["jsonl"], limit=3, seed=1).items]
    assert names == [item.id for item in fields.read(data["jsonl"], limit=3, seed=1).items]
    assert len(names) == 3 < len(set(names) | {item.id for item in fields.read(data["jsonl"], limit=3, seed=2).items})
    again = unpack(tmp_path) / PATHS["slidevqa"]
    assert fields.read(again).digest == fields.read(data["slidevqa"]).digest
    again.write_text(again.read_text().replace("Oslo", "Bern"))
    assert fields.read(again).digest != fields.read(data["slidevqa"]).digest


def test_an_episode_is_a_question_at_every_step_behind_what_was_shown_and_done(folder):
    steps = [{"images": ["ok.png"], "answer": f"click {number}"} for number in range(3)]
    steps.insert(1, {"images": ["ok.png"], "text": "Wait."})
    path = lines(folder, {"id": "e", "goal": "Find it.", "steps": steps})
    first, _, last = fields.read(path, keep=2).items
    assert first.question == "Goal: Find it.\nAnswer with the next action.\nNext action:"
    assert (last.id, last.cluster, last.answers) == ("e/3", "e", ("click 2",))
    shown = ["action 1", "observation 2", "screenshot 3", "action 3", "screenshot 4"]
    assert [piece.label for piece in last.pieces] == shown
    assert last.pieces[0].content == Text("Action 1: click 0\n")
    assert len(fields.read(path).items[-1].pieces) == 7


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": ["no.png"]}, "images[0]: got 'no.png', which is no file; expected it in"),
        ({"images": ["broken.png"]}, "images[0]: broken.png: got no image that can be read"),
        ({"images": ["../secret.png"]}, "images[0]: got '../secret.png'; expected a name below the data's folder"),
        ({"images": []}, "images: got no images and no texts; expected at least one"),
        ({"question": " "}, "question: got ' '; expected a text"),
        ({"options": ["x", "y"], "answer": "C"}, "answer: got 'C'; expected one of the letters A, B"),
        ({"answr": "A"}, "answr: got a column of this name; expected one of id"),
        ({"id": "first"}, "id: got 'first', as d.jsonl:1 has; expected another"),
    ],
)
def test_a_record_is_refused_by_its_column_and_the_rest_goes_on(folder, change, reason):
    (folder / "broken.png").write_bytes(b"no image")
    path = lines(folder, GOOD | {"id": "first"}, GOOD | change, "{", GOOD)
    read = fields.read(path)
    assert [item.where for item in read.items] == ["d.jsonl:1", "d.jsonl:4"]
    assert [refusal.where for refusal in read.refusals] == ["d.jsonl:2", "d.jsonl:3"]
    assert read.refusals[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.jsonl", "", "of which no record can be read"),
        ("d.jsonl", '{"a": 1, "a": 2}', "line: got a name is there twice"),
        ("d.parquet", "PAR1 and no more", "got damaged Parquet"),
        ("d.jsonl", '{"who": 1}', "which fit none of the maps docvqa"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, content, reason):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=reason):
        fields.read(tmp_path / name)


@pytest.mark.parametrize(
    ("scorer", "prediction", "answers", "expected"),
    [
        ("exact_match", "The  Oslo.", ("oslo",), 1),
        ("token_f1", "the city of Oslo", ("Oslo city",), 2 * (2 / 3) / (2 / 3 + 1)),
        ("token_f1", "", ("the",), 1),
        ("token_f1", "Bern", ("Oslo", "Bern"), 1),
        ("anls", "osl0", ("Oslo",), 0.75),
        ("anls", "abcd", ("abxy",), 0.5),
        ("anls", "Bergen", ("Oslo",), 0),
        *(("choice", text, ("B",), 1) for text in ("B", "(B) green", "B. green", "The answer is B.", "It is green.")),
        *(("choice", text, ("B",), 0) for text in ("A", "red or green", "", "E")),
        ("choice", "A green one", ("B",), 1),
        ("action", '{"action_type": "click", "x": 500, "y": 620}', (CLICK,), 1),
        ("action", '{"action_type": "click", "x": 500, "y": 680}', (CLICK,), 0),
        ("action", '{"action_type": "long_press", "x": 500, "y": 500}', (CLICK,), 0),
        ("action", '{"action_type": "click"}', (CLICK,), 0),
        ("action", '```json\n{"action_type": "scroll", "direction": "up"}\n```', (SCROLL,), 1),
        ("action", '{"action_type": "scroll", "direction": "left"}', (SCROLL,), 0),
        ("action", '{"action_type": "type", "text": "oslo"}', ('{"action_type": "type", "text": "Oslo weather"}',), 1),
        ("action", '{"name": "open", "arguments": {"tab": 2}}', ('{"name": "open", "arguments": {"tab": 3}}',), 0),
        ("action", "press back", ("Press back",), 1),
        ("action", "no action", ('{"action_type": "wait"}',), 0),
    ],
)
def test_an_answer_scores_what_its_publisher_says(scorer, prediction, answers, expected):
    options = ("red", "green", "blue", "grey") if scorer == "choice" else ()
    item = Item("1", "1", (), "Q", answers, scorer, options=options)
    assert SCORERS[scorer].score(prediction, item) == pytest.approx(expected)
