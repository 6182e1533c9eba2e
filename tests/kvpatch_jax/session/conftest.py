"""A session of two chunks on a tiny backbone; files that need others define their own."""

from typing import Any

import pytest
from session_cases import reader

import kvpatch_jax as kvp


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


@pytest.fixture
def session(backbone):
    with kvp.Session(backbone, keep=2) as made:
        yield made
