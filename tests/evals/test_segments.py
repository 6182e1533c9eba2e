"""Segment reuse on transcripts: the ground truth is true, rows are of their records, and the page shows the rows."""

import difflib
import itertools
import json
import re
import types
import zlib
from pathlib import Path
from typing import Any

import pytest

from evals.report.documents import block
from evals.segments import document, rows, suite
from evals.segments.readers import load_small
from evals.segments.retrieval import measure_retrieval, stable_tokens
from evals.segments.serving import common_prefix, is_call, levenshtein
from evals.segments.settings import FULL, MAIN_SETTING, QUICK, settings
from evals.segments.transcripts import TranscriptPlan, make_transcripts
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.segment_reuse import SegmentIndexOptions, SegmentPrompt, as_ids

ROOT = Path(__file__).parents[2]
PLAN = TranscriptPlan(count=25, seed=5)


def encode(text: str, add_special_tokens: bool = False) -> Any:
    pieces = list(re.finditer(r"\n|[^\S\n]*(?:\w+|[^\w\s])", text))
    ids = [zlib.crc32(piece.group().encode()) % 50_000 for piece in pieces]
    return types.SimpleNamespace(ids=ids, offsets=[piece.span() for piece in pieces])


@pytest.fixture(scope="module")
def published():
    return json.loads((ROOT / document.KEPT).read_text())


def test_the_page_shows_the_published_results(published):
    page = ROOT / document.PAGE
    assert block(document.section(published), page, "segments") == page.read_text()


def test_published_retrieval_reaches_its_target(published):
    (row,) = [row for row in published["retrieval"] if (row["kind"], row["segment"], row["context"]) == ("all", 0.7, 0)]
    assert published["config"]["plan"]["retrieval"][0] == 300
    assert row["recalled"] / row["repeats"] >= 0.95


def test_spans_tile_a_transcript_and_plans_repeat_themselves():
    made = make_transcripts(PLAN)
    assert made == make_transcripts(PLAN)
    assert made != make_transcripts(PLAN._replace(seed=6))
    for transcript in made:
        assert transcript.text.endswith("Action:")
        assert transcript.spans[0].start == 0
        edges = [span.start for span in transcript.spans[1:]] + [len(transcript.text)]
        assert [span.stop for span in transcript.spans] == edges


def test_equal_contents_are_equal_texts_but_for_volatile_spans():
    texts: dict[str, set[str]] = {}
    moved: dict[str, set[int]] = {}
    for transcript in make_transcripts(PLAN._replace(count=100)):
        for span in transcript.spans:
            text, cut = transcript.text, [(span.start, span.start), *span.volatile, (span.stop, span.stop)]
            if not span.content or span.edit == "stamp":
                continue
            kept = "".join(text[before[1] : after[0]] + "_" for before, after in itertools.pairwise(cut))
            figure = re.sub(r"about (_|\d+) thousand", "about N thousand", kept).strip("_")
            texts.setdefault(span.content, set()).add(figure)
            moved.setdefault(span.content, set()).add(span.start)
    assert len(texts) > 40
    assert {len(variants) for variants in texts.values()} == {1}
    assert sum(len(places) > 1 for places in moved.values()) > 20


def test_a_stamp_stands_in_the_middle_and_only_it_is_volatile():
    stamped = [(t, span) for t in make_transcripts(PLAN) for span in t.spans if span.edit == "stamp"]
    assert stamped
    for transcript, span in stamped:
        ((start, stop),) = span.volatile
        assert span.start < start < stop < span.stop
        assert "request" in transcript.text[start:stop] or "Called" in transcript.text[start:stop]


def test_stable_tokens_lie_in_the_span_and_outside_what_is_volatile():
    transcript = next(t for t in make_transcripts(PLAN) if any(span.volatile for span in t.spans))
    prompt = SegmentPrompt.of_text(transcript.text, encode)
    span = next(span for span in transcript.spans if span.volatile)
    offsets = encode(transcript.text).offsets
    expected = []
    for token, (start, stop) in enumerate(offsets):
        free = all(stop <= begin or start >= end for begin, end in span.volatile)
        if span.start <= start and stop <= span.stop and free:
            expected.append(token)
    assert stable_tokens(prompt, span).tolist() == expected


def test_true_repeats_are_recalled():
    made = make_transcripts(PLAN)
    prompts = [SegmentPrompt.of_text(transcript.text, encode) for transcript in made]
    records = measure_retrieval(prompts, made, SegmentIndexOptions(reuse_layers=1), (0.7,), ())
    assert len(records) > 100
    assert sum(record["recalled"] for record in records) >= 0.95 * len(records)
    # A first appearance is no repeat.
    assert records[0]["transcript"] > 0


def test_levenshtein_equals_its_definition():
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    for a, b in (("", "abc"), ("kitten", "sitting"), ("abc", "abc"), ("flaw", "lawn"), ("ab", "ba")):
        assert levenshtein([ord(c) for c in a], [ord(c) for c in b]) == slow(a, b)


def test_a_prefix_cache_has_the_longest_common_prefix_but_for_the_last_token():
    prompt = SegmentPrompt(as_ids([1, 2, 3, 4]))
    others = [SegmentPrompt(as_ids(ids)) for ids in ([1, 2, 9, 9], [1, 2, 3, 4, 5], [7])]
    assert common_prefix(prompt, others) == 3
    assert common_prefix(prompt, others[:1]) == 2
    assert common_prefix(prompt, []) == 0


def test_calls_are_told_from_other_lines():
    assert is_call('{"name": "search", "arguments": {"query": "Lyon"}}')
    for line in ("search", '{"name": "nothing", "arguments": {}}', '["search"]', '{"name": "search"}', ""):
        assert not is_call(line)


def made_record(kl: float, accepted: bool, at: str | None = None) -> dict[str, Any]:
    run = {"length": 60, "accepted": accepted, "rejected_at": at, "equal_prefix": False, "probes": [], "saves": 300}
    run |= {"kl": kl if accepted else None, "generation": 0}
    flops = {"full": 1000, "bottom": 500, "upper": 200, "test": 50, "discarded": 10}
    record = {"setting": MAIN_SETTING, "tokens": 100, "prefix": 0, "whole": 1000, "flops": flops, "reused": 40}
    return record | {"kl": kl, "flipped": False, "seconds": 1.0, "decisions": [run]}


def test_rows_count_what_their_records_say():
    row = rows.setting_row([made_record(0.01, True), made_record(0.5, True), made_record(0.0, False, "left")])
    assert (row["tried"], row["accepted"], row["left"], row["right"], row["within"]) == (3, 2, 1, 0, 1)
    assert row["precision"][0] == 0.5
    assert row["saved"][0] == pytest.approx(0.24)
    assert (row["test"], row["discarded"], row["reused"]) == (0.05, 0.01, 0.4)
    (line,) = rows.length_rows(
        [{**made_record(0.01, True), "setting": "every run, whatever it saves"}], ["every run, whatever it saves"]
    )
    assert (line["from"], line["to"], line["runs"]) == (48, 64, 1)
    assert line["net"] == round((300 - 50) / 1e9, 3)


def test_break_even_is_given_for_every_reuse_depth():
    costs = ForwardCosts((1000,) * 30, (10,) * 30, (0,) * 30, 100)
    for row in rows.break_even_rows(costs, FULL):
        assert list(row["tokens"]) == [str(layers) for layers in sorted(FULL.reuse)]
        # The more layers are reused, the sooner it pays.
        lengths = list(row["tokens"].values())
        assert lengths == sorted(lengths, reverse=True)


def test_ablations_differ_from_the_main_setting_in_one_thing():
    main, *others = settings(FULL.reuse)
    assert main.name == MAIN_SETTING
    assert len({setting.name for setting in settings(FULL.reuse)}) == len(others) + 1
    for other in others:
        assert (other.store != main.store) or (other.thresholds != main.thresholds)
    assert difflib.get_close_matches("no test", [other.name for other in others])


@pytest.mark.slow
def test_a_quick_suite_measures_all_parts_and_resumes(tmp_path):
    reader = load_small()
    results = suite.run(QUICK, reader, tmp_path)
    names = [row["setting"] for row in results["settings"]]
    assert names == ["main, all prompts", *(setting.name for setting in settings(QUICK.reuse))]
    assert len(results["cold"]) == QUICK.cold
    assert results["cold"][0]["saved"] == 0
    assert results["stability"]["whole"] == 0
    # Without a threshold that rejects, what is served is still an approximation with a measured loss.
    (blind,) = [row for row in results["settings"] if row["setting"] == "no test"]
    assert blind["accepted"] == blind["tried"] > 0
    assert blind["test"] == blind["discarded"] == 0
    assert suite.run(QUICK, reader, tmp_path) == results
    assert len(document.section(results).splitlines()) > 40
