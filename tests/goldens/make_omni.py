"""Make the Qwen2.5-Omni and Qwen3-Omni goldens with transformers (5.23) and torch. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_omni.py`. It rewrites `qwen2_5_omni/` and
`qwen3_omni/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import functools
import json
import types
from typing import Any

import av
import numpy as np
import torch
from make_chat import TURN_MARKS, build_tokenizer
from PIL import Image
from redraw import standard_values
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni_2_5
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni_3
from vlm_golden import (
    END,
    HERE,
    IMAGE,
    START,
    TEXT,
    VIDEO,
    LayerRecorder,
    build_model,
    caches_of,
    decode,
    draw_image,
    draw_pixels,
    tokens_of,
)

AUDIO, AUDIO_START, AUDIO_END = 305, 306, 307
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO{% elif part['type'] == 'audio' %}AUDIO
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
THETA = 30.0  # a low base, so that every axis matters in a small prompt
MELS = 16
TEXT = {name: value for name, value in TEXT.items() if name not in ("bos_token_id", "eos_token_id", "pad_token_id")}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
AUDIO_TOWER = {
    "num_mel_bins": MELS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 64,
    "output_dim": 64,
}
MARKS = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}


class OmniRecorder(LayerRecorder):
    """Collects the residual that enters each next layer, and the keys before rotation."""

    def __init__(self, language, keys: str) -> None:
        super().__init__(types.SimpleNamespace(layers=[language.layers[0]]), {}, None)
        language.layers[0]._forward_hooks.clear()
        for follower in (*language.layers[1:], language.norm):
            follower.register_forward_pre_hook(self.follow, with_kwargs=True)
        for layer in language.layers:
            getattr(layer.self_attn, keys).register_forward_hook(self.store("k_phase_free"))

    def follow(self, module, inputs, keywords) -> None:
        self.add("hidden", inputs[0] if inputs else keywords["hidden_states"])


class Prompt:
    """Ids of a prompt, and what its processor would hand over beside them."""

    def __init__(self, model, processor, name: str) -> None:
        self.model, self.processor, self.name = model, processor, name
        self.version = 3 if "Qwen3" in type(model).__name__ else 2
        self.ids: list[int] = []
        self.images: list[np.ndarray] = []
        self.pixels: list[np.ndarray] = []
        self.videos: list[tuple[int, int, int]] = []
        self.seconds: list[float] = []
        self.mels: list[np.ndarray] = []
        self.joint = False
        self.text = iter(tokens_of([200])[0].tolist())

    def words(self, count: int) -> "Prompt":
        self.ids += [next(self.text) for _ in range(count)]
        return self

    def image(self, height: int, width: int) -> "Prompt":
        self.images.append(draw_image(f"{self.name} image {len(self.images)}", height, width))
        grid = self.processor(images=[Image.fromarray(self.images[-1])], return_tensors="np")["image_grid_thw"][0]
        self.ids += [START, *[IMAGE] * (int(grid.prod()) // 4), END]
        return self

    def frames(self, grid: tuple[int, int, int], seconds: float) -> int:
        self.videos.append(grid)
        self.seconds.append(seconds)
        self.pixels.append(draw_pixels(f"{self.name} video {len(self.videos)}", int(np.prod(grid)), 3 * 2 * 4 * 4))
        return int(np.prod(grid)) // 4

    def sound(self, frames: int) -> int:
        self.mels.append(draw_pixels(f"{self.name} audio {len(self.mels)}", MELS, frames))
        return self.tokens(frames)

    def tokens(self, frames: int) -> int:
        if self.version == 3:
            return int(omni_3._get_feat_extract_output_lengths(torch.tensor(frames)))
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    def video(self, grid: tuple[int, int, int], seconds: float) -> "Prompt":
        self.ids += [START, *[VIDEO] * self.frames(grid, seconds), END]
        return self

    def audio(self, frames: int) -> "Prompt":
        self.ids += [AUDIO_START, *[AUDIO] * self.sound(frames), AUDIO_END]
        return self

    def video_with_audio(self, grid: tuple[int, int, int], seconds: float, frames: int) -> "Prompt":
        """Both in the order of the processors' `replace_video_with_audio_token`."""
        count, audio = self.frames(grid, seconds), self.sound(frames)
        rate = self.model.config.position_id_per_seconds
        self.ids += [START, AUDIO_START, *interleaved(self.version, grid, count, audio, seconds, rate), AUDIO_END, END]
        self.joint = True
        return self

    def inputs(self) -> dict[str, Any]:
        found: dict[str, Any] = {"input_ids": torch.tensor([self.ids])}
        if self.images:
            found |= dict(self.processor(images=[Image.fromarray(x) for x in self.images], return_tensors="pt"))
        if self.videos:
            found |= {"pixel_values_videos": torch.tensor(np.concatenate(self.pixels))}
            found |= {"video_grid_thw": torch.tensor(self.videos)}
        if self.mels:
            longest = max(mel.shape[1] for mel in self.mels)
            features, mask = np.zeros((len(self.mels), MELS, longest), np.float32), np.zeros((len(self.mels), longest))
            for row, mel in enumerate(self.mels):
                features[row, :, : mel.shape[1]], mask[row, : mel.shape[1]] = mel, 1
            found |= {"input_features": torch.tensor(features), "feature_attention_mask": torch.tensor(mask).long()}
        return found


def interleaved(version: int, grid: tuple, count: int, audio: int, seconds: float, rate: float) -> list[int]:
    """Placeholders of a video with its sound, as the family's processor orders them."""
    module = omni_3 if version == 3 else omni_2_5
    package = module.__name__.rsplit(".", 2)[1]
    source = __import__(f"transformers.models.{package}.processing_{package}", fromlist=["x"])
    cls = source.Qwen3OmniMoeProcessor if version == 3 else source.Qwen2_5OmniProcessor
    me = types.SimpleNamespace(
        video_token="v", audio_token="a", audio_bos_token="", audio_eos_token="",
        video_processor=types.SimpleNamespace(merge_size=2),
    )  # fmt: skip
    me.get_chunked_index = functools.partial(cls.get_chunked_index, me)
    videos = {"video_grid_thw": np.array([grid]), "video_second_per_grid": [seconds]}
    how = {"position_id_per_seconds": rate, "seconds_per_chunk": 2.0}
    text = cls.replace_video_with_audio_token(me, videos, 0, {"num_audio_tokens": [audio]}, 0, **how)
    assert text.count("v") == count
    assert text.count("a") == audio
    return [{"v": VIDEO, "a": AUDIO}[letter] for letter in text]


def positions_of(model, prompt: Prompt, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = inputs["feature_attention_mask"].sum(1) if "feature_attention_mask" in inputs else None
    return model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(inputs["input_ids"]),
        prompt.joint,
        lengths,
        torch.tensor(prompt.seconds) if prompt.seconds else None,
    )


def make_case(folder: str, case: str, model, recorder: OmniRecorder, prompt: Prompt) -> None:
    inputs = prompt.inputs()
    positions, delta = positions_of(model, prompt, inputs)
    recorder.values.clear()
    out = model(**inputs, position_ids=positions, use_cache=True)
    arrays = recorder.take() | caches_of(out.past_key_values)
    arrays |= {"logits": out.logits[0].numpy(), "rope_delta": np.float32(delta.item())}
    arrays |= {name: value.numpy() for name, value in inputs.items()} | {"input_ids": inputs["input_ids"][0].numpy()}
    arrays |= {f"image.{index}": image for index, image in enumerate(prompt.images)}
    arrays |= {"second_per_grid_ts": np.array(prompt.seconds, np.float32)} if prompt.seconds else {}
    arrays["position_ids"] = positions[:, 0].T.numpy().astype(np.float32 if positions.is_floating_point() else np.int32)
    arrays = {n: v.astype(np.int32) if v.dtype == np.int64 else v for n, v in arrays.items()}
    if case == "one_image":
        arrays |= decode(model, out.past_key_values, arrays["logits"], len(prompt.ids) + int(delta), 3)

    # Of every case three tokens. What is drawn by name, or processed from an image elsewhere, is not kept.
    rows = np.array([0, len(prompt.ids) // 2, len(prompt.ids) - 1], np.int32)
    for name in ("hidden", "k", "v", "k_phase_free"):
        arrays[name] = arrays[name][:, rows]
    drawn = {"pixel_values_videos", "input_features"} | ({"pixel_values"} if case != "one_image" else set())
    kept = {name: value for name, value in arrays.items() if name not in drawn}
    np.savez_compressed(HERE / folder / f"{case}.npz", **kept | {"logits": arrays["logits"][rows], "rows": rows})


def make_family(folder: str, model, keys: str, cases: dict) -> None:
    recorder = OmniRecorder(model.model.language_model, keys)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=256,
        max_pixels=4096,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor.save_pretrained(HERE / folder)
    path = HERE / folder / "preprocessor_config.json"
    sound = WhisperFeatureExtractor(feature_size=MELS, return_attention_mask=True).to_dict()
    sound = {name: value for name, value in sound.items() if name != "mel_filters"}
    path.write_text(json.dumps(sound | json.loads(path.read_text()), indent=2, sort_keys=True) + "\n")
    for case, fill in cases.items():
        prompt = Prompt(model, processor, case)
        fill(prompt)
        make_case(folder, case, model, recorder, prompt)


def write_release(folder: str, architecture: str, kind: str, config: dict, others: tuple[str, ...]) -> None:
    """`config_release.json` as the full releases have it: the thinker's table inside, the talker's beside it."""
    release = {
        "architectures": [architecture],
        "model_type": kind,
        "enable_audio_output": True,
        "thinker_config": config,
        **{other: {"model_type": f"{kind}_{other.removesuffix('_config')}"} for other in others},
    }
    (HERE / folder / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")


def make_2_5() -> Any:
    sections = [2, 3, 3]
    vision = {**TOWER, "hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1]}
    audio = {**AUDIO_TOWER, "n_window": 8}
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": sections}
    ids = {"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO, **MARKS}
    top = {**ids, "position_id_per_seconds": 5, "seconds_per_chunk": 2}
    config = Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, audio_config=audio, **top
    )
    model = build_model("qwen2_5_omni", config, Qwen2_5OmniThinkerForConditionalGeneration)
    released = {
        "model_type": "qwen2_5_omni_thinker",
        **top,
        "torch_dtype": "float32",
        "user_token_id": 872,
        "vision_token_id": 308,
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            **TEXT,
            "init_std": 0.02,
            "rope_scaling": {"mrope_section": sections, "rope_type": "default", "type": "default"},
            "rope_theta": THETA,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 28,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            **vision,
            "embed_dim": 32,
            "in_chans": 3,
            "init_std": 0.02,
            "spatial_patch_size": 4,
            "tokens_per_second": 25,
        },
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            **audio,
            "num_hidden_layers": 2,
            "init_std": 0.02,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
    }
    parts = ("talker_config", "token2wav_config")
    write_release("qwen2_5_omni", "Qwen2_5OmniModel", "qwen2_5_omni", released, parts)
    cases = {
        "text": lambda prompt: prompt.words(9),
        "one_image": lambda prompt: prompt.words(5).image(24, 40).words(4),
        "audio": lambda prompt: prompt.words(3).audio(37).words(4),
        "mixed": lambda p: (
            p.words(2).audio(16).image(16, 24).words(2).video((3, 4, 4), 0.7).words(1).audio(21).words(3)
        ),
        "video_with_audio": lambda p: p.words(2).video_with_audio((4, 4, 4), 0.9, 100).words(2).image(16, 16).words(2),
    }
    make_family("qwen2_5_omni", model, "k_proj", cases)
    return model


def make_3() -> Any:
    sections = [3, 3, 2]
    vision = {**TOWER, "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 25}
    vision["deepstack_visual_indexes"] = [0, 2]
    audio = {**AUDIO_TOWER, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 12, "conv_chunksize": 500}
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": sections, "mrope_interleaved": True}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, **MARKS}
    top = {**ids, "position_id_per_seconds": 5}
    text = {**TEXT, **EXPERTS, "norm_topk_prob": True}
    config = Qwen3OmniMoeThinkerConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, audio_config=audio, **top
    )
    model = build_model("qwen3_omni", config, Qwen3OmniMoeThinkerForConditionalGeneration)
    released = {
        "model_type": "qwen3_omni_moe_thinker",
        **top,
        "dtype": "float32",
        "seconds_per_chunk": 2,
        "user_token_id": 872,
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            **text,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rope_scaling": {**rope, "interleaved": True, "type": "default"},
            "rope_theta": THETA,
            "shared_expert_intermediate_size": 0,
            "sliding_window": None,
            "use_qk_norm": True,
            "use_sliding_window": False,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            **vision,
            "apply_vit_abs_pos_embed": True,
            "image_size": 768,
            "in_chans": 3,
            "spatial_patch_size": 4,
            "tokens_per_second": 2,
        },
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            **audio,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
    }
    parts = ("talker_config", "code2wav_config")
    architecture = "Qwen3OmniMoeForConditionalGeneration"
    write_release("qwen3_omni", architecture, "qwen3_omni_moe", released, parts)
    cases = {
        "text": lambda prompt: prompt.words(9),
        "one_image": lambda prompt: prompt.words(5).image(24, 40).words(4),
        "audio": lambda prompt: prompt.words(3).audio(37).words(4),
        "long_audio": lambda prompt: prompt.words(2).audio(231).words(2),
        "mixed": lambda p: (
            p.words(2).audio(100).image(16, 24).words(2).video((3, 4, 4), 0.7).words(1).audio(121).words(3)
        ),
        "video_with_audio": lambda p: p.words(2).video_with_audio((4, 4, 4), 0.9, 130).words(2).image(16, 16).words(2),
    }
    make_family("qwen3_omni", model, "k_norm", cases)
    return model


MIXTURES: dict[str, Any] = {
    # Parts: words, ("image", grid), ("video", grid, seconds), ("audio", mel frames), ("both", grid, seconds, frames).
    "images": [4, ("image", (1, 4, 6)), 2, ("image", (1, 8, 4)), 3],
    "audio": [4, ("audio", 333), 2, ("image", (1, 4, 4)), ("audio", 50), 3],
    "seconds": [3, ("video", (3, 4, 6), 4 / 3), 2, ("video", (2, 4, 4), 0.37), 5],
    "fps": [3, ("video", (5, 4, 4), 2 / 3), 2, ("video", (2, 40, 4), 0.1), ("audio", 211), 5],
    "with_audio": [3, ("both", (4, 4, 6), 1.0, 410), 2, ("image", (1, 4, 4)), 1],
    "with_long_audio": [("both", (3, 4, 4), 4 / 3, 900), 2, ("both", (6, 4, 4), 0.7, 205), 4],
    "wide": [2, ("both", (2, 60, 40), 1.0, 60), 4],
}


def make_positions(folder: str, version: int) -> None:
    """Positions by `get_rope_index` at the releases' rates."""
    module = omni_3 if version == 3 else omni_2_5
    stem = "Qwen3OmniMoe" if version == 3 else "Qwen2_5Omni"
    cls = getattr(module, f"{stem}PreTrainedModelForConditionalGeneration")
    rate, ids = (
        (13 if version == 3 else 25),
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO},
    )
    config = types.SimpleNamespace(
        **ids,
        **MARKS,
        position_id_per_seconds=rate,
        seconds_per_chunk=2,
        audio_config=types.SimpleNamespace(n_window=50),
    )
    me = types.SimpleNamespace(config=config, spatial_merge_size=2)
    for name in ("get_llm_pos_ids_for_vision", "get_chunked_index", "get_rope_index"):
        setattr(me, name, functools.partial(getattr(cls, name), me))

    arrays = {}
    for name, parts in MIXTURES.items():
        prompt, images, frames = Prompt(types.SimpleNamespace(config=config), None, name), [], []
        prompt.version = version
        for part in parts:
            if isinstance(part, int):
                prompt.words(part)
            elif part[0] == "image":
                images.append(part[1])
                prompt.ids += [START, *[IMAGE] * (int(np.prod(part[1])) // 4), END]
            elif part[0] == "audio":
                frames.append(part[1])
                prompt.ids += [AUDIO_START, *[AUDIO] * prompt.tokens(part[1]), AUDIO_END]
            elif part[0] == "video":
                prompt.video(part[1], part[2])
            else:
                frames.append(part[3])
                prompt.video_with_audio(part[1], part[2], part[3])
        ids = torch.tensor([prompt.ids])
        grids = [torch.tensor(grid) if grid else None for grid in (images, prompt.videos)]
        more = (torch.ones_like(ids), prompt.joint, torch.tensor(frames) if frames else None)
        seconds = torch.tensor(prompt.seconds) if prompt.seconds else None
        positions, delta = me.get_rope_index(ids, *grids, *more, seconds)
        positions = positions[:, 0].T.numpy()
        arrays |= {
            f"{name}.input_ids": np.array(prompt.ids, np.int16),
            f"{name}.images": np.array(images, np.int32).reshape(-1, 3),
            f"{name}.videos": np.array(prompt.videos, np.int32).reshape(-1, 3),
            f"{name}.seconds": np.array(prompt.seconds, np.float32),
            f"{name}.frames": np.array(frames, np.int32),
            f"{name}.positions": positions if version == 3 else positions.astype(np.int16),
            f"{name}.delta": np.float32(delta.item()),
        }
    np.savez_compressed(HERE / folder / "positions.npz", **arrays)


def make_mel() -> None:
    """Log-mel features of two drawn waveforms, as each family's processor asks `WhisperFeatureExtractor` for them."""
    arrays = {}
    for name, samples in (("short", 4837), ("even", 3200)):
        times = np.arange(samples) / 16000
        wave = 0.3 * np.sin(2 * np.pi * 440 * times) + 0.02 * standard_values(f"mel {name}", samples)
        wave = (wave * (times < 0.2)).astype(np.float32)  # the end is silent
        for family, how in (("padded", {"padding": "max_length"}), ("alone", {"padding": True, "truncation": False})):
            extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
            out = extractor(wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np", **how)
            frames = int(out["attention_mask"].sum())
            arrays[f"{name}.{family}"] = out["input_features"][0, :, :frames].astype(np.float32)
        arrays[f"{name}.samples"] = np.int32(samples)
    np.savez_compressed(HERE / "mel.npz", **arrays)


CONVERSATION = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}, {"type": "video"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A page."}]},
    {"role": "user", "content": [{"type": "text", "text": " And that? "}, {"type": "audio"}]},
]
SAMPLES = 23200  # of both sounds: of unequal ones Qwen3-Omni's processor would pad the shorter
FPS = 4  # of the video's file and of what is shown of it


def write_video() -> tuple[np.ndarray, np.ndarray]:
    """`omni.mkv`, lossless: twelve frames of 16 x 24 pixels and 1.45 seconds of sound. Returns both."""
    frames = np.stack([draw_image(f"frame {number}", 16, 24) for number in range(12)])
    times = np.arange(SAMPLES) / 16000
    samples = np.round(3000 * np.sin(2 * np.pi * 330 * times) * (times % 0.5)).astype(np.int16)
    with av.open(HERE / "omni.mkv", "w") as file:
        video, sound = file.add_stream("ffv1", rate=FPS), file.add_stream("flac", rate=16000, layout="mono")
        video.width, video.height, video.pix_fmt = 24, 16, "bgr0"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            file.mux(video.encode(frame))
        file.mux(video.encode())
        part = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        part.sample_rate, part.pts = 16000, 0
        file.mux(sound.encode(part))
        file.mux(sound.encode())
    return frames, (samples / 2**15).astype(np.float32)


def make_conversation(folder: str, model, version: int) -> None:
    """`chat.json` and `chat.npz`: messages with an image, a video with its sound and a sound, by the processors."""
    frames, heard = write_video()
    names = {3: ("audio_pad", "image_pad", "video_pad", "vision_start", "vision_end", "audio_start", "audio_end")}
    names[2] = ("AUDIO", "IMAGE", "VIDEO", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    tokens = [f"<|{name}|>" for name in names[version]]
    marks = dict(zip(tokens, (AUDIO, IMAGE, VIDEO, START, END, AUDIO_START, AUDIO_END), strict=True))
    words = ("audio", "image", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    audio, image, video, *edges = tokens
    tokenizer = build_tokenizer({**marks, **TURN_MARKS}, starts=False)
    called = {f"{word}_token": token for word, token in zip(words, tokens, strict=True)}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=called, pad_token="</s>", eos_token="</s>", bos_token="<s>"
    )
    fill = {"IMAGE": edges[0] + image + edges[1], "VIDEO": edges[0] + video + edges[1]}
    template = TEMPLATE.replace("AUDIO", edges[2] + audio + edges[3])
    for word, text in fill.items():
        template = template.replace(word, text)

    settings = json.loads((HERE / folder / "preprocessor_config.json").read_text())
    known = {
        name: settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    }
    size = {"shortest_edge": 256, "longest_edge": 4096}
    processor = {2: Qwen2_5OmniProcessor, 3: Qwen3OmniMoeProcessor}[version](
        Qwen2VLImageProcessorPil(**known, size=size),
        Qwen2VLVideoProcessor(**known, size=size, do_sample_frames=False),
        WhisperFeatureExtractor(feature_size=MELS, chunk_length=4, return_attention_mask=True),
        wrapped,
    )
    picture, times = draw_image("chat", 20, 41), np.arange(SAMPLES) / 16000
    sound = (0.2 * np.sin(2 * np.pi * 500 * times)).astype(np.float32)
    text = wrapped.apply_chat_template(CONVERSATION, tokenize=False, chat_template=template, add_generation_prompt=True)
    # As the processors split what they are given: a video as one array of frames, a sound for each slot.
    out = processor(
        text=[text], images=[Image.fromarray(picture)], videos=[frames], audio=[heard, sound],
        audio_from_video_indices=[0, None], load_audio_from_video=True, return_tensors="pt",
        position_id_per_seconds=model.config.position_id_per_seconds,
        videos_kwargs={"fps": float(FPS), "do_sample_frames": False, "size": size},
    )  # fmt: skip
    mask = out["feature_attention_mask"]
    seconds = torch.as_tensor(out["video_second_per_grid"])
    positions, _ = model.get_rope_index(
        out["input_ids"], out["image_grid_thw"], out["video_grid_thw"], torch.ones_like(out["input_ids"]), True,
        mask.sum(1), seconds,
    )  # fmt: skip
    longest = int(mask.sum(1).max())
    arrays = {
        "input_ids": out["input_ids"][0].numpy().astype(np.int32),
        "position_ids": positions[:, 0].T.numpy(),
        "image": picture,
        "input_features": out["input_features"].numpy()[:, :, :longest],
        "feature_attention_mask": mask.numpy()[:, :longest].astype(np.int32),
        "second_per_grid_ts": seconds.numpy(),
    }
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        arrays[name] = out[name].numpy()
    np.savez_compressed(HERE / folder / "chat.npz", **arrays)
    kept = {"text": text, "template": template, "tokenizer": json.loads(tokenizer.to_str()), "messages": CONVERSATION}
    (HERE / folder / "chat.json").write_text(json.dumps(kept) + "\n")
    videos = {**known, "min_pixels": 256, "max_pixels": 4096, "fps": float(FPS)}
    (HERE / folder / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        make_conversation("qwen2_5_omni", make_2_5(), 2)
        make_conversation("qwen3_omni", make_3(), 3)
        make_positions("qwen2_5_omni", 2)
        make_positions("qwen3_omni", 3)
        make_mel()


if __name__ == "__main__":
    main()
