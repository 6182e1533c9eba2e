"""Stored and shared forms against slow transcriptions in NumPy, with the bytes that their arrays really take."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding, pack
from kvpatch_jax.errors import InputError, RankError
from kvpatch_jax.repair import (
    SHARED_FORMS,
    STORED_FORMS,
    KVPrecision,
    OtherAntecedent,
    RepairBudget,
    RepairBytes,
    anchor_weights,
    anchored,
    averaged,
    blind,
    block_differences,
    cachegen,
    encoded_deficit,
    encoded_patch,
    gear,
    joint_pair,
    patch_bytes,
    quantised,
)
from kvpatch_jax.repair.stored_kv import encode_kv_rows
from tests.kvpatch_jax.repair import byte_oracles as oracles
from tests.kvpatch_jax.repair.splices import (
    BEFORE,
    ROWS,
    make_splice,
    other_antecedents,
    tiny_backbone,
)

TOKENS = 40
ALL_FORMS = {**STORED_FORMS, **SHARED_FORMS}
PLENTY = RepairBudget(kv_bytes=10**7)


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "values", "group", "axes"),
    [
        (5, 4, 64, "kivi"),
        (8, 3, None, "token"),
        (16, 2, 7, "feature"),
    ],
)
def test_kv_in_few_bits_is_that_of_numpy(case, keys, values, group, axes):
    backbone, splice, _ = case
    repaired = quantised(backbone, splice, PLENTY, keys=keys, values=values, group=group, axes=axes)
    expected, nbytes = quantised_kv(backbone, recorded(splice), keys, values, group, axes)
    assert_near(served(backbone, splice, repaired), expected)
    precision = KVPrecision(keys, values, group, axes)
    stored = encode_kv_rows(backbone.layout, splice.recorded, precision)
    assert repaired.bytes.stored == nbytes == sum(value.nbytes for value in stored.values()) / ROWS
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))
    assert repaired.flops == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (16, KVPrecision(16, 16)),
        ("k4v2", KVPrecision(4, 2)),
        ("k6v6gall", KVPrecision(6, 6, None)),
        (KVEncoding(3, 3, 64), KVPrecision(3, 3, 64)),
        (KVPrecision(2, 16, axes="token"), KVPrecision(2, 16, axes="token")),
    ],
)
def test_precisions_are_read_from_words_and_bits(given, expected):
    assert KVPrecision.of(given) == expected
    if isinstance(given, str | KVEncoding):
        layout = tiny_backbone().layout
        assert expected.nbytes(layout, 37) == KVEncoding.of(given).nbytes(layout, 37)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keys": 9}, "precision.keys: got 9 bits"),
        ({"values": True}, "precision.values: got True"),
        ({"keys": 1, "symmetric": True}, "got 1 bits"),
        ({"group": 0}, "group: got 0"),
        ({"axes": "head"}, "axes: got 'head'"),
    ],
)
def test_precisions_that_cannot_be(settings, words, unchecked):
    with pytest.raises(InputError, match=words):
        KVPrecision(**settings)


# ----------------------------------------------------------------------------------------------------- corrections


def mean_of_others(splice):
    own = [matrices(other.kv) for other in splice.others]
    return {name: np.mean([kv[name] for kv in own], axis=0, dtype=np.float64).astype(np.float32) for name in own[0]}


def bases(backbone, splice, base):
    if base == "mean":
        return mean_of_others(splice)
    return canonical(backbone, splice) if base == "canonical" else matrices(splice.others[0].kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "rank", "dtype", "base"),
    [(4, 5, "int4", "canonical"), (6, 3, "int8", "mean"), (8, 8, "bfloat16", "first"), (4, 0, "int4", "canonical")],
)
def test_an_encoded_patch_is_that_of_numpy(case, bits, rank, dtype, base):
    backbone, splice, _ = case
    repaired = encoded_patch(backbone, splice, PLENTY, encoding=f"k{bits}v{bits}", rank=rank, dtype=dtype, base=base)
    decoded, size = quantised_kv(backbone, bases(backbone, splice, base), bits)

    def factors(delta):
        u, v = oracles.low_rank(delta, rank)
        if dtype == "bfloat16":
            return oracles.nearest(u.astype(np.float32)).astype(np.float64) @ oracles.nearest(v.astype(np.float32))
        group = 32 if dtype == "int4" else None
        if dtype == "int4":
            return oracles.quantised(u, 4, group, -2, True)[0] @ oracles.quantised(v, 4, group, -1, True)[0]
        steps = np.abs(u).max(0, keepdims=True) / 127, np.abs(v).max(1, keepdims=True) / 127
        return np.round(u / steps[0]) * steps[0] @ (np.round(v / steps[1]) * steps[1])

    expected = decoded
    if rank:
        for name, value in recorded(splice).items():
            for layer in range(value.shape[0]):
                for row in range(ROWS):
                    expected[name][layer, row] += factors(value[layer, row] - decoded[name][layer, row])
    found = served(backbone, splice, repaired)
    for name, value in expected.items():
        # Codes of factors that lie midway may round to either side, which moves a whole direction a little.
        assert np.linalg.norm(found[name] - value) <= 0.03 * np.linalg.norm(value), name
    assert (repaired.bytes.canonical, repaired.bytes.shared) == ((size, 0) if base == "canonical" else (0, size))
    assert repaired.bytes.stored == patch_bytes(backbone.layout, TOKENS, rank, dtype)
    assert repaired.bytes.moved == size + repaired.bytes.stored
    ranks = [min(rank, TOKENS, channel.features) * channel.features for channel in backbone.layout.channels]
    assert repaired.flops == 2 * backbone.layout.layers * TOKENS * sum(ranks)


def chunk_of(backbone, splice, row):
    """The canonical of one row as the library's chunk, and its KV in context."""
    places = np.asarray(splice.tokens.positions)[row]
    spliced = {name: value[:, row, BEFORE : BEFORE + TOKENS] for name, value in splice.cache.items()}
    own = dict(kvp.to_phase_free(backbone.layout, spliced, places))
    local = places - BEFORE
    chunk = kvp.Chunk(kv=own, local=local, span=TOKENS, length=TOKENS, id="B", layout=backbone.layout, backbone="m")
    return chunk, {name: value[:, row] for name, value in splice.recorded.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4g64", "bfloat16"])
def test_a_patch_takes_the_bytes_of_the_librarys(case, dtype):
    backbone, splice, _ = case
    chunk, conditioned = chunk_of(backbone, splice, 0)
    patch = kvp.form_patch(chunk, conditioned, 3, ["A"], method="exact", dense=False, dtype=dtype)
    assert patch_bytes(backbone.layout, TOKENS, 3, dtype) == patch.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_ranks_by_energy_are_those_of_the_librarys_patch(case, dtype):
    backbone, splice, _ = case
    budget, sizes = 3000, []
    repaired = encoded_patch(
        backbone, splice, RepairBudget(kv_bytes=budget), encoding=None, dtype=dtype, ranks="by_energy"
    )
    for row in range(ROWS):
        chunk, conditioned = chunk_of(backbone, splice, row)
        patch = kvp.form_patch(
            chunk, conditioned, kvp.ByteBudget(budget, per_byte=True, relative=0), ["A"], dtype=dtype
        )
        sizes.append(patch.nbytes)
        expected = kvp.apply_patch(kvp.Placed(chunk, patch, BEFORE, ["A"]))
        for name, value in expected.items():
            found = np.asarray(repaired.cache[name])[:, row, BEFORE : BEFORE + TOKENS]
            # Two decompositions differ in their last bits, and codes of numbers midway with them.
            assert np.linalg.norm(found - value) <= 0.01 * np.linalg.norm(value)
    assert repaired.bytes.stored == round(np.mean(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "axes", "symmetric"), [(4, "kivi", False), (3, "token", True), (2, "feature", False)])
def test_a_deficit_in_few_bits_is_that_of_numpy(case, bits, axes, symmetric):
    backbone, splice, _ = case
    repaired = encoded_deficit(backbone, splice, PLENTY, bits=bits, axes=axes, symmetric=symmetric, encoding="k3v3")
    base, size = quantised_kv(backbone, canonical(backbone, splice), 3)
    delta = {name: (value - base[name]).astype(np.float32) for name, value in recorded(splice).items()}
    coded, nbytes = quantised_kv(backbone, delta, bits, None, 32, axes, symmetric)
    assert_near(served(backbone, splice, repaired), {name: base[name] + coded[name] for name in base}, 1e-3)
    assert repaired.bytes == RepairBytes(canonical=int(size), stored=int(nbytes), moved=int(size + nbytes))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "base"), [(16, "canonical"), (4, "first")])
def test_the_largest_blocks_are_kept_and_their_bytes_are_of_arrays(case, bits, base):
    backbone, splice, _ = case
    allowed, layout = 6000, backbone.layout
    repaired = block_differences(backbone, splice, RepairBudget(kv_bytes=allowed), bits=bits, base=base)
    kept, _ = quantised_kv(backbone, bases(backbone, splice, base), 16)
    costs = {}
    for channel in layout.channels:
        for length in (16, TOKENS % 16):
            numbers = np.zeros((length, channel.features), np.float32)
            block = jnp.asarray(numbers, jnp.bfloat16) if bits == 16 else pack(numbers, bits, 32, -1, symmetric=True)
            costs[channel.name, length] = block.nbytes + np.zeros(1, np.uint16).nbytes
    sizes, expected = [], {name: value.copy() for name, value in kept.items()}
    for row in range(ROWS):
        deltas = {name: value[:, row] - kept[name][:, row] for name, value in recorded(splice).items()}
        chosen = oracles.chosen_blocks(deltas, 16, allowed, costs)
        assert len(chosen) > 3
        for name, layer, place in chosen:
            part = slice(16 * place, 16 * place + 16)
            numbers = deltas[name][layer, part].astype(np.float32)
            expected[name][layer, row, part] += oracles.quantised(numbers, bits, 32, -1, True)[0]
        sizes.append(sum(costs[name, min(16, TOKENS - 16 * place)] for name, _, place in chosen))
    assert_near(served(backbone, splice, repaired), expected, 1e-3)
    assert repaired.bytes.stored == round(np.mean(sizes)) <= allowed
    master = 2 * TOKENS * layout.bytes_per_token(np.float32) // 4
    assert (repaired.bytes.canonical, repaired.bytes.shared) == ((master, 0) if base == "canonical" else (0, master))


@pytest.mark.slow
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
    assert repaired.flops == 2 * backbone.layout.layers * products
    plain = gear(backbone, splice, PLENTY, bits=3, rank=0, outliers=0)
    for name, value in quantised(backbone, splice, PLENTY, bits=3).cache.items():
        np.testing.assert_array_equal(plain.cache[name], value)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_the_average_is_one_copy_of_the_mean(case, own):
    backbone, splice, _ = case
    repaired = averaged(backbone, splice, PLENTY, precision=4, own=own)
    versions = [matrices(other.kv) for other in splice.others] + ([recorded(splice)] if own else [])
    mean = {name: np.mean([kv[name] for kv in versions], axis=0).astype(np.float32) for name in versions[0]}
    expected, nbytes = quantised_kv(backbone, mean, 4)
    assert_near(served(backbone, splice, repaired), expected)
    assert repaired.bytes == RepairBytes(shared=int(nbytes), moved=int(nbytes))
    assert repaired.bytes.per_antecedent(4) == nbytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("precision", [16, "k4v4"])
def test_anchors_are_weighted_by_the_distance_of_antecedents(case, precision):
    backbone, splice, _ = case
    allowed = 2 * KVPrecision.of(precision).nbytes(backbone.layout, TOKENS) + 300
    # The own antecedent's KV is not read: it may be new.
    new = splice.replace(recorded=None, conditioned=None)
    repaired = anchored(
        backbone, new, RepairBudget(kv_bytes=allowed), precision=precision, encoding="k8v8", temperature=0.5
    )
    base, size = quantised_kv(backbone, canonical(backbone, splice), 8)
    asked = np.asarray(splice.front.embeddings, np.float64).mean(1)
    logits, deltas, nbytes = [], [], 0
    for other in splice.others[:2]:
        apart = asked - oracles.nearest(np.asarray(other.embedding))
        logits.append(-np.sqrt(np.square(apart).sum(-1)) / 0.5)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
def test_a_pair_is_kept_whole_and_counts_its_antecedent(case, bits):
    backbone, splice, expected = case
    repaired = joint_pair(backbone, splice, PLENTY, precision=bits)
    places = np.concatenate([np.asarray(splice.front.positions), np.asarray(splice.tokens.positions)], axis=1)
    own = {name: np.asarray(value)[:, :, : BEFORE + TOKENS] for name, value in expected.items()}
    joined = matrices(kvp.to_phase_free(backbone.layout, own, places))
    coded, nbytes = quantised_kv(backbone, joined, bits)
    found = {name: np.asarray(value)[:, :, : BEFORE + TOKENS] for name, value in repaired.cache.items()}
    assert_near(matrices(kvp.to_phase_free(backbone.layout, found, places)), coded)
    assert repaired.bytes == RepairBytes(stored=int(nbytes), moved=int(nbytes))
    alone = quantised(backbone, splice, PLENTY, bits=bits).bytes.stored
    assert alone < repaired.bytes.stored
    for name, value in splice.cache.items():
        np.testing.assert_array_equal(
            np.asarray(repaired.cache[name])[:, :, BEFORE + TOKENS :], value[:, :, BEFORE + TOKENS :]
        )


# ----------------------------------------------------------------------------------------------------- guarantees


def one_row(splice, row):
    """The splice of one row alone."""
    take = lambda kv: {name: jnp.asarray(value)[:, row : row + 1] for name, value in kv.items()}
    tokens = lambda own: jax.tree.map(lambda leaf: jnp.asarray(leaf)[row : row + 1], own)
    others = tuple(OtherAntecedent(take(o.kv), jnp.asarray(o.embedding)[row : row + 1]) for o in splice.others)
    return dataclasses.replace(
        splice,
        tokens=tokens(splice.tokens),
        cache=take(splice.cache),
        slots=splice.slots[row : row + 1],
        front=tokens(splice.front),
        question=None,
        seen=None,
        hidden=None,
        conditioned=None,
        length=None if splice.length is None else splice.length[row : row + 1],
        recorded=take(splice.recorded),
        others=others,
    )


SETTINGS = {
    "quantised": {"bits": 3},
    "encoded_patch": {"rank": 4, "encoding": "k4v4"},
    "encoded_deficit": {"bits": 3},
    "gear": {"bits": 3},
    "cachegen": {"step": 1.0},
    "averaged": {"precision": 4},
    "anchored": {"precision": 4, "encoding": "k4v4"},
    "joint_pair": {"precision": 4},
    "block_differences": {"bits": 4, "encoding": "k4v4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantised", "encoded_patch", "cachegen", "anchored", "block_differences"])
def test_rows_and_padding_do_not_touch_one_another(case, name):
    backbone, splice, _ = case
    lengths = [TOKENS - 9, TOKENS]
    splice = splice.replace(length=jnp.asarray(lengths))
    budget = RepairBudget(kv_bytes=7000 if name == "block_differences" else 10**7)
    whole = ALL_FORMS[name](backbone, splice, budget, **SETTINGS[name])
    # What lies in padding is anything.
    noise = lambda kv: {n: jnp.asarray(v).at[:, 0, lengths[0] :].set(77.0) for n, v in kv.items()}
    others = tuple(OtherAntecedent(noise(other.kv), other.embedding) for other in splice.others)
    padded = splice.replace(recorded=noise(splice.recorded), others=others)
    again = ALL_FORMS[name](backbone, padded, budget, **SETTINGS[name])
    for row in range(ROWS):
        alone = ALL_FORMS[name](backbone, one_row(splice, row), budget, **SETTINGS[name])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoded_patch", "encoded_deficit", "block_differences", *SHARED_FORMS])
def test_budgets_bound_what_is_kept_and_more_is_no_worse(case, name):
    backbone, splice, _ = case
    whole = TOKENS * backbone.layout.bytes_per_token(np.float32)
    distances, sizes = [], []
    for share in (0.09, 0.13, 0.26, 0.7, 1.7):
        budget = RepairBudget(kv_bytes=int(share * whole))
        try:
            repaired = ALL_FORMS[name](backbone, splice, budget)
        except InputError:
            assert name == "anchored"
            assert share < 0.5
            continue
        kept = repaired.bytes.stored + repaired.bytes.shared
        assert kept <= share * whole
        sizes.append(kept)
        found = served(backbone, splice, repaired)
        distances.append(sum(np.square(found[n] - v).sum() for n, v in recorded(splice).items()))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 2
    if name not in ("averaged", "anchored"):
        assert distances == sorted(distances, reverse=True)
        assert distances[-1] < distances[0] / 4


def test_bytes_are_shared_over_antecedents():
    bytes = RepairBytes(canonical=100, stored=7, inputs=20, moved=999, shared=40)
    assert [bytes.per_antecedent(number) for number in (1, 4, 16)] == [167.0, 47.0, 17.0]
    with pytest.raises(InputError, match="got 0; expected at least 1"):
        bytes.per_antecedent(0)


@pytest.mark.slow
def test_forms_that_are_refused(case, unchecked):
    backbone, splice, _ = case
    for form in (averaged, anchored):
        with pytest.raises(InputError, match="others: got none"):
            form(backbone, splice.replace(others=()), PLENTY)
    for base in ("mean", "first"):
        with pytest.raises(InputError, match=r"encoded_patch\.others: got none"):
            encoded_patch(backbone, splice.replace(others=()), PLENTY, base=base)
    with pytest.raises(InputError, match="base: got 'last'"):
        encoded_deficit(backbone, splice, PLENTY, base="last")
    with pytest.raises(RankError, match="got 1000; expected 0 to"):
        encoded_patch(backbone, splice, PLENTY, rank=1000)
    for settings in ({"ranks": "by_energy", "rank": 3}, {"ranks": "greedy"}):
        with pytest.raises(InputError, match="expected 'uniform', or 'by_energy' alone"):
            encoded_patch(backbone, splice, PLENTY, **settings)
    with pytest.raises(InputError, match="ranks: got KV inside a trace"):
        jax.make_jaxpr(lambda own: encoded_patch(backbone, own, PLENTY, ranks="by_energy").cache)(splice)
    with pytest.raises(InputError, match="dtype: got 'int9'"):
        encoded_patch(backbone, splice, PLENTY, dtype="int9")
    with pytest.raises(InputError, match="dtype: got 'int32'"):
        patch_bytes(backbone.layout, TOKENS, 2, "int32")
    with pytest.raises(InputError, match="encoding: got 'k44'"):
        encoded_patch(backbone, splice, PLENTY, encoding="k44")
    with pytest.raises(InputError, match="block: got 0"):
        block_differences(backbone, splice, PLENTY, block=0)
    with pytest.raises(InputError, match="block_differences: got KV inside a trace"):
        jax.make_jaxpr(lambda own: block_differences(backbone, own, PLENTY).cache)(splice)
    with pytest.raises(InputError, match="got 1 bits"):
        block_differences(backbone, splice, PLENTY, bits=1)
    for settings in ({"bits": 4, "keys": 3, "values": 2}, {"keys": 3}):
        with pytest.raises(InputError, match="expected bits, or keys and values"):
            quantised(backbone, splice, PLENTY, **settings)
    with pytest.raises(InputError, match=r"gear\.budget: got 100 bytes; expected bits of"):
        gear(backbone, splice, RepairBudget(kv_bytes=100))
    with pytest.raises(RankError, match=r"gear\.rank: got 99"):
        gear(backbone, splice, PLENTY, rank=99)
    with pytest.raises(InputError, match=r"gear\.bits: got 16"):
        gear(backbone, splice, PLENTY, bits=16)
    with pytest.raises(InputError, match=r"outliers: got 0\.9"):
        gear(backbone, splice, PLENTY, outliers=0.9)
    for settings in ({"step": 0.0}, {"ratios": ()}, {"group": 0}):
        with pytest.raises(InputError, match="expected positive numbers"):
            cachegen(backbone, splice, PLENTY, **settings)
    with pytest.raises(InputError, match=r"cachegen\.budget: got 10 bytes"):
        cachegen(backbone, splice, RepairBudget(kv_bytes=10))
    with pytest.raises(InputError, match="inside a trace"):
        jax.make_jaxpr(lambda own: cachegen(backbone, own, PLENTY).cache)(splice)
    with pytest.raises(InputError, match="temperature: got 0"):
        anchored(backbone, splice, PLENTY, temperature=0)
    with pytest.raises(InputError, match="front: got None"):
        anchored(backbone, splice.replace(front=None), PLENTY)
    unknown = OtherAntecedent(splice.others[1].kv)
    with pytest.raises(InputError, match=r"others\[1\].embedding: got None"):
        anchored(backbone, splice.replace(others=(splice.others[0], unknown)), PLENTY)
    with pytest.raises(InputError, match="front: got None"):
        joint_pair(backbone, splice.replace(front=None), PLENTY)
    for form in SHARED_FORMS.values():
        with pytest.raises(InputError, match="expected bytes, or a share"):
            form(backbone, splice, RepairBudget(tokens=2))
        with pytest.raises(InputError, match="splice of one chunk"):
            form(backbone, splice.replace(chunks=((0, TOKENS),)), PLENTY)
