"""Shared by the tests of the evaluation."""

import functools
import json

import pytest

from kvpatch_jax.models.inputs.chat import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.kvpatch_jax.conftest import unchecked as unchecked


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(family)`: a tiny checkpoint with random weights, a tokenizer and a chat template."""

    @functools.cache
    def make(family):
        gold = json.loads((GOLDENS / "chat.json").read_text())["families"].get(family)
        for file in (GOLDENS / family / "chat.json", GOLDENS / "videos" / f"{family}.json"):
            gold = json.loads(file.read_text()) if gold is None and file.exists() else gold
        assert gold is not None, family
        directory = write_checkpoint(family, tmp_path_factory.mktemp("checkpoint") / family)
        (directory / "tokenizer.json").write_text(json.dumps(gold["tokenizer"]))
        (directory / TEMPLATE_FILE).write_text(gold["template"])
        (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(gold.get("special_tokens", {})))
        return directory

    return make
