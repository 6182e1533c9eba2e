"""What ahead-of-time tests share: no cache of compiled programs."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def without_the_compilation_cache():
    """The cache cannot load what was compiled for a device that is not there, and a hit would dump nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is one was settled when the process first compiled anything
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
