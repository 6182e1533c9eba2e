"""Images and video frames become, bit for bit, what transformers' processors make; bad ones are refused."""

import fractions
import functools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import Video
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import FAMILIES, Buckets, load
from kvpatch_jax.models.inputs.processors import CONFIG_FILE, PROCESSOR_FILE, Settings, process_images
from kvpatch_jax.models.inputs.video_frames import Clip, Stream, clips_of
from kvpatch_jax.models.inputs.videos import (
    process_glm_videos,
    sample_evenly,
    sample_glm4,
    sample_glm46,
    sample_internvl,
    sample_qwen2,
    sample_qwen3,
    sample_smolvlm,
)
from tests.goldens.load import GOLDENS, golden_arrays, golden_images
from tests.goldens.redraw import digest, draw_frames, standard_values
from tests.goldens.table import FAMILIES as GOLDEN_FAMILIES
from tests.models.glm_settings import GLM_FRAMES, KINDS, glm_settings
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest

# --------------------------------------------------------------------------------------------------------------- images


VISIONS = {name: family.vision for name, family in FAMILIES.items() if family.vision is not None}
QWEN = "Qwen2_5_VLForConditionalGeneration"


def settings_of(directory, architecture=QWEN, **options):
    (directory / CONFIG_FILE).write_text(json.dumps(options))
    return VISIONS[architecture].settings(directory)


def tiny_settings():
    return VISIONS[QWEN].settings(GOLDENS / "qwen2_5_vl")


def picture(height, width, channels=3):
    values = standard_values("picture", height * width * channels).reshape(height, width, channels)
    return np.clip(128 + 60 * values, 0, 255).astype(np.uint8)


MODES = ("L", "1", "P", "CMYK", "YCbCr", "HSV")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (23, 37), (300, 500), (31, 6), (3, 3), (1, 40), *MODES])
def test_pixels_are_transformers_bit_for_bit(shape, own, tmp_path):
    """Of a file, of its bytes and of a PIL image, with a directory's settings and the class's own."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = Image.fromarray(picture(24, 40)).convert(shape) if shape in MODES else Image.fromarray(picture(*shape))
    settings = settings_of(tmp_path, do_resize=True) if own else tiny_settings()
    theirs = Qwen2VLImageProcessorPil() if own else Qwen2VLImageProcessorPil.from_pretrained(GOLDENS / "qwen2_5_vl")
    expected = theirs([image.convert("RGB")], return_tensors="np", input_data_format="channels_last")
    path = tmp_path / "image.tiff"
    image.save(path) if image.mode != "HSV" else image.convert("RGB").save(path)
    for source in (path, path.read_bytes(), image):
        out = process_images([source], settings)
        for name, kind in (("pixel_values", np.float32), ("image_grid_thw", np.int32)):
            np.testing.assert_array_equal(out[name], expected[name])
            assert out[name].dtype == kind


SIDES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        ("CLIP", {}, (15, 33)),
        ("CLIP", {"do_resize": False}, (9, 33)),
        ("CLIP", {"size": {"shortest_edge": 13}}, (15, 33)),
        ("Llava", {"do_pad": True}, (15, 34)),
        ("Llava", {}, (31, 15)),
        ("Siglip", {"size": {"height": 16, "width": 16}}, (31, 15)),
    ],
)
def test_settings_and_class_are_those_that_a_directory_names(kind, options, size, tmp_path):
    """Left-out steps, exact sizes, crops larger than the image, LLaVA's own padding to a square."""
    import transformers
    from PIL import Image

    own = {**SIDES, **options} if kind != "Siglip" else options
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")(**own)
    expected = theirs([Image.fromarray(picture(*size))], return_tensors="np")["pixel_values"]
    named = {f"{kind}ImageProcessor", f"{kind}ImageProcessorFast"}
    for name in named:
        settings = settings_of(tmp_path, "LlavaForConditionalGeneration", **own, image_processor_type=name)
        np.testing.assert_array_equal(process_images([picture(*size)], settings)["pixel_values"], expected)


def test_processor_config_counts_before_preprocessor_config(tmp_path):
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_processor": {"patch_size": 4}}))
    assert settings_of(tmp_path, patch_size=8)["patch_size"] == 4


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (QWEN, {"patch_size": "14"}),
        ("Gemma4ForConditionalGeneration", {"max_soft_tokens": 77}),
        ("Phi3VForCausalLM", {"crop_size": 0}),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(architecture, options, tmp_path):
    """When they are read, or with the first image."""
    with pytest.raises((ConfigError, InputError), match=r"got|fails"):
        VISIONS[architecture].process([picture(30, 20)], settings_of(tmp_path, architecture, **options))


def test_a_folder_without_readable_settings_is_refused(tmp_path):
    for content, message in ((None, "got no such file"), ("{", "is not JSON"), ("[]", "got a list")):
        if content is not None:
            (tmp_path / CONFIG_FILE).write_text(content)
        with pytest.raises(ConfigError, match=message):
            VISIONS[QWEN].settings(tmp_path)


@pytest.mark.parametrize("architecture", [QWEN, "LlavaForConditionalGeneration"])
def test_no_images_slivers_and_sizes_that_do_not_stack_are_refused(architecture, tmp_path):
    options = {"do_resize": True} if architecture == QWEN else SIDES | {"do_center_crop": False}
    settings, vision = settings_of(tmp_path, architecture, **options), VISIONS[architecture]
    with pytest.raises(InputError, match="images: got none; expected at least one"):
        vision.process([], settings)
    with pytest.raises(InputError, match="image 0: got 1×20000 pixels; expected sides within a ratio of 200"):
        vision.process([np.zeros((1, 20000, 3), np.uint8)], settings)
    if architecture != QWEN:
        with pytest.raises(InputError, match="CLIPImageProcessorPil fails"):
            process_images([picture(16, 16), picture(16, 32)], settings)


def test_bad_images_are_named(tmp_path):
    """A JPEG that was cut short."""
    from PIL import Image

    path = tmp_path / "image.jpg"
    Image.fromarray(picture(64, 64)).save(path, quality=95)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for images, name in (([picture(16, 16), path.read_bytes()], "image 1"), ([path], r"image\.jpg")):
        with pytest.raises(InputError, match=f"{name}: got no image that can be read"):
            process_images(images, tiny_settings())


# -------------------------------------------------------------------------------------------------------- kept features


MORE = ("qwen3_vl", "qwen2_5_omni", "qwen3_omni", "gemma3", "mistral3")


@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize("family", ["internvl", *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_features_stand_for_pixels_and_sounds(golden, family):
    """In a padded prompt too."""
    case = (
        "one_image" if family == "internvl" else "mixed" if "mixed" in GOLDEN_FAMILIES[family].cases else "two_images"
    )
    backbone, _, inputs, tokens = prompt = golden(family, case)
    features = backbone.encode(prompt.ids, **inputs)
    with compilations() as compiled:
        again = backbone.embed(prompt.ids, **inputs, features=features)
    assert not any("encode" in name for name in compiled)
    jax.tree.map(np.testing.assert_array_equal, again, tokens)
    if family != "internvl":
        padded = backbone.replaced(backbone.parameters).with_buckets(Buckets())
        embedded = padded.embed(prompt.ids, **inputs)
        assert_close_to_largest(embedded.embeddings, np.asarray(tokens.embeddings), "embeddings", bar=1e-5)
        logits = backbone.prefill(tokens).logits
        assert_close_to_largest(padded.prefill(embedded).logits, np.asarray(logits), "logits", bar=1e-5)


@pytest.mark.usefixtures("highest_precision")
def test_a_chunk_is_made_from_what_the_store_kept(tiny, tmp_path):
    backbone, (image,) = tiny("internvl"), golden_images("internvl", "one_image")
    chunk = kvp.make_chunk(backbone, [image])
    assert chunk.encoder is None
    full = kvp.make_chunk(backbone, [image], keep_encoder=True)
    assert full.content == chunk.content
    with kvp.ChunkStore(tmp_path) as store:
        store.put(full)
        features = store.get_encoder(full.id, full.backbone)
    again = kvp.make_chunk(backbone, [image], encoder=features)
    for name, value in chunk.kv.items():
        assert np.array_equal(full.kv[name], value)
        assert np.array_equal(again.kv[name], value)
    with pytest.raises(InputError, match="features: got shape"):
        kvp.make_chunk(backbone, [image, image], encoder=features)


# --------------------------------------------------------------------------------------------------------------- videos


SAMPLED = json.loads((GOLDENS / "videos" / "sampling.json").read_text())
SAMPLERS = {
    "qwen2_5_vl": sample_qwen2,
    "qwen3_vl": sample_qwen3,
    "internvl": sample_internvl,
    "smolvlm": sample_smolvlm,
    "kimi_vl": sample_evenly,
}


@pytest.mark.parametrize("family", SAMPLERS)
def test_frames_are_sampled_as_transformers_does(family):
    config = Settings.of({"temporal_patch_size": 2} if family == "qwen2_5_vl" else {}, "video")
    for (count, rate, fps, number), expected in zip(SAMPLED["sampled"], SAMPLED["families"][family], strict=True):
        sample = functools.partial(SAMPLERS[family], Stream(count, rate), fps, number, config)
        if expected is None:
            with pytest.raises(InputError, match=r"frames to sample; expected 1 to"):
                sample()
        else:
            assert sample().tolist() == expected, (count, rate, fps, number)


@pytest.mark.parametrize("index", range(len(GLM_FRAMES["streams"])))
def test_glms_frames_are_those_transformers_chooses(index, tmp_path):
    count, rate = GLM_FRAMES["streams"][index]
    config, stream = glm_settings(tmp_path, "new"), Stream(int(count), float(rate))
    assert sample_glm4(stream, None, None, config).tolist() == GLM_FRAMES[f"old.{index}"].tolist()
    assert sample_glm4(stream, 0.7, None, config).tolist() == GLM_FRAMES[f"rate.{index}"].tolist()
    # transformers takes no frame of a video of one.
    expected = GLM_FRAMES[f"new.{index}"].tolist() or [0, 0]
    assert sample_glm46(stream, None, None, config).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_glms_pixels_and_times_equal_transformers(kind, tmp_path):
    """Five frames: the last one again fills the third temporal patch."""
    out = process_glm_videos([Video(GLM_FRAMES["frames"], rate=1.5)], glm_settings(tmp_path, kind))
    np.testing.assert_array_equal(out["pixel_values_videos"], GLM_FRAMES["pixel_values"])
    np.testing.assert_array_equal(out["video_grid_thw"], GLM_FRAMES["grid"])
    np.testing.assert_allclose(out["video_timestamps"], [0, 2 / 1.5, 4 / 1.5])


def test_gemma_4s_pixels_and_times_equal_transformers():
    """torchvision's resize, rescaling and patches, bit for bit (`frames.npz`, of transformers' video processor)."""
    gold, frames = golden_arrays("gemma4", "frames"), draw_frames("gemma4 video", 7, 24, 40)
    video: Any = FAMILIES["Gemma4ForConditionalGeneration"].video
    found = video.process([Video(frames, rate=0.1, frames=2)], video.settings(GOLDENS / "gemma4"))
    np.testing.assert_array_equal(digest(found["pixel_values_videos"]), gold["digest.pixel_values_videos"])
    for name in ("video_position_ids", "num_frames_per_video", "video_timestamps"):
        np.testing.assert_array_equal(found[name], gold[name], name)


# ------------------------------------------------------------------------------------------------------------ files


def film(path: Path, frames: np.ndarray, rate: int, codec: str = "ffv1", seconds: Sequence[float] = ()) -> None:
    """Writes frames at a rate, or each at its time."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"ffv1": "bgr0", "png": "rgb24"}[codec]
        if seconds:
            stream.codec_context.time_base = fractions.Fraction(1, 1000)
        for number, frame in enumerate(frames):
            shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if seconds:
                shown.pts, shown.time_base = round(seconds[number] * 1000), fractions.Fraction(1, 1000)
            container.mux(stream.encode(shown))
        container.mux(stream.encode(None))


def read_clip(video: Video) -> Clip:
    """Every other frame."""
    return clips_of([video], lambda stream, *_: np.arange(0, stream.count, 2), Settings.of({}, "video"))[0]


def test_a_files_frames_are_those_that_were_encoded(tmp_path):
    """Lossless: every value. Number n is shown n / rate seconds after the start."""
    frames = draw_frames("film", 9, 32, 48)
    film(tmp_path / "film.mkv", frames, 6)
    for source in (tmp_path / "film.mkv", (tmp_path / "film.mkv").read_bytes()):
        clip = read_clip(Video(source))
        assert np.array_equal(clip.frames, frames[::2])
        assert clip.timestamps.tolist() == (np.arange(0, 9, 2) / 6).tolist()
        assert clip.rate == pytest.approx(5 / 9 * 6)
        assert clip.duration == pytest.approx(1.5)


@pytest.mark.parametrize(("matrix", "quarters"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_a_film_of_a_turned_phone_is_shown_upright(tmp_path, matrix, quarters):
    """The file's display matrix says it; its pixels lie on their side."""
    frames = draw_frames("phone", 4, 32, 48)
    film(tmp_path / "phone.mov", frames, 6, "png")
    content = bytearray((tmp_path / "phone.mov").read_bytes())
    # The track's header: its name, 40 bytes, then nine numbers of 32 bits, the third column's apart.
    place = content.index(b"tkhd") + 44
    first, second, third, fourth = (value * 65536 for value in matrix)
    content[place : place + 36] = struct.pack(">9i", first, second, 0, third, fourth, 0, 0, 0, 1 << 30)
    clip = read_clip(Video(bytes(content)))
    np.testing.assert_array_equal(clip.frames, np.rot90(frames[::2], quarters, axes=(1, 2)))


SECONDS = [0, 0.1, 0.2, 0.3, 5, 10]


@pytest.mark.parametrize(("name", "codec"), [("film.mkv", "ffv1"), ("film.mov", "png")])
def test_frames_of_a_recording_of_variable_rate_have_its_own_times(tmp_path, name, codec):
    frames, settings = draw_frames("recording", 6, 32, 32), Settings.of({"fps": 2, "temporal_patch_size": 2}, "video")
    film(tmp_path / name, frames, 10, codec, SECONDS)
    whole = clips_of([Video(tmp_path / name)], sample_qwen3, settings)[0]
    np.testing.assert_allclose(whole.timestamps, SECONDS, atol=1e-3)
    np.testing.assert_array_equal(whole.frames, frames)
    # Three frames: those nearest to 0, 6 and 12 seconds.
    some = clips_of([Video(tmp_path / name, frames=3)], sample_qwen3, settings)[0]
    np.testing.assert_allclose(some.timestamps, [0, 5, 10], atol=1e-3)
    # A family that counts one rate sees what a player shows at 0, 2, … 10 seconds.
    even = clips_of([Video(tmp_path / name)], sample_qwen2, settings, steady=True)[0]
    np.testing.assert_allclose(even.timestamps, np.arange(6) * 2, atol=1e-3)
    np.testing.assert_array_equal(even.frames, frames[[0, 3, 3, 4, 4, 5]])


def test_a_folder_of_frames_is_a_video(tmp_path):
    from PIL import Image

    frames = draw_frames("folder", 4, 16, 24)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"frame_{number:03d}.png")
    whole = read_clip(Video(tmp_path, rate=2))
    assert np.array_equal(whole.frames, frames)
    assert whole.timestamps.tolist() == [0, 0.5, 1, 1.5]
    fewer = read_clip(Video(tmp_path, rate=2, frames=2))
    assert np.array_equal(fewer.frames, frames[::2])
    assert (fewer.timestamps.tolist(), fewer.rate) == ([0, 1], 1)


def test_a_file_goes_into_a_prompt(qwen2_5_vl_directory, tmp_path):
    """By its path alone, sampled at two frames a second; the same frames with their times make the same prompt."""
    frames = draw_frames("film", 12, 24, 32)
    film(tmp_path / "film.mkv", frames, 6)
    backbone = load(qwen2_5_vl_directory)
    by_path = backbone.prepare([tmp_path / "film.mkv", [7]])
    given = backbone.prepare([Video(frames[::3], rate=2.0), [7]])
    assert by_path.keys() == given.keys()
    for name, value in given.items():
        assert np.array_equal(by_path[name], value), name
    asked = backbone.prepare([Video(tmp_path / "film.mkv", frames=6), [7]])
    assert asked["video_grid_thw"].tolist() == [[3, *given["video_grid_thw"][0][1:]]]
    assert asked["second_per_grid_ts"].tolist() == pytest.approx([2 / 3])


def test_what_is_no_video_is_refused(tmp_path):
    for content in (b"no video at all", b"RIFF\x00\x00\x00\x00WAVE"):
        with pytest.raises(InputError, match="a file without a video"):
            read_clip(Video(content))
    film(tmp_path / "one.mkv", draw_frames("film", 1, 32, 32), 6)
    settings = Settings.of({"temporal_patch_size": 2}, "video")
    with pytest.raises(InputError, match=r"got 1 frame; expected at least 2, .*pass a single frame as an image"):
        clips_of([Video(tmp_path / "one.mkv")], sample_qwen2, settings)
    with pytest.raises(InputError, match="sound of a file alone"):
        Video(np.zeros((2, 8, 8, 3), np.uint8), rate=1.0, sound=True).read()
