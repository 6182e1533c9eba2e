"""Sessions over models whose layers are of several kinds: two ropes, images that see themselves, linear attention.

The oracle is plain prefills over contiguous contexts, whose transitions are composed by definition.
"""
# pyright: reportArgumentType=false

import pytest

import kvpatch_jax as kvp
from tests.shared.session_cases import Oracle, expect_logits, image_of, worded
from tests.shared.window_oracle import tiny

IMAGES = [image_of(number, 24, 24) for number in range(5)]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "hybrid"])
def test_images_that_slide_change_places_and_return_are_served_as_they_were_computed(family, tmp_path):
    backbone = worded(tiny(family))
    oracle = Oracle(backbone)

    def expect(session: kvp.Session, *order: int) -> None:
        oracle.naive.parts = [next(part for part in parts if part.id == str(number)) for number in order]
        oracle.naive.close()
        expect_logits(session, oracle.logits())

    with kvp.Session(backbone, lead=0) as session:
        for number in range(4):
            session.add(IMAGES[number], id=str(number), order_free=True)
            oracle.put(str(number), IMAGES[number])
        parts = list(oracle.naive.parts)
        expect(session, 0, 1, 2, 3)
        session.evict("1")
        expect(session, 0, 2, 3)
        assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
        session.reorder(["3", "2", "0"])
        expect(session, 3, 2, 0)
        session.save(tmp_path / "session")
        session.recall("1")
        oracle.put("1", IMAGES[1])
        expect_logits(session, oracle.logits())
        numbers = 4 * 4 * backbone.layout.transition_numbers if backbone.layout.parts else 0
        assert session.stats().state_bytes >= numbers

    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        expect(session, 3, 2, 0)
        with session.fork() as branch:
            branch.slide(1)
            expect(branch, 0)
        expect(session, 3, 2, 0)
