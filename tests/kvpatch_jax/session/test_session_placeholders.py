"""Placeholders: a text takes the place of a chunk that leaves, and the texts around it stay."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits, state

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.traces import Event

LEAD, LEFT = "w5 w6", "w9 w10"


def prompted(backbone, items) -> np.ndarray:
    """Returns the logits of a question behind a prompt of these items, which the model reads in one piece."""
    prompt = backbone.prepare([kvp.Text(item) if isinstance(item, str) else item for item in [*items, QUESTION]])
    return np.asarray(backbone.prefill(backbone.embed(**prompt)).logits)


def expect_prompt(session, items, bar: float = 2e-4) -> None:
    np.testing.assert_allclose(logits(session), prompted(session.backbone, items), atol=bar, rtol=0)


def add_steps(session, *numbers: int) -> None:
    """Adds an image and a text for each number."""
    for number in numbers:
        session.add(image_of(number), id=f"shot {number}")
        session.add(f"w{20 + number}")


@pytest.mark.parametrize("promise", ["forget", "remember"])
def test_answers_are_those_of_the_window_as_a_prompt(backbone, promise):
    low, high = 1, 3
    with kvp.Session(backbone, None, (low, high), lead=LEAD, promise=promise, placeholder=LEFT) as session:
        shown = []
        for number in range(5):
            add_steps(session, number)
            # By hand: what is shown once the oldest have left.
            shown = [*shown, number]
            if len(shown) > high:
                shown = shown[-low:]
            items = [LEAD]
            for step in range(number + 1):
                items += [image_of(step) if step in shown else LEFT, f"w{20 + step}"]
            expect_prompt(session, items)
            assert session.window.as_promised
            assert session.stats().placeholders == number + 1 - len(shown)
            assert len(session) == 1 + 2 * (number + 1)
        assert [name for name in session.ids if name.startswith("shot")][:2] == ["shot 0 left", "shot 1 left"]
        assert session.gone[:2] == ("shot 0", "shot 1")
        audited = session.ask(QUESTION, steps=2, audit=True)
        str(audited)
        assert audited.audit.as_promised
        assert audited.audit.kl < 1e-6


def test_a_chunk_that_left_comes_back_and_its_placeholder_stays(backbone):
    with kvp.Session(backbone, None, 1, lead=LEAD, promise="forget", placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        assert session.recall("shot 0") == "shot 0"
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", image_of(0)])
        # It leaves again, under a name that is free.
        assert session.add(image_of(1)) == "shot 1"
        assert [name for name in session.ids if "left" in name] == ["shot 0 left", "shot 1 left", "shot 0 left#2"]
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", LEFT, image_of(1)])
        assert session.window.as_promised


def test_a_saved_session_keeps_them(backbone, tmp_path):
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        before = logits(session)
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        assert session.config.placeholder == LEFT
        np.testing.assert_array_equal(logits(session), before)
        add_steps(session, 2)
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", image_of(2), "w22"])
        session.recall("shot 0")
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", LEFT, "w22", image_of(0)])


@pytest.mark.slow
def test_what_was_deleted_from_the_store_is_prefilled_and_as_promised(backbone, tmp_path, monkeypatch):
    options = {"placeholder": LEFT}
    with kvp.ChunkStore(tmp_path / "store") as store:
        with kvp.Session(backbone, store, 2, lead=LEAD, **options) as session:
            add_steps(session, 0, 1, 2)
            expected = logits(session)
        with kvp.Session(backbone, store, 2, lead=LEAD, **options) as session:
            add_steps(session, 0, 1)
            monkeypatch.setattr(store, "get", lambda *args, **options: None)  # since it was looked for
            add_steps(session, 2)
            assert session.stats().hits == 2
            assert session.window.as_promised
            np.testing.assert_allclose(logits(session), expected, atol=2e-4)


def test_a_trace_says_what_took_whose_place(backbone):
    events: list[Event] = []
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        session.watchers.append(lambda event, _: events.append(event))
        add_steps(session, 0, 1)
        session.recall("shot 0")
    told = [
        (event.op, event.chunk, event.replaced, event.text)
        for event in events
        if event.kind == "chunk" or event.replaced
    ]
    assert told == [
        ("add", "shot 0", None, None),
        ("replace", "shot 0 left", "shot 0", LEFT),
        ("add", "shot 1", None, None),
        ("replace", "shot 1 left", "shot 1", LEFT),
        ("recall", "shot 0", None, None),
        ("close", None, None, None),
    ]


@pytest.mark.slow
def test_an_image_that_cannot_be_placed_leaves_everything_as_it_was(backbone):
    with kvp.Session(backbone, None, 2, lead=LEAD, placeholder=LEFT, pages=10, page_size=16) as session:
        add_steps(session, 0, 1)
        before = state(session), session.stats()
        with pytest.raises(kvp.errors.PoolError):
            session.add(image_of(2, 28 * 150))
        assert (state(session), session.stats()) == before
        assert "shot 0 left" not in session.runtime.executor.sources
        add_steps(session, 3)
        expect_prompt(session, [LEAD, LEFT, "w20", image_of(1), "w21", image_of(3), "w23"])


def test_a_plan_shows_them_and_changes_nothing(backbone):
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0)
        before = state(session), session.stats()
        planned = session.plan(image_of(1))
        assert planned.window.ids[1] == "shot 0 left"
        assert planned.as_promised
        assert (state(session), session.stats()) == before


@pytest.mark.parametrize("text", ["  ", 3])
def test_what_is_no_text_is_refused(backbone, text, unchecked):
    with pytest.raises(SessionError, match=r"session\.placeholder: got .*; expected a text such as"):
        kvp.Session(backbone, placeholder=text)


def test_a_text_that_is_a_file_or_too_long_is_refused(backbone):
    with pytest.raises(InputError, match=r"session: placeholder"):
        kvp.Session(backbone, placeholder="shot.png")
    with pytest.raises(SessionError, match=r"session\.placeholder: got .* 3 tokens; expected 1 to 2"):
        kvp.Session(backbone, placeholder="w5 w6 w7", largest_text=2)
