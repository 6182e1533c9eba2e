"""Shapes that tests and benchmarks share: (name, batch, tokens, features, rank)."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One case: a matrix [*batch, tokens, features] and the rank asked for."""

    name: str
    batch: tuple[int, ...]
    tokens: int
    features: int
    rank: int


SMALL = (
    Shape("tall", (2,), 40, 24, 4),
    Shape("wide", (), 12, 48, 6),
    Shape("full", (3,), 8, 20, 8),
    Shape("batched", (2, 3), 30, 16, 1),
)

PRODUCTION = (
    Shape("qwen2_5_vl_7b", (28,), 1024, 512, 32),
    Shape("kimi_vl_latent", (27,), 1088, 512, 32),
)
