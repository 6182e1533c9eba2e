"""Released checkpoints: their numbers of parameters."""

import jax
import pytest

from kvpatch_jax import models
from kvpatch_jax.models.families.family import abstract, parameters
from tests.models.released_configs import RELEASED

PUBLISHED = {name: released for name, released in RELEASED.items() if released.published is not None}
FIRST = {released.config["architectures"][0]: name for name, released in reversed(PUBLISHED.items())}.values()
"""The first of every architecture."""


@pytest.mark.parametrize("name", FIRST)
def test_a_release_has_the_published_number_of_parameters(name):
    raw, published = RELEASED[name]
    config = models.FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters(abstract(config))))
    assert count / 1e9 == pytest.approx(published, rel=0.01)
