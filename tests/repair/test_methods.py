"""Every method has one signature, `patch` is what users call, and costs are those that a hand counts."""
# pyright: reportArgumentType=false

import inspect
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens, joined
from kvpatch_jax.core import transition_of
from kvpatch_jax.errors import InputError, LayoutError
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.patching import ByteBudget, fit_basis
from kvpatch_jax.repair import METHODS, RepairBudget, RepairBytes, Repaired, SplicedCache
from kvpatch_jax.repair.spliced_cache import canonical_of
from tests.goldens.load import write_checkpoint
from tests.repair.splices import (
    BEFORE,
    LAYERS,
    ROWS,
    error,
    make_prompt,
    make_splice,
    other_antecedents,
    text_tokens,
    tiny_backbone,
)

TOKENS, FEATURES, WIDTH = 40, 32, 64
NUMBERS = LAYERS * TOKENS * 2 * FEATURES
PROMPTS = ("mpic", "two_step_reuse")
HALF = ("first_k", "vlcache", "cacheblend", "cacheblend_gradual", "kvshare", "infoflow", "prophetkv", "quest", "prcr")
SETTINGS = {"patch": {"rank": 4}, "layer_reprefill": {"boundary": 1}, "quantised": {"bits": 3}, "anchored": {}}


def spliced(backbone: ModelBackbone) -> SplicedCache:
    splice, _ = make_splice(backbone, chunk=TOKENS)
    return splice.replace(others=other_antecedents(backbone, 2, chunk=TOKENS))


@pytest.fixture(scope="module", params=["gqa", "mla"])
def case(request) -> tuple[ModelBackbone, SplicedCache]:
    backbone = tiny_backbone(request.param)
    with jax.default_matmul_precision("highest"):
        return backbone, spliced(backbone)


def chunk_of(backbone: ModelBackbone, splice: SplicedCache) -> kvp.Chunk:
    local = np.asarray(splice.tokens.positions)[0] - BEFORE
    kv = canonical_of(backbone.layout, splice)
    return kvp.Chunk(kv, local, TOKENS, TOKENS, "page", backbone.layout, backbone.fingerprint)


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_another_kind_are_refused_by_name(case, name, unchecked):
    backbone, splice = case
    budget = RepairBudget(share=0.5)
    with pytest.raises(InputError, match=f"{name}: got option 'nonsense'; expected"):
        METHODS[name](backbone, splice, budget, nonsense=1)
    for parameter in inspect.signature(inspect.unwrap(METHODS[name])).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            for wrong in ([1], object(), b"x", True):
                with pytest.raises(InputError, match=rf"{name}\.{parameter.name}: got .*; expected"):
                    METHODS[name](backbone, splice, budget, **{parameter.name: wrong})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_the_signature(case, name):
    backbone, splice = case
    settings = SETTINGS.get(name, {})
    budget = 0.5 if name in (*HALF, "oracle_delta", "random_tokens") else 0.0 if name == "blind" else 1.0
    if name in PROMPTS:
        splice, _, _ = make_prompt(backbone)
        budget = RepairBudget(tokens=0)
    if name == "pooled":
        ranks = {channel.name: min(8, channel.features) for channel in backbone.layout.channels}
        settings = {"basis": fit_basis([(chunk_of(backbone, splice), splice.recorded)], ranks), "rank": 4}
    if name in ("anchored", "joint_pair"):
        budget = RepairBudget(kv_bytes=10**7)
    repaired = METHODS[name](backbone, splice, budget, **settings)
    assert isinstance(repaired, Repaired)
    assert {key: value.shape for key, value in repaired.cache.items()} == {
        key: value.shape for key, value in splice.cache.items()
    }
    assert all(np.isfinite(np.asarray(value)).all() for value in repaired.cache.values())
    assert repaired.flops >= 0
    assert min(repaired.bytes) >= 0
    if splice.chunks is None:
        # Slots of padding stay as they are.
        padded = METHODS[name](backbone, splice.replace(length=jnp.asarray([TOKENS - 9, TOKENS])), budget, **settings)
        behind = slice(BEFORE + TOKENS - 9, BEFORE + TOKENS)
        for key, value in padded.cache.items():
            np.testing.assert_array_equal(np.asarray(value)[:, 0, behind], splice.cache[key][:, 0, behind])


# ------------------------------------------------------------------------------------------------------- the patch


@pytest.mark.parametrize(
    ("settings", "encoding", "options"),
    [
        ({"rank": 1}, None, {}),
        ({"rank": 4}, None, {}),
        ({"rank": 30}, None, {}),
        ({"rank": 4, "dtype": "int8"}, None, {"dtype": "int8"}),
        ({"rank": 4, "dtype": "int4", "encoding": "k4v4g32"}, "k4v4g32", {"dtype": "int4"}),
        ({"rank": 4, "from_layer": 2}, None, {"layers": (2,)}),
    ],
)
def test_a_patch_is_form_patch_and_apply_patch_bit_for_bit(case, settings, encoding, options):
    backbone, splice = case
    if "layers" in options:
        options = {"layers": range(2, backbone.layout.layers)}
    chunk = chunk_of(backbone, splice)
    chunk = chunk if encoding is None else kvp.encode_chunk(chunk, encoding)
    rank = settings["rank"]
    patch = kvp.form_patch(chunk, splice.recorded, rank, ["legend"], method="exact", **options)
    expected = kvp.apply_patch(chunk, patch, BEFORE, ["legend"])
    # A larger rank first: the smaller one is then a part of it.
    METHODS["patch"](backbone, splice, 1.0, **{**settings, "rank": 8})
    repaired = METHODS["patch"](backbone, splice, 1.0, **settings)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(repaired.cache[name])[:, :, BEFORE : BEFORE + TOKENS], value)
    numbers = 2 if options.get("dtype") is None else 1
    if numbers == 1:
        assert repaired.bytes.stored == patch.nbytes / ROWS
    else:
        assert repaired.bytes.stored == patch.nbytes / ROWS / 2  # float32 counts as it is served, in 16 bits


@pytest.mark.parametrize("base", ["canonical", "mean", "others"])
def test_a_budget_in_bytes_is_a_byte_budget_of_each_row(case, base):
    backbone, splice = case
    repaired = METHODS["patch"](backbone, splice, RepairBudget(kv_bytes=2500), base=base)
    whole = chunk_of(backbone, splice)
    for row in range(ROWS):
        kv = {name: value[:, row] for name, value in whole.kv.items()}
        chunk = kvp.Chunk(kv, whole.local, TOKENS, TOKENS, "page", backbone.layout, backbone.fingerprint)
        conditioned = {name: value[:, row] for name, value in splice.recorded.items()}
        if base != "canonical":
            versions = [{name: value[:, row] for name, value in other.kv.items()} for other in splice.others]
            versions = [conditioned, *versions] if base == "mean" else versions
            chunk = kvp.mean_base(chunk, versions, [[str(place)] for place in range(len(versions))])
        patch = kvp.form_patch(chunk, conditioned, ByteBudget(2500), ["legend"])
        assert patch.nbytes <= 2500
        for name, value in kvp.apply_patch(chunk, patch, BEFORE, ["legend"]).items():
            found = np.asarray(repaired.cache[name])[:, row, BEFORE : BEFORE + TOKENS]
            assert error(found, value) <= 1e-5
    assert 1500 <= repaired.bytes.stored <= 2500
    assert (repaired.bytes.canonical > 0) == (base == "canonical")
    assert (repaired.bytes.shared > 0) == (base != "canonical")


def test_rank_0_is_the_base_alone_and_channels_are_patched_one_by_one(case):
    backbone, splice = case
    alone = METHODS["patch"](backbone, splice, 1.0, rank=0)
    blind = METHODS["blind"](backbone, splice, 0.0)
    for name, value in blind.cache.items():
        assert error(alone.cache[name], value) <= 1e-5
    assert alone.bytes == blind.bytes
    assert alone.flops == blind.flops
    first, second = backbone.layout.names
    one = METHODS["patch"](backbone, splice, 1.0, rank=4, channels=first)
    both = METHODS["patch"](backbone, splice, 1.0, rank=4)
    np.testing.assert_array_equal(one.cache[first], both.cache[first])
    assert error(one.cache[second], blind.cache[second]) <= 1e-5


def test_rows_of_other_lengths_and_starts_are_chunks_of_their_own(case):
    backbone, splice = case
    moved = splice.tokens._replace(positions=splice.tokens.positions + 5)
    whole = METHODS["patch"](backbone, splice, 1.0, rank=4)
    padded = splice.replace(length=jnp.asarray([TOKENS - 9, TOKENS]))
    repaired = METHODS["patch"](backbone, padded, 1.0, rank=4)
    for name, value in whole.cache.items():
        assert error(np.asarray(repaired.cache[name])[:, 1], np.asarray(value)[:, 1]) <= 1e-4
        behind = slice(BEFORE + TOKENS - 9, BEFORE + TOKENS)
        np.testing.assert_array_equal(np.asarray(repaired.cache[name])[:, 0, behind], splice.cache[name][:, 0, behind])
    canonical = canonical_of(backbone.layout, splice)
    elsewhere = METHODS["patch"](backbone, splice.replace(tokens=moved, canonical=canonical), 1.0, rank=4)
    served = lambda cache: {name: np.asarray(value)[:, :, BEFORE : BEFORE + TOKENS] for name, value in cache.items()}
    found = kvp.to_phase_free(backbone.layout, served(elsewhere.cache), moved.positions)
    for name, value in kvp.to_phase_free(backbone.layout, served(whole.cache), splice.tokens.positions).items():
        assert error(found[name], value) <= 1e-4


# ----------------------------------------------------------------------------------------------------------- costs


def test_costs_are_those_that_a_hand_counts():
    backbone = tiny_backbone()
    splice = spliced(backbone)
    turning = 3 * NUMBERS // 2  # two products and a sum for each number of the keys
    whole = 2 * NUMBERS

    patch = METHODS["patch"](backbone, splice, 1.0, rank=4)
    factors = 2 * LAYERS * 2 * 4 * (TOKENS + FEATURES)
    assert patch.bytes == RepairBytes(canonical=whole, stored=factors, moved=whole + factors)
    assert patch.flops == turning + 2 * 4 * NUMBERS
    assert [patch.bytes.per_antecedent(count) for count in (1, 4)] == [whole + factors, whole / 4 + factors]

    # In 4 bits: two codes a byte, and a scale of 16 bits for every 32 numbers of a direction.
    small = METHODS["patch"](backbone, splice, 1.0, rank=4, dtype="int4", encoding="k4v4g32")
    codes = LAYERS * 2 * 4 * (TOKENS + FEATURES) // 2
    scales = LAYERS * 2 * 4 * 2 * (2 + 1)
    base = NUMBERS // 2 + LAYERS * 4 * (2 * FEATURES + TOKENS)  # a scale and a least value; keys have two groups
    assert small.bytes == RepairBytes(canonical=base, stored=codes + scales, moved=base + codes + scales)
    assert small.flops == turning + 2 * 4 * NUMBERS + 2 * NUMBERS

    few = METHODS["quantised"](backbone, splice, 1.0, bits=3)
    stored = 3 * NUMBERS // 8 + LAYERS * 2 * FEATURES * 4
    assert few.bytes == RepairBytes(stored=stored, moved=stored)
    assert few.flops == turning + 2 * NUMBERS
    assert METHODS["quantised"](backbone, splice, 1.0, bits=16).bytes.stored == whole

    # CacheBlend: all tokens through two layers, then six of them; any may be chosen, so all embeddings are kept.
    blend = METHODS["cacheblend"](backbone, splice, 0.15)
    costs = backbone.forward_costs
    run = sum(costs.token[:2]) * TOKENS + sum(costs.token[2:]) * 6
    keys = splice.cache["k"].shape[2]
    run += sum(costs.pair[:2]) * TOKENS * keys + sum(costs.pair[2:]) * 6 * keys
    assert blend.flops == pytest.approx(run + turning, rel=1e-6)
    layer = whole // LAYERS
    read = 2 * (layer - layer * 6 // TOKENS) + layer  # what is not overwritten above, and the layer that is compared
    inputs = 2 * WIDTH * TOKENS
    assert blend.bytes == RepairBytes(canonical=whole, inputs=inputs, moved=read + inputs)


# ---------------------------------------------------------------------------------------------------------- hybrids


@pytest.fixture(scope="module")
def hybrid() -> tuple[ModelBackbone, SplicedCache, dict[str, np.ndarray]]:
    """A tiny hybrid, its chunk spliced blind behind another, and the cache that a prefill leaves."""
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        backbone = load(write_checkpoint("qwen3_5", Path(folder) / "qwen3_5"), dtype="float32")
        layout = backbone.layout
        tokens = text_tokens(backbone, np.random.default_rng(0).integers(0, 100, (ROWS, BEFORE + 12)))
        front, own = tokens.take(0, BEFORE), tokens.take(BEFORE, BEFORE + 12)
        alone: Tokens = own._replace(positions=own.positions - BEFORE)
        units = kvp.patching.conditioned(backbone, [front, alone])
        canonical = dict(backbone.prefill(alone).kv)
        ahead = kvp.to_engine(layout, units[0], front.positions, 0)
        place = lambda kv: joined(ahead, kvp.to_engine(layout, kv, own.positions, 0))
        slots = jnp.asarray(np.broadcast_to(np.arange(BEFORE, BEFORE + 12), (ROWS, 12)))
        splice = SplicedCache(
            own,
            dict(place(canonical)),
            slots,
            front=front,
            recorded=units[1],
            canonical=canonical,
            before=transition_of(ahead),
        )
        return backbone, splice, dict(place(units[1]))


@pytest.mark.parametrize(
    ("name", "settings"), [("full_reprefill", {}), ("quantised", {"bits": 16}), ("patch", {"rank": 12})]
)
def test_a_hybrids_chunk_is_served_whole(hybrid, name, settings):
    backbone, splice, expected = hybrid
    with jax.default_matmul_precision("highest"):
        repaired = METHODS[name](backbone, splice, 1.0, **settings)
    assert set(repaired.cache) == set(backbone.layout.names)
    for channel, value in expected.items():
        assert error(repaired.cache[channel], value) <= (1e-2 if name == "quantised" else 1e-3), channel
        assert error(splice.cache[channel], value) > 1e-3 or channel == "tail"


@pytest.mark.parametrize("name", ["cacheblend", "first_k", "layer_reprefill", "shadowkv", "anchored", "quantised"])
def test_other_methods_refuse_a_hybrid_and_name_what_serves_it(hybrid, name):
    backbone, splice, _ = hybrid
    with pytest.raises(LayoutError, match=r"linear attention on layers \[\d.*blind, patch, quantised in 16 bits"):
        METHODS[name](backbone, splice, 0.5)
    with pytest.raises(InputError, match="got None"):
        METHODS["patch"](backbone, splice.replace(canonical=None), 1.0, rank=2)


def test_the_papers_order_adds_after_the_rotation(case):
    """Of full rank it is the recorded KV, as the other order is; of a lower rank it is another approximation."""
    backbone, splice = case
    if backbone.layout.kind == "mla":
        pytest.skip("one layout says it")
    here = slice(BEFORE, BEFORE + TOKENS)
    exact = kvp.to_engine(backbone.layout, splice.recorded, splice.tokens.positions, 0)
    full, low = (METHODS["patch"](backbone, splice, 1.0, rank=rank, frame="engine") for rank in (30, 2))
    np.testing.assert_allclose(np.asarray(full.cache["k"])[:, :, here], np.asarray(exact["k"]), atol=2e-5)
    other = METHODS["patch"](backbone, splice, 1.0, rank=2)
    np.testing.assert_allclose(np.asarray(low.cache["v"]), np.asarray(other.cache["v"]), atol=2e-5)
    assert np.abs(np.asarray(low.cache["k"]) - np.asarray(other.cache["k"])).max() > 1e-3
    # Against the sum of the best directions of the rotated deficit.
    base = kvp.to_engine(backbone.layout, canonical_of(backbone.layout, splice), splice.tokens.positions, 0)
    delta = np.asarray(exact["k"], np.float64)[0, 0] - np.asarray(base["k"])[0, 0]
    u, s, v = np.linalg.svd(delta.reshape(len(delta), -1), full_matrices=False)
    expected = np.asarray(base["k"])[0, 0] + ((u[:, :2] * s[:2]) @ v[:2]).reshape(delta.shape)
    np.testing.assert_allclose(np.asarray(low.cache["k"])[0, 0, here], expected, atol=2e-4)
