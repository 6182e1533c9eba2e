"""A measurement of a user's model compares arms from one KV, with the costs that a hand counts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from evals.harness.methods import parse
from evals.measure import agent, job
from evals.measure.contexts import MeasuredContext, embedded, frame_of, ids_of
from evals.measure.items import Item, Piece
from evals.measure.measured import AnswerReader, Setup, serve
from kvpatch_jax import Text
from kvpatch_jax.errors import InputError
from tests.goldens.load import write_checkpoint

ROOT = Path(__file__).parents[2]
MODEL, SCREENSHOTS = "documents/qwen2_5_vl", ROOT / "docs/pictures/screenshots"
QUESTION = "What is in it?"

pytestmark = pytest.mark.usefixtures("highest_precision")


def request(model, data, **changes):
    arms = ("patch.rank=8", "cacheblend.budget=0.15")
    return job.Request(**{"model": str(model), "data": str(data), "methods": arms, "answer_tokens": 3, **changes})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of ten items of two kinds and five clusters behind six contexts, images of three sizes and texts."""
    image_module = pytest.importorskip("PIL.Image")
    folder, rng, lines = tmp_path_factory.mktemp("data"), np.random.default_rng(0), []
    for number in range(10):
        context = number % 6
        images = [f"{context}_{place}.png" for place in range(2)]
        for name in images if number < 6 else ():
            pixels = rng.integers(0, 256, (28 + 14 * (number % 3), 56, 3), np.uint8)
            image_module.fromarray(pixels).save(folder / name)
        line = {"id": f"q{number}", "cluster": f"c{context % 5}", "kind": "ab"[context % 2], "images": images}
        line |= {"texts": ["Read this well."] if context % 2 else [], "question": QUESTION}
        lines.append(line | {"answer": "hello", "scorer": "token_f1"})
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def pages(data):
    """Two images of different sizes, as pieces."""
    return [Piece(data.parent / f"{number}_0.png", f"page {number}") for number in range(2)]


def asked(backbone, pieces, frame="chat", answers=("x",)):
    """A reader of one question behind a context."""
    setup = Setup(backbone, frame_of(backbone, frame), (), None, 6)
    item = Item("1", "1", tuple(pieces), QUESTION, answers)
    return AnswerReader(MeasuredContext(backbone, setup.frame, pieces), item, setup)


def answer(reader, name):
    return reader.read(serve(reader.context, parse(name), reader.question)[0])


@pytest.mark.nightly
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
    assert list(reader.answer) == backbone.generate(tokens, 6)[0].tolist()[: len(reader.answer)]


@pytest.mark.parametrize(
    ("family", "least"), [("qwen2_5_vl", 1e-5), pytest.param("gemma3", 0, marks=pytest.mark.nightly)]
)
def test_a_first_piece_is_exact_and_a_patch_of_full_rank_mends_the_others(loaded, pages, family, least):
    """Gemma 3 has layers of two kinds, and is sure of its answers. Nothing precedes the first piece."""
    backbone = loaded(family)
    reader = asked(backbone, [*pages, Piece(Text("Read this."), "note")], "plain", answers=())
    blind, patched = answer(reader, "blind"), answer(reader, "patch.rank=32")
    assert patched["agrees"]
    assert patched["kl"] < 1e-6
    assert blind["kl"] > least
    # KL once more: over the tokens of re-prefill's answer, each behind those before it.
    context, frame, logs = reader.context, reader.context.frame, []
    ids = [*ids_of(backbone, frame.before, QUESTION, frame.behind), *reader.answer[:-1]]
    tokens = embedded(backbone, {"input_ids": np.array([ids], np.int32)}).shift(np.int32(context.line.end))
    for cache in (context.reference, context.blind):
        logits = np.asarray(backbone.prefill(tokens, cache, logits="all").logits, np.float64)
        logits = logits[0, -len(reader.answer) :]
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    expected = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean()
    assert blind["kl"] == pytest.approx(expected, rel=1e-2, abs=1e-7)
    # Where the data has no answer, re-prefill's is right.
    assert answer(reader, "re-prefill")["score"] == 1
    assert answer(asked(backbone, pages[:1], "plain"), "blind")["kl"] < 1e-6

    costs = serve(reader.context, parse("patch.rank=8"), reader.question)[1]
    features = [channel.features for channel in backbone.layout.channels]
    factors = numbers = 0
    for place in reader.context.places:
        piece = reader.context.line.pieces[place].size
        size = -(-piece // 8) * 8
        # Nothing precedes the first piece.
        stored = sum(min(8 * (size + width), size * width) for width in features) if place else 0
        factors, numbers = factors + piece * stored / (size * sum(features)), numbers + piece
    assert costs["stored_bytes"] == pytest.approx(factors / numbers, rel=1e-5)
    assert costs["canonical_bytes"] == 1
    assert 0 < costs["serving_flops"] < 0.1 < costs["forming_flops"]


def test_data_and_models_that_do_not_fit_are_refused(checkpoint, data, tmp_path):
    (tmp_path / "bare").mkdir()
    for file in checkpoint("qwen2_5_vl").iterdir():
        if "tokenizer" not in file.name:
            shutil.copy(file, tmp_path / "bare")
    for asked, message in (
        (request("nowhere", data), "backbone: got 'nowhere'; expected a checkpoint directory"),
        (request(MODEL, "nowhere"), "--data: got "),
        (request(MODEL, data, methods=("nope.rank=1",)), "method: got 'nope.rank=1'; expected "),
        (request(tmp_path / "bare", data), "without a tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            job.plan(asked)
    (tmp_path / "words.jsonl").write_text(json.dumps({"texts": ["⛵"], "question": "Q?", "answer": "x"}))
    (record,) = job.plan(request(MODEL, tmp_path / "words.jsonl", frame="plain")).parts[0].measure()
    assert record["where"] == "words.jsonl:1"
    assert "⛵" in record["refused"]
    # An item that the model is too short for is left out.
    planned = job.plan(request(checkpoint("qwen2_5_vl"), data, max_tokens=20, methods=("blind",), limit=1))
    assert ["expected at most 20" in record["refused"] for record in planned.parts[0].measure()] == [True]


TOKENS = [30, 30, 30, 74]
"""Of the screenshots: three of 56 × 392 pixels and one of 252 × 224, a token for 28 × 28, and one on either side."""


@pytest.mark.nightly
def test_an_agents_loop_computes_what_a_hand_counts(tmp_path: Path):
    """The new screenshot; what follows the longest known front; all. Re-prefill's answers until one has left."""
    keep, exact, windows = 2, 3, [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 1]]
    agent.measure(job.Request(MODEL, str(SCREENSHOTS), keep=keep, answer_tokens=2), None, None, tmp_path, "")
    steps = json.loads((tmp_path / "agent.json").read_text())["steps"]
    assert [step["op"] for step in steps] == ["add"] * 4 + ["recall"]
    for number, (step, window) in enumerate(zip(steps, windows, strict=True)):
        fronts = [earlier[:size] for earlier in windows[:number] for size in range(len(earlier) + 1)]
        known = max((size for size in range(len(window) + 1) if window[:size] in fronts), default=0)
        counts = {"session": [window[-1]], "prefix cache": window[known:], "re-prefill": window}
        for method in agent.METHODS:
            figure = step["methods"][method]
            assert figure["computed"] == sum(TOKENS[image] for image in counts[method]), (number, method)
            assert figure["seconds"] > 0
            assert figure["bytes"] > 0
            if method != "session" or number < exact:
                assert figure["kl"] < 1e-9
                assert figure["same"]


def test_a_loop_that_cannot_be_measured_is_refused(tmp_path: Path):
    (tmp_path / "few").mkdir()
    for shot in sorted(SCREENSHOTS.glob("*.png"))[:3]:
        shutil.copy(shot, tmp_path / "few")
    for model, folder, method, message in (
        (MODEL, tmp_path / "few", None, "--data: got 3 screenshots; expected at least 4"),
        (
            write_checkpoint("qwen2", tmp_path / "qwen2"),
            SCREENSHOTS,
            None,
            "--model: got qwen2, which does not see images",
        ),
        (MODEL, SCREENSHOTS, "nonesuch", "nonesuch"),
    ):
        asked = job.Request(str(model), str(folder), keep=2, answer_tokens=2)
        with pytest.raises(InputError, match=message):
            agent.measure(asked, None, method, tmp_path / "out", "")
    assert not (tmp_path / "out").exists()
