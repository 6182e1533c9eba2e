"""Padding prompts, contexts and images to buckets changes no number, and another size in a bucket compiles nothing."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import Buckets
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest

PROGRAMS = [f"jit({name})" for name in ("encode", "embed", "prefill", "recompute", "begin", "advance")]
"""The model's programs, as jax names them."""
# Heights and widths in pixels, of images whose patches (or tiles) share a bucket.
SIZES = {
    "qwen2_5_vl": [(40, 40), (24, 72)],
    "glm4v": [(24, 24), (16, 40)],
    "kimi_vl": [(32, 56), (56, 32), (40, 48)],
    "llava_next": [(64, 20), (60, 30)],
    "deepseek_vl": [(64, 40), (40, 64)],
    "deepseek_ocr2": [(60, 50), (70, 40)],
    "deepseek_vl2": [(40, 70), (35, 64)],
    "internvl": [(64, 40), (60, 20)],
    "phi3_v": [(64, 40), (60, 14)],
}

pytestmark = pytest.mark.usefixtures("highest_precision")
close = functools.partial(assert_close_to_largest, bar=2e-5)


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
    buckets, sizes = Buckets(), range(2, 2**18 + 7, 7)
    assert len({buckets.round_up(min(size, 2**18)) for size in sizes}) == 39
    assert sorted({buckets.of_keys.round_up(min(size, 2**18)) for size in sizes}) == [2**n for n in range(10, 19)]


def test_odd_buckets_are_refused():
    for sizes, value in (((48, 1), "48"), ((64, 3), "3"), ((64, 32), "128")):
        with pytest.raises(ConfigError, match=value):
            Buckets(*sizes)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "internvl" else pytest.mark.nightly) for name in SIZES]
)
def test_image_sizes_of_one_bucket_share_programs(family: str, tiny):
    """Embeddings, KV and logits of each size equal the unpadded ones; one program serves them all."""
    plain = tiny(family)
    padded = plain.replaced(plain.parameters).with_buckets(Buckets())
    rng = np.random.default_rng(0)
    counts, patches = [], set()
    for number, (height, width) in enumerate(SIZES[family]):
        image = rng.integers(0, 256, (height, width, 3), np.uint8)
        prompt = plain.prepare([[1, 2, 3, 4, 5], image, [4, 5, 6, 7, 8][: 2 + number]])
        patches.add((np.shape(prompt["pixel_values"]), prompt["input_ids"].shape))
        expected = plain.embed(**prompt)
        with compilations() as compiled:
            tokens = padded.embed(**prompt)
            out = padded.prefill(tokens, logits="all")
        close(tokens.embeddings, np.asarray(expected.embeddings))
        if expected.deepstack is not None:
            close(tokens.deepstack, np.asarray(expected.deepstack))
        jax.tree.map(close, out, jax.device_get(plain.prefill(expected, logits="all")))
        counts.append([compiled.count(name) for name in PROGRAMS])
    assert len(patches) > 1
    assert max(counts[0]) <= 1
    assert not np.any(counts[1:])


@pytest.mark.parametrize("family", ["qwen3_window", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_lengths_of_one_bucket_share_programs(family: str, tiny):
    """Prefill behind a context, answers and recompute: equal to unpadded, compiled once.

    In the default tier one prefill of both, as one prompt, is the oracle of the causal calls.
    """
    plain = tiny(family)
    padded = plain.replaced(plain.parameters).with_buckets(Buckets(smallest=16, steps=1))
    rng = np.random.default_rng(1)
    everything, counts = family == "deepseek_v3", []
    for context, length in ((19, 13), (21, 11)):
        total = context + length
        tokens = plain.embed(rng.integers(3, 290, (2, total)))
        full = jax.device_get(plain.prefill(tokens, logits="all"))
        engine = to_engine(plain.layout, full.kv, tokens.positions, 0)
        kv, rest = {name: value[:, :, :context] for name, value in engine.items()}, tokens.take(context, total)
        slots = np.broadcast_to(np.arange(context, total), (2, length))
        room = {
            name: np.pad(value[:, :, :context], [(0, 0)] * 2 + [(0, 40 - context)] + [(0, 0)] * 2)
            for name, value in engine.items()
        }
        keep = np.ones((plain.layout.layers, 2, length), bool)
        keep[1:, :, ::2] = False
        with compilations() as compiled:
            out = padded.prefill(rest, kv, logits="all")
            answer = padded.generate(rest, 4, kv)
            step = padded.decode(rest, room, slots, logits="all")
            some = padded.recompute(rest, room, slots, keep, logits="all") if everything else None
        close(out.logits, full.logits[:, context:])
        close(step.logits, full.logits[:, context:])
        for name, value in engine.items():
            close(out.kv[name], np.asarray(full.kv[name])[:, :, context:])
            close(step.cache[name][:, :, :total], np.asarray(value))
            assert not np.asarray(step.cache[name])[:, :, total:].any()
        np.testing.assert_array_equal(answer, plain.generate(tokens, 4))
        if everything:
            jax.tree.map(close, some, jax.device_get(plain.recompute(rest, room, slots, keep, logits="all")))
        counts.append([compiled.count(name) for name in PROGRAMS[2:]])
    assert not np.any(counts[1:])
