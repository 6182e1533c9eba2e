"""Serving of prompts with segments, beside a whole prefill: KL, FLOPs, seconds and continuations."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets, EngineKV, to_engine
from kvpatch_jax.segment_reuse import (
    SegmentPrefill,
    SegmentPrompt,
    SegmentStore,
    TenantSegments,
    divergences,
    run_savings,
    segment_prefill,
    store_segments,
)

from .readers import PromptReader
from .settings import ReuseSetting, StoreSpec
from .transcripts import TOOLS

TENANT = "agents"
SIZES = Buckets(64, 1)
ENDS = 16
"""Tokens whose logits are computed again in one forward, at most."""


class FullPrefill(NamedTuple):
    """A whole prefill of a prompt.

    Attributes:
      tokens: of the prompt. logits: [1,V], the last. cache: engine frame, at a bucket's size. kv: phase-free
        {channel: [L,T,K,H]}, on the host. hidden: residuals [T,D] by boundary, on the host.
    """

    tokens: Tokens
    logits: Any
    cache: EngineKV
    kv: dict[str, np.ndarray]
    hidden: dict[int, np.ndarray]


def full_prefill(reader: PromptReader, prompt: SegmentPrompt, boundaries: Sequence[int] = ()) -> FullPrefill:
    """Runs a prompt without reuse; keeps the residuals entering some layers."""
    backbone, T = reader.backbone, len(prompt.ids)
    tokens = backbone.embed(**backbone.prepare([prompt.ids.tolist()]))
    out = backbone.prefill(tokens, hidden_at=tuple(boundaries))
    size = SIZES.round_up(T)
    padded = {name: jnp.asarray(np.pad(np.asarray(value), _room(size - T))) for name, value in out.kv.items()}
    positions = np.asarray(tokens.positions)[0]
    positions = np.pad(positions, [(0, size - T)] + [(0, 0)] * (positions.ndim - 1))
    cache = to_engine(backbone.layout, padded, positions, 0)
    kv = {name: np.asarray(value[:, 0]) for name, value in out.kv.items()}
    return FullPrefill(
        tokens, out.logits[:, 0], cache, kv, {at: np.asarray(value[0]) for at, value in out.hidden.items()}
    )


def filled_store(
    reader: PromptReader, spec: StoreSpec, prompts: Sequence[SegmentPrompt], full: Sequence[FullPrefill]
) -> TenantSegments:
    """Makes a store of whole prefills: everything in it was computed exactly."""
    segments = SegmentStore(reader.backbone, spec.options()).tenant(TENANT)
    layers = spec.reuse_layers
    for prompt, prefill in zip(prompts, full, strict=True):
        for span in segments.index.described(prompt):
            rows = slice(span.start, span.start + len(span.ids))
            kv = {name: value[:layers, rows] for name, value in prefill.kv.items()}
            segments.add(prompt, span, kv, prefill.hidden[layers][rows])
    return segments


def logits_at(reader: PromptReader, tokens: Tokens, cache: EngineKV, places: Sequence[int]) -> np.ndarray:
    """Computes logits [n,V] of tokens that were computed from the bottom, over a cache that has them."""
    if len(places) > ENDS:
        parts = [logits_at(reader, tokens, cache, places[at : at + ENDS]) for at in range(0, len(places), ENDS)]
        return np.concatenate(parts)
    # The last one is repeated, so that any number of them is one program.
    slots = np.array([*places, *[places[-1]] * (ENDS - len(places))])
    taken = Tokens(
        jnp.asarray(np.asarray(tokens.embeddings[0])[slots][None]), np.asarray(tokens.positions)[0][slots][None]
    )
    step = reader.backbone.recompute(taken, cache, jnp.asarray(slots[None], jnp.int32), logits="all")
    return np.asarray(step.logits[0, : len(places)])


def measure(
    reader: PromptReader,
    prompt: SegmentPrompt,
    full: FullPrefill,
    segments: TenantSegments,
    setting: ReuseSetting,
    prefix: int = 0,
) -> tuple[SegmentPrefill, dict[str, Any]]:
    """Serves a prompt with segments and compares it with its whole prefill.

    Args:
      prefix: tokens in front that a prefix cache has.
    """
    backbone, T = reader.backbone, len(prompt.ids)
    costs, layers = backbone.forward_costs, setting.store.reuse_layers
    cached = {name: value[:, :, :prefix] for name, value in full.cache.items()} if prefix else None
    started = time.perf_counter()
    result = segment_prefill(backbone, prompt, segments, setting.thresholds, tenant=TENANT, prefix=cached)
    jax.block_until_ready((result.logits, result.cache))
    seconds = time.perf_counter() - started

    ends = [decision.stop - 1 for decision in result.decisions if decision.accepted and not decision.equal_prefix]
    loss = []
    if ends:
        true, served = (logits_at(reader, full.tokens, cache, ends) for cache in (full.cache, result.cache))
        loss = divergences(true, served)

    decisions = []
    for decision in result.decisions:
        tested = not decision.equal_prefix
        decisions.append(
            {
                "length": decision.stop - decision.start,
                "accepted": decision.accepted,
                "rejected_at": decision.rejected_at,
                "equal_prefix": decision.equal_prefix,
                "probes": [round(value, 6) for value in decision.kl],
                "kl": round(loss.pop(0), 6) if decision.accepted and tested else None,
                "generation": decision.generation,
                "saves": run_savings(costs, *decision.interior, layers),
            }
        )
    record = {
        "setting": setting.name,
        "tokens": T,
        "prefix": prefix,
        "whole": costs.flops(T) + costs.logit,
        "flops": result.flops._asdict(),
        "reused": int(result.reused[0].sum()),
        "kl": round(divergences(full.logits, result.logits)[0], 6),
        "flipped": bool(np.asarray(full.logits).argmax() != np.asarray(result.logits).argmax()),
        "seconds": round(seconds, 3),
        "decisions": decisions,
    }
    return result, record


def continued(reader: PromptReader, tokens: Tokens, cache: EngineKV, steps: int) -> list[int]:
    """Continues a prompt greedily, over a cache of all its tokens; returns the first line's tokens."""
    T = tokens.embeddings.shape[1]
    size = next(iter(cache.values())).shape[2]
    # The last token is read again: its own slot is not seen.
    seen = np.zeros((1, 1, 1, size + 1), bool)
    seen[..., : T - 1] = seen[..., -1] = True
    made = reader.backbone.generate(tokens.take(T - 1, T), steps, cache, jnp.asarray(seen))
    line = []
    for token in np.asarray(made)[0].tolist():
        if "\n" in reader.decode([token]) and line:
            break
        line.append(token)
    return line


def is_call(text: str) -> bool:
    """Returns whether a line is a call of a tool, as JSON."""
    try:
        call = json.loads(text)
    except ValueError:
        return False
    return isinstance(call, dict) and call.get("name") in TOOLS and isinstance(call.get("arguments"), dict)


def levenshtein(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts the least insertions, deletions and exchanges that turn one sequence into another."""
    row = list(range(len(second) + 1))
    for number, token in enumerate(first, 1):
        above, row = row, [number]
        for place, other in enumerate(second, 1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (token != other)))
    return row[-1]


def common_prefix(prompt: SegmentPrompt, others: Sequence[SegmentPrompt]) -> int:
    """Counts the tokens that a prefix cache of other prompts has of a prompt; never the last one."""
    best = 0
    for other in others:
        size = min(len(prompt.ids) - 1, len(other.ids))
        differ = np.flatnonzero(prompt.ids[:size] != other.ids[:size])
        best = max(best, int(differ[0]) if len(differ) else size)
    return best


def cold_records(reader: PromptReader, prompts: Sequence[SegmentPrompt], setting: ReuseSetting) -> list[dict[str, Any]]:
    """Serves prompts in order with a store that is empty at first, and stores what each leaves."""
    segments = SegmentStore(reader.backbone, setting.store.options()).tenant(TENANT)
    records = []
    for prompt in prompts:
        full = full_prefill(reader, prompt)
        result, record = measure(reader, prompt, full, segments, setting)
        started = time.perf_counter()
        stored = store_segments(reader.backbone, prompt, result, segments, tenant=TENANT)
        record |= {"stored": stored, "bytes": segments.bytes, "storing": round(time.perf_counter() - started, 3)}
        records.append(record)
    return records


def stability_record(
    reader: PromptReader,
    prompt: SegmentPrompt,
    full: FullPrefill,
    stores: Sequence[TenantSegments],
    setting: ReuseSetting,
    steps: int,
) -> dict[str, Any]:
    """Continues a prompt in several runs, each over its own store, and without reuse as often."""
    served, whole = [], []
    for segments in stores:
        result, _ = measure(reader, prompt, full, segments, setting)
        served.append(continued(reader, full.tokens, result.cache, steps))
        again = full_prefill(reader, prompt)
        whole.append(continued(reader, again.tokens, again.cache, steps))
    return {"served": _distance(served), "whole": _distance(whole)}


def run_order(seed: int, count: int, size: int) -> list[int]:
    """Draws which of `count` transcripts fill the store of a run, and in which order."""
    return random.Random(f"run {seed}").sample(range(count), size)


def _distance(lines: Sequence[Sequence[int]]) -> float:
    """Computes the mean Levenshtein distance over pairs, as a share of the longer line."""
    pairs = [(a, b) for number, a in enumerate(lines) for b in lines[number + 1 :]]
    return float(np.mean([levenshtein(a, b) / max(len(a), len(b), 1) for a, b in pairs]))


def _room(more: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, 0), (0, more), (0, 0), (0, 0)]


def continuation_record(
    reader: PromptReader, full: FullPrefill, caches: Mapping[str, EngineKV], steps: int
) -> dict[str, Any]:
    """Compares the call that follows a prompt with the one after its whole prefill."""
    whole = continued(reader, full.tokens, full.cache, steps)
    record: dict[str, Any] = {"whole": {"valid": is_call(reader.decode(whole).strip())}}
    for name, cache in caches.items():
        line = continued(reader, full.tokens, cache, steps)
        record[name] = {
            "equal": line == whole,
            "valid": is_call(reader.decode(line).strip()),
            "distance": levenshtein(whole, line) / max(len(whole), len(line), 1),
        }
    return record
