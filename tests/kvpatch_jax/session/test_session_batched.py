"""Sessions that evict chunks together: `keep=(low, high)`; and bounds on what a caller gives."""
# pyright: reportArgumentType=false

import numpy as np
import pytest
from session_cases import image_of, logits

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError


@pytest.mark.parametrize("promise", ["remember", "forget"])
def test_chunks_leave_together_once_there_are_too_many(backbone, promise):
    sizes, forwards = [], []
    with kvp.Session(backbone, None, (2, 4), lead=0, promise=promise) as session:
        for number in range(9):
            session.add(image_of(number))
            sizes.append(len(session))
            forwards.append(session.stats().forwards)
        assert session.keep == (2, 4)
    assert sizes == [1, 2, 3, 4, 2, 3, 4, 2, 3]
    # A window that forgets runs what stayed again, but only when something left: two chunks in place of one.
    again = [1] * 4 + ([1, 1, 1, 1, 1] if promise == "remember" else [1 + 1, 1, 1, 1 + 1, 1])
    assert np.diff([0, *forwards]).tolist() == again


def test_a_pair_of_equal_numbers_is_that_number(backbone):
    windows = []
    for keep in (2, (2, 2)):
        with kvp.Session(backbone, None, keep) as session:
            for number in range(5):
                session.add(image_of(number))
            windows.append((session.ids, session.gone, logits(session)))
    assert windows[0][:2] == windows[1][:2]
    np.testing.assert_array_equal(windows[0][2], windows[1][2])


def test_a_batch_that_leaves_is_recorded_as_it_left(backbone):
    """A trace replays by the number that stayed, whatever the session's own rule was."""
    events = []
    with kvp.Session(backbone, None, (1, 3), lead=0) as session:
        session.watchers.append(lambda event, _: events.append((event.op, event.keep)))
        for number in range(5):
            session.add(image_of(number))
    assert events[:5] == [("add", 3), ("add", 3), ("add", 3), ("add", 1), ("add", 3)]


def test_a_saved_session_keeps_its_pair(backbone, tmp_path):
    with kvp.Session(backbone, None, (1, 2)) as session:
        session.add(image_of(0))
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        assert session.keep == (1, 2)


@pytest.mark.parametrize("keep", [(2, 1), (0, 2), (1, 2, 3), "2", 0])
def test_no_pair_of_numbers_is_refused(backbone, keep, unchecked):
    with pytest.raises(SessionError, match=r"session\.keep: got .*; expected a number of chunks"):
        kvp.Session(backbone, None, keep)


def test_a_text_beyond_the_bound_is_refused_and_nothing_changes(backbone):
    with kvp.Session(backbone, largest_text=8) as session:
        session.add([5, 6, 7, 8])
        before = session.window
        with pytest.raises(InputError, match=r"got a text of 9 tokens; expected at most 8 \(largest_text"):
            session.add([5] * 9)
        with pytest.raises(InputError, match=r"got a text of 9 tokens"):
            session.ask([5] * 9)
        assert session.window == before
        session.add(image_of(0, 56))  # an image has its own bound
    with pytest.raises(SessionError, match=r"session\.largest_text: got 0; expected"):
        kvp.Session(backbone, largest_text=0)
