"""Qwen2.5-Omni's and Qwen3-Omni's thinkers against transformers: images, videos, sounds, and all of them mixed.

By default a video with its sound (and an image), the others marked slow.
"""

import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvpatch_jax as kvp
from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.core import Buckets, end_position, relocate, to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.families.qwen import QWEN_IMAGES
from kvpatch_jax.models.inputs.processors import process_images
from tests.goldens.load import GOLDENS, golden_arrays, write_checkpoint
from tests.goldens.redraw import standard_values
from tests.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)
CASES = {
    "qwen2_5_omni": ("video_with_audio", "mixed", "audio", "one_image", "text"),
    "qwen3_omni": ("video_with_audio", "mixed", "audio", "long_audio", "one_image", "text"),
}
INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    *("input_features", "feature_attention_mask"),
)
BOTH = pytest.mark.parametrize("family", CASES)
SLOW = pytest.mark.slow
ASKED = pytest.mark.parametrize("family", ["qwen3_omni"])
"""The family with fractional positions."""

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    return functools.cache(
        lambda family: load(write_checkpoint(family, tmp_path_factory.mktemp(family)), angles="float32")
    )


@functools.cache
def arrays_of(family, case):
    """A golden, with what it leaves out: pixels of its images, and drawn pixels and features."""
    gold = golden_arrays(family, case)
    images = [gold[name] for name in sorted(gold) if name.startswith("image.")]
    if images:
        gold |= process_images(images, QWEN_IMAGES(GOLDENS / family))

    def draw(name, *shape):
        return standard_values(f"{case} {name}", int(np.prod(shape))).reshape(shape).astype(np.float32)

    if "video_grid_thw" in gold:
        counts = gold["video_grid_thw"].prod(axis=1).tolist()
        videos = [draw(f"video {number}", count, 96) for number, count in enumerate(counts, start=1)]
        gold["pixel_values_videos"] = np.concatenate(videos)
    if "feature_attention_mask" in gold:
        mask = gold["feature_attention_mask"]
        gold["input_features"] = np.zeros((len(mask), 16, mask.shape[1]), np.float32)
        for number, frames in enumerate(mask.sum(axis=1).tolist()):
            gold["input_features"][number, :, :frames] = draw(f"audio {number}", 16, frames)
    return gold


def inputs_of(gold):
    return {name: gold[name] for name in INPUTS if name in gold}


def embedded(backbone, gold, **changes):
    return backbone.embed(gold["input_ids"][None], **inputs_of(gold) | changes)


def check_forward(backbone, gold):
    tokens = embedded(backbone, gold)
    assert np.array_equal(tokens.positions[0], gold["position_ids"])
    assert np.asarray(tokens.positions).dtype == gold["position_ids"].dtype
    close(tokens.embeddings[0], gold["inputs_embeds"], "embeddings")
    layers = backbone.layout.layers
    out = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    rows = gold["rows"]
    for layer in range(layers):
        close(out.hidden[layer + 1][0, rows], gold["hidden"][layer], f"hidden {layer}")
    close(out.kv["k"][:, 0, rows], gold["k_phase_free"], "phase-free keys")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel in engine:
        close(engine[channel][:, 0, rows], gold[channel], f"cached {channel}")
    close(out.logits[0, rows], gold["logits"], "logits")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in CASES.items() for case in cases])
def test_forward_equals_transformers(backbones, family, case):
    check_forward(backbones(family), arrays_of(family, case))


@SLOW
@BOTH
def test_greedy_tokens_equal_transformers(backbones, family):
    gold = arrays_of(family, "one_image")
    generated = backbones(family).generate(embedded(backbones(family), gold), len(gold["decode_tokens"]))
    assert np.array_equal(generated[0], gold["decode_tokens"])


@SLOW
@BOTH
def test_padding_to_buckets_changes_nothing(family, backbones, tmp_path):
    gold, plain = arrays_of(family, "mixed"), backbones(family)
    padded = load(write_checkpoint(family, tmp_path), angles="float32", buckets=Buckets())
    expected, found = (embedded(backbone, gold) for backbone in (plain, padded))
    close(found.embeddings, expected.embeddings, "embeddings")
    close(padded.prefill(found).logits, plain.prefill(expected).logits, "logits")


@pytest.mark.slow
@ASKED
def test_kept_features_are_the_same(family, backbones):
    """What `encode` gives stands for pixels and sounds, deepstack features and all."""
    backbone, gold = backbones(family), arrays_of(family, "mixed")
    features = backbone.encode(gold["input_ids"][None], **inputs_of(gold))
    assert len(features) == (3 if family == "qwen3_omni" else 1)
    again, once = embedded(backbone, gold, features=features), embedded(backbone, gold)
    jax.tree.map(np.testing.assert_array_equal, again, once)
    if family == "qwen3_omni":
        sounds = gold["input_ids"] == 305
        assert not np.asarray(once.deepstack)[0, sounds].any()
        assert np.asarray(once.deepstack)[0, gold["input_ids"] == 302].all()


@pytest.mark.slow
@ASKED
def test_a_sound_is_heard_as_if_it_were_alone(family, backbones):
    """Beside a longer one too: transformers pads both to one length, which shows in the last token of Qwen3-Omni's."""
    backbone, gold = backbones(family), arrays_of(family, "audio")
    mel, frames = gold["input_features"], gold["input_features"].shape[2]
    alone = backbone.encode(gold["input_ids"][None], **inputs_of(gold))[0]
    longer = np.concatenate(
        [np.pad(mel, ((0, 0), (0, 0), (0, 150))), np.ones((1, mel.shape[1], frames + 150), np.float32)]
    )
    mask = np.arange(frames + 150) < np.array([[frames], [frames + 150]])
    ids = np.concatenate([gold["input_ids"], np.full(backbone.config.audio.tokens(frames + 150), 305, np.int32)])
    both = backbone.encode(ids[None], input_features=longer, feature_attention_mask=mask.astype(np.int32))[0]
    close(both[: len(alone)], alone, "beside another")


# ------------------------------------------------------------------------------------------------------- files


def released(family, directory, prefix="thinker.", config="config_release.json"):
    """The tiny checkpoint as a full release: the thinker's tensors among those of a talker and a vocoder."""
    write_checkpoint(family, directory, config)
    path = directory / "model.safetensors"
    others = ("talker.model.layers.0.self_attn.q_proj.weight", "token2wav.proj.weight", "code2wav.decoder.0.bias")
    tensors = {f"{prefix}{name}": value for name, value in load_file(path).items()}
    save_file(tensors | {name: np.ones((2, 2), np.float32) for name in others}, path)
    return directory


@pytest.mark.slow
@BOTH
def test_a_full_release_is_its_thinker(family, backbones, tmp_path):
    """Nested configuration, `thinker.` before the names, a talker beside it: the same model, written as a thinker."""
    plain, full = backbones(family), load(released(family, tmp_path / "full"), angles="float32")
    jax.tree.map(np.testing.assert_array_equal, full.parameters, plain.parameters)
    for part in ("text", "vision", "audio", "family", "tokens_per_second", "audio_end_token"):
        assert getattr(full.config, part) == getattr(plain.config, part), part

    again = load(save(full, tmp_path / "saved"), angles="float32")
    assert again.fingerprint == full.fingerprint
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    unread = {"audio_tower.audio_bos_eos_token.weight"}
    assert names == set(json.loads((GOLDENS / family / "shapes.json").read_text())) - unread
    assert again.audio_config == full.audio_config == plain.audio_config


@SLOW
@BOTH
def test_names_of_transformers_modules(family, backbones, tmp_path):
    write_checkpoint(family, tmp_path)
    path = tmp_path / "model.safetensors"
    words = {"model": "model.language_model", "visual": "model.visual", "audio_tower": "model.audio_tower"}

    def theirs(name):
        first, _, rest = name.partition(".")
        return f"{words.get(first, first)}.{rest}"

    save_file({theirs(name): value for name, value in load_file(path).items()}, path)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).parameters, backbones(family).parameters)


# ----------------------------------------------------------------------------------------------------- prompts


def test_prompts_that_do_not_fit_are_refused(backbones):
    backbone, gold = backbones("qwen3_omni"), arrays_of("qwen3_omni", "mixed")
    ids, inputs = gold["input_ids"][None], inputs_of(gold)
    sounds = np.flatnonzero(ids[0] == 305)
    with pytest.raises(InputError, match="audio placeholders; expected"):
        backbone.embed(np.delete(ids, sounds[0], axis=1), **inputs)
    with pytest.raises(InputError, match=r"expected .sounds, 16, frames"):
        backbone.embed(ids, **inputs | {"input_features": gold["input_features"][:, :8]})
    with pytest.raises(InputError, match="second_per_grid_ts: got 0 values"):
        backbone.embed(ids, **{name: value for name, value in inputs.items() if name != "second_per_grid_ts"})
    silent = {"input_features": gold["input_features"][:1], "feature_attention_mask": np.zeros((1, 121), np.int32)}
    with pytest.raises(InputError, match="expected enough for one token"):
        backbone.embed(ids[:, :2], **silent)
    # A sound behind the video's frames instead of among them.
    joint = arrays_of("qwen3_omni", "video_with_audio")
    mixed = joint["input_ids"].copy()
    first = int(np.flatnonzero(mixed == 305)[0])
    mixed[first] = 302
    with pytest.raises(InputError, match="placeholders"):
        backbone.embed(mixed[None], **inputs_of(joint))


def tone(seconds, name=0):
    times = np.arange(int(16000 * seconds)) / 16000
    return (0.3 * np.sin(2 * np.pi * (300 + 50 * name) * times)).astype(np.float32)


@pytest.mark.slow
@ASKED
def test_sounds_and_videos_in_prompts(family, backbones):
    """A prompt of items is the prompt of the arrays that they become, one placeholder a feature."""
    backbone = backbones(family)
    frames = np.random.default_rng(0).integers(0, 256, (6, 16, 24, 3), np.uint8)
    items = [[5, 6], kvp.Audio(tone(0.9), 16000), [7], kvp.Video(frames, rate=3.0), [8], kvp.Audio(tone(1.3, 1), 16000)]
    prompt = backbone.prepare(items)
    ids, mask = prompt["input_ids"][0], prompt["feature_attention_mask"]
    assert mask.sum(axis=1).tolist() == [90, 130]
    assert ids[2] == 306
    assert ids[-1] == 307
    assert (ids == 305).sum() == sum(backbone.config.audio.tokens(count) for count in (90, 130))
    assert prompt["second_per_grid_ts"].tolist() == [np.float32(2 / 3)]

    tokens = backbone.embed(**prompt)
    features = backbone.encode(**prompt)[0]
    pads = np.isin(ids, (302, 305))
    close(tokens.embeddings[0, pads], features, "features in the prompt's order")
    assert backbone.generate(tokens, 2).shape == (1, 2)

    # Whole positions are integers in the one family, and none are in the other.
    times = np.asarray(prompt["position_ids"])[0, ids == 302, 0]
    step = backbone.config.tokens_per_second * np.float32(2 / 3)
    assert times.max() - times.min() == (int(2 * step) if family == "qwen2_5_omni" else pytest.approx(2 * step))


# --------------------------------------------------------------------------------------------------- relocation


@pytest.mark.slow
@ASKED
def test_relocation_of_videos_and_sounds(family, backbones):
    """Forwards at p and p + δ on all axes have the same phase-free KV, also where p and δ are no whole numbers."""
    backbone, gold = backbones(family), arrays_of(family, "mixed")
    tokens = embedded(backbone, gold)
    here = backbone.prefill(tokens, logits="all")
    for offset in (37, 1000, 40.6875):
        places = np.asarray(tokens.positions, np.float32) + np.float32(offset)
        there = backbone.prefill(tokens._replace(positions=places), logits="all")
        for channel, value in there.kv.items():
            close(here.kv[channel], value, f"phase-free {channel} at {offset}")
        close(here.logits, there.logits, f"logits at {offset}")
        engine = to_engine(backbone.layout, here.kv, tokens.positions, 0)
        moved = relocate(backbone.layout, engine, tokens.positions, places)
        forward = to_engine(backbone.layout, there.kv, places, 0)
        close(moved["k"], forward["k"], f"moved to {offset}")


@pytest.mark.slow
@ASKED
def test_chunks_placed_one_behind_the_other_have_the_positions_of_the_whole(family, backbones):
    """A prompt cut into chunks: each behind the last position of the one before, which may be no whole number."""
    backbone = backbones(family)
    frames = np.random.default_rng(1).integers(0, 256, (6, 16, 24, 3), np.uint8)
    parts = [[[5, 6, 7]], [kvp.Video(frames, rate=3.0)], [[8, 9]], [kvp.Audio(tone(0.7), 16000)], [[10, 11]]]
    whole = np.asarray(backbone.prepare([item for part in parts for item in part])["position_ids"])[0]
    assert (whole % 1 != 0).any() == (family == "qwen3_omni")

    start, cursor = 0.0, 0
    for part in parts:
        chunk = kvp.make_chunk(backbone, part)
        placed = kvp.Placed(chunk, start=start if start % 1 else int(start))
        there = whole[cursor : cursor + chunk.length]
        np.testing.assert_allclose(placed.start + np.asarray(placed.chunk.local), there, rtol=0, atol=1e-5)
        engine = placed.apply()
        expected = to_engine(backbone.layout, chunk.kv, there, 0)
        for channel, value in expected.items():
            close(engine[channel], value, channel)

        moved = backbone.embed(**backbone.prepare(part)).shift(start if start % 1 else int(start))
        np.testing.assert_allclose(np.asarray(moved.positions)[0], there, rtol=0, atol=1e-5)
        start, cursor = start + float(end_position(np.asarray(chunk.local)[None])[0]) + 1, cursor + chunk.length
    assert cursor == len(whole)
    assert bool(start % 1) == (family == "qwen3_omni")


@SLOW
def test_a_session_of_videos_and_sounds_is_one_prefill(backbones):
    """Its chunks start at whole positions, the next one behind where a video ends between two."""
    backbone = backbones("qwen3_omni")
    frames = np.random.default_rng(1).integers(0, 256, (6, 16, 24, 3), np.uint8)
    items = [[5, 6, 7], kvp.Video(frames, rate=3.0), kvp.Audio(tone(0.75), 16000)]
    with kvp.Session(backbone) as session:
        for item in items:
            session.add(item)
        answer = tuple(session.ask([9, 10, 11], steps=6).ids)

    parts, start = [], 0
    for item in [*items, [9, 10, 11]]:
        tokens = backbone.embed(**backbone.prepare([item]))
        parts.append(tokens.shift(start))
        start += int(np.floor(end_position(np.asarray(tokens.positions))[0])) + 1
    assert (np.asarray(parts[1].positions) % 1 != 0).any()
    assert answer == tuple(np.asarray(backbone.generate(joined_tokens(parts), 6))[0].tolist())


def test_starts_between_positions(backbones):
    """The fraction goes to the local positions, the canonical stays as it is; what is no number is refused."""
    chunk = kvp.make_chunk(backbones("qwen3_omni"), [[5, 6, 7]])
    placed = kvp.Placed(chunk, start=2.75)
    assert np.asarray(placed.start).tolist() == [2, 2, 2]
    assert np.asarray(placed.chunk.local)[:, 0].tolist() == [0.75, 1.75, 2.75]
    assert placed.chunk.span == 3
    assert np.asarray(chunk.local)[:, 0].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="start nan"):
        kvp.Placed(chunk, start=float("nan"))


# -------------------------------------------------------------------------------------------------------- chat


def conversation(family, tmp_path, **options):
    """The tiny checkpoint with the golden's tokenizer and template, and its messages with what they show."""
    gold, said = golden_arrays(family, "chat"), json.loads((GOLDENS / family / "chat.json").read_text())
    directory = write_checkpoint(family, tmp_path / family)
    (directory / "tokenizer.json").write_text(json.dumps(said["tokenizer"]))
    (directory / "chat_template.jinja").write_text(said["template"])
    (directory / "video_preprocessor_config.json").write_text(
        (GOLDENS / family / "video_preprocessor_config.json").read_text()
    )
    shown = {"image": gold["image"], "video": kvp.Video(GOLDENS / "omni.mkv", sound=True, **options)}
    hum = 0.2 * np.sin(2 * np.pi * 500 * np.arange(23200) / 16000)
    shown["audio"] = kvp.Audio(hum.astype(np.float32), 16000)
    messages = []
    for message in said["messages"]:
        parts = [
            part | {part["type"]: shown[part["type"]]} if part["type"] in shown else part for part in message["content"]
        ]
        messages.append(message | {"content": parts})
    return load(directory, angles="float32"), messages, gold, said


@pytest.mark.slow
@ASKED
def test_a_conversation_with_everything_is_transformers(family, tmp_path):
    """The rendered text, the ids with sound among frames, pixels and positions equal; log-mel features within 2e-5."""
    pytest.importorskip("av")
    backbone, messages, gold, said = conversation(family, tmp_path)
    assert backbone.chat_template is not None
    assert backbone.chat_template.render(messages) == said["text"]
    prompt = backbone.chat(messages)
    assert np.array_equal(prompt["input_ids"][0], gold["input_ids"])
    assert np.array_equal(prompt["position_ids"][0], gold["position_ids"])
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "feature_attention_mask"):
        assert np.array_equal(prompt[name], gold[name]), name
    heard = gold["feature_attention_mask"][:, None].astype(bool)
    assert np.abs((prompt["input_features"] - gold["input_features"]) * heard).max() <= 2e-5
    assert np.array_equal(
        prompt["second_per_grid_ts"].astype(np.float32), gold["second_per_grid_ts"].astype(np.float32)
    )

    tokens = backbone.embed(**prompt)
    assert np.isfinite(np.asarray(backbone.prefill(tokens).logits)).all()


@SLOW
@BOTH
def test_a_video_without_its_sound_is_its_frames_alone(family, tmp_path):
    pytest.importorskip("av")
    backbone, _, gold, _ = conversation(family, tmp_path)
    silent = backbone.prepare([kvp.Video(GOLDENS / "omni.mkv")])
    assert set(np.unique(silent["input_ids"])) == {302, 303, 304}
    assert "input_features" not in silent
    assert np.array_equal(silent["pixel_values_videos"], gold["pixel_values_videos"])

    # The sound counts for who a chunk is.
    items = [[kvp.Video(GOLDENS / "omni.mkv", sound=sound)] for sound in (False, True)]
    silent, heard = (kvp.make_chunk(backbone, item) for item in items)
    assert silent.id != heard.id
    assert heard.length > silent.length


def test_sounds_of_videos_where_there_are_none_are_refused(tmp_path, unchecked):
    with pytest.raises(InputError, match="sound of a file alone"):
        kvp.Video(np.zeros((2, 8, 8, 3), np.uint8), rate=1.0, sound=True).read()
    with pytest.raises(InputError, match="expected true or false"):
        kvp.Video(tmp_path / "a.mkv", sound=1)  # type: ignore[arg-type]
    backbone = load(write_checkpoint("qwen2_5_vl", tmp_path))
    with pytest.raises(InputError, match="which hears none"):
        backbone.prepare([kvp.Video(GOLDENS / "omni.mkv", sound=True)])
