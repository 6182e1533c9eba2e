"""Kernels compiled ahead of time for Hopper GPUs. Needs the extra `kernels`, not a GPU."""

import functools
import importlib.util
import math
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from ahead_of_time import without_the_compilation_cache  # noqa: F401

from evals.bench.ahead_of_time import SHARED_MEMORY, compile_for
from pallas_kernels import factorise, rotate_patch, splice
from pallas_kernels.shapes import LARGE_MATRICES, PRODUCTION, ChunkShape, arguments_of

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax's CUDA plugin is not installed"
    ),
]
BY_NAME = {shape.name: shape for shape in PRODUCTION}
QWEN = BY_NAME["qwen2_5_vl_7b"]
SHAPES = [
    QWEN,
    QWEN._replace(name="odd_tokens_without_factors", tokens=1025, rank=0),
    QWEN._replace(name="pairs", layout="pairs", rank=256),
    BY_NAME["kimi_vl_rope"]._replace(tokens=1001),
    BY_NAME["kimi_vl_latent"],
    BY_NAME["qwen2_5_vl_7b_4_bits"],
    BY_NAME["qwen2_5_vl_7b_values_4_bits"],
]
"""One for each path: halves and words, 64 columns and 128, factors or none, codes by channel and by token."""


@pytest.fixture
def dump(tmp_path: Path, monkeypatch) -> Path:
    """Where the compiler leaves what it made of a kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return tmp_path


def check_kernel(dump: Path, text: str, shape: ChunkShape) -> None:
    """One kernel; within shared memory; nothing spilled; tensor cores where there are factors."""
    assert text.count('custom_call_target="mosaic_gpu') == 1
    (report,), (ptx,), (resources,) = (dump.glob(ending) for ending in ("*.ptxas", "*.ptx", "*.resources.txt"))
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report.read_text()
    registers = re.findall(r"Used (\d+) registers", report.read_text())
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())
    assert int(shared) + 1024 <= SHARED_MEMORY
    assert ("wgmma.mma_async" in ptx.read_text()) == (shape.rank > 0)
    if os.environ.get("KERNEL_RESOURCES"):
        print(f"\n{registers} registers, {shared} bytes of shared memory")


def copied(text: str, least: int) -> list[str]:
    """Copies, transposes and fusions whose result has at least that many bytes."""
    pattern = r"= \(?(bf16|u32|u16|u8|s8)\[([\d,]+)\]\S* (?:copy|copy-start|transpose|fusion|fusion-start)\("
    sizes = {"bf16": 2, "u32": 4, "u16": 2, "u8": 1, "s8": 1}
    found = [(match, sizes[match[1]]) for match in re.finditer(pattern, text)]
    return [match[0] for match, size in found if size * math.prod(map(int, match[2].split(","))) >= least]


def rotated(given, length, *, layout: str):
    return rotate_patch(**given, length=length, layout=layout, implementation="gpu")


def spliced(pool, slots, given, length, *, layout: str):
    return splice(pool, slots, **given, length=length, layout=layout, implementation="gpu")


CASES = [("NVIDIA H200", shape) for shape in SHAPES]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*CASES, ("NVIDIA H100", QWEN._replace(tokens=256))],
    ids=lambda value: getattr(value, "name", value),
)
def test_rotate_patch_is_one_kernel_without_copies(kind: str, shape: ChunkShape, dump: Path):
    given = arguments_of(shape)
    run = functools.partial(rotated, layout=shape.layout)
    text = compile_for(kind, run, (given, jax.ShapeDtypeStruct((), jnp.int32))).as_text()
    assert text is not None
    check_kernel(dump, text, shape)
    assert copied(text, math.prod(shape.x) * 2 // (4 if shape.group else 1)) == []


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=lambda value: getattr(value, "name", value))
def test_splice_is_one_kernel_in_place(kind: str, shape: ChunkShape, dump: Path):
    pool = jax.ShapeDtypeStruct(shape.pool(shape.tokens // 8, 16), jnp.bfloat16)
    integers = [jax.ShapeDtypeStruct(sizes, jnp.int32) for sizes in ((shape.tokens,), ())]
    arguments = pool, integers[0], arguments_of(shape), integers[1]
    made = compile_for(kind, functools.partial(spliced, layout=shape.layout), arguments, donate=(0,))
    memory, text = made.memory_analysis(), made.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes == 2 * pool.size
    check_kernel(dump, text, shape)
    assert copied(text, math.prod(shape.x) * 2 // (4 if shape.group else 1)) == []


def test_factorise_compiles():
    (shape, *_) = LARGE_MATRICES
    matrix = jax.ShapeDtypeStruct((*shape.batch, shape.tokens, shape.features), jnp.float32)
    run = functools.partial(factorise, rank=shape.rank, method="randomised")
    assert compile_for("NVIDIA H200", run, (matrix,)).as_text()
