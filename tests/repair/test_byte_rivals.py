"""Stored and shared forms against slow transcriptions in NumPy, with the bytes that their arrays really take."""
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, OtherAntecedent, RepairBudget, RepairBytes
from kvpatch_jax.repair.differences import anchor_weights
from kvpatch_jax.repair.methods import (
    anchored,
    blind,
    block_differences,
    cachegen,
    gear,
    joint_pair,
    low_rank,
    patch,
    quantised,
    shadowkv,
)
from kvpatch_jax.repair.stored_forms import encode_rows, encoding_of
from tests.repair import byte_oracles as oracles
from tests.repair.splices import (
    BEFORE,
    ROWS,
    STORED_METHODS,
    error,
    make_splice,
    one_row,
    other_antecedents,
    tiny_backbone,
)

TOKENS = 40
PLENTY = RepairBudget(kv_bytes=10**7)
SCARCE = ("anchored", "shadowkv", "cachegen", "gear")
"""Methods that fit in no small budget: anchors and values are whole, outliers and tables take bytes of their own."""


@pytest.fixture(scope="module", params=["gqa", "mla"])
def case(request):
    backbone = tiny_backbone(request.param)
    with jax.default_matmul_precision("highest"):
        splice, expected = make_splice(backbone, chunk=TOKENS)
        return backbone, splice.replace(others=other_antecedents(backbone, 3, chunk=TOKENS)), expected


def matrices(kv) -> dict[str, np.ndarray]:
    """{channel: float32 [L,B,T,F]}."""
    return {name: np.asarray(value, np.float32).reshape(*np.shape(value)[:3], -1) for name, value in kv.items()}


def served(backbone, splice, repaired) -> dict[str, np.ndarray]:
    """The chunk's KV as it lies in the cache, phase-free [L,B,T,F]."""
    own = {name: np.asarray(value)[:, :, BEFORE : BEFORE + TOKENS] for name, value in repaired.cache.items()}
    return matrices(kvp.to_phase_free(backbone.layout, own, splice.tokens.positions))


def canonical(backbone, splice) -> dict[str, np.ndarray]:
    return served(backbone, splice, blind(backbone, splice))


def recorded(splice) -> dict[str, np.ndarray]:
    return matrices(splice.recorded)


def axis_of(channel, axes="kivi") -> int:
    if axes != "kivi":
        return {"token": -1, "feature": -2}[axes]
    return -2 if channel.name in ("k", "kpe") else -1


def by_matrix(kv, function):
    """Applies a function of a channel's name and one matrix [T,F]; returns results, and the bytes of one row."""
    results, nbytes = {}, 0
    for name, value in kv.items():
        results[name] = np.zeros(value.shape)
        for layer in range(value.shape[0]):
            for row in range(value.shape[1]):
                results[name][layer, row], size = function(name, value[layer, row])
                nbytes += size
    return results, nbytes / ROWS


def quantised_kv(backbone, kv, keys, values=None, group=32, axes="kivi", symmetric=False):
    def one(name, matrix):
        channel = backbone.layout.channel(name)
        bits = keys if name in ("k", "kpe") or values is None else values
        return oracles.quantised(matrix, bits, group, axis_of(channel, axes), symmetric)

    return by_matrix(kv, one)


def assert_near(found, expected, tolerance=2e-4):
    """Nearly all numbers equal: a quotient that lies midway may round to either side."""
    for name, value in expected.items():
        scale = np.abs(value).max()
        off = np.abs(found[name] - value) > tolerance * scale
        assert off.mean() <= 0.004, (name, off.mean())
        assert np.linalg.norm(found[name] - value) <= 0.02 * np.linalg.norm(value)


# ------------------------------------------------------------------------------------------------------- few bits


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keys", "values", "group", "axes"),
    [(5, 4, 64, "kivi"), (4, 1, 8, "kivi"), (8, 3, None, "token"), (16, 2, 7, "feature")],
)
def test_kv_in_few_bits_is_that_of_numpy(case, keys, values, group, axes):
    backbone, splice, _ = case
    encoding = KVEncoding(keys, values, group, axes)
    repaired = quantised(backbone, splice, PLENTY, bits=encoding)
    expected, nbytes = quantised_kv(backbone, recorded(splice), keys, values, group, axes)
    assert_near(served(backbone, splice, repaired), expected)
    stored = encode_rows(backbone.layout, splice.recorded, encoding)
    assert repaired.bytes.stored == nbytes == sum(value.nbytes for value in stored.values()) / ROWS
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))
    # The rotation, and two operations a number to bring it back.
    decoding = 2 * TOKENS * backbone.layout.numbers
    assert repaired.flops == blind(backbone, splice).flops + decoding


# ----------------------------------------------------------------------------------------------------- corrections


def bases(backbone, splice, base):
    return canonical(backbone, splice) if base == "canonical" else matrices(splice.others[0].kv)


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["canonical", "first"])
def test_the_largest_blocks_are_kept_and_their_bytes_are_of_arrays(case, base):
    backbone, splice, _ = case
    allowed, layout = 6000, backbone.layout
    repaired = block_differences(backbone, splice, RepairBudget(kv_bytes=allowed), base=base)
    kept, _ = quantised_kv(backbone, bases(backbone, splice, base), 16)
    costs = {}
    for channel in layout.channels:
        for length in (16, TOKENS % 16):
            block = jnp.zeros((length, channel.features), jnp.bfloat16)
            costs[channel.name, length] = block.nbytes + np.zeros(1, np.uint16).nbytes
    sizes, expected = [], {name: value.copy() for name, value in kept.items()}
    for row in range(ROWS):
        deltas = {name: value[:, row] - kept[name][:, row] for name, value in recorded(splice).items()}
        chosen = oracles.chosen_blocks(deltas, 16, allowed, costs)
        assert len(chosen) > 3
        for name, layer, place in chosen:
            part = slice(16 * place, 16 * place + 16)
            numbers = deltas[name][layer, part].astype(np.float32)
            expected[name][layer, row, part] += oracles.nearest(numbers)
        sizes.append(sum(costs[name, min(16, TOKENS - 16 * place)] for name, _, place in chosen))
    assert_near(served(backbone, splice, repaired), expected, 1e-3)
    assert repaired.bytes.stored == round(np.mean(sizes)) <= allowed
    master = 2 * TOKENS * layout.bytes_per_token(np.float32) // 4
    assert (repaired.bytes.canonical, repaired.bytes.shared) == ((master, 0) if base == "canonical" else (0, master))


@pytest.mark.nightly
def test_gear_is_that_of_numpy(case):
    backbone, splice, _ = case
    repaired = gear(backbone, splice, PLENTY, bits=3, rank=2, outliers=0.1)

    def one(name, matrix):
        channel = backbone.layout.channel(name)
        axis = axis_of(channel)
        count = int((TOKENS if axis == -2 else channel.features) * 0.05 + 0.5)
        return oracles.gear(matrix, 3, 32, axis, count, 2, channel.heads)

    expected, nbytes = by_matrix(recorded(splice), one)
    assert_near(served(backbone, splice, repaired), expected, 0.02)
    assert repaired.bytes.stored == nbytes
    products = sum(channel.heads * TOKENS * 2 * channel.width for channel in backbone.layout.channels)
    assert repaired.flops - repaired.placing_flops == 2 * backbone.layout.layers * products
    plain = gear(backbone, splice, PLENTY, bits=3, rank=0, outliers=0)
    for name, value in quantised(backbone, splice, PLENTY, bits="k3v3g32").cache.items():
        np.testing.assert_array_equal(plain.cache[name], value)


@pytest.mark.nightly
@pytest.mark.parametrize("step", [0.5, 2.0])
def test_cachegen_is_that_of_numpy_with_the_entropy_of_its_symbols(case, step):
    backbone, splice, _ = case
    layers = backbone.layout.layers
    lengths = [TOKENS - 3, TOKENS]
    splice = splice.replace(length=jnp.asarray(lengths))
    repaired = cachegen(backbone, splice, PLENTY, step=step)
    found, total = served(backbone, splice, repaired), np.zeros(ROWS)
    for name, value in recorded(splice).items():
        for row in range(ROWS):
            saved = 0
            for layer in range(layers):
                own = step * (0.5, 1.0, 1.5)[layer * 3 // layers]
                expected, size, more = oracles.cachegen(value[layer, row], own, 10, lengths[row])
                live = slice(0, lengths[row])
                assert_near({name: found[name][layer, row, live]}, {name: expected[live]}, 1e-3)
                total[row] += size
                saved += more
            total[row] += min(0, saved / 1e6)
    # Symbols that lie midway may round to either side.
    assert repaired.bytes.stored == pytest.approx(np.ceil(total).mean(), rel=2e-3)


# ---------------------------------------------------------------------------------------------------- shared forms


@pytest.mark.nightly
@pytest.mark.parametrize("precision", [16, "k4v4"])
def test_anchors_are_weighted_by_the_distance_of_antecedents(case, precision):
    backbone, splice, _ = case
    allowed = 2 * encoding_of(precision).nbytes(backbone.layout, TOKENS) + 300
    # The own antecedent's KV is not read: it may be new.
    new = splice.replace(recorded=None)
    repaired = anchored(backbone, new, RepairBudget(kv_bytes=allowed), precision=precision, encoding="k8v8")
    base, size = quantised_kv(backbone, canonical(backbone, splice), 8)
    asked = np.asarray(splice.front.embeddings, np.float64).mean(1)
    logits, deltas, nbytes = [], [], 0
    for other in splice.others[:2]:
        apart = asked - oracles.nearest(np.asarray(other.embedding))
        logits.append(-np.sqrt(np.square(apart).sum(-1)))
        exact = {name: (value - base[name]).astype(np.float32) for name, value in matrices(other.kv).items()}
        bits = 16 if precision == 16 else 4
        delta, own = quantised_kv(backbone, exact, bits)
        deltas.append(delta)
        nbytes += own + jnp.zeros(asked.shape[1], jnp.bfloat16).nbytes
    weights = np.exp(logits) / np.exp(logits).sum(0)
    assert (weights > 0.02).all()
    expected = base
    for weight, delta in zip(weights, deltas, strict=True):
        expected = {name: value + weight[None, :, None, None] * delta[name] for name, value in expected.items()}
    assert_near(served(backbone, splice, repaired), expected, 1e-3)
    assert repaired.bytes == RepairBytes(canonical=int(size), shared=int(nbytes), moved=int(size + nbytes))


@pytest.mark.nightly
def test_an_anchor_at_no_distance_is_the_antecedent_itself(case):
    backbone, splice, _ = case
    own = np.asarray(splice.front.embeddings, np.float32).mean(1)
    far = tuple(OtherAntecedent(other.kv, own + 1e3) for other in splice.others)
    near = OtherAntecedent(splice.recorded, own)
    repaired = anchored(backbone, splice.replace(others=(far[0], near, far[1])), PLENTY)
    for name, value in served(backbone, splice, repaired).items():
        assert np.abs(value - recorded(splice)[name]).max() <= 2**-7 * np.abs(value).max()
    weights = np.asarray(anchor_weights(own, np.stack([own, own, own + 1e3])))
    np.testing.assert_allclose(weights, [[0.5] * ROWS, [0.5] * ROWS, [0.0] * ROWS], atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [16, 4])
def test_a_pair_is_kept_whole_and_counts_its_antecedent(case, bits):
    backbone, splice, expected = case
    repaired = joint_pair(backbone, splice, PLENTY, precision=bits if bits == 16 else "k4v4")
    places = np.concatenate([np.asarray(splice.front.positions), np.asarray(splice.tokens.positions)], axis=1)
    own = {name: np.asarray(value)[:, :, : BEFORE + TOKENS] for name, value in expected.items()}
    joined = matrices(kvp.to_phase_free(backbone.layout, own, places))
    coded, nbytes = quantised_kv(backbone, joined, bits)
    found = {name: np.asarray(value)[:, :, : BEFORE + TOKENS] for name, value in repaired.cache.items()}
    assert_near(matrices(kvp.to_phase_free(backbone.layout, found, places)), coded)
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))
    alone = quantised(backbone, splice, PLENTY, bits=bits if bits == 16 else "k4v4").bytes.stored
    assert alone < repaired.bytes.stored
    for name, value in splice.cache.items():
        np.testing.assert_array_equal(
            np.asarray(repaired.cache[name])[:, :, BEFORE + TOKENS :], value[:, :, BEFORE + TOKENS :]
        )


# ----------------------------------------------------------------------------------------------------- guarantees


SETTINGS = {
    "quantised": {"bits": 3},
    "patch": {"rank": 4, "encoding": "k4v4"},
    "gear": {"bits": 3},
    "cachegen": {"step": 1.0},
    "anchored": {"precision": 4, "encoding": "k4v4"},
    "joint_pair": {"precision": 4},
    "block_differences": {},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["quantised", "patch", "cachegen", "anchored", "block_differences"])
def test_rows_and_padding_do_not_touch_one_another(case, name):
    backbone, splice, _ = case
    lengths = [TOKENS - 9, TOKENS]
    splice = splice.replace(length=jnp.asarray(lengths))
    budget = RepairBudget(kv_bytes=7000 if name == "block_differences" else 10**7)
    whole = METHODS[name](backbone, splice, budget, **SETTINGS[name])
    # What lies in padding is anything.
    noise = lambda kv: {n: jnp.asarray(v).at[:, 0, lengths[0] :].set(77.0) for n, v in kv.items()}
    others = tuple(OtherAntecedent(noise(other.kv), other.embedding) for other in splice.others)
    padded = splice.replace(recorded=noise(splice.recorded), others=others)
    again = METHODS[name](backbone, padded, budget, **SETTINGS[name])
    for row in range(ROWS):
        alone = METHODS[name](backbone, one_row(splice, row), budget, **SETTINGS[name])
        live = slice(0, BEFORE + lengths[row])
        for channel, value in alone.cache.items():
            value, scale = np.asarray(value)[:, 0, live], float(np.abs(value).max())
            for cache in (whole.cache, again.cache):
                off = np.abs(np.asarray(cache[channel])[:, row, live] - value) / scale
                assert (off > 1e-4).mean() <= 0.004
                assert np.square(off).mean() <= 1e-5
    for channel, value in splice.cache.items():
        np.testing.assert_array_equal(
            np.asarray(whole.cache[channel])[:, 0, BEFORE + lengths[0] : BEFORE + TOKENS],
            np.asarray(value)[:, 0, BEFORE + lengths[0] : BEFORE + TOKENS],
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["patch", "block_differences", "anchored", "joint_pair", "shadowkv", "cachegen", "gear"]
)
def test_budgets_bound_what_is_kept_and_more_is_no_worse(case, name):
    backbone, splice, _ = case
    whole, distances, sizes = TOKENS * backbone.layout.bytes_per_token(), [], []
    for share in (0.18, 0.26, 0.5, 0.95, 1.3, 3.0):
        try:
            repaired = METHODS[name](backbone, splice, RepairBudget(kv_bytes=int(share * whole)))
        except InputError:
            assert name in SCARCE
            assert share < (1.1 if name == "anchored" else 0.9)
            continue
        sizes.append(repaired.bytes.stored + repaired.bytes.shared)
        assert sizes[-1] <= share * whole
        assert not repaired.chosen.any()
        found = served(backbone, splice, repaired)
        distances.append(sum(np.square(found[n] - v).sum() for n, v in recorded(splice).items()))
        if name != "joint_pair":
            for channel, value in splice.cache.items():
                np.testing.assert_array_equal(np.asarray(repaired.cache[channel])[:, :, :BEFORE], value[:, :, :BEFORE])
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 2
    if name != "anchored":
        assert distances == sorted(distances, reverse=True)
    if name not in SCARCE:
        assert distances[-1] < distances[0] / 2


def of_chunk(cache):
    return {name: np.asarray(value)[:, :, BEFORE : BEFORE + TOKENS] for name, value in cache.items()}


@pytest.mark.nightly
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


@pytest.mark.nightly
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


def test_a_patch_of_no_bytes_is_the_base(case):
    backbone, splice, _ = case
    none = patch(backbone, splice, RepairBudget(kv_bytes=0))
    for name, value in splice.cache.items():
        assert error(none.cache[name], value) <= 1e-5


def test_bytes_are_shared_over_antecedents():
    bytes = RepairBytes(canonical=100, stored=7, inputs=20, moved=999, shared=40)
    assert [bytes.per_antecedent(number) for number in (1, 4, 16)] == [167.0, 47.0, 17.0]
    with pytest.raises(InputError, match="got 0; expected at least 1"):
        bytes.per_antecedent(0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("error", "words", "name", "changes", "settings"),
    [
        (InputError, r"others: got \(\)", "anchored", {"others": ()}, {}),
        (InputError, r"others: got \(\)", "patch", {"others": ()}, {"base": "mean"}),
        (InputError, r"others: got \(\)", "patch", {"others": ()}, {"base": "others"}),
        (InputError, "base: got 'last'", "block_differences", {}, {"base": "last"}),
        (InputError, "got 1000; expected 0 to", "patch", {}, {"rank": 1000}),
        (InputError, "got dtype 'int9'", "patch", {}, {"rank": 2, "dtype": "int9"}),
        (InputError, "encoding: got 'k44'", "patch", {}, {"rank": 2, "encoding": "k44"}),
        (InputError, r"gear\.rank: got 99", "gear", {}, {"rank": 99}),
        (InputError, "got 9 bits", "gear", {}, {"bits": 9}),
        (InputError, r"outliers: got 0\.9", "gear", {}, {"outliers": 0.9}),
        (InputError, "expected a positive number", "cachegen", {}, {"step": 0.0}),
        (InputError, "front: got None", "anchored", {"front": None}, {}),
        (InputError, "front: got None", "joint_pair", {"front": None}, {}),
        (InputError, "splice of one chunk", "anchored", {"chunks": ((0, TOKENS),)}, {}),
        (InputError, "splice of one chunk", "joint_pair", {"chunks": ((0, TOKENS),)}, {}),
        *((InputError, "recorded: got None", name, {"recorded": None}, {}) for name in STORED_METHODS),
        *((InputError, "splice of one chunk", name, {"chunks": ((0, TOKENS),)}, {}) for name in STORED_METHODS),
    ],
)
def test_forms_that_are_refused(case, unchecked, error, words, name, changes, settings):
    backbone, splice, _ = case
    with pytest.raises(error, match=words):
        METHODS[name](backbone, splice.replace(**changes), PLENTY, **settings)


@pytest.mark.nightly
def test_budgets_and_traces_that_are_refused(case, unchecked):
    backbone, splice, _ = case
    for name in ("gear", "cachegen", "quantised", "low_rank"):
        with pytest.raises(InputError, match=r"budget: got .* bytes; expected at least"):
            METHODS[name](backbone, splice, RepairBudget(kv_bytes=10))
    for name in ("anchored", "joint_pair", *STORED_METHODS):
        with pytest.raises(InputError, match="expected bytes, or a share"):
            METHODS[name](backbone, splice, RepairBudget(tokens=2))
    for name in ("patch", "block_differences", "cachegen"):
        with pytest.raises(InputError, match="got KV inside a trace"):
            jax.make_jaxpr(lambda own, name=name: METHODS[name](backbone, own, PLENTY).cache)(splice)
    unknown = OtherAntecedent(splice.others[1].kv)
    with pytest.raises(InputError, match=r"others\[1\].embedding: got None"):
        anchored(backbone, splice.replace(others=(splice.others[0], unknown)), PLENTY)
