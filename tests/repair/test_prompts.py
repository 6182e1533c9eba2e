"""Whole prompts of cached chunks and new text, on both kinds of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.backbone import Tokens, joined_tokens
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, PromptPiece, RepairBudget, splice_prompt
from kvpatch_jax.repair.methods import blind, first_k, mpic, two_step_reuse, vlcache
from tests.repair.splices import PIECES, ROWS, error, make_prompt, make_splice, text_tokens, tiny_backbone

TOTAL, CHUNKS = sum(map(abs, PIECES)), ((3, 9), (11, 20))
NEW = [token for token in range(TOTAL) if not any(first <= token < last for first, last in CHUNKS)]


@pytest.fixture(scope="module", params=["gqa", "mla"])
def case(request):
    backbone = tiny_backbone(request.param)
    with jax.default_matmul_precision("highest"):
        return backbone, *make_prompt(backbone)


def test_chunks_and_zeros_are_spliced_where_they_stand(case):
    _, splice, _, _ = case
    assert splice.chunks == CHUNKS
    assert np.flatnonzero(splice.new_text()).tolist() == NEW
    for value in splice.cache.values():
        assert not np.asarray(value)[:, :, NEW].any()
        assert np.asarray(value)[:, :, 3:9].any()


def test_all_tokens_of_every_chunk_equal_a_prefill(case):
    backbone, splice, expected, logits = case
    repaired = mpic(backbone, splice, 1.0)
    for name, value in expected.items():
        assert error(repaired.cache[name], value) <= 1e-5
    assert error(repaired.logits, logits) <= 1e-5


@pytest.mark.nightly
def test_mpic_runs_new_text_and_the_first_k_of_each_chunk_in_one_forward(case):
    backbone, splice, _, _ = case
    repaired = mpic(backbone, splice, RepairBudget(tokens=2))
    for row in range(ROWS):
        assert np.flatnonzero(np.asarray(repaired.chosen)[0, row]).tolist() == sorted([*NEW, 3, 4, 11, 12])
    assert bool((repaired.chosen == repaired.chosen[:1]).all())
    # The dummy cache is never read: anything may lie there.
    noise = jnp.asarray(1e3 * splice.new_text()[:, None, None], jnp.float32)
    spoilt = splice.replace(cache={name: value + noise for name, value in splice.cache.items()})
    again = mpic(backbone, spoilt, RepairBudget(tokens=2))
    np.testing.assert_array_equal(again.logits, repaired.logits)
    # Chunks that are shorter than k are recomputed whole, as in full.
    whole, full = mpic(backbone, splice, RepairBudget(tokens=9)), mpic(backbone, splice, 1.0)
    assert error(whole.logits, full.logits) <= 1e-6


@pytest.mark.nightly
def test_two_step_reuse_computes_text_without_chunks(case):
    backbone, splice, _, _ = case
    one, apart = blind(backbone, splice), two_step_reuse(backbone, splice)
    assert error(one.logits, apart.logits) > 1e-3  # text that sees no image is another text
    first = slice(0, 3)
    for name, value in one.cache.items():
        assert error(apart.cache[name][:, :, first], value[:, :, first]) <= 1e-5  # nothing precedes it


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["first_k", "cacheblend"])
def test_new_text_is_always_computed_and_counts_in_no_budget(case, name):
    backbone, splice, _, _ = case
    repaired = METHODS[name](backbone, splice, RepairBudget(tokens=1))
    chosen = np.asarray(repaired.chosen)
    assert chosen[:, :, NEW].all()
    wanted = len(NEW) + (2 if name == "first_k" else 1)
    assert (chosen[-1].sum(-1) == wanted).all()
    assert repaired.logits is not None


@pytest.mark.nightly
def test_vlcache_takes_the_first_tokens_of_every_image_by_layer(case):
    backbone, splice, _, _ = case
    layers = backbone.layout.layers
    shares = tuple(np.linspace(0.7, 0.1, layers).tolist())
    repaired = vlcache(backbone, splice, 0.4, schedules={0.4: shares})
    for layer, share in enumerate(shares):
        wanted = list(NEW)
        for first, last in CHUNKS:
            wanted += range(first, first + int(share * (last - first) + 1e-9))
        for row in range(ROWS):
            assert np.flatnonzero(np.asarray(repaired.chosen)[layer, row]).tolist() == sorted(wanted)
    once = backbone.recompute(splice.tokens, splice.cache, splice.slots, keep=repaired.chosen)
    for name, value in once.cache.items():
        assert error(repaired.cache[name], value) <= 1e-5


@pytest.mark.nightly
def test_prompts_that_cannot_be(unchecked):
    backbone = tiny_backbone()
    tokens = text_tokens(backbone, np.arange(1, 9)[None])
    with pytest.raises(InputError, match="expected at least one cached chunk"):
        splice_prompt(backbone, [PromptPiece(tokens)])
    splice, _ = make_splice(backbone)
    for repair in (mpic, two_step_reuse):
        with pytest.raises(InputError, match="ends with new text"):
            repair(backbone, splice)
    prompt, _, _ = make_prompt(backbone)
    with pytest.raises(InputError, match="expected 0"):
        two_step_reuse(backbone, prompt, RepairBudget(tokens=1))
    with pytest.raises(InputError, match="expected 0"):
        blind(backbone, prompt, 0.5)
    assert first_k(backbone, prompt, RepairBudget(tokens=100)).token_layers.tolist() == [TOTAL * 4] * ROWS


def numbered_tokens(first: int, count: int, deepstack: bool) -> Tokens:
    embeddings = jnp.arange(first, first + 2 * count, dtype=jnp.float32).reshape(1, count, 2)
    features = jnp.ones((1, count, 3, 2), jnp.float32) if deepstack else None
    return Tokens(embeddings, np.arange(first, first + count)[None], features)


def test_texts_among_images_with_deepstack_features_have_zeros():
    parts = [numbered_tokens(0, 2, False), numbered_tokens(10, 3, True), numbered_tokens(20, 1, False)]
    joined = joined_tokens(parts)
    assert joined.deepstack is not None
    np.testing.assert_array_equal(np.asarray(joined.deepstack)[0, :, 0, 0], [0, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(np.asarray(joined.positions)[0], [0, 1, 10, 11, 12, 20])
    np.testing.assert_array_equal(np.asarray(joined.embeddings)[0, :, 0], [0, 2, 10, 12, 14, 20])
    assert joined_tokens([parts[0], parts[2]]).deepstack is None


@pytest.mark.nightly
def test_two_step_reuse_costs_one_token_more_through_the_layers_and_no_logits_more():
    backbone = tiny_backbone()
    splice, _, _ = make_prompt(backbone)
    one_step = blind(backbone, splice).flops
    token = (mpic(backbone, splice, RepairBudget(tokens=1)).flops - one_step) / len(splice.parts)
    assert two_step_reuse(backbone, splice).flops - one_step == token
