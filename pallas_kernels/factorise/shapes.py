"""Shapes that tests and benchmarks share: (name, batch, tokens, features, rank)."""

from typing import NamedTuple


class FactoriseShape(NamedTuple):
    """One case: a matrix [*batch, tokens, features] and the rank asked for."""

    name: str
    batch: tuple[int, ...]
    tokens: int
    features: int
    rank: int


SMALL = (
    FactoriseShape("tall", (2,), 40, 24, 4),
    FactoriseShape("wide", (), 12, 48, 6),
    FactoriseShape("full", (3,), 8, 20, 8),
    FactoriseShape("batched", (2, 3), 30, 16, 1),
)

PRODUCTION = (
    FactoriseShape("qwen2_5_vl_7b", (28,), 1024, 512, 32),
    FactoriseShape("kimi_vl_latent", (27,), 1088, 512, 32),
)
