"""Few-bit arrays are within half a step of their numbers, take the bytes counted, and decode alike on every path."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding, PackedArray, pack, packed_bytes, resize, unpack
from kvpatch_jax.errors import InputError
from tests.shared.examples import examples
from tests.shared.operator_cases import LAYOUTS, chunk_of
from tests.store.store_cases import patch_for

SMALLEST = float(np.finfo(np.float32).tiny)
UNPACK = jax.jit(unpack, static_argnums=1)


def decoded_in_numpy(packed: PackedArray) -> tuple[np.ndarray, np.ndarray]:
    """Decodes in float64 by another way than the library: bit by bit. Returns the numbers, and each one's step."""
    columns, widths = packed.columns, []
    left = packed.bits
    for width in (8, 4, 2, 1):
        if left >= width:
            widths.append(width)
            left -= width
    rows = packed.planes[0].shape[-2]
    codes = np.zeros((*packed.planes[0].shape[:-1], columns), np.int64)
    above = packed.bits
    for width, plane in zip(widths, packed.planes, strict=True):
        above -= width
        plane = np.asarray(plane)
        for column in range(columns):
            byte, place = column % plane.shape[-1], column // plane.shape[-1]
            codes[..., column] |= ((plane[..., byte] >> (width * place)) & (2**width - 1)).astype(np.int64) << above
    step = np.asarray(packed.scale, np.float64)
    least = None if packed.least is None else np.asarray(packed.least, np.float64)
    number = np.arange(rows if packed.axis == -2 else columns) // packed.group
    step = np.take(step, number, packed.axis)
    if least is None:
        value = (codes - 2 ** (packed.bits - 1)) * step
    else:
        value = codes * step + np.take(least, number, packed.axis)
    return value, step


PACKINGS = (
    (37, 51, "float32", 1, None, -1, False),
    (70, 8, "float16", 2, None, -2, True),
    (70, 8, "bfloat16", 3, 32, -2, True),
    (37, 51, "float16", 4, 1, -1, True),
    (70, 8, "float32", 6, 32, -2, False),
    (37, 51, "bfloat16", 8, 32, -1, False),
    (1, 1, "float32", 3, 32, -2, False),
)
"""Rows, columns and dtype; bits, group, axis, and whether symmetric. Few, because each is compiled."""


def matrix(rows: int, columns: int, dtype: str, seed: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    value = rng.normal(size=(2, rows, columns))
    if kind == "outliers":
        value[rng.random(value.shape) < 0.05] *= 1e4
        value += 300 * rng.normal(size=columns)
    if kind == "constant":
        value = np.full(value.shape, rng.normal())
    value = value * {"tiny": 1e-39, "huge": 1e36}.get(kind, 1.0)
    bound = float(jnp.finfo(dtype).max)
    return np.clip(value, -bound, bound).astype(np.float32).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("packing", PACKINGS)
@given(st.integers(0, 2**31), st.sampled_from(["normal", "outliers", "constant", "tiny", "huge"]))
@examples(5)
def test_decoded_numbers_are_within_half_a_step(packing, seed, kind):
    (*form, bits, group, axis, symmetric) = packing
    value = matrix(*form, seed, kind)
    packed = pack(value, bits, group, axis, symmetric=symmetric)
    oracle, step = decoded_in_numpy(packed)
    exact = np.asarray(value, np.float64)
    # Subnormal numbers may be flushed. The quotient is rounded in float32, an ulp of the largest number in the group.
    slack = SMALLEST * 2**bits + np.abs(exact).max() * 2.0**-21
    assert (np.abs(oracle - exact) <= step / 2 + slack).all()
    found = np.asarray(UNPACK(packed, jnp.float32), np.float64)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, oracle, rtol=0, atol=np.abs(oracle).max() * 2.0**-21 + SMALLEST * 2**bits)
    assert packed.nbytes == 2 * packed_bytes(*value.shape[1:], bits, group, axis, symmetric=symmetric)
    assert packed.shape == value.shape
    assert packed.dtype == value.dtype


def test_padding_takes_no_part_in_a_group():
    rng, bits = np.random.default_rng(3), 3
    value = rng.normal(size=(2, 40, 3, 8)).astype(np.float32) + 5
    padded = np.concatenate([value, np.full((2, 24, 3, 8), 1e6, np.float32)], axis=1)
    for axis in (-1, -2):
        alone = np.asarray(pack(value, bits, 32, axis, heads=True))
        behind = np.asarray(pack(padded, bits, 32, axis, heads=True, length=40))
        np.testing.assert_array_equal(behind[:, :40], alone)


@pytest.mark.parametrize("axis", [-1, -2])
def test_resizing_keeps_every_code(axis):
    value = np.random.default_rng(0).normal(size=(3, 40, 24)).astype(np.float32)
    packed = pack(value, 5, 16, axis, symmetric=True)
    numbers = decoded_in_numpy(packed)[0]
    for along, size in ((-1, 7), (-1, 40), (-2, 17), (-2, 64)):
        resized = resize(packed, along, size, host=True)
        found = decoded_in_numpy(resized)[0]
        remaining = min(size, value.shape[along])
        np.testing.assert_array_equal(found.take(range(remaining), along), numbers.take(range(remaining), along))
        assert not found.take(range(remaining, size), along).any()
    for leaf, other in zip(jax.tree.leaves(resize(packed, -2, 64)), jax.tree.leaves(resized), strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_words_of_encodings(unchecked):
    for word in ("k4v4g32", "k2v6gall", "k16v4g32tokens"):
        assert str(KVEncoding.of(word)) == word
    assert KVEncoding.of("k4v2") == KVEncoding(4, 2)
    assert KVEncoding.of_bits(3) == KVEncoding.of("k3v3gallfeature")
    for wrong in ("k9v4", "int8", "k4v4g0"):
        with pytest.raises(InputError, match="encoding"):
            KVEncoding.of(wrong)


def test_scales_are_shared_over_tokens_of_keys_and_over_features_of_values():
    cases = {"k3v4": (-2, -1), "k3v4g8token": (-1, -1), "k3v4gallfeature": (-2, -2), "k16v4g8s": (-2, -1)}
    for name, keys, values in (("gqa", "k", "v"), ("mla", "kpe", "ckv")):
        for word, axes in cases.items():
            encoding = KVEncoding.of(word)
            channels = [encoding.of_channel(LAYOUTS[name].channel(channel)) for channel in (keys, values)]
            assert channels == [(encoding.keys, axes[0]), (4, axes[1])]
        chunk = kvp.encode_chunk(chunk_of(name), "k4v6g8")
        assert [(chunk.kv[channel].bits, chunk.kv[channel].axis) for channel in (keys, values)] == [(4, -2), (6, -1)]
        assert chunk.nbytes == KVEncoding.of("k4v6g8").nbytes(LAYOUTS[name], chunk.tokens)


def test_bad_arguments_are_refused(unchecked):
    value = np.ones((4, 8), np.float32)
    for arguments in ({"bits": 9}, {"bits": 1, "symmetric": True}, {"bits": 4, "axis": 0}, {"bits": 4, "group": 0}):
        with pytest.raises(InputError, match="pack"):
            pack(value, **arguments)
    with pytest.raises(InputError, match="encoded"):
        kvp.encode_chunk(kvp.encode_chunk(chunk_of("gqa"), "k4v4"), "k4v4")


@pytest.mark.parametrize(("kind", "factors"), [("gqa", "float32"), ("mla", "int4")])
def test_an_encoded_chunk_is_placed_as_its_decoded_twin(kind, factors):
    chunk = kvp.encode_chunk(chunk_of(kind), "k4v6g8")
    plain = kvp.cache.decode_chunk(chunk)
    assert chunk.content == plain.content == chunk_of(kind).content
    assert chunk.nbytes < plain.nbytes / 3
    patch = kvp.quantise(patch_for(chunk=chunk), factors)
    for served in (None, patch) if kind == "gqa" else (patch,):
        found, wanted = (dict(kvp.apply_patch(own, served, 1000, ["A"])) for own in (chunk, plain))
        for name in wanted:
            assert found[name].dtype == wanted[name].dtype
            np.testing.assert_allclose(found[name], wanted[name], rtol=2e-6, atol=2e-6)
