"""The token repairs on a tiny random backbone: what is recomputed equals a prefill, and the rest is not touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Backbone
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from kvpatch_jax.repair import METHODS, RepairBudget
from kvpatch_jax.repair.methods import cacheblend, first_k, oracle_delta, vlcache
from kvpatch_jax.repair.spliced_cache import deviation
from tests.repair.splices import (
    BEFORE,
    CHUNK,
    LAYERS,
    ROWS,
    SPARE,
    TOKEN_METHODS,
    changed,
    error,
    in_chunk,
    make_splice,
)
from tests.shared.compilations import compilations

COUNTS = (RepairBudget(tokens=2), RepairBudget(tokens=5))
TWO, THREE, FIVE = RepairBudget(tokens=2), RepairBudget(tokens=3), RepairBudget(tokens=5)


QUICK = ("cacheblend_gradual",)
SLOWER = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in TOKEN_METHODS]


@pytest.mark.parametrize("name", SLOWER)
def test_all_tokens_equal_a_prefill_in_context(backbone, spliced, name):
    splice, expected = spliced
    repaired = METHODS[name](backbone, splice, 1.0)
    for channel, value in expected.items():
        assert error(repaired.cache[channel], value) <= 1e-5
        assert error(splice.cache[channel], value) > 1e-2  # blind reuse was wrong, so there was something to mend
    assert bool(repaired.chosen.all())
    assert repaired.token_layers.tolist() == [LAYERS * CHUNK] * ROWS


@pytest.mark.parametrize("name", ["cacheblend", "vlcache", "infoflow", "oracle_delta"])
def test_no_tokens_leave_the_cache_bit_equal(backbone, spliced, name):
    splice, _ = spliced
    repaired = METHODS[name](backbone, splice, 0.0)
    for channel, value in splice.cache.items():
        assert np.asarray(repaired.cache[channel]).tobytes() == np.asarray(value).tobytes()
    assert not repaired.chosen.any()
    assert repaired.flops == METHODS["blind"](backbone, splice, 0.0).flops


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("name", ["cacheblend", "oracle_delta", pytest.param("quest", marks=pytest.mark.nightly)])
def test_what_is_not_chosen_is_not_touched_and_sets_are_nested(backbone, spliced, name, count):
    splice, _ = spliced
    repaired = METHODS[name](backbone, splice, RepairBudget(tokens=count))
    chosen = np.asarray(repaired.chosen)
    assert not (chosen[1:] & ~chosen[:-1]).any()
    assert (chosen[-1].sum(-1) == count).all()
    for channel, value in splice.cache.items():
        outside = np.ones(value.shape[2], bool)
        outside[BEFORE : BEFORE + CHUNK] = False
        assert np.array_equal(np.asarray(repaired.cache[channel])[:, :, outside], np.asarray(value)[:, :, outside])
    differs = changed(repaired.cache, splice.cache)
    assert not (differs & ~chosen).any()
    assert (differs | ~chosen)[1:].all()  # layer 0 does not depend on the antecedent


@pytest.mark.parametrize("name", ["oracle_delta", "quest", pytest.param("infoflow", marks=pytest.mark.nightly)])
def test_the_truth_is_read_by_the_oracle_alone(backbone, spliced, name):
    splice, _ = spliced
    without = splice.replace(recorded=None, hidden=None, front=None)
    if name == "oracle_delta":
        with pytest.raises(InputError, match="recorded"):
            oracle_delta(backbone, without, TWO)
        return
    found, expected = (METHODS[name](backbone, own, TWO) for own in (without, splice))
    for channel, value in expected.cache.items():
        np.testing.assert_array_equal(found.cache[channel], value)


def test_first_k_takes_the_first(backbone, spliced):
    chosen = np.asarray(first_k(backbone, spliced[0], THREE).chosen)
    assert chosen[..., :3].all()
    assert not chosen[..., 3:].any()


def test_oracle_takes_the_largest_deficits(backbone, spliced):
    splice, expected = spliced
    blind, true = in_chunk(splice.cache), in_chunk(expected)
    score = np.zeros((ROWS, CHUNK))
    for name, value in true.items():
        norm = np.sqrt(np.square(value - blind[name], dtype=np.float64).sum((-2, -1)))
        score += (norm / np.sqrt(np.square(value, dtype=np.float64).sum((-2, -1)).mean(-1, keepdims=True))).sum(0)
    for count in (2, 5):
        chosen = np.asarray(oracle_delta(backbone, splice, RepairBudget(tokens=count)).chosen)
        for row in range(ROWS):
            assert set(np.flatnonzero(chosen[0, row])) == set(np.argsort(-score[row])[:count])


@pytest.mark.nightly
def test_vlcache_equals_first_k_of_like_counts_and_leaves_the_rest(backbone, spliced):
    splice, _ = spliced
    like = vlcache(backbone, splice, 5 / CHUNK)
    for channel, value in first_k(backbone, splice, FIVE).cache.items():
        np.testing.assert_allclose(like.cache[channel], value, atol=1e-6)

    counts = (5, 5, 2, 0)
    repaired = vlcache(backbone, splice, 0.5, schedules={0.5: [count / CHUNK for count in counts]})
    chosen = np.asarray(repaired.chosen)
    assert repaired.token_layers.tolist() == [sum(counts)] * ROWS
    assert chosen[..., 0, :].sum(-1).tolist() == list(counts)
    differs = changed(repaired.cache, splice.cache)
    assert (differs[1:] == chosen[1:]).all()  # layer 0 does not depend on the antecedent
    for channel, value in in_chunk(repaired.cache).items():  # below the first smaller count nothing tells them apart
        np.testing.assert_allclose(value[:2], in_chunk(like.cache)[channel][:2], atol=1e-6)


@pytest.mark.nightly
def test_dropping_tokens_below_a_layer_changes_no_number(backbone, spliced):
    """What is really not run equals a pass of all tokens in which it is not written."""
    splice, _ = spliced
    schedules = {0.5: (0.8, 0.5, 0.5, 0.2)}
    for name, budget, settings in (("vlcache", 0.5, {"schedules": schedules}), ("cacheblend_gradual", THREE, {})):
        repaired = METHODS[name](backbone, splice, budget, **settings)
        once = backbone.recompute(splice.tokens, splice.cache, splice.slots, keep=repaired.chosen).cache
        for channel, value in once.items():
            assert error(repaired.cache[channel], value) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("check_layer", [1, 2])
def test_cacheblend_keeps_the_largest_deviation_at_the_check_layer(backbone, spliced, check_layer):
    # With every token recomputed below, the fresh KV at the check layer is that of a prefill in context.
    splice, expected = spliced
    chosen = np.asarray(cacheblend(backbone, splice, THREE, check_layer=check_layer).chosen)
    assert chosen[: check_layer + 1].all()
    one_layer = lambda cache: {name: value[[check_layer]] for name, value in in_chunk(cache).items()}
    score = deviation(one_layer(expected), one_layer(splice.cache), jnp.ones((ROWS, CHUNK), bool))
    for row in range(ROWS):
        for layer in range(check_layer + 1, LAYERS):
            assert set(np.flatnonzero(chosen[layer, row])) == set(np.argsort(-np.asarray(score[row]))[:3])


@pytest.mark.parametrize("name", ["cacheblend", pytest.param("cacheblend_gradual", marks=pytest.mark.nightly)])
def test_cacheblend_finds_the_token_that_was_spoilt(backbone, spliced, name):
    splice, _ = spliced
    spoilt = {name: value.at[1:, :, BEFORE + 6].add(100.0) for name, value in splice.cache.items()}
    chosen = np.asarray(METHODS[name](backbone, splice.replace(cache=spoilt), TWO).chosen)
    assert chosen[:, :, 6].all()


@pytest.mark.parametrize("name", ["vlcache", "quest", pytest.param("cacheblend", marks=pytest.mark.nightly)])
def test_padding_is_never_recomputed(backbone, spliced, name):
    splice, _ = spliced
    splice = splice.replace(length=jnp.asarray([3, CHUNK]))
    repaired = METHODS[name](backbone, splice, FIVE)
    chosen = np.asarray(repaired.chosen)
    assert not chosen[:, 0, 3:].any()
    assert chosen[-1].sum(-1).tolist() == [3, 5]
    assert not changed(repaired.cache, splice.cache)[:, 0, 3:].any()


def test_another_chunk_and_place_compile_nothing(backbone, spliced):
    splice, _ = spliced
    for name in TOKEN_METHODS:
        METHODS[name](backbone, splice, TWO)
    other, _ = make_splice(backbone, seed=1)
    assert other.question is not None
    moved = other.replace(
        tokens=other.tokens._replace(positions=other.tokens.positions + 500),
        slots=other.slots + SPARE,
        question=other.question._replace(positions=other.question.positions + 500),
    )
    with compilations() as again:
        for name in TOKEN_METHODS:
            METHODS[name](backbone, moved, TWO)
    assert not again


@pytest.mark.nightly
def test_repairs_are_jittable(backbone, spliced):
    splice, _ = spliced
    eager = [METHODS[name](backbone, splice, TWO) for name in TOKEN_METHODS]
    compiled = jax.jit(lambda splice: [METHODS[name](backbone, splice, TWO) for name in TOKEN_METHODS])
    for found, expected in zip(compiled(splice), eager, strict=True):
        assert np.array_equal(found.chosen, expected.chosen)
        for name in expected.cache:
            assert error(found.cache[name], expected.cache[name]) <= 1e-5
        with pytest.raises(InputError, match="inside a trace"):
            _ = found.flops
    assert isinstance(backbone, Backbone)


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_budgets_out_of_range(backbone, spliced, name, unchecked):
    with pytest.raises(InputError, match=f"got {CHUNK + 1} tokens; expected 0 to the {CHUNK}"):
        METHODS[name](backbone, spliced[0], RepairBudget(tokens=CHUNK + 1))
    with pytest.raises(InputError, match="got 3; expected a RepairBudget, or a float"):
        METHODS[name](backbone, spliced[0], 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "got nothing; expected one of"),
        ({"share": 0.5, "tokens": 2}, "expected one of"),
        ({"share": 1.5}, "got 1.5; expected 0 to 1"),
        ({"share": float("nan")}, "got nan"),
        ({"tokens": -1}, "got -1"),
        ({"tokens": True}, "got True"),
        ({"kv_bytes": 2.5}, "got 2.5"),
    ],
)
def test_budgets_that_cannot_be(settings, words, unchecked):
    with pytest.raises(InputError, match=words):
        RepairBudget(**settings)


@pytest.mark.parametrize("shares", [(0.5, 0.2), (0.1, 0.2, 0.1, 0.1), (1.1, 0.2, 0.1, 0.1), (0.1, 0.1, 0.1, -0.2)])
def test_schedules_that_layers_cannot_follow_are_refused(backbone, spliced, shares):
    with pytest.raises(InputError, match="expected 4 shares, none larger"):
        vlcache(backbone, spliced[0], 0.2, schedules={0.2: shares})


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (InputError, "got 18; expected 0 to 17", lambda splice: {"slots": splice.slots + SPARE + 1}),
        (ShapeError, "embeddings", lambda splice: {"tokens": splice.tokens.take(0, 5)}),
        (ShapeError, "seen", lambda splice: {"seen": jnp.ones((ROWS, 3), bool)}),
        (ShapeError, "seen: got float32", lambda splice: {"seen": jnp.zeros(splice.seen.shape)}),
        (ShapeError, "length", lambda splice: {"length": jnp.ones((ROWS + 1,), jnp.int32)}),
        (ShapeError, "recorded", lambda splice: {"recorded": {n: kv[:, :, :2] for n, kv in splice.recorded.items()}}),
        (LayoutError, "repair: cache", lambda splice: {"cache": {"k": splice.cache["k"]}}),
        *[
            (InputError, r"repair\.chunks", lambda splice, chunks=chunks: {"chunks": chunks})
            for chunks in (((0, CHUNK + 1),), ((3, 2),), ((0, 0),), ((0, 4), (3, 5)), ())
        ],
    ],
)
def test_splices_that_do_not_fit(backbone, spliced, unchecked, error, words, changes):
    splice, _ = spliced
    with pytest.raises(error, match=words):
        first_k(backbone, splice.replace(**changes(splice)), TWO)


@pytest.mark.parametrize("name", ["infoflow", "prophetkv", "quest"])
def test_settings_and_inputs_that_are_missing(backbone, spliced, name):
    with pytest.raises(InputError, match="check_layer: got 4; expected 0 to 3"):
        cacheblend(backbone, spliced[0], TWO, check_layer=LAYERS)
    with pytest.raises(InputError, match="question: got None"):
        METHODS[name](backbone, spliced[0].replace(question=None), TWO)


def test_equal_bytes_buy_the_papers_counts_of_tokens():
    paper = kvp.KVLayout.gqa(layers=28, kv_heads=4, head_dim=128, rope=kvp.Rope(theta=1e6, dim=128))
    for rank, count in ((16, 31), (64, 124), (10**6, 480)):
        assert RepairBudget(kv_bytes=2 * 28 * 2 * rank * (480 + 512)).count(paper, 480) == count
    assert [RepairBudget(share=share).count(paper, 480) for share in (0.0, 0.1, 0.15, 1.0)] == [0, 48, 72, 480]
