"""What a measurement serves: prompts are the chat template's, arms start from one KV, costs are counted by hand."""

import numpy as np
import pytest
from PIL import Image

from evals.harness.methods import parse
from evals.measure.contexts import MeasuredContext, frame_of
from evals.measure.items import Item, Piece
from evals.measure.measured import AnswerReader, Setup, serve
from kvpatch_jax import Text

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("highest_precision")]
QUESTION = "What is in it?"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two images of different sizes, as pieces."""
    folder, rng = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)
    pieces = []
    for number in range(2):
        path = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (28 + 14 * number, 56, 3), np.uint8)).save(path)
        pieces.append(Piece(path, f"page {number}"))
    return pieces


def asked(backbone, pieces, frame="chat", answers=("x",)):
    """A reader of one question behind a context."""
    setup = Setup(backbone, frame_of(backbone, frame), (), None, 6)
    item = Item("1", "1", tuple(pieces), QUESTION, answers)
    return AnswerReader(MeasuredContext(backbone, setup.frame, pieces), item, setup)


def answer(reader, name):
    return reader.read(serve(reader.context, parse(name), reader.question)[0])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "smolvlm"])
def test_the_reference_is_what_the_chat_template_makes_of_the_message(loaded, pages, family):
    """Positions, embeddings and greedy answer of one message with both images, though its pieces were formed alone."""
    backbone = loaded(family)
    reader = asked(backbone, pages)
    content = [{"type": "image", "image": piece.content} for piece in pages]
    prompt = backbone.chat([{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}])
    tokens, context = backbone.embed(**prompt), reader.context
    placed = np.concatenate([context.line.tokens.positions, reader.question.positions], axis=1)
    np.testing.assert_array_equal(placed, np.asarray(tokens.positions))
    joined = np.concatenate([context.line.tokens.embeddings, reader.question.embeddings], axis=1)
    np.testing.assert_allclose(joined, np.asarray(tokens.embeddings), atol=1e-5)
    expected = backbone.generate(tokens, 6)[0].tolist()
    assert list(reader.answer) == expected[: len(reader.answer)]


@pytest.mark.parametrize(("family", "least"), [("qwen2_5_vl", 1e-5), ("gemma3", 0)])
def test_a_first_piece_is_exact_and_a_patch_of_full_rank_mends_the_others(loaded, pages, family, least):
    """Gemma 3 has layers of two kinds, and is sure of its answers. Nothing precedes the first piece."""
    backbone = loaded(family)
    assert answer(asked(backbone, pages[:1], "plain"), "blind")["kl"] < 1e-6
    reader = asked(backbone, [*pages, Piece(Text("Read this."), "note")], "plain")
    blind, patched = answer(reader, "blind"), answer(reader, "patch.rank=32")
    assert patched["agrees"]
    assert patched["kl"] < 1e-6
    assert blind["kl"] > least


def test_methods_that_compute_every_token_again_are_re_prefill_and_costs_are_counted(loaded, pages):
    backbone = loaded("qwen2_5_vl")
    reader = asked(backbone, pages, answers=())
    context = reader.context
    assert answer(reader, "first_k.budget=1.0")["kl"] < 1e-6
    blind = answer(reader, "blind")["kl"]
    assert all(1e-7 < answer(reader, name)["kl"] < blind for name in ("infoflow.budget=0.15", "quantised.bits=4"))
    # Where the data has no answer, re-prefill's is right.
    assert answer(reader, "re-prefill")["score"] == 1

    costs = serve(context, parse("patch.rank=8"), reader.question)[1]
    features = [channel.features for channel in backbone.layout.channels]
    factors = numbers = 0
    for piece in (context.line.pieces[place] for place in context.places):
        size = -(-piece.size // 8) * 8
        stored = sum(min(8 * (size + width), size * width) for width in features) / sum(
            size * width for width in features
        )
        factors, numbers = factors + piece.size * stored, numbers + piece.size
    assert costs["stored_bytes"] == pytest.approx(factors / numbers, rel=1e-5)
    assert costs["canonical_bytes"] == 1
    assert 0 < costs["serving_flops"] < 0.1 < costs["forming_flops"]
