"""Prefill chunk by chunk, and logits only where they are asked for."""

import re

import jax
import numpy as np
import pytest

from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from tests.goldens.load_text import text_arrays, write_text_checkpoint

OWN = 1e-5


pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Layers that slide and one that does not, three in all."""
    return load(write_text_checkpoint("windows/qwen3", tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def tokens(backbone):
    return backbone.embed(text_arrays("windows/qwen3")["input_ids"][None])


def close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=OWN * np.abs(other).max(), rtol=0)


@pytest.mark.slow
def test_chunks_give_what_the_whole_gives(backbone, tokens):
    """14 tokens, 4 at a time: the last chunk begins inside the one before; logits of some tokens, in any order."""
    whole = backbone.prefill(tokens, hidden_at=(1,), logits="all")
    rows = np.array([[13, 0, 9, 9, 4]])
    found = backbone.prefill(tokens, hidden_at=(1,), logits=rows, chunk=4)
    close(found, whole._replace(logits=whole.logits[:, rows[0]]))
    assert backbone.prefill(tokens, hidden_at=(1,), logits="all", chunk=14).logits.shape == whole.logits.shape


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "llama3_1", "windows/qwen2"])
def test_chunks_behind_a_context(family, tmp_path):
    """Every kind of attention; under a mask too, from a layer in the middle, for several rows."""
    backbone = load(write_text_checkpoint(family, tmp_path))
    ids = np.stack([text_arrays(family)["input_ids"]] * 2)
    ids[1] = ids[1, ::-1]
    tokens, cut = backbone.embed(ids), 5
    before = backbone.prefill(tokens.take(0, cut))
    context = to_engine(backbone.layout, before.kv, tokens.positions[:, :cut], 0)
    rest = tokens.take(cut, 14)
    mask = np.tri(9, 14, cut, dtype=bool)[None, None] & (np.random.default_rng(0).random((2, 1, 9, 14)) < 0.6)
    mask[..., np.arange(9), cut + np.arange(9)] = True
    for given in (None, mask):
        whole = backbone.prefill(rest, context, given, logits="all")
        for chunk in (1, 4):
            close(backbone.prefill(rest, context, given, logits="all", chunk=chunk), whole)
    entering = backbone.prefill(rest, context, hidden_at=(1,), chunk=4).hidden[1]
    upper = backbone.prefill(rest._replace(embeddings=entering), context, start_layer=1, logits="all")
    close(backbone.prefill(rest._replace(embeddings=entering), context, start_layer=1, logits="all", chunk=4), upper)


def test_what_cannot_be_asked_for(unchecked, backbone, tokens):
    for logits, message in {
        "first": "prefill: got logits 'first'; expected 'last', 'all' or indices [B, n]",
        (3,): "prefill: got logits of shape (1,); expected 'last', 'all' or indices [1, n]",
        ((14,),): "prefill: got logits of tokens ((14,),); expected indices from 0 to 13",
    }.items():
        given = logits if isinstance(logits, str) else np.array(logits)
        with pytest.raises(InputError, match=re.escape(message.replace("((14,),)", "[[14]]"))):
            backbone.prefill(tokens, logits=given)
    with pytest.raises(InputError, match="chunk: got 0; expected a number of tokens, at least 1"):
        backbone.prefill(tokens, chunk=0)
    ahead = np.tri(14, dtype=bool)[None, None]
    ahead[..., 2, 9] = True
    with pytest.raises(InputError, match="token 2 sees token 9, which is in a later chunk of 4"):
        backbone.prefill(tokens, mask=ahead, chunk=4)
