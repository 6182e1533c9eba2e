"""Qwen2.5-Omni's and Qwen3-Omni's thinkers beside what `test_parity.py` and `test_protocol.py` cover."""

import functools

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvpatch_jax as kvp
from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.core import end_position, to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load, save
from tests.goldens.load import (
    GOLDENS,
    golden_arrays,
    golden_chat,
    golden_shapes,
    write_chatting,
    write_checkpoint,
)
from tests.shared.tolerances import assert_close_to_largest

close = functools.partial(assert_close_to_largest, bar=2e-5)
BOTH = pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
SLOW = pytest.mark.nightly

pytestmark = pytest.mark.usefixtures("highest_precision")


@SLOW
def test_a_sound_is_heard_as_if_it_were_alone(golden):
    """Beside a longer one too: transformers pads both to one length, which shows in the last token of Qwen3-Omni's."""
    backbone, _, inputs, _ = given = golden("qwen3_omni", "audio")
    mel, frames = inputs["input_features"], inputs["input_features"].shape[2]
    alone = backbone.encode(given.ids, **inputs)[0]
    longer = np.concatenate(
        [np.pad(mel, ((0, 0), (0, 0), (0, 150))), np.ones((1, mel.shape[1], frames + 150), np.float32)]
    )
    mask = np.arange(frames + 150) < np.array([[frames], [frames + 150]])
    more = np.full((1, backbone.config.audio.tokens(frames + 150)), 305, np.int32)
    ids = np.concatenate([given.ids, more], axis=1)
    both = backbone.encode(ids, input_features=longer, feature_attention_mask=mask.astype(np.int32))[0]
    close(both[: len(alone)], alone, "beside another")


# ------------------------------------------------------------------------------------------------------- files


def released(family, directory):
    """The tiny checkpoint as a full release: the thinker's tensors among those of a talker and a vocoder."""
    write_checkpoint(family, directory)
    (directory / "config.json").write_text((GOLDENS / family / "config_release.json").read_text())
    path = directory / "model.safetensors"
    others = ("talker.model.layers.0.self_attn.q_proj.weight", "token2wav.proj.weight", "code2wav.decoder.0.bias")
    tensors = {f"thinker.{name}": value for name, value in load_file(path).items()}
    save_file(tensors | {name: np.ones((2, 2), np.float32) for name in others}, path)
    return directory


@pytest.mark.nightly
@BOTH
def test_a_full_release_is_its_thinker(family, tiny, tmp_path):
    """Nested configuration, `thinker.` before the names, a talker beside it: the same model, written as a thinker."""
    plain, full = tiny(family), load(released(family, tmp_path / "full"), angles="float32")
    jax.tree.map(np.testing.assert_array_equal, full.parameters, plain.parameters)
    for part in ("text", "vision", "audio", "family", "tokens_per_second", "audio_end_token"):
        assert getattr(full.config, part) == getattr(plain.config, part), part

    again = load(save(full, tmp_path / "saved"), angles="float32")
    assert again.fingerprint == full.fingerprint
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    unread = {"audio_tower.audio_bos_eos_token.weight"}
    assert names == set(golden_shapes(family)) - unread
    assert again.audio_config == full.audio_config == plain.audio_config


# ----------------------------------------------------------------------------------------------------- prompts


def test_prompts_that_do_not_fit_are_refused(golden):
    backbone, _, inputs, _ = given = golden("qwen3_omni", "mixed")
    ids = given.ids
    sounds = np.flatnonzero(ids[0] == 305)
    with pytest.raises(InputError, match="audio placeholders; expected"):
        backbone.embed(np.delete(ids, sounds[0], axis=1), **inputs)
    with pytest.raises(InputError, match=r"expected .sounds, 16, frames"):
        backbone.embed(ids, **inputs | {"input_features": inputs["input_features"][:, :8]})
    with pytest.raises(InputError, match="second_per_grid_ts: got 0 values"):
        backbone.embed(ids, **{name: value for name, value in inputs.items() if name != "second_per_grid_ts"})
    silent = {"input_features": inputs["input_features"][:1], "feature_attention_mask": np.zeros((1, 121), np.int32)}
    with pytest.raises(InputError, match="expected enough for one token"):
        backbone.embed(ids[:, :2], **silent)
    # A sound behind the video's frames instead of among them.
    joint = golden("qwen3_omni", "video_with_audio")
    mixed = joint.ids[0].copy()
    first = int(np.flatnonzero(mixed == 305)[0])
    mixed[first] = 302
    with pytest.raises(InputError, match="placeholders"):
        backbone.embed(mixed[None], **joint.inputs)


def tone(seconds, name=0):
    times = np.arange(int(16000 * seconds)) / 16000
    return (0.3 * np.sin(2 * np.pi * (300 + 50 * name) * times)).astype(np.float32)


@pytest.mark.nightly
def test_chunks_placed_one_behind_the_other_have_the_positions_of_the_whole(tiny):
    """A prompt cut into chunks: each behind the last position of the one before, which may be no whole number."""
    backbone = tiny("qwen3_omni")
    frames = np.random.default_rng(1).integers(0, 256, (6, 16, 24, 3), np.uint8)
    parts = [[[5, 6, 7]], [kvp.Video(frames, rate=3.0)], [[8, 9]], [kvp.Audio(tone(0.7), 16000)], [[10, 11]]]
    whole = np.asarray(backbone.prepare([item for part in parts for item in part])["position_ids"])[0]
    assert (whole % 1 != 0).any()

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
    assert bool(start % 1)


@SLOW
def test_a_session_of_videos_and_sounds_is_one_prefill(tiny):
    """Its chunks start at whole positions, the next one behind where a video ends between two."""
    backbone = tiny("qwen3_omni")
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


def test_starts_between_positions(tiny):
    """The fraction goes to the local positions, the canonical stays as it is; what is no number is refused."""
    chunk = kvp.make_chunk(tiny("qwen3_omni"), [[5, 6, 7]])
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
    gold, said = golden_arrays(family, "chat"), golden_chat(family)
    directory = write_chatting(family, tmp_path / family)
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


@pytest.mark.nightly
@BOTH
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
