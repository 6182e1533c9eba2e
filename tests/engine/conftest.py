"""The rig's option."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --work: a folder of scenarios, in which those that have run are not run again."""
    parser.addoption("--work", help="folder of the scenarios; those whose results are in it are not run again")
