"""splice on the XLA path: equal to rotate_patch where slots say, bit-equal elsewhere, in place, and what it refuses."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import GQA, SHAPES, arrays
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, KernelUnavailableError, rotate_patch, splice
from pallas_kernels.shapes import ChunkShape
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.examples import examples

PAGES, PAGE_SIZE, TOTAL = 5, 4, 20


def pool_of(shape: ChunkShape, dtype=jnp.float32, seed: int = 7) -> jax.Array:
    return placed(np.random.default_rng(seed).standard_normal(shape.pool(PAGES, PAGE_SIZE)), dtype)


def slots_of(shape: ChunkShape, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).permutation(TOTAL)[: shape.tokens].astype(np.int32)


def flat(pool) -> np.ndarray:
    """[..., P, O, K, H] → [..., P·O, K, H], as bits."""
    bits = np.asarray(pool)
    bits = bits.view(np.uint16 if bits.dtype.itemsize == 2 else np.uint32)
    return bits.reshape(*bits.shape[:-4], -1, *bits.shape[-2:])


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[1], jnp.float32), (SHAPES[4], jnp.float32), (GQA, jnp.bfloat16)])
def test_writes_what_rotate_patch_makes_and_nothing_else(shape: ChunkShape, dtype):
    chunk, slots, pool = arrays(shape, dtype), slots_of(shape), pool_of(shape, dtype)
    before = flat(pool)
    made = jax.jit(rotate_patch, static_argnames="layout")(**chunk, layout=shape.layout)
    found = flat(splice(pool, slots, **chunk, layout=shape.layout))
    others = np.setdiff1d(np.arange(TOTAL), slots)
    assert others.size
    assert (found[..., others, :, :] == before[..., others, :, :]).all()
    wide = lambda bits: bits.view(np.float32) if dtype == jnp.float32 else bits.view(jnp.bfloat16).astype(np.float32)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == jnp.float32 else {"rtol": 2**-8}
    np.testing.assert_allclose(wide(found[..., slots, :, :]), np.asarray(made, np.float32), **tolerance)


@pytest.mark.parametrize("shape", SHAPES[2:4], ids=lambda shape: shape.name)
def test_rows_padded_to_whole_lanes_get_the_same_bits_then_zeros(shape: ChunkShape):
    chunk, slots, width = arrays(shape, jnp.bfloat16), slots_of(shape), shape.width
    padded = jnp.pad(pool_of(shape, jnp.bfloat16), [(0, 0)] * 4 + [(0, -width % 128)], constant_values=jnp.nan)
    before, narrow = flat(padded), flat(splice(pool_of(shape, jnp.bfloat16), slots, **chunk, layout=shape.layout))
    found = flat(splice(padded, slots, **chunk, layout=shape.layout))
    others = np.setdiff1d(np.arange(TOTAL), slots)
    assert (found[..., others, :, :] == before[..., others, :, :]).all()
    assert (found[..., slots, :, :width] == narrow[..., slots, :, :]).all()
    assert (found[..., slots, :, width:] == 0).all()


@pytest.mark.parametrize("width", [15, 17, 64, 256])
def test_refuses_rows_of_any_other_width(unchecked, width: int):
    shape = GQA
    pool = jnp.zeros(shape.pool(PAGES, PAGE_SIZE, width))
    with pytest.raises(KernelError, match=r"expected .* 16\], or 128 wide"):
        splice(pool, slots_of(shape), **arrays(shape))
    padded = jnp.zeros(shape.pool(PAGES, PAGE_SIZE, 128))
    factors = {"u": jnp.zeros((2, 12, 33)), "v": jnp.zeros((2, 33, 32))}
    with pytest.raises(KernelError, match="rank 33; expected at most the width 32"):
        splice(padded, slots_of(shape), **(arrays(shape) | factors))
    assert not padded.is_deleted()


def test_rank_zero_of_a_plain_channel_is_a_copy():
    shape = GQA
    x, slots = arrays(shape)["x"], slots_of(shape)
    found = flat(splice(pool_of(shape), slots, x))
    assert (found[..., slots, :, :] == np.asarray(x).view(np.uint32)).all()


@given(data=st.data())
def test_order_of_slots_does_not_matter(data):
    shape = GQA
    tokens = shape.tokens
    order = np.array(data.draw(st.permutations(range(tokens))))
    start = data.draw(st.integers(0, TOTAL - tokens))
    chunk = arrays(shape)
    slots = np.arange(start, start + tokens, dtype=np.int32)
    shuffled = chunk | {
        "x": chunk["x"][:, order],
        "u": chunk["u"][:, order],
        "cos": chunk["cos"][order],
        "sin": chunk["sin"][order],
    }
    straight = splice(pool_of(shape), slots, **chunk)
    np.testing.assert_array_equal(flat(splice(pool_of(shape), slots[order], **shuffled)), flat(straight))


@given(length=st.integers(0, 12), traced=st.booleans())
@examples(20)
def test_padding_is_written_nowhere(length: int, traced: bool):
    shape = GQA
    chunk, slots = arrays(shape), slots_of(shape)
    if not traced:
        slots[length:] = -5
    whole = jnp.int32(length) if traced else length
    run = jax.jit(splice) if traced else splice
    found = flat(run(pool_of(shape), slots, **chunk, length=whole))
    kept = slots[:length]
    others = np.setdiff1d(np.arange(TOTAL), kept)
    full = flat(splice(pool_of(shape), slots_of(shape), **chunk))
    assert (found[..., others, :, :] == flat(pool_of(shape))[..., others, :, :]).all()
    assert (found[..., kept, :, :] == full[..., kept, :, :]).all()


def test_layers_of_a_batch_equal_layers_alone():
    shape = GQA
    chunk, slots = arrays(shape), slots_of(shape)
    together = splice(pool_of(shape), slots, **chunk)
    for layer in range(shape.layers):
        own = chunk | {name: chunk[name][layer] for name in ("x", "u", "v")}
        alone = splice(pool_of(shape)[layer], slots, **own)
        np.testing.assert_allclose(together[layer], alone, rtol=1e-6, atol=1e-6)


def test_the_pool_is_donated_and_not_copied():
    shape = GQA
    pool, chunk, slots = pool_of(shape), arrays(shape), slots_of(shape)
    splice(pool, slots, **chunk)
    assert pool.is_deleted()
    again = pool_of(shape)
    donating = jax.jit(lambda pool, chunk: splice(pool, slots, **chunk), donate_argnums=0)
    memory = donating.lower(again, chunk).compile().memory_analysis()
    assert memory.alias_size_in_bytes == again.nbytes


def test_moving_a_chunk_compiles_nothing():
    shape = GQA
    counts = []
    for seed in range(3):
        operands = pool_of(shape), slots_of(shape, seed)
        with compilations() as compiled:
            splice(*operands, **arrays(shape), length=np.int32(5 + seed))
        counts.append(len(compiled))
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slots": np.arange(12, dtype=np.int32) % 11}, KernelError, "slot 0 named twice"),
        ({"slots": np.arange(12, dtype=np.int32) + 9}, KernelError, "slot 20; expected 0 to 19"),
        ({"slots": np.arange(12, dtype=np.int32) - 1}, KernelError, "slot -1"),
        ({"slots": np.arange(12, dtype=np.float32)}, KernelError, "slots of dtype float32"),
        ({"slots": np.arange(11, dtype=np.int32)}, KernelError, r"slots of shape \(11,\)"),
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.bfloat16)}, KernelError, "dtype bfloat16"),
        ({"x": jnp.zeros((2, 12, 2, 18))}, KernelError, "splice"),
        ({"x": jnp.zeros((2, 12, 2, 18)), "u": None, "v": None}, KernelError, "pool"),
        ({"x": jnp.zeros((3, 12, 2, 16))}, KernelError, "pool"),
        ({"u": jnp.zeros((2, 12, 33)), "v": jnp.zeros((2, 33, 32))}, KernelError, "rank 33"),
        ({"layout": "quarter"}, KernelError, "'quarter'"),
        ({"implementation": "cuda"}, KernelUnavailableError, "'cuda'"),
    ],
)
def test_refuses_before_it_writes(unchecked, change, error, words):
    shape = GQA
    pool = pool_of(shape)
    before = flat(pool).copy()
    with pytest.raises(error, match=words):
        splice(**({"pool": pool, "slots": slots_of(shape)} | arrays(shape) | change))
    assert not pool.is_deleted()
    assert (flat(pool) == before).all()
