"""Directions that patches share: fitted, formed in, counted, stored once, refused for one another."""
# pyright: reportArgumentType=false, reportOperatorIssue=false

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, patch_digest
from kvpatch_jax.errors import InputError, LayoutError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import Basis, check_in_basis, fit_basis, form_in_basis, with_basis
from kvpatch_jax.store import ChunkStore, PatchKey
from tests.shared.operator_cases import chunk_of, conditioned_of

CHUNK = chunk_of("gqa", length=20)
SERVED = PatchKey(CHUNK.id, "tiny", ["A"])


def behind(seed: int, chunk: kvp.Chunk = CHUNK) -> dict:
    """Deficits within four directions of each layer that all seeds share."""
    own, shared = np.random.default_rng(seed), np.random.default_rng(99)
    found = {}
    for channel in chunk.layout.channels:
        v = shared.standard_normal((chunk.layout.layers, 4, channel.features))
        u = own.standard_normal((chunk.layout.layers, chunk.tokens, 4)) * np.array([3, 2, 1, 0.5])
        value = np.asarray(chunk.kv[channel.name])
        found[channel.name] = jnp.asarray(value + (u @ v).reshape(value.shape).astype(np.float32))
    return found


@pytest.fixture(scope="module")
def basis() -> Basis:
    return fit_basis([(CHUNK, behind(seed)) for seed in range(3)], 4)


def test_a_basis_is_what_the_deficits_have_in_common(basis):
    """Against the singular vectors of all deficits one above the other, in float64."""
    for name, found in basis.directions.items():
        rows = [
            np.asarray(behind(seed)[name] - CHUNK.kv[name], np.float64)[:, :20].reshape(3, 20, 32) for seed in range(3)
        ]
        for layer in range(3):
            wanted = np.linalg.svd(np.concatenate([each[layer] for each in rows]))[2][:4]
            np.testing.assert_allclose(np.abs(np.asarray(found[layer]) @ wanted.T), np.eye(4), atol=1e-3)


def test_a_deficit_that_was_not_seen_is_recovered(basis):
    unseen = behind(17)
    patch = form_in_basis(CHUNK, unseen, basis, ["A"], 4)
    found = kvp.apply_patch(CHUNK, patch, 5, ["A"])
    wanted = kvp.to_engine(CHUNK.layout, unseen, CHUNK.local, 5)
    for name in wanted:
        np.testing.assert_allclose(found[name][:, :20], wanted[name][:, :20], atol=1e-4)
    pool = kvp.pool.splice(
        kvp.pool.make_pool(CHUNK.layout, 6, 8, jnp.float32), np.arange(24), kvp.Placed(CHUNK, patch, 5, ["A"])
    )
    np.testing.assert_allclose(pool["k"].reshape(3, -1, 2, 16)[:, :20], found["k"][:, :20], atol=1e-6)


def test_bytes_are_those_of_the_coefficients(basis):
    patch = form_in_basis(CHUNK, behind(17), basis, ["A"], 4)
    assert patch.nbytes == 2 * 3 * 24 * 4 * 4
    assert kvp.quantise(patch, jnp.int8).nbytes == 2 * 3 * 24 * 4 + 2 * 3 * 4 * 4  # and scales
    assert patch.factors["k"][1] is basis.directions["k"]  # no copy
    assert kvp.keep_layers(patch, (1,)).nbytes == patch.nbytes // 3
    assert kvp.truncate(patch, 2).nbytes == patch.nbytes // 2


def test_a_rank_may_be_of_numpy(basis, unchecked):
    assert form_in_basis(CHUNK, behind(17), basis, ["A"], np.int64(2)).ranks == {"k": 2, "v": 2}


def test_smaller_patches_stay_in_their_basis(basis):
    patch = form_in_basis(CHUNK, behind(17), basis, [Member("A", "one")], 4)
    small = [kvp.truncate(patch, 2), kvp.keep_layers(patch, (0, 2)), patch.pad(32)]
    small += [kvp.quantise(patch, dtype) for dtype in ("int8", "float8_e4m3fn", "bfloat16")]
    small += [kvp.keep_layers(form_in_basis(CHUNK, behind(17), basis, ["A"], 3), [1, 2])]
    for each in small:
        check_in_basis(each, basis)
        assert each.metadata.basis == basis.digest
        assert with_basis(each, basis).ranks == each.ranks
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
    with pytest.raises(PatchMismatchError, match="basis: got backbone"):
        form_in_basis(dataclasses.replace(CHUNK, backbone="other"), behind(17), basis, ["A"], 4)
    deep = chunk_of("blocked")
    with pytest.raises(PatchMismatchError, match="basis: got backbone"):
        form_in_basis(deep, conditioned_of(deep), basis, ["A"], 4)


def test_what_makes_no_basis_is_refused(basis, unchecked: None):
    pair = (CHUNK, behind(0))
    for error, call in (
        (InputError, lambda: fit_basis([], 4)),
        (InputError, lambda: fit_basis([pair], 0)),
        (InputError, lambda: fit_basis([pair], 33)),
        (LayoutError, lambda: fit_basis([pair], {"q": 4})),
        (ShapeError, lambda: Basis({"k": np.zeros((3, 4, 31))}, CHUNK.layout, "tiny")),
        (InputError, lambda: form_in_basis(CHUNK, behind(0), basis, ["A"], 0)),
    ):
        with pytest.raises(error, match="expected"):
            call()
    assert fit_basis([pair], {"k": 2}).ranks == {"k": 2}


# ------------------------------------------------------------------------------------------------------------ store


@pytest.mark.nightly
def test_a_basis_is_stored_once(basis, tmp_path):
    patches = [form_in_basis(CHUNK, behind(seed), basis, [id], 4) for seed, id in ((17, "A"), (18, "C"))]
    small = kvp.quantise(kvp.keep_layers(kvp.truncate(patches[0], 2), (1, 2)), jnp.int8)
    with ChunkStore(tmp_path / "root") as store:
        with pytest.raises(InputError, match=r"expected it stored first, by put_basis"):
            store.put_patches(patches)
        store.put_basis(basis)
        assert store.usage().count == 2
        store.put_patches([*patches, small])
        assert store.usage().count == 2 + 3
        plain = kvp.form_patch(CHUNK, behind(17), 4, ["A"], method="exact", dense=False)
        store.put_patches([plain])
    with ChunkStore(tmp_path / "root") as store:
        found = store.get_patches(SERVED)
        assert {patch_digest(patch) for patch in found} == {patch_digest(each) for each in (plain, patches[0], small)}
        (other,) = store.get_patches(dataclasses.replace(SERVED, antecedent=["C"]))
        wanted = kvp.apply_patch(CHUNK, patches[1], 0, ["C"])
        for name, value in kvp.apply_patch(CHUNK, other, 0, ["C"]).items():
            np.testing.assert_array_equal(value, wanted[name])
        held = store.get_basis(basis.digest, CHUNK.layout, "tiny")
        assert held is not None
        assert held.digest == basis.digest
        assert store.get_basis("0" * 32, CHUNK.layout, "tiny") is None
        store.put_encoder(f"basis {basis.digest} k", "tiny", np.zeros((3, 4, 32), np.float32))  # other bits
        assert [patch.metadata.basis for patch in store.get_patches(SERVED)] == [None]
        store.delete(f"basis {basis.digest} k", "tiny")
        assert [patch.metadata.basis for patch in store.get_patches(SERVED)] == [None]


PUTS = {
    "put_patches": lambda store, patch, ttl: store.put_patches([patch], ttl=ttl),
    "put_patch_async": lambda store, patch, ttl: store.put_patch_async(patch, ttl=ttl).result(60),
}


@pytest.mark.parametrize("how", PUTS)
@pytest.mark.parametrize("ttl", [50, None])
def test_a_basis_lives_as_long_as_its_patches(basis, tmp_path, how, ttl, monkeypatch):
    """Put for 5 seconds before the patch, and again after it."""
    began = time.time()
    now = [began]
    monkeypatch.setattr(time, "time", lambda: now[0])
    patch = form_in_basis(CHUNK, behind(17), basis, ["A"], 4)
    with ChunkStore(tmp_path, memory=0) as store:
        store.put_basis(basis, ttl=5)
        PUTS[how](store, patch, ttl)
        store.put_basis(basis, ttl=5)
        for now[0] in (began + 6, began + 49):
            store.collect()
            assert [patch_digest(found) for found in store.get_patches(SERVED)] == [patch_digest(patch)]
        now[0] = began + 51
        assert len(store.get_patches(SERVED)) == (ttl is None)
        now[0] = began + 60
        store.collect()
        assert (store.get_basis(basis.digest, CHUNK.layout, "tiny") is None) == (ttl is not None)


def test_a_basis_is_not_written_with_every_patch(basis, tmp_path, monkeypatch):
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with ChunkStore(tmp_path, ttl=80) as store:
        store.put_basis(basis)
        for seed in range(20):
            now[0] += 1
            store.put_patches([form_in_basis(CHUNK, behind(seed), basis, [f"A{seed}"], 4)])
        assert store.statistics().counts["puts"] == 2 + 20 + 2 * 2  # of two channels; every eighth of the ttl
        store.put_basis(basis, ttl=800)
        before = store.statistics().counts["puts"]
        store.put_patches([form_in_basis(CHUNK, behind(0), basis, ["A"], 4)])
        assert store.statistics().counts["puts"] == before + 1


def test_eviction_takes_patches_before_their_basis(basis, tmp_path):
    """Used within one minute; the basis was put first."""
    with ChunkStore(tmp_path, memory=0) as store:
        store.put_basis(basis)
        store.put_patches([form_in_basis(CHUNK, behind(seed), basis, [f"A{seed}"], 4) for seed in range(3)])
        held = store.usage().bytes
    with ChunkStore(tmp_path, memory=0, root_budget=held) as store:
        store.put_encoder("other", "tiny", np.zeros(8, np.float32))
        assert store.patch_count(CHUNK.id, "tiny") < 3
        assert store.get_basis(basis.digest, CHUNK.layout, "tiny") is not None
