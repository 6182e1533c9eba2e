"""Windows: what a stored prefill is served as, behind the pieces it was computed behind and behind others."""
# pyright: reportArgumentType=false

import pytest
from window_cases import chunk, window_of

from kvpatch_jax.errors import WindowError
from kvpatch_jax.window import Copy, Entry, Fetch, Window, likeness_keys


def test_behind_the_same_pieces_it_is_the_window_of_a_forward():
    window = window_of("A", "B")
    restored, edits = window.append(chunk("C"), how="restored")
    assert restored == window.append(chunk("C"))[0]
    front = restored.piece("C").front
    fetch, copy = edits
    assert isinstance(fetch, Fetch)
    assert isinstance(copy, Copy)
    assert (fetch.what, fetch.digest, copy.source) == ("prefill", front, "prefill")
    assert restored.fidelity("C") == "exact"

    # What slid remembers: behind survivors it is one, as a forward is.
    slid, _ = restored.slide(1)
    assert slid.append(chunk("D"), how="restored")[0].fidelity("D") == "survivor"


def test_behind_other_pieces_it_is_approximate_and_so_is_what_follows():
    front = window_of("A", "B", "C").piece("C").front
    window, _ = window_of("X", "B").append(chunk("C"), how="restored", behind=front)
    assert window.fidelity("C") == "approximate"
    window, _ = window.append(chunk("D"))
    assert window.fidelity("D") == "approximate"
    assert not window.as_promised
    assert Window.from_json(window.to_json(), backbone=window.backbone) == window

    # It has seen what no promise speaks of, whatever leaves.
    window, _ = window.evict("X", "B")
    assert window.fidelity("C") == "approximate"


def test_windows_are_alike_in_their_lead_and_nearest_piece():
    def keys(*ids: str) -> dict[str, str]:
        window = window_of(*ids)
        return {str(name): key for name, key in likeness_keys(window.pieces, len(window) - 1, window.lead).items()}

    assert keys("A", "B", "C") == keys("X", "Y", "B", "C")
    assert keys("A", "B", "C")["near"] != keys("A", "X", "C")["near"]
    assert keys("A", "B", "C").keys() == {"mean", "near"}


@pytest.mark.parametrize("how", [None, "prefill", "bare", "leading"])
def test_a_front_is_for_what_is_restored(how, unchecked):
    with pytest.raises(WindowError, match=r"window\.behind: got .*; expected a chain digest"):
        window_of("A").append(chunk("C"), how=how, behind="0" * 32)
    with pytest.raises(WindowError, match=r"window\.behind: got 5 of 'C', restored"):
        window_of("A").append(chunk("C"), how="restored", behind=5)
    with pytest.raises(WindowError, match="which is a text"):
        window_of("A").append(Entry("text", None, 3, 3, "text"), how="restored")
