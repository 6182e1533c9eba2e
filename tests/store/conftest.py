"""Folders in memory where the system has them: a disk that others use takes seconds to make a root durable."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def folder_in_memory(fallback: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield fallback
        return
    path = tempfile.mkdtemp(prefix="kvpatch-test-", dir="/dev/shm")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield from folder_in_memory(tmp_path)


@pytest.fixture
def store(folder: Path):
    from kvpatch_jax.store import ChunkStore

    with ChunkStore(folder / "root") as store:
        yield store


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that the tests of a file share."""
    yield from folder_in_memory(tmp_path_factory.mktemp("module"))
