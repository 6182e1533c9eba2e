"""Prefills with reused segments on a tiny random backbone, against whole prefills and a plan in one pass."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvpatch_jax as kvp
from evals.trained import shipped, shipped_names
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.segments import (
    ReuseThresholds,
    SegmentOptions,
    SegmentStore,
    StoredSpan,
    segment_prefill,
    spans,
    store_segments,
)
from models import ModelBackbone, load
from models.families.family import parameters
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.qwen_images import ImageConfig
from tests.goldens.load_text import write_text_checkpoint
from tests.kvpatch_jax.segments.segment_cases import id_prompt, prompt, words

CONFIG = Path(__file__).parents[2] / "goldens" / "qwen2_5_vl" / "config.json"
LAYERS, REUSED, HALO = 4, 2, 4
OPTIONS = SegmentOptions(reuse_layers=REUSED)
ALL = ReuseThresholds(halo=HALO, epsilon=1e9)
NONE = dataclasses.replace(ALL, epsilon=0.0)
SYSTEM, DOCUMENT, ENDING = f"System: {words(0, 30)}\n", f"Observation: {words(1, 70)}\n", "Thought: what"
FIRST = SYSTEM + DOCUMENT + ENDING
MOVED = f"Question: {words(2, 20)}\n{DOCUMENT}{ENDING}"


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    config = Qwen25VLConfig.from_dict(json.loads(CONFIG.read_text()), "exact")
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, layers=LAYERS))
    model = config.family.module(config, nnx.Rngs(0))
    return ModelBackbone(config, parameters(model), ImageConfig(), buckets=Buckets(32, 1))


def filled(backbone: Any, *texts: str, options: SegmentOptions = OPTIONS) -> SegmentStore:
    store = SegmentStore(backbone, options)
    for read in map(prompt, texts):
        store_segments(backbone, read, segment_prefill(backbone, read, store, NONE), store)
    return store


@pytest.fixture(scope="module")
def store(backbone) -> SegmentStore:
    with jax.default_matmul_precision("highest"):
        return filled(backbone, FIRST)


def truth(backbone, text: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Last logits and engine-frame cache of a whole prefill."""
    tokens = backbone.embed(**backbone.prepare([prompt(text).ids.tolist()]))
    out = backbone.prefill(tokens)
    cache = kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)
    return np.asarray(out.logits[:, 0]), {name: np.asarray(value) for name, value in cache.items()}


def error(found, expected) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def cache_errors(result, cache) -> list[float]:
    """Errors of the channels; slots behind the prompt are free."""
    size = cache["k"].shape[2]
    assert not any(np.asarray(value)[:, :, size:].any() for value in result.cache.values())
    return [error(result.cache[name][:, :, :size], cache[name]) for name in cache]


def worst(backbone, text: str, result) -> float:
    logits, cache = truth(backbone, text)
    return max(error(result.logits, logits), *cache_errors(result, cache))


def the_document(store: SegmentStore) -> StoredSpan:
    (span,) = [span for span in store.index.spans.values() if len(span.ids) > 40]
    return span


def test_without_segments_it_is_a_prefill(backbone):
    result = segment_prefill(backbone, prompt(FIRST), SegmentStore(backbone, OPTIONS), ALL)
    assert worst(backbone, FIRST, result) <= 1e-5
    assert result.decisions == ()
    assert not result.reused.any()
    assert result.flops == result.full_flops


def test_rejected_runs_leave_a_prefill_and_cost_their_test(backbone, store):
    result = segment_prefill(backbone, prompt(MOVED), store, NONE)
    assert worst(backbone, MOVED, result) <= 1e-5
    assert [decision.rejected_at for decision in result.decisions] == ["left"]
    assert not result.reused.any()
    assert result.flops > result.full_flops


@pytest.mark.slow
def test_halos_that_cover_a_run_leave_a_prefill(backbone, store):
    result = segment_prefill(backbone, prompt(MOVED), store, dataclasses.replace(ALL, halo=40))
    assert result.decisions == ()
    assert worst(backbone, MOVED, result) <= 1e-5


def test_a_segment_behind_its_own_prefix_is_exact_and_needs_no_test(backbone, store):
    result = segment_prefill(backbone, prompt(FIRST), store, NONE)
    (decision,) = result.decisions
    assert (decision.accepted, decision.run.exact, decision.kl) == (True, True, ())
    assert worst(backbone, FIRST, result) <= 1e-5
    begin, end = decision.run.interior
    assert result.reused.sum() == REUSED * (end - begin)
    assert result.flops < result.full_flops


def in_one_pass(backbone, store, text: str, interior: tuple[int, int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reuses one interior without any test: all else through the lower layers, then all tokens through the upper."""
    ids, (begin, end) = prompt(text).ids, interior
    tokens = backbone.embed(**backbone.prepare([ids.tolist()]))
    (span,) = [span for span in store.index.spans.values() if len(span.ids) > 40]
    at = int(np.flatnonzero(ids == span.ids[0])[0])
    while not np.array_equal(ids[at : at + len(span.ids)], span.ids):
        at += 1
    kv, residual = store.read(span.key, begin - at, end - at)

    # Lower layers of the interior at their new places; the upper ones do not matter yet.
    layout = dataclasses.replace(backbone.layout, layers=REUSED)
    rotated = kvp.to_engine(layout, {n: v[:, None] for n, v in kv.items()}, tokens.positions[:, begin:end], 0)
    cache = {}
    for channel in backbone.layout.channels:
        value = np.zeros((LAYERS, 1, len(ids), channel.heads, channel.width), np.float32)
        value[:REUSED, :, begin:end] = rotated[channel.name]
        cache[channel.name] = jnp.asarray(value)

    rest = np.array([token for token in range(len(ids)) if not begin <= token < end])
    chosen = Tokens(tokens.embeddings[:, rest], tokens.positions[:, rest])
    lower = backbone.recompute(chosen, cache, jnp.asarray(rest[None]), stop_layer=REUSED, hidden_at=(REUSED,))
    entering = np.zeros(tokens.embeddings.shape, np.float32)
    entering[:, rest], entering[:, begin:end] = lower.hidden[REUSED], residual[None]
    everything = Tokens(jnp.asarray(entering), tokens.positions)
    upper = backbone.recompute(everything, lower.cache, jnp.arange(len(ids))[None], start_layer=REUSED)
    return np.asarray(upper.logits[:, 0]), {name: np.asarray(value) for name, value in upper.cache.items()}


@pytest.mark.slow
def test_reuse_from_left_to_right_equals_reuse_in_one_pass(backbone, store):
    result = segment_prefill(backbone, prompt(MOVED), store, ALL)
    (decision,) = result.decisions
    assert decision.accepted
    logits, cache = in_one_pass(backbone, store, MOVED, decision.run.interior)
    assert error(result.logits, logits) <= 1e-5
    assert max(cache_errors(result, cache)) <= 1e-5
    # It is no prefill: in another context the segment is an approximation, as the test of a stricter ε says.
    assert worst(backbone, MOVED, result) > 1e-3
    assert len(decision.kl) == 4
    assert max(decision.kl) > 0


class RecomputeLedger:
    """A copy of a backbone, and the FLOPs of every recompute that it was called for."""

    def __init__(self, backbone: ModelBackbone):
        self.flops, self.calls = 0, 0
        self.backbone: Any = copy.copy(backbone)

        def recompute(tokens, cache, slots, logits, start_layer=0, hidden_at=()):
            # A repeated last token pads to a size that forwards share, and is no work that was asked for.
            costs, places = backbone.forward_costs, sorted(set(np.asarray(slots)[0].tolist()))
            for token, pair in list(zip(costs.token, costs.pair, strict=True))[start_layer:]:
                self.flops += sum(token + pair * (place + 1) for place in places)
            self.flops += np.shape(logits)[1] * costs.logit
            self.calls += 1
            options = {"logits": logits, "start_layer": start_layer, "hidden_at": hidden_at}
            return backbone.recompute(tokens, cache, slots, **options)

        self.backbone.recompute = recompute


@pytest.mark.slow
@pytest.mark.parametrize("thresholds", [ALL, NONE, dataclasses.replace(ALL, probes=0)], ids=["all", "none", "blind"])
def test_flops_are_those_of_every_forward(backbone, store, thresholds):
    ledger = RecomputeLedger(backbone)
    result = segment_prefill(ledger.backbone, prompt(MOVED), store, thresholds)
    assert result.flops == ledger.flops
    assert result.full_flops == backbone.forward_costs.flops(len(prompt(MOVED).ids)) + backbone.forward_costs.logit
    assert ledger.calls >= 2


@pytest.mark.slow
def test_a_rejection_at_the_right_border_is_undone_and_counted(backbone, store):
    span = the_document(store)
    kv, residual = store.read(span.key, 0, len(span.ids))
    # Only the end of what is stored is wrong, so that the left border passes.
    residual[-HALO - 6 :] += 100 * np.random.default_rng(0).normal(size=residual[-HALO - 6 :].shape)
    other = SegmentStore(backbone, OPTIONS)
    assert other.add(prompt(FIRST), span, kv, residual)

    ledger = RecomputeLedger(backbone)
    clean = segment_prefill(backbone, prompt(MOVED), store, ALL).decisions[0].kl
    thresholds = dataclasses.replace(ALL, epsilon=max(clean))
    result = segment_prefill(ledger.backbone, prompt(MOVED), other, thresholds)
    (decision,) = result.decisions
    assert (decision.rejected_at, decision.accepted) == ("right", False)
    assert max(decision.kl[:2]) <= thresholds.epsilon < max(decision.kl[2:])
    assert worst(backbone, MOVED, result) <= 1e-5
    assert not result.reused.any()
    assert result.flops == ledger.flops > result.full_flops
    # With half of the probes allowed to fail it is accepted.
    lenient = dataclasses.replace(thresholds, failing=0.5)
    assert segment_prefill(backbone, prompt(MOVED), other, lenient).decisions[0].accepted


@pytest.mark.slow
def test_a_cached_prefix_is_neither_computed_nor_tested(backbone, store):
    _, cache = truth(backbone, MOVED)
    prefix = {name: jnp.asarray(value[:, :, :12]) for name, value in cache.items()}
    result = segment_prefill(backbone, prompt(MOVED), store, NONE, prefix)
    assert worst(backbone, MOVED, result) <= 1e-5
    costs, T = backbone.forward_costs, len(prompt(MOVED).ids)
    assert result.full_flops == costs.flops(T) - costs.flops(12) + costs.logit


@pytest.mark.slow
def test_int8_serves_nearly_what_full_precision_serves(backbone, store):
    narrow = filled(backbone, FIRST, options=dataclasses.replace(OPTIONS, int8=True))
    assert narrow.bytes < store.bytes / 2
    result = segment_prefill(backbone, prompt(FIRST), narrow, ALL)
    assert result.decisions[0].accepted
    assert 1e-6 < worst(backbone, FIRST, result) < 0.05


@pytest.mark.slow
def test_spans_behind_an_approximation_are_of_a_later_generation(backbone):
    text, store = FIRST, filled(backbone, FIRST)
    for generation in (1, 2, 3):
        # Each prompt moves the newest document and shows another one behind it.
        shown = f"Observation: {words(10 + generation, 60)}\n"
        text = f"Question: {words(20 + generation, 20)}\n{text.splitlines()[-2]}\n{shown}{ENDING}"
        known = set(store.index.spans)
        result = segment_prefill(backbone, prompt(text), store, ALL)
        assert any(decision.accepted for decision in result.decisions)
        store_segments(backbone, prompt(text), result, store)
        begin = result.decisions[0].run.interior[0]
        added = [span for key, span in store.index.spans.items() if key not in known]
        # Reused tokens are not stored again, and nothing behind three reuses is stored.
        assert {span.generation for span in added} == {0, generation} - {3}
        assert all(span.generation == generation * (span.start > begin) for span in added)
        assert not any(result.reused[0, span.start : span.start + len(span.ids)].any() for span in added)


@pytest.mark.slow
def test_an_exact_span_replaces_an_approximate_one(backbone, store):
    other, span = SegmentStore(backbone, OPTIONS), the_document(store)
    kv, residual = store.read(span.key, 0, len(span.ids))
    wrong = {name: value + 1 for name, value in kv.items()}
    assert other.add(prompt(FIRST), span._replace(generation=2), wrong, residual)
    assert not other.add(prompt(FIRST), span._replace(generation=2), kv, residual)
    assert other.add(prompt(FIRST), span, kv, residual)
    assert other.index.spans[span.key].generation == 0
    assert not other.add(prompt(FIRST), span._replace(generation=1), wrong, residual)
    stored, _ = other.read(span.key, 0, len(span.ids))
    assert all(stored[name].tobytes() == kv[name].tobytes() for name in kv)
    assert other.bytes == sum(value.nbytes for value in kv.values()) + residual.nbytes
    assert store.index.spans[span.key] is span  # stores share nothing
    other.clear()
    assert (len(other.index.spans), other.bytes) == (0, 0)
    assert segment_prefill(backbone, prompt(FIRST), other, ALL).decisions == ()


@pytest.mark.slow
def test_eviction_forgets_what_was_used_least_recently(backbone):
    other = f"Observation: {words(7, 80)}\n{ENDING}"
    store = filled(backbone, FIRST, other)
    keys = [store.index.describe(prompt(text), spans(prompt(text))[at]).key for text, at in ((FIRST, 1), (other, 0))]
    store = filled(backbone, FIRST, other, options=dataclasses.replace(OPTIONS, budget=store.bytes))
    segment_prefill(backbone, prompt(MOVED), store, ALL)
    third = prompt(f"Observation: {words(8, 80)}\n{ENDING}")
    assert store_segments(backbone, third, segment_prefill(backbone, third, store, NONE), store) > 0
    assert store.bytes <= store.options.budget
    assert keys[0] in store.index.spans
    assert keys[1] not in store.index.spans
    with pytest.raises(KeyError):
        store.read(keys[1], 0, 1)


def test_bad_input_raises_typed_errors_and_changes_nothing(backbone, store, unchecked):
    before, span = (set(store.index.spans), store.bytes), the_document(store)
    prefix = {name: jnp.asarray(value) for name, value in truth(backbone, ENDING)[1].items()}
    with pytest.raises(InputError, match="expected fewer"):
        segment_prefill(backbone, prompt(ENDING), store, ALL, prefix)
    with pytest.raises(ConfigError, match="expected fewer than the model's 4 layers"):
        SegmentStore(backbone, SegmentOptions(reuse_layers=LAYERS))
    arrays = {channel.name: np.zeros((1, len(span.ids), 1, 1), np.float32) for channel in backbone.layout.channels}
    with pytest.raises(InputError, match=r"expected \[\(2, "):
        store.add(prompt(FIRST), span, arrays, np.zeros((len(span.ids), 8), np.float32))
    scaled = jax.tree.map(lambda leaf: leaf * 1.5, backbone.parameters)
    with pytest.raises(InputError, match=r"expected .* the fingerprint of the backbone"):
        segment_prefill(backbone.replaced(scaled), prompt(FIRST), store, ALL)
    assert (set(store.index.spans), store.bytes) == before


@pytest.mark.slow
def test_a_prompt_over_the_regime_of_a_pinned_rope_is_refused(tmp_path):
    short = load(write_text_checkpoint("phi3_short", tmp_path / "phi3"))
    store = SegmentStore(short, SegmentOptions(reuse_layers=1))
    with pytest.raises(InputError, match="expected below 32"):
        segment_prefill(short, id_prompt(np.arange(3, 40)), store, ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in shipped_names() if name.endswith(("kimi_vl", "_mha", "qwen3_vl"))])
def test_trained_families_reuse_too(name):
    trained = load(shipped(name), dtype="float32", buckets=Buckets(32, 1))
    rng = np.random.default_rng(0)
    document = rng.integers(20, 60, 80)
    first = id_prompt([*rng.integers(20, 60, 30), *document, 5])
    moved = id_prompt([*rng.integers(20, 60, 50), *document, 5])
    store = SegmentStore(trained, SegmentOptions(reuse_layers=1))
    store_segments(trained, first, segment_prefill(trained, first, store, ALL), store)
    same = segment_prefill(trained, first, store, NONE)
    tokens = trained.embed(**trained.prepare([first.ids.tolist()]))
    assert same.decisions[0].accepted
    assert error(same.logits, trained.prefill(tokens).logits[:, 0]) <= 1e-4
    other = segment_prefill(trained, moved, store, dataclasses.replace(ALL, segment=0.5))
    assert any(decision.accepted for decision in other.decisions)
