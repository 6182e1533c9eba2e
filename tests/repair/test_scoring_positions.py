"""Where chunks stand while they are scored, and in which order they are served."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import PromptPiece, reordered_by_question, splice_prompt
from kvpatch_jax.repair.methods import infoflow
from kvpatch_jax.repair.positions import chunk_scores, placed_for_scoring, reordered
from kvpatch_jax.repair.question_attention import question_scores
from tests.repair.splices import ROWS, error, one_row, text_tokens, tiny_backbone

LENGTHS, ASKED = (5, 7, 4), 3
STARTS = (0, 5, 12)


@pytest.fixture(scope="module", params=["gqa", "mla"])
def case(request):
    """Three cached chunks behind one another, and a question."""
    backbone = tiny_backbone(request.param)
    ids = np.random.default_rng(3).integers(0, 300, (ROWS, sum(LENGTHS) + ASKED))
    tokens = text_tokens(backbone, ids)
    pieces = []
    for start, length in zip(STARTS, LENGTHS, strict=True):
        own = tokens.take(start, start + length)
        pieces.append(PromptPiece(own, backbone.prefill(own._replace(positions=own.positions - start)).kv))
    question = tokens.take(sum(LENGTHS), ids.shape[1])
    return backbone, splice_prompt(backbone, pieces).replace(question=question), pieces


def starts_of(backbone, cache, pieces):
    """Where each chunk's keys stand, found by trying all positions."""
    found = []
    for piece, start, length in zip(pieces, STARTS, LENGTHS, strict=True):
        own = {name: np.asarray(value)[:, :, start : start + length] for name, value in cache.items()}
        errors = []
        for place in range(sum(LENGTHS) + ASKED + 1):
            local = np.asarray(piece.tokens.positions) - start
            moved = kvp.to_engine(backbone.layout, piece.kv, local, place)
            errors.append(max(error(own[name], moved[name]) for name in own))
        found.append(int(np.argmin(errors)))
        assert min(errors) < 1e-5
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("geometry", "starts", "asked"), [("global", [0, 5, 12], 16), ("hl_tp", [0, 0, 0], 16), ("tl_tp", [11, 9, 12], 16)]
)
def test_geometries_place_chunks_and_question_as_the_paper_says(case, geometry, starts, asked):
    backbone, splice, pieces = case
    question, cache = placed_for_scoring(backbone.layout, splice, geometry)
    assert starts_of(backbone, cache, pieces) == starts
    assert np.asarray(question.positions).reshape(ROWS, ASKED, -1)[:, 0].ravel().tolist()[0] == asked


@pytest.mark.nightly
def test_chosen_tokens_are_served_where_they_are_whatever_scored_them(case):
    backbone, splice, _ = case
    for geometry in ("global", "hl_hp", "hl_tp", "tl_tp"):
        repaired = infoflow(backbone, splice, 1.0, geometry=geometry)
        expected = kvp.to_engine(backbone.layout, backbone.prefill(splice.tokens).kv, splice.tokens.positions, 0)
        for name, value in expected.items():
            assert error(repaired.cache[name], value) <= 1e-5


@pytest.mark.nightly
def test_another_order_is_the_splice_that_would_have_been_made(case):
    backbone, splice, pieces = case
    order = [2, 0, 1]
    moved = reordered(backbone.layout, splice, order)
    start, made = 0, []
    for number in order:
        piece = pieces[number]
        by = start - STARTS[number]
        made.append(PromptPiece(piece.tokens._replace(positions=np.asarray(piece.tokens.positions) + by), piece.kv))
        start += LENGTHS[number]
    expected = splice_prompt(backbone, made)
    assert moved.chunks == expected.chunks
    np.testing.assert_array_equal(moved.tokens.positions, expected.tokens.positions)
    np.testing.assert_array_equal(moved.tokens.embeddings, expected.tokens.embeddings)
    for name, value in expected.cache.items():
        assert error(moved.cache[name], value) <= 1e-5
    back = reordered(backbone.layout, moved, [1, 2, 0])
    for name, value in splice.cache.items():
        assert error(back.cache[name], value) <= 1e-5


def test_chunks_are_ranked_by_their_own_best_tokens(case):
    _, splice, _ = case
    score = np.zeros((ROWS, sum(LENGTHS)))
    score[:, [0, 1, 2]] = 1.0
    score[:, [6, 7]] = 5.0, 0.5
    score[1, 12:] = -np.inf  # padding
    found = chunk_scores(splice, jnp.asarray(score), 0.25)
    np.testing.assert_allclose(found, [[1.0, 5.5, 0.0]] * ROWS)


@pytest.mark.nightly
def test_the_chunk_that_the_question_looks_at_most_comes_last(case):
    backbone, splice, _ = case
    one = one_row(splice, 0)
    found = reordered_by_question(backbone, one, share=1.0)
    score = np.asarray(question_scores(backbone, one, geometry="hl_tp"))[0]
    sums = [score[start : start + length].sum() for start, length in zip(STARTS, LENGTHS, strict=True)]
    order = np.argsort(sums)
    assert [last - first for first, last in found.parts] == [LENGTHS[number] for number in order]
    with pytest.raises(InputError, match="at least two"):
        reordered_by_question(backbone, one.replace(chunks=None))
