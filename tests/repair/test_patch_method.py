"""The method `patch` equals `form_patch` and `apply_patch` bit for bit, whatever its base, frame, budget and dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.patching import ByteBudget
from kvpatch_jax.repair import METHODS, RepairBudget, canonical_of
from tests.shared.splices import BEFORE, LONG, ROWS, canonical_chunk, error

CHUNK_SLOTS = slice(BEFORE, BEFORE + LONG)


def served(cache) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:, :, CHUNK_SLOTS] for name, value in cache.items()}


@pytest.mark.parametrize(
    ("settings", "encoding", "options"),
    [
        ({"rank": 4}, None, {}),
        pytest.param({"rank": 30}, None, {}, marks=pytest.mark.nightly),
        ({"rank": 4, "dtype": "int4", "encoding": "k4v4g32"}, "k4v4g32", {"dtype": "int4"}),
        ({"rank": 4, "from_layer": 2}, None, {"layers": slice(2, None)}),
    ],
)
def test_a_patch_is_form_patch_and_apply_patch_bit_for_bit(long, settings, encoding, options):
    backbone, splice, _ = long
    if "layers" in options:
        options = {"layers": range(backbone.layout.layers)[options["layers"]]}
    chunk = canonical_chunk(backbone, splice)
    chunk = chunk if encoding is None else kvp.encode_chunk(chunk, encoding)
    patch = kvp.form_patch(chunk, splice.recorded, settings["rank"], ["legend"], method="exact", **options)
    repaired = METHODS["patch"](backbone, splice, 1.0, **settings)
    for name, value in kvp.apply_patch(chunk, patch, BEFORE, ["legend"]).items():
        np.testing.assert_array_equal(served(repaired.cache)[name], value)
    # Float32 counts as it is served, in 16 bits.
    assert repaired.bytes.stored == patch.nbytes / ROWS / (1 if "dtype" in options else 2)


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
            assert error(served(repaired.cache)[name][:, row], value) <= 1e-5
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
    short = splice.replace(length=jnp.asarray([LONG - 9, LONG]))
    repaired = METHODS["patch"](backbone, short, 1.0, rank=4)
    for name, value in whole.cache.items():
        assert error(np.asarray(repaired.cache[name])[:, 1], np.asarray(value)[:, 1]) <= 1e-4
    # The first row's patch is of its live tokens alone.
    alone = canonical_chunk(backbone, splice, 0)
    alone = kvp.Chunk(alone.kv, alone.local, LONG, LONG - 9, "page", backbone.layout, backbone.fingerprint)
    conditioned = {name: value[:, 0] for name, value in splice.recorded.items()}
    patch = kvp.form_patch(alone, conditioned, 4, ["legend"], method="exact")
    for name, value in kvp.apply_patch(alone, patch, BEFORE, ["legend"]).items():
        assert error(served(repaired.cache)[name][:, 0, : LONG - 9], value[:, : LONG - 9]) <= 1e-5

    moved = splice.tokens._replace(positions=splice.tokens.positions + 5)
    canonical = canonical_of(backbone.layout, splice)
    elsewhere = METHODS["patch"](backbone, splice.replace(tokens=moved, canonical=canonical), 1.0, rank=4)
    expected = kvp.to_phase_free(backbone.layout, served(whole.cache), splice.tokens.positions)
    for name, value in kvp.to_phase_free(backbone.layout, served(elsewhere.cache), moved.positions).items():
        assert error(value, expected[name]) <= 1e-4


def test_the_papers_order_adds_the_best_directions_of_the_rotated_deficit(long):
    backbone, splice, _ = long
    if backbone.layout.kind == "mla":
        pytest.skip("one layout says it")
    low, other = (
        served(METHODS["patch"](backbone, splice, 1.0, rank=2, frame=frame).cache) for frame in ("engine", "phase_free")
    )
    np.testing.assert_allclose(low["v"], other["v"], atol=2e-5)
    assert np.abs(low["k"] - other["k"]).max() > 1e-3
    sources = canonical_of(backbone.layout, splice), splice.recorded
    turned = [kvp.to_engine(backbone.layout, kv, splice.tokens.positions, 0)["k"] for kv in sources]
    base, exact = (np.asarray(keys, np.float64)[0, 0].reshape(LONG, -1) for keys in turned)
    u, s, v = np.linalg.svd(exact - base, full_matrices=False)
    np.testing.assert_allclose(low["k"][0, 0].reshape(LONG, -1), base + (u[:, :2] * s[:2]) @ v[:2], atol=2e-4)
