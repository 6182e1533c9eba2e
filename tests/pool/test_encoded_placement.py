"""Encoded chunks wherever they are placed: the very bits of their decoded twins, in every pool and format of pages."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_cases import PAGE_SIZE, PAGES, bits, slots_of

import kvpatch_jax as kvp
from kvpatch_jax import pool
from kvpatch_jax.core import RaggedFactors, ops
from pallas_kernels import preferring
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of

A = ("A1", "A2")
LENGTH, SLOTS = 19, slots_of(24, 3)


def twins(kind: str, dtype, word: str = "k4v6g8") -> tuple[kvp.Chunk, kvp.Chunk]:
    chunk = kvp.encode_chunk(chunk_of(kind, dtype=dtype, length=LENGTH), word)
    return chunk, kvp.cache.decode_chunk(chunk)


def ragged(patch: kvp.Patch) -> kvp.Patch:
    """The same patch with one direction less in every layer than in the one before."""
    factors = {}
    for name, (u, v) in patch.factors.items():
        layers, rank = u.shape[0], u.shape[-1]
        ranks = [max(1, rank - layer) for layer in range(layers)]
        rows = np.full((layers, rank), sum(ranks), np.int32)
        for layer, own in enumerate(ranks):
            rows[layer, :own] = sum(ranks[:layer]) + np.arange(own)
        left = [np.asarray(u)[layer, :, :own].T for layer, own in enumerate(ranks)]
        right = [np.asarray(v)[layer, :own] for layer, own in enumerate(ranks)]
        left, right = (jnp.asarray(np.concatenate(parts)) for parts in (left, right))
        factors[name] = RaggedFactors(left, right, jnp.asarray(rows))
    return kvp.Patch(factors, patch.metadata)


def patches_of(chunk: kvp.Chunk) -> dict[str, kvp.Patch | None]:
    whole = kvp.form_patch(chunk, conditioned_of(chunk), 4, A)
    return {"blind": None, "whole": whole, "int4": kvp.quantise(whole, "int4"), "ragged": ragged(whole)}


def check_twins(place, chunk, plain, patches, **options):
    for word, patch in patches.items():
        found, wanted = (place(kvp.Placed(own, patch, 1000, A, **options)) for own in (chunk, plain))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(bits(one), bits(other), err_msg=word)
            assert bits(one).any()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gqa", jnp.bfloat16),
        *(pytest.param(kind, jnp.float32, marks=pytest.mark.nightly) for kind in ("mla", "interleaved")),
    ],
)
def test_operators_and_pools_write_the_twins_bits(kind, dtype):
    chunk, plain = twins(kind, dtype)
    patches = patches_of(chunk)
    check_twins(lambda placed: dict(placed.apply()), chunk, plain, patches)
    for padded in (False, True):

        def spliced(placed, padded=padded):
            return pool.splice(pool.make_pool(chunk.layout, PAGES, PAGE_SIZE, dtype, padded=padded), SLOTS, placed)

        check_twins(spliced, chunk, plain, patches)


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("gqa", pool.RAGGED),
        pytest.param("gqa", pool.JOINED, marks=pytest.mark.nightly),
        pytest.param("mla", pool.LATENT, marks=pytest.mark.nightly),
    ],
    ids=["ragged", "joined", "latent"],
)
def test_engines_pages_hold_the_twins_bits(kind, format):
    layout = LAYOUTS[kind]
    for dtype, first in ((jnp.float32, 5), (jnp.bfloat16, 0)):
        chunk, plain = twins(kind, dtype)

        def spliced(placed, dtype=dtype, first=first):
            pages = format.to_pages(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, dtype), 2)
            return format.splice(pages, SLOTS, placed, first)

        check_twins(spliced, chunk, plain, patches_of(chunk))


def test_a_pool_with_a_source_holds_the_twins_bits():
    """In the pool and in its phase-free source, also where the pool has fewer bits than the chunk."""
    for kind, dtype, held in (("gqa", jnp.float32, jnp.bfloat16), ("mla", jnp.bfloat16, jnp.bfloat16)):
        chunk, plain = twins(kind, dtype)

        def written(placed, kind=kind, held=held):
            layout = LAYOUTS[kind]
            pools = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, held, padded=True))
            own = {"layers": placed.layers}
            where = (SLOTS, placed.chunk.local, placed.start, np.int32(LENGTH))
            return pool.write_piece(layout, pools, *where, dict(placed.kv), placed.factors, **own)

        check_twins(written, chunk, plain, patches_of(chunk))


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


@pytest.mark.parametrize("word", ["k4v4g8", "k4v4gallfeature"])
def test_codes_that_a_kernel_would_decode_at_once_become_the_same_bits(word, monkeypatch):
    """Asked for a kernel that is not here, XLA takes the codes of all layers."""
    chunk, _ = twins("gqa", jnp.bfloat16, word)
    patch, layout, seen = patches_of(chunk)["whole"], chunk.layout, []
    pools = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, jnp.bfloat16))
    placed = kvp.Placed(chunk, patch, 1000, A)
    where = SLOTS, chunk.local, placed.start, np.int32(LENGTH)
    codes_of = ops.codes_of
    monkeypatch.setattr(ops, "codes_of", lambda packed: (seen.append(packed.shape), codes_of(packed))[1])

    def run():
        applied = jax.jit(
            lambda: ops.apply(layout, placed.kv, placed.factors, chunk.local, jnp.asarray(placed.start))
        )()
        # A function of its own is traced anew.
        write = jax.jit(lambda *given: pool.write_piece.__wrapped__(layout, *given))
        return applied, write(pools, *where, dict(placed.kv), placed.factors)

    wanted = run()
    assert not seen
    with preferring("tpu"):
        found = run()
    assert len(seen) == 2 * len(layout.names)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
