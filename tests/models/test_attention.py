"""Blockwise attention against scores written out one by one: masks, windows, contexts, segments, heads, bf16."""
# pyright: reportCallIssue=false, reportOptionalSubscript=false

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import KernelUnavailableError, ShapeError
from kvpatch_jax.models.attention import Mask, attention, what_runs
from kvpatch_jax.models.attention.blockwise import AttentionBlocks, blockwise
from kvpatch_jax.models.attention.dense import dense
from kvpatch_jax.models.attention.mask import NOWHERE
from pallas_kernels import preferring
from tests.shared.arrays import placed
from tests.shared.examples import examples
from tests.shared.tolerances import FUNCTION, assert_within, mean_bound, rounding_bound

ROWS, QUERIES, KEYS = 2, 13, 22
SCALE = 0.31
BLOCKS = AttentionBlocks(4, 8)
HEADS = {"mha": (3, 3, 8, 8), "gqa": (6, 2, 8, 8), "latent": (4, 1, 12, 8)}
"""Query heads, KV heads, width of keys, width of values."""


def drawn(
    shape: tuple[int, int, int], heads: tuple[int, ...], seed: int = 0, dtype: str = "float32"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of [rows, queries] over [rows, keys]."""
    (B, T, S), (N, K, H, W), rng = shape, heads, np.random.default_rng(seed)
    one = lambda *size: placed(rng.normal(size=size), dtype)
    return one(B, T, N, H), one(B, S, K, H), one(B, S, K, W)


def seen_by(mask: Mask, rows: int, queries: int, keys: int) -> np.ndarray:
    """The mask as its words say it, one pair of tokens at a time."""
    rows_of = lambda array: None if array is None else np.asarray(array).tolist()
    lists: dict[str, Any] = {field.name: rows_of(getattr(mask, field.name)) for field in dataclasses.fields(mask)[3:]}
    number = lambda name, b, index: None if lists[name] is None else lists[name][b % len(lists[name])][index]
    seen = np.zeros((rows, queries, keys), bool)
    for b, t, s in np.ndindex(*seen.shape):
        place, other = number("query_places", b, t), number("key_places", b, s)
        place, other = mask.offset + t if place is None else place, s if other is None else other
        here, there = number("query_segments", b, t), number("key_segments", b, s)
        rules = [other != NOWHERE, here == there and (here is None or here >= 0)]
        rules += [place + (number("ahead", b, t) or 0) >= other] if mask.causal else []
        rules += [place - other < mask.window] if mask.window is not None else []
        rules += [] if mask.allowed is None else [number("allowed", b, 0)[t][s]]
        seen[b, t, s] = all(rules)
    return seen


def expected(
    query: Any, key: Any, value: Any, seen: np.ndarray, blocks: AttentionBlocks = BLOCKS
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64, a query at a time, zeros where nothing is seen; and how far float32 may be from it.

    A weight's logarithm is off by the rounding of its score (a product per channel, and the scale with its own
    rounding), by that of the differences to the largest scores so far (which add up to its distance from the last of
    them), and by one exponential and one product per block of keys. Then the weighted sum, the sum of the weights and
    their quotient round.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    found = np.zeros((*query.shape[:3], value.shape[-1]))
    bound, steps = np.zeros_like(found), -(-key.shape[1] // blocks.keys)
    for b, t, n in np.ndindex(*query.shape[:3]):
        k, keys = n * key.shape[2] // query.shape[2], np.flatnonzero(seen[b, t])
        if keys.size:
            scores = key[b, keys, k] @ query[b, t, n] * SCALE
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            found[b, t, n] = weights @ value[b, keys, k]

            sizes = np.abs(key[b, keys, k]) @ np.abs(query[b, t, n]) * SCALE
            errors = rounding_bound(sizes, key.shape[-1] + 2) + rounding_bound(scores.max() - scores, 1)
            errors += rounding_bound(1, steps * (FUNCTION + 1))
            bound[b, t, n] = mean_bound(weights, value[b, keys, k], errors)
            bound[b, t, n] += rounding_bound(weights @ np.abs(value[b, keys, k]), 2 * (keys.size + steps) + 1)
    return found, bound


@jax.jit
def found_dense(query, key, value, mask):
    return dense(query, key, value, mask.dense(query.shape[1], key.shape[1]), SCALE)


@functools.partial(jax.jit, static_argnames="blocks")
def found_blockwise(query, key, value, mask, blocks=BLOCKS):
    return blockwise(query, key, value, mask, SCALE, blocks)


def places(rng: np.random.Generator, length: int) -> np.ndarray:
    """Rising places with gaps, some keys nowhere: contexts of which parts are padding."""
    found = np.sort(rng.integers(0, 60, (ROWS, length)), axis=1).astype(np.int32)
    return np.where(rng.random(found.shape) < 0.2, NOWHERE, found).astype(np.int32)


STRUCTURES = {
    "all": lambda rng: Mask(),
    "causal": lambda rng: Mask(causal=True),
    "causal behind a context": lambda rng: Mask(causal=True, offset=KEYS - QUERIES),
    "window": lambda rng: Mask(causal=True, offset=KEYS - QUERIES, window=5),
    "slots": lambda rng: Mask(causal=True, query_places=rng.integers(-2, KEYS, (ROWS, QUERIES)).astype(np.int32)),
    "places": lambda rng: Mask(
        causal=True, window=9, query_places=rng.integers(0, 60, (1, QUERIES)), key_places=places(rng, KEYS)
    ),
    "packed": lambda rng: Mask(
        query_segments=np.sort(rng.integers(-1, 4, (ROWS, QUERIES)), axis=1),
        key_segments=np.sort(rng.integers(-1, 4, (ROWS, KEYS)), axis=1),
    ),
    "ahead": lambda rng: Mask(
        causal=True, offset=KEYS - QUERIES, window=6, ahead=rng.integers(0, 4, (ROWS, QUERIES)).astype(np.int32)
    ),
    "any": lambda rng: Mask(allowed=rng.random((ROWS, 1, QUERIES, KEYS)) < 0.1),
    "everything": lambda rng: Mask(
        causal=True,
        window=30,
        query_places=rng.integers(0, 60, (ROWS, QUERIES)),
        key_places=places(rng, KEYS),
        ahead=rng.integers(0, 20, (1, QUERIES)),
        query_segments=rng.integers(-1, 3, (1, QUERIES)),
        key_segments=rng.integers(-1, 3, (1, KEYS)),
        allowed=rng.random((1, 1, QUERIES, KEYS)) < 0.8,
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("structure", STRUCTURES)
@examples(6)
@given(seed=st.integers(0, 2**31))
def test_every_mask_structure_equals_its_rules(structure, seed):
    """Two forms of one mask give what the rules say; a row that sees nothing is zero in all three."""
    arrays = drawn((ROWS, QUERIES, KEYS), HEADS["gqa"], seed)
    mask = STRUCTURES[structure](np.random.default_rng(seed))
    seen = seen_by(mask, ROWS, QUERIES, KEYS)
    whole = mask.dense(QUERIES, KEYS)
    np.testing.assert_array_equal(np.broadcast_to(whole, (ROWS, 1, QUERIES, KEYS))[:, 0], seen)
    truth, bound = expected(*arrays, seen)
    assert_within(found_blockwise(*arrays, mask), truth, bound, "blockwise")
    assert_within(found_dense(*arrays, mask), truth, bound, "dense")
    empty = ~seen.any(axis=2)
    assert not np.asarray(found_blockwise(*arrays, mask))[empty].any()


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ("mha", "float32"),
        ("latent", "bfloat16"),
        pytest.param("latent", "float32", marks=pytest.mark.nightly),
        pytest.param("mha", "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_every_head_layout_and_type_equals_float64(heads, dtype):
    arrays = drawn((ROWS, QUERIES, KEYS), HEADS[heads], 3, dtype)
    mask = Mask(causal=True, offset=KEYS - QUERIES, window=11)
    found, whole = found_blockwise(*arrays, mask), found_dense(*arrays, mask)
    assert found.dtype == whole.dtype == dtype
    truth, bound = expected(*arrays, seen_by(mask, ROWS, QUERIES, KEYS))
    if dtype == "float32":
        assert_within(found, truth, bound)
    else:
        error = lambda x: np.abs(np.asarray(x, np.float64) - truth).max()
        assert error(found) < 2e-2
        assert error(found) < 2 * error(whole) + 1e-6  # rounded no worse than the dense form


@pytest.mark.nightly
@given(data=st.data())
def test_any_sizes_blocks_and_structures_equal_float64(data):
    """Sizes, blocks, heads and structures drawn together: each a program of its own."""
    size = lambda low, high: data.draw(st.integers(low, high))
    B, T, S, K, G, H, W = size(1, 3), size(1, 40), size(1, 40), size(1, 3), size(1, 3), size(1, 9), size(1, 9)
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    rng = np.random.default_rng(size(0, 2**31))
    numbers = lambda low, high, length: rng.integers(low, high, (data.draw(st.sampled_from([1, B])), length))
    mask = Mask(
        causal=data.draw(st.booleans()),
        offset=size(0, 40),
        window=data.draw(st.none() | st.integers(1, 50)),
        query_places=numbers(-3, 50, T) if data.draw(st.booleans()) else None,
        key_places=numbers(0, 50, S) if data.draw(st.booleans()) else None,
        allowed=rng.random((B, 1, T, S)) < 0.5 if data.draw(st.booleans()) else None,
    )
    if data.draw(st.booleans()):
        mask = dataclasses.replace(mask, query_segments=numbers(-1, 3, T), key_segments=numbers(-1, 3, S))
    arrays = drawn((B, T, S), (K * G, K, H, W), size(0, 2**31), dtype)
    blocks = AttentionBlocks(size(1, 16), size(1, 16))
    truth, bound = expected(*arrays, seen_by(mask, B, T, S), blocks)
    found = found_blockwise(*arrays, mask, blocks)
    assert_within(found, truth, bound if dtype == "float32" else np.full_like(bound, 3e-2))


def test_scores_of_any_size_are_safe():
    """Large scores overflow nowhere, and later blocks of far larger scores take over from earlier ones."""
    query, key, value = drawn((1, QUERIES, KEYS), HEADS["gqa"])
    key = key * jnp.linspace(1, 2000, KEYS)[:, None, None]
    truth, bound = expected(query, key, value, np.ones((1, QUERIES, KEYS), bool))
    assert_within(found_blockwise(query, key, value, Mask()), truth, bound)


def test_the_form_of_attention_follows_from_sizes_and_what_is_asked():
    shape = lambda T, S: [
        jax.ShapeDtypeStruct((1, size, heads, 128), jnp.bfloat16) for size, heads in ((T, 28), (S, 4), (S, 4))
    ]
    small, large = shape(512, 2048), shape(16384, 16384)
    assert what_runs(*small, Mask()) == "dense"
    assert what_runs(*large, Mask()) == what_runs(*small, Mask(), "blockwise") == "blockwise"
    assert what_runs(*large, Mask(), ("cudnn", "splash", "xla")) == "blockwise"
    assert what_runs(*shape(1, 2**20), Mask()) == "dense"  # a step of decoding
    with preferring("gpu"):
        assert what_runs(*large, Mask()) == "blockwise"
    with pytest.raises(KernelUnavailableError, match=r"'cudnn': the platform is 'cpu'; 'flash': unknown"):
        what_runs(*small, Mask(), ("cudnn", "flash"))


def test_masks_that_do_not_fit_are_refused(unchecked):
    arrays = drawn((2, 5, 7), HEADS["gqa"])
    for name, shape in {"query_places": (2, 7), "key_places": (3, 7), "allowed": (2, 1, 7, 5)}.items():
        given: Any = {name: np.zeros(shape, bool if name == "allowed" else np.int32)}
        with pytest.raises(ShapeError, match=f"mask: got {name} of shape"):
            attention(*arrays, Mask(**given), scale=SCALE)
    for dtype in (np.float32, np.int32):
        with pytest.raises(ShapeError, match=f"allowed: got {np.dtype(dtype)}; expected an array of bool"):
            attention(*arrays, Mask(allowed=np.zeros((2, 1, 5, 7), dtype)), scale=SCALE)
    with pytest.raises(ShapeError, match="query_places of float32; expected an array of integers"):
        attention(*arrays, Mask(query_places=np.zeros((2, 5), np.float32)), scale=SCALE)
    with pytest.raises(ShapeError, match="attention: mask: got a ndarray; expected a Mask"):
        attention(*arrays, np.ones((2, 1, 5, 7), bool), scale=SCALE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="segments: got those of queries alone or of keys alone"):
        Mask(query_segments=np.zeros((1, 5), np.int32))
    with pytest.raises(ShapeError, match="window: got 0 places"):
        Mask(window=0)
