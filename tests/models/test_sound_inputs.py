"""Sounds have the samples of their files and transformers' features, and prompts with them transformers' tokens."""

import functools
import io
import json
import wave
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.core import end_position, to_engine
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import FAMILIES, load, save
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.models.inputs.sounds import log_mel, read_sound, resampled, whisper_settings
from tests.goldens.load import (
    GOLDENS,
    golden_arrays,
    golden_chat,
    golden_images,
    golden_shapes,
    write_chatting,
    write_checkpoint,
)
from tests.goldens.redraw import draw_frames, standard_values
from tests.shared.tolerances import assert_close_to_largest

close = functools.partial(assert_close_to_largest, bar=2e-5)
BOTH = pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])

pytestmark = pytest.mark.usefixtures("highest_precision")


def whisper(**options):
    sizes = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 30}
    return Settings.of(sizes | options, "audio")


def wav(samples: np.ndarray, rate: int, width: int = 2) -> bytes:
    """A WAV file of whole numbers [samples, channels] in `width` bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(
            b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in samples.reshape(-1))
        )
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_a_wav_file(width):
    """Both channels' mean, as fractions of the format's range."""
    numbers = np.round(np.linspace(-0.9, 0.9, 40)[:, None] * 2 ** (8 * width - 1) * np.array([1, 0.5]))
    expected = (numbers / 2 ** (8 * width - 1)).mean(axis=1)
    found = read_sound(Audio(wav(numbers + (128 if width == 1 else 0), 16000, width)), 16000)
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("rate", [999, 768_001])
def test_a_rate_that_no_sound_has_is_refused_before_it_takes_room(rate):
    """A header may say anything: at the largest rate 34 GB would be asked for, at the least 16 000 numbers a sample."""
    content = bytearray(wav(np.zeros((400, 1)), 16000, 2))
    content[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(InputError, match=rf"got {rate} samples per second; expected 1000 to 768000"):
        read_sound(Audio(bytes(content)), 16000)


def test_another_format_is_read_by_pyav():
    import av

    samples = (np.sin(np.arange(4096) / 20) * 20000).astype(np.int16)
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    np.testing.assert_allclose(read_sound(Audio(file.getvalue()), 16000), samples / 2**15, atol=1e-7)
    with pytest.raises(InputError, match="cannot be decoded"):
        read_sound(Audio(b"no sound at all"), 16000)


@pytest.mark.parametrize(("own", "rate"), [(44100, 16000), (8000, 16000), (16000, 24000), (16000, 16000)])
def test_a_tone_keeps_its_frequency_at_another_rate(own, rate):
    """Away from its ends, where there is silence beside it, a tone is that of the other rate to 1e-6."""
    tone = lambda frequency, at: np.sin(2 * np.pi * frequency * np.arange(at) / at).astype(np.float32)
    found = resampled(tone(440, own), own, rate)
    assert found.shape == (rate,)
    inner = slice(rate // 10, -rate // 10)
    np.testing.assert_allclose(found[inner], tone(440, rate)[inner], atol=1e-5)
    if rate < own:
        assert np.abs(resampled(tone(9000, own), own, rate)[inner]).max() < 1e-3


# ----------------------------------------------------------------------------------------------------------- features


def sine(name, samples):
    times = np.arange(samples) / 16000
    noisy = 0.3 * np.sin(2 * np.pi * 440 * times) + 0.02 * standard_values(f"mel {name}", samples)
    return (noisy * (times < 0.2)).astype(np.float32)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("samples", [4837, 3200])
def test_log_mel_is_transformers(samples, padded):
    """Within 2e-5 of values between −1 and 2: what its own transforms by NumPy and by PyTorch are apart."""
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    how: dict[str, Any] = {"padding": "max_length"} if padded else {"padding": True, "truncation": False}
    extractor, wave = WhisperFeatureExtractor(feature_size=128, chunk_length=2), sine("short", samples)
    out = extractor(wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np", **how)
    expected = out["input_features"][0, :, : int(out["attention_mask"].sum())]
    found = log_mel(wave, whisper(feature_size=128, chunk_length=2), padded)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-5


def waves():
    """The golden's sounds, computed again."""
    found = []
    for number, seconds in enumerate((0.93, 0.31)):
        size = int(seconds * 16000)
        times = np.arange(size) / 16000
        noise = standard_values(f"gemma4 sound {number}", size)
        found.append((0.3 * np.sin(2 * np.pi * (300 + 900 * times) * times) + 0.05 * noise).astype(np.float32))
    return found


def test_sounds_become_transformers_features():
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    extractor = Gemma4AudioFeatureExtractor(feature_size=16, return_attention_mask=True)
    gold = extractor(waves(), sampling_rate=16000, return_tensors="np")
    audio = FAMILIES["Gemma4ForConditionalGeneration"].audio
    settings = audio.settings(GOLDENS / "gemma4")
    found = audio.process([Audio(wave, rate=16000) for wave in waves()], settings)
    np.testing.assert_array_equal(found["input_features_mask"], np.asarray(gold["input_features_mask"], bool))
    assert found["input_features"].dtype == np.float32
    assert np.abs(found["input_features"] - gold["input_features"]).max() <= 1e-5


def test_sounds_that_have_no_features_are_refused(tmp_path):
    for samples in (b"", np.full(500, np.nan, np.float32)):
        with pytest.raises(InputError, match=r"cannot be decoded|not finite"):
            read_sound(Audio(samples, None if isinstance(samples, bytes) else 16000), 16000)
    with pytest.raises(InputError, match="expected more than 200"):
        log_mel(np.zeros(200, np.float32), whisper(), padded=False)
    assert log_mel(np.zeros(200, np.float32), whisper(), padded=True).shape == (80, 2)
    for options, message in (({"dither": 0.1}, r"dither: got 0\.1"), ({"hop_length": 0}, "hop_length: got 0")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
        with pytest.raises(ConfigError, match=message):
            whisper_settings(tmp_path)


def test_audio_beyond_the_settings_length_is_cut():
    config = whisper(feature_size=20, chunk_length=1)
    samples = sine("long", 20000) + np.float32(0.01)
    assert log_mel(samples, config, padded=True).shape == (20, 100)
    assert log_mel(samples, config, padded=False).shape == (20, 125)


@pytest.mark.nightly
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


# ------------------------------------------------------------------------------------------------------------ prompts


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
    parts = [[[5, 6, 7]], [Video(frames, rate=3.0)], [[8, 9]], [Audio(tone(0.7), 16000)], [[10, 11]]]
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


@pytest.mark.nightly
def test_a_session_of_videos_and_sounds_is_one_prefill(tiny):
    """Its chunks start at whole positions, the next one behind where a video ends between two."""
    backbone = tiny("qwen3_omni")
    frames = np.random.default_rng(1).integers(0, 256, (6, 16, 24, 3), np.uint8)
    items = [[5, 6, 7], Video(frames, rate=3.0), Audio(tone(0.75), 16000)]
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


def conversation(family, tmp_path, **options):
    """The tiny checkpoint with the golden's tokenizer and template, and its messages with what they show."""
    gold, said = golden_arrays(family, "chat"), golden_chat(family)
    directory = write_chatting(family, tmp_path / family)
    (directory / "video_preprocessor_config.json").write_text(
        (GOLDENS / family / "video_preprocessor_config.json").read_text()
    )
    shown = {"image": gold["image"], "video": Video(GOLDENS / "omni.mkv", sound=True, **options)}
    hum = 0.2 * np.sin(2 * np.pi * 500 * np.arange(23200) / 16000)
    shown["audio"] = Audio(hum.astype(np.float32), 16000)
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


@pytest.mark.nightly
@BOTH
def test_a_video_without_its_sound_is_its_frames_alone(family, tmp_path):
    backbone, _, gold, _ = conversation(family, tmp_path)
    silent = backbone.prepare([Video(GOLDENS / "omni.mkv")])
    assert set(np.unique(silent["input_ids"])) == {302, 303, 304}
    assert "input_features" not in silent
    assert np.array_equal(silent["pixel_values_videos"], gold["pixel_values_videos"])

    # The sound counts for who a chunk is.
    items = [[Video(GOLDENS / "omni.mkv", sound=sound)] for sound in (False, True)]
    silent, heard = (kvp.make_chunk(backbone, item) for item in items)
    assert silent.id != heard.id
    assert heard.length > silent.length


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    return load(write_chatting("gemma4", tmp_path_factory.mktemp("small")), angles="float32")


def talk():
    """The golden's conversation as items."""
    image = golden_images("gemma4", "one_image")[0]
    video = Video(draw_frames("gemma4 video", 7, 24, 40), rate=0.1, frames=2)
    sound = Audio(waves()[1], rate=16000)
    return ["Hear ", sound, " and see ", video, " and ", image, " now"]


@pytest.mark.nightly
def test_a_prompt_of_all_media_is_the_processors(gemma4):
    said = json.loads((GOLDENS / "gemma4" / "media.json").read_text())
    prompt = gemma4.prepare(talk())
    assert prompt["input_ids"][0].tolist() == said["input_ids"]
    tokens = gemma4.embed(**prompt)
    assert tokens.embeddings.shape[:2] == prompt["input_ids"].shape
    features = gemma4.encode(**prompt)
    np.testing.assert_array_equal(gemma4.embed(**prompt, features=features).embeddings, tokens.embeddings)


def test_a_chat_with_a_sound_and_a_video(gemma4):
    """What the template writes once becomes the processor's runs."""
    _, sound, _, video, *_ = talk()
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}{% endfor %}{% endfor %}"
    )
    object.__setattr__(gemma4.chat_template, "source", template)
    content = [{"type": "audio", "audio": sound}, {"type": "video", "video": video}, {"type": "text", "text": "?"}]
    prompt = gemma4.chat([{"role": "user", "content": content}])
    expected = gemma4.prepare([sound, video, "?"])
    np.testing.assert_array_equal(prompt["input_ids"], expected["input_ids"])


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
