"""What would be served wrong without a word: heads that are not tied, masks to add, ids and weights that are none."""

import json

import jax
import numpy as np
import pytest

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.models import load, save
from tests.goldens.load import golden_arrays, write_checkpoint


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load(write_checkpoint("llama2", tmp_path_factory.mktemp("text") / "llama2"))


# ---------------------------------------------------------------------------------------------------------- heads


def test_a_head_of_its_own_counts_though_the_configuration_ties(tmp_path):
    """As transformers does: what the file holds is not dropped, and it is saved as untied."""
    directory = write_checkpoint("llama2", tmp_path / "a", tie_word_embeddings=True)
    gold = golden_arrays("llama2", "text")
    backbone = load(directory)
    assert not backbone.config.text.tied_embeddings
    with jax.default_matmul_precision("highest"):
        logits = backbone.prefill(backbone.embed(gold["input_ids"][None]), logits="all").logits[0, gold["rows"]]
    assert np.abs(logits - gold["logits"]).max() <= 2e-4 * np.abs(gold["logits"]).max()
    saved = save(backbone, tmp_path / "b")
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(
        load(saved).parameters["decoder"]["head"]["kernel"], backbone.parameters["decoder"]["head"]["kernel"]
    )


def test_a_head_of_its_own_counts_in_a_family_with_images(tmp_path):
    directory = write_checkpoint("llava", tmp_path / "llava")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    backbone = load(directory)
    assert not backbone.config.text.tied_embeddings
    assert backbone.config.to_dict()["tie_word_embeddings"] is False


# -------------------------------------------------------------------------------------------------- masks and ids


def test_a_mask_that_is_added_to_scores_is_refused(backbone, unchecked):
    ids = np.arange(3, 9)[None]
    tokens = backbone.embed(ids)
    own = np.tril(np.ones((6, 6), bool))[None, None]
    out = backbone.prefill(tokens, mask=own)
    cache = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    last = Tokens(tokens.embeddings[:, -1:], tokens.positions[:, -1:])
    for mask in (np.where(own, 0.0, -np.inf).astype(np.float32), own.astype(np.int32)):
        for call in (
            lambda mask=mask: backbone.prefill(tokens, mask=mask),
            lambda mask=mask: backbone.generate(tokens, 2, mask=mask),
            lambda mask=mask: backbone.recompute(tokens, cache, np.arange(6)[None], mask=mask),
            lambda mask=mask: backbone.decode(last, cache, np.array([[5]]), mask[..., -1:, :]),
        ):
            with pytest.raises(ShapeError, match=f"mask: got {mask.dtype}; expected an array of bool"):
                call()
        with pytest.raises(ShapeError, match=f"keep: got {mask.dtype}; expected an array of bool"):
            backbone.recompute(tokens, cache, np.arange(6)[None], np.ones((2, 1, 6), mask.dtype))


@pytest.mark.parametrize("wrong", [-1, 300, 2**31])
def test_ids_outside_the_vocabulary_are_refused(backbone, wrong, unchecked):
    with pytest.raises(InputError, match=f"token ids: got {wrong}; expected 0 … 299"):
        backbone.embed(np.array([[1, 2, wrong]], np.int64))


# --------------------------------------------------------------------------------------------------------- weights


# -------------------------------------------------------------------------------------- Qwen2.5-VL reads what others do
