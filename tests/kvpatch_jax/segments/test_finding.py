"""The index of segments, and the plan of what it finds."""

import difflib
import types

import numpy as np
import pytest

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.errors import ConfigError, MissingExtraError
from kvpatch_jax.segments import ReuseThresholds, SegmentIndex, SegmentOptions, plan_runs, segments, spans
from kvpatch_jax.utils import optional_packages
from tests.kvpatch_jax.segments.segment_cases import prompt, words

COSTS = ForwardCosts(token=(1000,) * 4, pair=(10,) * 4, window=(0,) * 4, logit=0)
SYSTEM, DOCUMENT = f"System: {words(0, 50)}\n", f"Observation: {words(1, 150)}\n"


def filled(*texts: str) -> SegmentIndex:
    index = SegmentIndex(context=64)
    for read in map(prompt, texts):
        for span in spans(read):
            if segments(span):
                index.add(read, index.describe(read, span))
    return index


def planned(index, text, costs=COSTS, **options):
    read, thresholds = prompt(text), ReuseThresholds(**options)
    return plan_runs(read, index.runs(read, thresholds), index.spans, thresholds, costs, 2)


def test_a_moved_repeat_is_found_completely():
    index = filled(SYSTEM + DOCUMENT)
    text = f"{words(5, 33)}\n{DOCUMENT}Question: {words(6, 10)}"
    (run,) = index.runs(prompt(text), ReuseThresholds())
    assert (run.length, run.offset) == (len(prompt(DOCUMENT).ids), 0)
    # Its left context is another, which a threshold may ask for: only windows inside it have the same one.
    assert min(run.offset for run in index.runs(prompt(text), ReuseThresholds(context=0.5))) > 32
    assert index.runs(prompt(SYSTEM + DOCUMENT + "Question: x"), ReuseThresholds(context=0.5))


def test_runs_are_maximal_and_of_equal_ids():
    rng, index = np.random.default_rng(0), filled(SYSTEM + DOCUMENT)
    for _ in range(30):
        changed = DOCUMENT.split(" ")
        for place in rng.choice(np.arange(1, len(changed) - 1), 3, replace=False):
            changed[place] = f"other{rng.integers(9)}"
        read = prompt(SYSTEM + words(7, 20) + "\n" + " ".join(changed))
        for run in index.runs(read, ReuseThresholds(segment=0.5)):
            stored, stop = index.spans[run.span].ids, run.offset + run.length
            assert np.array_equal(read.ids[run.start : run.stop], stored[run.offset : stop])
            before = run.start > 0 and run.offset > 0 and read.ids[run.start - 1] == stored[run.offset - 1]
            after = run.stop < len(read.ids) and stop < len(stored) and read.ids[run.stop] == stored[stop]
            assert not before
            assert not after


def test_what_is_similar_is_what_exact_jaccard_says_within_the_estimates_error():
    texts = [" ".join([words(number, 60 - 2 * number), words(99, 60)]) for number in range(25)] + [words(99, 80)]
    index, read, threshold = filled(*texts), prompt(texts[3]), 0.55

    def sets(text: str) -> set[tuple[str, ...]]:
        units = text.split()
        return {tuple(units[at : at + 6]) for at in range(len(units) - 5)}

    similar = index.similar(read, range(len(read.ids)), ReuseThresholds(segment=threshold))
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
    read = prompt(f"Question: {words(8, 21)}\n{half} {words(9, 120)}")
    runs = [run for run in index.runs(read, ReuseThresholds(segment=0.8)) if run.length > 50]
    assert [run.length for run in runs] == [len(prompt(half).ids)]
    matcher = difflib.SequenceMatcher(None, read.ids.tolist(), prompt(DOCUMENT).ids.tolist(), autojunk=False)
    assert runs[0].length == matcher.find_longest_match().size


def test_removed_spans_are_found_no_more_and_can_be_added_again():
    index = filled(SYSTEM, DOCUMENT)
    (span,) = [span for span in index.spans.values() if len(span.ids) > 100]
    index.remove(span.key)
    index.remove("unknown")
    assert index.runs(prompt(f"{words(5, 9)}\n{DOCUMENT}"), ReuseThresholds()) == []
    assert len(index.runs(prompt(SYSTEM), ReuseThresholds())) == 1
    index.add(prompt(DOCUMENT), span)
    assert index.runs(prompt(f"{words(5, 9)}\n{DOCUMENT}"), ReuseThresholds())


def test_neighbours_of_one_prompt_are_one_run_and_of_two_prompts_are_two():
    text = SYSTEM + DOCUMENT + f"Question: {words(4, 12)}\n"
    (run,) = planned(filled(text), f"{words(5, 30)}\n{text}Thought: x")
    assert len(run.pieces) == 3
    assert run.stop - run.start == len(prompt(text).ids)
    apart = planned(filled(SYSTEM, DOCUMENT), f"{words(5, 30)}\n{SYSTEM}{DOCUMENT}Thought: x")
    assert [len(run.pieces) for run in apart] == [1, 1]


def test_plans_are_disjoint_in_order_and_never_take_the_last_token():
    rng = np.random.default_rng(1)
    parts = [f"Observation: {words(number, 60)}\n" for number in range(6)]
    index = filled(*("".join(parts[number] for number in rng.permutation(6)) for _ in range(4)))
    for _ in range(20):
        text = "".join(parts[number] for number in rng.choice(6, 4))
        runs, ids = planned(index, text, halo=4), prompt(text).ids
        covered = [token for run in runs for token in range(run.start, run.stop)]
        assert covered == sorted(set(covered))
        assert covered[-1] < len(ids) - 1
        for run in runs:
            assert [piece.stop for piece in run.pieces[:-1]] == [piece.start for piece in run.pieces[1:]]
            for piece in run.pieces:
                stored = index.spans[piece.span].ids[piece.offset : piece.offset + piece.length]
                assert np.array_equal(stored, ids[piece.start : piece.stop])


def test_only_an_equal_prefix_is_exact_and_needs_no_halo():
    index = filled(SYSTEM + DOCUMENT)
    (same,) = planned(index, SYSTEM + DOCUMENT + "Question: x")
    assert (same.exact, same.halo, same.start) == (True, 0, 0)
    for before in ("x ", "System: x "):
        for run in planned(index, before + SYSTEM + DOCUMENT):
            assert run.exact == (run.start == 0)
            assert run.halo == (0 if run.start == 0 else 8)


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ReuseThresholds, {"segment": 1.5}),
        (ReuseThresholds, {"segment": 0.2}),
        (ReuseThresholds, {"context": 2}),
        (ReuseThresholds, {"failing": float("nan")}),
        (ReuseThresholds, {"halo": -1}),
        (ReuseThresholds, {"halo": 1.5}),
        (ReuseThresholds, {"probes": -1}),
        (ReuseThresholds, {"probes": 9}),
        (ReuseThresholds, {"epsilon": -1.0}),
        (ReuseThresholds, {"epsilon": float("inf")}),
        (SegmentOptions, {"reuse_layers": 0}),
        (SegmentOptions, {"reuse_layers": 2, "context": -1}),
        (SegmentOptions, {"reuse_layers": 2, "budget": 0}),
    ],
)
def test_options_out_of_range_raise_a_typed_error(kind, options, unchecked):
    with pytest.raises(ConfigError, match="expected"):
        kind(**options)


def test_a_missing_datasketch_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional_packages, "importlib", types.SimpleNamespace(import_module=missing))
    with pytest.raises(MissingExtraError, match=r"kvpatch_jax\[segments\]"):
        SegmentIndex(context=64)
