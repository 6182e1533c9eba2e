"""What an arm is: a function that makes, of a reused page, a cache to read questions from, and says what it costs."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax.core import flatten_heads
from kvpatch_jax.patching import fit_basis
from kvpatch_jax.repair import SplicedCache
from pallas_kernels import factorise

from ..results.costs import ArmCost, ChunkCosts
from ..rules import RULES
from .reused_page import KV, ReusedPage


class AlternativeArm(NamedTuple):
    """One way of reuse, made for a batch of contexts.

    Attributes:
      cost: what it costs.
      cache: the prefix's cache in the engine frame.
      share: its bytes as a share of the page's KV, where that is not what the cost says is stored.
    """

    cost: ArmCost
    cache: KV
    share: float | None = None


class ArmFactory:
    """A reused page, and intermediate results that several arms start from, each computed at first use.

    Args:
      page: the reused page.
      layers: those that the page is recomputed from, so that one prefill yields all residuals.
    """

    def __init__(self, page: ReusedPage, layers: Collection[int] = ()):
        self.page, self.layers = page, tuple(layers)

    @property
    def costs(self) -> ChunkCosts:
        """The chunk that shares of cost refer to."""
        return self.page.costs

    @functools.cached_property
    def splice(self) -> SplicedCache:
        """The blind cache and the page's tokens, which token repairs start from."""
        return self.page.splice()

    @functools.cached_property
    def singular(self) -> dict[str, tuple[Array, Array]]:
        """Thin factors of the page's conditioned KV, phase-free, u [L,B,T,M] and v [L,B,M,F] by channel."""
        factors = {}
        for name, value in self.page.page_conditioned.items():
            # Every smaller rank is a slice of these factors: one SVD serves all arms.
            flat = flatten_heads(jnp.asarray(value, jnp.float32))
            rank = min(max(RULES.arms.ranks), *flat.shape[-2:])
            factors[name] = factorise(flat, rank, method="exact")
        return factors

    @functools.cached_property
    def hidden(self) -> dict[int, Array]:
        """The residual of the page alone as it enters each of `layers`."""
        return self.page.backbone.prefill(self.page.alone, hidden_at=self.layers).hidden

    @functools.cached_property
    def half_bases(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Directions [L,M,F] by channel: those of the odd contexts' deficits, then those of the even ones'."""
        canonical, rank = self.page.page, max(RULES.arms.pooled_ranks)
        ranks = {channel.name: min(rank, channel.features) for channel in canonical.layout.channels}
        bases = []

        # A page is never served in directions that its own deficit was fitted to.
        for half in (slice(1, None, 2), slice(0, None, 2)):
            kv = {name: np.asarray(value)[:, half] for name, value in canonical.kv.items()}
            conditioned = {name: np.asarray(value)[:, half] for name, value in self.page.page_conditioned.items()}
            basis = fit_basis([(dataclasses.replace(canonical, kv=kv), conditioned)], ranks)
            bases.append({name: jnp.asarray(value) for name, value in basis.directions.items()})

        return bases[0], bases[1]


ArmMaker = Callable[[ArmFactory], AlternativeArm]
"""The one signature of an arm. Settings (a rank, a budget) are bound with `functools.partial`."""


def make_reprefill(factory: ArmFactory) -> AlternativeArm:
    """Makes re-prefill, the reference."""
    return AlternativeArm(factory.costs.of_reprefill(), factory.page.reference, 1.0)


def make_blind(factory: ArmFactory) -> AlternativeArm:
    """Makes blind reuse: the canonical, rotated to its place."""
    return AlternativeArm(factory.costs.of_blind(), factory.page.cache(), 0.0)
