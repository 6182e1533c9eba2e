"""Compiled ahead of time for GPUs and TPUs, each kernel is one launch, in place, without spills and copies.

Needs the extra `kernels`, no accelerator. Shapes are those of released models.
"""

import functools
import importlib.util
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from evals.bench.ahead_of_time import SHARED_MEMORY, compile_for
from pallas_kernels import rotate_patch, splice
from pallas_kernels.shapes import PRODUCTION, ChunkShape, arguments_of
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

pytestmark = pytest.mark.device
gpu = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax's CUDA plugin is not installed"
)
tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

SPEC = jax.ShapeDtypeStruct
QWEN, ROPE, LATENT, MHA, KEYS, VALUES = PRODUCTION


def cases(*pairs: tuple[str, ChunkShape]):
    params = [pytest.param(*pair, id=f"{pair[0]}-{pair[1].name}") for pair in pairs]
    return pytest.mark.parametrize(("device", "shape"), params)


def elements(text: str, operations: str) -> list[tuple[str, int]]:
    """Dtypes and numbers of elements of the results of some operations of a program."""
    results = re.findall(rf"= \(?(\w+)\[([\d,]+)\]\S* (?:{operations})\(", text)
    return [(dtype, math.prod(map(int, sizes.split(",")))) for dtype, sizes in results]


def rotated(given, length, *, layout: str, implementation: str):
    return rotate_patch(**given, length=length, layout=layout, implementation=implementation)


def spliced(pool, slots, given, length, *, layout: str, implementation: str):
    return splice(pool, slots, **given, length=length, layout=layout, implementation=implementation)


@pytest.fixture
def dump(tmp_path: Path, monkeypatch) -> Path:
    """Where the compiler leaves what it made of a kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return tmp_path


def check_kernel(dump: Path, text: str, shape: ChunkShape) -> None:
    """One kernel; within shared memory; nothing spilled or copied; tensor cores where there are factors."""
    assert text.count('custom_call_target="mosaic_gpu') == 1
    (report,), (ptx,), (resources,) = (dump.glob(ending) for ending in ("*.ptxas", "*.ptx", "*.resources.txt"))
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report.read_text()
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())
    assert int(shared) + 1024 <= SHARED_MEMORY
    assert ("wgmma.mma_async" in ptx.read_text()) == (shape.rank > 0)
    sizes = {"bf16": 2, "u32": 4, "u16": 2, "u8": 1, "s8": 1}
    moves = elements(text, "copy|copy-start|transpose|fusion|fusion-start")
    channel = math.prod(shape.x) * 2 // (4 if shape.group else 1)
    assert not [move for move in moves if sizes.get(move[0], 0) * move[1] >= channel]


# One for each path: halves and words, 64 columns and 128, factors or none, codes by channel and by token.
GPU_SHAPES = (
    QWEN,
    QWEN._replace(name="odd_tokens_without_factors", tokens=1025, rank=0),
    QWEN._replace(name="pairs", layout="pairs", rank=256),
    ROPE._replace(tokens=1001),
    LATENT,
    KEYS,
    VALUES,
)
ON_GPU = [("NVIDIA H200", shape) for shape in GPU_SHAPES]


@gpu
@cases(*ON_GPU, ("NVIDIA H100", QWEN._replace(tokens=256)))
def test_rotate_patch_on_gpus(device: str, shape: ChunkShape, dump: Path):
    run = functools.partial(rotated, layout=shape.layout, implementation="gpu")
    check_kernel(dump, compile_for(device, run, (arguments_of(shape), SPEC((), jnp.int32))).as_text() or "", shape)


@gpu
@cases(*ON_GPU)
def test_splice_on_gpus(device: str, shape: ChunkShape, dump: Path):
    pool = SPEC(shape.pool(shape.tokens // 8, 16), jnp.bfloat16)
    arguments = pool, SPEC((shape.tokens,), jnp.int32), arguments_of(shape), SPEC((), jnp.int32)
    run = functools.partial(spliced, layout=shape.layout, implementation="gpu")
    program = compile_for(device, run, arguments, donate=(0,))
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 2 * pool.size
    check_kernel(dump, program.as_text() or "", shape)


V5E, V5P, V6E = "v5e:2x2", "v5p:2x2x1", "v6e:2x2"
WIDE, LONG = ChunkShape("gemma", 26, 1000, 4, 256, 256, 0, "pairs"), KEYS._replace(name="long", tokens=16384)
ON_TPU = [(V5E, QWEN), (V5P, QWEN), (V6E, QWEN), (V5E, LATENT), (V5E, MHA), (V5E, KEYS), (V5P, LONG), (V6E, VALUES)]


def copied(text: str) -> list[int]:
    """Returns the number of elements of each array that the program copies or lays out anew."""
    return [size for _, size in elements(text, "copy|transpose|bitcast-convert")]


@tpu
@cases(*ON_TPU, (V5E, ROPE), (V5E, WIDE))
def test_rotate_patch_on_tpus(device: str, shape: ChunkShape):
    run = functools.partial(rotated, layout=shape.layout, implementation="tpu")
    text = compile_for(device, run, (arguments_of(shape, "float32"), SPEC((), jnp.int32))).as_text() or ""
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    channel = math.prod(shape.x) // (2 if shape.group else 1)
    assert (channel in copied(text)) == (shape.width % 128 != 0)


@tpu
@cases(*ON_TPU, (V6E, LATENT), (V5E, ROPE))
def test_splice_on_tpus(device: str, shape: ChunkShape):
    """In pools as wide as whole registers: that of rope keys is padded."""
    pool = SPEC(shape.pool(256, 64, -(-shape.width // 128) * 128), jnp.bfloat16)
    arguments = pool, SPEC((shape.tokens,), jnp.int32), arguments_of(shape), SPEC((), jnp.int32)
    run = functools.partial(spliced, layout=shape.layout, implementation="tpu")
    program = compile_for(device, run, arguments, (0,))
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.alias_size_in_bytes >= 2 * pool.size
    assert memory.temp_size_in_bytes < pool.size
    assert pool.size not in copied(text)
