"""The gate: what it refuses, how it ranks, and the rates that it is measured by; orders that orbits are formed of."""
# pyright: reportArgumentType=false

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import LAYOUTS, chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.patching import divergence, orders_of, reuse_curve
from kvpatch_jax.patching.gate import candidates, pooled_canonical
from kvpatch_jax.patching.orbit import form_orbit

BARE = "bare:" + "0" * 32
CHUNK = chunk_of("gqa")


def patch_behind(*things) -> kvp.Patch:
    return kvp.form_patch(CHUNK, conditioned_of(CHUNK), 2, things)


# ------------------------------------------------------------------------------------------------------------ gate


def test_only_what_was_formed_behind_it_is_admitted():
    true, blind = patch_behind("A", "B"), patch_behind(Member("A", None, BARE), Member("B", None, BARE))
    stored = [patch_behind("C", "D"), blind, patch_behind("B", "A"), true, patch_behind("A", "B", "C")]
    admitted = candidates(stored, ["A", "B"])
    assert [each.patch for each in admitted] == [true]
    assert (admitted[0].divergence, admitted[0].differs) == (0.0, None)
    ranked = candidates(stored, ["A", "B"], allow_stale=True)
    assert ranked[0].patch is true
    assert ranked[-1].patch is stored[0]
    assert {each.patch.metadata.antecedent for each in ranked[1:]} == {
        ("A", "B"),
        ("B", "A"),
        ("A", "B", "C"),
        ("C", "D"),
    }
    assert [each.divergence for each in ranked] == sorted(each.divergence for each in ranked)
    assert all(each.differs for each in ranked[1:])
    assert candidates(stored, ["E"]) == []


def test_alike_is_not_the_same():
    """Chunks whose pooled canonicals are equal rank first, and are refused all the same."""
    other = patch_behind("A2")
    pooled = {"A": np.ones(4), "A2": np.ones(4), "C": np.array([1.0, -1, 1, -1])}
    assert divergence(["A2"], ["A"], pooled=pooled) == pytest.approx(0)
    assert candidates([other], ["A"], pooled=pooled) == []
    ranked = candidates([patch_behind("C"), other], ["A"], allow_stale=True, pooled=pooled)
    assert [each.patch.metadata.antecedent for each in ranked] == [("A2",), ("C",)]
    assert divergence(["A2"], ["A"], pooled={"A": np.ones(4)}) == 1  # not known of all: names count
    with pytest.raises(ShapeError, match="pooled vectors"):
        divergence(["A2"], ["A"], pooled={"A": np.ones(4), "A2": np.ones(3)})


MEMBERS = st.tuples(st.sampled_from("ABCD"), st.sampled_from([None, "x", "y"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(MEMBERS, max_size=4), st.lists(MEMBERS, max_size=4), st.booleans())
def test_a_divergence_is_a_distance_of_names(first: list, second: list, orbit: bool):
    one, two = (Antecedent(tuple(Member(*each) for each in members)) for members in (first, second))
    apart = divergence(one, two, orbit=orbit)
    assert 0 <= apart <= 1
    assert apart == pytest.approx(divergence(two, one, orbit=orbit), abs=0.5)  # unknown contents may pair otherwise
    assert divergence(one, one) == 0
    if not {member.id for member in one.members} & {member.id for member in two.members}:
        assert apart == (1 if one.members or two.members else 0)
    known = None not in [member.content for member in (*one.members, *two.members)]
    if known:
        assert (apart == 0) == (one.difference(two, orbit) is None)


def test_more_drift_is_farther():
    front = ["A", "B", "C", "D"]
    steps = [front, ["A", "B", "D", "C"], ["D", "C", "B", "A"]]
    assert [round(divergence(front, each), 6) for each in steps] == [0, round(1 / 12, 6), 0.5]
    dropped = [divergence(front, front[:n]) for n in (4, 3, 2, 1, 0)]
    assert dropped == sorted(dropped)
    assert (dropped[0], dropped[-1]) == (0, 1)
    replaced = [divergence(front, front[:n] + ["X"] * (4 - n)) for n in (4, 3, 2, 1, 0)]
    assert replaced == [0, 0.25, 0.5, 0.75, 1]
    blind = [Member(id, None, BARE) for id in front]
    assert divergence(front, blind) == 0.5


def test_pooled_canonicals_are_means_over_tokens():
    for name in LAYOUTS:
        chunk = chunk_of(name, length=20)
        channel = next(each.name for each in chunk.layout.channels if each.name in ("v", "ckv"))
        wanted = np.asarray(chunk.kv[channel])[:, :20].astype(np.float64).mean(axis=1).reshape(-1)
        np.testing.assert_allclose(pooled_canonical(chunk), wanted, atol=1e-6)
        np.testing.assert_allclose(pooled_canonical(chunk.pad(32)), wanted, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ rates


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_rates_are_counted(pairs: list):
    apart, lost = [one / 5 for one, _ in pairs], [float(two) for _, two in pairs]
    curve = reuse_curve(apart, lost, 2.0)
    for threshold, coverage, false in zip(curve.threshold, curve.coverage, curve.false_reuse, strict=True):
        reused = [two for one, two in zip(apart, lost, strict=True) if one <= threshold]
        assert coverage == len(reused) / len(pairs)
        assert false == sum(two > 2 for two in reused) / len(reused)
    safe = [one for one, two in zip(apart, lost, strict=True) if two <= 2]
    assert math.isnan(curve.safe) if not safe else curve.safe == np.median(safe)
    assert curve.coverage[-1] == 1
    assert curve.at(1) == curve.false_reuse[-1]
    assert curve.at(1e-9) == curve.false_reuse.min()


def test_what_cannot_be_measured_is_refused(unchecked: None):
    for apart, lost in (([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([1.0], [math.inf])):
        with pytest.raises(InputError, match=r"gate: .*expected"):
            reuse_curve(apart, lost, 0.1)
    curve = reuse_curve([0.0, 1.0], [0.0, 1.0], 0.5)
    assert (curve.at(0.5), curve.at(1.0), curve.safe, curve.unsafe) == (0, 0.5, 0, 1)
    for coverage in (0, 1.1, math.nan):
        with pytest.raises(InputError, match="coverage"):
            curve.at(coverage)


# ----------------------------------------------------------------------------------------------------------- orders


def test_orders_are_all_up_to_four_and_a_sample_beyond():
    for count in range(1, 5):
        assert orders_of(count) == list(itertools.permutations(range(count)))
    sample = orders_of(6)
    assert len(sample) == len(set(sample)) == 24
    assert all(sorted(order) == list(range(6)) for order in sample)
    assert sample == orders_of(6, seed=0)
    assert sample != orders_of(6, seed=1)
    held = orders_of(6)[:5]
    assert not set(orders_of(6, hold_out=held)) & set(held)
    assert len(orders_of(6, hold_out=held)) == 24
    assert len(orders_of(3, hold_out=[[0, 1, 2]])) == 5
    assert len(orders_of(3, 2)) == 2
    assert len(orders_of(64)) == 24  # 64! orders


def test_orders_that_there_are_none_of(unchecked: None):
    for call in (
        lambda: orders_of(0),
        lambda: orders_of(3, 0),
        lambda: orders_of(1, hold_out=[(0,)]),
        lambda: orders_of(2, hold_out=[(0, 2)]),
        lambda: orders_of(2, hold_out=[(0,)]),
    ):
        with pytest.raises(InputError, match=r"orders: .*expected"):
            call()


def test_an_orbit_is_the_mean_over_its_orders():
    """Against the mean by hand, at full rank; held-out orders are never prefilled."""
    members = [Member("A", "one"), Member("B", "two"), Member("C")]
    held, asked = (2, 1, 0), []

    def behind(order: tuple[int, ...]) -> dict:
        asked.append(order)
        return conditioned_of(CHUNK, rank=1, seed=sum(place * 3**power for power, place in enumerate(order)))

    patch = form_orbit(CHUNK, members, behind, 24, orders_of(3, hold_out=[held]), method="exact")
    assert asked == [order for order in itertools.permutations(range(3)) if order != held]
    assert patch.metadata.orbit
    assert patch.metadata.behind == Antecedent(tuple(members))
    kept = [behind(order) for order in itertools.permutations(range(3)) if order != held]
    mean = {name: sum(each[name] for each in kept) / 5 for name in CHUNK.kv}
    found = kvp.apply_patch(kvp.Placed(CHUNK, patch, 0, [members[at] for at in held]))
    wanted = kvp.to_engine(CHUNK.layout, mean, CHUNK.local, 0)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)
