"""A tiny backbone and a splice on it, with exact matrix products."""

import jax
import numpy as np
import pytest

from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.repair import SplicedCache
from tests.repair.splices import make_splice, tiny_backbone


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return tiny_backbone()


@pytest.fixture(scope="module")
def spliced(backbone: ModelBackbone) -> tuple[SplicedCache, dict[str, np.ndarray]]:
    with jax.default_matmul_precision("highest"):
        return make_splice(backbone)
