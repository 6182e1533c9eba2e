"""An orbit patch holds the mean deficit over the orders of one antecedent set, and serves every order of it."""
# pyright: reportArgumentType=false

import itertools

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, identity
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError, StalePatchError
from tests.shared.operator_cases import chunk_of, conditioned_of, placed_in_float64

CHUNK = chunk_of("gqa")
ONE, TWO = Member("A", "one"), Member("B", "two")
BARE = identity("A", "bare")


@pytest.mark.parametrize("encoding", [None, "k3v3g8"])
def test_an_orbit_is_the_mean_over_its_orders(encoding):
    """Against the mean by hand, at full rank, at an order that was never prefilled."""
    chunk = CHUNK if encoding is None else kvp.encode_chunk(CHUNK, encoding)
    members, unseen = [ONE, TWO, Member("C")], (2, 1, 0)
    orders = [order for order in itertools.permutations(range(3)) if order != unseen]
    conditioned = [conditioned_of(CHUNK, rank=1, seed=seed) for seed in range(len(orders))]
    sums = None
    for order, kv in zip(orders, conditioned, strict=True):
        sums = kvp.accumulate(sums, kv, chunk, [members[place] for place in order])
    patch = kvp.orbit_patch(sums, 24, method="exact", dtype="float32")
    assert patch.metadata.orbit
    assert patch.metadata.antecedent == Antecedent(tuple(members))
    assert patch.metadata.chunk.encoding == (None if encoding is None else "k3v3g8")
    mean = {name: np.mean([np.asarray(kv[name], np.float64) for kv in conditioned], axis=0) for name in CHUNK.kv}
    found = kvp.apply_patch(chunk, patch, 5, [members[place] for place in unseen])
    for name, value in placed_in_float64(CHUNK.layout, mean, CHUNK.local, 5).items():
        np.testing.assert_allclose(found[name], value, atol=1e-4)


def test_an_orbit_is_of_one_set_and_one_chunk():
    first, second = conditioned_of(CHUNK, 2, 1), conditioned_of(CHUNK, 2, 2)
    sums = kvp.accumulate(None, first, CHUNK, [ONE, TWO])
    for wrong in ([ONE], ["A", "B"], [ONE, Member("B", "three")], [ONE, TWO._replace(identity=BARE)]):
        with pytest.raises((PatchMismatchError, InputError), match=r"antecedent.*expected"):
            kvp.accumulate(sums, second, CHUNK, wrong)
    short = chunk_of("gqa", tokens=1, content=CHUNK.content)
    for chunk, error in ((short, PatchMismatchError), (CHUNK.pad(32), ShapeError)):
        kv = {name: np.asarray(value) for name, value in chunk.kv.items()}
        with pytest.raises(error, match=r"accumulate: got"):
            kvp.accumulate(sums, kv, chunk, [ONE, TWO])
    patch = kvp.orbit_patch(kvp.accumulate(sums, second, CHUNK, [TWO, ONE]), 4)
    for antecedent in ([TWO, ONE], ["B", "A"], [ONE, "B"]):
        kvp.apply_patch(CHUNK, patch, 0, antecedent)
    for antecedent in ([TWO], ["A", "A"], [Member("B", "x"), ONE], [ONE, TWO._replace(identity=BARE)]):
        with pytest.raises(StalePatchError, match="formed behind any ordering of"):
            kvp.apply_patch(CHUNK, patch, 0, antecedent)
    with pytest.raises(InputError, match="rank 0"):
        kvp.orbit_patch(sums, 0)
