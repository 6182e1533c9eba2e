"""The Hopper kernel of splice, interpreted: equal to the XLA path where slots say, bit-equal elsewhere, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import INTERPRETED, arrays, narrow_arrays

from pallas_kernels import KernelUnavailableError, splice, targeting
from pallas_kernels._operands import Operands
from pallas_kernels.hopper.launch import LaunchPlan
from pallas_kernels.rotate_patch.shapes import ALIGNED, ALIGNED_PAIRS, PRODUCTION, RotateShape
from pallas_kernels.splice import gpu
from pallas_kernels.splice.shapes import SpliceShape
from tests.arrays import placed

GQA = RotateShape("gqa", (2,), 13, 1, 64, 64, 5, "half")
KPE = RotateShape("kpe", (2,), 13, 1, 64, 64, 3, "half")
WIDE = RotateShape("wide", (1,), 13, 1, 128, 128, 3, "half")


def pool_of(shape: SpliceShape, dtype) -> jax.Array:
    return placed(np.random.default_rng(7).standard_normal(shape.pool), dtype)


def flat(pool) -> np.ndarray:
    """[..., P, O, K, H] → [..., P·O, K, H], float32."""
    return np.asarray(pool, np.float32).reshape(*pool.shape[:-4], -1, *pool.shape[-2:])


def run(pool, slots, implementation: str, **arguments) -> jax.Array:
    with targeting("gpu", INTERPRETED["gpu"]):
        return splice(pool, slots, **arguments, implementation=implementation)


def slots_of(kind: str, tokens: int, total: int) -> np.ndarray:
    """In one piece from the middle of a page; in two pieces; or in no order."""
    if kind == "piece":
        return np.arange(3, 3 + tokens, dtype=np.int32)
    if kind == "pieces":
        return np.concatenate([np.arange(total - 11, total), np.arange(1, tokens - 10)]).astype(np.int32)
    return np.random.default_rng(3).permutation(total)[:tokens].astype(np.int32)


@pytest.mark.parametrize(
    ("chunk", "kind", "dtype"),
    [
        pytest.param(GQA, "scattered", jnp.float32, marks=pytest.mark.slow),
        (ALIGNED_PAIRS[0], "pieces", jnp.bfloat16),
        pytest.param(ALIGNED[3], "piece", jnp.float32, marks=pytest.mark.slow),
        pytest.param(KPE, "pieces", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(KPE, "scattered", "int8", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_equals_the_reference_everywhere(chunk: RotateShape, kind: str, dtype):
    """Of the chunk's dtype; a pool for a chunk of eight bits is in bfloat16."""
    shape = SpliceShape(chunk, 5, 8)
    slots = slots_of(kind, chunk.tokens, 40)
    narrow = isinstance(dtype, str)
    given = narrow_arrays(chunk, dtype)[0] if narrow else arrays(chunk, dtype=dtype)
    dtype = jnp.bfloat16 if narrow else dtype
    found, wanted = (
        flat(run(pool_of(shape, dtype), slots, name, **given, layout=chunk.layout)) for name in ("gpu", "xla")
    )
    others = np.setdiff1d(np.arange(40), slots)
    before = flat(pool_of(shape, dtype))
    assert (found[..., others, :, :] == before[..., others, :, :]).all()
    relative, absolute = (0.0, 2e-5) if dtype == jnp.float32 else (2.0**-7, 1e-6)
    np.testing.assert_allclose(found, wanted, rtol=relative, atol=absolute)


@pytest.mark.slow
def test_lengths_bad_slots_and_several_blocks():
    """Tokens past the length and slots out of range are written nowhere; eights and single tokens in one warpgroup."""
    chunk = RotateShape("blocks", (2,), 133, 1, 64, 64, 0, "half")
    shape = SpliceShape(chunk, 10, 16)
    slots = np.arange(5, 138, dtype=np.int32)
    slots[[20, 90]] = slots[[90, 20]]
    slots[[40, 128]] = -1, 160
    given = arrays(chunk)
    chunk_of = {name: given[name] for name in ("x", "cos", "sin")}
    plan = LaunchPlan(2, 2, 1)
    interpret = INTERPRETED["gpu"]
    call = jax.jit(functools.partial(gpu.kernel, layout="half", plan=plan, interpret=interpret))
    before = pool_of(shape, jnp.float32)
    for length in (0, 70, 133):
        found = call(before, placed(slots), Operands(**chunk_of), jnp.int32(length))
        wanted = jax.jit(functools.partial(splice, implementation="xla"))(before, slots, **chunk_of, length=length)
        np.testing.assert_allclose(flat(found), flat(wanted), atol=2e-6)
        kept = np.setdiff1d(np.arange(160), slots[:length])
        assert (flat(found)[:, kept] == flat(before)[:, kept]).all()


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_tokens_go_in_sixty_fours_in_eights_and_one_by_one(groups: int):
    """Two pieces that meet inside a warpgroup, and an end that is no eight; padding beside whole warpgroups."""
    chunk = RotateShape("pieces", (1,), 197, 1, 64, 64, 0, "half")
    shape = SpliceShape(chunk, 14, 16)
    given = arrays(chunk)
    chunk_of = {name: given[name] for name in ("x", "cos", "sin")}
    call = jax.jit(
        functools.partial(gpu.kernel, layout="half", plan=LaunchPlan(groups, 2, 1), interpret=INTERPRETED["gpu"])
    )
    before = pool_of(shape, jnp.float32)
    for break_at in (197, 100):
        slots = np.concatenate([np.arange(20, 20 + break_at), np.arange(216, 19 + break_at, -1)]).astype(np.int32)
        found = call(before, placed(slots), Operands(**chunk_of), jnp.int32(195))
        wanted = jax.jit(functools.partial(splice, implementation="xla"))(
            before, placed(slots), **chunk_of, length=jnp.int32(195)
        )
        np.testing.assert_allclose(flat(found), flat(wanted), atol=2e-6)
        kept = np.setdiff1d(np.arange(224), slots[:195])
        assert (flat(found)[:, kept] == flat(before)[:, kept]).all()


def test_eights_are_found_where_slots_follow_each_other():
    slots = np.arange(100, 132, dtype=np.int32)
    slots[9] = 7
    places, eights = gpu.places(placed(slots), jnp.int32(27), 130, 64)
    assert places.shape == (64,)
    assert (places[27:] == -1).all()
    assert (places[:27] == slots[:27]).all()
    assert eights.tolist() == [100, gpu.SCATTERED, 116, gpu.SCATTERED, *[gpu.NOWHERE] * 4]
    assert gpu.places(placed(slots), None, 130, 64)[0][30] == -1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"x": jnp.zeros((2, 13, 2, 32), jnp.bfloat16), "pool": jnp.zeros((2, 5, 8, 2, 32), jnp.bfloat16)},
            "32 channels",
        ),
        ({"cos": jnp.ones((13, 8)), "sin": jnp.ones((13, 8))}, "halves in multiples of 16"),
    ],
)
def test_says_what_it_cannot_take(unchecked, change, words):
    chunk = ALIGNED[0]
    given = {"pool": pool_of(SpliceShape(chunk, 5, 8), jnp.float32)} | arrays(chunk) | change
    with targeting("gpu"), pytest.raises(KernelUnavailableError, match=words):
        splice(slots=np.arange(13), **given, implementation="gpu")
    assert not given["pool"].is_deleted()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_takes_the_production_shapes(dtype: str):
    pool_dtype = "float32" if dtype == "float32" else "bfloat16"
    for chunk in PRODUCTION:
        x: Any = jax.ShapeDtypeStruct((*chunk.leading, chunk.tokens, chunk.heads, chunk.width), dtype)
        pool = jax.ShapeDtypeStruct((*chunk.leading, 4, 64, chunk.heads, chunk.width), pool_dtype)
        cos: Any = jax.ShapeDtypeStruct((chunk.tokens, chunk.rotary // 2), jnp.float32) if chunk.rotary else None
        for layout in ("half", "pairs"):
            assert gpu.unsupported(pool, Operands(x, cos), layout) is None


def test_a_dense_correction_wider_than_the_pool_is_refused():
    x: Any = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    dense: Any = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    given = Operands(x, dense=dense)
    reason = gpu.unsupported(x, given, "half")
    assert reason == "a dense correction of float32; expected the pool's bfloat16"
