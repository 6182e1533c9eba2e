"""Orbit patches of the orders that requests bring: one patch of a chunk for every order of what is in front of it."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import jax
import numpy as np
import pytest
from serving_sides import LAYOUT, served, sides_of
from test_natural_traffic import BLIND, LEAD, PAGES, QUESTION, SIZE, alike, asked, certificate_of, page_rows, points
from test_natural_traffic import rows_of as rows_of_prefill

import kvpatch_jax as kvp
from kvpatch_jax.core import PhaseFreeKV
from kvpatch_jax.serving.vllm.orbit_sums import OrbitSums

ORDERS = [(0, 2, 3), (2, 0, 3)]
NEW = (3, 0, 2)


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, patch_after=1, survivor_bytes=0) as made:
        served(made, "alone", {"segments": [SIZE]}, [*PAGES[1], *QUESTION], tuple(range(3, 19)))
        yield made


def test_a_new_order_is_served_by_the_mean_of_those_that_came(sides):
    """At full rank canonical and patch are the mean of the prefills, turned to where the page stands now."""
    for number, order in enumerate(ORDERS):
        asked(sides, f"order {number}", [*order, 1])
        assert sides.worker.former.counts["orbits"] == number
    asked(sides, "without the page", NEW)
    found, told = asked(sides, "new", [*NEW, 1], **BLIND, save=False)
    assert points(told) == ["leading", "restored", "restored", "restored", "orbit"]
    mean = sum(rows_of_prefill([*order, 1], 3, len(LEAD) + 3 * SIZE) for order in ORDERS) / 2
    alike(page_rows(found, 3), mean)
    # For an order that came there is a prefill, or a patch of that order.
    _, told = asked(sides, "old", [*ORDERS[0], 1], **BLIND, save=False)
    assert points(told)[4] in ("restored", "stored")


def test_orders_of_another_set_are_not_served(sides):
    for number, order in enumerate(ORDERS):
        asked(sides, f"order {number}", [*order, 1])
    _, told = asked(sides, "other", [3, 0, 4, 1], **BLIND, save=False)
    assert "orbit" not in points(told)


def test_an_orbit_patch_is_bounded_as_one(sides):
    for number, order in enumerate(ORDERS):
        asked(sides, f"order {number}", [*order, 1])
    asked(sides, "without the page", NEW)
    rows = [("bare", 0, behind, "forget", 0.02) for behind in range(8)]
    sides.scheduler.certificate = certificate_of([*rows, *(("orbit", 4, n, "forget", 0.03) for n in range(8))])
    _, told = asked(sides, "within", [*NEW, 1], policy="approximate", kl=0.03, save=False)
    assert (points(told)[4], told["kl"]) == ("bare", 0.02), "the least bound"
    sides.scheduler.certificate = certificate_of([*rows, *(("orbit", 4, n, "forget", 0.01) for n in range(8))])
    _, told = asked(sides, "less", [*NEW, 1], policy="approximate", kl=0.03, save=False)
    assert (points(told)[4], told["kl"]) == ("orbit", 0.01)


def test_sums_stay_within_their_bytes_and_begin_anew():
    def kv(seed):
        rng = np.random.default_rng(seed)
        return PhaseFreeKV({name: rng.standard_normal((2, 5, 1, 64)).astype(np.float32) for name in "kv"})

    def canonical(id):
        return kvp.Chunk(kv(0), np.arange(5, dtype=np.float32), 5, 5, id, LAYOUT, "tiny")

    one = 2 * 2 * 2 * 5 * 64 * 4  # both channels and layers, of the sum and of the canonical
    sums = OrbitSums(2 * one + 100)
    for number, id in enumerate("abc"):
        assert sums.add("t", canonical(id), kv(1), ("x", "y")).count == 1
        assert sums.nbytes <= 2 * one + 100, number
    assert sums.add("t", canonical("c"), kv(2), ("y", "x")).count == 2
    assert sums.add("t", canonical("a"), kv(2), ("y", "x")).count == 1, "it was let go of"
    made = sums.add("t", canonical("c"), kv(3), ("x", "y"))
    expected = sum(kv(seed)["k"] for seed in (1, 2, 3)) - 3 * kv(0)["k"]
    np.testing.assert_allclose(made.total["k"], expected, rtol=1e-5, atol=1e-5)
    assert not isinstance(made.total["k"], jax.Array), "held on the host"
    assert sums.add("other", canonical("c"), kv(1), ("x", "y")).count == 1
