"""What callbacks of acknowledgements may do, and what `flush` and `close` wait for."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_cases import BACKBONE, chunk_of, same_chunk
from store_gates import PATIENCE, GatedStore

FIRST, SECOND = chunk_of("first", 1), chunk_of("second", 2)

CALLS: dict[str, Callable[[GatedStore], Any]] = {
    "flush": lambda store: store.flush(),
    "close": lambda store: store.close(),
    "put": lambda store: store.put(SECOND),
    "put_async": lambda store: [store.put_async(chunk_of(f"more {number}")) for number in range(4)],
    "delete": lambda store: store.delete("second", BACKBONE),
    "delete_tenant": lambda store: store.delete_tenant(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_callback_may_call_its_store(tmp_path: Path, call: str):
    """Also with a second object behind the first in the queue, which has no room for a third."""
    store = GatedStore(tmp_path, queue=2 * FIRST.nbytes)
    ended, outcomes = threading.Event(), list[BaseException | None]()

    def callback(_: Any) -> None:
        try:
            CALLS[call](store)
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)
        ended.set()

    store.put_async(FIRST).add_done_callback(callback)
    second = store.put_async(SECOND)
    store.gate.go.set()
    assert ended.wait(PATIENCE)
    assert outcomes == [None]
    assert second.exception(PATIENCE) is None
    store.close()


def test_flush_waits_for_callbacks_of_other_threads(tmp_path: Path):
    before = set(threading.enumerate())
    store, called = GatedStore(tmp_path), list[str]()
    for chunk in (FIRST, SECOND):
        store.put_async(chunk).add_done_callback(lambda _, id=chunk.id: called.append(id))
    store.gate.go.set()
    store.flush()
    assert called == ["first", "second"]
    assert same_chunk(store.get("second", BACKBONE), SECOND)
    store.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"kvpatch-writer", "kvpatch-acknowledge"}
