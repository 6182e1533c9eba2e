"""A measurement as users run it: the same files whatever kills and shards there were, and what is refused in a line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evals.harness.parts import ExpectedPace
from evals.measure import formats
from evals.measure.arms import chosen_arms
from evals.measure.frame import frame_of, speakable
from evals.measure.plan import WorkShard, contexts_of, estimate
from evals.measure.report import write_results
from evals.measure.shards import run_shard
from evals.measure.suite import MeasureSetup, dataset, records_of
from kvpatch_jax.errors import InputError
from models import Buckets, load

ROOT = Path(__file__).parents[3]
WRITTEN = ("answers.jsonl", "results.json", "table.md", "report.html", "figures/pareto.png")


def program(checkpoint, data, out, *flags):
    """The command line, with few arms and short answers."""
    arms = "--arms=patch.rank=8,first_k.*,quantised.*,prefix_cache"
    command = [sys.executable, "-m", "evals.measure", f"--model={checkpoint}", f"--data={data}", f"--out={out}"]
    return [*command, arms, "--answer_tokens=4", *flags]


def ran(*command_line):
    done = subprocess.run(program(*command_line), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def planned(backbone, data, patterns=("patch.rank=8", "prefix_cache"), most=None):
    """A measurement and its parts, in this process."""
    frame, read = frame_of(backbone, "chat", "again"), formats.read(data)
    arms, _ = chosen_arms(patterns, backbone.layout)
    measurement = MeasureSetup(backbone, frame, arms, most, 3)
    asked, refused = speakable(backbone, frame, read)
    assert not refused
    contexts = contexts_of(asked)
    expected = estimate(backbone, frame, contexts, arms, 3)
    return measurement, contexts, dataset(measurement, read, contexts, expected, {"model": "tiny"})


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_one_and_two_shards_and_a_resumed_run_leave_the_same_files(loaded, data, tmp_path):
    """Also after a part's line was cut off in the middle; and a broken image is one record, the rest goes on."""
    broken = tmp_path / "data"
    broken.mkdir()
    for file in data.parent.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    image = broken / "3_1.png"
    image.write_bytes(image.read_bytes()[:60])

    measurement, contexts, described = planned(loaded("qwen2_5_vl"), broken / data.name)
    pace = ExpectedPace(1000.0, 10.0)
    for out, shards in (("one", [WorkShard()]), ("two", [WorkShard(1, 2), WorkShard(0, 2)]), ("cut", [WorkShard()])):
        (tmp_path / out).mkdir()
        if out == "cut":
            lines = (tmp_path / "one" / "parts.jsonl").read_bytes()
            (tmp_path / out / "parts.jsonl").write_bytes(lines[: len(lines) // 2])
        for shard in shards:
            parts = run_shard(described, tmp_path / out, shard, pace)
        assert len(parts) == len(contexts)
        write_results(described, parts, tmp_path / out, [], [])

    for name in WRITTEN:
        written = {(tmp_path / out / name).read_bytes() for out in ("one", "two", "cut")}
        assert len(written) == 1, name

    lines = [json.loads(line) for line in (tmp_path / "one" / "answers.jsonl").read_text().splitlines()]
    refused = [line for line in lines if "refused" in line]
    assert {line["item"] for line in refused} == {"q3", "q9"}
    assert all("3_1.png" in line["refused"] or "image" in line["refused"] for line in refused)
    # Eight items are left, of four arms each.
    assert len(lines) - len(refused) == 8 * len(measurement.arms) == 32
    exact = [line for line in lines if line.get("arm") in ("re-prefill", "prefix_cache")]
    assert all(line["agrees"] and line["kl"] == 0 for line in exact)
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    assert [own["where"] for own in results["left_out"]] == ["questions.jsonl:4", "questions.jsonl:10"]
    assert "load" not in results["environment"]


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_an_item_that_the_model_is_too_short_for_is_left_out(loaded, data, capsys):
    """A context that fits is asked; one whose question and answer do not fit any more is not."""
    measurement, contexts, _ = planned(loaded("qwen2_5_vl"), data)
    tokens = next(records_of(measurement, contexts[0]))["tokens"]
    short = MeasureSetup(measurement.backbone, measurement.frame, measurement.arms, tokens, 3)
    records = list(records_of(short, contexts[0]))
    assert all(f"expected at most {tokens}, which the model serves" in record["refused"] for record in records)
    assert capsys.readouterr().out.count("left out: questions.jsonl:1: ") == 1


@pytest.mark.slow
def test_a_model_that_cannot_be_asked_is_refused_with_what_can_be_run(loaded, checkpoint, data, tmp_path):
    (tmp_path / "bare").mkdir()
    for file in checkpoint("qwen2_5_vl").iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"without a tokenizer.*python -m evals\.certify --model=DIRECTORY"):
        frame_of(load(tmp_path / "bare"), "chat", "again")

    backbone = load(checkpoint("qwen2_5_vl"), buckets=Buckets())
    backbone.chat_template = None
    with pytest.raises(InputError, match=r"chat template.*the-command --frame=plain"):
        frame_of(backbone, "chat", "the-command")
    assert frame_of(backbone, "plain", "the-command").front == ()


def test_words_that_a_vocabulary_lacks_are_refused(loaded, data):
    """A small model that was trained on a task's own words has no others."""
    from evals.trained import SHEETS

    backbone = load(SHEETS / "qwen2_5_vl", buckets=Buckets())
    frame = frame_of(backbone, "plain", "again")
    with pytest.raises(InputError, match=r"10 for want of words; .*expected a model whose vocabulary has the words"):
        speakable(backbone, frame, formats.read(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_vl", "gemma3", "glm4v", "internvl", "kimi_vl", "llava", "llava_next", "mistral3", "qwen2_5_omni"),
        *("qwen3_vl", "smolvlm"),
    ],
)
def test_every_family_gives_a_report_of_ten_items(checkpoint, data, tmp_path, family):
    flags = ["--frame=plain"] if family == "gemma3" else []
    code, _, error = ran(checkpoint(family), data, tmp_path / "out", *flags)
    assert code == 0, error
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    counts = {row["n"] for row in results["rows"] if row["metric"] == "kl.all"}
    assert counts == {10}
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
