"""Retrievers: exact against NumPy in float64, the approximate one's recall at 10, any order of adding and removing."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError, NotFiniteError, ShapeError
from kvpatch_jax.store import ApproximateRetriever, ExactRetriever, Retriever, pooled, recall


def clustered(count: int, width: int, clusters: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Vectors around centres of unequal weight, as pictures of a few kinds are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, width))
    weights = rng.dirichlet(np.full(clusters, 0.7))
    return centres[rng.choice(clusters, count, p=weights)] + spread * rng.standard_normal((count, width))


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


def test_recall_at_10_of_the_approximate_retriever():
    """Clustered vectors, 3 000 of width 64: a fifth of the files, the default, gives nineteen of twenty neighbours."""
    vectors = clustered(3200, 64, 150)
    stored, queries = vectors[:3000], vectors[3000:]
    exact = filled(ExactRetriever(64), stored)
    shares = {}
    for probes in (0.05, 0.1, 0.2):
        found = filled(ApproximateRetriever(64, probes=probes), stored)
        shares[probes] = float(recall(found, exact, queries).mean())
        seen = np.mean([len(found._candidates(query / np.linalg.norm(query), 10)) for query in queries]) / 3000
        print(f"probes {probes}: recall@10 {shares[probes]:.3f}, looks at {seen:.3f} of the vectors")
        assert seen < 2.5 * probes
    assert shares[0.2] >= 0.95
    assert shares[0.05] <= shares[0.1] <= shares[0.2]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaar"), st.integers(0, 30), st.integers(0, 10**6)), max_size=150))
def test_any_order_of_adding_and_removing(steps):
    """With every file looked into, the approximate retriever is the exact one, and both are a dictionary."""
    exact, found = ExactRetriever(6), ApproximateRetriever(6, probes=1.0, exact_below=4)
    known: dict[str, np.ndarray] = {}
    for what, number, seed in steps:
        id = f"v{number}"
        if what == "a":
            known[id] = np.random.default_rng(seed).standard_normal(6)
            exact.add(id, known[id])
            found.add(id, known[id])
        else:
            there = known.pop(id, None) is not None
            assert (exact.remove(id), found.remove(id)) == (there, there)
    query = np.arange(1.0, 7.0)
    score = lambda id: known[id] @ query / np.linalg.norm(known[id])
    wanted = sorted(known, key=lambda id: (-score(id), id))[:5]
    assert exact.search(query, 5)[0] == found.search(query, 5)[0] == wanted
    assert len(exact) == len(found) == len(known)


def test_a_search_finds_k_where_there_are_k():
    vectors = clustered(600, 16, 40)
    found = filled(ApproximateRetriever(16, probes=0.01, exact_below=256), vectors)
    assert all(len(found.search(query, 50)[0]) == 50 for query in vectors[:20])


def test_searches_are_correct_while_others_add():
    found = ApproximateRetriever(8, exact_below=32)
    vectors = clustered(600, 8, 10)
    found.add("first", vectors[0])
    errors = []

    def search() -> None:
        try:
            while len(found) < 600:
                ids, scores = found.search(vectors[1], 5)
                assert ids
                assert np.all(np.diff(scores) <= 0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    filled(found, vectors[1:])
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", [ExactRetriever, ApproximateRetriever])
def test_bad_vectors_are_refused(make):
    retriever = make(3)
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
        make(0)
    with pytest.raises(InputError, match="probes"):
        ApproximateRetriever(3, probes=0)


def test_pooled_vectors_are_unit_means_of_the_true_length():
    output = np.array([[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]], np.float32)
    assert np.allclose(pooled(output, 2), np.array([0.6, 0.8]))
    with pytest.raises(ShapeError):
        pooled(output[:0])


def test_equal_vectors_come_in_the_order_of_their_ids():
    for width, count in ((6, 5), (6, 40), (257, 33), (1024, 130)):
        vector = np.random.default_rng(width).standard_normal(width)
        exact, found = ExactRetriever(width), ApproximateRetriever(width, probes=1.0, exact_below=4)
        for number in reversed(range(count)):
            exact.add(f"v{number:03}", vector)
            found.add(f"v{number:03}", vector)
        query = np.random.default_rng(1).standard_normal(width)
        wanted = [f"v{number:03}" for number in range(min(count, 7))]
        assert exact.search(query, 7)[0] == found.search(query, 7)[0] == wanted
