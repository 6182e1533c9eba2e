"""The benchmark of backbones: its rows, its table, its errors. How fast anything is, is never tested."""

import math
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from evals.bench import backbones, checkpoints
from evals.bench.timing import interleave
from evals.bench.transformers_side import TransformersSide, WorkerError, agreement_row
from evals.bench.transformers_worker import mean_seconds
from kvpatch_jax.errors import ConfigError, InputError
from models import FAMILIES

PYTHON = os.environ.get("KVPATCH_TORCH_PYTHON")
METRICS = ["prefill", "generate", "step"]


@pytest.fixture(scope="module")
def alone():
    """A run without another interpreter."""
    return backbones.run(repeats=2, threads=1, architectures=["InternVLForConditionalGeneration"])


@pytest.mark.slow
def test_ours_alone_has_every_row(alone):
    assert [row["metric"] for row in alone["rows"]] == [*METRICS, "embed"]
    for row in alone["rows"]:
        assert row["size"] == "tiny"
        assert row["architecture"] == "InternVLForConditionalGeneration"
        assert len(row["seconds"]["ours"]) == 2
        assert all(math.isfinite(value) and value > 0 for value in (*row["seconds"]["ours"], row["first_call_seconds"]))
        assert not {"theirs", "value", "passed"} & set(row)
    assert alone["config"]["threads"] == 1
    assert "--torch-python" in alone["config"]["other_side"]
    assert set(alone["environment"]) >= {"jax", "cores"}


@pytest.mark.slow
def test_every_core_is_given_back(alone):
    before = os.sched_getaffinity(0)
    with backbones.pinned(1) as count:
        assert (count, len(os.sched_getaffinity(0))) == (1, 1)
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_table_of_ours_alone(alone):
    lines = backbones.BENCHMARK.format(alone).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].startswith("| prefill | tiny | InternVLForConditionalGeneration |")


def test_measurements_alternate_and_short_calls_are_repeated():
    seen = []
    samples = interleave({name: lambda name=name: seen.append(name) or 1.0 for name in "ab"}, 2)
    assert seen == ["a", "b", "a", "b"]
    assert samples == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    calls = iter([0.25, 0.5, 0.75, 100])
    assert mean_seconds(lambda: next(calls), least=1.5) == 0.5


def test_every_architecture_is_timed_or_said_not_to_be():
    assert set(checkpoints.TINY) | set(checkpoints.UNTIMED) == set(FAMILIES)
    for name in checkpoints.TINY:
        assert checkpoints.tiny_config(name)["architectures"] == [name]
        assert ("pixel_values" in checkpoints.tiny_pictures(name)) == (FAMILIES[name].vision is not None)
    with pytest.raises(ConfigError, match="GPT2"):
        checkpoints.tiny_config("GPT2LMHeadModel")


def test_sides_that_compute_another_function_do_not_agree():
    ours, theirs = ({"logits": np.ones((1, 2)) * scale, "tokens": np.array([1, 2])} for scale in (1.0, 1.0001))
    row = agreement_row(ours, theirs, size="tiny")
    assert (row["passed"], row["equal_tokens"]) == (True, 1.0)
    assert row["value"] == pytest.approx(1e-4, rel=1e-3)
    assert not agreement_row(ours, theirs | {"logits": np.ones((1, 2)) * 1.001})["passed"]
    assert agreement_row(ours, {"logits": np.ones((1, 3))})["value"] == math.inf


# ------------------------------------------------------------------------------------------------- the other side


def test_a_missing_interpreter_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no-python.*torch and transformers"):
        backbones.run(torch_python=str(tmp_path / "no-python"), architectures=[])


def test_an_interpreter_without_torch_is_refused():
    with pytest.raises(InputError, match=r"No module named 'torch'.*torch and transformers"):
        backbones.run(torch_python=sys.executable, architectures=[])


def test_a_program_that_is_no_interpreter_is_refused(tmp_path):
    path = script(tmp_path, "exit 3")
    with pytest.raises(InputError, match="hello: got ''"):
        TransformersSide(path, 1)


def test_an_answer_that_is_an_error_is_raised(tmp_path):
    path = script(tmp_path, """read line; echo '{"torch": "9"}'; read line; echo '{"error": "ValueError: no"}'""")
    with TransformersSide(path, 1) as side:
        assert side.versions == {"torch": "9"}
        with pytest.raises(WorkerError, match="load: ValueError: no"):
            side.ask("load")


def script(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="KVPATCH_TORCH_PYTHON names no interpreter with torch and transformers")
@pytest.mark.parametrize("name", ["Qwen3VLForConditionalGeneration", "DeepseekV3ForCausalLM"])
def test_both_sides_compute_the_same(name):
    result = backbones.run(repeats=1, threads=1, torch_python=PYTHON, architectures=[name])
    agreement, *timed = result["rows"]
    pictures = FAMILIES[name].vision is not None
    assert set(agreement["differences"]) == {"logits", "features"} if pictures else {"logits"}
    assert agreement["passed"]
    assert agreement["equal_tokens"] == 1
    assert [row["metric"] for row in timed] == METRICS + ["embed"] * pictures
    assert all(row["value"] == row["low"] == row["high"] > 0 for row in timed)
    assert set(result["config"]["other_side"]) == {"torch", "transformers", "threads"}
