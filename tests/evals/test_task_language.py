"""A model that does not read a task's words is refused before anything is measured on it, with what can be done."""

import subprocess
import sys
from pathlib import Path

import pytest

from evals import runner, small_task
from evals.datasets import PackedDataset
from evals.documents_task.dataset import DOCUMENTS_DATASET
from evals.pretrained import suite as pretrained
from evals.sheets_task.dataset import SHEETS_DATASET
from evals.task_language import check_language
from evals.trained import ROOT, SHEETS, shipped, shipped_names
from kvpatch_jax.errors import InputError
from tests.goldens.load import write_checkpoint

REPOSITORY = Path(__file__).parents[2]
WORDS = small_task.VOCABULARY.names


def test_every_shipped_instance_reads_its_task():
    for name in shipped_names():
        check_language(shipped(name), WORDS, "small", [])
    for dataset, folder in ((SHEETS_DATASET, SHEETS), (DOCUMENTS_DATASET, ROOT / "documents")):
        for path in folder.glob("*/config.json"):
            check_language(path.parent, dataset.spec.vocabulary.names, dataset.task, [])


def test_a_model_of_other_words_or_none_is_refused(tmp_path: Path):
    for path, found in (
        (SHEETS / "qwen2_5_vl", "a tokenizer with other words"),
        (write_checkpoint("qwen2_5_vl", tmp_path / "model"), "no tokenizer"),
    ):
        with pytest.raises(InputError, match=rf"{found}; expected .*small task.*kimi_vl.*evals\.certify --model"):
            check_language(path, WORDS, "small", shipped_names())


@pytest.mark.parametrize("dataset", [SHEETS_DATASET, DOCUMENTS_DATASET], ids=lambda dataset: dataset.task)
def test_the_other_tasks_refuse_it_too(dataset: PackedDataset, tmp_path: Path):
    with pytest.raises(InputError, match=rf"expected a model that was trained on the {dataset.task} task"):
        runner.run(str(shipped("qwen2_5_vl")), 0, tmp_path / "out", dataset, quick=True)
    assert not (tmp_path / "out").exists()


def test_the_suite_of_texts_refuses_a_model_that_sees_images(tmp_path: Path):
    with pytest.raises(InputError, match=r"a vision tower \(Qwen2_5_VL.*expected a text model.*evals\.certify --model"):
        pretrained.run(tmp_path / "out", str(shipped("qwen2_5_vl")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        [f"--backbone={SHEETS / 'qwen2_5_vl'}"],
        pytest.param(["--suite=pretrained", "--backbone=qwen2_5_vl"], marks=pytest.mark.slow),
        pytest.param(["--suite=pretrained", f"--checkpoint={shipped('llava')}"], marks=pytest.mark.slow),
    ],
)
def test_the_program_ends_in_one_line(flags: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "evals.run", *flags, f"--out={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
