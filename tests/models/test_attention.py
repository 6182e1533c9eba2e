"""Attention over any keys equals NumPy's in float64 under every mask, block size, head layout and dtype."""
# pyright: reportCallIssue=false, reportOptionalSubscript=false

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import ShapeError
from kvpatch_jax.models.attention import Mask, attention, dispatch
from kvpatch_jax.models.attention.blockwise import AttentionBlocks, blockwise
from kvpatch_jax.models.attention.mask import NOWHERE
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
    draw = lambda *size: placed(rng.normal(size=size), dtype)
    return draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, W)


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
    mixed = np.zeros((*query.shape[:3], value.shape[-1]))
    bound, steps = np.zeros_like(mixed), -(-key.shape[1] // blocks.keys)
    for b, t, n in np.ndindex(*query.shape[:3]):
        k, keys = n * key.shape[2] // query.shape[2], np.flatnonzero(seen[b, t])
        if keys.size:
            scores = key[b, keys, k] @ query[b, t, n] * SCALE
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed[b, t, n] = weights @ value[b, keys, k]

            sizes = np.abs(key[b, keys, k]) @ np.abs(query[b, t, n]) * SCALE
            errors = rounding_bound(sizes, key.shape[-1] + 2) + rounding_bound(scores.max() - scores, 1)
            errors += rounding_bound(1, steps * (FUNCTION + 1))
            bound[b, t, n] = mean_bound(weights, value[b, keys, k], errors)
            bound[b, t, n] += rounding_bound(weights @ np.abs(value[b, keys, k]), 2 * (keys.size + steps) + 1)
    return mixed, bound


@functools.partial(jax.jit, static_argnames="blocks")
def in_blocks(query, key, value, mask, blocks=BLOCKS):
    return blockwise(query, key, value, mask, SCALE, blocks)


@jax.jit
def at_once(query, key, value, mask):
    return attention(query, key, value, mask, scale=SCALE, implementation="dense")


def places(rng: np.random.Generator, length: int) -> np.ndarray:
    """Rising places with gaps, some keys nowhere: contexts of which parts are padding."""
    rising = np.sort(rng.integers(0, 60, (ROWS, length)), axis=1).astype(np.int32)
    return np.where(rng.random(rising.shape) < 0.2, NOWHERE, rising).astype(np.int32)


STRUCTURES = {
    "all": lambda rng: Mask(),
    "causal": lambda rng: Mask(causal=True),
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
DEFAULT = {("window", "mha", ""), ("packed", "gqa", "small"), ("everything", "gqa", ""), ("ahead", "latent", "large")}


BLOCK_SIZES = {"": BLOCKS, "small": AttentionBlocks(1, 5), "large": AttentionBlocks(64, 64)}


def cases() -> list:
    rows = itertools.product(STRUCTURES, HEADS, BLOCK_SIZES)
    return [pytest.param(*row, marks=() if row in DEFAULT else pytest.mark.nightly) for row in rows]


@pytest.mark.parametrize(("structure", "heads", "size"), cases())
@examples(3)
@given(seed=st.integers(0, 2**31))
def test_every_mask_equals_its_rules(structure, heads, size, seed):
    """Two forms of one mask give what the rules say; a row that sees nothing is zero in all three."""
    arrays, blocks = drawn((ROWS, QUERIES, KEYS), HEADS[heads], seed), BLOCK_SIZES[size]
    mask = STRUCTURES[structure](np.random.default_rng(seed))
    seen = seen_by(mask, ROWS, QUERIES, KEYS)
    dense = np.broadcast_to(jax.jit(lambda mask: mask.dense(QUERIES, KEYS))(mask), (ROWS, 1, QUERIES, KEYS))
    np.testing.assert_array_equal(dense[:, 0], seen)
    truth, bound = expected(*arrays, seen, blocks)
    assert_within(in_blocks(*arrays, mask, blocks), truth, bound, "blockwise")
    assert_within(at_once(*arrays, mask), truth, bound, "dense")
    assert not np.asarray(in_blocks(*arrays, mask, blocks))[~seen.any(axis=2)].any()


def test_16_bits_are_rounded_no_worse_in_blocks():
    arrays = drawn((ROWS, QUERIES, KEYS), HEADS["latent"], 3, "bfloat16")
    mask = Mask(causal=True, offset=KEYS - QUERIES, window=11)
    blocks, dense = in_blocks(*arrays, mask), at_once(*arrays, mask)
    assert blocks.dtype == dense.dtype == "bfloat16"
    truth, _ = expected(*arrays, seen_by(mask, ROWS, QUERIES, KEYS))
    error = lambda x: np.abs(np.asarray(x, np.float64) - truth).max()
    assert error(blocks) < 2e-2
    assert error(blocks) < 2 * error(dense) + 1e-6


def test_rows_taken_in_turns_equal_all_at_once(monkeypatch):
    """Where the scores of all rows would not fit; each row has its part of the mask, or the part of all."""
    monkeypatch.setattr(dispatch, "DENSE_BYTES", 1)
    arrays, mask = drawn((ROWS, QUERIES, KEYS), HEADS["gqa"]), STRUCTURES["everything"](np.random.default_rng(0))
    in_turns = jax.jit(lambda *arrays: attention(*arrays[:3], arrays[3], scale=SCALE))
    truth, bound = expected(*arrays, seen_by(mask, ROWS, QUERIES, KEYS), AttentionBlocks(1, 1))
    assert_within(in_turns(*arrays, mask), truth, bound)


def test_scores_of_any_size_are_safe():
    """Large scores overflow nowhere, and later blocks of far larger scores take over from earlier ones."""
    query, key, value = drawn((ROWS, QUERIES, KEYS), HEADS["gqa"])
    key = placed(np.asarray(key) * np.linspace(1, 2000, KEYS)[:, None, None], "float32")
    truth, bound = expected(query, key, value, np.ones((ROWS, QUERIES, KEYS), bool))
    assert_within(in_blocks(query, key, value, Mask()), truth, bound)


def test_masks_that_do_not_fit_are_refused(unchecked):
    arrays = drawn((2, 5, 7), HEADS["gqa"])
    wrongs: dict[str, Any] = {
        r"mask: got query_places of shape": Mask(query_places=np.zeros((2, 7), np.int32)),
        r"mask: got allowed of shape": Mask(allowed=np.zeros((2, 1, 7, 5), bool)),
        r"allowed: got float32; expected an array of bool": Mask(allowed=np.zeros((2, 1, 5, 7), np.float32)),
        r"query_places of float32; expected an array of integers": Mask(query_places=np.zeros((2, 5), np.float32)),
        r"attention: mask: got a ndarray; expected a Mask": np.ones((2, 1, 5, 7), bool),
    }
    for message, mask in wrongs.items():
        with pytest.raises(ShapeError, match=message):
            attention(*arrays, mask, scale=SCALE)
    with pytest.raises(ShapeError, match="segments: got those of queries alone or of keys alone"):
        Mask(query_segments=np.zeros((1, 5), np.int32))
    with pytest.raises(ShapeError, match="window: got 0 places"):
        Mask(window=0)
