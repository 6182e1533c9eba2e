"""Every system call of every scenario fails once, or from then on: errors have types, and nothing acknowledged is lost.

What an operation that raised has changed is open; what was acknowledged before is there, what was deleted stays away,
and the next operation works, in the same store object and in another.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from failing_system import OF_CODE, OneFailure
from store_contract import SCENARIOS, Effects, Scenario, Words, allowed, expect, make_snapshot, open_store, prepare

from kvpatch_jax.errors import StoreError, StoreFullError, StoreIOError, StoreReadOnlyError, StoreSnapshotError

KINDS: dict[int, type[StoreError]] = {
    errno.EIO: StoreIOError,
    errno.EINTR: StoreIOError,
    errno.EMFILE: StoreIOError,
    errno.ENOSPC: StoreFullError,
    errno.EROFS: StoreReadOnlyError,
}


class FailingWords(Words):
    """Operations while calls fail."""

    failing = True

    def __init__(self, failure: OneFailure):
        self._failure = failure
        self.begun: dict[int, Effects] = {}
        self.ended: set[int] = set()

    def begin(self, what: Effects) -> int:
        self.begun[len(self.begun)] = what
        return len(self.begun) - 1

    def end(self, number: int) -> None:
        self.ended.add(number)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with self._failure.aside():
            yield


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_snapshot(tmp_path)
    return tmp_path


def descriptors() -> set[str]:
    """The files that are open below any store."""
    found = set[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {path for path in found if "/disk/store" in path}


def fails_well(base: Path, scenario: Scenario, failure: OneFailure) -> bool:
    """Runs a scenario with a failure on a copy of `base/prepared`. Returns whether a call failed."""
    root, beside = base / "disk" / "store", base / "remote" if scenario.remote else None
    for name in ("disk", "remote"):
        shutil.rmtree(base / name, ignore_errors=True)
        if (base / "prepared" / name).exists():
            shutil.copytree(base / "prepared" / name, base / name, symlinks=True)
    words, raised = FailingWords(failure), None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(StoreError))  # of `close`, which says again what `flush` said
            store = stack.enter_context(open_store(root, beside))
            with failure.installed():
                try:
                    scenario.act(store, words)
                except StoreError as error:
                    raised = error
            kinds = (KINDS[failure.code], StoreSnapshotError)
            assert raised is None or isinstance(raised, kinds), "another error"
            assert raised is None or failure.failed, "an error without a failure"
            expect(store, scenario, allowed(scenario.first, words.begun, words.ended))
        with open_store(root, beside) as again:
            left = allowed(scenario.first, words.begun, words.ended)
            gone: dict[str, set[int | None]] = {"kv:new": {None}, "patch:new": {None}}  # the first one just did it
            expect(again, scenario, left | gone)
        assert descriptors() == set(), "files stay open"
    except Exception as error:
        error.add_note(f"{failure.failed} (call {failure.at} of its kind) failed: {raised!r}")
        raise
    return bool(failure.failed)


def all_fail(
    base: Path, name: str, code: int, every: int = 1, calls: Collection[str] | None = None, lasting: bool = False
) -> int:
    """Fails one call after the other, until a scenario runs through. Returns the number of failures."""
    scenario, at = SCENARIOS[name], 0
    prepared = base / "prepared"
    (prepared / "disk").mkdir(parents=True)
    remote = prepared / "remote" if scenario.remote else None
    if remote is not None:
        remote.mkdir()
    prepare(prepared / "disk" / "store", scenario, remote)
    root = str(base / "disk")
    while fails_well(base, scenario, OneFailure(root, at, code, calls or OF_CODE.get(code), lasting)):
        at += every
    return at // every


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("put", "evict", "promote", "restore", "library")]


@pytest.mark.parametrize("name", ["put_many", "delete_tenant", *SLOW])
def test_any_call_may_fail(base: Path, name: str):
    assert all_fail(base, name, errno.EIO, 29) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replace", "delete"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_may_be_full_or_broken_from_any_call_on(base: Path, name: str, code: int):
    """Until it is mended; then the store goes on."""
    every = 5 if code == errno.ENOSPC else 19
    assert all_fail(base, name, code, every, lasting=True) > 0


@pytest.mark.parametrize("name", ["put_many", "put_patches"])
def test_a_sync_may_be_interrupted(base: Path, name: str):
    """Python calls all but `syncfs` again by itself."""
    assert all_fail(base, name, errno.EINTR) > 0
