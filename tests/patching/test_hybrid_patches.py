"""Patches of hybrid chunks correct each part of a transition by its own rows, and leave it bit by bit where unnamed.

The oracles are NumPy's decomposition and differences in float64.
"""
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

import dataclasses

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import check_factors, patch_digest
from kvpatch_jax.core import ops
from kvpatch_jax.errors import LayoutError, NotFiniteError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import fit_basis, mean_base
from tests.shared.transition_cases import LAYOUT, LAYOUTS, LINEAR, PARTS, PLAIN, TOKENS, chunk_of, close, drawn

LOCAL = np.arange(TOKENS, dtype=np.float32)
A, C = ("A",), ("C",)
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_patch_gives_the_conditioned_transition(name: str):
    layout = LAYOUTS[name]
    chunk, target = chunk_of(layout, length=5), drawn(layout, seed=1)
    patch = kvp.form_patch(chunk, target, WHOLE, A)
    assert patch.tokens == TOKENS
    assert patch.ranks["map"] is None
    found = placed_kv(chunk, patch, antecedent=A)
    parts_close(found, target)
    rows = kvp.to_engine(layout, target, LOCAL, 5)
    for row in "kv":
        assert np.abs(found[row][:, :5] - np.asarray(rows[row])[:, :5]).max() < 2e-5
    # No patch is one rotation, and a patch of rows alone leaves every bit of the transition.
    blind, alone = placed_kv(chunk), placed_kv(chunk, kvp.form_patch(chunk, target, {"rows": 2}, A), antecedent=A)
    for part in layout.parts:
        assert (blind[part.name] == chunk.kv[part.name]).all()
        assert (alone[part.name] == chunk.kv[part.name]).all()


def test_low_ranks_are_the_best_of_each_part():
    chunk, target = chunk_of(), drawn(seed=1)
    patch = kvp.form_patch(chunk, target, 2, A, method="exact", dense=False)
    assert patch.ranks == {"k": 2, "v": 2, "map": 2, "state": 2, "tail": 2}
    for name, value in ops.correction(LAYOUT, dict(patch.factors)).items():
        wanted = best(target[name].astype(np.float64) - chunk.kv[name], 2)
        assert np.abs(np.asarray(value) - wanted).max() <= 1e-5 * np.abs(wanted).max(), name
    # More than the rows of a part, fewer than the tokens.
    more = kvp.form_patch(chunk, target, {"k": 4, "tail": 4}, A, dense=False)
    assert (more.ranks["k"], more.ranks["tail"]) == (4, 3)


def test_operations_on_patches_keep_what_a_transition_has():
    chunk, target, other = chunk_of(length=5), drawn(seed=1), drawn(seed=2)
    patch = kvp.form_patch(chunk, target, 3, A, method="exact", dense=False)
    padded = patch.pad(9)
    assert padded.tokens == 9
    assert all(padded.factors[n] is patch.factors[n] for n in PARTS)
    assert patch_digest(padded) != patch_digest(patch)
    wide = placed_kv(chunk.pad(9), padded, antecedent=A)
    narrow = placed_kv(chunk, patch, antecedent=A)
    for name in PARTS:
        assert (wide[name] == narrow[name]).all()

    cut = kvp.truncate(patch, {"transition": 1})
    assert cut.ranks == {"k": 3, "v": 3, "map": 1, "state": 1, "tail": 1}
    deep = kvp.keep_layers(patch, (3, 4))
    assert {name: np.shape(deep.factors[name][0])[0] for name in deep.factors} == dict.fromkeys(LAYOUT.names, 1)
    kept = placed_kv(chunk, deep, antecedent=A)
    for name in PARTS:
        assert (kept[name][:2] == chunk.kv[name][:2]).all()
        assert (kept[name][2] == narrow[name][2]).all()
    rounded = placed_kv(chunk, kvp.quantise(patch, "int8"), antecedent=A)
    for name in PARTS:
        assert 0 < np.abs(rounded[name] - narrow[name]).max() < 0.05

    # Behind another antecedent: a correction, folded in, is the patch formed there.
    small = {n: target[n] + 0.1 * other[n] for n in LAYOUT.names}
    correction = kvp.correction_patch(chunk, patch, small, 99, C)
    folded = kvp.update_patch(patch, kvp.quantise(correction, "float32"), WHOLE | {"rows": 5})
    found = placed_kv(chunk, folded, antecedent=C)
    parts_close(found, small, 1e-5)
    # The mean over orders, and a survivor whose antecedent left.
    acc = kvp.accumulate(kvp.accumulate(None, target, chunk, ("A", "C")), other, chunk, ("C", "A"))
    mean = placed_kv(chunk, kvp.orbit_patch(acc, WHOLE), antecedent=("C", "A"))
    parts_close(mean, {n: (target[n].astype(float) + other[n]) / 2 for n in PARTS}, 1e-5)
    gone = kvp.removal_patch(chunk, other, target, WHOLE, ("B",), ("A", "B"))
    behind = placed_kv(chunk, gone, antecedent=("B",), base=target, base_antecedent=("A", "B"))
    parts_close(behind, other, 1e-5)


def test_bases_have_a_transition_too():
    chunk, one, two = chunk_of(length=5), drawn(seed=1), drawn(seed=2)
    mean = mean_base(chunk, [one, two], [A, C])
    parts_close(mean.kv, {n: (one[n].astype(float) + two[n]) / 2 for n in PARTS})
    assert not np.asarray(mean.kv["k"])[:, 5:].any()


def test_what_fits_no_transition_is_refused(unchecked):
    chunk, target = chunk_of(), drawn(seed=1)
    patch = kvp.form_patch(chunk, target, 2, A, dense=False)
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
