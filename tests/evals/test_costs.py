"""The two axes of the main comparison, held against sums written out one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from evals.results.costs import AMORTISED, AXES, METRICS, TOGETHER, ArmCost, ChunkCosts, input_width
from kvpatch_jax import KVLayout, Patch, Rope
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.cache import PatchMetadata

LAYERS, TOKENS, BEHIND, HEADS, WIDTH = 3, 6, 5, 2, 8
FORWARD = ForwardCosts(token=(100, 200, 300), pair=(7, 7, 11), window=(0, 4, 0), logit=9)
CHUNK = ChunkCosts(FORWARD, KVLayout.gqa(LAYERS, HEADS, WIDTH, Rope(1e4, WIDTH)), TOKENS, BEHIND, 16)
SLOTS = np.arange(BEHIND, BEHIND + TOKENS)[None]


def by_hand(tokens_at):
    """FLOPs of tokens run again: {layer: indices}, one token and one key at a time."""
    total = 0
    for layer, tokens in tokens_at.items():
        for token in tokens:
            seen = [key for key in range(BEHIND + token + 1)]
            if FORWARD.window[layer]:
                seen = [key for key in seen if key > BEHIND + token - FORWARD.window[layer]]
            total += FORWARD.token[layer] + FORWARD.pair[layer] * len(seen)
    return total


def chosen(tokens_at, rows=1):
    marks = np.zeros((LAYERS, rows, TOKENS), bool)
    for layer, tokens in tokens_at.items():
        marks[layer, :, list(tokens)] = True
    return marks


def test_running_every_token_again_is_a_re_prefill():
    every = {layer: range(TOKENS) for layer in range(LAYERS)}
    assert CHUNK.rerun(chosen(every), SLOTS) == by_hand(every) == CHUNK.prefill


def test_nested_sets_are_counted_layer_by_layer():
    """A check layer run with all tokens is paid for; the mean is over rows."""
    nested = {0: range(TOKENS), 1: [1, 4], 2: [4]}
    assert CHUNK.rerun(chosen(nested, rows=3), np.repeat(SLOTS, 3, axis=0)) == pytest.approx(by_hand(nested))


def test_shares_of_the_plain_ways():
    whole, blind = CHUNK.shares(CHUNK.of_reprefill()), CHUNK.shares(CHUNK.of_blind())
    assert set(whole) == set(METRICS) >= {*AXES, *AMORTISED}
    assert whole["stored_bytes"] == whole["canonical_bytes"] == 0
    assert whole["serving_flops"] == 1
    assert whole["input_bytes"] == pytest.approx(16 / (LAYERS * 2 * HEADS * WIDTH))
    # Run anew for each of N antecedents, from the same embeddings.
    assert [whole[axis] for axis in TOGETHER] == pytest.approx([whole["input_bytes"] / n for n in (1, 4, 16)])
    assert blind["stored_bytes"] == blind["input_bytes"] == 0
    assert 0 < blind["serving_flops"] == pytest.approx(3 * LAYERS * TOKENS * HEADS * WIDTH / CHUNK.prefill)


def test_kept_in_the_canonicals_place():
    """KV(B|A) in 16 bits takes the chunk's bytes once, and nothing of the canonical."""
    shares = CHUNK.shares(CHUNK.of_conditioned(16 * CHUNK.numbers, 0))
    assert shares["stored_bytes"] == 1
    assert [shares[axis] for axis in TOGETHER] == [1, 1, 1]
    assert shares["canonical_bytes"] == 0
    blind = CHUNK.shares(CHUNK.of_blind())
    assert [blind[f"stored_bytes.antecedents={count}"] for count in (1, 4, 16)] == [1, 1 / 4, 1 / 16]


def test_tokens_that_are_run_again_keep_what_they_start_from():
    """The canonical and the embeddings of all tokens, or of those known ahead, kept once for all antecedents."""
    embedding = 16 / (LAYERS * 2 * HEADS * WIDTH)
    few, every = chosen({0: [0, 1]}), [CHUNK.of_tokens(chosen({0: [0, 1]}), SLOTS), CHUNK.of_reprefill()]
    for count in (1, 4, 16):
        axis = f"stored_bytes.antecedents={count}"
        found = [CHUNK.shares(cost)[axis] * count for cost in (*every, CHUNK.of_tokens(few, SLOTS, inputs=2))]
        assert found == pytest.approx([1 + embedding, embedding, 1 + embedding * 2 / TOKENS])


def test_what_deeper_layers_add_is_an_input_too():
    plain = Tokens(jnp.zeros((1, 3, 5)), np.zeros((1, 3), np.int32))
    assert input_width(plain) == 5
    assert input_width(plain._replace(deepstack=jnp.zeros((1, 3, 2, 5)))) == 15


def test_patches_of_other_chunks_are_counted_too():
    """A page's patch, and that of a sheet half as long: by the numbers in both patches."""
    rng = np.random.default_rng(0)

    def patch_of(tokens, rank):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
        factors = {name: (draw(LAYERS, tokens, rank), draw(LAYERS, rank, HEADS * WIDTH)) for name in "kv"}
        return Patch(factors, PatchMetadata("own", "canonical", ("a",), "b", CHUNK.layout, (0, 1, 2)))

    page, sheet = patch_of(TOKENS, 4), patch_of(TOKENS // 2, 2)
    alone, both = CHUNK.of_patch(page), CHUNK.of_patch(page, [(sheet, TOKENS // 2)])
    numbers = 2 * LAYERS * 2 * (TOKENS // 2 + HEADS * WIDTH)  # two channels, rank 2, U and V
    assert both.stored - alone.stored == 16 * numbers
    # Two FLOPs for each of T × H × rank, in two channels and every layer.
    assert both.serving - alone.serving == 2 * (TOKENS // 2) * HEADS * WIDTH * 2 * 2 * LAYERS
    assert both.forming > alone.forming
    assert (both.canonical, both.inputs) == (alone.canonical, alone.inputs)
    assert CHUNK.of_patch(page, []) == alone


def test_forming_is_shared_by_the_number_of_reuses():
    cost = ArmCost(serving=10, question=5, forming=90)
    shares = CHUNK.shares(cost)
    assert shares["question_flops"] == pytest.approx(5 / CHUNK.prefill)
    assert [shares[metric] * CHUNK.prefill for metric in AMORTISED] == pytest.approx([105, 45, 24])


def test_a_questions_pass_through_some_layers():
    """Two tokens, each seeing all in front of it, through the lowest layers."""
    pairs = [(BEHIND + 1) + (BEHIND + 2), 8]
    lowest = 2 * FORWARD.token[0] + FORWARD.pair[0] * pairs[0]
    assert CHUNK.reading(2, BEHIND, 1) == lowest
    assert CHUNK.reading(2, BEHIND, 2) == lowest + 2 * FORWARD.token[1] + FORWARD.pair[1] * pairs[1]
    assert CHUNK.reading(2, BEHIND) == FORWARD.flops(2, BEHIND)
