"""Released checkpoints: their numbers of parameters, and the how-to for a new family followed."""

import json
import re
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.errors import WeightsError
from kvpatch_jax.models.families.family import abstract, parameters
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.models.released_configs import RELEASED

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs" / "guides" / "adding-a-family.md").read_text(encoding="utf-8")


PUBLISHED = {name: released for name, released in RELEASED.items() if released.published is not None}
FIRST = {released.config["architectures"][0]: name for name, released in reversed(PUBLISHED.items())}.values()
"""The first of every architecture."""


@pytest.mark.parametrize("name", FIRST)
def test_a_release_has_the_published_number_of_parameters(name):
    raw, published = RELEASED[name]
    config = models.FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters(abstract(config))))
    assert count / 1e9 == pytest.approx(published, rel=0.01)


# ------------------------------------------------------------------------------------------------- adding a family

RENAMED = {
    "model.language_model.": "llm.",
    "lm_head.": "llm.out.",
    "model.vision_model.": "tower.",
    "model.aligner.linear1.": "bridge.0.",
    "model.aligner.linear2.": "bridge.2.",
}


@pytest.fixture
def toy(monkeypatch):
    """The family of the document's how-to, made by running its text as a module of `models`, and registered."""
    blocks = re.findall(r"^```py\n(.*?)^```$", HOW_TO, re.MULTILINE | re.DOTALL)
    (source,) = [block for block in blocks if block.startswith('"""Toy-VL')]
    module = types.ModuleType("kvpatch_jax.models.families.toy_vl")
    module.__package__ = "kvpatch_jax.models.families"
    exec(compile(source, "docs/guides/adding-a-family.md", "exec"), module.__dict__)
    monkeypatch.setitem(models.FAMILIES, module.FAMILY.architecture, module.FAMILY)
    return module


@pytest.fixture
def toy_checkpoint(tmp_path):
    """The tiny DeepSeek-VL of the goldens (SigLIP, two linear maps, Llama) under the toy's names."""
    theirs = write_checkpoint("deepseek_vl", tmp_path / "theirs")
    raw = json.loads((theirs / "config.json").read_text())
    config = {"llm": raw["text_config"], "tower": raw["vision_config"], "image_pad": raw["image_token_id"]}
    ours = tmp_path / "toy"
    ours.mkdir()
    (ours / "config.json").write_text(json.dumps(config | {"architectures": ["ToyVLForConditionalGeneration"]}))
    shutil.copy(GOLDENS / "llava" / "preprocessor_config.json", ours)  # a shortest edge and a crop, as the toy has
    save_file({toy_name(name): value for name, value in load_file(theirs / "model.safetensors").items()}, weights(ours))
    return ours


def weights(directory: Path) -> Path:
    return directory / "model.safetensors"


def toy_name(name: str) -> str:
    (old,) = [prefix for prefix in RENAMED if name.startswith(prefix)]
    return RENAMED[old] + name.removeprefix(old)


def test_the_documented_family_equals_transformers(toy, toy_checkpoint):
    backbone, gold = models.load(toy_checkpoint), golden_arrays("deepseek_vl", "one_image")
    assert backbone.family is toy.FAMILY
    with jax.default_matmul_precision("highest"):
        tokens = backbone.embed(gold["input_ids"][None], pixel_values=gold["pixel_values"])
        logits = np.asarray(backbone.prefill(tokens, logits="all").logits)[0, gold["rows"]]
    assert np.abs(logits - gold["logits"]).max() <= 2e-4 * np.abs(gold["logits"]).max()


def test_the_documented_family_prepares_and_saves(toy, toy_checkpoint, tmp_path):
    backbone = models.load(toy_checkpoint)
    prompt = backbone.prepare([[5, 6], np.full((20, 24, 3), 90, np.uint8), [7]])
    pads = backbone.config.tile_tokens
    assert prompt["input_ids"].tolist() == [[5, 6, *[backbone.config.image_token] * pads, 7]]
    again = models.load(models.save(backbone, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)
    assert set(load_file(weights(tmp_path / "again"))) == set(load_file(weights(toy_checkpoint)))


def test_a_tensor_that_no_entry_names_is_refused(toy, toy_checkpoint):
    tensors = load_file(weights(toy_checkpoint))
    save_file(tensors | {"bridge.1.weight": np.zeros((2, 2), np.float32)}, weights(toy_checkpoint))
    with pytest.raises(WeightsError, match=r"bridge\.1\.weight"):
        models.load(toy_checkpoint)
