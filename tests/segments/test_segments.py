"""A segment that returns in another prompt is found wherever it moved, and is reused only where it was accepted.

Prompts are of words; prefills are compared with prefills of complete prompts, and with a reuse in one pass.
"""

import dataclasses
import re
import types
import zlib
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.segments import (
    ReuseThresholds,
    SegmentPrefill,
    SegmentPrompt,
    SegmentStore,
    segment_prefill,
    store_segments,
)
from kvpatch_jax.segments.index import SegmentIndex, StoredSpan
from kvpatch_jax.segments.plan import plan_runs
from kvpatch_jax.segments.text import canonicalise, segments, spans
from tests.shared.arrays import placed
from tests.shared.window_oracle import tiny

WORDS = [f"word{number}" for number in range(200)]


def encode(text: str, add_special_tokens: bool = False) -> Any:
    """Tokenises into words, marks and line ends; equal words are equal ids below 250."""
    pieces = list(re.finditer(r"\n|[^\S\n]*(?:\w+|[^\w\s])", text))
    ids = [zlib.crc32(piece.group().encode()) % 250 for piece in pieces]
    return types.SimpleNamespace(ids=ids, offsets=[piece.span() for piece in pieces])


def words(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def prompt(text: str) -> SegmentPrompt:
    return SegmentPrompt.of_text(text, encode)


# ------------------------------------------------------------------------------------------------------ text and index

COSTS = ForwardCosts(token=(1000,) * 4, pair=(10,) * 4, window=(0,) * 4, logit=0)
SYSTEM, DOCUMENT = f"System: {words(0, 50)}\n", f"Observation: {words(1, 150)}\n"


def index_of(*texts: str) -> SegmentIndex:
    index = SegmentIndex(context=64)
    for read in map(prompt, texts):
        for span in [index.describe(read, span) for span in spans(read) if segments(span)]:
            if span.key not in index.spans:
                index.add(read, span)
    return index


def runs_of(index, text, segment=0.7, context=0.0):
    return index.runs(prompt(text), segment, context)


def planned(index, text, costs=COSTS, **options):
    return plan_runs(prompt(text), runs_of(index, text), index.spans, ReuseThresholds(**options), costs, 2)


def edges(run):
    return run.pieces[0].start, run.pieces[-1].stop


def test_volatile_spans_case_and_marks_do_not_count_and_content_does():
    first = "At 2026-01-02T10:00:00Z id 123456 trace deadbeef01, 123e4567-e89b-12d3-a456-426614174000: “quoted” – it’s"
    second = (
        'at 2025-11-30 23:59:59 id  98765432 TRACE 00ff00ff99, 00000000-0000-0000-0000-000000000001: "quoted" - it\'s'
    )
    assert canonicalise(first) == canonicalise(second)
    assert canonicalise("2 results") != canonicalise("3 results")
    # Strings and code keep their case; what surrounds them does not.
    assert canonicalise('Call {"Name": `Foo`}') == 'call {"Name": `Foo`}'


def test_plans_join_neighbours_of_one_prompt_where_that_saves_more_than_its_logits_cost():
    text = SYSTEM + DOCUMENT + f"Question: {words(4, 12)}\n"
    moved = f"{words(5, 30)}\n{text}Thought: x"
    (run,) = planned(index_of(text), moved)
    assert (len(run.pieces), np.diff(edges(run))) == (3, len(prompt(text).ids))
    apart = planned(index_of(SYSTEM, DOCUMENT), f"{words(5, 30)}\n{SYSTEM}{DOCUMENT}Thought: x")
    assert [len(run.pieces) for run in apart] == [1, 1], "neighbours of two prompts"
    assert planned(index_of(text), moved, COSTS._replace(logit=10**6)) == []


def test_a_moved_repeat_is_found_completely_until_it_is_removed():
    index = index_of(SYSTEM + DOCUMENT)
    text = f"{words(5, 33)}\n{DOCUMENT}Question: {words(6, 10)}"
    (run,) = runs_of(index, text)
    assert (run.stop - run.start, run.offset) == (len(prompt(DOCUMENT).ids), 0)
    # Its left context is another, which a threshold may ask for: only windows inside it have the same one.
    assert min(run.offset for run in runs_of(index, text, context=0.5)) > 32
    assert runs_of(index, SYSTEM + DOCUMENT + "Question: x", context=0.5)
    # Only the first half is the same, too little for the span as a whole; its windows find it.
    half = " ".join(DOCUMENT.split(" ")[:100])
    lengths = [run.stop - run.start for run in runs_of(index, f"Question: {words(8, 21)}\n{half} {words(9, 120)}", 0.8)]
    assert [length for length in lengths if length > 50] == [len(prompt(half).ids)]

    (span,) = [span for span in index.spans.values() if len(span.ids) > 100]
    index.remove(span.key)
    assert runs_of(index, text) == []
    assert len(runs_of(index, SYSTEM)) == 1
    index.add(prompt(DOCUMENT), span)
    assert runs_of(index, text)


# ------------------------------------------------------------------------------------------------------------ prefills

LAYERS, REUSED, HALO, SLOTS = 3, 2, 4, 128
ALL = ReuseThresholds(halo=HALO, epsilon=1e9)
ENDING = "Thought: what"
FIRST = f"System: {words(0, 30)}\nObservation: {words(1, 70)}\n{ENDING}"
MOVED = f"Question: {words(2, 20)}\nObservation: {words(1, 70)}\n{ENDING}"


@pytest.fixture(scope="module")
def backbone() -> Any:
    return tiny("mrope", Buckets(SLOTS, 1, SLOTS))


def filled(backbone: Any, *texts: str, **options: Any) -> SegmentStore:
    store = SegmentStore(backbone, REUSED, **options)
    for read in map(prompt, texts):
        store_segments(backbone, read, segment_prefill(backbone, read, store, ALL), store)
    return store


@pytest.fixture(scope="module")
def store(backbone) -> SegmentStore:
    return filled(backbone, FIRST)


def served(backbone: Any, store: SegmentStore, text: str, **thresholds: Any) -> SegmentPrefill:
    return segment_prefill(backbone, prompt(text), store, dataclasses.replace(ALL, **thresholds))


def truth(backbone, text: str) -> tuple[Any, dict[str, Any]]:
    """Last logits and engine-frame cache of a prefill of the complete prompt."""
    tokens = backbone.embed(**backbone.prepare([prompt(text).ids.tolist()]))
    out = backbone.prefill(tokens)
    return out.logits[:, 0], kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)


def worst(result: SegmentPrefill, expected: tuple[Any, dict[str, Any]]) -> float:
    """The largest relative error of logits and cache; slots behind the prompt are free."""
    logits, cache = expected
    size = cache["k"].shape[2]
    assert not any(np.asarray(value)[:, :, size:].any() for value in result.cache.values())
    pairs = [(result.logits, logits), *((np.asarray(result.cache[name])[:, :, :size], cache[name]) for name in cache)]
    return max(float(np.abs(np.asarray(value) - right).max() / np.abs(right).max()) for value, right in pairs)


def the_document(store: SegmentStore) -> StoredSpan:
    (span,) = [span for span in store.index.spans.values() if len(span.ids) > 40]
    return span


def test_nothing_stored_rejected_runs_and_a_known_prefix_all_leave_a_prefill(backbone, store):
    result = served(backbone, SegmentStore(backbone, REUSED), FIRST)
    assert worst(result, truth(backbone, FIRST)) <= 1e-5
    assert (result.decisions, result.generations.any(), result.flops) == ((), False, result.full_flops)

    result = served(backbone, store, MOVED, epsilon=0.0)
    assert worst(result, truth(backbone, MOVED)) <= 1e-5
    assert [decision.rejected_at for decision in result.decisions] == ["left"]
    assert not result.generations.any()
    assert result.flops > result.full_flops

    # Behind its own prefix a segment is exact and needs no test.
    result = served(backbone, store, FIRST, epsilon=0.0)
    (decision,) = result.decisions
    assert (decision.accepted, decision.run.generation, decision.kl) == (True, 0, ())
    assert worst(result, truth(backbone, FIRST)) <= 1e-5
    begin, end = decision.run.interior
    assert (result.generations < 0).sum() == end - begin
    assert result.flops < result.full_flops
    assert served(backbone, store, MOVED, halo=40, epsilon=0.0).decisions == (), "halos cover the run"


def in_one_pass(backbone, store, text: str, interior: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
    """Reuses one interior without any test: all else through the lower layers, then all tokens through the upper."""
    ids, (begin, end), span = prompt(text).ids, interior, the_document(store)
    tokens = backbone.embed(**backbone.prepare([ids.tolist()])).on_host()
    (at,) = [at for at in range(len(ids)) if np.array_equal(ids[at : at + len(span.ids)], span.ids)]
    kv, residual = store.read(span.key, begin - at, end - at)

    # Lower layers of the interior at their new places; the upper ones do not matter yet.
    layout = dataclasses.replace(backbone.layout, layers=REUSED)
    rotated = kvp.to_engine(layout, {n: v[:, None] for n, v in kv.items()}, tokens.positions[:, begin:end], 0)
    cache = {}
    for channel in backbone.layout.channels:
        cache[channel.name] = np.zeros((LAYERS, 1, SLOTS, channel.heads, channel.width), np.float32)
        cache[channel.name][:REUSED, :, begin:end] = rotated[channel.name]

    rest = np.array([token for token in range(len(ids)) if not begin <= token < end])
    chosen = Tokens(tokens.embeddings[:, rest], tokens.positions[:, rest])
    lower = backbone.recompute(chosen, cache, rest[None], hidden_at=(REUSED,))
    entering = np.zeros(tokens.embeddings.shape, np.float32)
    entering[:, rest], entering[:, begin:end] = lower.hidden[REUSED], residual[None]
    everything, places = Tokens(placed(entering), tokens.positions), np.arange(len(ids))[None]
    upper = backbone.recompute(everything, lower.cache, places, start_layer=REUSED, logits=places[:, -2:])
    return upper.logits[:, 1], {name: np.asarray(value)[:, :, : len(ids)] for name, value in upper.cache.items()}


def test_reuse_from_left_to_right_equals_reuse_in_one_pass(backbone, store):
    result = served(backbone, store, MOVED)
    (decision,) = result.decisions
    assert worst(result, in_one_pass(backbone, store, MOVED, decision.run.interior)) <= 1e-5
    # It is no prefill: in another context the segment is an approximation, as the test of a stricter ε says.
    assert worst(result, truth(backbone, MOVED)) > 1e-3
    assert len(decision.kl) == 4
    # All tokens pass the lower layers but for the interior's, and both borders are tested in the upper ones.
    costs, (begin, end) = backbone.forward_costs, decision.run.interior
    assert result.full_flops == costs.flops(len(prompt(MOVED).ids)) + costs.logit
    assert 0 < result.full_flops - result.flops < REUSED * (end - begin) * (costs.token[0] + 150 * costs.pair[0])


def test_a_rejection_at_the_right_border_is_undone_and_counted(backbone, store):
    # Only the end of what is stored is wrong, so that the left border passes.
    span, other = the_document(store), SegmentStore(backbone, REUSED)
    kv, residual = store.read(span.key, 0, len(span.ids))
    residual[-HALO - 6 :] += 100 * np.random.default_rng(0).normal(size=residual[-HALO - 6 :].shape)
    assert other.add(prompt(FIRST), span, kv, residual)
    epsilon = max(served(backbone, store, MOVED).decisions[0].kl)
    result = served(backbone, other, MOVED, epsilon=epsilon)
    (decision,) = result.decisions
    assert decision.rejected_at == "right"
    assert max(decision.kl[:2]) <= epsilon < max(decision.kl[2:])
    assert worst(result, truth(backbone, MOVED)) <= 1e-5
    assert not result.generations.any()
    assert result.flops > result.full_flops
    # With half of the probes allowed to fail it is accepted.
    assert served(backbone, other, MOVED, epsilon=epsilon, failing=0.5).decisions[0].accepted


def test_an_exact_span_replaces_an_approximate_one(backbone, store):
    other, span = SegmentStore(backbone, REUSED), the_document(store)
    kv, residual = store.read(span.key, 0, len(span.ids))
    # In its own context one that counts as approximate is tested, and loses nothing.
    assert other.add(prompt(FIRST), span._replace(generation=1), kv, residual)
    assert 0 <= max(served(backbone, other, FIRST).decisions[0].kl) < 1e-6
    other = SegmentStore(backbone, REUSED)
    wrong = {name: value + 1 for name, value in kv.items()}
    assert other.add(prompt(FIRST), span._replace(generation=2), wrong, residual)
    assert not other.add(prompt(FIRST), span._replace(generation=2), kv, residual)
    assert other.add(prompt(FIRST), span, kv, residual)
    assert not other.add(prompt(FIRST), span._replace(generation=1), wrong, residual)
    stored, _ = other.read(span.key, 0, len(span.ids))
    assert all(stored[name].tobytes() == kv[name].tobytes() for name in kv)
    assert other.bytes == sum(value.nbytes for value in kv.values()) + residual.nbytes


def test_a_store_keeps_to_its_budget_and_its_bits(backbone, store):
    narrow = filled(backbone, FIRST, int8=True)
    assert narrow.bytes < store.bytes / 2
    assert 1e-6 < worst(served(backbone, narrow, FIRST), truth(backbone, FIRST)) < 0.05
    other, third = (f"Observation: {words(seed, 80)}\n{ENDING}" for seed in (7, 8))
    used, unused = the_document(store).key, the_document(filled(backbone, other)).key
    both = filled(backbone, FIRST, other, budget=filled(backbone, FIRST, other).bytes)
    served(backbone, both, MOVED)
    store_segments(backbone, prompt(third), served(backbone, both, third), both)
    assert both.bytes <= both.budget
    assert used in both.index.spans
    assert unused not in both.index.spans, "it was used least recently"
    with pytest.raises(KeyError):
        both.read(unused, 0, 1)


def test_wrong_calls_raise_typed_errors(backbone, store, unchecked):
    with pytest.raises(ConfigError, match=r"thresholds: got .*expected"):
        ReuseThresholds(segment=1.5)
    with pytest.raises(ConfigError, match=r"SegmentStore: got .*expected"):
        SegmentStore(backbone, LAYERS)
    with pytest.raises(InputError, match="expected at least one"):
        prompt("")
    scaled = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(1.5), backbone.parameters)
    with pytest.raises(InputError, match=r"expected .* the fingerprint of the backbone"):
        served(backbone.replaced(scaled), store, FIRST)
