"""Shared by the tests of the operators."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Switches the shape hook off, so that our own typed error is what a test sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
