"""Chunks prefilled apart over devices beside one device; a program that prints its facts of four devices as JSON.

Each case prefills chunks over the devices and on one device, where the blind caches of the chunks are joined, scored by
`backbone.attention`, and the selected tokens recomputed by `backbone.recompute`.
"""

import functools
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evals.bench.shapes import qwen2_config, tiny_config
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import EngineKV, to_engine
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.parallel import ParallelPrefill, prefill_chunks_apart, read_question, spread_backbone
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.repair import attention_scores

CHUNKS, ASKED = (9, 11, 12, 8), 5
"""Tokens of the four chunks, and of the question."""
SMALL = qwen2_config(32, 64, heads=4, layers=3, kv_heads=2, vocabulary=320)


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


def taken(tokens: Tokens, index: np.ndarray) -> Tokens:
    """The tokens at these places of each row."""
    rows = np.arange(len(index))[:, None]
    return jax.tree.map(lambda leaf: leaf[rows, index], tokens)


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
        cache = EngineKV(backbone.recompute(taken(context, chosen), cache, jnp.asarray(chosen)).cache)
    out = backbone.prefill(question, cache, logits="all")
    return {"chosen": chosen, "logits": out.logits, "question": dict(out.kv), **cache}


def difference(value: Any, expected: Any) -> float:
    """Largest difference over the largest magnitude, or 1 if that is smaller."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(value - expected).max(initial=0) / max(1.0, np.abs(expected).max(initial=0)))


def compared(read: ParallelPrefill, expected: dict[str, Any]) -> dict[str, Any]:
    """Differences of a result over the mesh from that of one device."""
    results = {"logits": read.logits, **read.cache.gather()}
    errors = {name: difference(value, expected[name]) for name, value in results.items()}
    for name, value in read.question.items():
        errors[f"question {name}"] = difference(value, expected["question"][name])
    return {"errors": errors, "same_tokens": bool(np.array_equal(read.chosen, expected["chosen"]))}


def case(
    backbone: ModelBackbone, rows: int, chunks: Sequence[int] = CHUNKS, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """One backbone over all devices, or these, beside one device."""
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, rows, chunks)
    read = read_question(over, prefill_chunks_apart(over, context, chunks), question, ratio=0.35)
    return compared(read, alone(backbone, context, question, chunks, 14))


CASES = {
    "gqa": lambda: case(random_backbone(SMALL), 2),
    "mla": lambda: case(random_backbone(tiny_config("DeepseekV3ForCausalLM")), 1),  # and experts
    "mrope": lambda: case(random_backbone(tiny_config("Qwen3VLForConditionalGeneration")), 2),  # and deepstack features
}
"""Two rows or one, of each kind of KV."""


def budgets() -> dict[str, Any]:
    """Nothing selected, everything selected, and a prepared cache; all over one context."""
    backbone = random_backbone(SMALL)
    over, (context, question) = spread_backbone(backbone), sequence(backbone, 2, CHUNKS)
    apart = prefill_chunks_apart(over, context, CHUNKS)
    before, facts = apart.gather(), dict[str, Any]()

    def same_bits(cache: EngineKV, tokens: Any) -> bool:
        return all(np.array_equal(leaf[:, tokens], cache[name][:, tokens]) for name, leaf in before.items())

    nothing, everywhere = read_question(over, apart, question, ratio=0), np.ones((2, sum(CHUNKS)), bool)
    facts["nothing"] = compared(nothing, alone(backbone, context, question, CHUNKS, 0))
    facts["untouched"] = same_bits(nothing.cache.gather(), everywhere)

    # Everything recomputed is one prefill of everything.
    prompt = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), context, question)
    exact = backbone.prefill(prompt, logits="all")
    facts["everything"] = difference(read_question(over, apart, question, ratio=1).logits, exact.logits[:, -ASKED:])

    # The tokens that were not chosen keep their bits, and so does the first chunk.
    some = read_question(over, apart, question, ratio=0.3)
    rest, first, after = everywhere.copy(), np.arange(sum(CHUNKS)) < CHUNKS[0], some.cache.gather()
    rest[np.arange(2)[:, None], some.chosen] = False
    facts["others_keep_their_bits"] = same_bits(after, rest) and same_bits(after, everywhere & first)
    facts["chosen_change"] = not same_bits(after, everywhere)

    prepared = prefill_chunks_apart(over, context, CHUNKS, blind_cache(backbone, context, CHUNKS))
    facts["prepared"] = difference(read_question(over, prepared, question, ratio=0.3).logits, some.logits)
    return facts


def main() -> None:
    """Prints {name: facts}."""
    warnings.simplefilter("error")
    with jax.default_matmul_precision("highest"):
        print(json.dumps({name: (CASES | {"budgets": budgets})[name]() for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
