"""Batches: each chunk formed once, answers that depend on nothing but the items, runs that go on where they stopped."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from window_oracle import counting_of

import kvpatch_jax as kvp
from evals.task.contexts import sample
from evals.task.drawing import images_of
from kvpatch_jax.batch import BatchConfig, BatchItem, answer_batch, read_answers
from kvpatch_jax.batch.batch_file import AnswerFile
from kvpatch_jax.errors import ConfigError, InputError, StoreFullError
from kvpatch_jax.store import ChunkStore
from models import ModelBackbone, load
from tests.goldens.load import write_checkpoint

ROOT = Path(__file__).parents[3]
RANK = 2


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
    found = [BatchItem(fronts[number % 3], asked, f"q{number}", steps=2) for number, asked in enumerate(questions)]
    return [*found, BatchItem([], questions[0], steps=1, stop=())]


def task_items() -> list[BatchItem]:
    """The same over images of the task, with questions as text."""
    first, second, _, page = images_of(sample(np.random.default_rng(7), 1))
    questions = ["first of A1?", "second of B2?", "first of C3?", "unit of D4?", "value of E5?", "unit of F6?"]
    return items_of(first, second, page, questions)


class MemoryPatchStore:
    """A store in memory."""

    def __init__(self):
        self.chunks, self.patches, self.full = {}, [], False

    def get(self, id, backbone, *, lead=None):
        return self.chunks.get(id)

    def put(self, chunk):
        if self.full:
            raise StoreFullError("no room; expected some")
        self.chunks[chunk.id] = chunk

    def get_patches(self, served):
        return [patch for patch in self.patches if patch.metadata.chunk.id == served.chunk.id]

    def put_patches(self, patches):
        if self.full:
            raise StoreFullError("no room; expected some")
        self.patches += patches


def answers(path: Path) -> list[dict]:
    return [{name: line.get(name) for name in ("item", "ids", "answer", "error")} for line in read_answers(path)]


@pytest.fixture(scope="module")
def done(backbone, items, tmp_path_factory):
    """One run over all, its store and its file."""
    counting, shelf = counting_of(backbone), MemoryPatchStore()
    path = tmp_path_factory.mktemp("batch") / "answers.jsonl"
    report = answer_batch(counting, shelf, items, out=path, rank=RANK, batch=2)
    return report, shelf, path, counting.forwards


def test_each_chunk_is_prefilled_once_alone_and_once_after_each_antecedent(done):
    report, shelf, _, forwards = done
    # Chunks: two legends, a page. Behind others: page|first, first|second, second|first, page|first,second.
    assert (report.canonicals, report.conditioned, report.again, report.patches) == (3, 4, 0, 4)
    assert report.forwards == forwards == 7
    assert (report.answered, report.failed, report.before) == (7, 0, 0)
    assert len(shelf.chunks) == 3
    behind = sorted(len(patch.metadata.antecedent.ids) for patch in shelf.patches)
    assert behind == [1, 1, 1, 2]
    for patch in shelf.patches:
        assert patch.metadata.antecedent.exact


@pytest.mark.slow
def test_answers_equal_those_of_the_public_functions(backbone, items, done):
    check_answers(backbone, items, read_answers(done[2]))


@pytest.mark.slow
def test_answers_of_a_trained_model_equal_those_of_the_public_functions(tmp_path):
    items, backbone = task_items(), load(ROOT / "evals" / "trained" / "documents" / "qwen2_5_vl", dtype="float32")
    report = answer_batch(backbone, None, items, out=tmp_path / "a.jsonl", rank=RANK, batch=4)
    assert (report.canonicals, report.conditioned, report.failed) == (3, 4, 0)
    check_answers(backbone, items, read_answers(tmp_path / "a.jsonl"))


def check_answers(backbone: ModelBackbone, items: list[BatchItem], lines: list[dict]) -> None:
    """Each answer is what `make_chunk`, `conditioned`, `form_patch` and `apply_patch` give."""
    for item, line in zip(items, lines, strict=True):
        chunks = [kvp.make_chunk(backbone, [image]) for image in item.front]
        placed, start = [], 0
        for place, (chunk, kv) in enumerate(
            zip(chunks, kvp.conditioned(backbone, [[image] for image in item.front]) if chunks else [], strict=True)
        ):
            ids = [each.id for each in chunks[:place]]
            patch = kvp.form_patch(chunk, kv, RANK, ids) if place else None
            placed.append(kvp.apply_patch(chunk, patch, start, ids))
            start += chunk.span
        tokens = backbone.embed(**backbone.prepare([item.question])).shift(start)
        ids = backbone.generate(tokens, item.steps, kvp.joined(*placed) if placed else None, stop=item.stop)[0]
        stops = backbone.stop_tokens if item.stop is None else item.stop
        expected = [int(each) for each in ids]
        expected = expected[: next((n for n, each in enumerate(expected) if each in stops), len(expected))]
        assert line["ids"] == expected, line
        assert line["answer"] == (backbone.text(expected) if backbone.tokenizer else None)
        assert line["id"] == item.id
        assert line["fidelity"] == ("approximate" if item.front else "exact")


@pytest.mark.parametrize("count", [2, 3, 9])
def test_answers_do_not_depend_on_the_shards(backbone, items, done, tmp_path, count):
    shelf = done[1]
    reports = [
        answer_batch(backbone, shelf, items, out=tmp_path / "a.jsonl", rank=RANK, batch=2, shard=(index, count))
        for index in range(count)
    ]
    assert sum(report.items for report in reports) == len(items)
    assert sorted(os.listdir(tmp_path)) == [f"a.{index:05d}-of-{count:05d}.jsonl" for index in range(count)]
    paths = [report.path for report in reports]
    assert read_answers(*paths) == read_answers(done[2])

    # Items with the same prefix, of which there are four, are in one shard.
    prefixes = []
    for path in paths:
        indices = [json.loads(line)["item"] for line in path.read_bytes().splitlines()[1:]]
        prefixes.append({None if index == 6 else index % 3 for index in indices})
    assert sum(map(len, prefixes)) == len(set().union(*prefixes)) == 4
    with pytest.raises(InputError, match="are missing, the first is"):
        read_answers(*[report.path for report in reports if report.items][1:])


def test_a_run_that_was_cut_anywhere_continues_after_its_lines(backbone, items, done, tmp_path):
    _, shelf, path, _ = done
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    cuts = [0, 1, 40, ends[0] - 1, ends[0], ends[0] + 9, ends[3] - 1, ends[3], len(whole) - 1, len(whole)]
    for number, cut in enumerate(cuts):
        part = tmp_path / f"{number}.jsonl"
        part.write_bytes(whole[:cut])
        again = answer_batch(backbone, shelf, items, out=part, rank=RANK, batch=2)
        lines = max(0, sum(end <= cut for end in ends) - 1)
        assert (again.before, again.answered) == (lines, 7 - lines), cut
        assert read_answers(part) == read_answers(path)
        assert part.read_bytes().startswith(whole[:cut])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[:-1], "answers of items 7, not of 6"),
        (lambda items: [items[1], items[0], *items[2:]], "answers of digest"),
        (lambda items: [*items[:-1], BatchItem([], items[-1].question, steps=2, stop=())], "answers of digest"),
    ],
)
def test_another_list_of_items_is_refused(backbone, items, done, change, message):
    before = done[2].read_bytes()
    with pytest.raises(InputError, match=message):
        answer_batch(backbone, done[1], change(items), out=done[2], rank=RANK)
    assert done[2].read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (lambda lines: [b"{", *lines[1:]], "line 1: got no JSON"),
        (lambda lines: [*lines[:2], b"[" * 9999, *lines[3:]], "line 3: got no JSON"),
        (lambda lines: [*lines, lines[-1]], "expected each of this shard's items once"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"item": ', b'"item": 4'), *lines[3:]], "line 3: got item"),
        (lambda lines: [b'{"some": "notes"}', *lines[1:]], "is no file of answers"),
        (lambda lines: [lines[0].replace(b'"rank": 2', b'"rank": 4'), *lines[1:]], "answers of rank 4, not of 2"),
        (lambda lines: [b"a text without an end"], "is no file of answers"),
    ],
)
def test_damaged_and_foreign_files_are_left_alone(backbone, items, done, tmp_path, lines, message):
    changed = lines(done[2].read_bytes().splitlines())
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"\n".join(changed) + (b"\n" if len(changed) > 1 else b""))
    before = path.read_bytes()
    with pytest.raises(InputError, match=message):
        answer_batch(backbone, done[1], items, out=path, rank=RANK)
    assert path.read_bytes() == before


def test_invalid_items_get_a_line_with_their_error_and_the_others_are_answered(
    backbone, items, done, tmp_path, unchecked
):
    (tmp_path / "none.png").write_bytes(b"\x89PNG, but cut short")
    (tmp_path / "note.txt").write_text("a text")
    good = items[0]
    bad = [
        {"front": [tmp_path / "missing.png"], "question": good.question},
        {"front": [tmp_path / "none.png"], "question": good.question, "id": "cut"},
        {"front": [str(tmp_path / "note.txt")], "question": good.question},
        {"front": good.front, "question": 3},
        {"front": good.front, "question": good.question, "steps": 1.0},
        {"front": good.front, "question": good.question, "colour": "red"},
        {"front": "page.png", "question": good.question},
        {"front": good.front, "question": "a word that no vocabulary has"},
        {"front": good.front, "question": "\ud800"},
        {"front": [""], "question": good.question},
        7,
    ]
    given = [good, *bad[:5], items[1], *bad[5:]]
    shelf, out = done[1], tmp_path / "answers.jsonl"
    report = answer_batch(backbone, shelf, given, out=out, rank=RANK, batch=2)
    assert (report.answered, report.failed) == (2, len(bad))
    lines = read_answers(out)
    errors = [line["error"] for line in lines if "error" in line]
    assert errors == [*["ImageError"] * 2, "AmbiguousTextError", *["InputError"] * 8]
    assert lines[2]["id"] == "cut"
    assert "looks like a file's name" in lines[3]["message"]
    assert lines[0]["ids"] == read_answers(done[2])[0]["ids"]

    # They stay failed, until they are asked for again.
    assert answer_batch(backbone, shelf, given, out=out, rank=RANK, batch=2).before == len(given)
    again = answer_batch(backbone, shelf, given, out=out, rank=RANK, batch=2, retry=True)
    assert (again.before, again.failed) == (2, len(bad))
    assert read_answers(out) == lines


@pytest.mark.slow
def test_free_orders_share_what_they_can(backbone, items, tmp_path):
    page, first, second = items[0].front[1], *items[1].front[::-1]
    fronts = [[first, second, page], [page, first], [second, page, first], [page]]
    forwards = []
    for order_free in (True, False):
        asked = [BatchItem(front, [5], order_free=order_free, steps=1) for front in fronts]
        report = answer_batch(backbone, None, asked, out=tmp_path / f"{order_free}.jsonl", rank=RANK, batch=4)
        forwards.append((report.canonicals, report.conditioned))
    # Free: page, page first, page first second.
    assert forwards == [(3, 2), (3, 5)]
    with pytest.raises(InputError, match="answers of digest"):
        answer_batch(backbone, None, asked, out=tmp_path / "True.jsonl", rank=RANK)


def test_a_full_store_changes_no_answer(backbone, items, done, tmp_path):
    shelf = MemoryPatchStore()
    shelf.full = True
    report = answer_batch(backbone, shelf, items[:1], out=tmp_path / "a.jsonl", rank=RANK, batch=2)
    assert (report.unstored, report.answered, report.failed) == (3, 1, 0)
    assert read_answers(tmp_path / "a.jsonl")[0]["ids"] == read_answers(done[2])[0]["ids"]


def test_a_stored_chunk_of_other_content_is_not_served(backbone, items, done, tmp_path):
    shelf, real = MemoryPatchStore(), done[1]
    ids = list(real.chunks)
    shelf.chunks = {id: real.chunks[ids[place - 1]] for place, id in enumerate(ids)}
    report = answer_batch(backbone, shelf, items[:1], out=tmp_path / "a.jsonl", rank=RANK, batch=2)
    assert (report.found_canonicals, report.canonicals) == (0, 2)
    assert read_answers(tmp_path / "a.jsonl")[0]["ids"] == read_answers(done[2])[0]["ids"]


def test_options_override_those_of_the_config(backbone, items, done, tmp_path):
    config = BatchConfig(rank=1, batch=2)
    report = answer_batch(backbone, done[1], items, out=tmp_path / "a.jsonl", config=config, rank=RANK)
    assert (report.found_patches, report.patches) == (4, 0)
    assert read_answers(tmp_path / "a.jsonl") == read_answers(done[2])
    with pytest.raises(TypeError, match="colour"):
        answer_batch(backbone, None, items, out=tmp_path / "b.jsonl", colour="red")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"rank": 2}}, "expected a BatchConfig"),
        ({"shard": (1, 1)}, "shard"),
        ({"batch": 0}, "batch 0"),
        ({"items": []}, "no items"),
        ({"items": {"front": [], "question": "?"}}, "expected a sequence"),
        ({"out": "/dev/null/answers.jsonl"}, "cannot be written"),
    ],
)
def test_invalid_calls_are_refused(backbone, items, tmp_path, unchecked, options, message):
    call: dict[str, Any] = {"items": items, "out": tmp_path / "a.jsonl"} | options
    with pytest.raises(InputError, match=message):
        answer_batch(backbone, None, call.pop("items"), **call)
    with pytest.raises(ConfigError, match="expected a mesh with an axis 'data'"):
        answer_batch(backbone, None, items, out=tmp_path / "b.jsonl", mesh=object())


def test_two_runs_do_not_write_one_file(backbone, items, tmp_path):
    path = tmp_path / "a.jsonl"
    program = (
        f"import fcntl,sys; f=open({str(path)!r},'ab'); fcntl.flock(f,2); print('held',flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another run is writing"):
            answer_batch(backbone, None, items[:1], out=path)
        other.communicate("")


def test_a_real_store_and_another_process_in_between(backbone, items, done, tmp_path):
    with ChunkStore(tmp_path / "store") as store:
        answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", rank=RANK, batch=2)
    with ChunkStore(tmp_path / "store") as store:
        counting = counting_of(backbone)
        report = answer_batch(counting, store, items, out=tmp_path / "b.jsonl", rank=RANK, batch=2)
    assert (counting.forwards, report.found_patches, report.found_canonicals) == (0, 4, 3)
    for name in ("a", "b"):
        assert read_answers(tmp_path / f"{name}.jsonl") == read_answers(done[2])


MESH_PROGRAM = """
import json, sys
import jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh
sys.path[:0] = ["tests/kvpatch_jax/batch", "tests/kvpatch_jax"]
import test_answer_batch as own
from kvpatch_jax.batch import answer_batch, read_answers
from models import load

out, directory = Path(sys.argv[1]), "evals/trained/documents/qwen2_5_vl"
items = [item for item in own.task_items() if item.front] * 2
devices = np.array(jax.devices())
assert len(devices) == 8
alone = load(directory, dtype="float32")
over, repeated = (Mesh(devices.reshape(rows, -1), ("data", "tensor")) for rows in (4, 2))
load_over = lambda mesh: load(directory, dtype="float32", mesh=mesh)
runs = {
    "alone": (alone, None),
    "data": (alone, Mesh(devices, ("data",))),
    "explicit": (alone, jax.make_mesh((8,), ("data",))),
    "both": (load_over(over), over),
    "repeated": (load_over(repeated), repeated),  # two KV heads over four devices
}
found = {}
for name, (backbone, mesh) in runs.items():
    report = answer_batch(backbone, None, items, out=out / f"{name}.jsonl", rank=8, mesh=mesh, batch=8)
    lines = read_answers(report.path)
    found[name] = {"ids": [line.get("ids", line) for line in lines], "canonicals": report.canonicals,
                   "conditioned": report.conditioned, "questions": report.questions}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_rows_over_eight_devices_give_the_same_answers(tmp_path):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    program = [sys.executable, "-c", MESH_PROGRAM, str(tmp_path)]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for name in ("data", "explicit", "both", "repeated"):
        assert found[name] == found["alone"], name


@pytest.fixture
def heard():
    """Ctrl-C reaches Python, whatever the tests were started by: a shell's background job is born deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("place", ["prefill 1", "prefill 4", "generate 0", "generate 2", "add 1"])
def test_after_an_interrupt_anywhere_the_same_call_continues(backbone, items, done, tmp_path, monkeypatch, place):
    """Ctrl-C while chunks are formed, while a question is answered, and while its line is being written."""
    what, at = place.split()
    calls = dict.fromkeys(("prefill", "generate", "add"), 0)

    def interrupted(name: str, call: Any) -> Any:
        def calling(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            found = call(*args, **options)
            if (name, calls[name] - 1) == (what, int(at)):
                signal.raise_signal(signal.SIGINT)
            return found

        return calling

    stopping = copy.copy(backbone)
    for name in ("prefill", "generate"):
        setattr(stopping, name, interrupted(name, getattr(backbone, name)))
    with ChunkStore(tmp_path / "store") as store:
        with monkeypatch.context() as patched:
            patched.setattr(AnswerFile, "add", interrupted("add", AnswerFile.add))
            with pytest.raises(KeyboardInterrupt):
                answer_batch(stopping, store, items, out=tmp_path / "a.jsonl", rank=RANK, batch=2)
        written = max(0, len((tmp_path / "a.jsonl").read_bytes().split(b"\n")) - 2)
        report = answer_batch(backbone, store, items, out=tmp_path / "a.jsonl", rank=RANK, batch=2)
    assert (report.before, report.answered) == (written, len(items) - written)
    assert read_answers(tmp_path / "a.jsonl") == read_answers(done[2])
