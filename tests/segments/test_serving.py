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
from kvpatch_jax.models import FAMILIES, ModelBackbone, load
from kvpatch_jax.models.families.family import parameters
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.segments import ReuseThresholds, SegmentPrefill, SegmentStore, segment_prefill, store_segments
from kvpatch_jax.segments.index import StoredSpan
from tests.goldens.load import write_checkpoint
from tests.segments.segment_cases import id_prompt, prompt, words

CONFIG = Path(__file__).parents[1] / "goldens" / "qwen2_5_vl" / "config.json"
LAYERS, REUSED, HALO = 4, 2, 4
ALL = ReuseThresholds(halo=HALO, epsilon=1e9)
SYSTEM, DOCUMENT, ENDING = f"System: {words(0, 30)}\n", f"Observation: {words(1, 70)}\n", "Thought: what"
FIRST = SYSTEM + DOCUMENT + ENDING
MOVED = f"Question: {words(2, 20)}\n{DOCUMENT}{ENDING}"


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    config = FAMILIES["Qwen2_5_VLForConditionalGeneration"].config(json.loads(CONFIG.read_text()), "exact")
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, layers=LAYERS))
    model = config.family.module(config, nnx.Rngs(0))
    images = Settings.of({}, processor="qwen2_vl.Qwen2VL")
    return ModelBackbone(config, parameters(model), images, buckets=Buckets(32, 1))


def filled(backbone: Any, *texts: str, **options: Any) -> SegmentStore:
    store = SegmentStore(backbone, REUSED, **options)
    for read in map(prompt, texts):
        store_segments(backbone, read, segment_prefill(backbone, read, store, ALL), store)
    return store


@pytest.fixture(scope="module")
def store(backbone) -> SegmentStore:
    with jax.default_matmul_precision("highest"):
        return filled(backbone, FIRST)


def served(backbone: Any, store: SegmentStore, text: str, **thresholds: Any) -> SegmentPrefill:
    return segment_prefill(backbone, prompt(text), store, dataclasses.replace(ALL, **thresholds))


def truth(backbone, text: str) -> tuple[Any, dict[str, Any]]:
    """Last logits and engine-frame cache of a whole prefill."""
    tokens = backbone.embed(**backbone.prepare([prompt(text).ids.tolist()]))
    out = backbone.prefill(tokens)
    return out.logits[:, 0], kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)


def worst(result: SegmentPrefill, expected: tuple[Any, dict[str, Any]]) -> float:
    """The largest relative error of logits and cache; slots behind the prompt are free."""
    logits, cache = expected
    size = cache["k"].shape[2]
    assert not any(np.asarray(value)[:, :, size:].any() for value in result.cache.values())
    pairs = [(result.logits, logits), *((result.cache[name][:, :, :size], value) for name, value in cache.items())]
    return max(float(jnp.abs(value - right).max() / jnp.abs(right).max()) for value, right in pairs)


def the_document(store: SegmentStore) -> StoredSpan:
    (span,) = [span for span in store.index.spans.values() if len(span.ids) > 40]
    return span


def test_without_segments_it_is_a_prefill(backbone):
    result = served(backbone, SegmentStore(backbone, REUSED), FIRST)
    assert worst(result, truth(backbone, FIRST)) <= 1e-5
    assert (result.decisions, result.generations.any(), result.flops) == ((), False, result.full_flops)


@pytest.mark.parametrize(("halo", "rejected"), [(HALO, ["left"]), pytest.param(40, [], marks=pytest.mark.nightly)])
def test_runs_that_are_rejected_or_covered_by_halos_leave_a_prefill(backbone, store, halo, rejected):
    result = served(backbone, store, MOVED, halo=halo, epsilon=0.0)
    assert worst(result, truth(backbone, MOVED)) <= 1e-5
    assert [decision.rejected_at for decision in result.decisions] == rejected
    assert not result.generations.any()
    assert (result.flops > result.full_flops) == bool(rejected)


def test_a_segment_behind_its_own_prefix_is_exact_and_needs_no_test(backbone, store):
    result = served(backbone, store, FIRST, epsilon=0.0)
    (decision,) = result.decisions
    assert (decision.accepted, decision.run.generation, decision.kl) == (True, 0, ())
    assert worst(result, truth(backbone, FIRST)) <= 1e-5
    begin, end = decision.run.interior
    assert (result.generations < 0).sum() == end - begin
    assert result.flops < result.full_flops


def in_one_pass(backbone, store, text: str, interior: tuple[int, int]) -> tuple[Any, dict[str, Any]]:
    """Reuses one interior without any test: all else through the lower layers, then all tokens through the upper."""
    ids, (begin, end), span = prompt(text).ids, interior, the_document(store)
    tokens = backbone.embed(**backbone.prepare([ids.tolist()]))
    (at,) = [at for at in range(len(ids)) if np.array_equal(ids[at : at + len(span.ids)], span.ids)]
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
    return upper.logits[:, 0], upper.cache


@pytest.mark.nightly
def test_reuse_from_left_to_right_equals_reuse_in_one_pass(backbone, store):
    result = served(backbone, store, MOVED)
    (decision,) = result.decisions
    assert decision.accepted
    assert worst(result, in_one_pass(backbone, store, MOVED, decision.run.interior)) <= 1e-5
    # It is no prefill: in another context the segment is an approximation, as the test of a stricter ε says.
    assert worst(result, truth(backbone, MOVED)) > 1e-3
    assert len(decision.kl) == 4
    assert max(decision.kl) > 0


def counted(backbone: ModelBackbone) -> tuple[Any, list[int]]:
    """A copy of a backbone, and the FLOPs of every recompute that it is called for."""
    copied, calls, costs = copy.copy(backbone), [], backbone.forward_costs

    def recompute(tokens, cache, slots, logits, start_layer=0, **options):
        # A repeated last token pads to a size that forwards share, and is no work that was asked for.
        places = sorted(set(np.asarray(slots)[0].tolist()))
        layers = list(zip(costs.token, costs.pair, strict=True))[start_layer:]
        calls.append(sum(token + pair * (place + 1) for token, pair in layers for place in places))
        calls.append(np.shape(logits)[1] * costs.logit)
        return backbone.recompute(tokens, cache, slots, logits=logits, start_layer=start_layer, **options)

    copied.recompute = recompute  # pyright: ignore[reportAttributeAccessIssue]
    return copied, calls


@pytest.mark.nightly
@pytest.mark.parametrize("thresholds", [{}, {"epsilon": 0.0}, {"probes": 0}])
def test_flops_are_those_of_every_forward(backbone, store, thresholds):
    counting, calls = counted(backbone)
    result = served(counting, store, MOVED, **thresholds)
    assert result.flops == sum(calls)
    assert result.full_flops == backbone.forward_costs.flops(len(prompt(MOVED).ids)) + backbone.forward_costs.logit


@pytest.mark.nightly
def test_a_rejection_at_the_right_border_is_undone_and_counted(backbone, store):
    # Only the end of what is stored is wrong, so that the left border passes.
    span, other = the_document(store), SegmentStore(backbone, REUSED)
    kv, residual = store.read(span.key, 0, len(span.ids))
    residual[-HALO - 6 :] += 100 * np.random.default_rng(0).normal(size=residual[-HALO - 6 :].shape)
    assert other.add(prompt(FIRST), span, kv, residual)

    epsilon = max(served(backbone, store, MOVED).decisions[0].kl)
    counting, calls = counted(backbone)
    result = served(counting, other, MOVED, epsilon=epsilon)
    (decision,) = result.decisions
    assert decision.rejected_at == "right"
    assert max(decision.kl[:2]) <= epsilon < max(decision.kl[2:])
    assert worst(result, truth(backbone, MOVED)) <= 1e-5
    assert not result.generations.any()
    assert result.flops == sum(calls) > result.full_flops
    # With half of the probes allowed to fail it is accepted.
    assert served(backbone, other, MOVED, epsilon=epsilon, failing=0.5).decisions[0].accepted


@pytest.mark.nightly
def test_int8_serves_nearly_what_full_precision_serves(backbone, store):
    narrow = filled(backbone, FIRST, int8=True)
    assert narrow.bytes < store.bytes / 2
    result = served(backbone, narrow, FIRST)
    assert result.decisions[0].accepted
    assert 1e-6 < worst(result, truth(backbone, FIRST)) < 0.05


@pytest.mark.nightly
def test_spans_behind_an_approximation_are_of_a_later_generation(backbone):
    text, store = FIRST, filled(backbone, FIRST)
    for generation in (1, 2, 3):
        # Each prompt moves the newest document and shows another one behind it.
        shown = f"Observation: {words(10 + generation, 60)}\n"
        text = f"Question: {words(20 + generation, 20)}\n{text.splitlines()[-2]}\n{shown}{ENDING}"
        known, result = set(store.index.spans), served(backbone, store, text)
        assert any(decision.accepted for decision in result.decisions)
        store_segments(backbone, prompt(text), result, store)
        begin = result.decisions[0].run.interior[0]
        added = [span for key, span in store.index.spans.items() if key not in known]
        # Reused tokens are not stored again, and nothing behind three reuses is stored.
        assert {span.generation for span in added} == {0, generation} - {3}
        assert all(span.generation == generation * (span.start > begin) for span in added)
        assert all(result.generations[span.start : span.start + len(span.ids)].min() >= 0 for span in added)


@pytest.mark.nightly
def test_an_exact_span_replaces_an_approximate_one(backbone, store):
    other, span = SegmentStore(backbone, REUSED), the_document(store)
    kv, residual = store.read(span.key, 0, len(span.ids))
    wrong = {name: value + 1 for name, value in kv.items()}
    assert other.add(prompt(FIRST), span._replace(generation=2), wrong, residual)
    assert not other.add(prompt(FIRST), span._replace(generation=2), kv, residual)
    assert other.add(prompt(FIRST), span, kv, residual)
    assert not other.add(prompt(FIRST), span._replace(generation=1), wrong, residual)
    stored, _ = other.read(span.key, 0, len(span.ids))
    assert all(stored[name].tobytes() == kv[name].tobytes() for name in kv)
    assert other.bytes == sum(value.nbytes for value in kv.values()) + residual.nbytes


@pytest.mark.nightly
def test_eviction_forgets_what_was_used_least_recently(backbone):
    other, third = (f"Observation: {words(seed, 80)}\n{ENDING}" for seed in (7, 8))
    store = filled(backbone, FIRST, other)
    used, unused = the_document(filled(backbone, FIRST)).key, the_document(filled(backbone, other)).key
    store = filled(backbone, FIRST, other, budget=store.bytes)
    served(backbone, store, MOVED)
    store_segments(backbone, prompt(third), served(backbone, store, third), store)
    assert store.bytes <= store.budget
    assert used in store.index.spans
    assert unused not in store.index.spans
    with pytest.raises(KeyError):
        store.read(unused, 0, 1)


@pytest.mark.parametrize("options", [{"reuse_layers": 0}, {"reuse_layers": LAYERS}, {"context": -1}, {"budget": 0}])
def test_invalid_options_of_a_store_are_refused(backbone, options, unchecked):
    with pytest.raises(ConfigError, match=r"SegmentStore: got .*expected"):
        SegmentStore(backbone, **{"reuse_layers": REUSED} | options)


def test_segments_of_another_model_are_refused(backbone, store):
    scaled = jax.tree.map(lambda leaf: leaf * 1.5, backbone.parameters)
    with pytest.raises(InputError, match=r"expected .* the fingerprint of the backbone"):
        served(backbone.replaced(scaled), store, FIRST)


@pytest.mark.nightly
def test_a_prompt_over_the_regime_of_a_pinned_rope_is_refused(tmp_path):
    short = load(write_checkpoint("phi3_short", tmp_path / "phi3"))
    with pytest.raises(InputError, match="expected below 32"):
        served(short, SegmentStore(short, 1), words(3, 40))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in shipped_names() if name.endswith(("kimi_vl", "_mha", "qwen3_vl"))])
def test_trained_families_reuse_too(name):
    trained = load(shipped(name), dtype="float32", buckets=Buckets(32, 1))
    rng = np.random.default_rng(0)
    document = rng.integers(20, 60, 80)
    first = id_prompt([*rng.integers(20, 60, 30), *document, 5])
    moved = id_prompt([*rng.integers(20, 60, 50), *document, 5])
    store = SegmentStore(trained, 1)
    store_segments(trained, first, segment_prefill(trained, first, store, ALL), store)
    same = segment_prefill(trained, first, store, ALL)
    out = trained.prefill(trained.embed(**trained.prepare([first.ids.tolist()])))
    assert same.decisions[0].accepted
    assert float(jnp.abs(same.logits - out.logits[:, 0]).max() / jnp.abs(out.logits).max()) <= 1e-4
    other = segment_prefill(trained, moved, store, dataclasses.replace(ALL, segment=0.5))
    assert any(decision.accepted for decision in other.decisions)
