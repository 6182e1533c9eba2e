"""Tokens of prompts: texts between images with DeepStack features, and the work of two-step reuse."""

import jax.numpy as jnp
import numpy as np
import pytest
from splices import make_prompt, tiny_backbone

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.repair import RepairBudget, blind, joined_tokens, mpic, two_step_reuse


def tokens(first: int, count: int, deepstack: bool) -> Tokens:
    embeddings = jnp.arange(first, first + 2 * count, dtype=jnp.float32).reshape(1, count, 2)
    features = jnp.ones((1, count, 3, 2), jnp.float32) if deepstack else None
    return Tokens(embeddings, np.arange(first, first + count)[None], features)


def test_texts_among_images_with_deepstack_features_have_zeros():
    joined = joined_tokens(tokens(0, 2, False), tokens(10, 3, True), tokens(20, 1, False))
    assert joined.deepstack is not None
    np.testing.assert_array_equal(np.asarray(joined.deepstack)[0, :, 0, 0], [0, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(np.asarray(joined.positions)[0], [0, 1, 10, 11, 12, 20])
    np.testing.assert_array_equal(np.asarray(joined.embeddings)[0, :, 0], [0, 2, 10, 12, 14, 20])
    assert joined_tokens(tokens(0, 2, False), tokens(5, 1, False)).deepstack is None


@pytest.mark.slow
def test_two_step_reuse_computes_logits_once():
    """It costs what one step does, and one token more through the layers, but not its logits."""
    backbone = tiny_backbone()
    splice = make_prompt(backbone)[0]
    one_step = blind(backbone, splice).flops
    token = (mpic(backbone, splice, RepairBudget(tokens=1)).flops - one_step) / len(splice.parts)
    assert two_step_reuse(backbone, splice).flops - one_step == token
