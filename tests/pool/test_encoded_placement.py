"""A chunk in few bits, placed in a pool or in pages, gives the very bits that its decoded twin gives."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_cases import PAGE_SIZE, PAGES, bits, slots_of

import kvpatch_jax as kvp
from kvpatch_jax import pool
from kvpatch_jax.patching import ByteBudget
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of

A = ("A1", "A2")
LENGTH, SLOTS = 19, slots_of(24, 3)


def twins(kind: str, dtype, word: str = "k4v6g8") -> tuple[kvp.Chunk, kvp.Chunk]:
    chunk = kvp.encode_chunk(chunk_of(kind, dtype=dtype, length=LENGTH), word)
    return chunk, kvp.cache.decode_chunk(chunk)


patches = pytest.mark.parametrize(
    "patch", ["whole", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("blind", "int4", "ragged"))]
)


def patch_of(chunk: kvp.Chunk, name: str) -> kvp.Patch | None:
    if name == "blind":
        return None
    patch = kvp.form_patch(chunk, conditioned_of(chunk), ByteBudget(3000) if name == "ragged" else 4, A)
    return kvp.quantise(patch, "int4") if name == "int4" else patch


def check_twins(place, chunk, plain, name):
    patch = patch_of(chunk, name)
    coded, decoded = (place(kvp.Placed(twin, patch, 1000, A)) for twin in (chunk, plain))
    for value, expected in zip(jax.tree.leaves(coded), jax.tree.leaves(decoded), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(bits(value), bits(expected))
        assert bits(value).any()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gqa", jnp.bfloat16),
        *(pytest.param(kind, jnp.float32, marks=pytest.mark.nightly) for kind in ("mla", "interleaved")),
    ],
)
@patches
def test_operators_and_pools_write_the_twins_bits(kind, dtype, patch):
    chunk, plain = twins(kind, dtype)
    check_twins(lambda placed: dict(placed.apply()), chunk, plain, patch)

    def spliced(placed):
        return pool.splice(pool.make_pool(chunk.layout, PAGES, PAGE_SIZE, dtype, padded=kind == "gqa"), SLOTS, placed)

    check_twins(spliced, chunk, plain, patch)


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("gqa", pool.RAGGED),
        pytest.param("gqa", pool.JOINED, marks=pytest.mark.nightly),
        pytest.param("mla", pool.LATENT, marks=pytest.mark.nightly),
    ],
    ids=["ragged", "joined", "latent"],
)
@patches
def test_engines_pages_hold_the_twins_bits(kind, format, patch):
    layout = LAYOUTS[kind]
    for dtype, first in ((jnp.float32, 5), (jnp.bfloat16, 0)):
        chunk, plain = twins(kind, dtype)

        def spliced(placed, dtype=dtype, first=first):
            pages = format.to_pages(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, dtype), 2)
            return format.splice(pages, SLOTS, placed, first)

        check_twins(spliced, chunk, plain, patch)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gqa", jnp.float32), pytest.param("mla", jnp.bfloat16, marks=pytest.mark.nightly)]
)
@patches
def test_a_pool_with_a_source_holds_the_twins_bits(kind, dtype, patch):
    """In the pool and in its phase-free source, also where the pool has fewer bits than the chunk."""
    (chunk, plain), layout = twins(kind, dtype), LAYOUTS[kind]

    def written(placed):
        pools = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, jnp.bfloat16, padded=True))
        where = (SLOTS, placed.chunk.local, placed.start, np.int32(LENGTH))
        return pool.write_piece(layout, pools, *where, dict(placed.kv), placed.factors, layers=placed.layers)

    check_twins(written, chunk, plain, patch)


@pytest.mark.nightly
def test_no_more_than_a_layer_is_unpacked():
    rng = np.random.default_rng(0)
    layout = kvp.KVLayout.gqa(16, 4, 64, kvp.Rope(1e4, 64))
    kv = {name: jnp.asarray(rng.normal(size=(16, 128, 4, 64)), jnp.bfloat16) for name in "kv"}
    chunk = kvp.Chunk(kv, np.arange(128, dtype=np.int32), 128, 128, "c", layout, "tiny")
    pools = pool.with_source(layout, pool.make_pool(layout, 16, 16, jnp.bfloat16))
    where = (np.arange(128, dtype=np.int32), np.arange(128, dtype=np.float32), np.zeros((), np.int32), np.int32(128))
    lowered = pool.write_piece.lower(layout, pools, *where, dict(kvp.encode_chunk(chunk, "k4v4").kv), {})
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(value.nbytes for value in jax.tree.leaves(pools))
    assert memory.temp_size_in_bytes <= 6 * 128 * 4 * 64 * 4, "a few layers in float32; all would be sixteen"
