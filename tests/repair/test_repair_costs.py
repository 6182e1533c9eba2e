"""A repair costs what it computed, kept and moved; `patch` is `form_patch` and `apply_patch` bit for bit."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.core import Tracer

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import ByteBudget
from kvpatch_jax.repair import METHODS, RepairBudget, RepairBytes, canonical_of, reprefill_flops
from tests.repair.splices import (
    BEFORE,
    CHUNK,
    LAYERS,
    LONG,
    PIECES,
    ROWS,
    canonical_chunk,
    error,
    in_chunk,
    make_prompt,
)
from tests.shared.arrays import placed

FEATURES, WIDTH = 32, 64
TOKEN = 2 * 2 * FEATURES
"""Bytes of a token's keys and values at one layer, in 16 bits."""
INPUT = 2 * WIDTH
NUMBERS = LAYERS * LONG * 2 * FEATURES
TURNING, EVERYTHING = 3 * NUMBERS // 2, 2 * NUMBERS
"""Of the long chunk: two products and a sum for each number of its keys; and its bytes."""


@pytest.fixture(scope="module")
def backbone(backbone) -> Any:
    """Forwards of a traced splice are counted, without padding; others run nothing, for costs depend on no number."""

    def counted(run, tokens, *operands, **options):
        trace = functools.partial(run, tokens, *operands, **options)
        if isinstance(tokens.embeddings, Tracer):
            return trace()
        return jax.tree.map(lambda leaf: placed(np.zeros(leaf.shape, leaf.dtype)), jax.eval_shape(trace))

    unrun = backbone.with_buckets(None)
    for name in ("prefill", "recompute", "attention"):
        setattr(unrun, name, functools.partial(counted, getattr(unrun, name)))
    return unrun


def test_recomputed_tokens_cost_their_share_of_a_reprefill(backbone, spliced):
    splice, _ = spliced
    call = lambda name, budget, **settings: METHODS[name](backbone, splice, budget, **settings)
    placing = call("blind", 0.0).flops
    everything = reprefill_flops(backbone, splice)
    assert placing == 3 * CHUNK * LAYERS * FEATURES
    assert everything == call("prefix_caching", 1.0).flops
    costs, keys = backbone.forward_costs, splice.cache["k"].shape[2]
    expected = CHUNK * sum(costs.token[layer] + costs.pair[layer] * keys for layer in range(LAYERS))
    assert everything == pytest.approx(expected, rel=1e-6)
    assert call("first_k", 4 / CHUNK).flops == everything * 4 / CHUNK + placing
    schedules = {0.5: (1.0, 0.5, 0.5, 0.0)}
    assert call("vlcache", 0.5, schedules=schedules).flops == pytest.approx(everything / 2 + placing)
    layers = call("layer_reprefill", 0.25)
    assert layers.flops == pytest.approx(everything / 4 + placing)
    lower = 3 * TOKEN * CHUNK
    assert layers.bytes == RepairBytes(canonical=lower, inputs=INPUT * CHUNK, moved=lower + INPUT * CHUNK)
    full, encoded = (call(name, 1.0) for name in ("full_reprefill", "encoder_cached_reprefill"))
    assert full.flops == encoded.flops
    assert full.flops == pytest.approx(everything * (BEFORE + CHUNK) / CHUNK)
    assert full.bytes == RepairBytes()
    assert encoded.bytes == RepairBytes(inputs=INPUT * (BEFORE + CHUNK), moved=INPUT * (BEFORE + CHUNK))


def test_bytes_are_of_what_is_read_and_kept(backbone, spliced):
    splice, _ = spliced
    call = lambda name, budget: jax.eval_shape(lambda own: METHODS[name](backbone, own, budget), splice).bytes
    canonical, three = TOKEN * CHUNK * LAYERS, RepairBudget(tokens=3)
    read = TOKEN * (CHUNK - 3) * LAYERS
    assert call("blind", 0.0) == RepairBytes(canonical=canonical, moved=canonical)
    assert call("first_k", three) == RepairBytes(canonical=canonical, inputs=3 * INPUT, moved=read + 3 * INPUT)
    # Any token may be chosen, so all inputs are kept; a question reads all keys before any is overwritten.
    chosen = RepairBytes(canonical=canonical, inputs=CHUNK * INPUT, moved=read + 3 * INPUT)
    assert call("oracle_delta", three) == chosen
    assert call("infoflow", three) == chosen._replace(moved=canonical + 3 * INPUT)
    # All tokens are run through two layers, at one of which what is overwritten was compared.
    moved = 2 * TOKEN * (CHUNK - 3) + TOKEN * CHUNK + CHUNK * INPUT
    assert call("cacheblend", three) == chosen._replace(moved=moved)
    assert call("kvshare", three) == chosen._replace(moved=moved)
    # Layers 1 and 2 check, the second of them what the first has left: five of the tokens.
    gradual = TOKEN * (CHUNK - 5 + CHUNK - 3) + TOKEN * (CHUNK + 5) + CHUNK * INPUT
    assert call("cacheblend_gradual", three) == chosen._replace(moved=gradual)


def test_stored_forms_cost_what_a_hand_counts(long):
    backbone, splice, _ = long
    if backbone.layout.kind == "mla":
        pytest.skip("counted for grouped queries")
    call = lambda name, **settings: METHODS[name](backbone, splice, 1.0, **settings)

    patch, factors = call("patch", rank=4), 2 * LAYERS * 2 * 4 * (LONG + FEATURES)
    assert patch.bytes == RepairBytes(canonical=EVERYTHING, stored=factors, moved=EVERYTHING + factors)
    assert patch.flops == TURNING + 2 * 4 * NUMBERS
    assert [patch.bytes.per_antecedent(count) for count in (1, 4)] == [EVERYTHING + factors, EVERYTHING / 4 + factors]
    # A full singular value decomposition of each layer's 40 × 32 keys and values, the lesser of two counts.
    by_svd = min(14 * 40 * 32**2 + 8 * 32**3, 6 * 40 * 32**2 + 20 * 32**3)
    assert patch.forming_flops == 2 * LAYERS * by_svd

    # In 4 bits: two codes a byte, and a scale of 16 bits for every 32 numbers of a direction.
    small = call("patch", rank=4, dtype="int4", encoding="k4v4g32")
    codes, scales = LAYERS * 2 * 4 * (LONG + FEATURES) // 2, LAYERS * 2 * 4 * 2 * (2 + 1)
    base = NUMBERS // 2 + LAYERS * 4 * (2 * FEATURES + LONG)  # a scale and a least value; keys have two groups
    assert small.bytes == RepairBytes(canonical=base, stored=codes + scales, moved=base + codes + scales)
    assert small.flops == TURNING + 2 * 4 * NUMBERS + 2 * NUMBERS

    few, stored = call("quantised", bits=3), 3 * NUMBERS // 8 + LAYERS * 2 * FEATURES * 4
    assert few.bytes == RepairBytes(stored=stored, moved=stored)
    assert few.flops == TURNING + 2 * NUMBERS
    assert call("quantised", bits=16).bytes == RepairBytes(stored=EVERYTHING, moved=EVERYTHING)

    # Factors; of ShadowKV also the values, the landmarks of five chunks of eight tokens, and one of these in full.
    low = 2 * LAYERS * 2 * 4 * (LONG + FEATURES)
    assert call("low_rank", rank=4).bytes == RepairBytes(stored=low, moved=low)
    shadow = EVERYTHING // 2 + low // 2 + 2 * LAYERS * FEATURES * (8 + 5)
    assert call("shadowkv", rank=4).bytes == RepairBytes(stored=shadow, moved=shadow)
    assert call("low_rank", rank=4).forming_flops == 2 * call("shadowkv", rank=4).forming_flops == patch.forming_flops


def test_two_step_reuse_costs_one_token_more_through_the_layers(backbone):
    splice, _, _ = make_prompt(backbone)
    flops = lambda name, *budget: METHODS[name](backbone, splice, *budget).flops
    token = (flops("mpic", RepairBudget(tokens=2)) - flops("blind")) / 4
    assert token > 0
    assert flops("two_step_reuse") - flops("blind") == token
    prefix = METHODS["prefix_caching"](backbone, splice)  # a prompt that begins with text has no cached prefix
    assert prefix.bytes == RepairBytes()
    assert prefix.token_layers.tolist() == [sum(map(abs, PIECES)) * backbone.layout.layers] * ROWS


def test_budgets_buy_the_papers_counts_of_tokens_and_bytes_are_shared_over_antecedents():
    paper = kvp.KVLayout.gqa(layers=28, kv_heads=4, head_dim=128, rope=kvp.Rope(theta=1e6, dim=128))
    for rank, count in ((16, 31), (64, 124), (10**6, 480)):
        assert RepairBudget(kv_bytes=2 * 28 * 2 * rank * (480 + 512)).count(paper, 480) == count
    assert [RepairBudget(share=share).count(paper, 480) for share in (0.0, 0.1, 0.15, 1.0)] == [0, 48, 72, 480]
    assert [RepairBudget(share=0.5).count(paper, tokens) for tokens in (3, 5, 6)] == [2, 3, 3]  # halves go up
    bytes = RepairBytes(canonical=100, stored=7, inputs=20, moved=999, shared=40)
    assert [bytes.per_antecedent(number) for number in (1, 4, 16)] == [167.0, 47.0, 17.0]
    with pytest.raises(InputError, match="got 0; expected at least 1"):
        bytes.per_antecedent(0)


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 4},
        pytest.param({"rank": 30}, marks=pytest.mark.nightly),
        {"rank": 4, "dtype": "int4", "encoding": "k4v4g32"},
        {"rank": 4, "from_layer": 2},
    ],
)
def test_a_patch_is_form_patch_and_apply_patch_bit_for_bit(long, settings):
    (backbone, splice, _), dtype = long, settings.get("dtype")
    layers = range(settings.get("from_layer", 0), backbone.layout.layers)
    chunk = canonical_chunk(backbone, splice)
    chunk = kvp.encode_chunk(chunk, settings["encoding"]) if "encoding" in settings else chunk
    options: Any = {"method": "exact", "dtype": dtype, "layers": layers if layers.start else None}
    patch = kvp.form_patch(chunk, splice.recorded, settings["rank"], ["legend"], **options)
    repaired = METHODS["patch"](backbone, splice, 1.0, **settings)
    for name, value in kvp.apply_patch(chunk, patch, BEFORE, ["legend"]).items():
        np.testing.assert_array_equal(in_chunk(repaired.cache, LONG)[name], value)
    # Float32 counts as it is served, in 16 bits.
    assert repaired.bytes.stored == patch.nbytes / ROWS / (2 if dtype is None else 1)


@pytest.mark.parametrize("base", ["canonical", "mean", "others"])
def test_a_budget_in_bytes_is_a_byte_budget_of_each_row(long, base):
    backbone, splice, _ = long
    repaired = METHODS["patch"](backbone, splice, RepairBudget(kv_bytes=2500), base=base)
    for row in range(ROWS):
        chunk = canonical_chunk(backbone, splice, row)
        conditioned = {name: value[:, row] for name, value in splice.recorded.items()}
        if base != "canonical":
            versions = [{name: value[:, row] for name, value in other.kv.items()} for other in splice.others]
            versions = [conditioned, *versions] if base == "mean" else versions
            chunk = kvp.mean_base(chunk, versions, [[str(place)] for place in range(len(versions))])
        patch = kvp.form_patch(chunk, conditioned, ByteBudget(2500), ["legend"])
        assert patch.nbytes <= 2500
        for name, value in kvp.apply_patch(chunk, patch, BEFORE, ["legend"]).items():
            assert error(in_chunk(repaired.cache, LONG)[name][:, row], value) <= 1e-5
        assert repaired.estimate is not None
        assert repaired.estimate[row] == pytest.approx(patch.predicted, rel=1e-4)
    assert 1500 <= repaired.bytes.stored <= 2500
    assert (repaired.bytes.canonical > 0) == (base == "canonical")
    assert (repaired.bytes.shared > 0) == (base != "canonical")


def test_rank_0_is_the_base_alone_and_channels_are_patched_separately(long):
    backbone, splice, _ = long
    blind = METHODS["blind"](backbone, splice)
    first, second = backbone.layout.names
    both = METHODS["patch"](backbone, splice, 1.0, rank=4)
    single = METHODS["patch"](backbone, splice, 1.0, rank=4, channels=first)
    np.testing.assert_array_equal(single.cache[first], both.cache[first])
    assert error(single.cache[second], blind.cache[second]) <= 1e-5
    for alone in (
        METHODS["patch"](backbone, splice, 1.0, rank=0),
        METHODS["patch"](backbone, splice, RepairBudget(kv_bytes=0)),
    ):
        for name, value in blind.cache.items():
            assert error(alone.cache[name], value) <= 1e-5
        assert (alone.bytes, alone.flops) == (blind.bytes, blind.flops)


def test_rows_of_other_lengths_and_starts_are_chunks_of_their_own(long):
    backbone, splice, _ = long
    whole = METHODS["patch"](backbone, splice, 1.0, rank=4)
    short = splice.replace(length=np.array([LONG - 9, LONG]))
    repaired = METHODS["patch"](backbone, short, 1.0, rank=4)
    for name, value in whole.cache.items():
        assert error(np.asarray(repaired.cache[name])[:, 1], np.asarray(value)[:, 1]) <= 1e-4
    # The first row's patch is of its live tokens alone.
    alone = canonical_chunk(backbone, splice, 0)
    alone = kvp.Chunk(alone.kv, alone.local, LONG, LONG - 9, "page", backbone.layout, backbone.fingerprint)
    conditioned = {name: value[:, 0] for name, value in splice.recorded.items()}
    patch = kvp.form_patch(alone, conditioned, 4, ["legend"], method="exact")
    for name, value in kvp.apply_patch(alone, patch, BEFORE, ["legend"]).items():
        assert error(in_chunk(repaired.cache, LONG)[name][:, 0, : LONG - 9], value[:, : LONG - 9]) <= 1e-5

    moved = splice.tokens._replace(positions=splice.tokens.positions + 5)
    canonical = canonical_of(backbone.layout, splice)
    elsewhere = METHODS["patch"](backbone, splice.replace(tokens=moved, canonical=canonical), 1.0, rank=4)
    expected = kvp.to_phase_free(backbone.layout, in_chunk(whole.cache, LONG), splice.tokens.positions)
    for name, value in kvp.to_phase_free(backbone.layout, in_chunk(elsewhere.cache, LONG), moved.positions).items():
        assert error(value, expected[name]) <= 1e-4


def test_the_papers_order_adds_the_best_directions_of_the_rotated_deficit(long):
    backbone, splice, _ = long
    if backbone.layout.kind == "mla":
        pytest.skip("one layout says it")
    low, other = (
        in_chunk(METHODS["patch"](backbone, splice, 1.0, rank=4, frame=frame).cache, LONG)
        for frame in ("engine", "phase_free")
    )
    np.testing.assert_allclose(low["v"], other["v"], atol=2e-5)
    assert np.abs(low["k"] - other["k"]).max() > 1e-3
    sources = canonical_of(backbone.layout, splice), splice.recorded
    turned = [kvp.to_engine(backbone.layout, kv, splice.tokens.positions, 0)["k"] for kv in sources]
    base, exact = (np.asarray(keys, np.float64)[0, 0].reshape(LONG, -1) for keys in turned)
    u, s, v = np.linalg.svd(exact - base, full_matrices=False)
    np.testing.assert_allclose(low["k"][0, 0].reshape(LONG, -1), base + (u[:, :4] * s[:4]) @ v[:4], atol=2e-4)
