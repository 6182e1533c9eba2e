"""Batches: prefixes brought once, answers that depend on nothing but the items, runs that go on where they stopped."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from evals.task.contexts import sample
from evals.task.drawing import images_of
from evals.trained import shipped
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.batch import BatchItem, answer_batch, read_answers
from kvpatch_jax.errors import InputError, ReuseWarning, SessionError
from kvpatch_jax.models import Buckets, ModelBackbone, load
from kvpatch_jax.store import ChunkStore
from tests.goldens.load import write_checkpoint
from tests.shared.window_oracle import BUCKETS, counting_of, span_of, tiny


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> ModelBackbone:
    return load(write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def items() -> list[BatchItem]:
    """Six questions over three fronts of three images, two of which share a prefix; and one over nothing."""
    draw = np.random.default_rng(3)
    first, second, page = (draw.integers(0, 256, (40, 40, 3), np.uint8) for _ in range(3))
    return items_of(first, second, page, [[5, 6 + number % 2] for number in range(6)])


def items_of(first, second, page, questions) -> list[BatchItem]:
    fronts = [[first, page], [second, first], [first, second, page]]
    items = [BatchItem(fronts[place % 3], question, f"q{place}", steps=2) for place, question in enumerate(questions)]
    return [*items, BatchItem([], questions[0], steps=1)]


@pytest.fixture(scope="module")
def done(backbone, items, tmp_path_factory):
    """One run over all: its report and its lines, its file and the forwards of the backbone."""
    counting = counting_of(backbone)
    path = tmp_path_factory.mktemp("batch") / "answers.jsonl"
    return answer_batch(counting, None, items, out=path, batch=2), read_answers(path), path, counting.forwards


def whole_answer(backbone: ModelBackbone, item: BatchItem) -> list[int]:
    """The greedy answer to a whole prompt, prefilled in one forward."""
    parts, start = [], 0
    for content in (*item.front, item.question):
        tokens = backbone.embed(**backbone.prepare([content]))
        parts.append(tokens.shift(start))
        start += span_of(tokens)
    embeddings = jnp.concatenate([part.embeddings for part in parts], axis=1)
    positions = np.concatenate([np.asarray(part.positions) for part in parts], axis=1)
    ids = backbone.generate(Tokens(embeddings, positions), item.steps)[0].tolist()
    return ids[: next((place for place, id in enumerate(ids) if id in backbone.stop_tokens), len(ids))]


def check_answers(backbone: ModelBackbone, items: list[BatchItem], lines: list[dict]) -> None:
    for item, line in zip(items, lines, strict=True):
        ids = whole_answer(backbone, item)
        assert (line["id"], line["ids"], line["fidelity"]) == (item.id, ids, "exact")
        assert line["answer"] == (backbone.text(ids) if backbone.tokenizer else None)


def test_each_prefix_is_prefilled_once_and_answers_are_those_of_whole_prompts(backbone, items, done):
    report, lines, _, forwards = done
    # first, first|page, first|second, first|second|page, second, second|first
    assert report.forwards == forwards == 6
    assert (report.items, report.answered, report.failed, report.before, report.hits) == (7, 7, 0, 0, 0)
    check_answers(backbone, items, lines)


@pytest.mark.nightly
def test_answers_of_a_trained_model_are_those_of_whole_prompts(tmp_path):
    first, second, _, page = images_of(sample(np.random.default_rng(7), 1))
    questions = ["first of A1?", "second of B2?", "first of C3?", "unit of D4?", "value of E5?", "unit of F6?"]
    backbone = load(shipped("documents/qwen2_5_vl"), dtype="float32")
    items = items_of(first, second, page, questions)
    answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", batch=4)
    check_answers(backbone, items, read_answers(tmp_path / "a.jsonl"))


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [None, BUCKETS])
def test_answers_of_a_hybrid_model_are_those_of_whole_prompts(buckets: Buckets | None, tmp_path: Path):
    """Questions of several lengths behind nothing, behind one image and behind more."""
    backbone, draw = tiny("hybrid", buckets), np.random.default_rng(5)
    first, second, third = (draw.integers(0, 256, (24, 24, 3), np.uint8) for _ in range(3))
    fronts = [[], [first], [first, second], [third, second, first]]
    questions = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
    items = [BatchItem(front, question, steps=4) for front in fronts for question in questions]
    answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", batch=2)
    check_answers(backbone, items, read_answers(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("count", [2, 3, 9])
def test_answers_do_not_depend_on_the_shards(backbone, items, done, tmp_path, count):
    reports = [
        answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", batch=2, shard=(index, count))
        for index in range(count)
    ]
    assert sum(report.items for report in reports) == len(items)
    assert sorted(os.listdir(tmp_path)) == [f"a.{index:05d}-of-{count:05d}.jsonl" for index in range(count)]
    paths = [report.path for report in reports]
    assert read_answers(*paths) == done[1]

    # Items with the same prefix, of which there are four, are in one shard.
    prefixes = []
    for path in paths:
        indices = [json.loads(line)["item"] for line in path.read_bytes().splitlines()[1:]]
        prefixes.append({None if index == 6 else index % 3 for index in indices})
    assert sum(map(len, prefixes)) == len(set().union(*prefixes)) == 4
    with pytest.raises(InputError, match="are missing, the first is"):
        read_answers(*[report.path for report in reports if report.items][1:])


def test_a_run_that_was_cut_anywhere_continues_after_its_lines(backbone, items, done, tmp_path):
    _, lines, path, _ = done
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    cuts = [0, 1, 40, ends[0] - 1, ends[0], ends[0] + 9, ends[3] - 1, ends[3], len(content) - 1, len(content)]
    for number, cut in enumerate(cuts):
        part = tmp_path / f"{number}.jsonl"
        part.write_bytes(content[:cut])
        again = answer_batch(backbone, None, items, out=part, batch=2)
        complete = max(0, sum(end <= cut for end in ends) - 1)
        assert (again.before, again.answered) == (complete, 7 - complete), cut
        assert read_answers(part) == lines
        assert part.read_bytes().startswith(content[:cut])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda items: items[:-1], {}, "answers of items 7, not of 6"),
        (lambda items: [items[1], items[0], *items[2:]], {}, "answers of digest"),
        (lambda items: [*items[:-1], BatchItem([], items[-1].question, steps=2)], {}, "answers of digest"),
        (lambda items: items, {"reuse": "blind"}, "answers of reuse 'exact', not of 'blind'"),
    ],
)
def test_another_list_of_items_or_another_reuse_is_refused(backbone, items, done, change, options, message):
    before = done[2].read_bytes()
    with pytest.raises(InputError, match=message):
        answer_batch(backbone, None, change(items), out=done[2], **options)
    assert done[2].read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (lambda lines: [b"{", *lines[1:]], "line 1: got no JSON"),
        (lambda lines: [*lines[:2], b"[" * 9999, *lines[3:]], "line 3: got no JSON"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"item": ', b'"item": 4'), *lines[3:]], "line 3: got item"),
        (lambda lines: [b'{"some": "notes"}', *lines[1:]], "answers of format None, not of"),
        (lambda lines: [b"a text without an end"], "answers of format None, not of"),
    ],
)
def test_damaged_and_foreign_files_are_left_alone(backbone, items, done, tmp_path, lines, message):
    changed = lines(done[2].read_bytes().splitlines())
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"\n".join(changed) + (b"\n" if len(changed) > 1 else b""))
    before = path.read_bytes()
    with pytest.raises(InputError, match=message):
        answer_batch(backbone, None, items, out=path)
    assert path.read_bytes() == before


def test_invalid_items_get_a_line_with_their_error_and_the_others_are_answered(
    backbone, items, done, tmp_path, unchecked, capsys, monkeypatch
):
    (tmp_path / "none.png").write_bytes(b"\x89PNG, but cut short")
    (tmp_path / "note.txt").write_text("a text")
    good = {"front": items[0].front, "question": items[0].question}
    bad = [
        good | {"front": [tmp_path / "missing.png"]},
        good | {"front": [tmp_path / "none.png"], "id": "cut"},
        good | {"front": [str(tmp_path / "note.txt")]},
        good | {"question": 3},
        good | {"steps": 1.0},
        good | {"colour": "red"},
        good | {"front": "page.png"},
        good | {"question": "a word that no vocabulary has"},
        good | {"question": "\ud800"},
        good | {"front": [""]},
        7,
    ]
    mixed, out = [items[0], *bad[:5], items[1], *bad[5:]], tmp_path / "answers.jsonl"
    report = answer_batch(backbone, None, mixed, out=out, batch=2)
    assert (report.answered, report.failed) == (2, len(bad))
    assert capsys.readouterr().err == f"answer_batch: {len(bad)} of {len(mixed)} items failed; their lines say why\n"
    assert str(report).startswith(f"2 of {len(mixed)} items answered, {len(bad)} failed; ")
    lines = read_answers(out)
    errors = [line["error"] for line in lines if "error" in line]
    assert errors == [*["InputError"] * 2, "InputError", *["InputError"] * 8]
    assert lines[2]["id"] == "cut"
    assert "looks like a file's name" in lines[3]["message"]
    assert lines[0]["ids"] == done[1][0]["ids"]

    # What failed is asked again.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in range(2):
        again = answer_batch(backbone, None, mixed, out=out, batch=2)
        assert (again.before, again.failed) == (2, len(bad))
        assert read_answers(out) == lines
        shown = capsys.readouterr().err.split("\r")
        assert shown[-1].startswith(f"answer_batch: {len(mixed)} of {len(mixed)} items, {len(bad)} failed\n")


@pytest.mark.nightly
def test_free_orders_share_what_they_can(backbone, items, tmp_path):
    page, first, second = items[0].front[1], *items[1].front[::-1]
    fronts, forwards = [[first, second, page], [page, first], [second, page, first], [page]], []
    for order_free in (True, False):
        asked = [BatchItem(front, [5], order_free=order_free, steps=1) for front in fronts]
        forwards.append(answer_batch(backbone, None, asked, out=tmp_path / f"{order_free}.jsonl").forwards)
    # Free: page, page first, page first second.
    assert forwards == [3, 8]
    with pytest.raises(InputError, match="answers of digest"):
        answer_batch(backbone, None, asked, out=tmp_path / "True.jsonl")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shard": (1, 1)}, InputError, "shard"),
        ({"batch": 0}, InputError, "batch 0"),
        ({"items": []}, InputError, "no items"),
        ({"items": {"front": [], "question": "?"}}, InputError, "expected a sequence"),
        ({"out": "/dev/null/answers.jsonl"}, InputError, "cannot be written"),
        ({"reuse": "certified"}, SessionError, "a certificate beside it"),
    ],
)
def test_invalid_calls_are_refused(backbone, items, tmp_path, unchecked, options, error, message):
    call: dict[str, Any] = {"items": items, "out": tmp_path / "a.jsonl"} | options
    with pytest.raises(error, match=message):
        answer_batch(backbone, None, call.pop("items"), **call)
    assert not os.listdir(tmp_path)


def test_two_runs_do_not_write_one_file(backbone, items, tmp_path):
    path = tmp_path / "a.jsonl"
    # A lock belongs to an open file, so another one of this process is another run.
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing"):
            answer_batch(backbone, None, items[:1], out=path)


def test_a_store_saves_forwards_and_changes_no_answer(backbone, items, done, tmp_path):
    for name, forwards in (("a", 6), ("b", 0)):
        with ChunkStore(tmp_path / "store") as store:
            report = answer_batch(backbone, store, items, out=tmp_path / f"{name}.jsonl", batch=2)
        assert (report.forwards, report.hits) == (forwards, 6 - forwards)
        assert read_answers(tmp_path / f"{name}.jsonl") == done[1]


def test_approximate_answers_say_so(backbone, items, tmp_path):
    """What the store has only alone is served blind."""
    with ChunkStore(tmp_path / "store") as store:
        for front in items[1].front:
            answer_batch(backbone, store, [BatchItem([front], [5], steps=1)], out=tmp_path / f"{id(front)}.jsonl")
        asked = [items[1]] * 5
        report = answer_batch(backbone, store, asked, out=tmp_path / "blind.jsonl", reuse="blind", kl=9.0, batch=2)
        assert (report.audits.answers, report.audits.skipped, report.tokens) == (3, 0, 0)
        assert f"3 answers audited: KL {report.audits.kl:.2g}" in str(report)
        assert {line["fidelity"] for line in read_answers(tmp_path / "blind.jsonl")} == {"approximate"}
        unaudited = answer_batch(backbone, store, asked, out=tmp_path / "unaudited.jsonl", reuse="blind", audit=0)
        assert unaudited.audits.answers == 0
        texts = [[line["ids"] for line in read_answers(tmp_path / f"{name}.jsonl")] for name in ("blind", "unaudited")]
        assert texts[0] == texts[1]

        # Beyond the goal, with one answer in flight: the rest is served by prefills.
        with pytest.warns(ReuseWarning, match="blind image pieces lose"):
            strict = answer_batch(backbone, store, asked, out=tmp_path / "strict.jsonl", reuse="blind", kl=0.0, batch=1)
    assert strict.audits.answers == 1
    lines = read_answers(tmp_path / "strict.jsonl")
    assert [line["fidelity"] for line in lines] == ["approximate", *["exact"] * 4]
    assert [line["ids"] for line in lines[1:]] == [whole_answer(backbone, items[1])] * 4


def test_a_pool_that_is_full_grows(backbone, items, done, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kvpatch_jax.batch.answer_batch"], "FIRST_PAGES", 1)
    answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", batch=4)
    assert read_answers(tmp_path / "a.jsonl") == done[1]


@pytest.fixture
def heard():
    """Ctrl-C reaches Python, whatever the tests were started by: a shell's background job is born deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("moment", ["embed_padded 1", "embed_padded 6", "advance_answers 1", "append 1"])
def test_after_an_interrupt_anywhere_the_same_call_continues(backbone, items, done, tmp_path, monkeypatch, moment):
    """Ctrl-C while chunks are formed, while a question is answered, and while its line is being written."""
    method, at = moment.split()
    place: Any = sys.modules["kvpatch_jax.batch.answer_batch"] if method == "append" else type(backbone)
    original, calls = getattr(place, method), []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        result = original(*args, **options)
        if len(calls) == int(at) + 1:
            signal.raise_signal(signal.SIGINT)
        return result

    with ChunkStore(tmp_path / "store") as store:
        with monkeypatch.context() as patched:
            patched.setattr(place, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", batch=2)
        written = max(0, len((tmp_path / "a.jsonl").read_bytes().split(b"\n")) - 2)
        report = answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", batch=2)
    assert (report.before, report.answered) == (written, len(items) - written)
    assert read_answers(tmp_path / "a.jsonl") == done[1]
