"""Sounds have the samples of their files and transformers' features, and prompts with them transformers' tokens."""

import io
import json
import shutil
import wave
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Audio, Video
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.inputs.processors import Settings
from kvpatch_jax.models.inputs.sounds import log_mel, read_sound, resampled, whisper_settings
from tests.goldens.load import GOLDENS, golden_arrays, golden_chat, golden_images, golden_prompt, write_chatting
from tests.goldens.redraw import draw_frames, draw_waves, standard_values
from tests.models.conftest import blank_features
from tests.shared.window_oracle import backbone_of

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
        out.writeframes(b"".join(int(n).to_bytes(width, "little", signed=width > 1) for n in samples.reshape(-1)))
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
    for content in (b"", b"no sound at all"):
        with pytest.raises(InputError, match="cannot be decoded"):
            read_sound(Audio(content), 16000)


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


def test_sounds_become_transformers_features():
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    extractor = Gemma4AudioFeatureExtractor(feature_size=16, return_attention_mask=True)
    gold = extractor(draw_waves(), sampling_rate=16000, return_tensors="np")
    audio: Any = FAMILIES["Gemma4ForConditionalGeneration"].audio
    settings = audio.settings(GOLDENS / "gemma4")
    found = audio.process([Audio(wave, rate=16000) for wave in draw_waves()], settings)
    np.testing.assert_array_equal(found["input_features_mask"], np.asarray(gold["input_features_mask"], bool))
    assert found["input_features"].dtype == np.float32
    assert np.abs(found["input_features"] - gold["input_features"]).max() <= 1e-5


def test_sounds_that_have_no_features_are_refused(tmp_path):
    with pytest.raises(InputError, match="expected more than 200"):
        log_mel(np.zeros(200, np.float32), whisper(), padded=False)
    assert log_mel(np.zeros(200, np.float32), whisper(), padded=True).shape == (80, 2)
    # What is longer than the settings' length is cut, where it is padded to that.
    config, samples = whisper(feature_size=20, chunk_length=1), sine("long", 20000) + np.float32(0.01)
    assert [log_mel(samples, config, padded).shape for padded in (True, False)] == [(20, 100), (20, 125)]
    for options, message in (({"dither": 0.1}, r"dither: got 0\.1"), ({"hop_length": 0}, "hop_length: got 0")):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
        with pytest.raises(ConfigError, match=message):
            whisper_settings(tmp_path)


# ------------------------------------------------------------------------------------------------------------ prompts


def test_prompts_that_do_not_fit_are_refused(tiny):
    backbone = tiny("qwen3_omni")
    cases = ("audio", "mixed", "video_with_audio")
    sound, inputs, joint = (golden_prompt(backbone, "qwen3_omni", case) for case in cases)
    heard, prompt, late = sound.pop("input_ids"), inputs.pop("input_ids"), joint.pop("input_ids").copy()
    mel, silent = sound["input_features"], sound | {"feature_attention_mask": np.zeros((1, 37), np.int32)}
    timeless = {name: value for name, value in inputs.items() if name != "second_per_grid_ts"}
    # A sound behind the video's frames instead of among them.
    late[0, np.flatnonzero(late[0] == 305)[0]] = 302
    for ids, arrays, message in (
        (np.delete(heard, np.flatnonzero(heard[0] == 305)[0], axis=1), sound, "audio placeholders; expected"),
        (heard, sound | {"input_features": mel[:, :8]}, "expected .sounds, 16, frames"),
        (prompt, timeless | {"features": blank_features(backbone, prompt)}, "second_per_grid_ts: got 0 values"),
        (heard[:, :2], silent, "expected enough for one token"),
        (late, joint | {"features": blank_features(backbone, late)}, "placeholders"),
    ):
        with pytest.raises(InputError, match=message):
            backbone.embed(ids, **arrays)


def test_starts_between_positions():
    """The fraction goes to the local positions, the canonical stays as it is; what is no number is refused."""
    chunk = kvp.make_chunk(backbone_of("mrope"), [[5, 6, 7]])
    placed = kvp.Placed(chunk, start=2.75)
    assert np.asarray(placed.start).tolist() == [2, 2, 2]
    assert np.asarray(placed.chunk.local)[:3, 0].tolist() == [0.75, 1.75, 2.75]
    assert placed.chunk.span == 3
    assert np.asarray(chunk.local)[:3, 0].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="start nan"):
        kvp.Placed(chunk, start=float("nan"))


def conversation(family, tmp_path):
    """The tiny checkpoint with the golden's tokenizer and template, and its messages with what they show."""
    gold, folder = golden_arrays(family, "chat"), GOLDENS / family
    directory = write_chatting(family, tmp_path)
    shutil.copy(folder / "video_preprocessor_config.json", directory)
    hum = (0.2 * np.sin(2 * np.pi * 500 * np.arange(23200) / 16000)).astype(np.float32)
    film = Video(GOLDENS / "omni.mkv", sound=True)
    shown = {"image": gold["image"], "video": film, "audio": Audio(hum, 16000)}
    fill = lambda part: part | {part["type"]: shown[part["type"]]} if part["type"] in shown else part
    said = golden_chat(family)
    messages = [message | {"content": [fill(part) for part in message["content"]]} for message in said["messages"]]
    return load(directory, angles="float32"), messages, gold, said["text"]


@pytest.mark.parametrize("family", ["qwen3_omni", pytest.param("qwen2_5_omni", marks=pytest.mark.nightly)])
def test_a_conversation_with_everything_is_transformers(family, tmp_path):
    """The rendered text, the ids with sound among frames, pixels and positions equal; log-mel features within 2e-5."""
    backbone, messages, gold, text = conversation(family, tmp_path)
    assert backbone.chat_template is not None
    assert backbone.chat_template.render(messages) == text
    prompt = backbone.chat(messages)
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(prompt[name][0], gold[name]), name
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "feature_attention_mask"):
        assert np.array_equal(prompt[name], gold[name]), name
    heard = gold["feature_attention_mask"][:, None].astype(bool)
    assert np.abs((prompt["input_features"] - gold["input_features"]) * heard).max() <= 2e-5
    assert np.array_equal(prompt["second_per_grid_ts"].astype(np.float32), gold["second_per_grid_ts"])

    silent = backbone.prepare([Video(GOLDENS / "omni.mkv")])
    assert set(np.unique(silent["input_ids"])) == {302, 303, 304}
    assert "input_features" not in silent
    assert np.array_equal(silent["pixel_values_videos"], gold["pixel_values_videos"])


@pytest.mark.nightly
def test_a_videos_sound_counts_for_the_identity_of_its_chunk(tmp_path):
    backbone = conversation("qwen3_omni", tmp_path)[0]
    items = [[Video(GOLDENS / "omni.mkv", sound=sound)] for sound in (False, True)]
    silent, heard = (kvp.make_chunk(backbone, item) for item in items)
    assert silent.id != heard.id
    assert heard.length > silent.length


def test_a_prompt_of_all_media_is_the_processors(tmp_path):
    said = json.loads((GOLDENS / "gemma4" / "media.json").read_text())
    image, (_, wave) = golden_images("gemma4", "one_image")[0], draw_waves()
    video, sound = Video(draw_frames("gemma4 video", 7, 24, 40), rate=0.1, frames=2), Audio(wave, rate=16000)
    items = ["Hear ", sound, " and see ", video, " and ", image, " now"]
    prompt = load(write_chatting("gemma4", tmp_path)).prepare(items)
    assert prompt["input_ids"][0].tolist() == said["input_ids"]
