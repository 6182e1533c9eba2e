"""A method equals a re-prefill with all tokens and blind reuse with none, and refuses what it cannot take."""

import inspect
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens, joined, joined_tokens
from kvpatch_jax.core import transition_of
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from kvpatch_jax.repair import (
    METHODS,
    OtherAntecedent,
    PromptPiece,
    RepairBudget,
    SplicedCache,
    best_schedule,
    recomputed_sensitivity,
    reordered_by_question,
    splice_prompt,
)
from tests.repair.splices import (
    BEFORE,
    CHUNK,
    LAYERS,
    LONG,
    NEW,
    ROWS,
    SPARE,
    STORED_METHODS,
    TOKEN_METHODS,
    changed,
    error,
    make_splice,
    prefilled,
    text_tokens,
)
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.window_oracle import backbone_of

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
    splice = splice.replace(length=np.array([2, CHUNK]))
    settings = {"schedules": {0.5: (1.0, 0.5, 0.5, 0.0)}} if name == "vlcache" else {}
    repaired = METHODS[name](backbone, splice, 0.5 if settings else THREE, **settings)
    chosen, differs = np.asarray(repaired.chosen), changed(repaired.cache, splice.cache)
    assert not chosen[:, 0, 2:].any()
    assert (chosen[:, 1].sum(-1) == (8, 4, 4, 0)).all() or not settings
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
    whole = prefilled(backbone, joined_tokens([splice.front, splice.tokens]))
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
    noise = 1e3 * splice.new_text()[:, None, None]
    assert np.flatnonzero(splice.new_text()).tolist() == list(NEW)
    splice = splice.replace(length=np.full(ROWS, splice.slots.shape[1]))
    repaired = METHODS[name](backbone, splice, THREE)
    spoilt = {channel: placed(value + noise, np.float32) for channel, value in jax.device_get(splice.cache).items()}
    again = METHODS[name](backbone, splice.replace(cache=spoilt), THREE)
    np.testing.assert_array_equal(again.logits, repaired.logits)
    assert repaired.chosen[:, :, list(NEW)].all()


def test_two_step_reuse_computes_text_as_if_there_were_no_chunks(prompt):
    backbone, splice, _, _ = prompt
    at_once, apart = METHODS["blind"](backbone, splice), METHODS["two_step_reuse"](backbone, splice)
    text = jax.tree.map(lambda leaf: np.asarray(leaf)[:, list(NEW)], splice.tokens)
    expected = kvp.to_engine(backbone.layout, prefilled(backbone, text).kv, text.positions, 0)
    for name, value in expected.items():
        rows = np.asarray(apart.cache[name])[:, :, list(NEW)]
        assert error(rows[:, :, :-1], value[:, :, :-1]) <= 1e-5
        assert error(rows[1:, :, -1], value[1:, :, -1]) > 1e-3  # the last token has read the chunks
    assert error(at_once.logits, apart.logits) > 1e-3  # text that sees no image is another text


def test_texts_among_images_with_deepstack_features_have_zeros():
    def tokens(first: int, count: int, deepstack: bool) -> Tokens:
        embeddings = placed(np.arange(first, first + 2.0 * count).reshape(1, count, 2))
        features = placed(np.ones((1, count, 3, 2))) if deepstack else None
        return Tokens(embeddings, np.arange(first, first + count)[None], features)

    parts = [tokens(0, 2, False), tokens(10, 3, True), tokens(20, 1, False)]
    sequence = joined_tokens(parts)
    assert np.asarray(sequence.deepstack)[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1, 0]
    assert np.asarray(sequence.positions)[0].tolist() == [0, 1, 10, 11, 12, 20]
    assert np.asarray(sequence.embeddings)[0, :, 0].tolist() == [0, 2, 10, 12, 14, 20]
    assert joined_tokens([parts[0], parts[2]]).deepstack is None


# -------------------------------------------------------------------------------------------------------------- hybrids


@pytest.fixture
def hybrid() -> Any:
    """A tiny hybrid, its chunk spliced blind behind another, and the cache that a prefill leaves."""
    with jax.default_matmul_precision("default"):  # by programs of other rooms
        backbone, layout = backbone_of("hybrid"), backbone_of("hybrid").layout
        tokens = text_tokens(backbone, np.random.default_rng(0).integers(0, 100, (1, BEFORE + 12)))
        front, chunk = tokens.take(0, BEFORE), tokens.take(BEFORE, BEFORE + 12)
        alone = chunk._replace(positions=chunk.positions - BEFORE)
        units = kvp.patching.conditioned(backbone, [front, alone])
        canonical = dict(backbone.prefill(alone).kv)
        ahead = kvp.to_engine(layout, units[0], front.positions, 0)
        place = lambda kv: dict(joined(ahead, kvp.to_engine(layout, kv, chunk.positions, 0)))
        slots = np.arange(BEFORE, BEFORE + 12)[None]
        inputs = {"recorded": units[1], "canonical": canonical, "before": transition_of(ahead)}
        yield backbone, SplicedCache(chunk, place(canonical), slots, front=front, **inputs), place(units[1])


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
        length=np.full(ROWS, CHUNK),
    )
    with compilations() as again:
        for name in TOKEN_METHODS:
            METHODS[name](backbone, moved, THREE)
    assert not again


# ------------------------------------------------------------------------------------------------------------- refusals


PLENTY, SMALL = RepairBudget(kv_bytes=10**7), RepairBudget(kv_bytes=10)
KEEPING = ("anchored", "joint_pair", *STORED_METHODS)
"""Methods that keep bytes."""
one_layout = pytest.mark.parametrize("kind", ["gqa"], indirect=True)
"""Refusals name the layers of grouped queries."""


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_another_kind_are_refused_by_name(backbone, spliced, name, unchecked):
    call = lambda **settings: METHODS[name](backbone, spliced[0], 0.5, **settings)
    with pytest.raises(InputError, match=f"{name}: got option 'nonsense'; expected"):
        call(nonsense=1)
    for parameter in inspect.signature(inspect.unwrap(METHODS[name])).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            for wrong in ([1], object(), b"x", True):
                with pytest.raises(InputError, match=rf"{name}\.{parameter.name}: got .*; expected"):
                    call(**{parameter.name: wrong})
    with pytest.raises(InputError, match="got 3; expected a RepairBudget, or a float"):
        METHODS[name](backbone, spliced[0], 3)


@one_layout
def test_budgets_that_cannot_be_are_refused(backbone, spliced, long, unchecked):
    impossible: list[tuple[dict[str, Any], str]] = [
        ({}, "got nothing; expected one of"),
        ({"share": 0.5, "tokens": 2}, "expected one of"),
        ({"share": float("nan")}, "got nan"),
        ({"tokens": -1}, "got -1"),
        ({"kv_bytes": 2.5}, "got 2.5"),
    ]
    for settings, words in impossible:
        with pytest.raises(InputError, match=words):
            RepairBudget(**settings)
    calls: list[tuple[str, Any, str]] = [
        ("blind", 0.5, "expected 0"),
        ("layer_reprefill", THREE, "share of the layers"),
    ]
    calls += [(name, RepairBudget(tokens=CHUNK + 1), f"expected 0 to the {CHUNK}") for name in TOKEN_METHODS]
    calls += [(name, 0.5, "expected all tokens") for name in ("full_reprefill", "prefix_caching")]
    calls += [(name, None, f"{name}.budget: got None") for name in ("first_k", "gear")]
    for name, budget, words in calls:
        with pytest.raises(InputError, match=words):
            METHODS[name](backbone, spliced[0], budget)
    for name in KEEPING:
        with pytest.raises(InputError, match="expected bytes, or a share"):
            METHODS[name](long[0], long[1], THREE)
    for name in ("gear", "cachegen", "quantised", "low_rank", "shadowkv", "anchored", "joint_pair"):
        with pytest.raises(InputError, match=r"budget: got .* bytes; expected at least"):
            METHODS[name](long[0], long[1], SMALL)


def test_splices_that_do_not_fit(backbone, spliced, unchecked):
    splice, chunks = spliced[0], r"repair\.chunks"
    recorded = {name: kv[:, :, :2] for name, kv in splice.recorded.items()}
    for kind_of_error, words, changes in (
        (InputError, "got 24; expected 0 to 23", {"slots": splice.slots + SPARE + 1}),
        (ShapeError, "embeddings", {"tokens": splice.tokens.take(0, 5)}),
        (ShapeError, "seen", {"seen": np.ones((ROWS, 3), bool)}),
        (ShapeError, "length", {"length": np.ones((ROWS + 1,), np.int32)}),
        (ShapeError, "recorded", {"recorded": recorded}),
        (LayoutError, "repair: cache", {"cache": {"k": splice.cache["k"]}}),
        (InputError, chunks, {"chunks": ((0, CHUNK + 1),)}),
        (InputError, chunks, {"chunks": ((0, 0),)}),
        (InputError, chunks, {"chunks": ((0, 4), (3, 5))}),
    ):
        with pytest.raises(kind_of_error, match=words):
            METHODS["first_k"](backbone, splice.replace(**changes), THREE)


MISSING = [
    *[(name, {}, {"question": None}, "question: got None") for name in ("infoflow", "prophetkv", "quest", "prcr")],
    *[(name, {}, {"recorded": None}, "recorded: got None") for name in STORED_METHODS],
    *[(name, {}, {"chunks": ((0, LONG),)}, "splice of one chunk") for name in KEEPING],
    *[(name, {}, {"front": None}, "front: got None") for name in ("anchored", "joint_pair")],
    ("layer_reprefill", {"boundary": 2}, {"hidden": {}}, "layer 2"),
    ("anchored", {}, {"others": ()}, r"others: got \(\)"),
    *[("patch", {"base": base}, {"others": ()}, r"others: got \(\)") for base in ("mean", "others")],
    ("layer_reprefill", {"boundary": 5}, {}, "got 5; expected 0 to 4"),
    ("cacheblend", {"check_layer": LAYERS}, {}, "check_layer: got 4; expected 0 to 3"),
    ("infoflow", {"geometry": "tp"}, {}, "geometry"),
    ("quest", {"page": 0}, {}, "page: got 0"),
    ("prcr", {}, {"chunks": ((0, 4),)}, "new text"),
    ("block_differences", {"base": "last"}, {}, "base"),
    ("patch", {"rank": 1000}, {}, "got 1000; expected 0 to"),
    ("patch", {"rank": 2, "dtype": "int9"}, {}, "got dtype 'int9'"),
    ("gear", {"rank": 99}, {}, r"gear\.rank: got 99"),
    ("gear", {"bits": 9}, {}, "got 9 bits"),
    ("cachegen", {"step": 0.0}, {}, "expected a positive number"),
    ("mpic", {}, {}, "ends with new text"),
]


@one_layout
def test_settings_out_of_range_and_inputs_that_are_missing(long, unchecked):
    backbone, splice, _ = long
    for name, settings, changes, words in MISSING:
        with pytest.raises(InputError, match=words):
            METHODS[name](backbone, splice.replace(**changes), PLENTY if name in KEEPING else 0.5, **settings)
    unknown = splice.replace(others=(splice.others[0], OtherAntecedent(splice.others[1].kv)))
    with pytest.raises(InputError, match=r"others\[1\].embedding: got None"):
        METHODS["anchored"](backbone, unknown, PLENTY)


@one_layout
def test_prompts_and_orders_that_cannot_be(prompt, spliced, backbone):
    tokens = text_tokens(backbone, np.arange(1, 9)[None])
    with pytest.raises(InputError, match="expected at least one cached chunk"):
        splice_prompt(backbone, [PromptPiece(tokens)])
    with pytest.raises(InputError, match="expected 0"):
        METHODS["two_step_reuse"](prompt[0], prompt[1], THREE)
    with pytest.raises(InputError, match="at least two"):
        reordered_by_question(backbone, spliced[0])


def test_schedules_that_cannot_be(backbone, spliced, unchecked):
    for sensitivity, ratios, target, words in (
        (np.ones((4, 2)), [0.1, 0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [0.1, 0.2], 0.3, r"at least 0\.4"),
        (np.full((2, 2), np.nan), [0.1, 0.3], 1.0, "expected finite"),
    ):
        with pytest.raises(InputError, match=words):
            best_schedule(sensitivity, ratios, target)
    for shares in ((0.5, 0.2), (0.1, 0.2, 0.1, 0.1), (1.1, 0.2, 0.1, 0.1)):
        with pytest.raises(InputError, match="expected 4 shares, none larger"):
            METHODS["vlcache"](backbone, spliced[0], 0.2, schedules={0.2: shares})
    with pytest.raises(InputError, match=r"expected a share of \[0\.2\]"):
        METHODS["vlcache"](backbone, spliced[0], 0.3, schedules={0.2: (0.2,) * LAYERS})
    with pytest.raises(InputError, match="got none"):
        recomputed_sensitivity(backbone, [], [0.1], lambda *_: 0.0)
    with pytest.raises(InputError, match=r"got \[1\.5\]"):
        recomputed_sensitivity(backbone, [spliced[0]], [1.5], lambda *_: 0.0)
