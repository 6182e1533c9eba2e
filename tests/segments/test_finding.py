"""Canonical text, spans and windows; the index of segments, and the plan of what it finds."""

import difflib
import itertools
import math
import types

import numpy as np
import pytest

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.errors import ConfigError, InputError, MissingExtraError
from kvpatch_jax.segments import ReuseThresholds
from kvpatch_jax.segments.index import SegmentIndex
from kvpatch_jax.segments.plan import plan_runs
from kvpatch_jax.segments.text import canonicalise, segments, spans
from kvpatch_jax.utils import optional_packages
from tests.segments.segment_cases import encode, prompt, words

COSTS = ForwardCosts(token=(1000,) * 4, pair=(10,) * 4, window=(0,) * 4, logit=0)
SYSTEM, DOCUMENT = f"System: {words(0, 50)}\n", f"Observation: {words(1, 150)}\n"


def filled(*texts: str) -> SegmentIndex:
    index = SegmentIndex(context=64)
    for read in map(prompt, texts):
        for span in [index.describe(read, span) for span in spans(read) if segments(span)]:
            if span.key not in index.spans:
                index.add(read, span)
    return index


def runs_of(index, text, segment=0.7, context=0.0):
    return index.runs(prompt(text), segment, context)


def planned(index, text, costs=COSTS, **options):
    return plan_runs(prompt(text), runs_of(index, text), index.spans, ReuseThresholds(**options), costs, 2)


def edges(run):
    return run.pieces[0].start, run.pieces[-1].stop


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
        assert [window.start - start for window in windows] == [window.start for window in segments(range(length))[1:]]
    assert segments(range(5)) == []


def test_a_moved_repeat_is_found_completely():
    index = filled(SYSTEM + DOCUMENT)
    text = f"{words(5, 33)}\n{DOCUMENT}Question: {words(6, 10)}"
    (run,) = runs_of(index, text)
    assert (run.stop - run.start, run.offset) == (len(prompt(DOCUMENT).ids), 0)
    # Its left context is another, which a threshold may ask for: only windows inside it have the same one.
    assert min(run.offset for run in runs_of(index, text, context=0.5)) > 32
    assert runs_of(index, SYSTEM + DOCUMENT + "Question: x", context=0.5)


def test_runs_are_maximal_and_of_equal_ids():
    rng, index = np.random.default_rng(0), filled(SYSTEM + DOCUMENT)
    for _ in range(30):
        changed = DOCUMENT.split(" ")
        for place in rng.choice(np.arange(1, len(changed) - 1), 3, replace=False):
            changed[place] = f"other{rng.integers(9)}"
        read = prompt(SYSTEM + words(7, 20) + "\n" + " ".join(changed))
        for run in index.runs(read, 0.5, 0.0):
            stored, stop = index.spans[run.span].ids, run.offset + run.stop - run.start
            assert np.array_equal(read.ids[run.start : run.stop], stored[run.offset : stop])
            assert min(run.start, run.offset) == 0 or read.ids[run.start - 1] != stored[run.offset - 1]
            assert run.stop == len(read.ids) or stop == len(stored) or read.ids[run.stop] != stored[stop]


def test_what_is_similar_is_what_exact_jaccard_says_within_the_estimates_error():
    texts = [" ".join([words(number, 60 - 2 * number), words(99, 60)]) for number in range(25)] + [words(99, 80)]
    index, read, threshold = filled(*texts), prompt(texts[3]), 0.55

    def sets(text: str) -> set[tuple[str, ...]]:
        units = text.split()
        return {tuple(units[at : at + 6]) for at in range(len(units) - 5)}

    similar = index.similar(read, range(len(read.ids)), threshold, 0.0)
    decided = 0
    for text in texts:
        (span,) = [span for span in index.spans.values() if np.array_equal(span.ids, prompt(text).ids)]
        exact = len(sets(text) & sets(texts[3])) / len(sets(text) | sets(texts[3]))
        if abs(exact - threshold) > 4 * (threshold * (1 - threshold) / 128) ** 0.5:
            decided += 1
            assert ((span.key, 0, len(span.ids)) in {key for key, _ in similar}) == (exact > threshold)
    assert decided > 10


def test_windows_find_a_part_of_a_span_that_differs_as_a_whole():
    index = filled(DOCUMENT)
    # Only the first half is the same, too little for the span as a whole.
    half = " ".join(DOCUMENT.split(" ")[:100])
    text = f"Question: {words(8, 21)}\n{half} {words(9, 120)}"
    lengths = [run.stop - run.start for run in runs_of(index, text, 0.8)]
    assert [length for length in lengths if length > 50] == [len(prompt(half).ids)]
    matcher = difflib.SequenceMatcher(None, prompt(text).ids.tolist(), prompt(DOCUMENT).ids.tolist(), autojunk=False)
    assert max(lengths) == matcher.find_longest_match().size


def test_removed_spans_are_found_no_more_and_can_be_added_again():
    index = filled(SYSTEM, DOCUMENT)
    (span,) = [span for span in index.spans.values() if len(span.ids) > 100]
    index.remove(span.key)
    assert runs_of(index, f"{words(5, 9)}\n{DOCUMENT}") == []
    assert len(runs_of(index, SYSTEM)) == 1
    index.add(prompt(DOCUMENT), span)
    assert runs_of(index, f"{words(5, 9)}\n{DOCUMENT}")


def test_neighbours_of_one_prompt_are_one_run_and_of_two_prompts_are_two():
    text = SYSTEM + DOCUMENT + f"Question: {words(4, 12)}\n"
    (run,) = planned(filled(text), f"{words(5, 30)}\n{text}Thought: x")
    assert len(run.pieces) == 3
    assert np.diff(edges(run)) == len(prompt(text).ids)
    apart = planned(filled(SYSTEM, DOCUMENT), f"{words(5, 30)}\n{SYSTEM}{DOCUMENT}Thought: x")
    assert [len(run.pieces) for run in apart] == [1, 1]


def test_plans_are_disjoint_in_order_and_never_take_the_last_token():
    rng = np.random.default_rng(1)
    parts = [f"Observation: {words(number, 60)}\n" for number in range(6)]
    index = filled(*("".join(parts[number] for number in rng.permutation(6)) for _ in range(4)))
    for _ in range(20):
        text = "".join(parts[number] for number in rng.choice(6, 4))
        runs, ids = planned(index, text, halo=4), prompt(text).ids
        covered = [token for run in runs for token in range(*edges(run))]
        assert covered == sorted(set(covered))
        assert covered[-1] < len(ids) - 1
        for run in runs:
            assert all(before.stop == after.start for before, after in itertools.pairwise(run.pieces))
            for piece in run.pieces:
                stored = index.spans[piece.span].ids[piece.offset :]
                assert np.array_equal(stored[: piece.stop - piece.start], ids[piece.start : piece.stop])


def test_only_an_equal_prefix_is_exact_and_needs_no_halo():
    index = filled(SYSTEM + DOCUMENT)
    (same,) = planned(index, SYSTEM + DOCUMENT + "Question: x")
    assert (same.generation, same.halo, edges(same)[0]) == (0, 0, 0)
    for before in ("x ", "System: x "):
        for run in planned(index, before + SYSTEM + DOCUMENT):
            assert (run.generation, run.halo) == ((0, 0) if edges(run)[0] == 0 else (1, 8))


def test_a_run_that_costs_more_than_it_saves_is_left_out():
    index, text = filled(DOCUMENT), f"{words(5, 9)}\n{DOCUMENT}"
    (run,) = planned(index, text, halo=4)

    # By hand: two lower layers of the interior against both probes' upper layers, and logits of both sides.
    begin, end = run.interior
    saved = sum(2 * (1000 + 10 * (at + 1)) for at in range(begin, end))
    upper = sum(2 * (1000 + 10 * (at + 1)) for at in (begin - 2, begin - 1, end, end + 1))
    # The highest price of logits at which the run still pays, and the next one.
    logit = (saved - upper - 1) // 8
    assert planned(index, text, COSTS._replace(logit=logit), halo=4) == [run]
    assert planned(index, text, COSTS._replace(logit=logit + 1), halo=4) == []
    assert planned(index, text, COSTS._replace(logit=logit + 1), halo=4, probes=0) == [run]


OUT_OF_RANGE: dict[str, tuple[float, float]] = {
    "segment": (0.2, 1.5),
    "context": (-1, 2),
    "halo": (-1, 1.5),
    "probes": (-1, 9),
    "epsilon": (-1, math.inf),
    "failing": (2, math.nan),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OUT_OF_RANGE for value in OUT_OF_RANGE[name]])
def test_thresholds_out_of_range_raise_a_typed_error(name, value, unchecked):
    with pytest.raises(ConfigError, match=r"thresholds: got .*expected"):
        ReuseThresholds(**{name: value})


def test_a_missing_datasketch_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional_packages, "importlib", types.SimpleNamespace(import_module=missing))
    with pytest.raises(MissingExtraError, match=r"kvpatch_jax\[segments\]"):
        SegmentIndex(context=64)
