"""Orders that an orbit patch is formed of, and that it is their mean."""
# pyright: reportArgumentType=false

import itertools

import numpy as np
import pytest
from operator_cases import chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import orders_of

CHUNK = chunk_of("gqa")


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
    held = (2, 1, 0)

    def behind(order: tuple[int, ...]) -> dict:
        return conditioned_of(CHUNK, rank=1, seed=sum(place * 3**power for power, place in enumerate(order)))

    acc, orders = None, orders_of(3, hold_out=[held])
    for order in orders:
        acc = kvp.accumulate(acc, behind(order), CHUNK, [members[place] for place in order])
    patch = kvp.orbit_patch(acc, 24, method="exact")
    assert orders == [order for order in itertools.permutations(range(3)) if order != held]
    assert patch.metadata.orbit
    assert patch.metadata.antecedent == Antecedent(tuple(members))
    mean = {name: sum(behind(order)[name] for order in orders) / 5 for name in CHUNK.kv}
    found = kvp.apply_patch(CHUNK, patch, 0, [members[at] for at in held])
    wanted = kvp.to_engine(CHUNK.layout, mean, CHUNK.local, 0)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)
