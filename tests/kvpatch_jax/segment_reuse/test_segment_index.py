"""The index of segments and the plan that is made of what it finds."""

import difflib

import numpy as np
import pytest

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.segment_reuse import (
    ReuseThresholds,
    SegmentIndex,
    SegmentIndexOptions,
    TokenRange,
    plan_runs,
    run_savings,
    run_test_cost,
)
from tests.kvpatch_jax.segment_reuse.segment_cases import id_prompt, prompt, words

OPTIONS = SegmentIndexOptions(reuse_layers=2, permutations=256)
COSTS = ForwardCosts(token=(1000,) * 4, pair=(10,) * 4, window=(0,) * 4, logit=500)
SYSTEM, DOCUMENT = f"System: {words(0, 50)}\n", f"Observation: {words(1, 150)}\n"


def filled(*texts: str, options: SegmentIndexOptions = OPTIONS) -> SegmentIndex:
    index = SegmentIndex(options)
    for text in texts:
        for span in index.described(prompt(text)):
            index.add(prompt(text), span)
    return index


def planned(index, text, **options):
    thresholds = ReuseThresholds(worthwhile=False, **options)
    read = prompt(text)
    return plan_runs(read, index.runs(read, thresholds), index.spans, thresholds, COSTS, 2)


def test_a_moved_repeat_is_found_whole():
    index = filled(SYSTEM + DOCUMENT)
    text = f"{words(5, 33)}\n{DOCUMENT}Question: {words(6, 10)}"
    (run,) = index.runs(prompt(text), ReuseThresholds(context=0.0))
    assert run.length == len(prompt(DOCUMENT).ids)
    assert (run.similarity, run.offset) == (1.0, 0)
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
    texts = [f"{words(number, 40)} {words(99, 40)}" for number in range(20)] + [words(99, 80)]
    options = SegmentIndexOptions(reuse_layers=2, permutations=256, least_similarity=0.2)
    index = filled(*texts, options=options)

    def sets(text: str) -> set[tuple[str, ...]]:
        units = text.split()
        return {tuple(units[at : at + 6]) for at in range(len(units) - 5)}

    read = prompt(texts[3])
    thresholds = ReuseThresholds(segment=0.3)
    found = {key for key, _, _ in index.similar(read, TokenRange(0, len(read.ids)), thresholds)}
    for text in texts:
        (span,) = [span for span in index.spans.values() if np.array_equal(span.ids, prompt(text).ids)]
        exact = len(sets(text) & sets(texts[3])) / len(sets(text) | sets(texts[3]))
        if abs(exact - 0.3) > 4 * (0.3 * 0.7 / 256) ** 0.5:
            assert (span.key in {key.span for key in found if key.offset == 0 and key.length > 64}) == (exact > 0.3)


def test_windows_find_a_part_of_a_span_that_differs_as_a_whole():
    index = filled(DOCUMENT)
    # Only the first half is the same, too little for the span as a whole.
    half = " ".join(DOCUMENT.split(" ")[:100])
    text = f"Question: {words(8, 21)}\n{half} {words(9, 120)}"
    read = prompt(text)
    runs = [run for run in index.runs(read, ReuseThresholds(segment=0.8)) if run.length > 50]
    assert [run.length for run in runs] == [len(prompt(half).ids)]
    matcher = difflib.SequenceMatcher(None, read.ids.tolist(), prompt(DOCUMENT).ids.tolist(), autojunk=False)
    assert runs[0].length == matcher.find_longest_match().size


def test_removed_spans_are_found_no_more():
    index = filled(SYSTEM, DOCUMENT)
    (key,) = [key for key, span in index.spans.items() if len(span.ids) > 100]
    index.remove(key)
    index.remove("unknown")
    assert index.runs(prompt(f"{words(5, 9)}\n{DOCUMENT}"), ReuseThresholds()) == []
    assert len(index.runs(prompt(SYSTEM), ReuseThresholds())) == 1
    # It can be added again.
    for span in index.described(prompt(DOCUMENT)):
        index.add(prompt(DOCUMENT), span)
    assert index.runs(prompt(f"{words(5, 9)}\n{DOCUMENT}"), ReuseThresholds())


def test_ids_without_text_are_indexed_too():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 10_000, 200)
    index = SegmentIndex(OPTIONS)
    for span in index.described(id_prompt(ids)):
        index.add(id_prompt(ids), span)
    runs = index.runs(id_prompt(ids.copy()), ReuseThresholds())
    assert [(run.start, run.stop) for run in runs] == [(0, 200)]


def test_neighbours_of_one_prompt_are_one_run_and_of_two_prompts_are_two():
    text = SYSTEM + DOCUMENT + f"Question: {words(4, 12)}\n"
    (run,) = planned(filled(text), f"{words(5, 30)}\n{text}Thought: x", equal_prefix=False)
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
        runs = planned(index, text, halo=4)
        size = len(prompt(text).ids)
        covered = [token for run in runs for token in range(run.start, run.stop)]
        assert covered == sorted(set(covered))
        assert runs
        assert covered[-1] < size - 1
        for run in runs:
            for first, second in zip(run.pieces, run.pieces[1:], strict=False):
                assert first.stop == second.start
            for piece in run.pieces:
                ids = index.spans[piece.span].ids[piece.offset : piece.offset + piece.length]
                assert np.array_equal(ids, prompt(text).ids[piece.start : piece.stop])


def test_only_an_equal_prefix_needs_no_halo():
    index = filled(SYSTEM + DOCUMENT)
    (same,) = planned(index, SYSTEM + DOCUMENT + "Question: x")
    assert (same.equal_prefix, same.halo, same.start) == (True, 0, 0)
    for before in ("x ", "System: x "):
        for run in planned(index, before + SYSTEM + DOCUMENT):
            assert run.equal_prefix == (run.start == 0)
            assert run.halo == (0 if run.start == 0 else 8)
    assert not planned(index, SYSTEM + DOCUMENT, equal_prefix=False)[0].equal_prefix


def test_a_run_that_costs_more_than_it_saves_is_left_out():
    index, thresholds = filled(DOCUMENT), ReuseThresholds(halo=4, probes=2)
    read = prompt(f"{words(5, 9)}\n{DOCUMENT}")
    runs = index.runs(read, thresholds)
    (run,) = plan_runs(read, runs, index.spans, thresholds, COSTS, 2)

    # By hand: two lower layers of the interior against both probes' upper layers, and logits of both sides.
    begin, end = run.interior
    saved = sum(2 * (1000 + 10 * (at + 1)) for at in range(begin, end))
    upper = sum(2 * (1000 + 10 * (at + 1)) for at in (begin - 2, begin - 1, end, end + 1))
    assert run_savings(COSTS, begin, end, 2) == saved
    assert run_test_cost(COSTS, run, thresholds, 2) == upper + 8 * 500

    # The highest price of logits at which the run still pays, and the next one.
    logit = (saved - upper - 1) // 8
    assert plan_runs(read, runs, index.spans, thresholds, COSTS._replace(logit=logit), 2) == [run]
    assert plan_runs(read, runs, index.spans, thresholds, COSTS._replace(logit=logit + 1), 2) == []


@pytest.mark.parametrize(
    "options",
    [
        {"segment": 1.5},
        {"segment": -0.1},
        {"context": 2},
        {"failing": float("nan")},
        {"halo": -1},
        {"halo": 1.5},
        {"probes": 0},
        {"probes": 9},
        {"epsilon": -1.0},
        {"epsilon": float("inf")},
        {"candidates": 0},
    ],
)
def test_thresholds_out_of_range_raise_a_typed_error(options, unchecked):
    with pytest.raises(ConfigError, match="expected"):
        ReuseThresholds(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"reuse_layers": 0},
        {"shingle": 0},
        {"permutations": 1},
        {"budget": 0},
        {"storage": "int4"},
        {"least_similarity": 0.0},
        {"protected_share": 1.5},
        {"generations": -1},
        {"segmentation": None},
    ],
)
def test_index_options_out_of_range_raise_a_typed_error(options, unchecked):
    with pytest.raises(ConfigError, match="expected"):
        SegmentIndexOptions(**{"reuse_layers": 2} | options)


def test_a_threshold_below_what_the_index_finds_is_refused():
    with pytest.raises(ConfigError, match=r"segment: got 0.2; expected 0.5 or more"):
        filled(SYSTEM).runs(prompt(SYSTEM), ReuseThresholds(segment=0.2))
