"""Make the Gemma 4 goldens with transformers (5.23), torch and torchvision. See README.md beside this file.

Run it in an environment that has them: `python tests/goldens/make_gemma4.py`. It rewrites `gemma4/` and `gemma4_moe/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys

import numpy as np
import torch
from make_chat import TURN_MARKS, build_tokenizer, write_chat
from PIL import Image
from redraw import draw_frames, standard_values
from transformers import (
    DynamicCache,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.video_utils import VideoMetadata
from vlm_golden import END, HERE, IMAGE, START, VIDEO, LayerRecorder, build_model, decode, draw_image, line

AUDIO, AUDIO_START, AUDIO_END = 305, 306, 307
TEXT = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "max_position_embeddings": 4096,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e1},
    },
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "position_embedding_size": 80,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
}
HEARING = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [16, 8],
    "conv_kernel_size": 5,
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "attention_logit_cap": 5.0,
    "output_proj_dims": 24,
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "boi_token_id": START,
    "eoi_token_id": END,
    "boa_token_id": AUDIO_START,
    "eoa_token_index": AUDIO_END,
}
# E2B's kind: a vector of each token for every layer, upper layers that read lower ones' KV, bounds around linear maps.
SMALL = {
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "sliding_window": 6,
    "layer_types": ["full_attention" if layer in (1, 5) else "sliding_attention" for layer in range(6)],
    "final_logit_softcapping": 20.0,
}
# 26B-A4B's kind: experts beside the MLP, values that are keys, images that see themselves in layers that slide.
MIXTURE = {
    "num_hidden_layers": 3,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_bidirectional_attention": "vision",
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
MODELS = {
    "gemma4": (SMALL, VISION | {"use_clipped_linears": True}, HEARING),
    "gemma4_moe": (MIXTURE, VISION | {"standardize": True, "rms_norm_eps": 1e-5}, None),
}
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}
PIXELS = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}
HEARS = {"feature_size": 16, "return_attention_mask": True}
SECONDS = (0.93, 0.31)
NAMES = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
MARKS = {"<|video|>": VIDEO, **TURN_MARKS}
MARKS |= dict(zip(NAMES.values(), (IMAGE, START, END, AUDIO, AUDIO_START, AUDIO_END), strict=True))
TALK = "Hear <|audio|> and see <|video|> and <|image|> now"


def text_ids(count: int, first: int = 0) -> list[int]:
    return [int(value) for value in ((first + np.arange(count)) * 37 + 11) % 290 + 8]


def waves() -> list[np.ndarray]:
    """Two sounds of unequal lengths at 16 000 samples a second."""
    found = []
    for number, seconds in enumerate(SECONDS):
        size = int(seconds * 16000)
        times = np.arange(size) / 16000
        noise = standard_values(f"gemma4 sound {number}", size)
        found.append((0.3 * np.sin(2 * np.pi * (300 + 900 * times) * times) + 0.05 * noise).astype(np.float32))
    return found


def save(family: str, case: str, arrays: dict, recorded: dict, cache, rows: np.ndarray, kinds: list[str]) -> None:
    """Writes a case: hidden states, caches and logits of a few tokens (`rows`)."""
    embedded = recorded["inputs_embeds"] if case in SIZES else recorded["inputs_embeds"][rows]
    arrays |= {"rows": rows, "inputs_embeds": embedded, "hidden": recorded["hidden"][:, rows]}
    kept = [layer for layer in cache.layers if layer.is_initialized]
    for suffix, kind in (("", "full_attention"), ("_local", "sliding_attention")):
        own = [layer for layer, name in zip(kept, kinds, strict=False) if name == kind]
        for name, part in (("k", "keys"), ("v", "values")):
            stacked = np.stack([getattr(layer, part)[0].transpose(0, 1).numpy() for layer in own])
            arrays[name + suffix] = stacked[:, rows]
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    arrays = {name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in arrays.items()}
    np.savez_compressed(HERE / family / f"{case}.npz", **arrays)


def run(family: str, case: str, model, recorder, ids: list[int], inputs: dict, kept: dict) -> None:
    input_ids = torch.tensor([ids])
    kinds = torch.zeros_like(input_ids)
    for number, token in enumerate((IMAGE, VIDEO, AUDIO), 1):
        kinds[input_ids == token] = number
    positions, cache = line(len(ids)), DynamicCache()
    recorder.values.clear()
    out = model(
        input_ids=input_ids,
        position_ids=positions,
        mm_token_type_ids=kinds,
        past_key_values=cache,
        use_cache=True,
        **inputs,
    )
    recorded, logits = recorder.take(), out.logits[0].numpy()
    pads = [place for place, token in enumerate(ids) if token in (IMAGE, VIDEO, AUDIO)]
    rows = np.unique([0, *pads[:1], *pads[len(pads) // 2 :][:1], *pads[-1:], len(ids) - 1]).astype(np.int32)
    arrays = {"input_ids": input_ids[0], "position_ids": positions[0], "logits": logits[rows], **inputs, **kept}
    save(family, case, arrays, recorded, cache, rows, model.config.text_config.layer_types)
    if case == "one_image":
        path = HERE / family / f"{case}.npz"
        with np.load(path) as file:
            whole = {name: file[name] for name in file.files}
        np.savez_compressed(path, **whole, **decode(model, cache, logits, len(ids), 1))


def release_of(config: dict) -> dict:
    """The configuration as released files have it: sizes of the layers that see all beside the others'."""
    raw = json.loads(json.dumps(config))
    text = raw["text_config"]
    layers = text.pop("per_layer_config")
    wide = layers[str(text["layer_types"].index("full_attention"))]
    text |= {
        "global_head_dim": wide["head_dim"],
        "num_global_key_value_heads": wide.get("num_key_value_heads") if text["attention_k_eq_v"] else None,
    }
    raw |= {"eoa_token_id": AUDIO_END, "vision_soft_tokens_per_image": 70, "eos_token_id": [1, 106]}
    return raw


def make(family: str) -> None:
    text, vision, hearing = MODELS[family]
    config = Gemma4Config(text_config=TEXT | text, vision_config=vision, audio_config=hearing, **TOP)
    model = build_model(family, config, Gemma4ForConditionalGeneration)
    written = json.loads((HERE / family / "config.json").read_text())
    (HERE / family / "config_release.json").write_text(json.dumps(release_of(written), indent=2) + "\n")
    processor, videos = Gemma4ImageProcessorPil(**PIXELS), Gemma4VideoProcessor(**PIXELS, num_frames=2)
    hears = Gemma4AudioFeatureExtractor(**HEARS)
    processor.save_pretrained(HERE / family)
    settings = {"video_processor": json.loads(videos.to_json_string())}
    if hearing:
        settings["feature_extractor"] = json.loads(hears.to_json_string())
    (HERE / family / "processor_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")

    recorder = LayerRecorder(model.model.language_model, {}, keys=None)
    for case, sizes in SIZES.items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
        kept, inputs, ids = {f"image.{index}": image for index, image in enumerate(images)}, {}, text_ids(5)
        if images:
            out = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
            inputs = {name: out[name] for name in ("pixel_values", "image_position_ids")}
            for number, count in enumerate(out["num_soft_tokens_per_image"].tolist()):
                ids += [START, *[IMAGE] * count, END, *text_ids(1, 5 + number)]
        run(family, case, model, recorder, ids + text_ids(3, 20), inputs, kept)

    frames = draw_frames("gemma4 video", 7, 24, 40)
    out = videos(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[VideoMetadata(total_num_frames=7, fps=0.1, frames_indices=list(range(7)))],
        return_metadata=True,
        return_tensors="pt",
    )
    ids = text_ids(4)
    for number in range(int(out["num_frames_per_video"][0])):
        ids += [*text_ids(2, 9 * number), START, *[VIDEO] * int(out["num_soft_tokens_per_video"][0]), END]
    video = {name: out[name] for name in ("pixel_values_videos", "video_position_ids", "num_frames_per_video")}
    times = out["video_metadata"][0].timestamps
    run(family, "video", model, recorder, ids + text_ids(3, 50), video, {"video_timestamps": np.asarray(times)})
    if not hearing:
        return

    heard = hears(waves(), sampling_rate=16000, return_tensors="np")
    features = [np.asarray(heard[name]) for name in ("input_features", "input_features_mask")]
    sounds = dict(zip(("input_features", "input_features_mask"), map(torch.from_numpy, features), strict=True))
    counts = [int(mask[::2][::2].sum()) for mask in features[1]]
    ids = text_ids(4)
    for number, count in enumerate(counts):
        ids += [AUDIO_START, *[AUDIO] * count, AUDIO_END, *text_ids(2, 7 * number)]
    run(family, "audio", model, recorder, ids, sounds, {})

    image = draw_image("image 0", *SIZES["one_image"][0])
    out = processor(images=[Image.fromarray(image)], return_tensors="pt")
    mixed = {name: out[name] for name in ("pixel_values", "image_position_ids")}
    count = int(out["num_soft_tokens_per_image"][0])
    ids = [*text_ids(3), AUDIO_START, *[AUDIO] * counts[1], AUDIO_END, *text_ids(1, 4)]
    ids += [START, *[IMAGE] * count, END, *text_ids(2, 8)]
    mixed |= {name: value[1:] for name, value in sounds.items()}
    run(family, "mixed", model, recorder, ids, mixed, {"image.0": image})


def processor_of(family: str, tokenizer, template: str) -> Gemma4Processor:
    """The family's processor around a tokenizer of `make_chat`, which is asked for marks by name."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        extra_special_tokens=NAMES,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    videos, hears = Gemma4VideoProcessor(**PIXELS, num_frames=2), Gemma4AudioFeatureExtractor(**HEARS)
    return Gemma4Processor(hears, Gemma4ImageProcessorPil(**PIXELS), wrapped, videos, chat_template=template)


def converse() -> None:
    """`chat.json` (two images), and `media.json`: a text with a sound, a video and an image by the processor."""
    write_chat("gemma4", lambda tokenizer, template: processor_of("gemma4", tokenizer, template), "<|image|>", MARKS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(MARKS, starts=False))
    processor = processor_of("gemma4", tokenizer, "")
    frames, image = draw_frames("gemma4 video", 7, 24, 40), draw_image("image 0", *SIZES["one_image"][0])
    out = processor(
        text=[TALK],
        images=[[Image.fromarray(image)]],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[VideoMetadata(total_num_frames=7, fps=0.1)],
        audio=[waves()[1]],
        return_tensors="np",
    )
    kept = {"text": TALK, "input_ids": np.asarray(out["input_ids"])[0].tolist()}
    (HERE / "gemma4" / "media.json").write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for family in sys.argv[1:] or MODELS:
            make(family)
        converse()
