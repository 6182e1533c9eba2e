"""A certificate from a user's own data: contexts are windows, as recorded windows of the same are."""

import json

import numpy as np
import pytest
from PIL import Image

from evals.certify.own_images import OwnImageSource, recorded_sizes, windows_of_items
from evals.certify.recorded_windows import RecordedWindow
from evals.measure import formats
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from models import Buckets, load

COUNT = 6


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Six contexts of three images with two questions each, one of a text, and the same as recorded windows."""
    folder, rng = tmp_path_factory.mktemp("asked"), np.random.default_rng(1)
    lines, windows = [], []
    # The words of the task that the shipped model was trained on.
    words = json.loads((shipped(MAIN) / "tokenizer.json").read_text())["model"]["vocab"]
    first, second = [word for word in words if word.isalnum()][:2]
    for number in range(COUNT):
        names = [f"{number}_{place}.png" for place in range(3)]
        for name in names:
            Image.fromarray(rng.integers(0, 255, (48, 48, 3), np.uint8)).save(folder / name)
        windows.append(RecordedWindow(tuple(names), (first, second)))
        for word in (first, second):
            lines.append({"images": names, "question": word, "answer": "x"})
    lines.append({"texts": ["A page."], "question": first, "answer": "x"})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, windows


def test_contexts_of_a_data_set_are_the_windows_that_a_recording_of_them_is(asked):
    folder, recorded = asked
    backbone, data = load(shipped(MAIN), dtype="float32", buckets=Buckets()), formats.read(folder / "data.jsonl")
    windows = windows_of_items(data)
    assert [(len(own.images), own.questions) for own in windows] == [(3, own.questions) for own in recorded]

    sizes = recorded_sizes(windows, COUNT, COUNT, 2)
    found = OwnImageSource.of_items(backbone, data, sizes, 5, windows)
    expected = OwnImageSource.recorded(backbone, folder, recorded, sizes, 5)
    assert found.content == f"6 contexts of data.jsonl (jsonl), digest {data.digest[:16]}"
    assert (found.sizes, found.disjoint, found.longest) == (expected.sizes, expected.disjoint, expected.longest)
    assert len(found.specs) == len(expected.specs) > 1
    for own, other in zip(found.specs, expected.specs, strict=True):
        np.testing.assert_array_equal(own.clusters, other.clusters)
        assert own.held_out == other.held_out
        # Of the windows' own images; what was there before is drawn from names, which differ.
        for mine, theirs in zip(own.batch[:3], other.batch[:3], strict=True):
            np.testing.assert_array_equal(mine.embeddings, theirs.embeddings)


def test_data_without_enough_contexts_of_images_is_refused(asked, tmp_path):
    folder, _ = asked
    with pytest.raises(InputError, match=r"--data: got windows 6 of 3 images; expected 40 or more of a size"):
        recorded_sizes(windows_of_items(formats.read(folder / "data.jsonl")), 40, 40, 2, "--data")

    (tmp_path / "texts.jsonl").write_text(json.dumps({"texts": ["A page."], "question": "What?", "answer": "x"}) + "\n")
    with pytest.raises(InputError, match=r"of whose 1 items none has a context of images alone.*--texts=FOLDER"):
        windows_of_items(formats.read(tmp_path / "texts.jsonl"))
