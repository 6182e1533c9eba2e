"""Fixtures for the models: the tiny checkpoints of `tests/goldens`, rebuilt in a temporary directory."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from kvpatch_jax.models import load
from kvpatch_jax.models.families import phi3_v
from kvpatch_jax.models.families.family import feature_arrays, placeholders
from tests.goldens.load import golden_arrays, golden_prompt, write_checkpoint
from tests.goldens.table import FAMILIES

REGIMES = {"phi3_long": "long", "llama_dynamic": 14}


def blank_features(backbone: Any, input_ids: np.ndarray) -> np.ndarray:
    """Zeros for a prompt's placeholders, so that no tower runs."""
    pads = int(np.isin(input_ids, placeholders(backbone.config)).sum())
    return np.zeros((feature_arrays(backbone.config), pads, backbone.config.text.width), np.float32)


class Golden(NamedTuple):
    """One case of a tiny model: the backbone, transformers' arrays, what goes to `embed` beside the ids, and tokens."""

    backbone: Any
    arrays: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    tokens: Any

    @property
    def ids(self) -> np.ndarray:
        return self.arrays["input_ids"][None]


@pytest.fixture(scope="module")
def highest_precision() -> Any:
    """As for all tests, and for what fixtures of the module compute: a program of another precision is another one."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session", autouse=True)
def tiny_clip() -> None:
    """Makes the goldens' CLIP one of those that Phi-3-vision's configuration can name: it has names and no sizes."""
    sizes = {"depth": 3, "width": 32, "heads": 2, "intermediate": 48, "image": 16, "patch": 4}
    phi3_v.TOWERS["tiny"] = sizes


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_directory(family)`: the tiny checkpoint, written once. Read only: copy before changing it."""
    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda family: write_checkpoint(family, root / family))


@pytest.fixture(scope="session")
def tiny(tiny_directory: Callable[[str], Path]) -> Callable[..., Any]:
    """`tiny(family)`: the tiny backbone with transformers' float32 angles (or exact ones), made once."""

    @functools.cache
    def loaded(family: str, angles: Any = "float32") -> Any:
        return load(tiny_directory(family), angles=angles, regime=REGIMES.get(family))

    return loaded


@pytest.fixture(scope="session")
def golden(tiny: Callable[..., Any]) -> Callable[[str, str], Golden]:
    """`golden(family, case)`: a case as `Golden`."""

    @functools.cache
    def read(family: str, case: str) -> Golden:
        backbone, arrays = tiny(family), golden_arrays(family, case)
        inputs = golden_prompt(backbone, family, case)
        places = arrays["position_ids"][None] if FAMILIES[family].first else None
        ids = inputs.pop("input_ids")
        return Golden(backbone, arrays, inputs, backbone.embed(ids, places, **inputs))

    return read


@pytest.fixture(scope="session")
def qwen2_5_vl_directory(tiny_directory: Callable[[str], Path]) -> Path:
    """The tiny Qwen2.5-VL of the goldens as a Hugging Face directory. Read only: copy before changing it."""
    return tiny_directory("qwen2_5_vl")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family)`: a fresh tiny checkpoint that the test may damage."""
    return lambda family, **changes: write_checkpoint(family, tmp_path / family, **changes)
