"""Bad input to the readers of data sets: a line each with its place and field; the rest goes on; nothing is written."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from evals.measure import formats
from kvpatch_jax.errors import InputError, MissingExtraError
from tests.evals.measure.released import PATHS, png, released, unpack

GOOD = {"images": ["ok.png"], "question": "Q", "answer": "A"}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "ok.png").write_bytes(png(["ok"]))
    return tmp_path


def lines(folder: Path, *records: object, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def huge_png(width: int, height: int) -> bytes:
    """Writes a PNG whose header says a size and whose pixels are missing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(100))
    chunks = [
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in (header, data)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": ["no.png"]}, "images[0]: got 'no.png', which is no file; expected it in"),
        ({"images": ["broken.png"]}, "broken.png: got a file that Pillow does not know"),
        (
            {"images": ["large.png"]},
            "(200000000 pixels) exceeds limit",
        ),
        ({"images": ["../secret.png"]}, "images[0]: got '../secret.png'; expected a name below the data's folder"),
        ({"images": ["a/../../secret.png"]}, "expected a name below the data's folder"),
        ({"images": ["..\\secret.png"]}, "expected a name below the data's folder"),
        ({"images": ["/etc/passwd"]}, "images[0]: got '/etc/passwd'; expected a name below the data's folder"),
        (
            {"images": ["https://example.org/a.png"]},
            "images[0]: got the address 'https://example.org/a.png'; expected a file",
        ),
        ({"images": ["file:///etc/passwd"]}, "images[0]: got the address"),
        ({"images": ["a\0b"]}, "images[0]: got 'a\\x00b'; expected a file's name"),
        ({"images": ["x" * 5000]}, "images[0]: got 'xxx"),
        ({"images": [3]}, "images[0]: got 3; expected a file's name"),
        ({"images": "ok.png"}, "images: got 'ok.png'; expected a list"),
        ({"images": []}, "images: got no images and no texts; expected at least one"),
        ({"texts": [""]}, "texts[0]: got ''; expected a text"),
        ({"question": None}, "question: got None; expected a text"),
        ({"question": " "}, "question: got ' '; expected a text"),
        ({"answer": None}, "answer: got None; expected a text"),
        ({"answer": []}, "answer: got an empty list; expected at least one text"),
        ({"answer": [1]}, "answer[0]: got 1; expected a text"),
        ({"answer": {"a": 1}}, "answer: got {'a': 1}; expected a text"),
        ({"answer": True}, "answer: got True; expected a text"),
        ({"options": ["x", "y"], "answer": "C"}, "answer: got ('C',); expected one of the letters A, B"),
        ({"rule": "best"}, "rule: got 'best'; expected one of android_control"),
        ({"id": True}, "id: got True; expected a text"),
        ({"answr": "A"}, "answr: got a field of this name; expected one of answer"),
        ({"pieces": [{"image": "ok.png"}]}, "pieces: got pieces beside images or texts; expected one of them"),
    ],
)
def test_a_record_is_refused_by_its_field_and_the_rest_goes_on(folder, change, said):
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "large.png").write_bytes(huge_png(20_000, 10_000))
    (folder.parent / "secret.png").write_bytes(png(["secret"]))
    found = formats.read(lines(folder, GOOD, GOOD | change, GOOD | {"question": "R"}))
    assert [item.question for item in found.items] == ["Q", "R"]
    (refusal,) = found.refusals
    assert refusal.where == "d.jsonl:2"
    assert said in refusal.reason
    assert "\n" not in refusal.reason


def test_a_page_is_refused_by_its_size_before_it_is_decoded(folder):
    (refusal,) = formats.read(lines(folder, GOOD), most_image_bytes=1000).refusals
    assert "got 18432 bytes of its pixels; expected at most 1000" in refusal.reason


def test_a_truncated_image_is_refused_where_images_are_verified(folder):
    (folder / "cut.png").write_bytes(png(["x"])[:-60])
    path = lines(folder, GOOD, GOOD | {"images": ["cut.png"]})
    assert len(formats.read(path).items) == 2
    found = formats.read(path, verify=True)
    assert [item.where for item in found.items] == ["d.jsonl:1"]
    assert "got a damaged or truncated file" in found.refusals[0].reason


def test_of_ids_that_repeat_the_first_stays(folder):
    records = [GOOD | {"id": name, "question": question} for name, question in (("a", "1"), ("b", "2"), ("a", "3"))]
    found = formats.read(lines(folder, *records))
    assert [item.question for item in found.items] == ["1", "2"]
    assert found.refusals[0].where == "d.jsonl:3"
    assert found.refusals[0].reason == "id: got 'a', as d.jsonl:1 has; expected its own"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"images": ["ok.png"], "question": "\xff", "answer": "A"}', "line: got 'utf-8' codec can't decode"),
        (b'{"images": ["ok.png"], "question": "Q"', "expected one JSON object"),
        (b"[1, 2]", "line: got [1, 2]; expected one JSON object"),
        (b"null", "line: got None; expected one JSON object"),
        (b'{"answer": "A", "answer": "B"}', "expected one JSON object"),
        (b'{"answer": NaN}', "expected one JSON object"),
        (b"[" * 100_000, "line: got nested too deeply; expected one JSON object"),
    ],
)
def test_a_line_that_is_no_record_is_refused_and_the_rest_goes_on(folder, line, said):
    good = json.dumps(GOOD).encode()
    (folder / "d.jsonl").write_bytes(b"\n".join([good, line, b"", good]))
    found = formats.read(folder / "d.jsonl")
    assert [item.where for item in found.items] == ["d.jsonl:1", "d.jsonl:4"]
    (refusal,) = found.refusals
    assert refusal.where == "d.jsonl:2"
    assert said in refusal.reason


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(folder):
    content = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(GOOD | {"id": name}).encode() for name in "ab") + b"\r\n"
    (folder / "d.jsonl").write_bytes(content)
    assert [item.id for item in formats.read(folder / "d.jsonl").items] == ["a", "b"]

    image = base64.b64encode(png(["x"])).decode()
    table = f"index\timage\tquestion\tanswer\r\n1\t{image}\tQ\tA\r\n2\t{image}\tR\tB\r\n"
    (folder / "d.tsv").write_bytes(b"\xef\xbb\xbf" + table.encode())
    found = formats.read(folder / "d.tsv")
    assert [item.question for item in found.items] == ["Question: Q\n", "Question: R\n"]
    content: Any = found.items[1].pieces[0].content
    assert content.read() == png(["x"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "d.txt: got an empty file; expected records"),
        (b" \n\n", "d.txt: got an empty file; expected records"),
        (b"\xef\xbb\xbf", "d.txt: got an empty file; expected records"),
        (b"hello", "d.txt: got b'hello'; expected JSON Lines, JSON, a table with tabs, or Parquet"),
        (b"\0" * 9000, "expected JSON Lines, JSON, a table with tabs, or Parquet"),
        (b'[{"a": 1}, ', "d.txt: got Expecting value"),
        (b"[]", "d.txt: got no record that can be read; expected one of mm_niah"),
        (b'{"a": 1}', "d.txt:1: got fields a, which fit none of them; expected one of the formats mm_niah"),
        (b"a\tb\n1\t2\n", "d.txt:2: got fields a, b, which fit none of them"),
        (
            b"\t".join(b"c%d" % n for n in range(1_000_000)) + b"\n",
            "d.txt:1: got 1000000 columns; expected at most 1000",
        ),
        (b"index\tindex\n1\t2\n", "d.txt:1: got column 'index' twice; expected distinct names"),
        (b"\x1f\x8b\x08\0\0\0\0\0damaged", "got damaged compressed bytes"),
    ],
)
def test_a_file_of_no_format_is_an_error_that_says_what_it_has(folder, content, said):
    (folder / "d.txt").write_bytes(content)
    with pytest.raises(InputError) as error:
        formats.read(folder / "d.txt")
    assert said in str(error.value)


def test_paths_formats_and_options_are_checked_first(folder, unchecked):
    path = lines(folder, GOOD)
    with pytest.raises(InputError, match="which is not there; expected a file or a folder"):
        formats.read(folder / "none")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "xml"}, "format: got 'xml'; expected one of mm_niah"),
        ({"limt": 3}, "got 'limt'"),
        ({"limit": 0}, "limit: got 0"),
        ({"keep": True}, "keep: got True"),
    )
    for options, said in wrong:
        with pytest.raises(InputError, match=said):
            formats.read(path, **options)
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match="without data files"):
        formats.read(folder / "empty")
    with pytest.raises(InputError, match="which has no episodes; expected one of gui_odyssey"):
        formats.read_episodes(path)


def test_a_format_that_is_named_refuses_records_of_another(folder):
    found = formats.read(lines(folder, GOOD, GOOD), "slidevqa")
    assert not found.items
    assert [refusal.where for refusal in found.refusals] == ["d.jsonl:1", "d.jsonl:2"]
    assert "deck_name: got no such field" in found.refusals[0].reason


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("mm_niah", "answer", 7, "answer: got option 7; expected one of 0 options"),
        ("mm_niah", "answer", True, "answer: got True"),
        ("mm_niah", "images_list", ["a.png"], "images_list: got 1 images; expected 2, as <image> is written"),
        ("mm_niah", "meta", [], "meta: got []; expected an object"),
        (
            "mmlongbench_doc",
            "answer_format",
            "Date",
            "answer_format: got 'Date'; expected Str, Int, Float, List or None",
        ),
        ("mmlongbench_doc", "doc_id", "none.pdf", "doc_id: got 'none.pdf', which is no file"),
        ("mmlongbench_doc", "evidence_pages", "[1", "evidence_pages: got '[1'; expected a list"),
        ("slidevqa", "deck_name", "none", "deck_name: got 'none', which is no file"),
        ("slidevqa", "answer", None, "answer: got None; expected a text"),
        ("mp_docvqa", "page_ids", ["x"], "page_ids[0]: got 'x.png', which is no file"),
        ("mp_docvqa", "answers", [], "answers: got []; expected texts"),
        ("docvqa", "image", "documents/none.png", "image: got 'documents/none.png', which is no file"),
        ("docvqa", "answers", [3], "answers: got [3]; expected texts"),
        ("video_mme", "answer", "E", "answer: got 'E'; expected one of A, B, C, D"),
        ("video_mme", "videoID", "none", "videoID: got 'none', which is no file"),
        ("hotpotqa", "context", [["T"]], "context[0]: got ['T']; expected [title, sentences]"),
        ("hotpotqa", "answer", 3, "answer: got 3; expected a text"),
        ("musique", "paragraphs", [{"title": "T"}], "paragraphs[0].paragraph_text: got None; expected a text"),
        ("musique", "answerable", False, "answerable: got false; expected questions of MuSiQue-Ans"),
        ("osworld", "screenshots", [], "screenshots: got 0 beside 4 actions; expected as many"),
    ],
)
def test_every_format_refuses_its_second_record_by_the_field(tmp_path, name, field, value, said):
    path = released(tmp_path, name)
    (file, *_) = formats._data_files(path)
    text = file.read_text()
    whole = json.loads(text) if name in ("mmlongbench_doc", "mp_docvqa", "docvqa", "hotpotqa") else None
    records = [json.loads(line) for line in text.splitlines()] if whole is None else whole
    entries = records["data"] if isinstance(records, dict) else records
    entries[1][field] = value
    file.write_text("\n".join(map(json.dumps, records)) if whole is None else json.dumps(whole))

    before = len(formats.read(released(tmp_path / "whole", name)).items)
    found = formats.read(path)
    (refusal,) = found.refusals
    assert said in refusal.reason
    assert refusal.where.endswith((":2", "[1]"))
    assert len(found.items) == before - (4 if name == "osworld" else 1)


def test_rows_of_a_table_are_refused_one_by_one(folder):
    image = base64.b64encode(png(["x"])).decode()
    rows = [
        b"index\timage\tquestion\tA\tB\tanswer",
        f"1\t{image}\tQ\tx\ty\tA".encode(),
        b"2\tnot base64\tQ\tx\ty\tA",
        b"3\t1\tQ\tx\ty",
        b"4\t1\tQ\tx\ty\tC",
        b"5\t1\tQ\xff\tx\ty\tA",
        b"6\t" + b"A" * 80 + b"\tQ\tx\ty\tA",
        b"7\t1\tQ\tx\ty\tB",
    ]
    (folder / "d.tsv").write_bytes(b"\n".join(rows))
    found = formats.read(folder / "d.tsv")
    assert [item.id for item in found.items] == ["1", "7"]
    said = {refusal.where: refusal.reason for refusal in found.refusals}
    assert "image: got 'not base64'; expected base64" in said["d.tsv:3"]
    assert said["d.tsv:4"] == "row: got 5 cells; expected 6, as the header has"
    assert said["d.tsv:5"] == "answer: got 'C'; expected one of A, B"
    assert said["d.tsv:6"] == "row: got bytes that are no UTF-8; expected UTF-8"
    assert "got a file that Pillow does not know" in said["d.tsv:7"]


def test_one_damaged_file_of_a_folder_does_not_end_the_others(tmp_path):
    path = released(tmp_path, "mm_niah")
    (path / "annotations" / "reasoning-text.jsonl").write_text("")
    found = formats.read(path)
    assert len(found.items) == 50
    assert [refusal.where for refusal in found.refusals] == ["annotations/reasoning-text.jsonl"]


def test_a_package_that_is_missing_is_named_with_its_extra(folder, monkeypatch):
    (folder / "d.parquet").write_bytes(b"PAR1....PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"kvpatch_jax\[data\]"):
        formats.read(folder / "d.parquet")


def test_damaged_parquet_is_an_error(folder):
    pytest.importorskip("pyarrow")
    (folder / "d.parquet").write_bytes(b"PAR1....PAR1")
    with pytest.raises(InputError, match="got damaged Parquet"):
        formats.read(folder / "d.parquet")


def test_reading_writes_nothing(tmp_path):
    unpack(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in PATHS.values():
        formats.read(tmp_path / path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
