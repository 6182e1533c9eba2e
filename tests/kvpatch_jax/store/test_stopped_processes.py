"""A process that was stopped, by a debugger or for lack of memory, holds up nobody who has other work."""

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_cases import BACKBONE, same_chunk
from store_processes import Process, processes, wait_until
from store_roles import STOPPED, made

from kvpatch_jax.store import Budget, ChunkStore

SOON = 5
"""Seconds that only a hang takes."""


@pytest.fixture
def running() -> Iterator[list[Process]]:
    """Processes that are killed at the end, stopped or not."""
    found: list[Process] = []
    yield found
    for process in found:
        process.kill()


def is_stopped(process: Process) -> bool:
    return Path(f"/proc/{process.number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"


def ends[T](call: Callable[[Process], T], stopped: Process, seconds: float = SOON) -> T:
    """Calls a function while a process is stopped, which is killed if the function hangs."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(call, stopped)
        try:
            return future.result(seconds)
        except TimeoutError:
            raise AssertionError(f"it hung for {seconds} seconds beside a process that is stopped") from None
        finally:
            if not future.done():
                stopped.kill()


def stopped_inside(root: Path, running: list[Process], call: str) -> Process:
    process = processes().start("stop_inside", root, call=call)
    running.append(process)
    wait_until(lambda: bool(process.error) or ("stopping" in process.spoken and is_stopped(process)))
    assert process.error == ""
    return process


@pytest.mark.parametrize("call", ["put", "delete"])
def test_what_is_stored_is_read_beside_a_stopped_process(tmp_path: Path, running: list[Process], call: str):
    stopped = stopped_inside(tmp_path / "store", running, call)
    with ChunkStore(tmp_path / "store", tenant=STOPPED, budget=Budget(host=0)) as store:
        found = ends(lambda _: store.get("before", BACKBONE), stopped)
        # While it is being deleted, it may be gone for readers already.
        assert same_chunk(found, made("before")) or (found is None and call == "delete")
        assert ends(lambda _: store.get("within", BACKBONE), stopped) is None


CALLS: dict[str, Callable[[ChunkStore], object]] = {
    "put": lambda store: store.put(made("mine")),
    "put_many": lambda store: store.put_many([made(f"mine{number}") for number in range(3)]),
    "put_async": lambda store: store.put_async(made("mine")).result(),
    "delete": lambda store: store.delete("there", BACKBONE),
    "collect": lambda store: store.collect(),
}


def goes_on(root: Path, running: list[Process], call: str, stopped: str) -> None:
    with ChunkStore(root, tenant="other", budget=Budget(host=0)) as store:
        store.put(made("there"))
        ends(lambda _: CALLS[call](store), stopped_inside(root, running, stopped))


ALONE = ("delete", "collect")
"""Those that remove something."""


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ALONE])
def test_another_tenant_goes_on_beside_a_stopped_put(tmp_path: Path, running: list[Process], call: str):
    goes_on(tmp_path / "store", running, call, "put")


def test_another_tenant_removes_beside_a_stopped_put(tmp_path: Path, running: list[Process]):
    goes_on(tmp_path / "store", running, "delete", "put")


def test_another_tenant_goes_on_beside_a_stopped_deletion(tmp_path: Path, running: list[Process]):
    goes_on(tmp_path / "store", running, "put", "delete")
