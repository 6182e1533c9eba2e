"""Directories that are saved or shipped are what they claim: transformers reads them, without torch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast

from kvpatch_jax import models
from tests.goldens.load import GOLDENS, write_checkpoint

SHIPPED = sorted(path.parent for path in (Path(__file__).parents[2] / "evals" / "trained").glob("*/*/config.json"))
TEXT = "Where is the total of 12.5? It's\n\n here: q7 <|im_start|>"
NO_CLASS = {"deepseek_vl2", "deepseek_vl2_tiny", "phi3_v"}
"""Families whose configuration transformers has no class for; so has Kimi-VL's released form."""
NO_PROCESSOR = {"kimi_vl"}
"""Its image processor needs torchvision."""
FAMILIES = [*sorted({path.parent.name for path in GOLDENS.glob("*/preprocessor_config.json")} - NO_CLASS), "qwen2"]


def described(config: Any) -> dict[str, Any]:
    """A configuration as a table, without who wrote it, its precision and what its tensors show."""
    drop = ("dtype", "transformers_version", "_name_or_path", "tie_word_embeddings")
    strip = lambda value: (
        {key: strip(part) for key, part in value.items() if key not in drop} if isinstance(value, dict) else value
    )
    return strip(config.to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_in_a_saved_directory_what_was_in_the_first(family, tmp_path):
    first = write_checkpoint(family, tmp_path / "first")
    saved = models.save(models.load(first), tmp_path / "saved")
    one, other = AutoConfig.from_pretrained(first), AutoConfig.from_pretrained(saved)
    assert type(one) is type(other)
    assert described(one) == described(other)
    if family not in NO_PROCESSOR and (first / "preprocessor_config.json").exists():
        one, other = AutoImageProcessor.from_pretrained(first), AutoImageProcessor.from_pretrained(saved)
        assert type(one) is type(other)
        image = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
        found, expected = (read(image, return_tensors="np")["pixel_values"] for read in (other, one))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_transformers_reads_what_is_shipped_and_what_is_saved_of_it(directory, tmp_path):
    saved = models.save(models.load(directory), tmp_path / "saved")
    expected = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    for root in (directory, saved):
        if directory.name != "kimi_vl":
            assert AutoConfig.from_pretrained(root).model_type in directory.name
            assert AutoImageProcessor.from_pretrained(root).patch_size > 0
        # transformers takes its own tokenizer's rules for Qwen3.5, whatever the files say.
        reader = PreTrainedTokenizerFast if directory.name == "qwen3_5" else AutoTokenizer
        assert reader.from_pretrained(root)(TEXT)["input_ids"] == expected


def test_without_a_class_a_tokenizer_would_be_read_by_other_rules(tmp_path):
    """Why `save` writes one."""
    directory = shutil.copytree(SHIPPED[1], tmp_path / "bare")
    (directory / "tokenizer_config.json").unlink()
    expected = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    assert AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"] != expected
