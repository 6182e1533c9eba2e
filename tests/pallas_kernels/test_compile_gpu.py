"""Kernels compiled ahead of time for an H200, at production shapes. Needs the extra `kernels`, not a GPU."""
# pyright: reportOptionalMemberAccess=false

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ahead_of_time import (  # noqa: F401
    SHARED_MEMORY,
    SPEC,
    chunk_of,
    compile_for_h200,
    without_the_compilation_cache,
)

from pallas_kernels import factorise, rotate_patch, splice
from pallas_kernels.rotate_patch.shapes import PRODUCTION, RotateShape
from pallas_kernels.splice import shapes as splice_shapes

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax's CUDA plugin is not installed"
    ),
]


@pytest.fixture
def dump(tmp_path: Path, monkeypatch) -> Path:
    """Where the compiler leaves what it made of a kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return tmp_path


def compiled(function, *arguments, donate: tuple[int, ...] = ()):
    """`function`, compiled for one H200 that is not there."""
    return compile_for_h200(function, arguments, donate)


def text_of(made) -> str:
    """The compiled program as text."""
    text = made.as_text()
    assert text is not None
    return text


def check_kernel(dump: Path, text: str, rank: int) -> None:
    """One kernel; within shared memory; nothing spilled; tensor cores where there are factors."""
    assert text.count('custom_call_target="mosaic_gpu') == 1
    (report,) = dump.glob("*.ptxas")
    (ptx,) = dump.glob("*.ptx")
    (resources,) = dump.glob("*.resources.txt")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report.read_text()
    registers = re.search(r"Used (\d+) registers", report.read_text())
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())
    assert registers is not None
    assert shared is not None
    assert int(shared[1]) + 1024 <= SHARED_MEMORY
    assert ("wgmma.mma_async" in ptx.read_text()) == (rank > 0)
    if os.environ.get("KERNEL_RESOURCES"):
        print(f"\n{registers[1]} registers, {shared[1]} bytes of shared memory")
    for file in (report, ptx, resources):
        file.unlink()


def copied(text: str, sizes: tuple[int, ...]) -> list[str]:
    """Copies and transposes of arrays with that many elements."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= \(?(?:bf16|u32|u16|s8|f8\w+)\[([\d,]+)\]\S* (?:copy|copy-start|transpose|fusion|fusion-start)\(", line
        )
        if match:
            elements = 1
            for size in match[1].split(","):
                elements *= int(size)
            found += [line.strip()[:120]] if elements in sizes else []
    return found


# Rank 16 in every shape; no factors, and many, by default in one.
CASES = pytest.mark.parametrize(
    ("shape", "rank"),
    [
        pytest.param(
            shape,
            rank,
            marks=pytest.mark.slow if rank != 16 and shape.name != PRODUCTION[0].name else (),
            id=f"{shape.name}-{rank}",
        )
        for shape in PRODUCTION
        for rank in (0, 16, 64)
        if shape.rotary or rank
    ],
)


@CASES
def test_rotate_patch_is_one_kernel_without_copies(shape: RotateShape, rank: int, dump: Path):
    for tokens in (shape.tokens, 4 * shape.tokens + 1):
        given = chunk_of(shape, tokens, rank)
        run = lambda given, length: rotate_patch(**given, layout=shape.layout, length=length, implementation="gpu")
        text = text_of(compiled(run, given, SPEC((), jnp.int32)))
        check_kernel(dump, text, rank)
        assert copied(text, (given["x"].size, given["x"].size // 2)) == []


@CASES
def test_splice_is_one_kernel_in_place(shape: RotateShape, rank: int, dump: Path):
    (paged,) = (case for case in splice_shapes.PRODUCTION if case.name == shape.name)
    pool = SPEC(paged.pool, jnp.bfloat16)
    for tokens in (shape.tokens, 4 * shape.tokens + 1):
        given = chunk_of(shape, tokens, rank)
        run = lambda pool, slots, given, length: splice(
            pool, slots, **given, layout=shape.layout, length=length, implementation="gpu"
        )
        made = compiled(run, pool, SPEC((tokens,), jnp.int32), given, SPEC((), jnp.int32), donate=(0,))
        assert made.memory_analysis().alias_size_in_bytes == 2 * pool.size
        # Tables, and u where tokens are odd, are padded; nothing else is made on the way.
        small = sum(given[name].size * given[name].dtype.itemsize for name in ("cos", "sin", "u") if name in given)
        assert made.memory_analysis().temp_size_in_bytes < 2**20 + 1.1 * small
        check_kernel(dump, text_of(made), rank)
        assert copied(text_of(made), (pool.size, pool.size // 2, given["x"].size, given["x"].size // 2)) == []


@pytest.mark.parametrize(
    ("heads", "width", "rotary", "layout", "dtype", "factors"),
    [
        (1, 64, 64, "pairs", jnp.bfloat16, jnp.bfloat16),
        (4, 128, 128, "pairs", jnp.bfloat16, jnp.float32),
        (2, 256, 128, "half", jnp.bfloat16, jnp.bfloat16),
        (4, 128, 128, "half", jnp.float32, jnp.float32),
        (1, 64, 64, "pairs", jnp.float32, jnp.bfloat16),
    ],
)
def test_other_layouts_and_dtypes_compile(heads, width, rotary, layout, dtype, factors, dump: Path):
    shape = RotateShape("other", (3,), 200, heads, width, rotary, 32, layout)
    given = chunk_of(shape, 200, 32)
    given |= {"x": SPEC(given["x"].shape, dtype), "dense": SPEC(given["x"].shape, dtype)}
    given |= {name: SPEC(given[name].shape, factors) for name in ("u", "v")}
    run = lambda given: rotate_patch(**given, layout=layout, implementation="gpu")
    check_kernel(dump, text_of(compiled(run, given)), 32)
    pool = SPEC((3, 8, 64, heads, width), dtype)
    write = lambda pool, slots, given: splice(pool, slots, **given, layout=layout, implementation="gpu")
    made = compiled(write, pool, SPEC((200,), jnp.int32), given, donate=(0,))
    assert made.memory_analysis().alias_size_in_bytes == pool.size * pool.dtype.itemsize
    check_kernel(dump, text_of(made), 32)


@pytest.mark.parametrize(
    ("name", "rank", "layout", "dtype"),
    [
        ("qwen2_5_vl_7b", 16, "half", "int8"),
        ("llava_1_5_7b", 0, "half", "float8_e5m2"),
        ("kimi_vl_rope", 8, "half", "int8"),
        ("kimi_vl_rope", 8, "pairs", "float8_e4m3fn"),
        ("kimi_vl_latent", 64, "half", "float8_e4m3fn"),
    ],
)
def test_eight_bits_with_scales_are_one_kernel(name: str, rank: int, layout: str, dtype: str, dump: Path):
    (paged,) = (case for case in splice_shapes.PRODUCTION if case.name == name)
    given = chunk_of(paged.chunk, paged.chunk.tokens, rank, dtype)
    sizes = given["x"].size, given["x"].size // 2
    plan: dict[str, Any] = {"layout": layout, "implementation": "gpu"}
    run = lambda given, length: rotate_patch(**given, length=length, out_dtype=jnp.bfloat16, **plan)
    text = text_of(compiled(run, given, SPEC((), jnp.int32)))
    check_kernel(dump, text, rank)
    assert copied(text, sizes) == []
    pool = SPEC(paged.pool, jnp.bfloat16)
    write = lambda pool, slots, given: splice(pool, slots, **given, **plan)
    made = compiled(write, pool, SPEC((paged.chunk.tokens,), jnp.int32), given, donate=(0,))
    memory, text = made.memory_analysis(), text_of(made)
    assert memory.alias_size_in_bytes == 2 * pool.size
    # Factors are widened, to two pieces of bfloat16; x never is.
    factors = sum(4 * given[name].size for name in ("u", "v") if name in given)
    assert memory.temp_size_in_bytes < 2**20 + 1.1 * factors
    check_kernel(dump, text, rank)
    assert copied(text, (pool.size, pool.size // 2, *sizes)) == []


@pytest.mark.parametrize("method", ["randomised", "exact"])
def test_factorise_compiles(method: str):
    run = lambda matrix: factorise(matrix, 32, method=method)
    made = compiled(run, SPEC((28, 1024, 512), jnp.float32))
    u, v = jax.tree.leaves(made.out_info)
    assert (u.shape, v.shape) == ((28, 1024, 32), (28, 32, 512))
