"""What a measurement serves: prompts are the chat template's, arms start from one KV, limits and costs by hand."""

import numpy as np
import pytest

from evals.measure.answers import AnswerReader
from evals.measure.arms import all_arms, chosen_arms, context_shares
from evals.measure.contexts import MeasuredContext
from evals.measure.frame import frame_of
from evals.measure.items import Piece, StoredImage
from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

pytestmark = pytest.mark.usefixtures("highest_precision")
QUESTION = "What is in it?"
ARMS = {arm.name: arm for arm in all_arms()}


def picture(number, height=28):
    return np.random.default_rng(number).integers(0, 256, (height, 56, 3), np.uint8)


def encoded(number, height=28):
    """An image as data sets store it: bytes of a PNG."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(number, height)).save(file, "PNG")
    return Piece(StoredImage(file.getvalue, f"picture {number}"), f"page {number}")


def asked(backbone, pieces, frame="chat", steps=6):
    """A context and one question behind it."""
    framed = frame_of(backbone, frame, "again")
    context = MeasuredContext(backbone, framed, pieces, None)
    return context, AnswerReader(context, framed.question_ids(backbone, QUESTION), steps)


def whole_prompt(backbone, count):
    content = [{"type": "image", "image": picture(number, 28 + 14 * number)} for number in range(count)]
    return backbone.chat([{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "glm4v", "smolvlm"])
def test_the_reference_is_what_the_chat_template_makes_of_the_whole_message(loaded, family):
    """Tokens, positions and greedy answer of one message with both images, though its pieces were formed alone."""
    backbone = loaded(family)
    context, reader = asked(backbone, [encoded(number, 28 + 14 * number) for number in range(2)])
    prompt = whole_prompt(backbone, 2)
    tokens = backbone.embed(**prompt)

    count = context.tokens - context.first
    placed = np.concatenate([context.prompt.positions[:, :count], reader.tokens.positions], axis=1)
    np.testing.assert_array_equal(placed, np.asarray(tokens.positions)[:, context.first :])
    made = np.concatenate([context.prompt.embeddings[:, :count], reader.tokens.embeddings], axis=1)
    np.testing.assert_allclose(made, np.asarray(tokens.embeddings)[:, context.first :], atol=1e-5)

    expected = backbone.generate(tokens, 6)[0].tolist()
    assert list(reader.answer) == expected[: len(reader.answer)]


@pytest.mark.slow
def test_blind_reuse_of_a_first_piece_is_exact_and_of_a_second_is_not(loaded):
    """Without a front, nothing stands before the first piece; a patch of all directions mends every other."""
    context, reader = asked(loaded("qwen2_5_vl"), [encoded(0)], "plain")
    assert reader.read(ARMS["blind"].serve(context, reader.tokens).cache).kl < 1e-6

    context, reader = asked(loaded("qwen2_5_vl"), [encoded(0), encoded(1), Piece(Text("Read this."), "note")], "plain")
    blind = reader.read(ARMS["blind"].serve(context, reader.tokens).cache)
    # The largest rank is all that pieces of so few tokens have.
    whole = reader.read(ARMS["patch.rank=32"].serve(context, reader.tokens).cache)
    assert whole.ids == reader.answer
    assert whole.kl < 1e-6 < 1e-4 < blind.kl


@pytest.mark.slow
def test_arms_that_compute_every_token_again_are_re_prefill(loaded):
    """MPIC-32 of pieces with fewer tokens computes all of them; InfoFlow's 15 % is between blind reuse and that."""
    context, reader = asked(loaded("qwen2_5_vl"), [encoded(0), encoded(1)])
    assert max(piece.length for piece in context.pieces) <= 32
    everything = reader.read(ARMS["first_k.tokens=32"].serve(context, reader.tokens).cache)
    assert everything.kl < 1e-6

    blind = reader.read(ARMS["blind"].serve(context, reader.tokens).cache)
    for name in ("cacheblend.budget=0.15", "infoflow.budget=0.15", "quantised.bits=4"):
        found = reader.read(ARMS[name].serve(context, reader.tokens).cache)
        assert 1e-7 < found.kl < blind.kl, name


@pytest.mark.slow
def test_costs_are_those_counted_by_hand(loaded):
    """Two pieces of one length: shares of their KV at 16 bits and of re-prefilling them."""
    backbone = loaded("qwen2_5_vl")
    context, reader = asked(backbone, [encoded(0), encoded(1)])
    shares = {}
    for name in ("re-prefill", "blind", "patch.rank=8", "first_k.tokens=32", "prefix_cache"):
        shares[name] = context_shares(context, ARMS[name].serve(context, reader.tokens).costs)

    tokens = context.pieces[0].length
    layers, channels = backbone.layout.layers, backbone.layout.channels
    numbers = layers * tokens * sum(channel.features for channel in channels)
    factors = layers * sum(min(8 * (tokens + own.features), tokens * own.features) for own in channels)
    assert shares["patch.rank=8"]["stored_bytes"] == pytest.approx(factors / numbers)
    assert shares["patch.rank=8"]["canonical_bytes"] == shares["blind"]["canonical_bytes"] == 1
    assert shares["re-prefill"]["serving_flops"] == shares["prefix_cache"]["serving_flops"] == 1
    assert shares["re-prefill"]["stored_bytes.antecedents=1"] == 0
    assert shares["prefix_cache"]["stored_bytes.antecedents=16"] == 1

    costs, first = backbone.forward_costs, context.first
    alone = 2 * costs.flops(tokens)
    again = costs.flops(tokens, first) + costs.flops(tokens, first + tokens)
    assert shares["blind"]["forming_flops"] == pytest.approx(alone / again)
    # Every token of both pieces runs again; on top comes turning their keys.
    assert shares["first_k.tokens=32"]["serving_flops"] == pytest.approx(1 + shares["blind"]["serving_flops"])


@pytest.mark.slow
def test_an_unlike_layer_leaves_out_the_arms_that_need_like_ones(loaded):
    kept, left_out = chosen_arms(["*"], loaded("gemma3").layout)
    assert [arm.name for arm in kept][:3] == ["re-prefill", "blind", "patch.rank=8"]
    assert {arm.name for arm in left_out} == {arm.name for arm in all_arms() if arm.uniform}
    with pytest.raises(InputError, match=r"--arms: got 'nope\.\*', which no arm matches; expected patterns of: re-pr"):
        chosen_arms(["nope.*"], loaded("gemma3").layout)


def test_a_context_that_is_too_long_or_empty_is_refused(loaded):
    backbone = loaded("qwen2_5_vl")
    frame = frame_of(backbone, "chat", "again")
    with pytest.raises(InputError, match=r"context: got \d+ tokens; expected at most 10, which the model serves"):
        MeasuredContext(backbone, frame, [encoded(0)], 10)
    with pytest.raises(InputError, match=r"context: got no pieces; expected at least one"):
        MeasuredContext(backbone, frame, [], None)
