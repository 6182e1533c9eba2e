"""Sessions that evict chunks together: `keep=(low, high)`."""

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from tests.shared.session_cases import image_of, logits


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


def test_a_pair_of_equal_numbers_is_that_number(backbone):
    windows = []
    for keep in (2, (2, 2)):
        with kvp.Session(backbone, None, keep) as session:
            for number in range(5):
                session.add(image_of(number))
            windows.append((session.ids, session.gone, logits(session)))
    assert windows[0][:2] == windows[1][:2]
    np.testing.assert_array_equal(windows[0][2], windows[1][2])


@pytest.mark.parametrize("keep", [(2, 1), (0, 2), (1, 2, 3), "2", 0])
def test_no_pair_of_numbers_is_refused(backbone, keep, unchecked):
    with pytest.raises(SessionError, match=r"session\.keep: got .*; expected a number of chunks"):
        kvp.Session(backbone, None, keep)
