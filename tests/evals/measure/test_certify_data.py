"""A certificate from a user's own data: contexts are windows, as recorded windows of the same are."""

import json

import numpy as np
import pytest
from PIL import Image

from evals.certify.own_images import OwnImageSource, recorded_sizes, windows_of_items
from evals.certify.recorded_windows import RecordedWindow
from evals.measure import fields
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from models import Buckets, load

COUNT = 6


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Six contexts of three images with two questions each, one of a text, and the first as recorded windows."""
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
    lines.append({"texts": [f"{first} {second}"], "question": first, "answer": "x"})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, windows


@pytest.mark.slow
def test_contexts_of_a_data_set_are_the_windows_that_a_recording_of_them_is(asked):
    folder, recorded = asked
    backbone, data = load(shipped(MAIN), dtype="float32", buckets=Buckets()), fields.read(folder / "data.jsonl")
    windows = windows_of_items(data)
    assert [(len(own.images), own.questions) for own in windows[:-1]] == [(3, own.questions) for own in recorded]
    assert len(windows[-1].images) == 1

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
    with pytest.raises(InputError, match=r"--data: got windows 1 of 1, 6 of 3 pieces; expected 40 or more of a size"):
        recorded_sizes(windows_of_items(fields.read(folder / "data.jsonl")), 40, 40, 2, "--data")

    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"texts": ["A page."], "question": "What?", "answer": "x"}) + "\n")
    with pytest.raises(InputError, match=r"of whose 0 items none has a context of images and texts"):
        windows_of_items(fields.read(path)._replace(items=[]))


@pytest.mark.slow
def test_texts_are_chunks_among_images_and_what_cannot_be_read_is_a_line(asked, tmp_path, capsys):
    """Windows of an image, a text and an image; of seven one has a word that nobody knows, and one a broken image."""
    folder, _ = asked
    words = json.loads((shipped(MAIN) / "tokenizer.json").read_text())["model"]["vocab"]
    names = [word for word in words if word.isalnum()]
    lines = []
    for number in range(7):
        image = (folder / f"{number % COUNT}_0.png").read_bytes()
        (tmp_path / f"{number}.png").write_bytes(image if number != 3 else image[: len(image) // 2])
        text = " ".join(names[number : number + 3]) if number != 5 else "a word unheard of"
        pieces = [{"image": f"{number}.png"}, {"text": text}, {"image": f"{number}.png"}]
        lines.append({"pieces": pieces, "question": names[0], "answer": "x"})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    data = fields.read(tmp_path / "data.jsonl")
    assert (len(data.items), data.refusals) == (7, [])
    backbone, windows = load(shipped(MAIN), dtype="float32", buckets=Buckets()), windows_of_items(data)
    sizes = recorded_sizes(windows, 2, 6, 2, "--data")
    source = OwnImageSource.of_items(backbone, data, sizes, 5, windows)
    said = capsys.readouterr().out
    assert [line.partition(" ")[2][9:21] for line in said.splitlines()] == ["data.jsonl:4", "data.jsonl:6"]
    assert (source.sizes.counts, source.modalities) == ((5,), ("image", "text"))
    # The second chunk is the text as the tokenizer has it, embedded.
    [first, *_] = source.specs
    text = backbone.embed(**backbone.prepare([backbone.ids(" ".join(names[:3]))]))
    np.testing.assert_array_equal(np.asarray(first.batch[1].embeddings)[0], np.asarray(text.embeddings)[0])
    with pytest.raises(InputError, match="--data: got windows 5 of 3 pieces; expected 6 or more"):
        OwnImageSource.of_items(backbone, data, sizes, 5, windows, least=6)
