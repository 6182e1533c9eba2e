"""The token repairs on a tiny random backbone: what is recomputed equals a prefill, and the rest is not touched."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Backbone
from kvpatch_jax.errors import InputError, LayoutError, RankError, ShapeError
from kvpatch_jax.repair import (
    REPAIRS,
    SplicedCache,
    cacheblend,
    check_by_layer,
    count_of_equal_bytes,
    deviation,
    first_k,
    fraction_to_count,
    layer_counts,
    layer_sensitivity,
    oracle_delta,
    vlcache,
)
from models import ModelBackbone
from models.families.family import parameters
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.qwen_images import ImageConfig
from tests.compilations import compilations

CONFIG = Path(__file__).parents[2] / "goldens" / "qwen2_5_vl" / "config.json"
LAYERS, ROWS, BEFORE, CHUNK, SPARE = 4, 2, 7, 8, 3
COUNTS = (2, 5)


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    config = Qwen25VLConfig.from_dict(json.loads(CONFIG.read_text()), "exact")
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, layers=LAYERS))
    model = config.family.module(config, nnx.Rngs(0))
    return ModelBackbone(config, parameters(model), ImageConfig())


def make_splice(backbone: ModelBackbone, seed: int = 0) -> tuple[SplicedCache, dict[str, np.ndarray]]:
    """An antecedent, a chunk spliced blind behind it, spare slots; and the cache that a prefill in context gives."""
    ids = np.random.default_rng(seed).integers(0, 300, (ROWS, BEFORE + CHUNK))
    places = np.broadcast_to(np.arange(BEFORE + CHUNK)[None, :, None], (*ids.shape, 3)).copy()
    tokens = backbone.embed(ids, places)
    whole = backbone.prefill(tokens).kv
    chunk = tokens.take(BEFORE, BEFORE + CHUNK)
    alone = backbone.prefill(chunk._replace(positions=chunk.positions - BEFORE)).kv
    true = kvp.to_engine(backbone.layout, whole, tokens.positions, 0)
    blind = kvp.to_engine(backbone.layout, alone, chunk.positions, 0)
    room = ((0, 0), (0, 0), (0, SPARE), (0, 0), (0, 0))
    cache = {name: jnp.pad(jnp.concatenate([true[name][:, :, :BEFORE], blind[name]], 2), room) for name in true}
    slots = np.broadcast_to(np.arange(BEFORE, BEFORE + CHUNK), (ROWS, CHUNK))
    conditioned = {name: value[:, :, BEFORE:] for name, value in whole.items()}
    expected = {name: np.pad(value, room) for name, value in true.items()}
    return SplicedCache(chunk, cache, jnp.asarray(slots), conditioned=conditioned), expected


@pytest.fixture(scope="module")
def spliced(backbone: ModelBackbone) -> tuple[SplicedCache, dict[str, np.ndarray]]:
    with jax.default_matmul_precision("highest"):
        return make_splice(backbone)


def error(found, expected) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def in_chunk(cache) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:, :, BEFORE : BEFORE + CHUNK] for name, value in cache.items()}


def changed(found, before) -> np.ndarray:
    """[L,B,T]: where any channel of the chunk differs."""
    found, before = in_chunk(found), in_chunk(before)
    return np.any([(found[name] != before[name]).any((-2, -1)) for name in found], axis=0)


@pytest.mark.parametrize(
    "name", [name if name == "cacheblend" else pytest.param(name, marks=pytest.mark.slow) for name in REPAIRS]
)
def test_all_tokens_equal_a_prefill_in_context(backbone, spliced, name):
    splice, expected = spliced
    repaired = REPAIRS[name](backbone, splice, CHUNK)
    for channel, value in expected.items():
        assert error(repaired.cache[channel], value) <= 1e-5
        assert error(splice.cache[channel], value) > 1e-2  # blind reuse was wrong, so there was something to mend
    assert bool(repaired.chosen.all())
    assert repaired.token_layers.tolist() == [LAYERS * CHUNK] * ROWS


@pytest.mark.parametrize("name", REPAIRS)
def test_no_tokens_leave_the_cache_bit_equal(backbone, spliced, name):
    splice, _ = spliced
    repaired = REPAIRS[name](backbone, splice, 0)
    for channel, value in splice.cache.items():
        assert np.asarray(repaired.cache[channel]).tobytes() == np.asarray(value).tobytes()
    assert not repaired.chosen.any()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", REPAIRS)
def test_what_is_not_chosen_is_not_touched_and_sets_are_nested(backbone, spliced, name, count):
    splice, _ = spliced
    repaired = REPAIRS[name](backbone, splice, count)
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


def test_first_k_takes_the_first(backbone, spliced):
    chosen = np.asarray(first_k(backbone, spliced[0], 3).chosen)
    assert chosen[..., :3].all()
    assert not chosen[..., 3:].any()


def test_oracle_takes_the_largest_deficits(backbone, spliced):
    splice, expected = spliced
    blind, true = in_chunk(splice.cache), in_chunk(expected)
    score = np.zeros((ROWS, CHUNK))
    for name, value in true.items():
        norm = np.sqrt(np.square(value - blind[name], dtype=np.float64).sum((-2, -1)))
        score += (norm / np.sqrt(np.square(value, dtype=np.float64).sum((-2, -1)).mean(-1, keepdims=True))).sum(0)
    for count in COUNTS:
        chosen = np.asarray(oracle_delta(backbone, splice, count).chosen)
        for row in range(ROWS):
            assert set(np.flatnonzero(chosen[0, row])) == set(np.argsort(-score[row])[:count])


def test_vlcache_equals_first_k_of_like_counts_and_leaves_the_rest(backbone, spliced):
    splice, _ = spliced
    like = vlcache(backbone, splice, [5] * LAYERS)
    for channel, value in first_k(backbone, splice, 5).cache.items():
        np.testing.assert_allclose(like.cache[channel], value, atol=1e-6)

    counts = (5, 5, 2, 0)
    repaired = vlcache(backbone, splice, counts)
    chosen = np.asarray(repaired.chosen)
    assert repaired.token_layers.tolist() == [sum(counts)] * ROWS
    assert chosen[..., 0, :].sum(-1).tolist() == list(counts)
    differs = changed(repaired.cache, splice.cache)
    assert (differs[1:] == chosen[1:]).all()  # layer 0 does not depend on the antecedent
    for channel, value in in_chunk(repaired.cache).items():  # below the first smaller count nothing tells them apart
        np.testing.assert_allclose(value[:2], in_chunk(like.cache)[channel][:2], atol=1e-6)


def test_vlcache_takes_what_layers_need(backbone, spliced):
    splice, expected = spliced
    far = lambda cache: float(sum(np.abs(in_chunk(cache)[name] - in_chunk(expected)[name]).sum() for name in expected))
    lost = layer_sensitivity(backbone.layout, splice, (0, 3, CHUNK), far)
    assert np.allclose(lost[:, 0], far(splice.cache))
    assert (lost[1:, 0] > lost[1:, 1]).all()
    assert (lost[1:, 1] > lost[1:, 2]).all()

    rng = np.random.default_rng(0)
    counts, budget = (0, 1, 2, 4), 9
    for _ in range(20):
        own = rng.random((5, 4))
        found = layer_counts(own, counts, budget)
        score = lambda taken, own=own: sum(own[layer, counts.index(count)] for layer, count in enumerate(taken))
        allowed = [
            taken
            for taken in itertools.product(counts, repeat=5)
            if sum(taken) <= budget and list(taken) == sorted(taken, reverse=True)
        ]
        assert score(found) == min(map(score, allowed))
        # Tokens that harm are taken all the same where the budget is to be spent.
        harms = np.cumsum(own, axis=1)
        spent = layer_counts(harms, counts, budget, spend=True)
        harm = lambda taken, harms=harms: sum(harms[at, counts.index(count)] for at, count in enumerate(taken))
        assert harm(spent) == pytest.approx(min(harm(taken) for taken in allowed if sum(taken) > budget - 2))
    assert layer_counts(np.zeros((3, 2)), (2, 50), 8) == (2, 2, 2)
    assert layer_counts(np.ones((3, 2)) * [1, 2], (2, 50), 150, spend=True) == (50, 50, 50)


def test_sensitivity_by_blocks_is_of_caches_that_vlcache_serves(backbone, spliced):
    splice, _ = spliced
    probe = np.random.default_rng(3).normal(size=next(iter(splice.cache.values())).shape)
    loss = lambda cache: float(sum((probe * np.asarray(value)).sum() for value in cache.values()))
    lost = layer_sensitivity(backbone.layout, splice, (0, 3, CHUNK), loss, blocks=2)
    assert lost.shape == (LAYERS // 2, 3)
    assert np.allclose(lost[:, 0], 0)
    for column, count in ((1, 3), (2, CHUNK)):
        # First tokens recomputed at the lower half, and then at all layers.
        half = loss(vlcache(backbone, splice, [count, count, 0, 0]).cache) - loss(splice.cache)
        whole = loss(vlcache(backbone, splice, [count] * LAYERS).cache) - loss(splice.cache)
        np.testing.assert_allclose([lost[0, column], lost[:, column].sum()], [half, whole], rtol=1e-3, atol=1e-3)


def test_vlcaches_own_grid_over_many_layers_is_shared_out():
    """VLCache's 150 ratios of 1 024 tokens, 36 layers: more states than a search one by one gets through."""
    counts = [2 * step for step in range(1, 151)]
    needs = -np.sqrt(counts) * np.linspace(2.0, 1.0, 36)[:, None]
    found, budget = layer_counts(needs, counts, 5530), 5530
    assert list(found) == sorted(found, reverse=True)
    assert budget - 2 < sum(found) <= budget
    gain = lambda layer, count: float(needs[layer, counts.index(count)])
    for lower in range(35):  # concave and separable: no two steps moved between layers are worth more
        more = gain(lower, found[lower]) + gain(lower + 1, found[lower + 1])
        assert more <= gain(lower, found[lower] + 2) + gain(lower + 1, found[lower + 1] - 2) + 1e-9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda backbone, splice: vlcache(backbone, splice, [1, 2, 2, 1]), "none larger than the one below"),
        (lambda backbone, splice: vlcache(backbone, splice, [1]), "expected 4"),
        (lambda backbone, splice: vlcache(backbone, splice, [1, 0, 0, -1]), "got -1"),
        (lambda backbone, splice: vlcache(backbone, splice, [CHUNK + 1, 0, 0, 0]), f"got {CHUNK + 1}"),
        (lambda *_: layer_counts(np.zeros((2, 2)), (3, 1), 9), "ascending"),
        (
            lambda backbone, splice: layer_sensitivity(backbone.layout, splice, (0, 1), lambda _: 0.0, blocks=3),
            "divisor of 4",
        ),
        (lambda *_: layer_counts(np.full((2, 2), np.nan), (1, 3), 9), "expected finite"),
        (lambda *_: layer_counts(np.zeros((2, 2)), (2, 3), 3), "at least 4"),
    ],
)
def test_counts_by_layer_that_cannot_be(backbone, spliced, call, words):
    with pytest.raises(InputError, match=words):
        call(backbone, spliced[0])


def test_oracle_needs_the_truth(backbone, spliced):
    with pytest.raises(InputError, match="conditioned"):
        oracle_delta(backbone, spliced[0]._replace(conditioned=None), 2)


def test_another_count_of_tokens_compiles_nothing(backbone, spliced):
    first_k(backbone, spliced[0], 2)
    with compilations() as compiled:
        first_k(backbone, spliced[0], 5)
    assert not compiled


@pytest.mark.parametrize("check_layer", [1, 2])
def test_cacheblend_keeps_the_largest_deviation_at_the_check_layer(backbone, spliced, check_layer):
    # With every token recomputed below, the fresh KV at the check layer is that of a prefill in context.
    splice, expected = spliced
    chosen = np.asarray(cacheblend(backbone, splice, 3, check_layer=check_layer).chosen)
    assert chosen[: check_layer + 1].all()
    one_layer = lambda cache: {name: value[[check_layer]] for name, value in in_chunk(cache).items()}
    score = deviation(one_layer(expected), one_layer(splice.cache), jnp.ones((ROWS, CHUNK), bool))
    for row in range(ROWS):
        for layer in range(check_layer + 1, LAYERS):
            assert set(np.flatnonzero(chosen[layer, row])) == set(np.argsort(-np.asarray(score[row]))[:3])


def test_cacheblend_equals_one_pass_over_nested_sets(backbone, spliced):
    splice, expected = spliced
    repaired = cacheblend(backbone, splice, 3)
    once = backbone.recompute(splice.tokens, splice.cache, splice.slots, keep=repaired.chosen).cache
    again = cacheblend(backbone, splice, 3, checked=check_by_layer(backbone, splice))
    np.testing.assert_array_equal(again.chosen, repaired.chosen)
    for name in once:
        assert error(repaired.cache[name], once[name]) <= 1e-5
        assert error(repaired.cache[name][:2], expected[name][:2]) <= 1e-5  # whole below: as in a prefill
        np.testing.assert_array_equal(again.cache[name], repaired.cache[name])


def test_cacheblend_finds_the_token_that_was_spoilt(backbone, spliced):
    splice, _ = spliced
    spoilt = {name: value.at[1, :, BEFORE + 6].add(100.0) for name, value in splice.cache.items()}
    chosen = np.asarray(cacheblend(backbone, splice._replace(cache=spoilt), 2).chosen)
    assert chosen[:, :, 6].all()


@pytest.mark.parametrize("name", REPAIRS)
def test_padding_is_never_recomputed(backbone, spliced, name):
    splice, _ = spliced
    length = np.array([3, CHUNK])
    splice = splice._replace(length=jnp.asarray(length))
    chosen = np.asarray(REPAIRS[name](backbone, splice, 5).chosen)
    assert not chosen[:, 0, 3:].any()
    assert chosen[-1].sum(-1).tolist() == [3, 5]
    repaired = REPAIRS[name](backbone, splice, 5)
    assert not changed(repaired.cache, splice.cache)[:, 0, 3:].any()


def test_a_mask_is_obeyed(backbone, spliced):
    """Tokens that may not look at the antecedent come out as they were spliced: blind."""
    splice, _ = spliced
    size = splice.cache["k"].shape[2]
    places = np.arange(size)
    mask = (places >= BEFORE) & (places <= np.asarray(splice.slots)[..., None])
    splice = splice._replace(mask=jnp.asarray(mask[:, None]))
    for name in REPAIRS:
        repaired = REPAIRS[name](backbone, splice, 5)
        for channel, value in splice.cache.items():
            assert error(repaired.cache[channel], value) <= 1e-5


def test_repairs_are_jittable_and_compile_nothing_for_another_chunk(backbone, spliced):
    splice, _ = spliced
    eager = [repair(backbone, splice, 2) for repair in REPAIRS.values()]
    other, _ = make_splice(backbone, seed=1)
    moved = other._replace(
        tokens=other.tokens._replace(positions=other.tokens.positions + 500), slots=other.slots + SPARE
    )
    with compilations() as again:
        for repair in REPAIRS.values():
            repair(backbone, moved, 2)
    assert not again
    compiled = jax.jit(lambda splice: [repair(backbone, splice, 2) for repair in REPAIRS.values()])
    for found, expected in zip(compiled(splice), eager, strict=True):
        assert np.array_equal(found.chosen, expected.chosen)
        for name in expected.cache:
            assert error(found.cache[name], expected.cache[name]) <= 1e-5
    assert isinstance(backbone, Backbone)


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize("count", [-1, CHUNK + 1])
def test_counts_out_of_range(backbone, spliced, name, count):
    with pytest.raises(InputError, match=f"got {count}; expected 0 to the chunk's {CHUNK}"):
        REPAIRS[name](backbone, spliced[0], count)


def test_splices_that_do_not_fit(backbone, spliced):
    splice, _ = spliced
    with pytest.raises(InputError, match="got 18; expected 0 to 17"):
        first_k(backbone, splice._replace(slots=splice.slots + SPARE + 1), 2)
    with pytest.raises(ShapeError, match="embeddings"):
        first_k(backbone, splice._replace(tokens=splice.tokens.take(0, 5)), 2)
    with pytest.raises(ShapeError, match="mask"):
        first_k(backbone, splice._replace(mask=jnp.ones((ROWS, 1, CHUNK, 3), bool)), 2)
    with pytest.raises(ShapeError, match="length"):
        first_k(backbone, splice._replace(length=jnp.ones((ROWS + 1,), jnp.int32)), 2)
    cut = {name: value[:, :, :2] for name, value in (splice.conditioned or {}).items()}
    with pytest.raises(ShapeError, match="conditioned"):
        first_k(backbone, splice._replace(conditioned=cut), 2)
    with pytest.raises(LayoutError, match="repair: cache"):
        first_k(backbone, splice._replace(cache={"k": splice.cache["k"]}), 2)
    with pytest.raises(InputError, match="check_layer: got 4; expected 0 to 3"):
        cacheblend(backbone, splice, 2, check_layer=LAYERS)


def test_equal_bytes_buy_the_papers_counts_of_tokens():
    paper = kvp.KVLayout.gqa(layers=28, kv_heads=4, head_dim=128, rope=kvp.Rope(theta=1e6, dim=128))
    assert count_of_equal_bytes(paper, 16, 480) == 31
    assert count_of_equal_bytes(paper, 64, 480) == 124
    assert count_of_equal_bytes(paper, {"k": 16, "v": 0}, 480) == 16  # 15.5: K alone is half the bytes
    assert count_of_equal_bytes(paper, 400, 480) == 480  # dense: never more than the chunk itself
    latent = kvp.KVLayout.mla(layers=4, rope=kvp.Rope(theta=1e4, dim=64))
    assert count_of_equal_bytes(latent, 64, 480) == round((64 * (480 + 512) + 480 * 64) / 576)
    with pytest.raises(RankError, match="rank: got 0"):
        count_of_equal_bytes(paper, 0, 480)
    with pytest.raises(LayoutError, match="ckv"):
        count_of_equal_bytes(paper, {"ckv": 3}, 480)
    assert [fraction_to_count(share, 480) for share in (0.0, 0.1, 0.15, 1.0)] == [0, 48, 72, 480]
    for share in (-0.1, 1.5):
        with pytest.raises(InputError, match="fraction"):
            fraction_to_count(share, 480)
