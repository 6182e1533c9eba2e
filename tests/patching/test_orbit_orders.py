"""Orders that an orbit patch is formed of, and that it is their mean."""
# pyright: reportArgumentType=false

import itertools

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from tests.shared.operator_cases import chunk_of, conditioned_of

CHUNK = chunk_of("gqa")


def test_an_orbit_is_the_mean_over_its_orders():
    """Against the mean by hand, at full rank; held-out orders are never prefilled."""
    members = [Member("A", "one"), Member("B", "two"), Member("C")]
    held = (2, 1, 0)

    def behind(order: tuple[int, ...]) -> dict:
        return conditioned_of(CHUNK, rank=1, seed=sum(place * 3**power for power, place in enumerate(order)))

    acc, orders = None, [order for order in itertools.permutations(range(3)) if order != held]
    for order in orders:
        acc = kvp.accumulate(acc, behind(order), CHUNK, [members[place] for place in order])
    patch = kvp.orbit_patch(acc, 24, method="exact")
    assert patch.metadata.orbit
    assert patch.metadata.antecedent == Antecedent(tuple(members))
    mean = {name: sum(behind(order)[name] for order in orders) / 5 for name in CHUNK.kv}
    found = kvp.apply_patch(CHUNK, patch, 0, [members[at] for at in held])
    wanted = kvp.to_engine(CHUNK.layout, mean, CHUNK.local, 0)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)
