"""With every token recomputed a method equals a re-prefill; with none, blind reuse; all else keeps its bits."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens, joined, joined_tokens
from kvpatch_jax.core import transition_of
from kvpatch_jax.errors import InputError, LayoutError
from kvpatch_jax.models import load
from kvpatch_jax.repair import METHODS, RepairBudget, SplicedCache
from tests.goldens.load import write_checkpoint
from tests.shared.compilations import compilations
from tests.shared.splices import (
    BEFORE,
    CHUNK,
    LAYERS,
    NEW,
    ROWS,
    SPARE,
    TOKEN_METHODS,
    changed,
    error,
    make_splice,
    text_tokens,
)

THREE = RepairBudget(tokens=3)
REPREFILLS = ("full_reprefill", "encoder_cached_reprefill", "prefix_caching", "layer_reprefill")


@pytest.mark.parametrize("name", [*TOKEN_METHODS, *REPREFILLS])
def test_all_tokens_equal_a_prefill_in_context(backbone, spliced, name):
    splice, expected = spliced
    repaired = METHODS[name](backbone, splice, 1.0)
    for channel, value in expected.items():
        assert error(repaired.cache[channel], value) <= 1e-5
        assert error(splice.cache[channel], value) > 1e-2  # blind reuse was wrong, so there was something to mend
    assert bool(repaired.chosen.all())
    assert repaired.token_layers.tolist() == [LAYERS * CHUNK] * ROWS


@pytest.mark.parametrize("name", [*TOKEN_METHODS, "blind", "layer_reprefill"])
def test_no_tokens_leave_the_cache_bit_equal_at_the_cost_of_blind_reuse(backbone, spliced, name):
    splice, _ = spliced
    repaired, blind = METHODS[name](backbone, splice, 0.0), METHODS["blind"](backbone, splice)
    for channel, value in splice.cache.items():
        assert np.asarray(repaired.cache[channel]).tobytes() == np.asarray(value).tobytes()
    assert not repaired.chosen.any()
    assert (repaired.flops, repaired.bytes) == (blind.flops, blind.bytes)


@pytest.mark.parametrize("name", [*TOKEN_METHODS, "attention_sink"])
def test_tokens_that_are_not_chosen_and_padding_keep_their_bits(backbone, spliced, name):
    """What drops tokens below a layer equals a pass of all tokens in which the dropped ones are not written."""
    splice, _ = spliced
    splice = splice.replace(length=jnp.asarray([2, CHUNK]))
    settings = {"schedules": {0.5: (0.8, 0.5, 0.5, 0.2)}} if name == "vlcache" else {}
    repaired = METHODS[name](backbone, splice, 0.5 if settings else THREE, **settings)
    chosen, differs = np.asarray(repaired.chosen), changed(repaired.cache, splice.cache)
    assert not chosen[:, 0, 2:].any()
    assert (chosen[:, 1].sum(-1) == (6, 4, 4, 1)).all() or not settings
    assert not (differs & ~chosen).any()
    assert (differs | ~chosen)[1:].all()  # layer 0 does not depend on the antecedent
    everything = backbone.recompute(splice.tokens, splice.cache, splice.slots, keep=repaired.chosen).cache
    for channel, value in splice.cache.items():
        outside = np.r_[0:BEFORE, BEFORE + CHUNK : value.shape[2]]
        np.testing.assert_array_equal(np.asarray(repaired.cache[channel])[:, :, outside], value[:, :, outside])
        assert error(repaired.cache[channel], everything[channel]) <= 1e-5


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_the_truth_is_read_by_the_oracle_alone(backbone, spliced, name):
    splice, _ = spliced
    without = splice.replace(recorded=None, hidden=None, front=None)
    if name == "oracle_delta":
        with pytest.raises(InputError, match="recorded"):
            METHODS[name](backbone, without, THREE)
        return
    result, expected = (METHODS[name](backbone, variant, THREE) for variant in (without, splice))
    for channel, value in expected.cache.items():
        np.testing.assert_array_equal(result.cache[channel], value)


def test_deep_layers_run_from_the_residual_that_entered_them(backbone, spliced):
    (splice, expected), boundary, share = spliced, 2, 0.5
    # With the residual of a prefill in context, the deep layers are those of a prefill.
    whole = backbone.prefill(joined_tokens([splice.front, splice.tokens]), hidden_at=(boundary,))
    true = splice.replace(hidden={boundary: whole.hidden[boundary][:, BEFORE:]})
    repaired = METHODS["layer_reprefill"](backbone, true, share)
    assert np.asarray(repaired.chosen).any((1, 2)).tolist() == [layer >= boundary for layer in range(LAYERS)]
    for name, value in splice.cache.items():
        np.testing.assert_array_equal(repaired.cache[name][:boundary], value[:boundary])
        assert error(repaired.cache[name][boundary:], expected[name][boundary:]) <= 1e-5
    # With that of the chunk alone, they are not.
    alone = METHODS["layer_reprefill"](backbone, splice, boundary=boundary)
    np.testing.assert_array_equal(alone.chosen, repaired.chosen)
    assert error(alone.cache["v"], repaired.cache["v"]) > 1e-2


# -------------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_with_all_of_every_chunk_equals_a_prefill(prompt):
    backbone, splice, expected, logits = prompt
    assert splice.chunks == ((3, 9), (11, 20))
    for budget in (1.0, RepairBudget(tokens=9)):  # chunks that are shorter than k are recomputed whole
        repaired = METHODS["mpic"](backbone, splice, budget)
        for name, value in expected.items():
            assert error(repaired.cache[name], value) <= 1e-5
        assert error(repaired.logits, logits) <= 1e-5


# The other methods read a question or recorded KV, which a prompt does not have.
PROMPT_METHODS = ("first_k", "vlcache", "cacheblend", "cacheblend_gradual", "random_tokens")


@pytest.mark.parametrize(
    "name",
    ["mpic", "kvshare", *(pytest.param(name, marks=pytest.mark.nightly) for name in PROMPT_METHODS)],
)
def test_new_text_is_always_computed_and_what_lay_there_is_never_read(prompt, name):
    backbone, splice, _, _ = prompt
    noise = jnp.asarray(1e3 * splice.new_text()[:, None, None], jnp.float32)
    assert np.flatnonzero(splice.new_text()).tolist() == list(NEW)
    repaired = METHODS[name](backbone, splice, THREE)
    spoilt = {channel: value + noise for channel, value in splice.cache.items()}
    again = METHODS[name](backbone, splice.replace(cache=spoilt), THREE)
    np.testing.assert_array_equal(again.logits, repaired.logits)
    assert repaired.chosen[:, :, list(NEW)].all()


def test_two_step_reuse_computes_text_as_if_there_were_no_chunks(prompt):
    backbone, splice, _, _ = prompt
    at_once, apart = METHODS["blind"](backbone, splice), METHODS["two_step_reuse"](backbone, splice)
    text = jax.tree.map(lambda leaf: np.asarray(leaf)[:, list(NEW)], splice.tokens)
    expected = kvp.to_engine(backbone.layout, backbone.prefill(text).kv, text.positions, 0)
    for name, value in expected.items():
        rows = np.asarray(apart.cache[name])[:, :, list(NEW)]
        assert error(rows[:, :, :-1], value[:, :, :-1]) <= 1e-5
        assert error(rows[1:, :, -1], value[1:, :, -1]) > 1e-3  # the last token has read the chunks
    assert error(at_once.logits, apart.logits) > 1e-3  # text that sees no image is another text


def test_texts_among_images_with_deepstack_features_have_zeros():
    def tokens(first: int, count: int, deepstack: bool) -> Tokens:
        embeddings = jnp.arange(first, first + 2.0 * count).reshape(1, count, 2)
        features = jnp.ones((1, count, 3, 2)) if deepstack else None
        return Tokens(embeddings, np.arange(first, first + count)[None], features)

    parts = [tokens(0, 2, False), tokens(10, 3, True), tokens(20, 1, False)]
    sequence = joined_tokens(parts)
    assert np.asarray(sequence.deepstack)[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 0]
    assert np.asarray(sequence.positions)[0].tolist() == [0, 1, 10, 11, 12, 20]
    assert np.asarray(sequence.embeddings)[0, :, 0].tolist() == [0, 2, 10, 12, 14, 20]
    assert joined_tokens([parts[0], parts[2]]).deepstack is None


# -------------------------------------------------------------------------------------------------------------- hybrids


@pytest.fixture(scope="module")
def hybrid(_highest_precision) -> Any:
    """A tiny hybrid, its chunk spliced blind behind another, and the cache that a prefill leaves."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = load(write_checkpoint("qwen3_5", Path(folder) / "qwen3_5"), dtype="float32")
    layout = backbone.layout
    tokens = text_tokens(backbone, np.random.default_rng(0).integers(0, 100, (ROWS, BEFORE + 12)))
    front, chunk = tokens.take(0, BEFORE), tokens.take(BEFORE, BEFORE + 12)
    alone = chunk._replace(positions=chunk.positions - BEFORE)
    units = kvp.patching.conditioned(backbone, [front, alone])
    canonical = dict(backbone.prefill(alone).kv)
    ahead = kvp.to_engine(layout, units[0], front.positions, 0)
    place = lambda kv: dict(joined(ahead, kvp.to_engine(layout, kv, chunk.positions, 0)))
    slots = jnp.asarray(np.broadcast_to(np.arange(BEFORE, BEFORE + 12), (ROWS, 12)))
    inputs = {"recorded": units[1], "canonical": canonical, "before": transition_of(ahead)}
    return backbone, SplicedCache(chunk, place(canonical), slots, front=front, **inputs), place(units[1])


@pytest.mark.parametrize(
    ("name", "settings", "bar"),
    [("full_reprefill", {}, 1e-3), ("quantised", {"bits": 16}, 1e-2), ("patch", {"rank": 12}, 1e-3)],
)
def test_a_hybrids_chunk_is_served_whole(hybrid, name, settings, bar):
    backbone, splice, expected = hybrid
    repaired = METHODS[name](backbone, splice, 1.0, **settings)
    assert set(repaired.cache) == set(backbone.layout.names)
    for channel, value in expected.items():
        assert error(repaired.cache[channel], value) <= bar, channel
        assert error(splice.cache[channel], value) > 1e-3 or channel == "tail"


def test_other_methods_refuse_a_hybrid_and_name_what_serves_it(hybrid):
    backbone, splice, _ = hybrid
    for name in sorted({*METHODS} - {"blind", "patch", "full_reprefill", "encoder_cached_reprefill"}):
        with pytest.raises(LayoutError, match=r"linear attention on layers \[\d.*blind, patch, quantised in 16 bits"):
            METHODS[name](backbone, splice, 0.5)
    with pytest.raises(InputError, match="got None"):
        METHODS["patch"](backbone, splice.replace(canonical=None), 1.0, rank=2)


# ------------------------------------------------------------------------------------------------------------- programs


def test_another_chunk_and_place_compile_nothing(backbone, spliced):
    for name in TOKEN_METHODS:
        METHODS[name](backbone, spliced[0], THREE)
    other, _ = make_splice(backbone, seed=1)
    assert other.question is not None
    moved = other.replace(
        tokens=other.tokens._replace(positions=other.tokens.positions + 500),
        slots=other.slots + SPARE,
        question=other.question._replace(positions=other.question.positions + 500),
        length=jnp.full(ROWS, CHUNK),
    )
    with compilations() as again:
        for name in TOKEN_METHODS:
            METHODS[name](backbone, moved, THREE)
    assert not again
