"""A diagnostic: the deficit with each token's replaced by the mean over the tokens of its page that show the same.

It is no method of serving, because it is told which tokens show the same glyph. Axis letters: B contexts, T tokens of
the page, L layers, C classes.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..results.costs import NUMBER_BITS, ArmCost
from ..small_task import LEGENDS
from .arm import AlternativeArm, ArmFactory
from .reused_page import KV, ReusedPage


def page_classes(page: ReusedPage) -> Int[np.ndarray, "B T"]:
    """Numbers what each token of a small task's page shows: its glyph, a header, or a class of its own."""
    cells, glyphs, slots = page.form.cells(LEGENDS), page.contexts.page_glyph, page.slots
    header = int(glyphs.max()) + 1
    with_header = np.concatenate([np.full((*glyphs.shape[:2], 1), header), glyphs], axis=2).reshape(len(page), -1)

    # Start and end tokens show nothing that another token shows.
    numbers = np.tile(header + 1 + np.arange(slots.stop - slots.start), (len(page), 1))
    numbers[:, cells.start - slots.start : cells.stop - slots.start] = with_header
    _, dense = np.unique(numbers, return_inverse=True)
    return dense.reshape(numbers.shape).astype(np.int32)


def class_means(page: ReusedPage) -> KV:
    """Computes the mean deficit of the tokens that show the same, in each token's place."""
    classes = page_classes(page)
    count, numbers = int(classes.max()) + 1, jnp.asarray(classes)
    return {name: _class_means(value, numbers, count) for name, value in page.delta.items()}


@functools.partial(jax.jit, static_argnames=("count",))
def _class_means(delta: Float[Array, "L B T K H"], classes: Int[Array, "B T"], count: int) -> Float[Array, "L B T K H"]:
    belongs = jax.nn.one_hot(classes, count, dtype=jnp.float32)
    share = belongs / jnp.maximum(belongs.sum(axis=1, keepdims=True), 1.0)
    high = jax.lax.Precision.HIGHEST
    means = jnp.einsum("btc,lbtkh->lbckh", share, delta, precision=high)
    return jnp.einsum("btc,lbckh->lbtkh", belongs, means, precision=high)


@jax.jit
def explained(delta: Mapping[str, Array], means: Mapping[str, Array]) -> dict[str, Float[Array, "B L"]]:
    """Computes the share of ‖Δ‖² that the means explain, by context and layer; 0 where Δ is 0."""
    shares = {}
    for name, value in delta.items():
        whole, left = (jnp.square(part).sum(axis=(2, 3, 4)) for part in (value, value - means[name]))
        shares[name] = jnp.where(whole > 0, 1 - left / jnp.where(whole > 0, whole, 1.0), 0.0).T
    return shares


def make_class_mean(factory: ArmFactory) -> AlternativeArm:
    """Returns the canonical plus the means; the means are what is kept."""
    page, costs = factory.page, factory.costs
    means, classes = class_means(page), page_classes(page)
    kinds = float(np.mean([len(np.unique(row)) for row in classes]))
    served = {name: jnp.asarray(page.page.kv[name]) + value for name, value in means.items()}
    per_token = costs.numbers // costs.tokens
    cost = ArmCost(
        stored=NUMBER_BITS * kinds * per_token + 8 * costs.tokens,
        serving=costs.rotation + costs.numbers,
        forming=costs.alone + costs.prefill + costs.numbers,
    )
    return AlternativeArm(cost, page.served(served))
