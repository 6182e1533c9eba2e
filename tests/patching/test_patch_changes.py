"""Removed, corrected, cut and rounded patches are those that forming them anew gives, those of transitions too.

The oracles are NumPy's decomposition and differences in float64.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalMemberAccess=false

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import check_factors
from kvpatch_jax.core import RaggedFactors, is_packed
from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import fit_basis, mean_base
from tests.shared import transition_cases as hybrid
from tests.shared.operator_cases import chunk_of, conditioned_of, correction_of, deficit_of, placed_in_float64
from tests.shared.transition_cases import LAYOUT, LAYOUTS, LINEAR, PARTS, PLAIN, TOKENS, close, drawn

A, CHANGED = ("A1", "A2"), ("A1", "A3")
RANK = 4
"""Of most patches here, which are thus formed and applied by the same programs."""
EXACT = {"method": "exact", "dense": False}


@pytest.fixture(scope="module")
def chunk() -> kvp.Chunk:
    return chunk_of("gqa")


@pytest.fixture(scope="module")
def patch(chunk) -> kvp.Patch:
    return kvp.form_patch(chunk, conditioned_of(chunk), RANK, A, **EXACT)


def error(found: dict, expected: dict) -> float:
    return max(float(np.abs(np.asarray(found[name]) - np.asarray(expected[name])).max()) for name in expected)


def best_error(delta: np.ndarray, rank: int) -> float:
    """The least error that factors of a rank have, over all layers."""
    return float(np.sqrt((np.linalg.svd(delta, compute_uv=False)[:, rank:] ** 2).sum()))


# ------------------------------------------------------------------------------------------------------- removal


def test_a_removal_patch_turns_conditioned_kv_into_the_target(chunk):
    """Inside a program too."""
    conditioned, target = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    patch = kvp.removal_patch(chunk, target, conditioned, RANK, ("A2",), A, **EXACT)
    assert (patch.metadata.base, patch.metadata.base_antecedent.ids) == ("conditioned", A)
    expected = placed_in_float64(chunk.layout, target, chunk.local, 3)
    serve = lambda base: kvp.apply_patch(chunk, patch, 3, ("A2",), base=base, base_antecedent=A)
    for found in (serve(conditioned), jax.jit(serve)(dict(conditioned))):
        assert error(found, expected) < 2e-5


@pytest.mark.parametrize("encoding", [None, "k3v3g8"])
def test_a_removal_from_the_canonical_is_an_ordinary_patch(chunk, encoding):
    """Conditioned on nothing; said to be conditioned on something it is a mistake. Of an encoded base its numbers."""
    base = chunk if encoding is None else kvp.encode_chunk(chunk, encoding)
    alone = {name: np.array(value) for name, value in kvp.cache.decode_chunk(base).kv.items()}
    target = conditioned_of(base)
    patch = kvp.removal_patch(base, target, alone, 24, ("B",), (), method="exact", dtype="float32")
    assert (patch.metadata.base, patch.metadata.base_antecedent) == ("canonical", None)
    for name, found in correction_of(patch).items():
        np.testing.assert_allclose(found, deficit_of(base, target)[name], atol=1e-4)
    with pytest.raises(InputError, match=r"removal_patch: got the canonical of .* as its KV behind \('A',\)"):
        kvp.removal_patch(base, target, alone, 4, ("B",), ("A",))
    other = {**alone, "k": alone["k"] + 1}
    assert kvp.removal_patch(base, target, other, 24, A, (), method="exact").metadata.base == "conditioned"


# --------------------------------------------------------------------------------------------------- corrections


@pytest.mark.parametrize(("word", "dtype"), [(None, "float32"), ("k3v3g8", "int8")])
def test_an_updated_patch_is_the_best_of_its_rank_behind_the_changed_antecedent(chunk, word, dtype):
    """In the dtype of the patch, and on the numbers that the base decodes to."""
    chunk = chunk if word is None else kvp.encode_chunk(chunk, word)
    conditioned, changed = conditioned_of(chunk), conditioned_of(chunk, seed=11)
    patch = kvp.form_patch(chunk, conditioned, RANK, A, dtype=dtype, **EXACT)
    correction = kvp.correction_patch(chunk, patch, changed, RANK, CHANGED, dtype=dtype, **EXACT)
    updated = kvp.update_patch(patch, correction)
    metadata = updated.metadata
    assert (metadata.chunk, metadata.antecedent.ids, metadata.base) == (patch.metadata.chunk, CHANGED, "canonical")
    assert (metadata.corrects, metadata.base_antecedent, metadata.errors) == (None, None, None)
    for name, (u, v) in patch.factors.items():
        for leaf, other in zip((u, v), updated.factors[name], strict=True):
            assert (type(leaf), leaf.nbytes) == (type(other), other.nbytes)
    rounding = 1e-5 if dtype == "float32" else 0.05
    for name, delta in deficit_of(chunk, changed).items():
        total = correction_of(patch)[name] + correction_of(correction)[name]
        least = best_error(delta - correction_of(patch)[name], RANK)
        assert np.linalg.norm(total - delta) <= 1.001 * least + rounding * np.linalg.norm(delta)
        left = np.linalg.norm(correction_of(updated)[name] - total)
        assert left <= 1.001 * best_error(total, RANK) + rounding * np.linalg.norm(delta)
    kvp.Placed(chunk, updated, 3, CHANGED)  # it belongs there


def uneven(patch: kvp.Patch, ranks: tuple[int, ...]) -> tuple[kvp.Patch, kvp.Patch]:
    """A patch cut to a rank in each layer: as ragged factors, and with zeros in place of directions."""
    factors, masked, most = {}, {}, max(ranks)
    for name, (u, v) in patch.factors.items():
        u, v = np.asarray(u), np.asarray(v)
        rows, taken = np.full((len(u), most), sum(ranks), np.int32), np.arange(most) < np.array(ranks)[:, None]
        rows[taken] = np.arange(sum(ranks))
        left = np.concatenate([u[layer, :, :rank].T for layer, rank in enumerate(ranks)])
        right = np.concatenate([v[layer, :rank] for layer, rank in enumerate(ranks)])
        factors[name] = RaggedFactors(jnp.asarray(left), jnp.asarray(right), jnp.asarray(rows))
        masked[name] = (jnp.asarray(u * taken[:, None]), jnp.asarray(v))
    return kvp.Patch(factors, patch.metadata), kvp.Patch(masked, patch.metadata)


def test_an_update_takes_channels_that_are_dense_or_were_not_there(chunk):
    conditioned, changed = conditioned_of(chunk, 2), conditioned_of(chunk, 2, seed=2)
    whole = kvp.form_patch(chunk, conditioned, 24, A)
    patch = kvp.quantise(kvp.Patch({"k": whole.factors["k"]}, whole.metadata), jnp.int8)
    correction = kvp.correction_patch(chunk, patch, changed, RANK, ("C",), **EXACT)
    updated = kvp.update_patch(patch, correction)
    assert is_packed(updated.factors["k"])
    assert all(map(is_packed, updated.factors["v"]))
    found = kvp.apply_patch(chunk, updated, 0, ("C",))
    assert error(found, placed_in_float64(chunk.layout, changed, chunk.local, 0)) < 0.05


def test_a_correction_is_folded_into_the_patch_that_it_corrects_and_no_other(chunk, patch):
    conditioned = conditioned_of(chunk, seed=3)
    correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), RANK, CHANGED, **EXACT)
    running = kvp.accumulate(None, conditioned, chunk, A)
    others = [
        kvp.form_patch(chunk, conditioned, RANK, A, **EXACT),
        kvp.truncate(patch, 2),
        kvp.quantise(patch, jnp.bfloat16),
        kvp.orbit_patch(running, RANK, **EXACT),
        kvp.removal_patch(chunk, conditioned, conditioned_of(chunk, seed=4), RANK, A, ("A0", *A), **EXACT),
        kvp.keep_layers(patch, (1, 2)),
        kvp.Patch(patch.factors, dataclasses.replace(patch.metadata, orbit=True)),
        kvp.update_patch(patch, correction),
    ]
    for other in others:
        with pytest.raises(PatchMismatchError, match=r"(?s)update.*expected"):
            kvp.update_patch(other, correction)
    for other in (others[4], others[5], correction):
        with pytest.raises(PatchMismatchError, match=r"correction_patch.*expected 'canonical', all 3"):
            kvp.correction_patch(chunk, other, conditioned, 4, CHANGED)
    kvp.update_patch(pickle.loads(pickle.dumps(patch)), correction)
    unmarked = kvp.Patch(correction.factors, dataclasses.replace(correction.metadata, corrects=None))
    with pytest.raises(PatchMismatchError, match="None"):
        kvp.update_patch(patch, unmarked)
    with pytest.raises(InputError, match="rank 9"):
        kvp.update_patch(patch, correction, 9)


# ------------------------------------------------------------------------------------------------ smaller patches


def test_a_truncated_patch_is_the_one_of_lower_rank(chunk, patch):
    deficit = deficit_of(chunk, conditioned_of(chunk))
    for name, found in correction_of(kvp.truncate(patch, 3)).items():
        np.testing.assert_allclose(found, best(deficit[name][:, :, None], 3)[:, :, 0], atol=1e-5)
    cut = kvp.truncate(patch, {"k": 2})
    assert (cut.ranks, cut.metadata.errors) == ({"k": 2, "v": RANK}, None)
    for rank, kind, message in ((5, InputError, "rank 5"), (0, InputError, "rank 0"), ({"q": 2}, LayoutError, "'q'")):
        with pytest.raises(kind, match=message):
            kvp.truncate(patch, rank)


def test_fewer_layers_have_the_rows_of_those_layers(chunk, patch):
    deep = kvp.keep_layers(patch, (2, 1))
    assert (deep.metadata.layers, deep.nbytes * 3) == ((1, 2), patch.nbytes * 2)
    for name, (u, v) in deep.factors.items():
        np.testing.assert_array_equal(u, patch.factors[name][0][1:])
        np.testing.assert_array_equal(v, patch.factors[name][1][1:])
    formed = kvp.form_patch(chunk, conditioned_of(chunk), RANK, A, **EXACT, layers=[2, 1, 2])
    assert formed.metadata == deep.metadata
    for name, correction in correction_of(formed).items():
        np.testing.assert_allclose(correction, correction_of(deep)[name], atol=1e-5)
    middle = kvp.keep_layers(deep, [1])
    np.testing.assert_array_equal(middle.factors["k"][0][0], patch.factors["k"][0][1])
    found, bare, full = (kvp.apply_patch(chunk, own, 3, A) for own in (middle, None, patch))
    for name in bare:
        np.testing.assert_array_equal(found[name][::2], bare[name][::2])
        np.testing.assert_allclose(found[name][1], full[name][1], atol=1e-6)
    for layers in ((0,), (7,), ()):
        with pytest.raises(InputError, match="layers"):
            kvp.keep_layers(deep, layers)


@pytest.mark.parametrize(
    ("dtype", "share"), [("bfloat16", 0.6), ("int8", 0.4), ("float8_e4m3fn", 0.4), ("int4", 0.2), ("int6gall", 0.3)]
)
@pytest.mark.parametrize("size", [1e-6, 1e9])
def test_fewer_bits_are_scaled_whatever_the_range(patch, dtype: str, share: float, size: float):
    """Each product of rounded factors is off by a part of the strongest direction."""
    scaled = {name: (np.asarray(u) * np.float32(size), np.asarray(v)) for name, (u, v) in patch.factors.items()}
    large = kvp.Patch(scaled, patch.metadata)
    few = kvp.quantise(large, dtype)
    assert few.nbytes < share * patch.nbytes
    assert (few.ranks, few.metadata.errors) == (patch.ranks, None)
    bar = {"int4": 0.2, "float8_e4m3fn": 0.08, "int6gall": 0.05}.get(dtype, 0.02)
    for own in (few, kvp.quantise(kvp.quantise(large, "int8"), dtype)):
        for name, value in correction_of(own).items():
            exact = correction_of(large)[name]
            assert 0 < np.linalg.norm(value - exact) < bar * np.linalg.norm(exact)


def test_factors_beyond_a_dtype_are_refused(chunk):
    conditioned = conditioned_of(chunk, size=1e6)
    patch = kvp.form_patch(chunk, conditioned, RANK, A, **EXACT)
    for call in (
        lambda: kvp.quantise(patch, jnp.float16),
        lambda: kvp.form_patch(chunk, conditioned, RANK, A, **EXACT, dtype=jnp.float16),
    ):
        with pytest.raises(NotFiniteError, match=r"float16.*expected finite"):
            call()


def test_a_patch_with_a_rank_for_each_layer_is_cut_as_one_with_zeros(chunk, patch):
    ragged, whole = uneven(patch, (4, 2, 0))
    assert ragged.factors["k"].ranks == (4, 2, 0)
    assert ragged.ranks == {"k": RANK, "v": RANK}
    found, wanted = (kvp.apply_patch(chunk, own, 9, A) for own in (ragged, whole))
    assert error(found, wanted) < 3e-6
    found, wanted = (correction_of(kvp.keep_layers(kvp.truncate(own, 3), (0, 1))) for own in (ragged, whole))
    assert error(found, wanted) < 3e-6
    # An update keeps the rank of each layer, here all of the change in the first one.
    changed = conditioned_of(chunk, size=0.5)
    correction = kvp.correction_patch(chunk, ragged, changed, RANK, CHANGED, **EXACT)
    updated = kvp.update_patch(ragged, correction)
    assert {own.ranks for own in updated.factors.values()} == {(4, 2, 0)}
    wanted = placed_in_float64(chunk.layout, changed, chunk.local, 9)
    for name, value in kvp.apply_patch(chunk, updated, 9, CHANGED).items():
        np.testing.assert_allclose(value[0], wanted[name][0], atol=5e-5)
    few = kvp.quantise(ragged, "int4")
    assert few.nbytes < ragged.nbytes / 3
    wider = few.pad(chunk.tokens + 9).factors["k"].u
    np.testing.assert_array_equal(np.asarray(wider)[:, : chunk.tokens], np.asarray(few.factors["k"].u))


# -------------------------------------------------------------------------------------------------------- hybrid chunks


LOCAL = np.arange(TOKENS, dtype=np.float32)
WHOLE = {"rows": 99, "transition": 99}


def best(delta: np.ndarray, rank: int) -> np.ndarray:
    """The nearest matrices of a rank, [..., T, F]."""
    u, singular, v = np.linalg.svd(delta.reshape(*delta.shape[:-2], -1), full_matrices=False)
    return ((u[..., :rank] * singular[..., None, :rank]) @ v[..., :rank, :]).reshape(delta.shape)


def placed_kv(chunk, patch=None, start=5, **options):
    return {name: np.asarray(value) for name, value in kvp.apply_patch(chunk, patch, start, **options).items()}


def parts_close(found, wanted, bar: float = 2e-6) -> None:
    """Compares the parts of a transition alone."""
    wanted = {name: np.asarray(value, np.float64) for name, value in wanted.items() if name in PARTS}
    close({name: value for name, value in found.items() if name in PARTS}, wanted, bar)


@pytest.mark.parametrize("name", ["tail", pytest.param("no tail", marks=pytest.mark.nightly)])
def test_a_whole_patch_gives_the_conditioned_transition(name: str):
    layout = LAYOUTS[name]
    chunk, target = hybrid.chunk_of(layout, length=5), drawn(layout, seed=1)
    patch = kvp.form_patch(chunk, target, WHOLE, A)
    assert patch.tokens == TOKENS
    assert patch.ranks["map"] is None
    found = placed_kv(chunk, patch, antecedent=A)
    parts_close(found, target)
    rows = kvp.to_engine(layout, target, LOCAL, 5)
    for row in "kv":
        assert np.abs(found[row][:, :5] - np.asarray(rows[row])[:, :5]).max() < 2e-5
    # No patch is one rotation, and a patch of rows alone leaves every bit of the transition.
    blind, alone = (
        placed_kv(chunk),
        placed_kv(chunk, kvp.form_patch(chunk, target, {"rows": 2}, A, **EXACT), antecedent=A),
    )
    for part in layout.parts:
        assert (blind[part.name] == chunk.kv[part.name]).all()
        assert (alone[part.name] == chunk.kv[part.name]).all()


def test_low_ranks_are_the_best_of_each_part():
    chunk, target = hybrid.chunk_of(), drawn(seed=1)
    patch = kvp.form_patch(chunk, target, 4, A, **EXACT)
    # More than the rows of a part, fewer than the tokens.
    assert patch.ranks == {"k": 4, "v": 4, "map": 4, "state": 4, "tail": 3}
    for name, found in correction_of(patch).items():
        wanted = best(target[name].astype(np.float64) - chunk.kv[name], 4).reshape(found.shape)
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max(), name


def test_operations_on_patches_keep_what_a_transition_has():
    chunk, target, other = hybrid.chunk_of(length=5), drawn(seed=1), drawn(seed=2)
    patch = kvp.form_patch(chunk, target, 4, A, **EXACT)
    padded = patch.pad(9)
    assert padded.tokens == 9
    assert all(padded.factors[n] is patch.factors[n] for n in PARTS)
    cut = kvp.truncate(patch, {"transition": 1})
    assert cut.ranks == {"k": 4, "v": 4, "map": 1, "state": 1, "tail": 1}
    deep = kvp.keep_layers(patch, (3, 4))
    assert {name: np.shape(deep.factors[name][0])[0] for name in deep.factors} == dict.fromkeys(LAYOUT.names, 1)
    for name in PARTS:
        assert (correction_of(deep)[name] == correction_of(patch)[name][2:]).all()
        rounded = correction_of(kvp.quantise(patch, "int8"))[name]
        assert 0 < np.abs(rounded - correction_of(patch)[name]).max() < 0.05

    # Behind another antecedent: a correction, folded in, is the patch formed there.
    small = {n: target[n] + 0.1 * other[n] for n in LAYOUT.names}
    correction = kvp.correction_patch(chunk, patch, small, 99, CHANGED)
    folded = kvp.update_patch(patch, kvp.quantise(correction, "float32"), WHOLE)
    found = placed_kv(chunk, folded, antecedent=CHANGED)
    parts_close(found, small, 1e-5)
    # The mean over orders, and a survivor whose antecedent left.
    acc = kvp.accumulate(kvp.accumulate(None, target, chunk, ("A", "C")), other, chunk, ("C", "A"))
    mean = placed_kv(chunk, kvp.orbit_patch(acc, WHOLE), antecedent=("C", "A"))
    parts_close(mean, {n: (target[n].astype(float) + other[n]) / 2 for n in PARTS}, 1e-5)
    gone = kvp.removal_patch(chunk, other, target, WHOLE, ("B",), ("A", "B"))
    behind = placed_kv(chunk, gone, antecedent=("B",), base=target, base_antecedent=("A", "B"))
    parts_close(behind, other, 1e-5)


def test_bases_have_a_transition_too():
    chunk, one, two = hybrid.chunk_of(length=5), drawn(seed=1), drawn(seed=2)
    mean = mean_base(chunk, [one, two], [A, CHANGED])
    parts_close(mean.kv, {n: (one[n].astype(float) + two[n]) / 2 for n in PARTS})
    assert not np.asarray(mean.kv["k"])[:, 5:].any()


def test_what_fits_no_transition_is_refused(unchecked):
    chunk, target = hybrid.chunk_of(), drawn(seed=1)
    patch = kvp.form_patch(chunk, target, 4, A, **EXACT)
    with pytest.raises(LayoutError, match="basis"):
        fit_basis([(chunk, target)], 2)
    with pytest.raises(NotFiniteError, match="'map'"):
        kvp.form_patch(chunk, target | {"map": target["map"] * np.nan}, 2, A)
    u, v = patch.factors["state"]
    for factors in ({"state": (u[:, :5], v)}, {"tail": target["tail"][:, :2]}, {"k": target["state"]}):
        with pytest.raises(ShapeError, match="patch: got"):
            check_factors(factors, patch.metadata)
    other = PLAIN.with_transitions(LINEAR, 3, 6, 4, tail=(2, 10))
    wrong = dataclasses.replace(chunk, kv=target | {"tail": target["tail"][:, 1:]}, layout=other, content=chunk.content)
    with pytest.raises(PatchMismatchError, match="got layout"):
        kvp.apply_patch(wrong, patch, 0, A)
