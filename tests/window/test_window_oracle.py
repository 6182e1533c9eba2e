"""Every label of a window is what terms say, over random programs of all its operations, on branches."""

import collections

import pytest
from random_programs import FINGERPRINT, Pair

from kvpatch_jax.window import Entry, Service, Window


def run(seeds: range, steps: int) -> collections.Counter[str]:
    """Runs a random program for each seed, and counts the labels that were compared."""
    labels = collections.Counter[str]()
    for seed in seeds:
        pair, log = Pair(seed), []
        for _ in range(pair.random.randint(3, steps)):
            log.append(pair.step())
            try:
                labels.update(pair.check())
            except AssertionError as error:
                error.add_note(f"seed {seed}: {', '.join(log)}\n{pair.window}\n{pair.symbols.labels()}")
                raise
    return labels


def test_labels_of_ten_thousand_programs_are_what_terms_say(unchecked):
    # Checks of shapes, of which there are none here, would take most of the time.
    labels = run(range(10_000), 14)
    assert min(labels[label] for label in ("exact", "survivor", "approximate")) > 8_000, labels


@pytest.mark.nightly
def test_labels_of_long_programs_are_what_terms_say(unchecked):
    run(range(10_000, 14_000), 80)


def test_a_prefill_behind_an_approximate_piece_is_approximate_where_the_window_promises_that_piece():
    """In a window that forgets, a stored prefill may be as promised and have seen another KV than what is in front."""
    chunks = {name: Entry(name, f"content {name}", 5, 5) for name in "ABCDE"}
    other = Window.empty(FINGERPRINT).append(chunks["A"]).append(chunks["C"]).append(chunks["D"])
    window = Window.empty(FINGERPRINT, promise="forget")
    for name in "ABC":
        window = window.append(chunks[name])
    window = window.evict("B").append(chunks["D"], Service("restored", stored=other.piece("D").made))
    assert [window.fidelity(id) for id in window.ids] == ["exact", "survivor", "approximate"]
    assert not window.standing("D").ways
    window = window.append(chunks["E"]).evict("C")
    assert window.fidelity("E") == "approximate"
