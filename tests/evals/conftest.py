"""Shared by the tests of the evaluation."""

import functools

import pytest

from tests.goldens.load import write_chatting


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(family)`: a tiny checkpoint with random weights, a tokenizer and a chat template."""

    @functools.cache
    def make(family):
        return write_chatting(family, tmp_path_factory.mktemp("checkpoint") / family)

    return make
