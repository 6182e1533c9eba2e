"""Repairs that store a form of KV in context: exact where nothing is lost, within their budget, and no other truth."""

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, RepairBudget
from kvpatch_jax.repair.methods import low_rank, patch, quantised, shadowkv
from tests.kvpatch_jax.repair.splices import BEFORE, LAYERS, STORED_METHODS, error, make_splice, tiny_backbone

TOKENS, FEATURES = 40, 32
NUMBERS = LAYERS * TOKENS * 2 * FEATURES


@pytest.fixture(scope="module", params=["gqa", "mla"])
def case(request):
    backbone = tiny_backbone(request.param)
    with jax.default_matmul_precision("highest"):
        return backbone, *make_splice(backbone, chunk=TOKENS)


def of_chunk(cache):
    return {name: np.asarray(value)[:, :, BEFORE : BEFORE + TOKENS] for name, value in cache.items()}


@pytest.mark.slow
def test_full_rank_is_the_recorded_kv(case):
    backbone, splice, expected = case
    highest = max(min(TOKENS, channel.features) for channel in backbone.layout.channels)
    for form in (patch, low_rank):
        found = of_chunk(form(backbone, splice, 1.0, rank=highest).cache)
        for name, value in of_chunk(expected).items():
            assert error(found[name], value) <= 2e-5
    rotating = max(min(TOKENS, c.features) for c in backbone.layout.channels if c.rotates)
    found = of_chunk(shadowkv(backbone, splice, 1.0, rank=rotating).cache)
    for name, value in of_chunk(expected).items():
        assert error(found[name], value) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["patch", "shadowkv", "cachegen", "gear"])
def test_what_is_stored_fits_the_budget_and_more_is_nearer(case, name):
    backbone, splice, expected = case
    whole = TOKENS * backbone.layout.bytes_per_token()
    distances, before = [], None
    for share in (0.3, 0.6, 0.95):
        try:
            repaired = METHODS[name](backbone, splice, RepairBudget(kv_bytes=int(share * whole)))
        except InputError:
            # Whole values leave no room for the smallest rank of keys, and outliers none for the fewest bits.
            assert name in ("shadowkv", "gear", "cachegen")
            continue
        assert repaired.bytes.stored <= share * whole
        assert not repaired.chosen.any()
        found = of_chunk(repaired.cache)
        distances.append(sum(float(np.square(found[n] - v).sum()) for n, v in of_chunk(expected).items()))
        for channel, value in splice.cache.items():
            np.testing.assert_array_equal(np.asarray(repaired.cache[channel])[:, :, :BEFORE], value[:, :, :BEFORE])
        assert before is None or repaired.bytes.stored >= before
        before = repaired.bytes.stored
    assert distances == sorted(distances, reverse=True)
    assert len(distances) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 4])
def test_few_bits_are_off_by_half_a_step_at_most(case, bits):
    backbone, splice, _ = case
    repaired = quantised(backbone, splice, 1.0, bits=KVEncoding(bits, bits, 8))
    found = kvp.to_phase_free(
        backbone.layout,
        {name: value[:, :, BEFORE : BEFORE + TOKENS] for name, value in repaired.cache.items()},
        splice.tokens.positions,
    )
    for channel in backbone.layout.channels:
        true = np.asarray(splice.recorded[channel.name], np.float64).reshape(-1, TOKENS, channel.features)
        own = np.asarray(found[channel.name], np.float64).reshape(true.shape)
        if not channel.rotates:
            true, own = true.swapaxes(1, 2), own.swapaxes(1, 2)
        # Groups of eight along tokens (keys) or features (all else).
        groups = true.reshape(len(true), -1, 8, true.shape[2])
        span = groups.max(2) - groups.min(2)
        off = np.abs(own - true).reshape(groups.shape).max(2)
        # Scale and least value are in bfloat16, 8 bits each.
        slack = 2.0**-8 * (np.abs(groups).max(2) + span)
        assert (off <= span / (2**bits - 1) / 2 + slack * 2**0.5 + 1e-6).all()
    tokens_of = {c.name: (TOKENS, c.features) if c.rotates else (c.features, TOKENS) for c in backbone.layout.channels}
    groups = sum(across * -(-along // 8) for along, across in tokens_of.values())
    numbers = TOKENS * sum(channel.features for channel in backbone.layout.channels)
    assert repaired.bytes.stored == backbone.layout.layers * (bits * numbers // 8 + 4 * groups)


@pytest.mark.slow
def test_outliers_keep_their_keys(case):
    backbone, splice, expected = case
    repaired = shadowkv(backbone, splice, 1.0, rank=1)
    found, true = of_chunk(repaired.cache), of_chunk(expected)
    for channel in backbone.layout.channels:
        same = np.isclose(found[channel.name], true[channel.name], atol=1e-5).all((-1, -2))
        if channel.rotates:
            assert (same.sum(-1) >= 8).all()  # one landmark's chunk of eight tokens
            assert not same.all()
        else:
            assert same.all()


@pytest.mark.slow
def test_what_is_recorded_is_read_and_no_truth(case):
    backbone, splice, _ = case
    for name in STORED_METHODS:
        form = METHODS[name]
        with pytest.raises(InputError, match="recorded"):
            form(backbone, splice.replace(recorded=None), 0.9)
        with pytest.raises(InputError, match="expected bytes, or a share"):
            form(backbone, splice, RepairBudget(tokens=2))
        with pytest.raises(InputError, match="splice of one chunk"):
            form(backbone, splice.replace(chunks=((0, TOKENS),)), 0.9)


def test_forms_that_do_not_fit(case):
    backbone, splice, _ = case
    with pytest.raises(InputError, match="expected at least"):
        quantised(backbone, splice, RepairBudget(kv_bytes=10))
    with pytest.raises(InputError, match="got 10 bytes"):
        low_rank(backbone, splice, RepairBudget(kv_bytes=10))
    none = patch(backbone, splice, RepairBudget(kv_bytes=0))
    for name, value in splice.cache.items():
        assert error(none.cache[name], value) <= 1e-5
