"""Folders in memory where the system has them: a disk that others use takes seconds to make a root durable."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of day, which stands still until a test moves `now`."""
    clock = SimpleNamespace(now=time.time() // 60 * 60 + 5.0)
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock
