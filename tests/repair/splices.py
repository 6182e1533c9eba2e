"""Tiny random backbones, and splices of one chunk or of a whole prompt on them."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.models import FAMILIES, ModelBackbone, load
from kvpatch_jax.models.families.family import parameters
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.repair import (
    OtherAntecedent,
    PromptPiece,
    SplicedCache,
    canonical_of,
    pooled_embedding,
    splice_prompt,
)
from tests.goldens.load import write_checkpoint

GOLDENS = Path(__file__).parents[1] / "goldens"
LAYERS, ROWS, BEFORE, CHUNK, SPARE, ASKED = 4, 2, 7, 8, 3, 3
LONG = 40
"""Tokens of a chunk of several pages."""
TOKEN_METHODS = (
    *("first_k", "vlcache", "cacheblend", "cacheblend_gradual", "kvshare", "infoflow", "prophetkv", "quest"),
    *("oracle_delta", "random_tokens"),
)
"""Methods that run a number of tokens again, of which every budget in tokens can be asked."""
STORED_METHODS = ("patch", "quantised", "low_rank", "shadowkv", "block_differences", "cachegen", "gear")
"""Methods that keep a form of the recorded KV within a budget of bytes."""

IMAGES = Settings.of({}, processor="qwen2_vl.Qwen2VL")


@functools.cache
def tiny_backbone(kind: str = "gqa") -> ModelBackbone:
    """A random backbone: four layers of grouped-query attention with M-RoPE, or three of latent attention."""
    if kind == "mla":
        with tempfile.TemporaryDirectory() as folder:
            return load(write_checkpoint("kimi_vl", Path(folder) / "kimi_vl"), dtype="float32")

    config = FAMILIES["Qwen2_5_VLForConditionalGeneration"].config(
        json.loads((GOLDENS / "qwen2_5_vl" / "config.json").read_text()), "exact"
    )
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, layers=LAYERS))
    with jax.default_matmul_precision("highest"):
        return ModelBackbone(config, parameters(config.family.module(config, nnx.Rngs(0))), IMAGES)


def text_tokens(backbone: ModelBackbone, ids: np.ndarray, start: int = 0) -> Tokens:
    """Embeds text ids [B,T] from a position on."""
    places = np.arange(start, start + ids.shape[1], dtype=np.int32)
    places = np.broadcast_to(places, ids.shape)
    axes = backbone.layout.rope.axes
    return backbone.embed(
        ids, (places if axes is None else np.broadcast_to(places[..., None], (*ids.shape, axes))).copy()
    )


def make_splice(
    backbone: ModelBackbone, seed: int = 0, chunk: int = CHUNK
) -> tuple[SplicedCache, dict[str, np.ndarray]]:
    """An antecedent, a chunk spliced blind behind it, spare slots, a question; and the cache that a prefill gives."""
    ids = np.random.default_rng(seed).integers(0, 300, (ROWS, BEFORE + chunk + ASKED))
    everything = text_tokens(backbone, ids)
    tokens, question = everything.take(0, BEFORE + chunk), everything.take(BEFORE + chunk, ids.shape[1])
    whole = backbone.prefill(tokens).kv
    part = tokens.take(BEFORE, BEFORE + chunk)
    alone = backbone.prefill(
        part._replace(positions=part.positions - BEFORE), hidden_at=tuple(range(backbone.layout.layers))
    )
    true = kvp.to_engine(backbone.layout, whole, tokens.positions, 0)
    blind = kvp.to_engine(backbone.layout, alone.kv, part.positions, 0)
    room = ((0, 0), (0, 0), (0, SPARE), (0, 0), (0, 0))
    cache = {name: jnp.pad(jnp.concatenate([true[name][:, :, :BEFORE], blind[name]], 2), room) for name in true}
    slots = np.broadcast_to(np.arange(BEFORE, BEFORE + chunk), (ROWS, chunk))
    expected = {name: np.pad(value, room) for name, value in true.items()}
    seen = np.broadcast_to(np.arange(BEFORE + chunk + SPARE) < BEFORE + chunk, (ROWS, BEFORE + chunk + SPARE))
    splice = SplicedCache(
        part,
        cache,
        jnp.asarray(slots),
        front=tokens.take(0, BEFORE),
        question=question,
        seen=jnp.asarray(seen),
        recorded={name: value[:, :, BEFORE:] for name, value in whole.items()},
        hidden=alone.hidden,
    )
    return splice, expected


def other_antecedents(
    backbone: ModelBackbone, count: int, seed: int = 0, chunk: int = CHUNK
) -> tuple[OtherAntecedent, ...]:
    """The chunk of `make_splice` of this seed behind other antecedents."""
    ids = np.random.default_rng(seed).integers(0, 300, (ROWS, BEFORE + chunk + ASKED))[:, : BEFORE + chunk]
    others = []
    for place in range(count):
        front = np.random.default_rng(100 + place).integers(0, 300, (ROWS, BEFORE))
        tokens = text_tokens(backbone, np.concatenate([front, ids[:, BEFORE:]], axis=1))
        kv = {name: value[:, :, BEFORE:] for name, value in backbone.prefill(tokens).kv.items()}
        others.append(OtherAntecedent(kv, pooled_embedding(tokens.take(0, BEFORE))))
    return tuple(others)


def canonical_chunk(backbone: ModelBackbone, splice: SplicedCache, row: int | None = None) -> kvp.Chunk:
    """The canonical of a splice's chunk, of all rows or of one."""
    local, tokens = np.asarray(splice.tokens.positions)[0] - BEFORE, splice.slots.shape[1]
    kv = canonical_of(backbone.layout, splice)
    kv = kv if row is None else {name: value[:, row] for name, value in kv.items()}
    return kvp.Chunk(kv, local, tokens, tokens, "page", backbone.layout, backbone.fingerprint)


def one_row(splice: SplicedCache, row: int) -> SplicedCache:
    """The splice of one row alone."""

    def rows(tree: Any, axis: int = 0) -> Any:
        return jax.tree.map(lambda leaf: jnp.take(jnp.asarray(leaf), jnp.asarray([row]), axis), tree)

    by_row = ("tokens", "slots", "front", "question", "seen", "length", "hidden")
    changes = {name: rows(getattr(splice, name)) for name in by_row}
    others = tuple(OtherAntecedent(rows(dict(other.kv), 1), rows(other.embedding)) for other in splice.others)
    recorded = None if splice.recorded is None else rows(dict(splice.recorded), 1)
    return splice.replace(**changes, cache=rows(dict(splice.cache), 1), recorded=recorded, others=others)


PIECES = (3, -6, 2, -9, 4)
"""Lengths of a prompt's pieces; negative ones are cached chunks."""
NEW: tuple[int, ...] = (0, 1, 2, 9, 10, 20, 21, 22, 23)
"""The prompt's tokens of new text."""


def make_prompt(backbone: ModelBackbone, seed: int = 0) -> tuple[SplicedCache, dict[str, np.ndarray], Any]:
    """A prompt of text, chunk, text, chunk, text; the cache and the last logits that a prefill gives."""
    total = sum(map(abs, PIECES))
    tokens = text_tokens(backbone, np.random.default_rng(seed).integers(0, 300, (ROWS, total)))
    pieces, first = [], 0
    for length in PIECES:
        part = tokens.take(first, first + abs(length))
        kv = backbone.prefill(part._replace(positions=part.positions - first)).kv if length < 0 else None
        pieces.append(PromptPiece(part, kv))
        first += abs(length)
    out = backbone.prefill(tokens)
    return (
        splice_prompt(backbone, pieces),
        dict(kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)),
        out.logits,
    )


def error(result, expected) -> float:
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def in_chunk(cache, tokens: int = CHUNK) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:, :, BEFORE : BEFORE + tokens] for name, value in cache.items()}


def changed(result, before) -> np.ndarray:
    """[L,B,T]: where any channel of the chunk differs."""
    result, before = in_chunk(result), in_chunk(before)
    return np.any([(result[name] != before[name]).any((-2, -1)) for name in result], axis=0)
