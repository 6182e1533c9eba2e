"""Attention equals NumPy's in float64 under every mask, and takes a kernel only where it can run.

No kernel runs on a device: cuDNN's calls are lowered for CUDA, splash attention is interpreted.
"""
# pyright: reportCallIssue=false, reportOptionalSubscript=false

import dataclasses
import functools
import itertools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import KernelUnavailableError, ShapeError
from kvpatch_jax.models.attention import Mask, attention, dispatch, using, what_runs
from kvpatch_jax.models.attention.blockwise import AttentionBlocks, blockwise
from kvpatch_jax.models.attention.mask import NOWHERE
from pallas_kernels import preferring, targeting
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


dense = jax.jit(lambda mask: mask.dense(QUERIES, KEYS))


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
    "hidden": lambda rng: Mask(key_places=places(rng, KEYS)),
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
DEFAULT = {("window", "mha", ""), ("hidden", "gqa", ""), ("packed", "gqa", "small"), ("everything", "gqa", "")}
DEFAULT |= {("ahead", "latent", "large")}

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
    np.testing.assert_array_equal(np.broadcast_to(dense(mask), (ROWS, 1, QUERIES, KEYS))[:, 0], seen)
    truth, bound = expected(*arrays, seen, blocks)
    assert_within(in_blocks(*arrays, mask, blocks), truth, bound, "blockwise")
    assert_within(at_once(*arrays, mask), truth, bound, "dense")
    assert not np.asarray(in_blocks(*arrays, mask, blocks))[~seen.any(axis=2)].any()


def test_16_bits_are_rounded_no_worse_in_blocks():
    arrays = drawn((ROWS, QUERIES, KEYS), HEADS["latent"], 3, "bfloat16")
    mask = Mask(causal=True, offset=KEYS - QUERIES, window=11)
    blocks, whole = in_blocks(*arrays, mask), at_once(*arrays, mask)
    assert blocks.dtype == whole.dtype == "bfloat16"
    truth, _ = expected(*arrays, seen_by(mask, ROWS, QUERIES, KEYS))
    error = lambda x: np.abs(np.asarray(x, np.float64) - truth).max()
    assert error(blocks) < 2e-2
    assert error(blocks) < 2 * error(whole) + 1e-6


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


TOKENS = 4096
CAUSAL = Mask(causal=True)
PLACES = np.zeros((ROWS, TOKENS), np.int32)
Shapes = tuple[Any, Any, Any]


def shapes(heads=28, kv_heads=4, width=128, dtype="bfloat16", keys=TOKENS, queries=TOKENS) -> Shapes:
    """Queries, keys and values."""
    spec = lambda length, heads: jax.ShapeDtypeStruct((ROWS, length, heads, width), jnp.dtype(dtype))
    return spec(queries, heads), spec(keys, kv_heads), spec(keys, kv_heads)


@pytest.fixture
def cudnn(monkeypatch):
    """As if cuDNN 9.11 were there: jax asks for its version before it lowers."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    with targeting("gpu"):
        yield


@pytest.mark.parametrize(
    ("arrays", "mask", "kind", "window"),
    [
        (shapes(), CAUSAL, "CAUSAL", 0),
        (shapes(), Mask(causal=True, window=1024), "CAUSAL", 1024),
        (shapes(heads=4, kv_heads=2, width=64, dtype="float16", keys=300), Mask(), "NO_MASK", 0),
    ],
    ids=["grouped heads", "window", "across"],
)
def test_cudnn_gets_one_call_with_the_mask_as_structure(cudnn, arrays: Shapes, mask, kind, window):
    """Grouped heads go in as they are; a window counts the query's own place, as ours does."""
    assert what_runs(*arrays, mask) == "cudnn"
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE)
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    ((name, config),) = re.findall(r'custom_call @(\S+?)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text)
    assert name == "__cudnn$fmhaSoftmax"
    settings = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config))
    settings = settings["cudnn_fmha_backend_config"]
    assert settings["mask_type"] == kind
    assert settings["sliding_window_length"] == window
    assert settings["fmha_scale"] == pytest.approx(SCALE)
    assert settings["is_flash_attention"]
    query, key, _ = arrays
    sizes = [int(size) for size in settings["intermediate_tensor_shape"]["dimensions"]]
    assert sizes == [ROWS, query.shape[2], TOKENS, key.shape[1]]


@pytest.mark.parametrize(
    ("arrays", "mask", "words"),
    [
        (shapes(dtype="float32"), CAUSAL, "types float32, float32 and float32; expected one of 16 bits"),
        (shapes(width=68), CAUSAL, "widths 68 and 68; expected one multiple of 8 up to 128"),
        (shapes(keys=4097), Mask(causal=True, offset=1), "4096 causal queries behind 1 of 4097 keys"),
        (shapes(), Mask(window=70), "a window without causal order"),
        (shapes(), Mask(causal=True, query_places=PLACES, key_places=PLACES), "the mask has arrays of places or"),
    ],
)
def test_what_cudnn_cannot_do_is_refused_and_goes_to_the_next(cudnn, arrays: Shapes, mask, words):
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE, implementation="cudnn")
    with pytest.raises(KernelUnavailableError, match=f"'cudnn': {words}"):
        jax.eval_shape(run, *arrays)
    assert what_runs(*arrays, mask, ("cudnn", "xla")) == "blockwise"
    with preferring("gpu"):
        assert what_runs(*arrays, mask) == "blockwise"


def test_the_form_of_attention_follows_from_sizes_platform_and_what_is_asked():
    small, large, step = shapes(queries=512, keys=2048), shapes(), shapes(queries=1)
    assert what_runs(*small, Mask()) == "dense"
    assert what_runs(*large, Mask()) == what_runs(*small, Mask(), "blockwise") == "blockwise"
    assert what_runs(*shapes(queries=1, keys=2**20), Mask()) == "dense"  # a step of decoding
    assert what_runs(*large, Mask(), ("cudnn", "splash", "xla")) == "blockwise"
    with preferring("tpu"):  # but this is no TPU
        assert what_runs(*large, CAUSAL) == "blockwise"
    with targeting("tpu"):
        assert what_runs(*large, CAUSAL) == "splash"
        assert what_runs(*step, Mask(causal=True, offset=4095)) == "dense"
        assert what_runs(*large, Mask(allowed=np.ones((1, 1, TOKENS, TOKENS), bool))) == "blockwise"
        with using("xla"):
            assert what_runs(*large, CAUSAL) == "blockwise"
        with pytest.raises(KernelUnavailableError, match="1 queries; expected at least 128"):
            what_runs(*step, CAUSAL, "splash")
    with pytest.raises(KernelUnavailableError, match=r"'cudnn': the platform is 'cpu'; 'flash': unknown"):
        what_runs(*small, Mask(), ("cudnn", "flash"))
    with pytest.raises(KernelUnavailableError, match="attention: got 'flash'; expected one of"), using("flash"):
        pass


SPLASH_QUERIES, SPLASH_KEYS = 200, 330
SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (ROWS, SPLASH_KEYS)), axis=1).astype(np.int32)
PACKED: dict[str, Any] = {"query_segments": SEGMENTS[:, ::-1][:, :SPLASH_QUERIES], "key_segments": SEGMENTS}
MASKS = {
    "window": Mask(causal=True, offset=SPLASH_KEYS - SPLASH_QUERIES, window=70),
    "packed": Mask(causal=True, offset=SPLASH_KEYS - SPLASH_QUERIES, **PACKED),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MASKS)
def test_splash_interpreted_equals_the_dense_form(name, monkeypatch):
    from kvpatch_jax.models.attention import splash

    monkeypatch.setattr(splash, "BLOCK", 128)
    arrays, mask = drawn((ROWS, SPLASH_QUERIES, SPLASH_KEYS), (4, 2, 72, 40), 1), MASKS[name]
    with targeting("tpu", interpret=True):
        assert what_runs(*arrays, mask) == "splash"
        mixed = attention(*arrays, mask, scale=SCALE)
    np.testing.assert_allclose(mixed, attention(*arrays, mask, scale=SCALE, implementation="dense"), atol=2e-5)
