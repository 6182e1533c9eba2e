"""Shared by the tests of sessions."""

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
