"""A small pool of random numbers, and slots of it, that the tests of pools and pages share."""

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from tests.shared.arrays import placed

PAGES, PAGE_SIZE = 6, 8
TOTAL = PAGES * PAGE_SIZE


def pool_of(layout: kvp.KVLayout, dtype=jnp.float32, seed: int = 5, padded: bool = False) -> dict:
    rng = np.random.default_rng(seed)
    empty = kvp.pool.make_pool(layout, PAGES, PAGE_SIZE, padded=padded)
    return {name: placed(rng.standard_normal(value.shape), dtype) for name, value in empty.items()}


def slots_of(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(TOTAL)[:tokens].astype(np.int32)


def bits(value) -> np.ndarray:
    array = np.asarray(value)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def same(first: dict, second: dict) -> bool:
    """Whether two dictionaries have the same names, and arrays of the same bits."""
    return first.keys() == second.keys() and all((bits(first[name]) == bits(second[name])).all() for name in first)
