"""The checker of registers that may lose their value sees what is wrong, and nothing wrong with what is right."""

import pytest
from hypothesis import strategies as st
from register_histories import FOREVER, RegisterCall, unexplained


def put(value: int, begin: int, end: int = FOREVER, placed: int | None = None, store: int = 0) -> RegisterCall:
    return RegisterCall("put", "a", value, begin, end, end if placed is None else placed, store)


def get(value: int | None, begin: int, end: int, store: int = 1) -> RegisterCall:
    return RegisterCall("get", "a", value, begin, end, store=store)


def delete(begin: int, end: int = FOREVER, store: int = 0) -> RegisterCall:
    return RegisterCall("delete", "a", None, begin, end, end, store)


def evict(begin: int, end: int) -> RegisterCall:
    return RegisterCall("evict", "a", None, begin, end, end)


def restore(begin: int, end: int) -> RegisterCall:
    return RegisterCall("restore", "a", 0, begin, end, end)


RIGHT = {
    "nothing": [],
    "one after the other": [get(None, 0, 1), put(1, 2, 3), get(1, 4, 5), delete(6, 7), get(None, 8, 9)],
    "what was evicted is missed or found elsewhere": [put(1, 0, 1), evict(2, 3), get(None, 4, 5), get(1, 6, 7)],
    "a put that failed has happened or not": [put(1, 0, 1), put(2, 2), get(1, 3, 4), get(2, 5, 6)],
    "a delete that failed has happened": [put(1, 0, 1), delete(2), get(1, 3, 4), get(None, 5, 6)],
    "its own queue is read early": [put(1, 0, 1), put(2, 2, 9, 3), get(2, 4, 5, store=0), get(1, 6, 7)],
    "a queued put is replaced": [put(1, 0, 9, 1), put(2, 2, 3, store=1), get(2, 4, 5), get(2, 10, 11)],
    "a snapshot is restored where nothing is": [put(1, 0, 1), delete(2, 3), restore(4, 5), get(0, 6, 7)],
    "or where it was evicted": [put(1, 0, 1), evict(2, 3), restore(4, 5), get(0, 6, 7)],
    "or both are there, in different tiers": [
        *(put(1, 0, 1), evict(2, 3), restore(4, 5), get(0, 6, 7), evict(8, 9), get(1, 10, 11))
    ],
    "or not": [put(1, 0, 1), delete(2, 3), restore(4, 5), get(None, 6, 7)],
    "two puts at once": [put(1, 0, 9), put(2, 1, 8), get(1, 10, 11), get(1, 12, 13)],
}
WRONG = {
    "what was deleted returns": [put(1, 0, 1), delete(2, 3), get(1, 4, 5)],
    "what was deleted returns after a miss": [put(1, 0, 1), delete(2, 5), get(None, 3, 4), get(1, 6, 7)],
    "an acknowledged put is lost": [put(1, 0, 1), get(None, 2, 3)],
    "an older value": [put(1, 0, 1), put(2, 2, 3), get(1, 4, 5)],
    "an older value after an eviction": [put(1, 0, 1), put(2, 2, 3), evict(4, 5), get(1, 6, 7)],
    "a queued put comes after a later put": [put(1, 0, 9, 1), put(2, 2, 3, store=1), get(1, 10, 11)],
    "a queued put comes after a deletion": [put(1, 0, 9, 1), delete(2, 3, store=1), get(1, 10, 11)],
    "a store does not see its queue": [put(1, 0, 20, 1), put(2, 2, 21, 3), get(1, 4, 5, store=0)],
    "others see a queue and then not": [put(1, 0, 1), put(2, 2, 9, 3), get(2, 4, 5), get(1, 6, 7)],
    "a restored value returns after a put": [
        *(put(1, 0, 1), evict(2, 3), restore(4, 5), put(2, 6, 7), evict(8, 9), get(0, 10, 11))
    ],
    "a restore replaces": [put(1, 0, 1), restore(2, 3), get(0, 4, 5)],
    "two puts at once, and both win": [put(1, 0, 9), put(2, 1, 8), get(1, 10, 11), get(2, 12, 13)],
    "nobody wrote it": [put(1, 0, 1), get(3, 2, 3)],
    "there before it was put": [get(1, 0, 1), put(1, 2, 3)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_histories_of_registers_have_an_explanation(name: str):
    assert unexplained(RIGHT[name]) == ""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_histories_of_registers_have_none(name: str):
    assert unexplained(WRONG[name]) != ""


times = st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans())
shapes = st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "evict"]), st.integers(0, 3), times), max_size=5)
