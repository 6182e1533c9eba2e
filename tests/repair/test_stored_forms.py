"""Stored and shared forms of KV decode to their published definitions, and take the bytes of their arrays."""

from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import fit_basis
from kvpatch_jax.repair import METHODS, OtherAntecedent, RepairBudget, RepairBytes, canonical_of
from tests.repair import byte_oracles as oracles
from tests.repair.splices import BEFORE, LONG, ROWS, canonical_chunk, error, in_chunk, one_row
from tests.shared.arrays import placed

PLENTY = RepairBudget(kv_bytes=10**7)
CHUNK_SLOTS = slice(BEFORE, BEFORE + LONG)
nightly = pytest.mark.nightly


def matrices(kv) -> dict[str, np.ndarray]:
    """{channel: float32 [L,B,T,F]}."""
    return {name: np.asarray(value, np.float32).reshape(*np.shape(value)[:3], -1) for name, value in kv.items()}


def served(backbone, splice, repaired) -> dict[str, np.ndarray]:
    """The chunk's KV as it lies in the cache, phase-free [L,B,T,F]."""
    return matrices(kvp.to_phase_free(backbone.layout, in_chunk(repaired.cache, LONG), splice.tokens.positions))


def axis_of(channel, axes="kivi") -> int:
    """Keys by feature in groups of tokens, all else by token in groups of features."""
    if axes != "kivi":
        return {"token": -1, "feature": -2}[axes]
    return -2 if channel.name in ("k", "kpe") else -1


def by_matrix(kv, function) -> tuple[dict[str, np.ndarray], float]:
    """Applies a function of a channel's name and one matrix [T,F]; returns results, and the bytes of one row."""
    results, nbytes = {}, 0
    for name, value in kv.items():
        results[name] = np.zeros(value.shape)
        for place in np.ndindex(value.shape[:2]):
            results[name][place], size = function(name, value[place])
            nbytes += size
    return results, nbytes / ROWS


def quantised_kv(backbone, kv, keys, values=None, group=32, axes="kivi"):
    def encode(name, matrix):
        bits = keys if name in ("k", "kpe") or values is None else values
        return oracles.quantised(matrix, bits, group, axis_of(backbone.layout.channel(name), axes))

    return by_matrix(kv, encode)


def assert_near(result, expected, tolerance=2e-4):
    """Nearly all numbers equal: a quotient that lies midway may round to either side."""
    for name, value in expected.items():
        off = np.abs(result[name] - value) > tolerance * np.abs(value).max()
        assert off.mean() <= 0.004, (name, off.mean())
        assert np.linalg.norm(result[name] - value) <= 0.02 * np.linalg.norm(value)


# ----------------------------------------------------------------------------------- forms of the chunk's KV in context


@pytest.mark.parametrize(
    ("keys", "values", "group", "axes"),
    [(4, 1, 8, "kivi"), *(pytest.param(*row, marks=nightly) for row in ((8, 3, None, "token"), (16, 2, 7, "feature")))],
)
def test_kv_in_few_bits_is_that_of_numpy(long, keys, values, group, axes):
    backbone, splice, _ = long
    repaired = METHODS["quantised"](backbone, splice, PLENTY, bits=KVEncoding(keys, values, group, axes))
    expected, nbytes = quantised_kv(backbone, matrices(splice.recorded), keys, values, group, axes)
    assert_near(served(backbone, splice, repaired), expected)
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))


def test_gear_is_that_of_numpy(long):
    backbone, splice, _ = long
    repaired = METHODS["gear"](backbone, splice, PLENTY, bits=3, rank=2, outliers=0.1)

    def encode(name, matrix):
        channel = backbone.layout.channel(name)
        axis = axis_of(channel)
        count = int((LONG if axis == -2 else channel.features) * 0.05 + 0.5)
        return oracles.gear(matrix, 3, 32, axis, count, 2, channel.heads)

    expected, nbytes = by_matrix(matrices(splice.recorded), encode)
    assert_near(served(backbone, splice, repaired), expected, 0.02)
    assert repaired.bytes.stored == nbytes
    products = sum(channel.heads * LONG * 2 * channel.width for channel in backbone.layout.channels)
    assert repaired.flops - repaired.placing_flops == 2 * backbone.layout.layers * products
    plain = METHODS["gear"](backbone, splice, PLENTY, bits=3, rank=0, outliers=0)
    for name, value in METHODS["quantised"](backbone, splice, PLENTY, bits="k3v3g32").cache.items():
        np.testing.assert_array_equal(plain.cache[name], value)


@pytest.mark.parametrize("step", [0.5, pytest.param(2.0, marks=nightly)])
def test_cachegen_is_that_of_numpy_with_the_entropy_of_its_symbols(long, step):
    backbone, splice, _ = long
    layers, lengths = backbone.layout.layers, [LONG - 3, LONG]
    splice = splice.replace(length=np.array(lengths))
    repaired = METHODS["cachegen"](backbone, splice, PLENTY, step=step)
    result, total = served(backbone, splice, repaired), np.zeros(ROWS)
    for name, value in matrices(splice.recorded).items():
        for row in range(ROWS):
            saved = 0
            for layer in range(layers):
                size = step * (0.5, 1.0, 1.5)[layer * 3 // layers]
                expected, nbytes, more = oracles.cachegen(value[layer, row], size, 10, lengths[row])
                live = slice(0, lengths[row])
                assert_near({name: result[name][layer, row, live]}, {name: expected[live]}, 1e-3)
                total[row] += nbytes
                saved += more
            total[row] += min(0, saved / 1e6)
    # Symbols that lie midway may round to either side.
    assert repaired.bytes.stored == pytest.approx(np.ceil(total).mean(), rel=2e-3)


def test_low_rank_forms_keep_the_best_directions_and_shadowkv_its_outliers(long):
    backbone, splice, expected = long
    low, shadow = (METHODS[name](backbone, splice, 1.0, rank=2) for name in ("low_rank", "shadowkv"))
    best, _ = by_matrix(matrices(splice.recorded), lambda _, matrix: (np.matmul(*oracles.low_rank(matrix, 2)), 0))
    for name, value in served(backbone, splice, low).items():
        assert error(value, best[name]) <= 2e-4
    decoded = served(backbone, splice, shadow)
    for channel in backbone.layout.channels:
        true = matrices(splice.recorded)[channel.name]
        if not channel.rotates:
            assert error(decoded[channel.name], true) <= 1e-5
            continue
        # Of chunks of eight tokens, that whose keys are least like their mean, after the rotation, keeps its keys.
        keys = in_chunk(expected, LONG)[channel.name].astype(np.float64)
        blocks = keys.reshape(*keys.shape[:2], LONG // 8, 8, *keys.shape[3:])
        mean = blocks.mean(3, keepdims=True)
        cosine = (blocks * mean).sum(-1) / np.linalg.norm(blocks, axis=-1) / np.linalg.norm(mean, axis=-1)
        outlier = np.repeat(np.arange(LONG // 8) == cosine.min((3, 4)).argmin(-1)[..., None], 8, axis=-1)
        assert error(decoded[channel.name], np.where(outlier[..., None], true, best[channel.name])) <= 2e-4


@pytest.mark.parametrize("bits", [4, pytest.param(16, marks=nightly)])
def test_a_pair_is_kept_whole_and_counts_its_antecedent(long, bits):
    backbone, splice, expected = long
    word = 16 if bits == 16 else "k4v4"
    repaired = METHODS["joint_pair"](backbone, splice, PLENTY, precision=word)
    places = np.concatenate([np.asarray(splice.front.positions), np.asarray(splice.tokens.positions)], axis=1)
    pair = lambda cache: {name: np.asarray(value)[:, :, : BEFORE + LONG] for name, value in cache.items()}
    joined = matrices(kvp.to_phase_free(backbone.layout, pair(expected), places))
    coded, nbytes = quantised_kv(backbone, joined, bits)
    assert_near(matrices(kvp.to_phase_free(backbone.layout, pair(repaired.cache), places)), coded)
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))
    assert METHODS["quantised"](backbone, splice, PLENTY, bits=word).bytes.stored < repaired.bytes.stored


# ------------------------------------------------------------------------------------------------ differences to a base


@pytest.mark.parametrize("base", ["canonical", pytest.param("first", marks=nightly)])
def test_the_largest_blocks_are_kept_and_their_bytes_are_of_arrays(long, base):
    backbone, splice, _ = long
    allowed, layout = 6000, backbone.layout
    repaired = METHODS["block_differences"](backbone, splice, RepairBudget(kv_bytes=allowed), base=base)
    source = canonical_of(layout, splice) if base == "canonical" else splice.others[0].kv
    decoded, _ = quantised_kv(backbone, matrices(source), 16)
    costs = {}
    for channel in layout.channels:
        for length in (16, LONG % 16):
            costs[channel.name, length] = 2 * length * channel.features + 2  # numbers and an index of 16 bits
    sizes, expected = [], {name: value.copy() for name, value in decoded.items()}
    for row in range(ROWS):
        deltas = {name: value[:, row] - decoded[name][:, row] for name, value in matrices(splice.recorded).items()}
        chosen = oracles.chosen_blocks(deltas, 16, allowed, costs)
        assert len(chosen) > 3
        for name, layer, place in chosen:
            part = slice(16 * place, 16 * place + 16)
            expected[name][layer, row, part] += oracles.nearest(deltas[name][layer, part].astype(np.float32))
        sizes.append(sum(costs[name, min(16, LONG - 16 * place)] for name, _, place in chosen))
    assert_near(served(backbone, splice, repaired), expected, 1e-3)
    assert repaired.bytes.stored == round(np.mean(sizes)) <= allowed
    master = 2 * LONG * layout.numbers
    assert (repaired.bytes.canonical, repaired.bytes.shared) == ((master, 0) if base == "canonical" else (0, master))


@pytest.mark.parametrize("precision", ["k4v4", pytest.param(16, marks=nightly)])
def test_anchors_are_weighted_by_the_distance_of_antecedents(long, precision):
    backbone, splice, _ = long
    base, size = quantised_kv(backbone, matrices(canonical_of(backbone.layout, splice)), 8)
    asked = np.asarray(splice.front.embeddings, np.float64).mean(1)
    logits, deltas, nbytes = [], [], 0
    for other in splice.others:
        apart = asked - oracles.nearest(np.asarray(other.embedding))
        logits.append(-np.sqrt(np.square(apart).sum(-1)))
        exact = {name: (value - base[name]).astype(np.float32) for name, value in matrices(other.kv).items()}
        delta, anchor_bytes = quantised_kv(backbone, exact, 16 if precision == 16 else 4)
        deltas.append(delta)
        nbytes += anchor_bytes + 2 * asked.shape[1]
    weights = np.exp(logits) / np.exp(logits).sum(0)
    assert (weights > 0.02).all()
    expected = base
    for weight, delta in zip(weights, deltas, strict=True):
        expected = {name: value + weight[None, :, None, None] * delta[name] for name, value in expected.items()}

    # Two anchors fit, and no third. The splice's antecedent may be new: its KV is not read.
    new = splice.replace(recorded=None, others=(*splice.others, splice.others[0]))
    budget = RepairBudget(kv_bytes=int(nbytes) + 300)
    repaired = METHODS["anchored"](backbone, new, budget, precision=precision, encoding="k8v8")
    assert_near(served(backbone, splice, repaired), expected, 1e-3)
    assert repaired.bytes == RepairBytes(canonical=int(size), shared=int(nbytes), moved=int(size + nbytes))


# -------------------------------------------------------------------------------------------------------------- budgets

STORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "patch": (1.0, {"rank": 4, "encoding": "k4v4"}),
    "quantised": (1.0, {"bits": 3}),
    "low_rank": (1.0, {"rank": 4}),
    "shadowkv": (1.0, {"rank": 4}),
    "cachegen": (1.0, {"step": 1.0}),
    "gear": (1.0, {"bits": 3}),
    "block_differences": (RepairBudget(kv_bytes=7000), {}),
    "anchored": (PLENTY, {"precision": 4, "encoding": "k4v4"}),
    "joint_pair": (PLENTY, {}),
    "pooled": (1.0, {"rank": 4}),
}
"""Methods that keep a form of the chunk's KV, and a setting of each."""


@pytest.mark.parametrize("name", STORED)
def test_live_slots_alone_are_written_and_rows_and_padding_do_not_touch_each_other(long, name):
    backbone, splice, _ = long
    budget, settings = STORED[name]
    if name == "pooled":
        ranks = {channel.name: min(8, channel.features) for channel in backbone.layout.channels}
        settings = settings | {"basis": fit_basis([(canonical_chunk(backbone, splice), splice.recorded)], ranks)}
    call = lambda splice: METHODS[name](backbone, splice, budget, **settings)
    lengths = [LONG - 9, LONG]
    padded = splice.replace(length=np.array(lengths))
    # What lies in padding is anything.
    tokens = (np.arange(LONG) < np.array(lengths)[:, None])[..., None, None]
    noise = lambda kv: {n: placed(np.where(tokens, v, np.float32(77.0))) for n, v in kv.items()}
    others = tuple(OtherAntecedent(noise(other.kv), other.embedding) for other in splice.others)
    repaired, again = call(padded), call(padded.replace(recorded=noise(splice.recorded), others=others))
    assert set(repaired.cache) == set(splice.cache)
    assert not repaired.chosen.any()
    alone = [call(one_row(padded, row)).cache for row in range(ROWS)] if name == "anchored" else []
    for channel, value in repaired.cache.items():
        value, before, scale = np.asarray(value), np.asarray(splice.cache[channel]), float(np.abs(value).max())
        still = np.zeros(value.shape[1:3], bool)
        still[:, BEFORE + LONG :], still[0, BEFORE + LONG - 9 :], still[:, :BEFORE] = True, True, name != "joint_pair"
        np.testing.assert_array_equal(value[:, still], before[:, still])
        written = value[:, 1, CHUNK_SLOTS]
        assert np.isfinite(written).all()
        if channel in ("k", "v"):
            assert (written != before[:, 1, CHUNK_SLOTS]).any((0, -2, -1)).mean() >= 0.3
        for row in range(ROWS):
            live = slice(0, BEFORE + lengths[row])
            for variant in (again.cache[channel][:, row], *(cache[channel][:, 0] for cache in alone[row : row + 1])):
                off = np.abs(np.asarray(variant)[:, live] - value[:, row, live]) / scale
                assert (off > 1e-4).mean() <= 0.004
                assert np.square(off).mean() <= 1e-5


@pytest.mark.parametrize(
    "name", ["low_rank", "block_differences", *(pytest.param(name, marks=nightly) for name in ("patch", "quantised"))]
)
def test_budgets_bound_what_is_kept_and_more_is_no_worse(long, name):
    backbone, splice, _ = long
    everything, distances, sizes = LONG * backbone.layout.bytes_per_token(), [], []
    for share in (0.18, 0.5, 0.95, 3.0):
        repaired = METHODS[name](backbone, splice, RepairBudget(kv_bytes=int(share * everything)))
        sizes.append(repaired.bytes.stored + repaired.bytes.shared)
        assert sizes[-1] <= share * everything
        result = served(backbone, splice, repaired)
        distances.append(sum(np.square(result[n] - v).sum() for n, v in matrices(splice.recorded).items()))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 2
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 2


def test_forms_that_choose_by_values_refuse_a_trace(long):
    backbone, splice, _ = long
    for name in ("patch", "block_differences", "cachegen"):
        with pytest.raises(InputError, match="got KV inside a trace"):
            jax.make_jaxpr(lambda splice, name=name: METHODS[name](backbone, splice, PLENTY).cache)(splice)
