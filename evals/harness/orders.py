"""Orders of a chunk's antecedents, of which orbit patches are formed and on which they are tested."""

import itertools
import math
from collections.abc import Collection

import numpy as np

Order = tuple[int, ...]
"""Indices of the antecedents, the first one first."""


def orders_of(count: int, most: int = 24, hold_out: Collection[Order] = ()) -> list[Order]:
    """Lists orders of `count` chunks but those held out: all, or so many drawn without repetition where there are more.

    Every call draws the same ones.
    """
    # Counted, not listed: 12 chunks have 479 001 600 orders.
    if math.factorial(count) - len(hold_out) <= most:
        return [order for order in itertools.permutations(range(count)) if order not in hold_out]

    # A dictionary keeps the order of the draws.
    draw, drawn = np.random.default_rng(0), dict[Order, None]()
    while len(drawn) < most:
        order = tuple(int(place) for place in draw.permutation(count))
        if order not in hold_out:
            drawn[order] = None
    return list(drawn)
