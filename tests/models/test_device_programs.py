"""Compiled for an H200 or a TPU v5e, programs of real sizes fit its memory and copy no pool and no experts.

Compiled ahead of time: needs the extra `kernels`, no accelerator. The language tower has four layers: temporaries do
not depend on their number, and one v5e holds no 7B model.
"""
# pyright: reportMissingImports=false

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvpatch_jax.models.attention import Mask, attention
from kvpatch_jax.models.decoder.grouped import mix_experts
from tests.models.compiled_programs import (
    EXPERTS_30B,
    TWELVE_MEGAPIXELS,
    Program,
    experts_program,
    paged_programs,
    pool_copies,
    prefill_program,
    temporaries,
    tower_program,
)
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

LAYERS = 4
MIB = 2**-10
"""In GiB."""
NAMES = {"h200": "NVIDIA H200", "v5e": "v5e:2x2"}
PACKAGES = {"h200": "jax_cuda13_plugin", "v5e": "libtpu"}
ABSENT = {device: importlib.util.find_spec(package) is None for device, package in PACKAGES.items()}
pytestmark = pytest.mark.device
needs_h200, needs_v5e = (pytest.mark.skipif(ABSENT[device], reason="no compiler") for device in ("h200", "v5e"))
devices = pytest.mark.parametrize(
    "device", [pytest.param("h200", marks=needs_h200), pytest.param("v5e", marks=needs_v5e)]
)


def compiled_on(device: str, program: Program) -> Any:
    from evals.bench.ahead_of_time import compile_for

    return compile_for(NAMES[device], program.function, program.arguments, program.donate)


def temporaries_on(device: str, program: Program) -> float:
    return temporaries(compiled_on(device, program))


@devices
def test_long_prefills_fit_a_devices_memory(device):
    """16k tokens at once, and 64k in chunks."""
    options = {"layers": LAYERS, "implementation": ("xla",)}
    assert temporaries_on(device, prefill_program(16384, **options)) < 3
    assert temporaries_on(device, prefill_program(65536, 2048, **options)) < 4


@devices
@pytest.mark.parametrize("name", ["prefill", "step"])
def test_a_pool_is_not_copied(device, name):
    """The layout that attention likes is made of the window's pages, not of the pool."""
    compiled = compiled_on(device, paged_programs(4096, 65536, layers=2)[name])
    assert pool_copies(compiled, 65536) == []
    assert temporaries(compiled) < 0.6
    if name == "step":
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * 2 * 65536 * 4 * 128 * 2


@devices
def test_a_tower_over_12_megapixels_fits(device):
    assert temporaries_on(device, tower_program("Qwen/Qwen2.5-VL-7B-Instruct", TWELVE_MEGAPIXELS, ("xla",))) < 4


@needs_v5e
def test_splash_attention_for_a_tpu():
    """Taken unasked while compiling for one: a kernel in every layer, and no larger than the blockwise form's."""
    compiled = compiled_on("v5e", prefill_program(16384, layers=LAYERS))
    assert temporaries(compiled) < 3
    assert "splash" in (compiled.as_text() or "")


@needs_v5e
@pytest.mark.parametrize(("tokens", "most"), [(1, 8), (4096, 600), (16384, 800)])
def test_a_v5e_copies_no_layers_experts(tokens, most):
    """The compiler counts its own grouped kernel, and of a loop over tokens or blocks one trip."""
    compiled = compiled_on("v5e", experts_program(tokens, LAYERS))
    assert temporaries(compiled) <= most * MIB
    cost: Any = compiled.cost_analysis()
    width, inner = EXPERTS_30B["width"], EXPERTS_30B["inner"]
    if tokens == 1:  # one block of eight
        assert cost["bytes accessed"] <= 2 * 3 * 2 * width * inner
    else:
        active = 2 * 3 * 4096 * EXPERTS_30B["chosen"] * width * inner
        assert active <= cost["flops"] <= 1.3 * active


@needs_h200
@pytest.mark.parametrize(("tokens", "most"), [(1, 20), (4096, 64)])
def test_an_h200_copies_no_layers_experts(tokens, most):
    """Block by block; a layer's experts are 1152 MiB."""
    mix = lambda x, index, weights, stack, layer: mix_experts(
        x, index, weights, stack, jax.nn.silu, layer=layer, implementation="blockwise"
    )
    compiled = compiled_on("h200", experts_program(tokens)._replace(function=mix))
    assert temporaries(compiled) <= most * MIB


@needs_h200
@pytest.mark.parametrize(("tokens", "most"), [(64, 64), (4096, 300), (16384, 300)])
def test_the_kernel_of_an_h200(tokens, most, tmp_path, monkeypatch):
    """Three launches; every pair's row is held, no layer's experts; two thread blocks fit a processor; no spills."""
    from evals.bench.ahead_of_time import SHARED_MEMORY

    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compiled_on("h200", experts_program(tokens))
    assert temporaries(compiled) <= most * MIB
    assert (compiled.as_text() or "").count('custom_call_target="mosaic_gpu') == 3
    if tokens > 4096:
        return
    reports, resources, programs = (
        [file.read_text() for file in tmp_path.glob(f"*.{kind}")] for kind in ("ptxas", "resources.txt", "ptx")
    )
    assert len(reports) == len(programs) == 2  # gate and up are one program
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report for report in reports)
    shared = [int(size) for text in resources for size in re.findall(r"smem_scratch_bytes=(\d+)", text)]
    assert 2 * (max(shared) + 1024) <= SHARED_MEMORY
    for program in programs:
        assert "wgmma.mma_async" in program
        # The next piece is fetched into memory that products of the step before have read.
        assert re.search(r"wgmma\.commit_group.*wgmma\.wait_group\.sync\.aligned\s+1;", program, re.DOTALL)


@needs_h200
@pytest.mark.parametrize("window", [None, 1024])
def test_cudnn_attention_on_an_h200(window, monkeypatch):
    """One call, and next to no memory beside it. cuDNN, which makes its plan, is not there: jax is told it is."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    query, key = (jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16) for heads in (28, 4))
    mask = Mask(causal=True, window=window)
    program = Program(lambda q, k, v: attention(q, k, v, mask, scale=0.1), (query, key, key))
    compiled = compiled_on("h200", program)
    text = compiled.as_text() or ""
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert '"mask_type": "CAUSAL"' in text
    assert f'"sliding_window_length": {window or 0},' in text
    assert temporaries(compiled) <= MIB
