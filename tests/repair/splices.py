"""Tiny random backbones, and splices of one chunk or of a whole prompt on them."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.models import Buckets, ModelBackbone, load
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.repair import (
    OtherAntecedent,
    PromptPiece,
    SplicedCache,
    canonical_of,
    pooled_embedding,
    splice_prompt,
)
from tests.goldens.load import golden_config, merged, write_checkpoint
from tests.shared.arrays import placed

LAYERS, ROWS, BEFORE, CHUNK, SPARE, ASKED = 4, 2, 7, 8, 9, 3
LONG = 40
"""Tokens of a chunk of several pages."""
TOKEN_METHODS = (
    *("first_k", "vlcache", "cacheblend", "cacheblend_gradual", "kvshare", "infoflow", "prophetkv", "quest"),
    *("oracle_delta", "random_tokens"),
)
"""Methods that run a number of tokens again, of which every budget in tokens can be asked."""
STORED_METHODS = ("patch", "quantised", "low_rank", "shadowkv", "block_differences", "cachegen", "gear")
"""Methods that keep a form of the recorded KV within a budget of bytes."""

BUCKETS = Buckets(smallest=64, steps=1, least=64)
"""One size, so that one program runs any number of tokens through some layers."""


@functools.cache
def tiny_backbone(kind: str) -> ModelBackbone:
    """A random backbone: four layers of grouped-query attention with M-RoPE, or three of latent attention."""
    if kind == "mla":
        with tempfile.TemporaryDirectory() as folder:
            return load(write_checkpoint("kimi_vl", Path(folder) / "kimi_vl"), dtype="float32", buckets=BUCKETS)
    text = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    return random_backbone(merged(golden_config("qwen2_5_vl"), {"text_config": text})).with_buckets(BUCKETS)


def text_tokens(backbone: ModelBackbone, ids: np.ndarray) -> Tokens:
    """Embeds text ids [B,T]; on the host, as all that is cut here, where no length compiles a program."""
    places, axes = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape), backbone.layout.rope.axes
    places = places if axes is None else np.broadcast_to(places[..., None], (*ids.shape, axes))
    tokens, length = backbone.embed_padded(ids, position_ids=places.copy())
    return tokens.on_host().take(0, length)


def prefilled(backbone: ModelBackbone, tokens: Tokens) -> Output:
    """A prefill with its last logits and every layer's residual, on the host; one program for all lengths."""
    rows, length = tokens.positions.shape[:2]
    last, layers = np.full((rows, 1), length - 1, np.int32), tuple(range(backbone.layout.layers))
    out = jax.device_get(backbone.prefill(tokens.pad(BUCKETS.least), logits=last, hidden_at=layers))
    kv = {name: value[:, :, :length] for name, value in out.kv.items()}
    return Output(out.logits, kv, {layer: value[:, :length] for layer, value in out.hidden.items()})


def make_splice(backbone: ModelBackbone, seed: int = 0, chunk: int = CHUNK) -> tuple[SplicedCache, dict[str, Any]]:
    """An antecedent, a chunk spliced blind behind it, spare slots, a question; and the cache that a prefill gives."""
    ids = np.random.default_rng(seed).integers(0, 300, (ROWS, BEFORE + chunk + ASKED))
    everything = text_tokens(backbone, ids)
    tokens, question = everything.take(0, BEFORE + chunk), everything.take(BEFORE + chunk, ids.shape[1])
    whole = prefilled(backbone, tokens).kv
    part = tokens.take(BEFORE, BEFORE + chunk)
    alone = prefilled(backbone, part._replace(positions=part.positions - BEFORE))
    true = jax.device_get(kvp.to_engine(backbone.layout, whole, tokens.positions, 0))
    blind = jax.device_get(kvp.to_engine(backbone.layout, alone.kv, part.positions, 0))
    room = ((0, 0), (0, 0), (0, SPARE), (0, 0), (0, 0))
    cache = {name: placed(np.pad(np.concatenate([true[name][:, :, :BEFORE], blind[name]], 2), room)) for name in true}
    slots = np.broadcast_to(np.arange(BEFORE, BEFORE + chunk), (ROWS, chunk))
    expected = {name: np.pad(value, room) for name, value in true.items()}
    seen = np.broadcast_to(np.arange(BEFORE + chunk + SPARE) < BEFORE + chunk, (ROWS, BEFORE + chunk + SPARE))
    recorded = {name: placed(value[:, :, BEFORE:]) for name, value in whole.items()}
    others: dict[str, Any] = {"front": tokens.take(0, BEFORE), "question": question, "seen": placed(seen)}
    return SplicedCache(part, cache, placed(slots), recorded=recorded, hidden=alone.hidden, **others), expected


def other_antecedents(backbone: ModelBackbone, count: int, chunk: int = CHUNK) -> tuple[OtherAntecedent, ...]:
    """The chunk of `make_splice` behind other antecedents."""
    ids = np.random.default_rng(0).integers(0, 300, (ROWS, BEFORE + chunk + ASKED))[:, : BEFORE + chunk]
    others = []
    for place in range(count):
        front = np.random.default_rng(100 + place).integers(0, 300, (ROWS, BEFORE))
        tokens = text_tokens(backbone, np.concatenate([front, ids[:, BEFORE:]], axis=1))
        kv = {name: placed(value[:, :, BEFORE:]) for name, value in prefilled(backbone, tokens).kv.items()}
        others.append(OtherAntecedent(kv, pooled_embedding(tokens.take(0, BEFORE))))
    return tuple(others)


def canonical_chunk(backbone: ModelBackbone, splice: SplicedCache, row: int | None = None) -> kvp.Chunk:
    """The canonical of a splice's chunk, of all rows or of one."""
    local, tokens = np.asarray(splice.tokens.positions, np.float32)[0] - BEFORE, splice.slots.shape[1]
    kv = canonical_of(backbone.layout, splice)
    kv = kv if row is None else {name: placed(np.asarray(value)[:, row]) for name, value in kv.items()}
    return kvp.Chunk(kv, local, tokens, tokens, "page", backbone.layout, backbone.fingerprint)


def one_row(splice: SplicedCache, row: int) -> SplicedCache:
    """The splice of one row alone."""

    def rows(tree: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda leaf: placed(np.take(leaf, [row], axis)), tree)

    by_row = ("tokens", "slots", "front", "question", "seen", "length", "hidden")
    changes = {name: rows(getattr(splice, name)) for name in by_row}
    others = tuple(OtherAntecedent(rows(dict(other.kv), 1), rows(other.embedding)) for other in splice.others)
    recorded = None if splice.recorded is None else rows(dict(splice.recorded), 1)
    return splice.replace(**changes, cache=rows(dict(splice.cache), 1), recorded=recorded, others=others)


PIECES = (3, -6, 2, -9, 4)
"""Lengths of a prompt's pieces; negative ones are cached chunks."""
NEW: tuple[int, ...] = (0, 1, 2, 9, 10, 20, 21, 22, 23)
"""The prompt's tokens of new text."""


def make_prompt(backbone: ModelBackbone) -> tuple[SplicedCache, dict[str, np.ndarray], Any]:
    """A prompt of text, chunk, text, chunk, text; the cache and the last logits that a prefill gives."""
    total = sum(map(abs, PIECES))
    tokens = text_tokens(backbone, np.random.default_rng(0).integers(0, 300, (ROWS, total)))
    pieces, first = [], 0
    for length in PIECES:
        part = tokens.take(first, first + abs(length))
        kv = prefilled(backbone, part._replace(positions=part.positions - first)).kv if length < 0 else None
        pieces.append(PromptPiece(part, kv))
        first += abs(length)
    out = prefilled(backbone, tokens)
    engine = dict(kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0))
    return splice_prompt(backbone, pieces), engine, out.logits


def error(result, expected) -> float:
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def in_chunk(cache, tokens: int = CHUNK) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:, :, BEFORE : BEFORE + tokens] for name, value in cache.items()}


def changed(result, before) -> np.ndarray:
    """[L,B,T]: where any channel of the chunk differs."""
    result, before = in_chunk(result), in_chunk(before)
    return np.any([(result[name] != before[name]).any((-2, -1)) for name in result], axis=0)
