"""A chunk in few bits, placed in a pool or in pages, gives the very bits that its decoded twin gives."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_cases import PAGE_SIZE, PAGES, bits, slots_of

import kvpatch_jax as kvp
from kvpatch_jax import pool
from tests.shared.operator_cases import chunk_of, conditioned_of

A = ("A1", "A2")
LENGTH, SLOTS = 19, slots_of(24, 3)


def in_a_pool(placed: kvp.Placed, dtype) -> dict:
    return pool.splice(pool.make_pool(placed.chunk.layout, PAGES, PAGE_SIZE, dtype), SLOTS, placed)


def in_pages(placed: kvp.Placed, dtype) -> list:
    """In an engine's pages; tokens before the fifth are not written."""
    layout = placed.chunk.layout
    format = pool.LATENT if layout.kind == "mla" else pool.RAGGED
    pages = format.to_pages(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, dtype), 2)
    return format.splice(pages, SLOTS, placed, 5)


def with_a_source(placed: kvp.Placed, dtype) -> pool.Pools:
    """In a pool of bfloat16, which may have fewer bits than the chunk, and in its phase-free source."""
    layout = placed.chunk.layout
    pools = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, jnp.bfloat16, padded=True))
    where = (SLOTS, placed.chunk.local, placed.start, np.int32(LENGTH))
    return pool.write_piece(layout, pools, *where, dict(placed.kv), placed.factors, layers=placed.layers)


@pytest.mark.parametrize("place", [in_a_pool, in_pages, with_a_source])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gqa", jnp.bfloat16),
        pytest.param("mla", jnp.float32, marks=pytest.mark.nightly),
        pytest.param("interleaved", jnp.float32, marks=pytest.mark.nightly),
    ],
)
def test_what_is_written_has_the_twins_bits(kind, dtype, place):
    chunk = kvp.encode_chunk(chunk_of(kind, dtype=dtype, length=LENGTH), "k4v6g8")
    formed = kvp.form_patch(chunk, conditioned_of(chunk), 4, A)
    coded, decoded = (
        place(kvp.Placed(twin, formed, 1000, A), dtype) for twin in (chunk, kvp.cache.decode_chunk(chunk))
    )
    for value, expected in zip(jax.tree.leaves(coded), jax.tree.leaves(decoded), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(bits(value), bits(expected))
        assert bits(value).any()
