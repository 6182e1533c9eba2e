"""Fixtures for the models: the tiny checkpoints of `tests/goldens`, rebuilt in a temporary directory."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # `tests` and the four packages resolve from the root, however pytest was started
    sys.path.insert(0, str(ROOT))

from tests.goldens.load import write_checkpoint  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def tiny_clip() -> None:
    """Makes the goldens' CLIP one of those that Phi-3-vision's configuration can name: it has names and no sizes."""
    from kvpatch_jax.models.families import phi3_v

    sizes = {"depth": 3, "width": 32, "heads": 2, "intermediate": 48, "image": 16, "patch": 4}
    phi3_v.TOWERS["tiny"] = sizes


@pytest.fixture(scope="session")
def qwen2_5_vl_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen2.5-VL of the goldens as a Hugging Face directory. Read only: copy before changing it."""
    return write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoints") / "qwen2_5_vl")


@pytest.fixture
def unchecked():
    """Switches the shape hook off, so that our own typed error is what a test sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def highest_precision():
    """Computes products of float32 in float32, whatever the platform's default is."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family, config="config.json")`: a fresh tiny checkpoint that the test may damage."""
    return lambda family, **options: write_checkpoint(family, tmp_path / family, **options)
