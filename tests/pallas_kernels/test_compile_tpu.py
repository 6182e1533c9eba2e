"""Kernels compiled ahead of time for TPUs, at production shapes. Needs the extra `kernels`, not a TPU."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import SPEC, chunk_of, without_the_compilation_cache  # noqa: F401

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, ChunkKey, PatchMetadata
from pallas_kernels import rotate_patch, splice
from pallas_kernels._ahead_of_time import compile_for_tpu
from pallas_kernels.rotate_patch.shapes import PRODUCTION, RotateShape
from pallas_kernels.splice.shapes import PRODUCTION as POOLS
from pallas_kernels.splice.shapes import SpliceShape

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
TOPOLOGIES = pytest.mark.parametrize("topology", TPUS)


def every(shapes):
    """Each shape on the first TPU at ranks 0 and 64, and on the others at rank 16."""
    return pytest.mark.parametrize(
        ("shape", "topology", "rank"),
        [
            pytest.param(shape, topology, rank, id=f"{shape.name}-{topology}-{rank}")
            for shape in shapes
            for topology, rank in ((TPUS[0], 0), (TPUS[0], 64), (TPUS[1], 16), (TPUS[2], 16))
        ],
    )


def compiled_for(topology: str, function, *arguments, donate: tuple[int, ...] = ()):
    """`function`, compiled for one chip of a TPU that is not there."""
    return compile_for_tpu(topology, function, arguments, donate)


def copied(text: str) -> list[int]:
    """Numbers in each array that the program copies or lays out anew."""
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|bitcast-convert)\(", text)
    return [math.prod(map(int, size.split(","))) for size in sizes]


@every(PRODUCTION)
def test_rotate_patch_compiles_to_one_kernel_without_copying_the_channel(shape: RotateShape, topology: str, rank: int):
    if not shape.rotary and not rank:
        pytest.skip("a plain channel without a patch is a copy")
    run = lambda given, length: rotate_patch(**given, layout=shape.layout, length=length, implementation="tpu")
    for tokens in (shape.tokens, 4 * shape.tokens + 1):
        text = compiled_for(topology, run, chunk_of(shape, tokens, rank), SPEC((), jnp.int32)).as_text()
        assert text is not None
        assert text.count('custom_call_target="tpu_custom_call"') == 1
        if shape.width % 128 == 0:
            assert shape.leading[0] * tokens * shape.heads * shape.width not in copied(text)


def check_splice(shape: SpliceShape, topology: str, tokens: int, rank: int, dtype: str = "bfloat16") -> None:
    """Compiles a splice: the pool comes back where it was; by one kernel and not copied where it fills whole lanes."""
    chunk = shape.chunk
    run = lambda pool, slots, given, length: splice(
        pool, slots, **given, layout=chunk.layout, length=length, implementation=("tpu", "xla")
    )
    pool = SPEC(shape.pool, jnp.bfloat16)
    given = (pool, SPEC((tokens,), jnp.int32), chunk_of(chunk, tokens, rank, dtype), SPEC((), jnp.int32))
    compiled = compiled_for(topology, run, *given, donate=(0,))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    elements = math.prod(shape.pool)
    assert memory.alias_size_in_bytes >= 2 * elements
    whole_lanes = chunk.width % 128 == 0
    assert text.count('custom_call_target="tpu_custom_call"') == whole_lanes
    # XLA lays an array of half-filled lanes out with pages innermost, and copies it there and back to scatter into it.
    assert (elements in copied(text)) != whole_lanes
    if whole_lanes:  # the chunk may be laid out anew (a padded `kpe` on v5p is); a pool takes 2 · elements bytes
        assert memory.temp_size_in_bytes < elements


@every(POOLS)
def test_splice_writes_where_the_pool_lies(shape: SpliceShape, topology: str, rank: int):
    for tokens in (shape.chunk.tokens, 4 * shape.chunk.tokens + 1):
        check_splice(shape, topology, tokens, rank)


@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        pytest.param(topology, dtype, marks=pytest.mark.slow if dtype != "int8" and topology != TPUS[0] else ())
        for topology in TPUS
        for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
    ],
)
def test_eight_bit_chunks_compile(topology: str, dtype: str):
    for shape in (POOLS[0], POOLS[3]):
        check_splice(shape, topology, shape.chunk.tokens, 16, dtype)
    run = lambda given: rotate_patch(**given, layout="half", out_dtype=jnp.bfloat16, implementation="tpu")
    text = compiled_for(topology, run, chunk_of(PRODUCTION[1], 1024, 16, dtype)).as_text()
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1


def kimi_vl() -> tuple[kvp.KVLayout, kvp.Chunk]:
    """Kimi-VL's layout, and a chunk of one image whose numbers do not matter."""
    layout = kvp.KVLayout.mla(27, 512, 64, rope=kvp.Rope(8e5, 64))
    kv = {name: jnp.zeros((27, 1088, 1, layout.channel(name).width), jnp.bfloat16) for name in layout.names}
    local = np.arange(1088, dtype=np.float32)
    return layout, kvp.Chunk(kv=kv, local=local, span=1088, length=1080, id="B", layout=layout, backbone="kimi-vl")


@TOPOLOGIES
def test_a_padded_pool_is_written_in_place_through_the_public_face(topology: str):
    layout, chunk = kimi_vl()
    behind, before = Antecedent.of("A"), Antecedent.of("C", "A")
    metadata = PatchMetadata(ChunkKey("B", "kimi-vl", layout), behind, tuple(range(27)), "conditioned", before)
    shapes = lambda make: {channel.name: SPEC(make(channel), jnp.bfloat16) for channel in layout.channels}
    factors = tuple(
        shapes(make) for make in (lambda channel: (27, 1088, 32), lambda channel: (27, 32, channel.features))
    )
    pool = jax.eval_shape(lambda: kvp.pool.make_pool(layout, 256, 64, padded=True))
    assert {name: leaf.shape[-1] for name, leaf in pool.items()} == {"ckv": 512, "kpe": 128}

    def run(pool, slots, base, factors, start):
        patch = kvp.Patch({name: tuple(side[name] for side in factors) for name in layout.names}, metadata)
        given = {"base": base, "base_antecedent": ("C", "A")}
        return kvp.pool.splice(pool, slots, kvp.Placed(chunk, patch, start, ("A",), **given))

    base = shapes(lambda channel: (27, 1088, 1, channel.width))
    arguments = (pool, SPEC((1088,), jnp.int32), base, factors, SPEC((), jnp.int32))
    compiled = compiled_for(topology, run, *arguments, donate=(0,))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    sizes = [math.prod(leaf.shape) for leaf in pool.values()]
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert memory.alias_size_in_bytes >= 2 * sum(sizes)
    assert not set(sizes) & set(copied(text))
    assert memory.temp_size_in_bytes < 2 * min(sizes)
