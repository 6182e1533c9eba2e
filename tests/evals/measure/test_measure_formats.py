"""Readers of data sets' formats, each on ten items that are laid out as its release has them."""

import base64
import gc
import gzip
import io
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evals.measure import formats
from evals.measure.items import StoredImage
from kvpatch_jax import Text, Video
from tests.evals.measure.released import COLOURS, PATHS, png, released, unpack

ITEMS = dict.fromkeys(PATHS, 10)
ITEMS |= {"mm_niah": 60, "gui_odyssey": 40, "android_control": 40, "cua_trace": 40, "osworld": 40}
PIECES = {
    "mm_niah": 5, "mmlongbench_doc": 3, "slidevqa": 3, "mp_docvqa": 3, "docvqa": 1, "video_mme": 1, "vlmeval_tsv": 1,
    "hotpotqa": 3, "musique": 3, "gui_odyssey": 1, "android_control": 1, "cua_trace": 2, "osworld": 1, "jsonl": 2,
}  # fmt: skip
"""Of the first item."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    root = unpack(tmp_path_factory.mktemp("data"))
    return {name: root / path for name, path in PATHS.items()}


def pixels(content: object) -> np.ndarray:
    source = io.BytesIO(content.read()) if isinstance(content, StoredImage) else content
    with Image.open(source) as image:  # pyright: ignore[reportArgumentType]
        return np.asarray(image.convert("RGB"))


def slides(data: dict[str, Path], document: int) -> list[np.ndarray]:
    """The pages of a document, which several formats have."""
    folder = data["slidevqa"].parents[1] / "images" / "test" / f"doc{document}"
    return [drawn((folder / f"slide-{number}-1024.png").read_bytes()) for number in (1, 2, 3)]


def drawn(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("name", PATHS)
def test_a_format_is_recognised_by_its_fields_and_read_whole(data, name):
    found = formats.read(data[name])
    assert found.format == name
    assert not found.refusals
    assert len(found.items) == ITEMS[name]
    assert len({item.id for item in found.items}) == len(found.items)
    assert len(found.items[0].pieces) == PIECES[name]
    assert all(item.rule in formats.RULES and item.answers and item.question and item.where for item in found.items)
    assert found.chunk_rule == formats.READERS[name].chunk_rule


@pytest.mark.parametrize("name", PATHS)
def test_the_recorded_answer_scores_one(data, name):
    for item in formats.read(data[name]).items:
        assert formats.RULES[item.rule].score(item.answers[0], item) == 1, item


def test_the_digest_changes_with_a_question_and_not_with_the_place(data, tmp_path):
    again = released(tmp_path, "slidevqa")
    assert formats.read(again).digest == formats.read(data["slidevqa"]).digest
    again.write_text(again.read_text().replace("Oslo", "Bern"))
    assert formats.read(again).digest != formats.read(data["slidevqa"]).digest


def test_the_limit_ends_reading(data):
    assert [item.id for item in formats.read(data["jsonl"], limit=3).items] == ["q0", "q1", "q2"]
    assert len(formats.read_episodes(data["android_control"], limit=2).episodes) == 2


def test_mm_niah_divides_contexts_at_images_and_has_three_kinds_of_answers(data):
    items = {item.id: item for item in formats.read(data["mm_niah"]).items}
    text = items["retrieval-text/0"]
    contents: list[Any] = [piece.content for piece in text.pieces]
    shown = [str(content) if isinstance(content, Text) else content.name for content in contents]
    images = [f"retrieval-text_0_{place}.png" for place in (0, 1)]
    assert shown == ["The ship left Oslo at dawn.\n\n", images[0], "It met calm seas.\n", images[1], "It came home."]
    assert text.question == ("Where did the ship leave from?\nAnswer the question using a single word or phrase.")
    assert (text.answers, text.kind, text.answer_format) == (("Oslo",), "retrieval-text", "text")

    choice = items["retrieval-image/1"]
    assert choice.question == (
        "What colour has the first bar?\nA. red\nB. green\nC. blue\nD. orange\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert (choice.answers, choice.options, choice.answer_format) == (("B",), COLOURS, "choice")
    assert (items["counting-text/3"].answers, items["counting-text/3"].answer_format) == (("[1, 1]",), "list")


def test_images_of_mm_niahs_question_and_options_stand_in_front_of_it(tmp_path):
    for name in ("a.png", "q.png", "x.png", "y.png"):
        (tmp_path / name).write_bytes(png([name]))
    meta = {"choices": None, "choices_image_path": ["x.png", "y.png"]}
    record = {"id": 1, "images_list": ["a.png", "q.png"], "context": "So <image>.", "question": "Is <image> it?"}
    (tmp_path / "reasoning-image.jsonl").write_text(json.dumps(record | {"answer": 1, "meta": meta}))
    (item,) = formats.read(tmp_path / "reasoning-image.jsonl").items
    labels = ["text 1", "image 1", "text 2", "image 2", "option A", "option B"]
    assert [piece.label for piece in item.pieces] == labels
    assert item.question.splitlines()[:3] == ["Is (image 2) it?", "A. (image of option A)", "B. (image of option B)"]
    assert item.answers == ("B",)


def test_pages_are_clustered_by_their_document_and_drawn_as_written(data):
    for name, field in (("mmlongbench_doc", "doc0.pdf"), ("slidevqa", "doc0"), ("mp_docvqa", "doc0")):
        first, second = formats.read(data[name]).items[:2]
        assert first.cluster == second.cluster == field
        for piece, page in zip(first.pieces, slides(data, 0), strict=True):
            np.testing.assert_array_equal(pixels(piece.content), page)
    formats_of = [item.answer_format for item in formats.read(data["mmlongbench_doc"]).items[:2]]
    assert formats_of == ["Str", "Int"]


def test_frames_come_in_the_order_of_their_numbers(data):
    (piece,) = formats.read(data["video_mme"], frames=4).items[0].pieces
    assert isinstance(piece.content, Video)
    assert [path.stem for path in piece.content.source] == [f"frame_{number}" for number in range(1, 13)]
    assert (piece.content.frames, piece.content.rate) == (4, 1)
    assert piece.content.read().source.shape == (12, 64, 96, 3)


def test_a_video_file_is_taken_in_place_of_frames(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v.mp4").write_bytes(b"not looked at")
    record = {"videoID": "v", "question_id": "1-1", "question": "Q?", "options": ["A. x", "B. y"], "answer": "B"}
    (tmp_path / "test.jsonl").write_text(json.dumps(record))
    (item,) = formats.read(tmp_path / "test.jsonl").items
    assert isinstance(item.pieces[0].content, Video)
    assert item.pieces[0].content.source == tmp_path / "data" / "v.mp4"
    assert item.options == ("x", "y")
    assert "\nA. x\nB. y\nThe best answer is:" in item.question


def test_a_tsv_keeps_no_images_in_memory_and_reads_them_again(data):
    items = formats.read(data["vlmeval_tsv"]).items
    rows = [row.split("\t") for row in data["vlmeval_tsv"].read_text().splitlines()[1:]]
    for item, row in zip(items, rows, strict=True):
        np.testing.assert_array_equal(pixels(item.pieces[0].content), drawn(base64.b64decode(row[1])))
    assert items[2].question == (
        "Question: What colour has bar 2?\nOptions:\nA. red\nB. green\nC. blue\nD. orange\n"
        "Please select the correct answer from the options above.\n"
    )


def test_a_row_may_take_the_image_of_another_and_cells_may_be_quoted(tmp_path):
    encoded = base64.b64encode(png(["one"])).decode()
    other = base64.b64encode(png(["two"], "red")).decode()
    rows = [
        "index\timage\tquestion\tanswer",
        f'1\t{encoded}\t"Two\nlines, a ""quote"""\tx',
        "2\t1\tSame?\ty",
        f"3\t\"['{encoded}', '{other}']\"\tBoth?\tz",
    ]
    (tmp_path / "t.tsv").write_text("\n".join(rows))
    found = formats.read(tmp_path / "t.tsv")
    assert not found.refusals
    assert found.items[0].question == 'Question: Two\nlines, a "quote"\n'
    assert [item.where for item in found.items] == ["t.tsv:2", "t.tsv:4", "t.tsv:5"]
    same, both = found.items[1].pieces, found.items[2].pieces
    np.testing.assert_array_equal(pixels(same[0].content), drawn(png(["one"])))
    np.testing.assert_array_equal(pixels(both[1].content), drawn(png(["two"], "red")))


def test_a_paragraph_with_its_title_is_a_piece(data):
    hotpot, musique = formats.read(data["hotpotqa"]).items[0], formats.read(data["musique"]).items[0]
    for item in (hotpot, musique):
        assert str(item.pieces[0].content) == "Ship 0\nShip 0 was built in Oslo.\n\n"
    assert (hotpot.kind, musique.kind) == ("bridge", "2hop")
    assert musique.answers == ("Oslo", "Oslo city")


def test_plain_lines_keep_their_order_and_give_images_first_without_one(data, tmp_path):
    assert [piece.label for piece in formats.read(data["jsonl"]).items[0].pieces] == ["image 1", "text 2"]
    (tmp_path / "i.png").write_bytes(png(["i"]))
    record = {"texts": ["some.png"], "images": ["i.png"], "question": "Q", "answer": 3, "options": ["p", "q"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record | {"answer": "B"}) + "\n" + json.dumps(record))
    found = formats.read(tmp_path / "a.jsonl")
    assert [piece.label for piece in found.items[0].pieces] == ["image 1", "text 1"]
    assert found.items[0].question == "Q\nA. p\nB. q\nAnswer with the option's letter."
    (refusal,) = found.refusals
    assert refusal.where == "a.jsonl:2"
    assert refusal.reason == "answer: got ('3',); expected one of the letters A, B"


def test_long_texts_are_divided_and_joined_are_the_text(tmp_path):
    text = "One sentence here. " * 40 + "\n\n" + "x" * 300 + "\n\nShort one.\nShort two."
    record = {"id": 0, "images_list": [], "context": text, "question": "Q?", "answer": "a", "meta": {}}
    (tmp_path / "retrieval-text.jsonl").write_text(json.dumps(record))
    (item,) = formats.read(tmp_path, text_characters=120).items
    parts = [str(piece.content) for piece in item.pieces]
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 120
    assert parts[0].endswith("here. ")
    assert parts[-1] == "Short one.\nShort two."


def test_parquet_of_the_hub_has_pages_as_bytes(data, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = []
    for record in json.loads(data["mp_docvqa"].read_text())["data"]:
        pages = [data["mp_docvqa"].parent / "images" / f"{page}.png" for page in record["page_ids"]]
        images = {f"image_{n}": {"bytes": page.read_bytes(), "path": None} for n, page in enumerate(pages, 1)}
        row = {"questionId": str(record["questionId"]), "question": record["question"], "doc_id": record["doc_id"]}
        row |= {"page_ids": "['a', 'b', 'c']", "answers": repr(record["answers"]), "answer_page_idx": "0"}
        rows.append(row | {"data_split": "val"} | images | {"image_4": None})
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "val.parquet", row_group_size=4)

    found = formats.read(tmp_path / "val.parquet")
    assert (found.format, len(found.items), found.refusals) == ("mp_docvqa", 10, [])
    assert found.items[9].answers == ("41",)
    for piece, page in zip(found.items[9].pieces, slides(data, 4), strict=True):
        np.testing.assert_array_equal(pixels(piece.content), page)


def keeps_a_png(start: object) -> bool:
    """Whether an object keeps a PNG, as bytes or in base64, through all that it refers to but modules and classes."""
    seen, todo = {id(start)}, [start]
    while todo:
        value = todo.pop()
        if isinstance(value, bytes) and value.startswith(b"\x89PNG\r\n") and len(value) > 100:
            return True
        if isinstance(value, str) and "iVBORw0KGgo" in value and len(value) > 100:
            return True
        for other in gc.get_referents(value):
            outside = isinstance(other, type | types.ModuleType) or (
                isinstance(other, dict) and "__builtins__" in other
            )
            if id(other) not in seen and not outside:
                seen.add(id(other))
                todo.append(other)
    return False


@pytest.mark.parametrize("name", ["vlmeval_tsv", "cua_trace", "android_control", "docvqa"])
def test_items_keep_no_pixels(data, name, tmp_path):
    path = data[name]
    if name == "docvqa":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        image = png(["page"])
        row = {"question": "Q", "docId": 1, "answers": ["A"], "image": {"bytes": image, "path": None}}
        path = tmp_path / "val.parquet"
        parquet.write_table(arrow.Table.from_pylist([row | {"questionId": str(n)} for n in range(9)]), path)
    items = formats.read(path).items
    images = [piece.content for item in items for piece in item.pieces if isinstance(piece.content, StoredImage)]
    assert len(images) >= 9
    assert not keeps_a_png(items)
    assert keeps_a_png([image.read() for image in images[:1]])


def test_a_pdf_is_drawn_at_144_dots_per_inch_or_refused_with_the_way_to_draw_it(data, tmp_path, monkeypatch):
    (tmp_path / "documents").mkdir()
    images = [Image.fromarray(page) for page in slides(data, 0)]
    pdf = tmp_path / "documents" / "a.pdf"
    images[0].save(pdf, save_all=True, append_images=images[1:], resolution=72)
    record = {"doc_id": "a.pdf", "question": "Q", "answer": "x", "evidence_pages": "[1]", "answer_format": "Str"}
    (tmp_path / "samples.json").write_text(json.dumps([record]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (refusal,) = formats.read(tmp_path / "samples.json").refusals
    assert "pdftoppm -r 144 -png" in refusal.reason

    monkeypatch.undo()
    pytest.importorskip("pypdfium2")
    (item,) = formats.read(tmp_path / "samples.json").items
    assert [piece.label for piece in item.pieces] == ["page 1", "page 2", "page 3"]
    assert pixels(item.pieces[1].content).shape == (128, 192, 3)


def test_compressed_lines_are_read_like_plain_ones(data, tmp_path):
    plain = data["cua_trace"]
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    expected = formats.read_episodes(plain).episodes
    assert [step.response for step in formats.read_episodes(tmp_path / "t.jsonl.gz").episodes[3].steps] == [
        step.response for step in expected[3].steps
    ]
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "t.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    found = formats.read_episodes(tmp_path / "t.jsonl.zst").episodes
    assert len(found) == 10
    fourth = data["osworld"].parent / "screenshots" / "9_3.png"
    np.testing.assert_array_equal(pixels(found[9].steps[3].screenshots[0].content), drawn(fourth.read_bytes()))


SHORT = "\nAnswer the question using a single word or phrase."


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        *((name, SHORT) for name in ("slidevqa", "mp_docvqa", "docvqa", "hotpotqa", "musique")),
        ("mmlongbench_doc", '\nGive a short answer, or "Not answerable".'),
        ("video_mme", "\nThe best answer is:"),
    ],
)
def test_questions_are_bare_where_no_instructions_are_wanted(data, name, instruction):
    with_them, bare = formats.read(data[name]).items, formats.read(data[name], instruct=False).items
    assert len(bare) == len(with_them) > 0
    for item, own in zip(with_them, bare, strict=True):
        assert item.question.endswith(own.question + instruction)
        assert "nswer" not in own.question
        assert (own.id, own.answers) == (item.id, item.answers)
        assert [piece.label for piece in own.pieces] == [piece.label for piece in item.pieces]
