"""Certification on windows as an agent had them: what is read, what is asked, and which windows calibrate."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evals.certify import certification, own_images, packed_questions, recorded_windows
from evals.certify.certification_run import CertificationRun
from evals.certify.recorded_windows import RecordedWindow
from evals.certify.window_sizes import CertifiedSizes
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from models import ModelBackbone, load


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return load(shipped(MAIN), dtype="float32")


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def images_in(folder: Path, count: int, rng: np.random.Generator) -> list[str]:
    folder.mkdir()
    names = [f"{number:02}.png" for number in range(count)]
    for name in names:
        Image.fromarray(rng.integers(0, 255, (48, 48, 3), np.uint8)).save(folder / name)
    return names


def test_a_file_of_windows_is_read_line_by_line(tmp_path: Path):
    lines = [
        {"images": ["a", "b"], "questions": ["what?"]},
        {"images": ["b"], "questions": ["x", "y"], "before": ["a"]},
    ]
    path = written(tmp_path / "windows.jsonl", *lines)
    assert recorded_windows.read_windows(path) == [
        RecordedWindow(("a", "b"), ("what?",)),
        RecordedWindow(("b",), ("x", "y"), ("a",)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "got a list; expected an object"),
        ({"images": ["a"]}, r"line 1 of .*got \['images'\]"),
        ({"images": ["a"], "questions": ["?"], "after": []}, "got .*'after'"),
        ({"images": "a", "questions": ["?"]}, "got 'a' as 'images'; expected a list of texts"),
        ({"images": ["a"], "questions": []}, r"got \[\] as 'questions'"),
        ({"images": ["a"], "questions": [" "]}, r"got \[' '\] as 'questions'"),
        ({"images": ["a"], "questions": ["?"], "before": [3]}, r"got \[3\] as 'before'"),
    ],
)
def test_a_line_that_is_no_window_is_refused_by_its_number(tmp_path: Path, line: object, message: str):
    with pytest.raises(InputError, match=message):
        recorded_windows.read_windows(written(tmp_path / "windows.jsonl", line))


def test_files_without_windows_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="which is no file"):
        recorded_windows.read_windows(tmp_path)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="which is empty"):
        recorded_windows.read_windows(tmp_path / "empty")


def test_sizes_are_those_that_were_recorded_often_enough():
    def of(size: int, count: int) -> list[RecordedWindow]:
        return [RecordedWindow(("a",) * size, ("?",))] * count

    windows = [*of(5, 9), *of(2, 50), *of(3, 4), *of(7, 3)]
    sizes = own_images.recorded_sizes(windows, 4, 6, 16)
    assert (sizes.chunks, sizes.counts, sizes.batch) == ((3, 5), (4, 6), 16)
    with pytest.raises(InputError, match="got windows 50 of 2, 4 of 3, 9 of 5, 3 of 7 images; expected 10"):
        own_images.recorded_sizes(windows, 10, 64, 16)


def test_questions_that_differ_by_window_are_read_at_their_own_last_token():
    rows = [[np.array([5, 6, 7])], [np.array([8]), np.array([9, 4])]]
    asked = packed_questions.packed_by_row(rows, 3, 4, None)
    assert asked.valid.tolist() == [[True, False, False], [True, True, False]]
    assert asked.tail.asked.tolist() == [[2, 6, 10], [0, 5, 9]]
    assert asked.tail.ids[0, :4].tolist() == [5, 6, 7, 0]
    assert asked.tail.ids[1].tolist() == [8, 0, 0, 0, 9, 4, 0, 0, 9, 4, 0, 0]
    assert asked.tail.positions[0].tolist() == [0, 1, 2, 3] * 3
    # No token that is scored sees what is filled up behind it, or another question.
    seen = [np.flatnonzero(asked.tail.among[token]).tolist() for token in asked.tail.asked[1].tolist()]
    assert seen == [[0], [4, 5], [8, 9]]


@pytest.mark.slow
def test_earlier_windows_calibrate_and_what_left_is_what_was_there_before(backbone: ModelBackbone, tmp_path: Path):
    names = images_in(tmp_path / "images", 12, np.random.default_rng(3))
    shown = [names[:3], names[3:6], names[6:9], names[9:12]]
    asked = [("glyph? r1t2",), ("glyph? r0t0", "no word of it"), ("fill? r1t2", "glyph? r3t4"), ("glyph? r2t2",)]
    windows = [RecordedWindow(tuple(own), questions) for own, questions in zip(shown, asked, strict=True)]
    windows[1] = windows[1]._replace(before=(names[2], names[0]))
    sizes = CertifiedSizes((3,), (4,), 4)
    source = own_images.OwnImageSource.recorded(backbone, tmp_path / "images", windows, sizes, 0)
    assert source.disjoint
    assert [(spec.held_out, spec.clusters.tolist()) for spec in source.specs] == [(False, [0, 1]), (True, [2, 3])]

    def digest(name: str) -> float:
        return float(np.asarray(backbone.embed(**backbone.prepare([tmp_path / "images" / name])).embeddings).sum())

    rows = [np.asarray(tokens.embeddings).sum(axis=(1, 2)) for tokens in source.specs[0].batch]
    assert len(rows) == 6
    np.testing.assert_allclose([row[1] for row in rows[:3]], [digest(name) for name in shown[1]], rtol=1e-4)
    # What was recorded left last; in front of it is an image of another window of the same half.
    np.testing.assert_allclose([row[1] for row in rows[4:]], [digest(names[2]), digest(names[0])], rtol=1e-4)
    assert min(abs(rows[3][1] - digest(name)) for name in shown[0]) < 1e-3 * abs(rows[3][1])

    batch = source.load(backbone, source.specs[1], tmp_path)
    assert batch.questions.valid.tolist() == [[True, True], [True, False]]
    ids = [np.asarray(backbone.prepare([question])["input_ids"])[0].tolist() for question in ("fill? r1t2",)]
    assert batch.questions.tail.ids[0, : len(ids[0])].tolist() == ids[0]


@pytest.mark.slow
def test_recorded_windows_are_certified(backbone: ModelBackbone, tmp_path: Path):
    names = images_in(tmp_path / "images", 12, np.random.default_rng(5))
    rng, windows = np.random.default_rng(6), list[RecordedWindow]()
    for _ in range(4):
        own = [names[image] for image in rng.permutation(12)[:3]]
        windows.append(RecordedWindow(tuple(own), ("glyph? r1t2", "fill? r0t0")[: int(rng.integers(1, 3))]))
    source = own_images.OwnImageSource.recorded(
        backbone, tmp_path / "images", windows, CertifiedSizes((3,), (4,), 4), 0
    )
    assert not source.disjoint
    run = CertificationRun(backbone, source, tmp_path, (8,), skip=frozenset(("orbit", "update", "fresh", "repair")))
    made = certification.certify(run, MAIN, level=0.6)
    row = made.row("bare", behind=2)
    assert row is not None
    assert row.answers == sum(len(window.questions) for window in windows)
    assert "recorded windows" in made.content
    assert "asked behind each window" in made.asked


def test_names_and_questions_that_are_unknown_are_refused(backbone: ModelBackbone, tmp_path: Path):
    names = images_in(tmp_path / "images", 3, np.random.default_rng(7))
    sizes = CertifiedSizes((3,), (2,), 4)
    for window, message in (
        (RecordedWindow((*names[:2], "other.png"), ("glyph?",)), "got 'other.png'; expected the name of an image"),
        (RecordedWindow(tuple(names), ("nothing of it",)), "got 'nothing of it' behind '00.png'"),
    ):
        with pytest.raises(InputError, match=message):
            own_images.OwnImageSource.recorded(backbone, tmp_path / "images", [window] * 2, sizes, 0)
