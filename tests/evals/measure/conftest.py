"""Shared by the tests of measuring a user's model on a user's data."""

import functools
import json

import numpy as np
import pytest

from kvpatch_jax.models import Buckets, load


@pytest.fixture(scope="session")
def loaded(checkpoint):
    """`loaded(family)`: the tiny backbone, with buckets as the program loads it."""
    return functools.cache(lambda family: load(checkpoint(family), dtype="float32", buckets=Buckets()))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A file of ten items of two kinds and five clusters behind six contexts, images of three sizes and texts."""
    from PIL import Image

    folder, rng, lines = tmp_path_factory.mktemp("data"), np.random.default_rng(0), []
    for number in range(6):
        for place in range(2):
            pixels = rng.integers(0, 256, (28 + 14 * (number % 3), 56, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}_{place}.png")
    for number in range(10):
        context = number % 6
        lines.append(
            {
                "id": f"q{number}",
                "cluster": f"c{context % 5}",
                "kind": "ab"[context % 2],
                "images": [f"{context}_0.png", f"{context}_1.png"],
                "texts": ["Read this well."] if context % 2 else [],
                "question": "What is in it?",
                "answer": "hello",
                "scorer": "token_f1",
            }
        )
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
