"""Placeholders: a text takes the place of a chunk that leaves, and the texts around it stay."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import PoolError
from tests.shared.session_cases import Oracle, expect_logits, image_of, logits, state

LEAD, LEFT = "w5 w6", "w9 w10"


def add_steps(session: kvp.Session, *numbers: int) -> None:
    """Adds an image and a text for each number."""
    for number in numbers:
        session.add(image_of(number), id=f"shot {number}")
        session.add(f"w{20 + number}")


def expect_prompt(session: kvp.Session, *items) -> None:
    expect_logits(session, Oracle(session.backbone, LEAD, *items).logits(), 1e-4)
    assert session.window.as_promised


@pytest.mark.parametrize("promise", ["forget", "remember"])
def test_answers_are_those_of_the_window_as_a_prompt(backbone, promise):
    with kvp.Session(backbone, None, (1, 3), lead=LEAD, promise=promise, placeholder=LEFT) as session:
        for number, stayed in enumerate(([0], [0, 1], [0, 1, 2], [3], [3, 4])):
            add_steps(session, number)
            items = []
            for step in range(number + 1):
                items += [image_of(step) if step in stayed else LEFT, f"w{20 + step}"]
            if number >= 3:
                expect_prompt(session, *items)
            assert session.stats().placeholders == number + 1 - len(stayed)
        assert [name for name in session.ids if "shot" in name][:2] == ["shot 0 left", "shot 1 left"]
        assert session.gone == ("shot 0", "shot 1", "shot 2")


def test_a_chunk_that_left_comes_back_and_its_placeholder_stays(backbone, tmp_path):
    with kvp.Session(backbone, None, 1, lead=LEAD, promise="forget", placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        assert session.recall("shot 0") == "shot 0"
        expect_prompt(session, LEFT, "w20", LEFT, "w21", image_of(0))
        # It leaves again, under a name that is free.
        assert session.add(image_of(1)) == "shot 1"
        assert [name for name in session.ids if "left" in name] == ["shot 0 left", "shot 1 left", "shot 0 left#2"]
        expect_prompt(session, LEFT, "w20", LEFT, "w21", LEFT, image_of(1))
        before = logits(session)
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        np.testing.assert_array_equal(logits(session), before)
        add_steps(session, 2)
        expect_prompt(session, LEFT, "w20", LEFT, "w21", LEFT, LEFT, image_of(2), "w22")


def test_an_image_that_cannot_be_placed_leaves_no_placeholder(backbone):
    with kvp.Session(backbone, None, 2, lead=LEAD, placeholder=LEFT, pages=16) as session:
        add_steps(session, 0, 1)
        before = state(session)
        with pytest.raises(PoolError):
            session.add(image_of(2, 28 * 150))
        assert state(session) == before
        left = f"shot 0 left {kvp.cache.chunk_id(backbone.fingerprint, kvp.Text(LEFT))}"
        assert session.runtime.executor.sources[left].tokens is None
        add_steps(session, 3)
        expect_prompt(session, LEFT, "w20", image_of(1), "w21", image_of(3), "w23")
