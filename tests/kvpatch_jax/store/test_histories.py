"""The checker of histories sees what is wrong with a history, and nothing wrong with a right one."""

import itertools
import random

import pytest
from histories import Call, after, linearizable
from hypothesis import given, settings
from hypothesis import strategies as st


def put(value: int, begin: int, end: int, key: int = 0) -> Call:
    return Call("put", key, value, begin, end)


def get(value: int | None, begin: int, end: int, key: int = 0) -> Call:
    return Call("get", key, value, begin, end)


def delete(found: int, begin: int, end: int, key: int = 0) -> Call:
    return Call("delete", key, found, begin, end)


RIGHT = {
    "nothing": [],
    "one after the other": [get(None, 0, 1), put(1, 2, 3), get(1, 4, 5), delete(1, 6, 7), delete(0, 8, 9)],
    "a get beside a delete": [put(1, 0, 1), delete(1, 2, 6), get(1, 4, 5)],
    "a get beside two puts sees either": [put(1, 0, 9), put(2, 1, 8), get(2, 2, 3), get(1, 4, 5)],
    "keys are apart": [put(1, 0, 1), delete(1, 2, 3), put(2, 0, 1, key=1), get(2, 4, 5, key=1)],
    "the end of one is the beginning of the other": [put(1, 0, 2), get(None, 2, 3)],
}
WRONG = {
    "a read of what was deleted": [put(1, 0, 1), delete(1, 2, 3), get(1, 4, 5)],
    "an acknowledged put that is not there": [put(1, 0, 1), get(None, 2, 3)],
    "an old version after a new one": [put(1, 0, 1), put(2, 2, 3), get(1, 4, 5)],
    "a version that nobody wrote": [put(1, 0, 9), get(3, 1, 2)],
    "two gets that go back": [put(1, 0, 1), put(2, 2, 9), get(2, 3, 4), get(1, 5, 6)],
    "two deletes of one put": [put(1, 0, 1), delete(1, 2, 5), delete(1, 3, 4)],
    "a delete that found nothing": [put(1, 0, 1), delete(0, 2, 3)],
    "there before it was put": [get(1, 0, 1), put(1, 2, 3)],
    "one key of two": [put(1, 0, 1), get(1, 2, 3), put(1, 0, 1, key=1), get(None, 2, 3, key=1)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_histories_have_an_explanation(name: str):
    assert linearizable(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_invalid_histories_have_no_linearisation(name: str):
    assert not linearizable(WRONG[name])


def explained(calls: list[Call]) -> bool:
    """By trying every order."""
    for order in itertools.permutations(calls):
        if any(later.end < earlier.begin for earlier, later in itertools.combinations(order, 2)):
            continue
        there, fits = None, True
        for call in order:
            right, there = after(call, there)
            fits = fits and right
        if fits:
            return True
    return not calls


calls = st.builds(
    lambda what, value, begin, length: Call(what, 0, value % 2 if what == "delete" else value, begin, begin + length),
    st.sampled_from(["put", "get", "delete"]),
    st.integers(1, 2),
    st.integers(0, 12),
    st.integers(0, 6),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=5))
def test_it_agrees_with_trying_every_order(history: list[Call]):
    assert linearizable(history) == explained(history)


def test_histories_of_a_dictionary_are_valid_and_changes_are_detected():
    """Four clients of one dictionary, each call taking effect somewhere inside its time."""
    rng = random.Random(0)
    there: dict[int, int] = {}
    history: list[Call] = []
    free = [0] * 4
    for moment in range(10, 20_000, 10):
        client = rng.randrange(4)
        begin, end = max(free[client], moment - rng.randrange(30)), moment + rng.randrange(9)
        if begin > moment:
            continue
        free[client] = end + 1
        key, version = rng.randrange(3), rng.randrange(5)
        answers = [put(version, begin, end, key), get(there.get(key), begin, end, key)]
        call = rng.choice([*answers, delete(int(key in there), begin, end, key)])
        if call.what == "put":
            there[key] = version
        elif call.what == "delete":
            there.pop(key, None)
        history.append(call)
    assert len(history) > 900
    assert linearizable(history)
    at = next(i for i, call in enumerate(history) if i > 500 and call.what == "get")
    history[at] = Call("get", history[at].key, 7, history[at].begin, history[at].end)
    assert not linearizable(history)
