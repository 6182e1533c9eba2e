"""Experts at the shape of Qwen3-30B-A3B and cuDNN's attention, compiled ahead of time.

Needs the extra `kernels`, no accelerator.
"""

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from evals.bench.ahead_of_time import SHARED_MEMORY, compile_for
from kvpatch_jax.models.attention import Mask, attention
from kvpatch_jax.models.decoder.grouped import mix_experts
from tests.models.test_experts import MODEL, mix_30b, shapes_of_30b
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

absent = lambda name: importlib.util.find_spec(name) is None
pytestmark = pytest.mark.device
LAYERS = 4
"""Of 48: the whole stack is larger than one v5e's memory."""


def temporaries(compiled: Any) -> float:
    """MiB."""
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


@pytest.mark.skipif(absent("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize(("tokens", "most"), [(1, 8), (4096, 600), (16384, 800)])
def test_a_v5e_copies_no_layers_experts(tokens, most):
    """The compiler counts its own grouped kernel, and of a loop over tokens or blocks one trip."""
    compiled = compile_for("v5e:2x2", mix_30b, shapes_of_30b(tokens, LAYERS))
    assert temporaries(compiled) <= most
    cost: Any = compiled.cost_analysis()
    if tokens == 1:  # one block of eight
        assert cost["bytes accessed"] <= 2 * 3 * 2 * MODEL["width"] * MODEL["inner"]
    else:
        active = 2 * 3 * 4096 * MODEL["chosen"] * MODEL["width"] * MODEL["inner"]
        assert active <= cost["flops"] <= 1.3 * active


needs_cuda = pytest.mark.skipif(absent("jax_cuda13_plugin"), reason="jax's CUDA plugin is not installed")


@needs_cuda
@pytest.mark.parametrize(("tokens", "most"), [(1, 20), (4096, 64)])
def test_an_h200_copies_no_layers_experts(tokens, most):
    """No layer's experts are copied: 1152 MiB."""
    mix = lambda x, index, weights, stack, layer: mix_experts(
        x, index, weights, stack, jax.nn.silu, layer=layer, implementation="blockwise"
    )
    compiled = compile_for("NVIDIA H200", mix, shapes_of_30b(tokens))
    assert temporaries(compiled) <= most
    assert jax.tree.leaves(compiled.output_shardings)


@needs_cuda
@pytest.mark.parametrize(("tokens", "most"), [(64, 64), (4096, 300)])
def test_kernel_on_an_h200(tokens, most, tmp_path, monkeypatch):
    """Three launches; every pair's row is held, no layer's experts; two thread blocks fit a processor; no spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for("NVIDIA H200", mix_30b, shapes_of_30b(tokens))
    assert temporaries(compiled) <= most
    assert (compiled.as_text() or "").count('custom_call_target="mosaic_gpu') == 3
    reports, resources, programs = (
        [file.read_text() for file in tmp_path.glob(f"*.{kind}")] for kind in ("ptxas", "resources.txt", "ptx")
    )
    assert len(reports) == len(programs) == 2  # gate and up are one program
    assert all("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report for report in reports)
    shared = [int(found) for text in resources for found in re.findall(r"smem_scratch_bytes=(\d+)", text)]
    assert 2 * (max(shared) + 1024) <= SHARED_MEMORY
    for program in programs:
        assert "wgmma.mma_async" in program
        # The next piece is fetched into memory that products of the step before have read.
        assert re.search(r"wgmma\.commit_group.*wgmma\.wait_group\.sync\.aligned\s+1;", program, re.DOTALL)


@needs_cuda
def test_the_kernels_memory_does_not_grow_with_tokens():
    assert temporaries(compile_for("NVIDIA H200", mix_30b, shapes_of_30b(16384))) <= 300


@needs_cuda
def test_ragged_dot_on_an_h200_multiplies_every_expert():
    """Why it is not taken there: a row of every expert for every pair is 16 GiB, at one layer's shape."""
    spec, (experts, width, inner) = jax.ShapeDtypeStruct, (MODEL[name] for name in ("experts", "width", "inner"))
    arrays = spec((32768, width), jnp.bfloat16), spec((experts, width, inner), jnp.bfloat16)
    compiled = compile_for("NVIDIA H200", jax.lax.ragged_dot, (*arrays, spec((experts,), jnp.int32)))
    assert temporaries(compiled) >= experts * 32768 * width * 2 / 2**20


@needs_cuda
@pytest.mark.parametrize("window", [None, 1024])
def test_cudnn_attention_on_an_h200(window, monkeypatch):
    """One call, and next to no memory beside it. cuDNN, which makes its plan, is not there: jax is told it is."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    query, key = (jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16) for heads in (28, 4))
    mask = Mask(causal=True, window=window)
    compiled = compile_for("NVIDIA H200", lambda q, k, v: attention(q, k, v, mask, scale=0.1), (query, key, key))
    text = compiled.as_text() or ""
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert '"mask_type": "CAUSAL"' in text
    assert f'"sliding_window_length": {window or 0},' in text
    assert temporaries(compiled) <= 1
