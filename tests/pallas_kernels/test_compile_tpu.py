"""Kernels compiled ahead of time for TPUs, at production shapes. Needs the extra `kernels`, not a TPU."""

import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import without_the_compilation_cache  # noqa: F401

import kvpatch_jax as kvp
from evals.bench.ahead_of_time import compile_for
from kvpatch_jax.cache import Antecedent, ChunkKey, PatchMetadata
from pallas_kernels import rotate_patch, splice
from pallas_kernels.shapes import PRODUCTION, ChunkShape, arguments_of

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

SPEC = jax.ShapeDtypeStruct
V5E, V5P, V6E = TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
GQA, ROPE, LATENT, MHA, KEYS, VALUES = PRODUCTION
WIDE = ChunkShape("gemma", 26, 1000, 4, 256, 256, 0, "pairs")
LONG = KEYS._replace(name="long", tokens=16384)


def cases(*pairs):
    return pytest.mark.parametrize(
        ("shape", "topology"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in pairs]
    )


def compiled(topology: str, function, *arguments, donate: tuple[int, ...] = ()) -> tuple[str, Any]:
    """Returns the program for one chip of a TPU that is not there, and what memory it takes."""
    program = compile_for(topology, function, arguments, donate)
    return program.as_text() or "", program.memory_analysis()


def copied(text: str) -> list[int]:
    """Returns the number of elements of each array that the program copies or lays out anew."""
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|bitcast-convert)\(", text)
    return [math.prod(map(int, size.split(","))) for size in sizes]


@cases(
    (GQA, V5E),
    (GQA, V5P),
    (GQA, V6E),
    (ROPE, V5E),
    (LATENT, V5E),
    (MHA, V5E),
    (KEYS, V5E),
    (LONG, V5P),
    (VALUES, V6E),
    (WIDE, V5E),
)
def test_rotate_patch_is_one_kernel_and_copies_no_channel(shape: ChunkShape, topology: str):
    run = lambda given, length: rotate_patch(**given, layout=shape.layout, length=length, implementation="tpu")
    text, _ = compiled(topology, run, arguments_of(shape, "float32"), SPEC((), jnp.int32))
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    channel = math.prod(shape.x) // (2 if shape.group else 1)
    assert (channel in copied(text)) == (shape.width % 128 != 0)


@cases(
    (GQA, V5E),
    (GQA, V5P),
    (GQA, V6E),
    (LATENT, V5E),
    (LATENT, V6E),
    (MHA, V5E),
    (KEYS, V5E),
    (LONG, V5P),
    (VALUES, V6E),
)
def test_splice_is_one_kernel_that_writes_where_the_pool_lies(shape: ChunkShape, topology: str):
    def run(pool, slots, given, length):
        return splice(pool, slots, **given, layout=shape.layout, length=length, implementation="tpu")

    pool = SPEC(shape.pool(256, 64), jnp.bfloat16)
    arguments = pool, SPEC((shape.tokens,), jnp.int32), arguments_of(shape), SPEC((), jnp.int32)
    text, memory = compiled(topology, run, *arguments, donate=(0,))
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.alias_size_in_bytes >= 2 * pool.size
    assert memory.temp_size_in_bytes < pool.size
    assert pool.size not in copied(text)


def kimi_vl() -> tuple[kvp.KVLayout, kvp.Chunk]:
    """Returns Kimi-VL's layout, and a chunk of one image whose numbers do not matter."""
    layout = kvp.KVLayout.mla(27, 512, 64, rope=kvp.Rope(8e5, 64))
    kv = {name: jnp.zeros((27, 1088, 1, layout.channel(name).width), jnp.bfloat16) for name in layout.names}
    local = np.arange(1088, dtype=np.float32)
    return layout, kvp.Chunk(kv=kv, local=local, span=1088, length=1080, id="B", layout=layout, backbone="kimi-vl")


@pytest.mark.parametrize("topology", TPUS)
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
    text, memory = compiled(topology, run, *arguments, donate=(0,))
    sizes = [leaf.size for leaf in pool.values()]
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert memory.alias_size_in_bytes >= 2 * sum(sizes)
    assert not set(sizes) & set(copied(text))
    assert memory.temp_size_in_bytes < 2 * min(sizes)
