"""Small files of a root, written beside sweeps of other processes."""

import fcntl
import os
from pathlib import Path

import pytest

from kvpatch_jax.store.io import files


@pytest.mark.parametrize("write", [files.replace_file, files.publish_once], ids=["replace", "publish"])
def test_a_sweep_between_creating_and_locking_a_file_costs_no_write(tmp_path: Path, monkeypatch, write):
    """Another process takes a file that is not locked yet for a dead writer's, and removes it."""
    lock, swept = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if len(swept) < 2:
            swept.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(swept[-1])
        lock(fd, how)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    write(str(tmp_path), "setting", b"content", "tmp/setting-1")
    assert swept == [str(tmp_path / "tmp/setting-1")] * 2
    assert (tmp_path / "setting").read_bytes() == b"content"
    assert not list((tmp_path / "tmp").iterdir())
