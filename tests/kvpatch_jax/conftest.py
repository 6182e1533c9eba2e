"""Shared by the tests of the operators."""

import jaxtyping
import pytest

from kvpatch_jax.store import process_statistics


@pytest.fixture
def unchecked():
    """Switches the shape hook off, so that our own typed error is what a test sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def quiet_statistics():
    """Stores publish no statistics by themselves: tests count and fail system calls of all threads."""
    process_statistics.EVERY = 3600.0
