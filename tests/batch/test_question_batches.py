"""A batch answers each question as if it were asked alone, in any shard and after any interruption."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import fcntl
import functools
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.batch import BatchItem, answer_batch, once_in_this_process, read_answers, run_shards
from kvpatch_jax.errors import InputError, ReuseWarning, SessionError
from kvpatch_jax.session import Sessions
from kvpatch_jax.store import ChunkStore
from tests.shared.session_cases import ONE_TABLE_SIZE
from tests.shared.window_oracle import Watched, span_of, tiny


@pytest.fixture(scope="module")
def backbone() -> Any:
    with ONE_TABLE_SIZE:
        yield tiny("mrope")


@pytest.fixture(scope="module")
def items() -> list[BatchItem]:
    """Six questions over three fronts of three images, two of which share a prefix; and one over nothing."""
    draw = np.random.default_rng(3)
    first, second, page = (draw.integers(0, 256, (28, 28, 3), np.uint8) for _ in range(3))
    fronts, questions = [[first, page], [second, first], [first, second, page]], [[5, 6 + n % 2] for n in range(6)]
    items = [BatchItem(fronts[place % 3], question, f"q{place}", steps=3) for place, question in enumerate(questions)]
    return [*items, BatchItem([], questions[0], steps=1)]


@pytest.fixture(scope="module")
def done(backbone, items, tmp_path_factory):
    """One run over all: its report and its lines, its file and the forwards of the backbone."""
    watched = Watched(backbone)
    path = tmp_path_factory.mktemp("batch") / "answers.jsonl"
    return answer_batch(watched.backbone, None, items, out=path, batch=2), read_answers(path), path, watched.forwards


def expected_ids(backbone: Any, item: BatchItem) -> list[int]:
    """The greedy answer to a complete prompt, prefilled in one forward."""
    parts, start, total = [], 0, 0
    for content in (*item.front, item.question):
        tokens = backbone.embed(**backbone.prepare([content])).on_host()
        parts.append(tokens.shift(start))
        start, total = start + span_of(tokens), total + tokens.embeddings.shape[1]
    ids = backbone.generate(joined_tokens(parts).pad(128), 3, lengths=np.array([total]))[0].tolist()[: item.steps]
    return ids[: next((place for place, id in enumerate(ids) if id in backbone.stop_tokens), len(ids))]


# ------------------------------------------------------------------------------------------------------------- answers


def test_each_prefix_is_prefilled_once_and_answers_are_those_of_complete_prompts(backbone, items, done):
    report, lines, _, forwards = done
    # first, first|page, first|second, first|second|page, second, second|first
    assert report.forwards == forwards == 6
    assert (report.items, report.answered, report.failed, report.before, report.hits) == (7, 7, 0, 0, 0)
    for item, line in zip(items, lines, strict=True):
        ids = expected_ids(backbone, item)
        assert (line["id"], line["ids"], line["fidelity"]) == (item.id, ids, "exact")
        assert line["answer"] == (backbone.text(ids) if backbone.tokenizer else None)


def test_answers_do_not_depend_on_the_shards_nor_on_the_first_size_of_the_pool(
    backbone, items, done, tmp_path, monkeypatch
):
    """Which is full: it grows to the size that other tests run."""

    def crowded(*args: Any, **options: Any) -> Sessions:
        sessions = Sessions(*args, **options)
        sessions.runtime.executor.slots.allocate(128 * 16)
        return sessions

    for name, value in (("FIRST_PAGES", 128), ("Sessions", crowded)):
        monkeypatch.setattr(sys.modules["kvpatch_jax.batch.answer_batch"], name, value)
    reports = []
    for index in range(3):
        reports.append(answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", batch=2, shard=(index, 3)))
    assert sum(report.items for report in reports) == len(items)
    assert sorted(os.listdir(tmp_path)) == [f"a.{index:05d}-of-00003.jsonl" for index in range(3)]
    assert read_answers(*[report.path for report in reports]) == done[1]
    with pytest.raises(InputError, match="are missing, the first is"):
        read_answers(*[report.path for report in reports if report.items][1:])


def test_a_store_saves_forwards_and_changes_no_answer(backbone, items, done, tmp_path):
    for name, forwards in (("a", 6), ("b", 0)):
        with ChunkStore(tmp_path / "store") as store:
            report = answer_batch(backbone, store, items, out=tmp_path / f"{name}.jsonl", batch=2)
        assert (report.forwards, report.hits) == (forwards, 6 - forwards)
        assert read_answers(tmp_path / f"{name}.jsonl") == done[1]


def test_approximate_answers_are_labelled_audited_and_ended_beyond_the_goal(backbone, items, tmp_path):
    """A store that has chunks only alone serves them blind."""
    with ChunkStore(tmp_path / "store") as store:
        for number, front in enumerate(items[1].front):
            answer_batch(backbone, store, [BatchItem([front], [5, 6], steps=1)], out=tmp_path / f"{number}.jsonl")
        repeated, answers = [items[1]] * 5, []
        for name, options in (("blind", {"kl": 9.0}), ("unaudited", {"audit": 0})):
            path = tmp_path / f"{name}.jsonl"
            report = answer_batch(backbone, store, repeated, out=path, reuse="blind", batch=2, **options)
            assert (report.audits.answers, report.audits.skipped) == (3 if name == "blind" else 0, 0)
            assert {line["fidelity"] for line in read_answers(path)} == {"approximate"}
            answers.append([line["ids"] for line in read_answers(path)])
        assert answers[0] == answers[1]

        # Beyond the goal, with one answer in flight: the rest is served by prefills.
        with pytest.warns(ReuseWarning, match="blind image pieces lose"):
            strict = answer_batch(
                backbone, store, repeated, out=tmp_path / "strict.jsonl", reuse="blind", kl=0.0, batch=1
            )
    assert strict.audits.answers == 1
    lines = read_answers(tmp_path / "strict.jsonl")
    assert [line["fidelity"] for line in lines] == ["approximate", *["exact"] * 4]
    assert [line["ids"] for line in lines[1:]] == [expected_ids(backbone, items[1])] * 4


# ------------------------------------------------------------------------------------------------------- interruptions


def test_a_run_that_was_cut_anywhere_continues_after_its_lines(backbone, items, done, tmp_path):
    _, lines, path, _ = done
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    for number, cut in enumerate([0, 40, ends[0], ends[0] + 9, ends[3], len(content) - 1]):
        part = tmp_path / f"{number}.jsonl"
        part.write_bytes(content[:cut])
        again = answer_batch(backbone, None, items, out=part, batch=2)
        complete = max(0, sum(end <= cut for end in ends) - 1)
        assert (again.before, again.answered) == (complete, 7 - complete), cut
        assert read_answers(part) == lines
        assert part.read_bytes().startswith(content[:cut])


def test_after_an_interrupt_the_same_call_continues(backbone, items, done, tmp_path, monkeypatch):
    """While a question is answered and others are prepared."""
    advance, calls = type(backbone).advance_answers, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return advance(*args, **options)

    with ChunkStore(tmp_path / "store") as store:
        with monkeypatch.context() as patched:
            patched.setattr(type(backbone), "advance_answers", interrupted)
            with pytest.raises(KeyboardInterrupt):
                answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", batch=2)
        written = max(0, len((tmp_path / "a.jsonl").read_bytes().split(b"\n")) - 2)
        report = answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", batch=2)
    assert (report.before, report.answered) == (written, len(items) - written)
    assert read_answers(tmp_path / "a.jsonl") == done[1]


# ---------------------------------------------------------------------------------------------------------- wrong calls


def test_files_of_other_calls_and_damaged_files_are_refused_and_left_alone(backbone, items, done, tmp_path):
    path, lines = tmp_path / "answers.jsonl", done[2].read_bytes().splitlines(keepends=True)
    last = BatchItem([], items[-1].question, steps=2)
    for content, questions, options, message in (
        (lines, [*items[:-1], last], {}, "answers of digest"),
        (lines, items, {"reuse": "blind"}, "answers of reuse 'exact', not of 'blind'"),
        ([*lines[:2], b"[" * 9999 + b"\n", *lines[3:]], items, {}, "line 3: got no JSON"),
        ([*lines[:2], lines[2].replace(b'"item": ', b'"item": 4'), *lines[3:]], items, {}, "line 3: got item"),
        ([b"a text without an end"], items, {}, "answers of format None, not of"),
    ):
        path.write_bytes(b"".join(content))
        with pytest.raises(InputError, match=message):
            answer_batch(backbone, None, questions, out=path, **options)
        assert path.read_bytes() == b"".join(content)
    # A lock belongs to an open file, so another one of this process is another run.
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run is writing"):
            answer_batch(backbone, None, items, out=path)


def test_invalid_calls_are_refused_and_create_nothing(backbone, items, tmp_path, unchecked):
    valid: dict[str, Any] = {"items": items, "out": tmp_path / "a.jsonl"}
    for options, error, message in (
        ({"shard": (1, 1)}, InputError, "shard"),
        ({"items": []}, InputError, "no items"),
        ({"out": "/dev/null/answers.jsonl"}, InputError, "cannot be written"),
        ({"reuse": "certified"}, SessionError, "a certificate beside it"),
    ):
        with pytest.raises(error, match=message):
            answer_batch(backbone, None, **valid | options)
        assert not os.listdir(tmp_path)


def test_invalid_items_get_a_line_with_their_error_and_others_are_answered(backbone, items, done, tmp_path, unchecked):
    (tmp_path / "none.png").write_bytes(b"\x89PNG, but cut short")
    good = {"front": items[0].front, "question": items[0].question}
    bad = [good | {"front": [tmp_path / "none.png"], "id": "cut"}, 7, good | {"question": "\ud800"}]
    bad += [good | change for change in ({"question": 3}, {"steps": 1.0}, {"colour": "red"}, {"front": "page.png"})]
    mixed, out = [items[0], *bad[:5], items[1], *bad[5:]], tmp_path / "answers.jsonl"
    for before in (0, 2, 2):  # what failed is asked again
        report = answer_batch(backbone, None, mixed, out=out, batch=2)
        assert (report.before, report.answered, report.failed) == (before, 2 - before, len(bad))
        lines = read_answers(out)
        assert [line["error"] for line in lines if "error" in line] == ["InputError"] * len(bad)
        assert lines[1]["id"] == "cut"
        assert [lines[0]["ids"], lines[6]["ids"]] == [line["ids"] for line in done[1][:2]]


@pytest.mark.nightly
def test_a_shard_whose_worker_dies_begins_again_and_an_error_of_one_leaves_the_others(tmp_path):
    """On two workers of one core each."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # as `run_shards` starts one
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024 * 1024)

    def dies_once(folder: str, index: int, count: int) -> tuple[int, int]:
        mark = Path(folder) / f"{index}"
        if index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mark.touch()
        return index, count

    assert run_shards(functools.partial(dies_once, str(tmp_path)), 3) == [(0, 3), (1, 3), (2, 3)]

    def refuses(folder: str, index: int, count: int) -> int:
        (Path(folder) / f"done {index}").touch()
        if index == 0:
            raise ValueError("a page\nthat nobody has")
        return index

    with pytest.raises(SessionError, match=r"1 of 3 shards that failed \(0\): shard 0: a page that nobody has; expect"):
        run_shards(functools.partial(refuses, str(tmp_path)), 3)
    assert {path.name for path in tmp_path.glob("done *")} == {"done 0", "done 1", "done 2"}
    assert once_in_this_process(object) is once_in_this_process(object)
    ray.shutdown()
