"""A root needs a file system whose folders can be locked by all its processes; others are refused before anything."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import StoreIOError
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.io import file_system


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_root_on_the_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(file_system, "type_of", lambda folder: kind)
    with pytest.raises(StoreIOError, match=f"got a root on {kind}; expected a local file system"):
        ChunkStore(tmp_path)


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_root_whose_folders_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    def refuse(fd: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(StoreIOError, match="cannot be locked"):
            ChunkStore(tmp_path, secret=b"of sixteen bytes")


def test_a_lock_that_another_has_is_a_lock(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        store.put(chunk_of())
    with open(tmp_path / "held", "w"):
        fd = os.open(tmp_path / "obj", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with ChunkStore(tmp_path) as store:
            assert same_chunk(store.get("B", BACKBONE), chunk_of())
        os.close(fd)
