"""A tiny backbone, a splice and a prompt on it, with exact matrix products; latent attention nightly."""

from typing import Any

import jax
import numpy as np
import pytest

from kvpatch_jax.models import ModelBackbone
from tests.repair.splices import CHUNK, LONG, ROWS, make_prompt, make_splice, other_antecedents, tiny_backbone

KINDS = ["gqa", pytest.param("mla", marks=pytest.mark.nightly)]


@pytest.fixture(autouse=True, scope="module")
def _highest_precision():
    """For tests and fixtures of a module; nothing of it reaches other rooms."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=KINDS)
def kind(request, _highest_precision) -> str:
    return request.param


@pytest.fixture(scope="module")
def backbone(_highest_precision) -> ModelBackbone:
    return tiny_backbone("gqa")


@pytest.fixture(scope="module")
def spliced(backbone) -> Any:
    """A splice of a short chunk, its length as an array as chunks with padding have it; and a prefill's cache."""
    splice, expected = make_splice(backbone)
    return splice.replace(length=np.full(ROWS, CHUNK)), expected


@pytest.fixture(scope="module")
def long(kind) -> Any:
    """A backbone, a splice of a long chunk with two other antecedents, and the cache that a prefill gives."""
    backbone = tiny_backbone(kind)
    splice, expected = make_splice(backbone, chunk=LONG)
    others = other_antecedents(backbone, 2, chunk=LONG)
    return backbone, splice.replace(others=others, length=np.full(ROWS, LONG)), expected


@pytest.fixture(scope="module")
def prompt(kind) -> Any:
    """A backbone, a prompt spliced on it, and the cache and last logits that a prefill gives."""
    backbone = tiny_backbone(kind)
    return backbone, *make_prompt(backbone)
