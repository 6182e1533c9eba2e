"""Numbers that must not spoil others: narrow dtypes, NaN behind masks, other engines' readouts and frequencies."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import attention_with_lse
from kvpatch_jax.errors import NotFiniteError
from tests.shared.arrays import placed
from tests.shared.operator_cases import chunk_of, conditioned_of

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def large(size: float):
    """A patch whose deficit is this large."""
    chunk = chunk_of("gqa")
    conditioned = conditioned_of(chunk, size=size)
    return chunk, conditioned, kvp.form_patch(chunk, conditioned, 4, ("A",))


@pytest.mark.parametrize("dtype", [FLOAT8[0], jnp.int8])
@pytest.mark.parametrize("size", [1e-6, 1e9])
def test_eight_bits_are_scaled_whatever_the_range(size: float, dtype):
    chunk, conditioned, patch = large(size)
    formed = kvp.form_patch(chunk, conditioned, 4, ("A",), dtype=dtype)
    applied = lambda patch: kvp.apply_patch(chunk, patch, 3, ("A",))
    whole, bare = applied(patch), applied(None)
    for small in (kvp.quantise(patch, dtype), formed, kvp.quantise(kvp.quantise(patch, jnp.int8), dtype)):
        assert jax.tree.leaves(small.factors)[0].dtype == dtype
        for name, value in applied(small).items():
            assert np.isfinite(value).all()
            correction = np.asarray(whole[name]) - np.asarray(bare[name])
            off = np.linalg.norm(np.asarray(value) - np.asarray(whole[name]))
            assert off < 0.15 * np.linalg.norm(correction) + 1e-5


def test_factors_beyond_float16_are_refused():
    chunk, conditioned, patch = large(1e5)
    with pytest.raises(NotFiniteError, match=r"float16.*expected finite"):
        kvp.quantise(patch, jnp.float16)
    with pytest.raises(NotFiniteError, match=r"float16.*expected finite"):
        kvp.form_patch(chunk, conditioned, 4, ("A",), dtype=jnp.float16)
    total = kvp.accumulate(None, conditioned, chunk, ("A",))
    with pytest.raises(NotFiniteError, match=r"float16.*expected finite"):
        kvp.orbit_patch(total, 4, dtype=jnp.float16)
    assert kvp.quantise(large(1.0)[2], jnp.float16).factors["k"][0].dtype == jnp.float16


RNG = np.random.default_rng(0)
Q, K, V = (placed(RNG.standard_normal(s), jnp.float32) for s in ((2, 5, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)))


GRADIENTS = jax.jit(jax.grad(lambda q, k, v, mask: attention_with_lse(q, k, v, mask)[0].sum(), argnums=(0, 1, 2)))


@pytest.mark.parametrize(("where", "bad"), [("k", np.nan), ("v", np.inf), ("both", -np.inf)])
def test_what_is_masked_does_not_reach_a_readout(where: str, bad: float):
    mask = jnp.arange(12) < 7
    k = K.at[:, 9].set(bad) if where != "v" else K
    v = V.at[:, 9].set(bad) if where != "k" else V
    found = attention_with_lse(Q, k, v, mask)
    wanted = attention_with_lse(Q, K[:, :7], V[:, :7])
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-6)
    gradients = GRADIENTS(Q, k, v, mask)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_bad_slot_reaches_those_queries_only_that_read_it():
    mask = jnp.arange(12) <= placed([3, 11, 8, 9, 0])[:, None]
    o, lse = attention_with_lse(Q, K, V.at[0, 9, 1].set(jnp.nan), mask)
    spoilt = np.zeros((2, 5, 4), bool)
    # Query heads 2 and 3 read KV head 1.
    spoilt[0, [1, 3], 2:] = True
    np.testing.assert_array_equal(np.isnan(o).all(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(o).any(-1), spoilt)
    np.testing.assert_array_equal(np.isnan(lse), spoilt)


@pytest.mark.parametrize("shape", [(12,), (1, 12), (5, 12), (2, 1, 12), (2, 5, 12)])
def test_masks_broadcast(shape: tuple[int, ...]):
    mask = np.random.default_rng(3).random(shape) > 0.4
    found = attention_with_lse(Q, K, V, placed(mask))
    wanted = attention_with_lse(Q, K, V, placed(np.broadcast_to(mask, (2, 5, 12))))
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize(("lse", "o"), [(np.inf, np.nan), (-np.inf, 0.0)])
def test_empty_readouts_of_other_engines_add_nothing(lse: float, o: float):
    own = attention_with_lse(Q, K, V)
    empty = jnp.full(own[0].shape, o), jnp.full(own[1].shape, lse)
    for order in ((own, empty), (empty, own), (empty, own, empty)):
        for found, wanted in zip(kvp.core.merge_readouts(*order), own, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)
    nothing = kvp.core.merge_readouts(empty, empty)
    assert not nothing[0].any()
    assert (nothing[1] == -jnp.inf).all()
    gradient = jax.grad(lambda x: kvp.core.merge_readouts((x, own[1]), empty)[0].sum())(own[0])
    np.testing.assert_allclose(gradient, 1.0, atol=1e-6)


def test_a_readout_that_is_nan_stays_so():
    own = attention_with_lse(Q, K, V)
    o, lse = kvp.core.merge_readouts(own, (own[0], own[1].at[0, 0, 0].set(jnp.nan)))
    assert np.isnan(lse[0, 0, 0])
    assert np.isnan(o[0, 0, 0]).all()
    assert np.isfinite(lse).sum() == lse.size - 1


# transformers' (torch 2.x, CPU): 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))
TORCH = {
    (10000, 80): [
        1065353216,
        1061902616,
        1059161707,
        1056984526,
        1053545652,
        1050798235,
        1048615884,
        1045188763,
        1042434822,
        1040247290,
        1036831949,
        1034071469,
        1031878741,
        1028475211,
        1025708177,
        1023510243,
        1020118547,
        1017344942,
        1015141792,
        1011761962,
        1008981770,
        1006773388,
        1003405449,
        1000618659,
        998405028,
        995049016,
        992255608,
        990036721,
        986692658,
        983892612,
        981668463,
        978336378,
        975529684,
        973300252,
        969980167,
        967166816,
        964932090,
        961624040,
        958804008,
        956563972,
    ],
    (1000000, 24): [
        1065353216,
        1050798235,
        1036831948,
        1023510243,
        1008981769,
        995049017,
        981668463,
        967166818,
        953267987,
        939827890,
        925353392,
        911488897,
    ],
    (500000, 48): [
        1065353216,
        1058286974,
        1051429188,
        1044812720,
        1038475605,
        1032130337,
        1025116360,
        1018319080,
        1011772649,
        1005516623,
        998920562,
        991960914,
        985226529,
        978752909,
        972581176,
        965724408,
        958821238,
        952152241,
        945754308,
        939597140,
        932542418,
        925697959,
        919096917,
        912777675,
    ],
}


def engines_frequencies(theta: int, dim: int) -> np.ndarray:
    """The recipe's three roundings to float32, the power in decimals."""
    decimal.getcontext().prec = 60
    result = []
    for index in range(0, dim, 2):
        exponent = np.float32(index) / np.float32(dim)
        power = np.float32(float(decimal.Decimal(theta) ** decimal.Decimal(float(exponent))))
        result.append(np.float32(1) / power)
    return np.asarray(result, np.float32)


@pytest.mark.parametrize("dim", [16, 20, 48, 64, 80, 96, 112, 128, 192])
@pytest.mark.parametrize("theta", [10_000, 1_000_000])
def test_float32_frequencies_are_the_engines_bit_for_bit(theta: int, dim: int):
    """At the last position, every frequency turns so far that its last bit moves the angle by more than the bound."""
    rope, positions = kvp.Rope(theta, dim, angles="float32"), (1, 99_991, 2**24 - 1)
    cos, sin = kvp.core.rope.rope_tables(rope, np.asarray(positions, np.int32))
    for row, position in enumerate(positions):
        angle = (np.float32(position) * engines_frequencies(theta, dim)).astype(np.float64)
        np.testing.assert_allclose(cos[row], np.cos(angle), atol=3e-7)
        np.testing.assert_allclose(sin[row], np.sin(angle), atol=3e-7)


@pytest.mark.parametrize(("theta", "dim"), list(TORCH))
def test_float32_frequencies_are_torchs_but_for_its_powers_last_bit(theta: int, dim: int):
    found = engines_frequencies(theta, dim).view(np.int32)
    assert np.abs(found - np.asarray(TORCH[theta, dim], np.uint32).view(np.int32)).max() <= 2
