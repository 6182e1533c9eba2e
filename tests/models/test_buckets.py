"""Buckets: padded calls equal unpadded ones, and another size in a bucket compiles none of the model's programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import Buckets, load
from tests.goldens.load import write_checkpoint
from tests.shared.compilations import compilations

BAR = 2e-5
PROGRAMS = [f"jit({name})" for name in ("encode", "embed", "prefill", "recompute", "begin", "advance")]
"""The model's programs, as jax names them."""
# Heights and widths in pixels, of images whose patches (or tiles) share a bucket.
SIZES = {
    "qwen2_5_vl": [(40, 40), (24, 72)],
    "qwen3_vl": [(40, 40), (24, 72), (32, 56)],
    "qwen3_vl_moe": [(40, 40), (32, 56)],
    "qwen2_vl": [(40, 40), (24, 72)],
    "glm4v": [(24, 24), (16, 40)],
    "mistral3": [(24, 40), (32, 32)],
    "kimi_vl": [(32, 56), (56, 32), (40, 48)],
    "llava": [(64, 40), (40, 64)],
    "llava_next": [(64, 20), (60, 30)],
    "deepseek_vl": [(64, 40), (40, 64)],
    "deepseek_vl_hybrid": [(64, 40), (40, 64)],
    "deepseek_ocr2": [(60, 50), (70, 40)],
    "deepseek_vl2": [(40, 70), (35, 64)],
    "internvl": [(64, 40), (60, 20)],
    "smolvlm": [(64, 40), (40, 64)],
    "phi3_v": [(64, 40), (60, 14)],
}


@given(st.integers(0, 1_000_000), st.sampled_from([64, 128, 1024]), st.sampled_from([1, 2, 4, 8]))
def test_buckets_hold_and_waste_little(size: int, smallest: int, steps: int):
    """Never smaller, at most 1/steps larger beyond the smallest, less than twice as large up to it and from the least
    on, themselves buckets, multiples of four.
    """
    buckets = Buckets(smallest, steps)
    bucket = buckets.round_up(size)
    assert bucket >= size
    assert buckets.round_up(bucket) == bucket
    assert buckets.round_up(size + 1) >= bucket
    if size > smallest:
        assert bucket - size < size / steps + 1
        assert bucket % 4 == 0
    elif size > 16:
        assert bucket < 2 * size
    else:
        assert bucket == (size if size < 2 else 16)


def test_there_are_few_buckets():
    """Seven up to 1 024, then four per doubling: 39 up to a quarter of a million. Of contexts nine."""
    buckets = Buckets()
    sizes = range(2, 2**18 + 1)
    assert len({buckets.round_up(size) for size in sizes}) == 39
    assert sorted({buckets.of_keys.round_up(size) for size in sizes}) == [2**power for power in range(10, 19)]


@pytest.mark.parametrize(
    ("change", "named"), [({"smallest": 48}, "48"), ({"steps": 3}, "3"), ({"smallest": 64, "steps": 32}, "128")]
)
def test_odd_buckets_are_refused(change: dict[str, int], named: str):
    with pytest.raises(ConfigError, match=named):
        Buckets(**change)


pytestmark = pytest.mark.usefixtures("highest_precision")


def close(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= BAR * np.abs(expected).max()


@pytest.mark.nightly
@pytest.mark.parametrize("family", SIZES)
def test_image_sizes_of_one_bucket_share_programs(family: str, tmp_path):
    """Embeddings, KV, logits and greedy tokens of each size equal the unpadded ones; one program serves them all."""
    directory = write_checkpoint(family, tmp_path)
    plain, padded = load(directory), load(directory, buckets=Buckets())
    rng = np.random.default_rng(0)
    counts, patches = [], set()
    for number, (height, width) in enumerate(SIZES[family]):
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        prompt = plain.prepare([[1, 2, 3, 4, 5], image, [4, 5, 6, 7, 8][: 2 + number]])
        patches.add((np.shape(prompt["pixel_values"]), prompt["input_ids"].shape))
        expected = plain.embed(**prompt)
        with compilations() as compiled:
            found = padded.embed(**prompt)
            ours = padded.prefill(found, hidden_at=(1,), logits="all")
            answer = padded.generate(found, 3)
        close(found.embeddings, expected.embeddings)
        if expected.deepstack is not None:
            close(found.deepstack, expected.deepstack)
        jax.tree.map(close, ours, plain.prefill(expected, hidden_at=(1,), logits="all"))
        np.testing.assert_array_equal(answer, plain.generate(expected, 3))
        counts.append([compiled.count(name) for name in PROGRAMS])
    assert len(patches) > 1
    assert counts[0] == [1, 1, 1, 0, 1, 1]
    assert not np.any(counts[1:])


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "whole"), [("qwen3", False), ("deepseek_v3", True)])
def test_lengths_of_one_bucket_share_programs(family: str, whole: bool, tmp_path):
    """Prefill behind a context and recompute at several lengths, under masks: equal to unpadded, compiled once.

    The whole of it also without masks, and generates: every length of the oracle is a program of its own.
    """
    directory = write_checkpoint(family, tmp_path)
    plain, padded = load(directory), load(directory, buckets=Buckets())
    rng = np.random.default_rng(1)
    counts = []
    for context, length in ((33, 21), (64, 17)):
        ids = rng.integers(0, 50, (2, context + length))
        before, tokens = (plain.embed(part) for part in (ids[:, :context], ids[:, context:]))
        tokens = Tokens(tokens.embeddings, tokens.positions + context)
        kv = to_engine(plain.layout, plain.prefill(before).kv, before.positions, 0)
        mask = rng.random((2, 1, length, context + length)) < 0.7
        mask[..., context:] &= np.tri(length, dtype=bool)
        mask[..., np.arange(length), context + np.arange(length)] = True
        compiled: list[str] = []
        for seen in (None, mask) if whole else (mask,):
            with compilations() as names:
                ours = padded.prefill(tokens, kv, seen, logits="all")
            compiled += names
            jax.tree.map(close, ours, plain.prefill(tokens, kv, seen, logits="all"))
        if whole:
            with compilations() as names:
                answer = padded.generate(tokens, 4, kv, mask)
            compiled += names
            np.testing.assert_array_equal(answer, plain.generate(tokens, 4, kv, mask))
        cache = {
            name: jnp.pad(value, [(0, 0), (0, 0), (0, 100 - context), (0, 0), (0, 0)]) for name, value in kv.items()
        }
        slots = np.broadcast_to(np.arange(context, context + length), (2, length))
        keep = np.ones((plain.layout.layers, 2, length), bool)
        keep[1:, :, ::2] = False
        for kept in (None, keep) if whole else (keep,):
            with compilations() as names:
                ours = padded.recompute(tokens, cache, slots, kept, logits="all")
            compiled += names
            jax.tree.map(close, ours, plain.recompute(tokens, cache, slots, kept, logits="all"))
        counts.append([compiled.count(name) for name in PROGRAMS[2:]])
    # A mask of the caller's own is a program of its own.
    assert counts == [[2, 2, 1, 1] if whole else [1, 1, 0, 0], [0, 0, 0, 0]]
