"""A tiny backbone and a session of two chunks on it; files that need others define their own."""

from typing import Any

import pytest

import kvpatch_jax as kvp
from tests.shared.session_cases import worded
from tests.shared.window_oracle import backbone_of


@pytest.fixture(scope="session")
def backbone() -> Any:
    return worded(backbone_of("mrope"))


@pytest.fixture
def session(backbone):
    with kvp.Session(backbone, keep=2) as opened:
        yield opened


@pytest.fixture
def store(tmp_path):
    with kvp.ChunkStore(tmp_path / "store") as opened:
        yield opened
