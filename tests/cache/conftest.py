"""A small backbone that reads images and words, loaded once for the tests of items and leads."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def backbone():
    from kvpatch_jax.models import load

    return load(Path(__file__).parents[2] / "evals" / "trained" / "documents" / "qwen2_5_vl", dtype="float32")
