"""Memory of real sizes on an H200 and a TPU v5e, compiled ahead of time. Needs the extra `kernels`, no accelerator.

The language tower has four layers: temporaries do not depend on their number, and one v5e holds no 7B model.
"""
# pyright: reportMissingImports=false

import importlib.util

import pytest

from evals.bench.ahead_of_time import compile_for
from tests.models.compiled_memory import (
    TWELVE_MEGAPIXELS,
    Program,
    paged_programs,
    pool_copies,
    prefill_program,
    temporaries,
    tower_program,
)
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

LAYERS = 4
TOWER = "Qwen/Qwen2.5-VL-7B-Instruct"
MISSING = {
    "h200": importlib.util.find_spec("jax_cuda13_plugin") is None,
    "v5e": importlib.util.find_spec("libtpu") is None,
}
pytestmark = pytest.mark.device
devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(name, marks=pytest.mark.skipif(not_here, reason="no compiler"))
        for name, not_here in MISSING.items()
    ],
)


def compiled_on(device: str, program: Program):
    if device == "h200":
        return compile_for("NVIDIA H200", program.function, program.arguments, program.donate)
    return compile_for("v5e:2x2", program.function, program.arguments, program.donate)


def temporaries_on(device: str, program: Program) -> float:
    return temporaries(compiled_on(device, program))


@devices
def test_long_prefills_fit_a_devices_memory(device):
    """16k tokens at once, and 64k in chunks."""
    how = {"layers": LAYERS, "implementation": ("xla",)}
    assert temporaries_on(device, prefill_program(16384, **how)) < 3
    assert temporaries_on(device, prefill_program(65536, 2048, **how)) < 4


@devices
@pytest.mark.parametrize("name", ["prefill", "step"])
def test_a_pool_is_read_and_written_where_it_lies(device, name):
    """The layout that attention likes is made of the window's pages, not of the pool."""
    compiled = compiled_on(device, paged_programs(4096, 65536, layers=2)[name])
    assert pool_copies(compiled, 65536) == []
    assert temporaries(compiled) < 0.6
    if name == "step":
        analysis = compiled.memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes >= 2 * 2 * 65536 * 4 * 128 * 2


@devices
def test_a_tower_over_12_megapixels(device):
    assert temporaries_on(device, tower_program(TOWER, TWELVE_MEGAPIXELS, ("xla",))) < 4


@pytest.mark.skipif(MISSING["v5e"], reason="no compiler")
def test_splash_attention_for_a_tpu():
    """Taken unasked while compiling for one: a kernel in every layer, and no larger than the blockwise form's."""
    program = prefill_program(16384, layers=LAYERS)
    made = compile_for("v5e:2x2", program.function, program.arguments)
    assert temporaries(made) < 3
    assert "splash" in (made.as_text() or "")
