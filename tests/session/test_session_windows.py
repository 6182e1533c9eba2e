"""A session's window is what its calls say, its KV that of plain forwards over it, and its counts are what was run."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import SessionError
from tests.shared.session_cases import (
    IMAGE_TOKENS,
    QUESTION,
    Oracle,
    expect_logits,
    image_of,
    logits,
    state,
    worded,
    words,
)
from tests.shared.window_oracle import backbone_of

SHOTS = [image_of(number) for number in range(4)]
HISTORIES = [words(5 + number, 9 + number) for number in range(3)]
SINK = 4
LEAD, LEFT = "w5 w6", "w9 w10"


@pytest.mark.parametrize("family", ["mrope", pytest.param("hybrid", marks=pytest.mark.nightly)])
def test_images_that_slide_move_and_return_are_served_as_they_were_computed(family: str):
    """Each image is prefilled behind those that are there, and stays as it is when others leave or move."""
    backbone, images = worded(backbone_of(family)), [image_of(number, 24, 24) for number in range(5)]
    oracle = Oracle(backbone)

    def expect(session: kvp.Session, *order: int) -> None:
        oracle.naive.parts = [next(part for part in parts if part.id == str(number)) for number in order]
        oracle.naive.close()
        expect_logits(session, oracle.logits())

    with kvp.Session(backbone, lead=0, reuse="patched") as session:
        for number in range(4):
            session.add(images[number], id=str(number), order_free=True)
            oracle.put(str(number), images[number])
        parts = list(oracle.naive.parts)
        expect(session, 0, 1, 2, 3)
        session.evict("1")
        expect(session, 0, 2, 3)
        assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
        session.reorder(["3", "2", "0"])
        expect(session, 3, 2, 0)
        with session.fork() as branch:
            branch.slide(1)
            expect(branch, 0)
        expect(session, 3, 2, 0)
        session.recall("1")
        oracle.put("1", images[1])
        expect_logits(session, oracle.logits())
        stats = session.stats()
        assert (stats.added, stats.recalled, stats.forwards, stats.left, stats.rotated) == (4, 1, 5, 1, 4)
        numbers = 4 * 4 * backbone.layout.transition_numbers if backbone.layout.parts else 0
        assert stats.state_bytes >= numbers


def test_chunks_come_back_by_name_and_by_content_and_copies_have_names_of_their_own(backbone, session):
    names = [session.add(image_of(step)) for step in range(4)]
    assert names == [chunk_id(backbone.fingerprint, image_of(step)) for step in range(4)]
    assert session.gone == (names[1],)
    assert session.recall(names[1]) == names[1]
    assert session.recall(image_of(2)) == names[2]
    assert session.add(image_of(3)) == names[3]
    assert session.recall(names[3]) == session.recall(image_of(3)) == names[3]
    assert session.stats().recalled == 3, "what is there stays as it is"
    assert session.slide(0) == (names[2], names[3])
    session.recall(names[3])
    assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8, "behind the lead alone it is exact again"
    with pytest.raises(SessionError, match="never added"):
        session.recall(image_of(9))

    name = names[0]
    assert session.add(image_of(0)) == f"{name}#2"
    session.evict(f"{name}#2")
    # An input that is passed twice is recalled once, and a copy beside that.
    assert session.plan(image_of(0), image_of(0)).window.ids == (name, f"{name}#2", f"{name}#3")
    # The evicted copy is meant, not the chunk that is there.
    assert session.recall(image_of(0)) == f"{name}#2"
    with pytest.raises(SessionError, match="name of another piece"):
        session.add(image_of(2), id=name)


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


@pytest.mark.parametrize("promise", ["remember", "forget"])
def test_chunks_leave_together_once_there_are_too_many(backbone, promise, tmp_path):
    sizes, forwards, kept = [], [], []
    with kvp.Session(backbone, None, (2, 4), lead=0, promise=promise) as session:
        # A trace replays by the number that stayed, whatever the session's own rule was.
        session.watchers.append(lambda event, _: kept.append(event.keep))
        for number in range(9):
            session.add(image_of(number))
            sizes.append(len(session))
            forwards.append(session.stats().forwards)
        session.save(tmp_path / "session")
    assert sizes == [1, 2, 3, 4, 2, 3, 4, 2, 3]
    assert kept[:6] == [4, 4, 4, 4, 2, 4]
    # A window that forgets runs what stayed again, but only when something left: two chunks in place of one.
    again = [1] * 4 + ([1, 1, 1, 1, 1] if promise == "remember" else [2, 1, 1, 2, 1])
    assert np.diff([0, *forwards]).tolist() == again
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        assert session.keep == (2, 4)


@pytest.mark.parametrize("reuse", ["exact", "patched"])
def test_rounds_of_texts_in_front_prefill_the_text_and_where_reuse_is_exact_what_follows_it(backbone, reuse):
    with kvp.Session(backbone, reuse=reuse) as session:
        oracle = Oracle(backbone, words(5, SINK), words(5 + SINK, 9 - SINK), *SHOTS)
        session.add(HISTORIES[0], id="history 0")
        for number, shot in enumerate(SHOTS):
            session.add(shot, id=f"shot {number}")
        for number in (1, 2):
            session.replace(f"history {number - 1}", HISTORIES[number], name=f"history {number}")
            # The first text's sink stays in front of every later one.
            assert session.ids == ("history 0 sink", f"history {number}", *(f"shot {n}" for n in range(4)))
            step, text = session.stats().steps[-1], 9 + number
            if reuse == "exact":
                assert (step.computed, step.reused) == (text + 4 * IMAGE_TOKENS, {"kept": SINK})
                oracle = Oracle(backbone, words(5, SINK), HISTORIES[number], *SHOTS)
            else:
                assert (step.computed, step.reused) == (text, {"kept": SINK, "rotated": 4 * IMAGE_TOKENS})
                oracle.remove(oracle.naive.parts[1].id)
                oracle.put(f"history {number}", HISTORIES[number], 1)
            expect_logits(session, oracle.logits())
        fidelities = ["exact"] * 6 if reuse == "exact" else ["exact"] * 2 + ["approximate"] * 4
        assert [session.fidelity(name) for name in session.ids] == fidelities
        assert session.window.as_promised == (reuse == "exact")


def test_an_inserted_chunk_is_unknown_to_what_follows(backbone):
    with kvp.Session(backbone, keep=2, reuse="patched") as session:
        session.add("w5 w6", id="system")
        session.add(SHOTS[0], id="shot 0")
        assert session.insert(SHOTS[1], "shot 0", id="shot 1") == "shot 1"
        oracle = Oracle(backbone, "w5 w6", SHOTS[0])
        oracle.put("shot 1", SHOTS[1], 1)
        expect_logits(session, oracle.logits())
        assert session.fidelity("shot 0") == "approximate"
        with pytest.raises(SessionError, match="'shot 1', which leaves to make room"):
            session.insert(SHOTS[2], "shot 1")


LEADS = [([words(5, 9), SHOTS[1], "w30"], 3), (None, 0), (0, 0)]


@pytest.mark.parametrize(("lead", "count"), LEADS)
def test_a_lead_never_leaves(backbone, lead, count):
    with kvp.Session(backbone, keep=1, lead=lead) as session:
        # Nothing splits a lead that was given: it stays as a whole.
        assert len(session) == count
        for number in (0, 2, 3):
            session.add(SHOTS[number], id=f"shot {number}")
        first = session.ids[0]
        assert len(session) == count + (2 if lead is None else 1)
        assert session.gone == (("shot 2",) if lead is None else ("shot 0", "shot 2"))
        if isinstance(lead, int):
            session.evict(first)
            assert len(session) == 0
            return
        before = state(session)
        for call, arguments in ((session.evict, ()), (session.replace, ("w9",))):
            with pytest.raises(SessionError, match="pinned"):
                call(first, *arguments)
            assert state(session) == before


@pytest.mark.parametrize("promise", ["forget", "remember"])
def test_a_placeholder_takes_the_place_of_a_chunk_that_leaves(backbone, promise, tmp_path):
    with kvp.Session(backbone, None, (1, 3), lead=LEAD, promise=promise, placeholder=LEFT) as session:
        for number, stayed in enumerate(([0], [0, 1], [0, 1, 2], [3])):
            session.add(image_of(number), id=f"shot {number}")
            session.add(f"w{20 + number}")
            assert session.stats().placeholders == number + 1 - len(stayed)
        pieces = [LEAD, LEFT, "w20", LEFT, "w21", LEFT, "w22", image_of(3), "w23"]
        expect_logits(session, Oracle(backbone, *pieces).logits(), 1e-4)
        assert session.window.as_promised
        assert [name for name in session.ids if "left" in name] == [f"shot {number} left" for number in range(3)]
        assert session.gone == ("shot 0", "shot 1", "shot 2")
        # One that comes back and leaves again has a placeholder of another name.
        session.recall("shot 0")
        session.add(image_of(4), id="shot 4")
        session.add(image_of(5))
        assert [name for name in session.ids if "left" in name][-3:] == ["shot 3 left", "shot 0 left#2", "shot 4 left"]
        before = logits(session)
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        np.testing.assert_array_equal(logits(session), before)


@pytest.mark.parametrize("reuse", ["exact", "patched"])
def test_steps_count_what_was_computed_and_what_others_would_have_computed(backbone, reuse):
    """A prefix cache that holds every earlier window computes what follows the longest one that it has."""
    seen, computed = set[tuple[str, ...]](), list[int]()
    adds: list[Any] = [("add", image_of(number)) for number in range(4)]
    acts = [*adds, ("replace", "history 0", words(9, 3)), ("recall", SHOTS[1]), ("slide", 2), *adds[1:3]]
    acts += [("evict", SHOTS[3]), ("recall", SHOTS[0]), ("slide", 1), ("recall", SHOTS[2]), *adds]
    with kvp.Session(backbone, keep=4, reuse=reuse) as session:
        session.runtime.executor.observers.append(lambda *prefill: computed.append(prefill[3]))
        session.add(words(5, 6), id="history 0")
        seen |= {tuple(piece.entry.key for piece in session.window.pieces[:length]) for length in (1, 2)}
        for call, *arguments in acts:
            before, starts = session.window, {piece.made: piece.start for piece in session.window.pieces}
            del computed[:]
            if call == "evict":
                arguments = [chunk_id(backbone.fingerprint, *arguments)]
            getattr(session, call)(*arguments)
            counted, window = session.stats().steps[-1], session.window
            if window == before:
                continue
            contents = [piece.entry.key for piece in window.pieces]
            prefixes = [tuple(contents[: length + 1]) for length in range(len(contents))]
            sizes = [piece.entry.tokens for piece in window.pieces]
            missed = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
            assert counted.prefix_cache == sum(sizes[missed:])
            seen |= set(prefixes)
            assert counted.computed == sum(computed)
            assert counted.reprefill == sum(sizes) == counted.computed + sum(counted.reused.values())
            stays = [piece for piece in window.pieces if piece.made in starts]
            rotated = sum(piece.entry.tokens for piece in stays if starts[piece.made] != piece.start)
            assert counted.reused.get("rotated", 0) == rotated
        stats = session.stats()
        assert stats.tokens == sum(step.computed for step in stats.steps)
        assert stats.prefix_cache == sum(step.prefix_cache for step in stats.steps) < stats.reprefill
        assert stats.flops == sum(step.flops for step in stats.steps)
        assert stats.tokens_held == session.window.tokens
        assert f"{stats.tokens} computed; a prefix cache {stats.prefix_cache}" in str(stats)
