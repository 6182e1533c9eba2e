"""A user's data and model are measured as published, at costs that a hand counts, or refused by line and column."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from evals.harness.methods import parse
from evals.measure import agent, fields, job
from evals.measure.contexts import MeasuredContext, embedded, frame_of, ids_of
from evals.measure.items import Item, Piece
from evals.measure.measured import AnswerReader, Setup, serve
from evals.measure.scoring import SCORERS
from evals.plugins import ReusedChat
from kvpatch_jax import Text
from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.errors import InputError, KVPatchError
from tests.goldens.load import write_checkpoint

# --------------------------------------------------------------------------------------------------- records and scores

CLICK = '{"action_type": "click", "x": 500, "y": 500}'
SCROLL = '{"action_type": "scroll", "direction": "Up"}'
PATHS = {
    "mmlongbench_doc": "mmlongbench_doc/samples.json",
    "slidevqa": "slidevqa/annotations/test.jsonl",
    "mp_docvqa": "mp_docvqa/val.json",
    "docvqa": "docvqa/val.json",
    "hotpotqa": "hotpotqa/dev_distractor.json",
    "musique": "musique/musique_ans_dev.jsonl",
    "jsonl": "jsonl/items.jsonl",
}
"""What is read of each data set in released.tar.xz, ten items laid out as released; all were drawn for this."""


def unpack(folder: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("released.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


GOOD = {"images": ["ok.png"], "question": "Q", "answer": "A"}


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> dict[str, Path]:
    root = unpack(tmp_path_factory.mktemp("data"))
    return {name: root / path for name, path in PATHS.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    pytest.importorskip("PIL.Image").new("RGB", (96, 64), "white").save(tmp_path / "ok.png")
    return tmp_path


def lines(folder: Path, *records: object, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


@pytest.mark.parametrize("name", PATHS)
def test_a_data_set_is_recognised_read_and_scores_its_own_answers(released, name):
    read = fields.read(released[name])
    assert (read.name, read.refusals) == (name, [])
    assert len(read.items) == len({item.id for item in read.items}) == 10
    for item in read.items:
        assert item.pieces
        assert item.question
        assert SCORERS[item.scorer].score(item.answers[0], item) == 1, item


def test_a_sample_is_drawn_by_its_seed_and_the_digest_knows_questions_and_no_places(released, tmp_path):
    names = [item.id for item in fields.read(released["jsonl"], limit=3, seed=1).items]
    assert names == [item.id for item in fields.read(released["jsonl"], limit=3, seed=1).items]
    assert (
        len(names) == 3 < len(set(names) | {item.id for item in fields.read(released["jsonl"], limit=3, seed=2).items})
    )
    again = unpack(tmp_path) / PATHS["slidevqa"]
    assert fields.read(again).digest == fields.read(released["slidevqa"]).digest
    again.write_text(again.read_text().replace("Oslo", "Bern"))
    assert fields.read(again).digest != fields.read(released["slidevqa"]).digest


def test_an_episode_is_a_question_at_every_step_behind_what_was_shown_and_done(folder):
    steps = [{"images": ["ok.png"], "answer": f"click {number}"} for number in range(3)]
    steps.insert(1, {"images": ["ok.png"], "text": "Wait."})
    path = lines(folder, {"id": "e", "goal": "Find it.", "steps": steps})
    first, _, last = fields.read(path, keep=2).items
    assert first.question == "Goal: Find it.\nAnswer with the next action.\nNext action:"
    assert (last.id, last.cluster, last.answers) == ("e/3", "e", ("click 2",))
    shown = ["action 1", "observation 2", "screenshot 3", "action 3", "screenshot 4"]
    assert [piece.label for piece in last.pieces] == shown
    assert last.pieces[0].content == Text("Action 1: click 0\n")
    assert len(fields.read(path).items[-1].pieces) == 7


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"images": ["no.png"]}, "images[0]: got 'no.png', which is no file; expected it in"),
        ({"images": ["broken.png"]}, "images[0]: broken.png: got no image that can be read"),
        ({"images": ["../secret.png"]}, "images[0]: got '../secret.png'; expected a name below the data's folder"),
        ({"images": []}, "images: got no images and no texts; expected at least one"),
        ({"question": " "}, "question: got ' '; expected a text"),
        ({"options": ["x", "y"], "answer": "C"}, "answer: got 'C'; expected one of the letters A, B"),
        ({"answr": "A"}, "answr: got a column of this name; expected one of id"),
        ({"id": "first"}, "id: got 'first', as d.jsonl:1 has; expected another"),
    ],
)
def test_a_record_is_refused_by_its_column_and_the_rest_goes_on(folder, change, reason):
    (folder / "broken.png").write_bytes(b"no image")
    path = lines(folder, GOOD | {"id": "first"}, GOOD | change, "{", GOOD)
    read = fields.read(path)
    assert [item.where for item in read.items] == ["d.jsonl:1", "d.jsonl:4"]
    assert [refusal.where for refusal in read.refusals] == ["d.jsonl:2", "d.jsonl:3"]
    assert read.refusals[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.jsonl", "", "of which no record can be read"),
        ("d.jsonl", '{"a": 1, "a": 2}', "line: got a name is there twice"),
        ("d.parquet", "PAR1 and no more", "got damaged Parquet"),
        ("d.jsonl", '{"who": 1}', "which fit none of the maps docvqa"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, content, reason):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=reason):
        fields.read(tmp_path / name)


@pytest.mark.parametrize(
    ("scorer", "prediction", "answers", "expected"),
    [
        ("exact_match", "The  Oslo.", ("oslo",), 1),
        ("token_f1", "the city of Oslo", ("Oslo city",), 2 * (2 / 3) / (2 / 3 + 1)),
        ("token_f1", "", ("the",), 1),
        ("token_f1", "Bern", ("Oslo", "Bern"), 1),
        ("anls", "osl0", ("Oslo",), 0.75),
        ("anls", "abcd", ("abxy",), 0.5),
        ("anls", "Bergen", ("Oslo",), 0),
        *(("choice", text, ("B",), 1) for text in ("B", "(B) green", "B. green", "The answer is B.", "It is green.")),
        *(("choice", text, ("B",), 0) for text in ("A", "red or green", "", "E")),
        ("choice", "A green one", ("B",), 1),
        ("action", '{"action_type": "click", "x": 500, "y": 620}', (CLICK,), 1),
        ("action", '{"action_type": "click", "x": 500, "y": 680}', (CLICK,), 0),
        ("action", '{"action_type": "long_press", "x": 500, "y": 500}', (CLICK,), 0),
        ("action", '{"action_type": "click"}', (CLICK,), 0),
        ("action", '```json\n{"action_type": "scroll", "direction": "up"}\n```', (SCROLL,), 1),
        ("action", '{"action_type": "scroll", "direction": "left"}', (SCROLL,), 0),
        ("action", '{"action_type": "type", "text": "oslo"}', ('{"action_type": "type", "text": "Oslo weather"}',), 1),
        ("action", '{"name": "open", "arguments": {"tab": 2}}', ('{"name": "open", "arguments": {"tab": 3}}',), 0),
        ("action", "press back", ("Press back",), 1),
        ("action", "no action", ('{"action_type": "wait"}',), 0),
    ],
)
def test_an_answer_scores_what_its_publisher_says(scorer, prediction, answers, expected):
    options = ("red", "green", "blue", "grey") if scorer == "choice" else ()
    item = Item("1", "1", (), "Q", answers, scorer, options=options)
    assert SCORERS[scorer].score(prediction, item) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------- answers and costs

ROOT = Path(__file__).parents[2]
MODEL, SCREENSHOTS = "documents/qwen2_5_vl", ROOT / "docs/pictures/screenshots"
QUESTION = "What is in it?"


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
    """Two images of one size and one of another, as pieces."""
    return [Piece(data.parent / f"{number}_0.png", f"page {number}") for number in (0, 3, 1)]


def asked(backbone, pieces, frame="chat", answers=("x",)):
    """A reader of one question behind a context."""
    setup = Setup(backbone, frame_of(backbone, frame), (), None, 6)
    item = Item("1", "1", tuple(pieces), QUESTION, answers)
    return AnswerReader(MeasuredContext(backbone, setup.frame, pieces), item, setup)


def answer(reader, name):
    return reader.read(serve(reader.context, parse(name), reader.question)[0])


@pytest.mark.usefixtures("highest_precision")
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "smolvlm"])
def test_the_reference_is_what_the_chat_template_makes_of_the_message(loaded, pages, family):
    """Positions, embeddings and greedy answer of one message with all images, though its pieces were formed alone."""
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


@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize(
    ("family", "least"), [("qwen2_5_vl", 1e-5), pytest.param("gemma3", 0, marks=pytest.mark.nightly)]
)
def test_a_first_piece_is_exact_and_a_patch_of_full_rank_mends_the_others(loaded, pages, family, least):
    """Gemma 3 has layers of two kinds, and is sure of its answers. Nothing precedes the first piece."""
    backbone = loaded(family)
    note = Piece(Text("Read this.Read this.Read."), "note")  # filled up to as many tokens as an image
    reader = asked(backbone, [*pages[:2], note], "plain", answers=())
    blind, patched = answer(reader, "blind"), answer(reader, "patch.rank=32")
    assert patched["agrees"]
    assert patched["kl"] < 1e-6
    assert blind["kl"] > least
    # KL once more: over the tokens of re-prefill's answer, each behind those before it.
    context, frame, logs = reader.context, reader.context.frame, []
    ids = [*ids_of(backbone, frame.before, QUESTION, frame.behind), *reader.answer[:-1]]
    tokens = embedded(backbone, {"input_ids": np.array([ids], np.int32)}).shift(np.int32(context.line.end))
    places = len(ids) - len(reader.answer) + np.minimum(np.arange(6), len(reader.answer) - 1)
    for cache in (context.reference, context.blind):
        logits = np.asarray(backbone.prefill(tokens, cache, logits=places[None]).logits, np.float64)
        logits = logits[0, : len(reader.answer)]
        logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    expected = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean()
    assert blind["kl"] == pytest.approx(expected, rel=1e-2, abs=1e-7)
    # Where the data has no answer, re-prefill's is right.
    assert answer(reader, "re-prefill")["score"] == 1
    for name, value in context.blind.items():
        exact = context.line.slices[0]
        np.testing.assert_allclose(value[:, :, exact], context.reference[name][:, :, exact], atol=1e-5)

    costs = serve(reader.context, parse("patch.rank=32"), reader.question)[1]
    features = [channel.features for channel in backbone.layout.channels]
    factors = numbers = 0
    for place in reader.context.places:
        piece = reader.context.line.pieces[place].size
        size = -(-piece // 8) * 8
        # Nothing precedes the first piece.
        stored = sum(min(32 * (size + width), size * width) for width in features) if place else 0
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


@pytest.mark.usefixtures("highest_precision")
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


# ------------------------------------------------------------------------------------------------------ other harnesses


@pytest.fixture(scope="module")
def backbone(loaded):
    return loaded("qwen2_5_vl")


def test_exact_reuse_answers_as_a_prefill_of_the_conversation(backbone):
    chat, texts = ReusedChat(backbone, approximate=False), []
    images = [np.random.default_rng(seed).integers(0, 256, (28, 28, 3), np.uint8) for seed in (2, 4)]
    for order in (images, images[::-1]):
        content = [*({"type": "image", "image": image} for image in order), {"type": "text", "text": "hello"}]
        messages, ids = [{"role": "system", "content": "look"}, {"role": "user", "content": content}], []
        prompt = backbone.embed(**backbone.chat(messages)).on_host()
        for _ in range(3):
            last = np.array([[prompt.embeddings.shape[1] - 1]])
            ids.append(int(np.asarray(backbone.prefill(prompt.pad(128), logits=last).logits).argmax()))
            token = backbone.embed(np.array([ids[-1:]])).shift(prompt.positions.max() + 1)
            prompt = joined_tokens([prompt, token.on_host()])
        texts.append(backbone.tokenizer.decode(ids, skip_special_tokens=False))
        assert chat.answer(messages, steps=3).text == texts[-1]
    assert len(set(texts)) == 2
    chat.close()


def test_messages_of_another_form_are_refused(backbone):
    word, link = {"type": "text", "text": "a"}, {"type": "image", "url": "https://x.org/a"}
    for messages, message in (
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "got roles"),
        ([{"role": "user", "content": [{"type": "image"}, word]}], "'image' with the fields"),
        ([{"role": "user", "content": [link, word]}], "x.org"),
    ):
        with pytest.raises(KVPatchError, match=message):
            ReusedChat(backbone).answer(messages)
