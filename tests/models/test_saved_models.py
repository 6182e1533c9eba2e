"""transformers reads in a saved or shipped directory what was in the first: configuration, processor, tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax import models
from kvpatch_jax.models.inputs.processors import process_images
from tests.goldens.load import GOLDENS, write_checkpoint

SHIPPED = sorted(path.parent for path in (Path(__file__).parents[2] / "evals" / "trained").glob("*/*/config.json"))
TEXT = "Where is the total of 12.5? It's\n\n here: q7 <|im_start|>"
NO_CLASS = {"deepseek_vl2", "deepseek_vl2_tiny", "phi3_v"}
"""Families whose configuration transformers has no class for; so has Kimi-VL's released form."""
DEFAULT = ("qwen2_5_vl", "llava", "qwen2")
OTHERS = {path.parent.name for path in GOLDENS.glob("*/preprocessor_config.json")} - {*NO_CLASS, *DEFAULT}
MORE = [pytest.param(name, marks=pytest.mark.nightly) for name in sorted(OTHERS)]


def described(config: Any) -> dict[str, Any]:
    """A configuration as a table, without who wrote it, its precision and what its tensors show."""
    drop = ("dtype", "transformers_version", "_name_or_path", "tie_word_embeddings")
    strip = lambda value: (
        {key: strip(part) for key, part in value.items() if key not in drop} if isinstance(value, dict) else value
    )
    return strip(config.to_dict())


@pytest.mark.parametrize("family", [*DEFAULT, *MORE])
def test_transformers_reads_in_a_saved_directory_what_was_in_the_first(family, tmp_path):
    from transformers import AutoConfig, AutoImageProcessor

    first = write_checkpoint(family, tmp_path / "first")
    backbone = models.load(first)
    saved = models.save(backbone, tmp_path / "saved")
    again = models.load(saved)
    assert again.image_config == backbone.image_config
    before, after = AutoConfig.from_pretrained(first), AutoConfig.from_pretrained(saved)
    assert type(before) is type(after)
    assert described(before) == described(after)
    if family not in ("kimi_vl", "qwen2"):  # Kimi's image processor needs torchvision; Qwen2 has none
        before, after = (AutoImageProcessor.from_pretrained(root, backend="pil") for root in (first, saved))
        assert type(before) is type(after)
        image = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
        expected = before(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(after(image, return_tensors="np")["pixel_values"], expected)
        np.testing.assert_array_equal(process_images([image], again.image_config)["pixel_values"], expected)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_transformers_reads_what_is_shipped_and_what_is_saved_of_it(directory, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast

    saved = models.save(models.load(directory), tmp_path / "saved")
    expected = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    for root in (directory, saved):
        if directory.name != "kimi_vl":
            assert AutoConfig.from_pretrained(root).model_type in directory.name
            assert AutoImageProcessor.from_pretrained(root).patch_size > 0
        # transformers takes its own tokenizer's rules for Qwen3.5, whatever the files say.
        reader = PreTrainedTokenizerFast if directory.name == "qwen3_5" else AutoTokenizer
        assert reader.from_pretrained(root)(TEXT)["input_ids"] == expected
