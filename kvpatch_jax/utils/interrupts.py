"""Interrupts that wait for the end of a step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defers SIGINT to the end of the block, so that what the block changes is changed as a whole.

    A second one is not deferred: the block may hang. Python handles signals on the main thread alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[tuple[Any, ...]] = []

    def defer(*arguments: Any) -> None:
        late.append(arguments)
        if len(late) > 1:
            handler(*arguments)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(late) == 1:
            handler(*late[0])
