"""The outbox: what waits there for the remote store neither comes back after its deletion nor is forgotten."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_cases import BACKBONE, chunk_of, name_of, same_chunk
from store_processes import wait_until

from kvpatch_jax.errors import StoreError, StoreUnreachableError
from kvpatch_jax.store import Budget, ChunkStore, LocalAdapter, RemoteStore, RetryPolicy
from kvpatch_jax.store.disk.outbox import Outbox

SECRET = b"shared by the machines"


class Switched:
    """A service that answers only while it is on."""

    def __init__(self, folder: Path) -> None:
        self.on, self.inner = True, LocalAdapter(folder)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if not self.on:
            raise StoreUnreachableError("remote store: got no answer; expected one")
        return call(*arguments, **more)

    def read(self, *arguments: Any, **more: Any) -> Any:
        return self._ask(self.inner.read, *arguments, **more)

    def write(self, *arguments: Any, **more: Any) -> Any:
        return self._ask(self.inner.write, *arguments, **more)

    def delete(self, *arguments: Any, **more: Any) -> Any:
        return self._ask(self.inner.delete, *arguments, **more)

    def paths(self, *arguments: Any, **more: Any) -> Any:
        return self._ask(self.inner.paths, *arguments, **more)


@pytest.fixture
def service(tmp_path: Path) -> Switched:
    return Switched(tmp_path / "service")


def opened(root: Path, service: Switched) -> ChunkStore:
    patience = RetryPolicy(tries=1)
    return ChunkStore(root, budget=Budget(host=0), secret=SECRET, remote=RemoteStore(service, patience=patience))


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvpatch-remote-sender"]


def test_a_read_between_the_steps_of_a_deletion_brings_nothing_back(
    tmp_path: Path, service: Switched, monkeypatch: pytest.MonkeyPatch
):
    """The chunk is gone from the disk, and its link not yet from the outbox."""
    service.on = False
    with opened(tmp_path / "root", service) as store:
        store.put(chunk_of())
        add_deletion, found = Outbox.add_deletion, []

        def read_before(self: Outbox, chunk_key: str) -> None:
            found.append(store.get("B", BACKBONE))
            add_deletion(self, chunk_key)

        monkeypatch.setattr(Outbox, "add_deletion", read_before)
        assert store.delete("B", BACKBONE)
        assert found == [None]
        assert store.get("B", BACKBONE) is None
        assert not store.contains("B", BACKBONE)


def test_an_evicted_object_that_waits_is_read(tmp_path: Path, service: Switched):
    service.on = False
    with opened(tmp_path / "root", service) as store:
        store.put(chunk_of())
        assert store.disk.delete(name_of(store, chunk_of()).path)
        assert same_chunk(store.get("B", BACKBONE), chunk_of())


def test_a_deletion_that_waits_is_sent_by_the_next_process_without_being_asked(tmp_path: Path, service: Switched):
    with opened(tmp_path / "root", service) as store:
        store.put(chunk_of())
        store.flush()
        assert service.inner.paths("obj/")
        service.on = False
        assert store.delete("B", BACKBONE)
    service.on = True
    with opened(tmp_path / "root", service) as store:
        objects = lambda: [path for path in service.inner.paths("obj/") if path.endswith(".safetensors")]
        wait_until(lambda: not objects())


def test_a_closed_store_has_no_thread_that_goes_on_trying(tmp_path: Path, service: Switched):
    before = set(senders())
    service.on = False
    store = opened(tmp_path / "root", service)
    store.put(chunk_of())
    with pytest.raises(StoreError):
        store.flush()
    store.close()
    deadline = time.monotonic() + 20
    while set(senders()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(senders()) <= before
    service.on = True
    with opened(tmp_path / "root", service) as store:
        store.flush()
        assert service.inner.paths("obj/")
