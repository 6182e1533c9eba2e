"""Retrievers: exact against NumPy in float64, any order of adding and removing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError
from kvpatch_jax.store import ExactRetriever, Retriever, pooled


def filled(retriever, vectors):
    for number, vector in enumerate(vectors):
        retriever.add(f"v{number:06d}", vector)
    return retriever


def test_exact_is_exact():
    rng = np.random.default_rng(1)
    vectors, queries = rng.standard_normal((200, 24)), rng.standard_normal((20, 24))
    retriever = filled(ExactRetriever(24), vectors)
    assert isinstance(retriever, Retriever)
    assert len(retriever) == 200
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for query in queries:
        cosines = unit @ (query / np.linalg.norm(query))
        order = np.argsort(-cosines)[:10]
        ids, scores = retriever.search(query, 10)
        assert ids == [f"v{number:06d}" for number in order]
        assert np.abs(scores - cosines[order]).max() < 1e-6
    assert len(retriever.search(queries[0], 500)[0]) == 200
    assert ExactRetriever(4).search(np.ones(4), 3)[0] == []


def test_equal_scores_come_in_the_order_of_their_ids():
    retriever = ExactRetriever(2)
    for id in ("b", "a", "d", "c"):
        retriever.add(id, np.array([2.0, 0.0]))
    assert retriever.search(np.array([1.0, 0.0]), 3)[0] == ["a", "b", "c"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaar"), st.integers(0, 30), st.integers(0, 10**6)), max_size=150))
def test_any_order_of_adding_and_removing(steps):
    exact = ExactRetriever(6)
    known: dict[str, np.ndarray] = {}
    for what, number, seed in steps:
        id = f"v{number}"
        if what == "a":
            known[id] = np.random.default_rng(seed).standard_normal(6)
            exact.add(id, known[id])
        else:
            there = known.pop(id, None) is not None
            assert exact.remove(id) == there
    query = np.arange(1.0, 7.0)
    score = lambda id: known[id] @ query / np.linalg.norm(known[id])
    wanted = sorted(known, key=lambda id: (-score(id), id))[:5]
    assert exact.search(query, 5)[0] == wanted
    assert len(exact) == len(known)


@pytest.mark.usefixtures("unchecked")
def test_bad_vectors_are_refused():
    retriever = ExactRetriever(3)
    for call in (lambda v: retriever.add("a", v), lambda v: retriever.search(v, 1)):
        with pytest.raises(ShapeError, match=r"\(2,\); expected \(3,\)"):
            call(np.ones(2))
        with pytest.raises(NotFiniteError):
            call(np.array([1, np.inf, 0]))
        with pytest.raises(InputError, match="zeros"):
            call(np.zeros(3))
        call(np.full(3, 1e-38, np.float32))
        call(np.full(3, 3e38, np.float32))
    with pytest.raises(InputError, match="k 0"):
        retriever.search(np.ones(3), 0)
    with pytest.raises(InputError, match="width"):
        ExactRetriever(0)


def test_pooled_vectors_are_unit_means_of_the_true_length():
    output = np.array([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], np.float32)
    assert np.allclose(pooled(output, 2), np.array([0.6, 0.8]))
    with pytest.raises(ShapeError):
        pooled(output[:0])
