"""Shared by the tests of the store."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: a disk that others use takes seconds to make a root durable."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = tempfile.mkdtemp(prefix="kvpatch-test-", dir="/dev/shm")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)
