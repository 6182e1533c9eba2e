"""Mean bases, shared directions and orbit patches are those of their inputs, and are refused for any others."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOperatorIssue=false

import dataclasses
import itertools

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, identity
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from kvpatch_jax.patching import Basis, check_in_basis, fit_basis, form_in_basis, mean_base, with_basis
from kvpatch_jax.store import ChunkStore
from tests.shared.arrays import placed
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, deficit_of, kv_of, placed_in_float64

CHUNK = chunk_of("gqa", length=20, content="what it shows")
KVS = [conditioned_of(CHUNK, seed=seed) for seed in range(3)]
BEHIND = [[Member(name, f"content {name}")] for name in "XYZ"]


def test_a_mean_base_is_the_mean_of_all_antecedents_without_padding():
    base = mean_base(CHUNK, iter(KVS), BEHIND)
    batch = dataclasses.replace(CHUNK, kv=kv_of(LAYOUTS["gqa"], 24, batch=(2,)))
    kvs = [kv_of(LAYOUTS["gqa"], 24, seed=seed, batch=(2,)) for seed in (3, 4)]
    for found, inputs in ((base, KVS), (mean_base(batch, kvs, [["X"], ["Y"]]), kvs)):
        for name, value in found.kv.items():
            wanted = np.mean([np.asarray(kv[name], np.float64) for kv in inputs], axis=0)
            np.testing.assert_allclose(value[..., :20, :, :], wanted[..., :20, :, :], atol=1e-6)
            assert not np.asarray(value)[..., 20:, :, :].any()
    assert (base.id, base.content, base.length, base.places) == (CHUNK.id, CHUNK.content, 20, CHUNK.places)


def test_names_are_of_the_antecedents_in_any_order():
    base = mean_base(CHUNK, KVS, BEHIND)
    assert mean_base(CHUNK, KVS[::-1], BEHIND[::-1]).lead == base.lead
    behind_a_lead = dataclasses.replace(CHUNK, lead="0" * 32)
    others = [
        mean_base(CHUNK, KVS[:2], BEHIND[:2]),
        mean_base(CHUNK, [*KVS, KVS[0]], [*BEHIND, BEHIND[0]]),
        mean_base(CHUNK, KVS, [["X"], *BEHIND[1:]]),
        mean_base(CHUNK, KVS, [[Member("X", "another")], *BEHIND[1:]]),
        mean_base(behind_a_lead, KVS, BEHIND),
    ]
    leads = [other.lead for other in [base, *others]]
    assert len(set(leads)) == len(leads)
    assert all(lead is not None and len(lead) == 32 for lead in leads)
    # An id without a content does not say what was read.
    first, second = (mean_base(CHUNK, [kv], [["X"]]) for kv in KVS[:2])
    assert first.lead != second.lead


def behind(seed: int, chunk: kvp.Chunk = CHUNK) -> dict:
    """Deficits within four directions of each layer that all seeds share."""
    rng, shared, kv = np.random.default_rng(seed), np.random.default_rng(99), {}
    for channel in chunk.layout.channels:
        v = shared.standard_normal((chunk.layout.layers, 4, channel.features))
        u = rng.standard_normal((chunk.layout.layers, chunk.tokens, 4)) * np.array([3, 2, 1, 0.5])
        value = np.asarray(chunk.kv[channel.name])
        kv[channel.name] = placed(value + (u @ v).reshape(value.shape).astype(np.float32))
    return kv


@pytest.fixture(scope="module")
def basis() -> Basis:
    return fit_basis([(CHUNK, behind(seed)) for seed in range(3)], 4)


def test_a_basis_has_the_directions_that_deficits_share(basis):
    """Against the singular vectors of all deficits one above the other, in float64."""
    for name, found in basis.directions.items():
        stacked = np.concatenate([deficit_of(CHUNK, behind(seed))[name] for seed in range(3)], axis=1)
        for layer in range(3):
            wanted = np.linalg.svd(stacked[layer])[2][:4]
            np.testing.assert_allclose(np.abs(np.asarray(found[layer]) @ wanted.T), np.eye(4), atol=1e-3)


def test_a_deficit_that_was_not_fitted_is_recovered_by_coefficients_alone(basis):
    unseen = behind(17)
    patch = form_in_basis(CHUNK, unseen, basis, ["A"])
    found = kvp.apply_patch(CHUNK, patch, 5, ["A"])
    for name, value in placed_in_float64(CHUNK.layout, unseen, CHUNK.local, 5).items():
        np.testing.assert_allclose(found[name][:, :20], value[:, :20], atol=1e-4)
    assert patch.nbytes == 2 * 3 * 24 * 4 * 4
    assert patch.factors["k"][1] is basis.directions["k"]  # no copy
    assert kvp.quantise(patch, "int8").nbytes == 2 * 3 * 24 * 4 + 2 * 3 * 4 * 4  # and scales
    assert kvp.keep_layers(patch, (1,)).nbytes == patch.nbytes // 3


def test_smaller_patches_stay_in_their_basis(basis):
    patch = form_in_basis(CHUNK, behind(17), basis, [Member("A", "one")], 4)
    small = [kvp.truncate(patch, 2), kvp.keep_layers(patch, (0, 2)), patch.pad(32), kvp.quantise(patch, "int8")]
    small += [kvp.keep_layers(form_in_basis(CHUNK, behind(17), basis, ["A"], 3), [1, 2])]
    for own in small:
        check_in_basis(own, basis)
        assert own.metadata.basis == basis.digest
        assert with_basis(own, basis).ranks == own.ranks
    assert small[0].metadata.antecedent == Antecedent.of(Member("A", "one"))
    correction = kvp.correction_patch(CHUNK, patch, behind(18), 4, ["C"])
    assert kvp.update_patch(patch, correction).metadata.basis is None


def test_another_basis_is_refused(basis):
    other = fit_basis([(CHUNK, conditioned_of(CHUNK))], 4)
    patch = form_in_basis(CHUNK, behind(17), basis, ["A"], 4)
    assert other.digest != basis.digest
    with pytest.raises(PatchMismatchError, match=rf"formed in basis {basis.digest}; expected {other.digest}"):
        with_basis(patch, other)
    moved = {name: (u, -v) for name, (u, v) in patch.factors.items()}
    with pytest.raises(PatchMismatchError, match="directions of 'k'"):
        check_in_basis(kvp.Patch(moved, patch.metadata), basis)
    deep = chunk_of("blocked")
    with pytest.raises(PatchMismatchError, match="basis: got backbone"):
        form_in_basis(deep, conditioned_of(deep), basis, ["A"], 4)


def test_what_makes_no_base_and_no_basis_is_refused(basis, unchecked: None):
    pair, packed = (CHUNK, behind(0)), kvp.encode_chunk(CHUNK, "k4v4")
    short = {name: np.zeros((3, 2, 2, 16), np.float32) for name in "kv"}
    for error, call in (
        (InputError, lambda: mean_base(CHUNK, KVS, BEHIND[:2])),
        (InputError, lambda: mean_base(packed, KVS, BEHIND)),
        (ShapeError, lambda: mean_base(CHUNK, [short], BEHIND[:1])),
        (InputError, lambda: fit_basis([], 4)),
        (InputError, lambda: fit_basis([pair], 33)),
        (ShapeError, lambda: Basis({"k": np.zeros((3, 4, 31))}, CHUNK.layout, "tiny")),
        (InputError, lambda: form_in_basis(CHUNK, behind(0), basis, ["A"], 0)),
    ):
        with pytest.raises(error, match="got"):
            call()
    assert fit_basis([pair], {"k": 2}).ranks == {"k": 2}


def test_eviction_takes_patches_before_their_basis(basis, tmp_path):
    """Though the basis was put first."""
    with ChunkStore(tmp_path, memory=0) as store:
        store.put_basis(basis)
        store.put_patches([form_in_basis(CHUNK, behind(seed), basis, [f"A{seed}"], 4) for seed in range(3)])
        held = store.usage().bytes
    with ChunkStore(tmp_path, memory=0, root_budget=held) as store:
        store.put_encoder("other", "tiny", np.zeros(8, np.float32))
        assert store.patch_count(CHUNK.id, "tiny") < 3
        assert store.get_basis(basis.digest, CHUNK.layout, "tiny") is not None


FULL = chunk_of("gqa")
ONE, TWO = Member("A", "one"), Member("B", "two")
BARE = identity("A", "bare")


@pytest.mark.parametrize("encoding", [None, "k3v3g8"])
def test_an_orbit_is_the_mean_over_its_orders(encoding):
    """Against the mean by hand, at full rank, at an order that was never prefilled."""
    chunk = FULL if encoding is None else kvp.encode_chunk(FULL, encoding)
    members, unseen = [ONE, TWO, Member("C")], (2, 1, 0)
    orders = [order for order in itertools.permutations(range(3)) if order != unseen]
    conditioned = [conditioned_of(FULL, rank=1, seed=seed) for seed in range(len(orders))]
    sums = None
    for order, kv in zip(orders, conditioned, strict=True):
        sums = kvp.accumulate(sums, kv, chunk, [members[place] for place in order])
    patch = kvp.orbit_patch(sums, 24, method="exact", dtype="float32")
    assert patch.metadata.orbit
    assert patch.metadata.antecedent == Antecedent(tuple(members))
    assert patch.metadata.chunk.encoding == (None if encoding is None else "k3v3g8")
    mean = {name: np.mean([np.asarray(kv[name], np.float64) for kv in conditioned], axis=0) for name in FULL.kv}
    found = kvp.apply_patch(chunk, patch, 5, [members[place] for place in unseen])
    for name, value in placed_in_float64(FULL.layout, mean, FULL.local, 5).items():
        np.testing.assert_allclose(found[name], value, atol=1e-4)


def test_an_orbit_is_of_one_set_and_one_chunk():
    first, second = conditioned_of(FULL, 2, 1), conditioned_of(FULL, 2, 2)
    sums = kvp.accumulate(None, first, FULL, [ONE, TWO])
    for wrong in ([ONE], ["A", "B"], [ONE, Member("B", "three")], [ONE, TWO._replace(identity=BARE)]):
        with pytest.raises((PatchMismatchError, InputError), match=r"antecedent.*expected"):
            kvp.accumulate(sums, second, FULL, wrong)
    short = chunk_of("gqa", tokens=1, content=FULL.content)
    for chunk, error in ((short, PatchMismatchError), (FULL.pad(32), ShapeError)):
        kv = {name: np.asarray(value) for name, value in chunk.kv.items()}
        with pytest.raises(error, match=r"accumulate: got"):
            kvp.accumulate(sums, kv, chunk, [ONE, TWO])
    patch = kvp.orbit_patch(kvp.accumulate(sums, second, FULL, [TWO, ONE]), 4)
    for antecedent in ([TWO, ONE], ["B", "A"], [ONE, "B"]):
        kvp.apply_patch(FULL, patch, 0, antecedent)
    for antecedent in ([TWO], ["A", "A"], [Member("B", "x"), ONE], [ONE, TWO._replace(identity=BARE)]):
        with pytest.raises(StalePatchError, match="formed behind any ordering of"):
            kvp.apply_patch(FULL, patch, 0, antecedent)
    with pytest.raises(InputError, match="rank 0"):
        kvp.orbit_patch(sums, 0)
