"""The simulation of power cuts has every outcome that a file system may have, and no other."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from file_log import INDEX, FileLog, contents
from power_cut import GARBAGE, DiskState, disk_states

OLD, NEW = b"a" * 5000, b"b" * 9000


def write(path: Path, content: bytes, *, sync: bool) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, content, 0)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def replaced(base: Path, *, data: bool, folder: bool) -> None:
    """The usual protocol, with or without either sync."""
    write(base / "tmp" / "own", NEW, sync=data)
    os.rename(base / "tmp" / "own", base / "names" / "old")
    if folder:
        sync_folder(base / "names")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("tmp", "names"):
        (tmp_path / "disk" / name).mkdir(parents=True)
    (tmp_path / "disk" / "names" / "old").write_bytes(OLD)
    return tmp_path / "disk"


def recorded(base: Path, act: Callable[[Path], None]) -> FileLog:
    log = FileLog(base)
    with log.recording():
        act(base)
    return log


def at_the_end(log: FileLog, most: int = 1000) -> list[DiskState]:
    return list(disk_states(log, most, only=[len(log.events)]))


def found(log: FileLog, path: str) -> set[bytes | None]:
    """What a path may have after a cut at the end."""
    return {contents(state.root, state.nodes).get(path) for state in at_the_end(log)}


def test_what_is_synced_is_there(base: Path):
    assert found(recorded(base, lambda base: replaced(base, data=True, folder=True)), "names/old") == {NEW}


def test_a_rename_is_undone_without_a_sync_of_its_folder(base: Path):
    log = recorded(base, lambda base: replaced(base, data=True, folder=False))
    assert found(log, "names/old") == {OLD, NEW}
    # the file is nowhere twice lost: where its first name is gone, it has the second
    for state in at_the_end(log):
        there = contents(state.root, state.nodes)
        assert there["names/old"] == NEW or there.get("tmp/own", NEW) == NEW


def test_a_name_may_come_before_its_data(base: Path):
    versions = found(recorded(base, lambda base: replaced(base, data=False, folder=True)), "names/old")
    assert {b"", bytes(len(NEW)), NEW, NEW[: len(NEW) // 2]} <= versions
    assert NEW[:4096].ljust(len(NEW), b"\0") in versions
    assert OLD not in versions


def test_a_new_name_may_be_lost_with_its_data(base: Path):
    log = recorded(base, lambda base: write(base / "names" / "new", NEW, sync=True))
    assert found(log, "names/new") == {None, NEW}
    assert found(log, "names/old") == {OLD}


def test_a_removed_name_may_be_back(base: Path):
    assert found(recorded(base, lambda base: os.unlink(base / "names" / "old")), "names/old") == {None, OLD}

    def unlinked(base: Path) -> None:
        os.unlink(base / "names" / "new")
        sync_folder(base / "names")

    write(base / "names" / "new", NEW, sync=True)
    assert found(recorded(base, unlinked), "names/new") == {None}


def test_a_new_folder_may_be_lost_with_what_was_synced_in_it(base: Path):
    def made(base: Path) -> None:
        os.mkdir(base / "names" / "inner")
        write(base / "names" / "inner" / "file", NEW, sync=True)
        sync_folder(base / "names" / "inner")

    log = recorded(base, made)
    assert found(log, "names/inner/file") == {None, NEW}
    assert found(log, "names/inner/") == {None, b""}


def test_changes_of_names_are_lost_in_any_order(base: Path):
    def three(base: Path) -> None:
        for name in "xyz":
            write(base / "names" / name, NEW, sync=True)

    states = at_the_end(recorded(base, three))
    kept = {tuple(name in contents(state.root, state.nodes) for name in ("names/x", "names/z")) for state in states}
    assert len(kept) == 4
    assert len(states) == 8


def test_states_are_built_as_they_are_described(base: Path, tmp_path: Path):
    def linked(base: Path) -> None:
        os.link(base / "names" / "old", base / "names" / "link")
        os.utime(base / "names" / "old", ns=(5, 7_000))
        replaced(base, data=True, folder=True)

    log = recorded(base, linked)
    for number, state in enumerate(at_the_end(log)):
        state.build(tmp_path / f"built{number}")
        there = contents(state.root, state.nodes)
        for path, content in there.items():
            built = tmp_path / f"built{number}" / path
            assert built.is_dir() if path.endswith("/") else built.read_bytes() == content
        link = tmp_path / f"built{number}" / "names" / "link"
        assert link.stat().st_mtime_ns in (7_000, log.first[log.nodes[log.root].names["names"] + 1].mtime)  # pyright: ignore


def test_every_point_of_a_record_has_states(base: Path):
    log = recorded(base, lambda base: replaced(base, data=True, folder=True))
    points = {state.point for state in disk_states(log)}
    assert min(points) == 0
    assert found(log, "names/old") == {NEW}
    middle = [contents(state.root, state.nodes)["names/old"] for state in disk_states(log)]
    assert {OLD, NEW} == set(middle)


def test_the_index_is_absent_old_or_destroyed(base: Path):
    def indexed(base: Path) -> None:
        log.begin("an operation")
        with open(base / INDEX, "wb") as file:
            file.write(b"an index")
        log.end(1)
        write(base / "names" / "new", NEW, sync=True)

    log = FileLog(base)
    with log.recording():
        indexed(base)
    copies = [state.index for state in disk_states(log)]
    assert {} in copies
    assert {INDEX: b"an index"} in copies
    assert {INDEX: GARBAGE} in copies


def test_changes_by_other_means_are_noticed(base: Path):
    log = FileLog(base)
    with pytest.raises(AssertionError), log.recording(), open(base / "names" / "old", "wb") as file:
        file.write(NEW)
