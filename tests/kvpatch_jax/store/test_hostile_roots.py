"""Roots that somebody else wrote into: nothing hangs, nothing outside is touched, every failure is a typed error."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, patch_of, same_chunk

from kvpatch_jax.errors import KVPatchError, StoreError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.format.header import make_header
from kvpatch_jax.store.format.objects import Blob

KEY = b"k" * 32
CHUNK, OTHER = chunk_of(encoder=np.ones(5, np.float32)), chunk_of("other", 1)
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails where what is inside hangs."""

    def late(*_: object) -> None:
        raise AssertionError(f"nothing happened within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tenant_of(store: ChunkStore) -> str:
    return store.names.space.removeprefix("obj/")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tenant with chunks, a patch, both libraries, something in quarantine and something left over."""
    root = tmp_path / "root"
    fill(root)
    return root


def fill(root: Path, key: bytes | None = None) -> None:
    with ChunkStore(root, key=key) as store:
        store.put(CHUNK)
        store.put(OTHER)
        store.put_patches([patch_of(CHUNK)])
        StaticLibrary(store, quota=1 << 20).put("A", "text")
        DynamicLibrary(store).publish("R", "first")
        tenant = tenant_of(store)
    (root / "quarantine" / f"{tenant}.1-2-x.kv.safetensors").write_bytes(b"damaged")
    (root / "quarantine" / f"{tenant}.1-2-x.kv.safetensors.reason").write_text("why")
    (root / "tmp" / f"{tenant}.dead").write_bytes(b"half")


# ------------------------------------------------------------------------------------------------ what is put there


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    """To a file that would do."""
    aside = path.with_name("aside")
    path.rename(aside) if path.exists() else aside.write_bytes(b"aside")
    path.symlink_to(aside)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside").write_bytes(b"inside")


def listening(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind("short")  # a socket's name may not be long
        os.rename("short", path.name)


def sparse(path: Path) -> None:
    """An object in due form whose one leaf is larger than the machine's memory, and takes no room on the disk."""
    blob = Blob("kv", {}, {"x": np.broadcast_to(np.uint8(0), (4 * MEMORY,))})
    raw, header = make_header(path.name, "kv", None, {}, blob.specs)
    path.write_bytes(raw)
    os.truncate(path, header.size)


def everything(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


# --------------------------------------------------------------------------------------------------- what is called


def library(store: ChunkStore) -> None:
    files, references = StaticLibrary(store, quota=1 << 20), DynamicLibrary(store)
    for call in (
        lambda: files.put("B", "more"),
        lambda: files.get("TEXT", "A"),
        files.entries,
        lambda: files.delete("TEXT", "A"),
        lambda: references.publish("R", "second"),
        lambda: references.open("TEXT", "R"),
        references.entries,
        references.collect,
    ):
        with contextlib.suppress(StoreError):
            call()


def call_all(store: ChunkStore) -> None:
    for call in (
        lambda: store.get("B", BACKBONE, encoder=True),
        lambda: list(store.stream("B", BACKBONE) or ()),
        lambda: store.get_patches(patch_of(CHUNK).metadata),
        lambda: store.put(chunk_of("new", 3)),
        lambda: store.put(CHUNK),
        lambda: store.delete("other", BACKBONE),
        store.collect,
        store.delete_tenant,
    ):
        with contextlib.suppress(StoreError):
            call()


def use(root: Path, aside: Path, key: bytes | None = None) -> None:
    """Everything that a program and its operator may do, each call within seconds and with typed errors alone."""
    with within(60):
        for command in ("ls", "stat", "verify", "gc"):
            assert main([command, f"--root={root}", "--json"]) in (0, 1, 2), command
        assert main(["export", f"--root={root}", f"--directory={aside / 'export'}", "--json"]) in (0, 1, 2)
        with contextlib.suppress(KVPatchError), ChunkStore(root, budget=Budget(host=0), key=key) as store:
            library(store)
            call_all(store)
        assert main(["gc", f"--root={root}", "--budget=0", "--json"]) in (0, 1, 2)


PLACES: dict[str, Callable[[ChunkStore], str]] = {
    "canonical": lambda store: store.names.canonical(BACKBONE, "B").path,
    "encoder": lambda store: store.names.encoder(BACKBONE, "B").path,
    "patch": lambda store: store.names.patch(patch_of(CHUNK)).path,
    "static entry": lambda store: store.names.entry("static", "TEXT", "A").path,
    "reference": lambda store: store.names.entry("dynamic", "TEXT", "R", version=1).path,
    "settings": lambda store: "STORE.json",
    "key": lambda store: f"{store.names.space}/KEY",
    "names.lock": lambda store: "names.lock",
    "evict.lock": lambda store: "evict.lock",
    "library's lock": lambda store: f"{store.names.libraries}/static/lock",
    "other library's lock": lambda store: f"{store.names.libraries}/dynamic/lock",
    "temporary": lambda store: f"tmp/{tenant_of(store)}.dead",
    "settings on the way": lambda store: "tmp/settings-dead",
    "quarantine": lambda store: f"quarantine/{tenant_of(store)}.1-2-x.kv.safetensors",
    "among tenants": lambda store: "obj/x.safetensors",
    "among backbones": lambda store: f"{store.names.space}/x.safetensors",
    "among libraries": lambda store: "lib/x.safetensors",
    "among references": lambda store: f"{store.names.libraries}/x.safetensors",
}


MAKES = [fifo, link, directory, listening, sparse]
APART = ("settings", "key", "names.lock", "evict.lock")
"""Without these nothing else is reached: each alone."""


def survive(tmp_path: Path, places: Sequence[str], make: Callable[[Path], None], key: bytes | None, capsys) -> None:
    root = tmp_path / "root"
    fill(root, key)
    with ChunkStore(root, key=key) as store:
        paths = [root / PLACES[place](store) for place in places]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    use(root, tmp_path, key)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("places", [[place for place in PLACES if place not in APART], *([each] for each in APART)])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_irregular_files_in_a_root_cause_no_hang_or_untyped_error(tmp_path: Path, places, make, capsys):
    survive(tmp_path, places, make, None, capsys)


FOLDERS: dict[str, Callable[[ChunkStore], str]] = {
    "objects": lambda store: "obj",
    "tenant": lambda store: store.names.space,
    "last": lambda store: store.names.canonical(BACKBONE, "B").folder,
    "libraries": lambda store: "lib",
    "library": lambda store: f"{store.names.libraries}/static",
    "temporaries": lambda store: "tmp",
    "quarantine": lambda store: "quarantine",
    "deleted": lambda store: "deleted",
}


@pytest.mark.parametrize("place", FOLDERS)
def test_a_directory_that_is_a_link_is_not_followed(tmp_path: Path, place: str, capsys):
    """Neither to read, nor to write, nor to sweep or delete: what it leads to is as it was."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    fill(root)
    with ChunkStore(root) as store:
        path, tenant = root / FOLDERS[place](store), tenant_of(store)
    path.mkdir(exist_ok=True)
    path.rename(outside)
    path.symlink_to(outside)
    for name in (f"{tenant}.mine", "settings-mine", "x.safetensors"):
        (outside / name).write_bytes(b"nobody's business")
    (outside / f"{tenant}.folder").mkdir()
    (outside / f"{tenant}.folder" / "inside").write_bytes(b"nobody's business")
    before = everything(outside)
    use(root, tmp_path)
    assert everything(outside) == before
    assert (outside / f"{tenant}.folder").is_dir()
    assert "Traceback" not in capsys.readouterr().err


def test_other_files_do_not_hide_objects(root: Path, capsys):
    """Files and folders that nobody expects: the commands do their work, and the strangers stay."""
    with ChunkStore(root) as store:
        tenant = tenant_of(store)
    strangers = [root / "obj" / "x.safetensors", root / "obj" / tenant / "x.safetensors", root / "lib" / "x"]
    for path in strangers:
        path.write_bytes(b"a stranger")
    for path in (root / "tmp" / f"{tenant}.folder", root / "tmp" / "settings-folder", root / "deleted" / "file"):
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if "folder" in path.name else path.write_bytes(b"")
    for command in ("ls", "stat", "verify", "gc"):
        assert main([command, f"--root={root}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        if command == "ls":
            found["good"] = len(found["objects"])
        elif command == "gc":
            found["good"] = found["objects"] + found["entries"]
        # Two canonicals, an encoder output, a patch, two entries.
        assert found.get("good", found.get("objects")) == 6, command
    assert all(path.exists() for path in strangers)
    assert not (root / "tmp" / f"{tenant}.dead").exists()


def test_an_object_beyond_the_memory_is_a_miss_and_stays(root: Path, capsys):
    with ChunkStore(root, budget=Budget(host=0)) as store:
        path = root / store.names.canonical(BACKBONE, "B").path
        sparse(path)
        with within(60):
            assert store.get("B", BACKBONE) is None
            assert store.counters["read_errors"] == 1
            assert main(["verify", f"--root={root}", "--json"]) == 1
            found = json.loads(capsys.readouterr().out)
            assert found["unreadable"] == [str(path.relative_to(root))]
        store.put(CHUNK)
        assert same_chunk(store.get("B", BACKBONE), CHUNK)
