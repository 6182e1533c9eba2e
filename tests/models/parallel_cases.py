"""Chunks prefilled apart over devices beside one device, where the joined blind caches are scored and recomputed.

`test_parallel_prefill.py` runs this file in a process of its own, which has four devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.bench.shapes import qwen2_config, tiny_config
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import EngineKV, to_engine
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.parallel import ParallelPrefill, prefill_chunks_apart, read_question, spread_backbone
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.repair import attention_scores
from tests.shared.tolerances import assert_close_to_largest

CHUNKS, ASKED = (9, 11, 12, 8), 5
"""Tokens of the four chunks, and of the question."""
SMALL = qwen2_config(32, 64, heads=4, layers=3, kv_heads=2, vocabulary=320)
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("highest_precision")]
close = functools.partial(assert_close_to_largest, bar=1e-5)


def sequence(backbone: ModelBackbone, rows: int, chunks: Sequence[int]) -> tuple[Tokens, Tokens]:
    """A context and a question with drawn embeddings; under M-RoPE an image's positions, and deepstack features."""
    rng, config = np.random.default_rng(0), backbone.config.text
    length = sum(chunks) + ASKED
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    deepstack = None
    if backbone.layout.rope.axes is not None:
        grid = np.stack([positions, positions // 3, positions % 3 + positions // 3], axis=-1)
        positions = grid.astype(np.int32)
        deepstack = jnp.asarray(0.3 * rng.standard_normal((rows, length, 2, config.width), np.float32))
    embeddings = jnp.asarray(rng.standard_normal((rows, length, config.width), np.float32))
    tokens = Tokens(embeddings, positions, deepstack)
    return tokens.take(0, sum(chunks)), tokens.take(sum(chunks), length)


def blind_cache(backbone: ModelBackbone, context: Tokens, chunks: Sequence[int]) -> EngineKV:
    """Chunks prefilled alone on one device, rotated to their positions and joined."""
    caches, start = [], 0
    for length in chunks:
        part = context.take(start, start + length)
        local = np.asarray(part.positions)
        alone = part._replace(positions=local - local.min(axis=1, keepdims=True))
        caches.append(to_engine(backbone.layout, backbone.prefill(alone).kv, part.positions, 0))
        start += length
    return EngineKV({name: jnp.concatenate([kv[name] for kv in caches], axis=2) for name in caches[0]})


def alone(
    backbone: ModelBackbone, context: Tokens, question: Tokens, chunks: Sequence[int], count: int
) -> dict[str, Any]:
    """Selects, recomputes and answers on one device, over the last two layers' scores."""
    cache = blind_cache(backbone, context, chunks)
    last = backbone.layout.layers
    reduce = functools.partial(attention_scores, reading="mass", context=sum(chunks))
    scores = backbone.attention(question, cache, layers=(last - 2, last - 1), reduce=reduce).mean(0)
    chosen = np.sort(np.asarray(jax.lax.top_k(scores, count)[1]), axis=-1)
    if count:
        tokens = jax.tree.map(lambda leaf: leaf[np.arange(len(chosen))[:, None], chosen], context)
        cache = EngineKV(backbone.recompute(tokens, cache, jnp.asarray(chosen)).cache)
    out = backbone.prefill(question, cache, logits="all")
    return {"chosen": chosen, "logits": out.logits, "question": dict(out.kv), **cache}


def check_read(read: ParallelPrefill, expected: dict[str, Any]) -> None:
    """Asserts that a result over the mesh is that of one device, and the selection too."""
    assert np.array_equal(read.chosen, expected["chosen"])
    close(read.logits, expected["logits"], "logits")
    for name, value in read.cache.gather().items():
        close(value, expected[name], name)
    for name, value in read.question.items():
        close(value, expected["question"][name], f"question {name}")


def check(
    backbone: ModelBackbone, rows: int, chunks: Sequence[int] = CHUNKS, devices: Sequence[Any] | None = None
) -> None:
    """Asserts that a backbone over all devices, or these, answers as on one device."""
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, rows, chunks)
    read = read_question(over, prefill_chunks_apart(over, context, chunks), question, ratio=0.35)
    check_read(read, alone(backbone, context, question, chunks, 14))


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (SMALL, 2),
        (tiny_config("DeepseekV3ForCausalLM"), 1),  # a latent and experts
        (tiny_config("Qwen3VLForConditionalGeneration"), 2),  # M-RoPE and deepstack features
    ],
    ids=["gqa", "mla", "mrope"],
)
def test_each_kind_of_kv_answers_as_on_one_device(config, rows):
    check(random_backbone(config), rows)


def test_only_chosen_tokens_change_and_all_of_them_are_a_prefill():
    """Nothing selected, everything selected, and a prepared cache; all over one context."""
    backbone = random_backbone(SMALL)
    over, (context, question) = spread_backbone(backbone), sequence(backbone, 2, CHUNKS)
    apart = prefill_chunks_apart(over, context, CHUNKS)
    before, everywhere = apart.gather(), np.ones((2, sum(CHUNKS)), bool)

    def same_bits(cache: EngineKV, tokens: Any) -> bool:
        return all(np.array_equal(leaf[:, tokens], cache[name][:, tokens]) for name, leaf in before.items())

    nothing = read_question(over, apart, question, ratio=0)
    check_read(nothing, alone(backbone, context, question, CHUNKS, 0))
    assert same_bits(nothing.cache.gather(), everywhere)

    # Everything recomputed is one prefill of everything.
    prompt = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), context, question)
    exact = backbone.prefill(prompt, logits="all")
    close(read_question(over, apart, question, ratio=1).logits, exact.logits[:, -ASKED:], "everything")

    # The tokens that were not chosen keep their bits, and so does the first chunk.
    some = read_question(over, apart, question, ratio=0.3)
    rest, first, after = everywhere.copy(), np.arange(sum(CHUNKS)) < CHUNKS[0], some.cache.gather()
    rest[np.arange(2)[:, None], some.chosen] = False
    assert same_bits(after, rest)
    assert same_bits(after, everywhere & first)
    assert not same_bits(after, everywhere)

    prepared = prefill_chunks_apart(over, context, CHUNKS, blind_cache(backbone, context, CHUNKS))
    close(read_question(over, prepared, question, ratio=0.3).logits, some.logits, "prepared")
