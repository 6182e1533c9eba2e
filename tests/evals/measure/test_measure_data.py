"""Data sets by field maps: every one that ships is read as released; what is wrong is a line, and the rest goes on."""

import gzip
import json
from pathlib import Path

import pytest

from evals.measure import fields
from evals.measure.fields import split_text
from evals.measure.scoring import SCORERS
from kvpatch_jax import Text, Video
from kvpatch_jax.errors import InputError
from tests.evals.measure.released import COLOURS, PATHS, png, unpack

ITEMS = {"mm_niah": 60, "gui_odyssey": 40, "android_control": 40, "osworld": 40}
GOOD = {"images": ["ok.png"], "question": "Q", "answer": "A"}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = unpack(tmp_path_factory.mktemp("data"))
    return {name: root / path for name, path in PATHS.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "ok.png").write_bytes(png(["ok"]))
    return tmp_path


def lines(folder: Path, *records: object, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


@pytest.mark.parametrize("name", PATHS)
def test_a_data_set_is_recognised_read_and_scores_its_own_answers(data, name):
    read = fields.read(data[name])
    assert (read.name, read.refusals) == (name, [])
    assert len(read.items) == len({item.id for item in read.items}) == ITEMS.get(name, 10)
    for item in read.items:
        assert item.pieces
        assert item.question
        assert SCORERS[item.scorer].score(item.answers[0], item) == 1, item


def test_texts_are_divided_at_images_and_options_are_lettered(data):
    items = {item.id: item for item in fields.read(data["mm_niah"]).items}
    text, choice = items["retrieval-text/0"], items["retrieval-image/1"]
    assert [piece.label for piece in text.pieces] == ["text 1", "image 1", "text 2", "image 2", "text 3"]
    assert text.pieces[2].content == "It met calm seas.\n"
    assert (text.answers, text.scorer, text.kind) == (("Oslo",), "exact_match", "retrieval-text")
    assert choice.question.splitlines()[:3] == ["What colour has the first bar?", "A. red", "B. green"]
    assert (choice.answers, choice.options, choice.scorer) == (("B",), COLOURS, "choice")


def test_images_of_a_question_and_of_options_stand_in_front_of_it(tmp_path):
    for name in ("a.png", "q.png", "x.png", "y.png"):
        (tmp_path / name).write_bytes(png([name]))
    record = {"id": 1, "images_list": ["a.png", "q.png"], "context": "So <image>.", "question": "Is <image> it?"}
    record |= {"answer": 1, "meta": {"choices": None, "choices_image_path": ["x.png", "y.png"]}}
    (item,) = fields.read(lines(tmp_path, record)).items
    assert [piece.label for piece in item.pieces] == ["text 1", "image 1", "text 2", "image 2", "option A", "option B"]
    assert item.question.splitlines()[:2] == ["Is (image 2) it?", "A. (image of option A)"]
    assert item.answers == ("B",)


def test_pages_cluster_by_document_and_frames_come_in_order(data):
    first, second = fields.read(data["mmlongbench_doc"]).items[:2]
    assert first.cluster == second.cluster == "doc0.pdf"
    assert first.pieces == second.pieces
    (piece,) = fields.read(data["video_mme"]).items[0].pieces
    assert isinstance(piece.content, Video)
    assert [path.stem for path in piece.content.source] == [f"frame_{number}" for number in range(1, 13)]


def test_a_sample_is_drawn_by_its_seed_and_the_digest_knows_questions_and_no_places(data, tmp_path):
    names = [item.id for item in fields.read(data["jsonl"], limit=3, seed=1).items]
    assert names == [item.id for item in fields.read(data["jsonl"], limit=3, seed=1).items]
    assert len(names) == 3 < len(set(names) | {item.id for item in fields.read(data["jsonl"], limit=3, seed=2).items})
    again = unpack(tmp_path) / PATHS["slidevqa"]
    assert fields.read(again).digest == fields.read(data["slidevqa"]).digest
    again.write_text(again.read_text().replace("Oslo", "Bern"))
    assert fields.read(again).digest != fields.read(data["slidevqa"]).digest


def test_a_map_of_ones_own_reads_parquet(folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = {"bytes": png(["page"]), "path": None}
    table = arrow.Table.from_pylist([{"nr": 7, "scan_1": image, "scan_2": image, "ask": "Q?", "right": ["a", "b"]}])
    parquet.write_table(table, folder / "d.parquet")
    with pytest.raises(InputError, match=r"d.parquet\[0\]: got columns nr, scan_1, scan_2, ask, right, which fit none"):
        fields.read(folder / "d.parquet")
    mine = 'about = "mine"\npiece = "A scan."\nhas = ["nr"]\nid = "{nr}"\nquestion = ["{ask}"]\nanswers = ["right"]\n'
    (folder / "mine.toml").write_text(mine + 'scorer = "anls"\n[[sources]]\nmedia = ["scan_*"]\nlabel = "scan"\n')
    (item,) = fields.read(folder / "d.parquet", str(folder / "mine.toml")).items
    assert (item.id, item.question, item.answers, item.scorer) == ("7", "Q?", ("a", "b"), "anls")
    assert [piece.label for piece in item.pieces] == ["scan 1", "scan 2"]


def test_a_pdf_is_its_pages_and_a_bare_folder_needs_no_questions(folder):
    pdfium = pytest.importorskip("pypdfium2")
    document = pdfium.PdfDocument.new()
    for _ in range(2):
        document.new_page(100, 100)
    document.save(folder / "two.pdf")
    loose, paged = fields.read(folder).items
    assert [piece.label for piece in paged.pieces] == ["image 1", "image 2"]
    assert (loose.pieces[0].content, loose.answers) == (folder / "ok.png", ())


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


def test_a_damaged_tfrecord_ends_with_a_line(data, tmp_path):
    content = gzip.decompress(data["android_control"].read_bytes())
    (tmp_path / "a-00000-of-00001").write_bytes(gzip.compress(content[:-40]))
    read = fields.read(tmp_path / "a-00000-of-00001")
    assert 0 < len(read.items) < 40
    assert "got a file that ends inside the record" in read.refusals[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": ["no.png"]}, "images[0]: got 'no.png', which is no file; expected it in"),
        ({"images": ["broken.png"]}, "images[0]: broken.png: got a file that Pillow does not know"),
        ({"images": ["../secret.png"]}, "images[0]: got '../secret.png'; expected a name below the data's folder"),
        ({"images": ["/etc/passwd"]}, "images[0]: got '/etc/passwd'; expected a name below the data's folder"),
        ({"images": ["https://example.org/a.png"]}, "images[0]: got the address 'https://example.org/a.png'"),
        ({"images": [3]}, "images[0]: got 3; expected a file's name"),
        ({"images": []}, "images: got no images and no texts; expected at least one"),
        ({"texts": [""]}, "texts[0]: got ''; expected a text"),
        ({"texts": 3}, "record: got 'int' object is not iterable; expected columns of the kinds that"),
        ({"pieces": [{"page": 1}]}, "pieces[0]: got {'page': 1}; expected a text or an image"),
        ({"question": " "}, "question: got ' '; expected a text"),
        ({"answer": True}, "answer: got True; expected a text or a number"),
        ({"options": ["x", "y"], "answer": "C"}, "answer: got 'C'; expected one of the letters A, B"),
        ({"scorer": "best"}, "scorer: got 'best'; expected one of exact_match"),
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
        ("none.jsonl", None, "which is not there"),
        ("d.jsonl", "", "of which no record can be read"),
        ("d.jsonl", '{"a": 1, "a": 2}', "line: got a name is there twice"),
        ("d.json", "[1", "expected JSON in UTF-8"),
        ("d.tsv", "a\ta\n1\t2\n", "expected distinct names"),
        ("d.parquet", "PAR1 and no more", "got damaged Parquet"),
        ("d.jsonl", '{"who": 1}', "which fit none of the maps android_control"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, content, reason):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=reason):
        fields.read(tmp_path / name)


def test_pieces_of_a_text_join_to_it_and_end_at_borders():
    text = "One two. Three four.\n\nFive six seven.\nEight.\n\n" + "x" * 25
    pieces = split_text(text, 20)
    assert "".join(pieces) == text
    assert pieces[:2] == ["One two. ", "Three four.\n"]
    assert max(map(len, pieces)) <= 20
