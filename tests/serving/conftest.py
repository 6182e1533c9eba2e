"""The rig's option."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Results are written when they are asked for, and taken from a folder where scenarios have run already."""
    parser.addoption("--work", help="folder of the scenarios; those whose results are in it are not run again")
    parser.addoption(
        "--write-results", action="store_true", help="write what was measured to tests/serving/results.json"
    )
