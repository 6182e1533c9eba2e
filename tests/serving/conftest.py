"""The rig's option."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Results are written when they are asked for."""
    parser.addoption(
        "--write-results", action="store_true", help="write what was measured to tests/serving/results.json"
    )
