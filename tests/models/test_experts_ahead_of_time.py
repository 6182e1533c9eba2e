"""Experts at the shape of Qwen3-30B-A3B, compiled ahead of time. Needs the extra `kernels`, no accelerator."""

import importlib.util
from typing import Any

import jax
import pytest

from pallas_kernels._ahead_of_time import compile_for_h200, compile_for_tpu
from tests.models.test_experts import MODEL, mix_30b, shapes_of_30b
from tests.pallas_kernels.ahead_of_time import without_the_compilation_cache  # noqa: F401

absent = lambda name: importlib.util.find_spec(name) is None
pytestmark = pytest.mark.aot
LAYERS = 4
"""Of 48: the whole stack is larger than one v5e's memory."""


def temporaries(compiled: Any) -> float:
    """MiB."""
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.skipif(absent("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("tokens", "most"), [(1, 8), (4096, 600), (16384, 800)])
def test_on_a_v5e(tokens, most):
    """The compiler counts its own grouped kernel, and of a loop over tokens or blocks one trip."""
    compiled = compile_for_tpu("v5e:2x2", mix_30b, shapes_of_30b(tokens, LAYERS))
    assert temporaries(compiled) <= most
    cost: Any = compiled.cost_analysis()
    if tokens == 1:  # one block of eight
        assert cost["bytes accessed"] <= 2 * 3 * 2 * MODEL["width"] * MODEL["inner"]
    else:
        active = 2 * 3 * 4096 * MODEL["chosen"] * MODEL["width"] * MODEL["inner"]
        assert active <= cost["flops"] <= 1.3 * active


@pytest.mark.skipif(absent("jax_cuda13_plugin"), reason="jax's CUDA plugin is not installed")
@pytest.mark.parametrize(("tokens", "most"), [(1, 20), (4096, 64)])
def test_on_an_h200(tokens, most):
    """No layer's experts are copied: 1152 MiB."""
    compiled = compile_for_h200(mix_30b, shapes_of_30b(tokens))
    assert temporaries(compiled) <= most
    assert jax.tree.leaves(compiled.output_shardings)
