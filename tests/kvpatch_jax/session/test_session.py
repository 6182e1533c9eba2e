"""Sessions: the loop of an agent, evicted chunks that come back, forks, events, and a bounded cost per step."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import sys
from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits, state
from window_oracle import Naive

import kvpatch_jax as kvp
from kvpatch_jax.errors import CertificateError, SessionClosedError, SessionError
from kvpatch_jax.window import window_state

BAR = 2e-5


def close_to(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= BAR * np.abs(expected).max())


def test_a_session_equals_the_same_operations_on_plain_arrays(backbone, session):
    """The naive window prefills each image over a contiguous context and removes the one that slides out."""
    naive, evicted = Naive(backbone), []
    question = backbone.embed(**backbone.prepare([QUESTION]))
    for step in range(5):
        image = image_of(step)
        name = session.add(image)
        tokens = backbone.embed(**backbone.prepare([image]))
        if len(naive.parts) == 3:
            evicted.append(naive.parts[1].id)
            naive.remove(evicted[-1])
        naive.place(name, tokens, len(naive.parts))
        if step >= 2:  # full windows, before and after they slide: each size is programs of its own
            start = naive.parts[-1].start + naive.parts[-1].span
            assert close_to(logits(session), np.asarray(naive.run(question, start).logits))
    assert session.ids == tuple(part.id for part in naive.parts)
    assert (len(session), session.gone) == (3, tuple(evicted))
    assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
    stats = session.stats()
    assert (stats.added, stats.forwards, stats.left, stats.rotated) == (5, 5, 2, 3 - 1)
    assert "5 of pieces" in str(stats)


def test_evicted_chunks_come_back_by_name_and_by_image(backbone, session):
    names = [session.add(image_of(step)) for step in range(4)]
    assert session.gone == (names[1],)
    assert session.recall(names[1]) == names[1]
    assert session.gone == (names[2],)
    assert session.recall(image_of(2)) == names[2]
    assert session.add(image_of(3)) == names[3]  # what left and is given again comes back
    assert session.ids == (names[0], names[2], names[3])
    assert session.stats().recalled == 3
    assert session.slide(0) == (names[2], names[3])
    session.recall(names[3])
    assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8  # after the lead alone it is exact again
    assert session.replace(names[3], image_of(7)) == kvp.cache.chunk_id(backbone.fingerprint, image_of(7))
    assert session.ids[0] == names[0]


def test_recall_by_name_fails_and_changes_nothing_once_the_content_is_discarded(backbone):
    with kvp.Session(backbone, keep=1, memory=0) as session:
        session.add(image_of(0))
        first = session.add(image_of(1), id="first")
        session.add(image_of(2))
        before = state(session)
        with pytest.raises(SessionError, match="given again"):
            session.recall(first)
        assert state(session) == before
        assert session.recall(image_of(1)) == "first"
        assert session.ids[-1] == "first"


@pytest.mark.slow
def test_texts_leave_with_the_chunk_behind_them(session):
    session.add("w5 w6", id="system")
    for step in range(3):
        session.add(f"w{10 + step}", id=f"note {step}")
        session.add(image_of(step), id=f"shot {step}")
    assert session.ids == ("system", "note 0", "shot 1", "note 2", "shot 2")
    assert session.gone == ("shot 0",)
    with pytest.raises(SessionError):
        session.recall("note 1")
    assert session.add("w11").endswith("#2")  # an evicted text may be added again, as a new piece
    assert len(session) == 6


def test_order_free_chunks_are_reordered(session):
    session.add("w5 w6")
    names = [session.add(image_of(step), order_free=True) for step in range(2)]
    session.reorder(names[::-1])
    assert session.ids[1:] == (names[1], names[0])
    with pytest.raises(SessionError):
        session.reorder(["none"])


def test_a_fork_shares_until_it_changes(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    before, used = logits(session), session.runtime.executor.books.allocator.free
    branch = session.fork()
    assert session.runtime.executor.books.allocator.free == used
    assert branch.ids == session.ids
    branch.add(image_of(4))
    branch.slide(1)
    assert (logits(session) == before).all()
    own = logits(branch)
    session.close()
    with pytest.raises(SessionClosedError):
        session.ask(QUESTION)
    assert (logits(branch) == own).all()
    assert branch.recall(image_of(2))
    runtime, ids = branch.runtime, (*branch.window.ids, *branch.window.gone)
    branch.close()
    books = runtime.executor.books
    assert not books.allocator.counts.any()
    assert not any(id in runtime.executor.sources for id in ids)
    assert not books.branches


def test_a_closed_session_takes_no_calls(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=8, stop=())
    session.close()
    session.close()
    for call in (
        lambda: session.add(image_of(1)),
        lambda: session.ask(QUESTION),
        lambda: session.recall("x"),
        lambda: session.slide(1),
        lambda: session.evict("x"),
        lambda: session.replace("x", image_of(1)),
        lambda: session.reorder([]),
        lambda: session.fork(),
        lambda: session.needs("x", QUESTION),
        lambda: session.plan(),
        lambda: session.save("x"),
        lambda: answer.ids,
    ):
        with pytest.raises(SessionClosedError):
            call()
    assert "closed" in repr(session)


def test_a_certificate_of_other_weights_is_refused(backbone, session):
    from kvpatch_jax.plan import Certificate

    certificate = object.__new__(Certificate)
    object.__setattr__(certificate, "backbone", "f" * 64)
    object.__setattr__(certificate, "model", "another")
    with pytest.raises(CertificateError, match="another"):
        kvp.Session(backbone, certificate=certificate)


@pytest.mark.slow
def test_a_long_loop_costs_no_more_at_its_end(backbone, monkeypatch: pytest.MonkeyPatch):
    """A step calls as many functions when hundreds of chunks have left as when some have: beyond a bound all goes."""
    monkeypatch.setattr(window_state, "MOST_GONE", 6)
    calls = 0

    def count(frame: Any, what: str, argument: Any) -> None:
        nonlocal calls
        calls += what == "call"

    taken = []
    with kvp.Session(backbone, keep=2) as session:
        for step in range(40):
            image = image_of(1 if step == 30 else step)
            calls = 0
            sys.setprofile(count)
            try:
                name = session.add(image)
            finally:
                sys.setprofile(None)
            taken.append(calls)
            if step == 30:  # forgotten by now: another name, but the id that stores know it by
                assert name.endswith("#2")
                assert session.window.pieces[-1].entry.id == name.removesuffix("#2")
        assert len(session.gone) == 6
        with pytest.raises(SessionError, match="expected one that left"):
            session.recall(image_of(2))
    assert max(taken[32:]) <= max(taken[12:22]) + 20
