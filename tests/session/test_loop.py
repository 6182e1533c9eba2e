"""The loop of an agent: chunks enter, slide out and come back, under their names, on branches, at a bounded cost."""
# pyright: reportArgumentType=false

import sys
from typing import Any

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import SessionError
from kvpatch_jax.window import window as windows
from tests.shared.session_cases import QUESTION, Oracle, expect_logits, image_of, logits


def test_a_session_equals_the_same_operations_on_plain_arrays(backbone, session):
    """Each image is prefilled behind those that are there, and stays as it is when the oldest one leaves."""
    oracle = Oracle(backbone)
    for step in range(5):
        if step >= 3:
            oracle.remove(f"shot {step - 2}")
        oracle.put(f"shot {step}", image_of(step))
        session.add(image_of(step), id=f"shot {step}")
        if step >= 3:
            expect_logits(session, oracle.logits())
    assert (session.ids, session.gone) == (("shot 0", "shot 3", "shot 4"), ("shot 1", "shot 2"))
    assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
    session.recall("shot 1")
    oracle.remove("shot 3")
    oracle.put("shot 1", image_of(1))
    expect_logits(session, oracle.logits())
    stats = session.stats()
    assert (stats.added, stats.recalled, stats.forwards, stats.left, stats.rotated) == (5, 1, 6, 3, 3)


def test_evicted_chunks_come_back_by_name_and_by_content(session):
    names = [session.add(image_of(step)) for step in range(4)]
    assert session.gone == (names[1],)
    assert session.recall(names[1]) == names[1]
    assert session.recall(image_of(2)) == names[2]
    assert session.add(image_of(3)) == names[3]
    assert session.ids == (names[0], names[2], names[3])
    assert session.stats().recalled == 3
    assert session.recall(names[3]) == session.recall(image_of(3)) == names[3]
    assert session.stats().recalled == 3, "what is there stays as it is"
    assert session.slide(0) == (names[2], names[3])
    session.recall(names[3])
    assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8, "behind the lead alone it is exact again"
    with pytest.raises(SessionError, match="never added"):
        session.recall(image_of(9))


def test_copies_have_names_of_their_own(backbone, session):
    name = session.add(image_of(0))
    assert len(session.plan(image_of(1), image_of(1)).window) == 3
    assert name == chunk_id(backbone.fingerprint, image_of(0))
    assert session.add(image_of(0)) == f"{name}#2"
    assert session.add(image_of(1), id="mine") == "mine"
    assert session.evict(f"{name}#2") == (f"{name}#2",)
    # An input that is given twice is recalled once, and a copy beside that.
    assert session.plan(image_of(0), image_of(0)).window.ids == (name, f"{name}#2", f"{name}#3")
    # The evicted copy is meant, not the one that is there.
    assert session.recall(image_of(0)) == f"{name}#2"
    assert session.add(image_of(0)) == f"{name}#3"
    contents = [piece.entry.content for piece in session.window.pieces]
    assert contents.count(name) == len(session) == 3
    for taken in ("mine", name, f"{name}#3"):
        with pytest.raises(SessionError, match="name of another piece"):
            session.add(image_of(2), id=taken)


def test_texts_leave_with_the_chunk_that_they_follow(session):
    session.add("w5 w6", id="system")
    session.add("w9", id="history")
    for step in range(3):
        session.add(image_of(step), id=f"shot {step}")
        session.add(f"w{10 + step}", id=f"note {step}")
    assert session.ids == ("system", "history", "shot 1", "note 1", "shot 2", "note 2")
    assert session.gone == ("shot 0",)
    with pytest.raises(SessionError, match="text, or forgotten since: add it again"):
        session.recall("note 0")
    assert session.add("w10").endswith("#2"), "an evicted text may be added again, as a new piece"


def test_a_fork_shares_until_it_changes(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    before, free = logits(session), session.stats().free_pages
    branch = session.fork(keep=5)
    assert (branch.ids, branch.keep, session.stats().free_pages) == (session.ids, 5, free)
    branch.add(image_of(4))
    branch.slide(1)
    assert (logits(session) == before).all()
    after = logits(branch)
    session.close()
    assert (logits(branch) == after).all(), "the parent is not needed any more"
    assert branch.recall(image_of(2))
    executor, ids = branch.runtime.executor, (*branch.window.ids, *branch.window.gone)
    branch.close()
    assert not executor.slots.counts.any()
    assert not executor.branches
    assert not any(executor.sources[id].tokens is not None for id in ids)


def test_a_closed_session_takes_no_calls(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=8, stop=())
    session.close()
    session.close()
    calls = (("add", "w5"), ("insert", "w5", "x"), ("ask", QUESTION), ("recall", "x"), ("slide", 1), ("evict", "x"))
    calls += (("replace", "x", "w5"), ("reorder", []), ("fork",), ("save", "x"), ("plan",), ("needs", "x", QUESTION))
    for name, *arguments in calls:
        with pytest.raises(SessionError, match="was closed"):
            getattr(session, name)(*arguments)
    with pytest.raises(SessionError, match="got closed after"):
        str(answer)
    assert "closed" in repr(session)


def test_a_long_loop_costs_no_more_at_its_end(backbone, monkeypatch):
    """Beyond a bound evicted chunks are forgotten, so a step calls no more functions than some steps earlier."""
    monkeypatch.setattr(windows, "MOST_GONE", 6)
    taken, calls = [], 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

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
            if step == 30:
                # Forgotten by now: it has another name, and still the id that stores know it by.
                assert name.endswith("#2")
                assert session.window.ids[-1] == name.removesuffix("#2")
        assert len(session.gone) == 6
        with pytest.raises(SessionError, match="forgotten since: add it again"):
            session.recall(image_of(2))
    assert max(taken[32:]) <= max(taken[12:22]) + 20


def test_the_name_of_a_forgotten_message_part_is_no_obstacle(backbone, monkeypatch):
    """A part that carries its name (vLLM's uuid) may be sent again after the session has forgotten it."""
    monkeypatch.setattr(windows, "MOST_GONE", 1)
    with kvp.Session(backbone, keep=1) as session:
        parts = [{"type": "image", "image": image_of(step), "uuid": f"part {step}"} for step in range(4)]
        assert [session.add(part) for part in parts] == [f"part {step}" for step in range(4)]
        assert session.gone == ("part 2",)
        assert session.add(parts[2]) == "part 2"
        assert session.add(parts[1]) == f"{chunk_id(backbone.fingerprint, image_of(1))}#2"
