"""A model family written in a user's own file, as the guide shows, loads, equals transformers and saves."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from tests.goldens.load import GOLDENS, golden_arrays, golden_prompt, write_checkpoint

HOW_TO = Path(__file__).parents[2] / "docs" / "guides" / "extending.md"
RENAMED = {
    "language_model.model.": "llm.",
    "language_model.lm_head.": "llm.out.",
    "vision_tower.": "eyes.",
    "multi_modal_projector.": "bridge.",
}


@pytest.fixture
def toy(tmp_path):
    """The document's family, imported from a file, which registers itself."""
    (source,) = re.findall(r"^```py\n(.*?)^```$", HOW_TO.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "toy_ocr.py").write_text(source)
    before = dict(models.FAMILIES)
    spec = importlib.util.spec_from_file_location("toy_ocr", tmp_path / "toy_ocr.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    yield module
    models.FAMILIES.clear()
    models.FAMILIES.update(before)


@pytest.fixture
def directory(tmp_path):
    """The tiny Mistral Small 3.1 of the goldens under the toy's names."""
    theirs, ours = write_checkpoint("mistral3", tmp_path / "theirs"), tmp_path / "toy"
    ours.mkdir()
    raw = json.loads((theirs / "config.json").read_text())
    config = {name: raw[name] for name in ("text_config", "vision_config", "spatial_merge_size")}
    config |= {"image_token_id": raw["image_token_index"], "architectures": ["ToyOcrForConditionalGeneration"]}
    (ours / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDENS / "mistral3" / "preprocessor_config.json", ours)
    tensors = load_file(theirs / "model.safetensors")
    names = {name: next(old for old in RENAMED if name.startswith(old)) for name in tensors}
    renamed = {RENAMED[old] + name.removeprefix(old): tensors[name] for name, old in names.items()}
    save_file(renamed, ours / "model.safetensors")
    return ours


@pytest.mark.usefixtures("highest_precision")
def test_it_equals_transformers_and_is_saved_and_read_again(toy, directory, tmp_path):
    backbone, gold = models.load(directory, angles="float32"), golden_arrays("mistral3", "two_images")
    assert backbone.family is toy.FAMILY
    inputs = golden_prompt(backbone, "mistral3", "two_images")
    tokens = backbone.embed(inputs.pop("input_ids"), **inputs)
    logits = np.asarray(backbone.prefill(tokens, logits="all").logits)[0, gold["rows"]]
    assert np.abs(logits - gold["logits"]).max() <= 2e-5 * np.abs(gold["logits"]).max()

    again = models.load(models.save(backbone, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
    assert again.config.to_dict()["model_type"] == "toy_ocr"
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert set(saved) == set(load_file(directory / "model.safetensors"))
