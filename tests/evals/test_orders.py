"""Orders that orbit patches are formed of."""

import itertools

from evals.harness.orders import orders_of


def test_orders_are_all_up_to_four_and_a_sample_beyond():
    for count in range(1, 5):
        assert orders_of(count) == list(itertools.permutations(range(count)))
    sample = orders_of(6)
    assert len(sample) == len(set(sample)) == 24
    assert all(sorted(order) == list(range(6)) for order in sample)
    assert sample == orders_of(6)
    assert not set(orders_of(6, hold_out=sample[:5])) & set(sample[:5])
    assert len(orders_of(6, hold_out=sample[:5])) == 24
    assert len(orders_of(3, hold_out=[(0, 1, 2)])) == 5
    assert len(orders_of(3, 2)) == 2
    assert len(orders_of(64)) == 24  # 64! orders
