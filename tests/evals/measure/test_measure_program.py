"""A measurement as users run it: the same files whatever kills and shards there were, and what is refused in a line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evals.harness.parts import Shard, run_parts
from evals.measure import job, report
from kvpatch_jax.errors import InputError

ROOT = Path(__file__).parents[3]
FILES = ("answers.jsonl", "results.json", "rows.csv", "report.html")
ARMS = ("patch.rank=8", "cacheblend.budget=0.15")


def request(model, data, **changes):
    return job.Request(**{"model": str(model), "data": str(data), "methods": ARMS, "answer_tokens": 3, **changes})


@pytest.mark.nightly
@pytest.mark.usefixtures("highest_precision")
def test_one_and_two_shards_and_a_resumed_run_leave_the_same_files(checkpoint, data, tmp_path):
    """Also after a part's line was cut off in the middle; and a broken image is a line, the rest goes on."""
    broken = tmp_path / "data"
    broken.mkdir()
    for file in data.parent.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    image = broken / "3_1.png"
    image.write_bytes(image.read_bytes()[:60])

    planned = job.plan(request(checkpoint("qwen2_5_vl"), broken / data.name))
    for out, shards in (("one", [(0, 1)]), ("two", [(1, 2), (0, 2)]), ("cut", [(0, 1)])):
        (tmp_path / out).mkdir()
        if out == "cut":
            content = (tmp_path / "one" / "parts.jsonl").read_bytes()
            (tmp_path / out / "parts.jsonl").write_bytes(content[: len(content) // 2])
        records = {}
        for shard in shards:
            records = run_parts(tmp_path / out, planned.config, planned.parts, Shard(*shard))
        assert len(records) == len(planned.parts)
        items = [record for part in planned.parts for record in records[part.key]]
        report.write(tmp_path / out, items, planned.config, planned.data.refusals, "command")
    for name in FILES:
        assert len({(tmp_path / out / name).read_bytes() for out in ("one", "two", "cut")}) == 1, name

    answers = [json.loads(line) for line in (tmp_path / "one" / "answers.jsonl").read_text().splitlines()]
    assert [answer["item"] for answer in answers] == [f"q{number}" for number in (0, 6, 1, 7, 2, 8, 4, 5)]
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    places = [line.partition(": ")[0] for line in results["config"]["left_out"]]
    assert places == ["questions.jsonl:4", "questions.jsonl:10"]
    assert {row["n"] for row in results["rows"] if row["metric"] == "kl.all"} == {8}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--model=nowhere", "--data={data}"], "error: backbone: got 'nowhere'; expected a checkpoint directory"),
        (["--model={model}", "--data=nowhere"], "error: --data: got "),
        (["--model={model}", "--data={data}", "--methods=nope.rank=1"], "error: method: got 'nope.rank=1'; expected "),
        (["--model={model}"], "error: --model, --data: got "),
    ],
)
def test_a_wrong_command_ends_with_one_line_and_writes_nothing(checkpoint, data, tmp_path, flags, line):
    flags = [flag.format(data=data, model=checkpoint("qwen2_5_vl")) for flag in flags]
    command = [sys.executable, "-m", "evals.measure", f"--out={tmp_path / 'out'}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(line)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.nightly
def test_data_and_models_that_do_not_fit_are_refused(checkpoint, data, tmp_path):
    (tmp_path / "bare").mkdir()
    for file in checkpoint("qwen2_5_vl").iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match="without a tokenizer"):
        job.plan(request(tmp_path / "bare", data))
    (tmp_path / "words.jsonl").write_text(json.dumps({"texts": ["⛵"], "question": "Q?", "answer": "x"}))
    planned = job.plan(request("documents/qwen2_5_vl", tmp_path / "words.jsonl", frame="plain"))
    (record,) = planned.parts[0].measure()
    assert record["where"] == "words.jsonl:1"
    assert "⛵" in record["refused"]


@pytest.mark.nightly
def test_an_item_that_the_model_is_too_short_for_is_left_out(checkpoint, data):
    planned = job.plan(request(checkpoint("qwen2_5_vl"), data, max_tokens=70, arms=["blind"], limit=1))
    assert ["expected at most 70" in record["refused"] for record in planned.parts[0].measure()] == [True]
