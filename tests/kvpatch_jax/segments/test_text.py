"""Canonical text, spans and windows."""

import itertools

import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.segments import canonicalise, segments, spans
from tests.kvpatch_jax.segments.segment_cases import encode, prompt, words


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("At 2026-01-02T10:00:00Z we saw it", "at 2025-11-30 23:59:59 we  SAW it"),
        ("request 123456 done", "request 9876543210 done"),
        ("trace deadbeef01 ended", "trace 00ff00ff99 ended"),
        ("id 123e4567-e89b-12d3-a456-426614174000.", "id 00000000-0000-0000-0000-000000000001."),
        ("“quoted” – it’s", '"quoted" - it\'s'),
    ],
)
def test_texts_that_differ_in_volatile_spans_case_and_marks_are_one_canonical_text(first, second):
    assert canonicalise(first) == canonicalise(second)


def test_content_survives_canonicalisation():
    assert canonicalise("2 results") != canonicalise("3 results")
    # Strings and code keep their case; what surrounds them does not.
    assert canonicalise('Call {"Name": `Foo`}') == 'call {"Name": `Foo`}'
    text = 'Observation: 2026-01-02 “A  b” id 99999\n{"Name": "X"}'
    assert canonicalise(canonicalise(text)) == canonicalise(text)
    # It is compared and never executed.
    changed = prompt("Is <id> 123456 HERE?")
    assert changed.ids.tolist() == encode("Is <id> 123456 HERE?").ids
    assert changed.units(range(len(changed.ids))) == ["is", "<id>", "<id>", "here", "?"]
    with pytest.raises(InputError, match="expected at least one"):
        prompt("")


def test_spans_tile_a_prompt_and_begin_at_its_anchors():
    text = f"{words(0, 20)}\nThought: {words(1, 9)}\nAction: {words(2, 5)}\nObservation: {words(3, 700)}"
    read = prompt(text)
    pieces = spans(read)
    assert (pieces[0].start, pieces[-1].stop) == (0, len(read.ids))
    assert all(before.stop == after.start for before, after in itertools.pairwise(pieces))
    assert max(map(len, pieces)) <= 256
    anchors = [text[read.starts[span.start] :].split(":")[0] for span in pieces[1:4]]
    assert anchors == ["Thought", "Action", "Observation"]


def test_windows_cover_a_span_and_are_counted_from_its_start():
    for start, length in itertools.product((0, 7, 100), (8, 64, 65, 96, 97, 200, 256)):
        span, *windows = segments(range(start, start + length))
        assert span == range(start, start + length)
        assert all(len(window) == 64 for window in windows)
        assert set().union(*windows) == (set(span) if length > 64 else set())
        # A moved span has the same windows, moved.
        assert [window.start - start for window in windows] == [at.start for at in segments(range(length))[1:]]
    assert segments(range(5)) == []
