"""Both sides of a connector, and the connector in an engine, as every test here opens them."""

import threading
import time
from typing import Any

import pytest


@pytest.fixture
def sides(tmp_path):
    from serving_sides import sides_of

    with sides_of(tmp_path) as sides:
        yield sides


@pytest.fixture(scope="module")
def connector():
    from serving_hooks import imported_connector

    with imported_connector() as module:
        yield module


@pytest.fixture
def hang(monkeypatch):
    """Lets a method of a class wait for an event, which is returned; `event.threads` are those that have come to it."""
    events = []

    def hang(kind, name):
        method = getattr(kind, name)
        event: Any = threading.Event()
        event.threads = set()
        events.append(event)

        def waiting(*args, **options):
            event.threads.add(threading.get_ident())
            assert event.wait(60)
            return method(*args, **options)

        monkeypatch.setattr(kind, name, waiting)
        return event

    yield hang
    for event in events:
        event.set()


@pytest.fixture
def wait_until():
    def wait_until(condition):
        deadline = time.perf_counter() + 60
        while not condition():
            assert time.perf_counter() < deadline
            time.sleep(0.001)

    return wait_until
