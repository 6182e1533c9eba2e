"""What stands in front: leads, the tokens that attention sinks on, and texts there that are replaced at every step."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from tests.shared.session_cases import IMAGE_TOKENS, QUESTION, Oracle, expect_logits, image_of, settled, state, words

SHOTS = [image_of(number) for number in range(4)]
HISTORIES = [words(5 + number, 9 + number) for number in range(5)]
SINK = 4


def open_rounds(backbone, store=None, **options):
    """Returns a session of a history and four screenshots behind it."""
    session = kvp.Session(backbone, store, **options)
    session.add(HISTORIES[0], id="history 0")
    for number, shot in enumerate(SHOTS):
        session.add(shot, id=f"shot {number}")
    return session


def test_four_rounds_of_exact_reuse_prefill_the_text_and_what_follows_it(backbone):
    with open_rounds(backbone) as session:
        for number in range(1, 5):
            assert session.replace(f"history {number - 1}", HISTORIES[number], name=f"history {number}")
            step, text = session.stats().steps[-1], 9 + number
            assert (step.op, step.computed) == ("replace", text + 4 * IMAGE_TOKENS)
            assert step.reused == {"kept": SINK}
            assert session.ids == ("history 0 sink", f"history {number}", *(f"shot {n}" for n in range(4)))
            # The first text's sink stays in front of every later one.
            expect_logits(session, Oracle(backbone, words(5, SINK), HISTORIES[number], *SHOTS).logits())
            assert {session.fidelity(name) for name in session.ids} == {"exact"}
        assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8
        assert session.stats().forwards == 6 + 4 * 5


def test_four_rounds_of_patched_reuse_prefill_the_text_alone(backbone):
    with open_rounds(backbone, reuse="patched") as session:
        oracle = Oracle(backbone, words(5, SINK), HISTORIES[0][len(words(5, SINK)) :], *SHOTS)
        for number in range(1, 5):
            session.replace(f"history {number - 1}", HISTORIES[number], name=f"history {number}")
            step = session.stats().steps[-1]
            assert (step.computed, step.reused) == (9 + number, {"kept": SINK, "rotated": 4 * IMAGE_TOKENS})
            oracle.remove(oracle.naive.parts[1].id)
            oracle.put(f"history {number}", HISTORIES[number], 1)
            expect_logits(session, oracle.logits())
        assert [session.fidelity(name) for name in session.ids] == ["exact"] * 2 + ["approximate"] * 4
        assert not session.window.as_promised
        # A screenshot that enters now is prefilled behind approximate ones.
        session.add(image_of(7), id="new")
        assert session.fidelity("new") == "approximate"
        oracle.put("new", image_of(7))
        expect_logits(session, oracle.logits())


def test_rounds_whose_prefills_are_stored_take_no_forward_of_an_image(backbone, store):
    """The second time, the very same history stands in front."""
    for forwards in (6 + 5, 3):
        with open_rounds(backbone, store) as session:
            session.replace("history 0", HISTORIES[1])
            expect_logits(session, Oracle(backbone, words(5, SINK), HISTORIES[1], *SHOTS).logits())
            assert session.stats().forwards == forwards
            settled(session)


def test_an_inserted_chunk_is_unknown_to_what_follows(backbone):
    for reuse in ("exact", "patched"):
        with kvp.Session(backbone, reuse=reuse) as session:
            session.add("w5 w6", id="system")
            session.add(SHOTS[0], id="shot 0")
            assert session.insert(SHOTS[1], "shot 0", id="shot 1") == "shot 1"
            assert session.ids == ("system", "shot 1", "shot 0")
            oracle = Oracle(backbone, "w5 w6", SHOTS[0])
            oracle.put("shot 1", SHOTS[1], 1)
            if reuse == "exact":
                oracle = Oracle(backbone, "w5 w6", SHOTS[1], SHOTS[0])
            expect_logits(session, oracle.logits())
            assert session.fidelity("shot 0") == ("exact" if reuse == "exact" else "approximate")
            before = state(session)
            with pytest.raises(SessionError, match="pinned"):
                session.insert("w9", "system")
            assert state(session) == before


def test_a_first_image_that_stands_for_a_text_is_one_piece(backbone):
    with kvp.Session(backbone) as session:
        session.add(SHOTS[0], kind="text")
        expect_logits(session, Oracle(backbone, SHOTS[0]).logits())
        assert len(session) == 1


def test_nothing_is_inserted_in_front_of_what_leaves_for_it(backbone):
    with kvp.Session(backbone, keep=2, lead=0) as session:
        for number in range(2):
            session.add(SHOTS[number], id=f"shot {number}")
        before = state(session)
        with pytest.raises(SessionError, match="'shot 0', which leaves to make room"):
            session.insert(SHOTS[2], "shot 0")
        assert state(session) == before
        assert session.insert(SHOTS[2], "shot 1") == session.ids[0]


LEADS = [words(5, 9), [5, 6, 7], [words(5, 6), SHOTS[1], "w30"], SHOTS[1], None, 0]


@pytest.mark.parametrize(("lead", "count"), list(zip(LEADS, (1, 1, 3, 1, 0, 0), strict=True)))
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


@pytest.mark.parametrize("length", [1, SINK, SINK + 1, 2 * SINK, 11])
def test_a_first_text_keeps_its_sink_alone(backbone, length, tmp_path):
    """Restored sessions embed the two parts again from the text, at any length."""
    with kvp.Session(backbone) as session:
        session.add(words(5, length), id="first")
        session.add(SHOTS[0], id="shot")
        assert session.ids == (("first", "shot") if length <= SINK else ("first sink", "first", "shot"))
        expected = Oracle(backbone, words(5, length), SHOTS[0]).logits()
        expect_logits(session, expected)
        session.save(tmp_path / "session", kv=False)
        if length > SINK:
            session.evict("first")
            assert session.window.tokens == SINK + IMAGE_TOKENS
            assert session.fidelity("shot") == "survivor"
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        expect_logits(session, expected)
        assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8
