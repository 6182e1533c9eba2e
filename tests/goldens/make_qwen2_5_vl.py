"""Make the Qwen2.5-VL goldens with transformers (5.23) and torch. See README.md beside this file for what is stored.

Run it in an environment that has them: `python tests/goldens/make_qwen2_5_vl.py`. It rewrites `qwen2_5_vl/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from redraw import redraw_all, standard_values
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import get_vision_window_index

OUT = Path(__file__).parent / "qwen2_5_vl"
IMAGE, VIDEO, START, END = 301, 302, 303, 304
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
THETA, SECTIONS = 30.0, [2, 3, 3]  # a low base, so that the width axis (the slowest pairs) matters in a small image
VISION = {
    "depth": 4,
    "hidden_size": 32,
    "hidden_act": "silu",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 16,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3],
}
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
PIXELS = {"min_pixels": 256, "max_pixels": 4096}


def write_configs() -> None:
    """`config.json` as transformers 5 writes it, `config_release.json` as the released checkpoints have it."""
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": SECTIONS}
    Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=VISION, **TOP).save_pretrained(OUT)
    release = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **TEXT,
        **TOP,
        "rope_theta": THETA,
        "rope_scaling": {"type": "mrope", "mrope_section": SECTIONS},
        "torch_dtype": "float32",
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **{k: v for k, v in VISION.items() if k not in ("in_channels", "patch_size")},
            "in_chans": 3,
            "patch_size": 4,
            "spatial_patch_size": 4,
        },
    }
    (OUT / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
    parsed, other = Qwen2_5_VLConfig.from_pretrained(OUT), Qwen2_5_VLConfig(**release)
    for part in ("text_config", "vision_config"):
        first, second = getattr(parsed, part).to_dict(), getattr(other, part).to_dict()
        second["rope_parameters"].pop("type", None)
        for key in VISION if part == "vision_config" else [*TEXT, "rope_parameters"]:
            assert first[key] == second[key], (part, key, first[key], second[key])


def build_model() -> Qwen2_5_VLForConditionalGeneration:
    """The tiny model with every parameter redrawn under the name its Hugging Face file gives it."""
    config = Qwen2_5_VLConfig.from_pretrained(OUT)
    with tempfile.TemporaryDirectory() as directory:
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
        path = Path(directory) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        save_file(redraw_all(shapes), path, metadata={"format": "pt"})
        model, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (OUT / "shapes.json").write_text("{\n" + lines + "\n}\n")
    return model.eval()


def draw_image(name: str, height: int, width: int, channels: int = 3) -> np.ndarray:
    """A uint8 image [H, W, C]: waves with noise, so that neither resizing nor patch order can hide."""
    rows, columns = np.mgrid[:height, :width]
    base = 128 + 60 * np.sin(rows / 3.0)[..., None] + 40 * np.cos(columns / 2.0)[..., None] * np.arange(1, channels + 1)
    noise = standard_values(name, height * width * channels).reshape(height, width, channels)
    return np.clip(base + 25 * noise, 0, 255).astype(np.uint8)


def tokens_of(parts: list[int | tuple[int, int]]) -> torch.Tensor:
    """Ids [1, T] from text lengths (int) and (pad id, count) pairs wrapped in start and end tokens."""
    text = iter((np.arange(200) * 37 + 11) % 290 + 3)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            ids += [START, *[part[0]] * part[1], END]
        else:
            ids += [int(next(text)) for _ in range(part)]
    return torch.tensor([ids])


def kinds_of(input_ids: torch.Tensor) -> torch.Tensor:
    return (input_ids == IMAGE).int() + 2 * (input_ids == VIDEO).int()


class HookRecorder:
    """Collects, by forward hooks, what the model computes inside."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration) -> None:
        self.values: dict[str, list[np.ndarray]] = {}
        language, visual = model.model.language_model, model.model.visual
        language.layers[0].register_forward_pre_hook(self.enter, with_kwargs=True)
        for layer in language.layers:
            layer.register_forward_hook(self.store("hidden"))
            layer.self_attn.k_proj.register_forward_hook(self.store("k_phase_free"))
        language.norm.register_forward_hook(self.store("final_norm"))
        visual.patch_embed.register_forward_hook(self.store("vision_patch_embed"))
        for block in visual.blocks:
            block.register_forward_hook(self.store("vision_blocks"))
        visual.register_forward_hook(lambda module, inputs, output: self.add("vision_features", output.pooler_output))

    def add(self, name: str, value: torch.Tensor) -> None:
        self.values.setdefault(name, []).append(value.detach().numpy().copy())

    def store(self, name: str):
        return lambda module, inputs, output: self.add(name, output)

    def enter(self, module, inputs, keywords) -> None:
        self.add("inputs_embeds", inputs[0] if inputs else keywords["hidden_states"])

    def take(self) -> dict[str, np.ndarray]:
        """What one prefill recorded: [T, D] for single values, [layer, T, ...] for per-layer ones."""
        values, self.values = self.values, {}
        single = ("inputs_embeds", "final_norm", "vision_patch_embed", "vision_features")
        out = {name: np.stack(value) for name, value in values.items()}
        out = {name: value[0] if name in single else value for name, value in out.items()}
        for name in ("inputs_embeds", "final_norm"):
            out[name] = out[name][0]
        out["hidden"] = out["hidden"][:, 0]
        keys = out["k_phase_free"][:, 0]
        out["k_phase_free"] = keys.reshape(*keys.shape[:2], TEXT["num_key_value_heads"], -1)
        return out


def caches_of(cache) -> dict[str, np.ndarray]:
    """Keys (after RoPE) and values as [layer, T, K, H]."""
    layers = cache.layers
    return {
        "k": np.stack([layer.keys[0].transpose(0, 1).numpy() for layer in layers]),
        "v": np.stack([layer.values[0].transpose(0, 1).numpy() for layer in layers]),
    }


def in_patch_order(blocks: np.ndarray, grid: torch.Tensor) -> np.ndarray:
    """Tower states [layer, patch, D] from the order of windows back to the order of `pixel_values`."""
    merge, size, patch = (VISION[name] for name in ("spatial_merge_size", "window_size", "patch_size"))
    windows = get_vision_window_index(grid, merge, size, patch)[0].numpy()
    grouped = blocks.reshape(len(blocks), len(windows), merge**2, -1)
    return grouped[:, np.argsort(windows)].reshape(blocks.shape)


def prefill(model, recorder: HookRecorder, input_ids: torch.Tensor, position_ids: torch.Tensor, **extra):
    """One forward with explicit positions [3, 1, T]. Returns the arrays of the case and the cache."""
    model.model.rope_deltas = None
    out = model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **extra)
    arrays = recorder.take() | caches_of(out.past_key_values)
    grid = extra.get("image_grid_thw", extra.get("video_grid_thw"))
    if grid is not None:
        arrays["vision_blocks"] = in_patch_order(arrays["vision_blocks"], grid)
    arrays |= {"logits": out.logits[0].numpy(), "input_ids": input_ids[0].numpy().astype(np.int32)}
    arrays["position_ids"] = position_ids[:, 0].T.numpy().astype(np.int32)
    return arrays, out.past_key_values


def decode(model, cache, logits: np.ndarray, length: int, delta: int, steps: int = 4) -> dict[str, np.ndarray]:
    """Greedy cached decode: tokens fed [steps], their positions [steps], and the logits [steps, V] that follow."""
    tokens, positions, rows = [], [], []
    token = int(logits[-1].argmax())
    for step in range(steps):
        position = length + step + delta
        ids = torch.full((3, 1, 1), position)
        out = model(input_ids=torch.tensor([[token]]), position_ids=ids, past_key_values=cache, use_cache=True)
        tokens.append(token)
        positions.append(position)
        rows.append(out.logits[0, -1].numpy())
        token = int(rows[-1].argmax())
    return {
        "decode_tokens": np.array(tokens, np.int32),
        "decode_positions": np.array(positions, np.int32),
        "decode_logits": np.stack(rows),
    }


def save(name: str, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(OUT / f"{name}.npz", **arrays)
    print(f"{name:>16} {(OUT / f'{name}.npz').stat().st_size / 1024:7.1f} KiB")


def check(model, arrays: dict[str, np.ndarray], **inputs) -> None:
    """The same inputs with positions left to transformers must give the same logits."""
    model.model.rope_deltas = None
    logits = model(input_ids=torch.tensor(arrays["input_ids"][None]).long(), **inputs).logits[0].numpy()
    assert np.array_equal(logits, arrays["logits"]), np.abs(logits - arrays["logits"]).max()


def make_text(model, recorder: HookRecorder) -> None:
    input_ids = tokens_of([17])
    positions = torch.arange(17).expand(3, 1, -1)
    arrays, _ = prefill(model, recorder, input_ids, positions)
    check(model, arrays)
    recorder.take()
    save("text", arrays)


def make_images(model, recorder: HookRecorder, processor) -> None:
    sizes = {"one_image": [(24, 40)], "two_images": [(24, 40), (40, 16)]}
    for name, shapes in sizes.items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(shapes)]
        inputs = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
        counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        input_ids = tokens_of([5, *[(IMAGE, count) for count in counts], 4])
        kinds = kinds_of(input_ids)
        positions, delta = model.model.get_rope_index(input_ids, kinds, inputs["image_grid_thw"])
        arrays, cache = prefill(model, recorder, input_ids, positions, **inputs)
        check(model, arrays, mm_token_type_ids=kinds, **inputs)
        recorder.take()
        arrays |= {f"image.{index}": image for index, image in enumerate(images)}
        arrays |= {"rope_delta": np.int32(delta.item())}
        arrays |= {"pixel_values": inputs["pixel_values"].numpy()}
        arrays |= {"image_grid_thw": inputs["image_grid_thw"].numpy().astype(np.int32)}
        if name == "one_image":
            arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1], int(delta))
            recorder.values.clear()
        else:
            make_masked(model, recorder, arrays, inputs, counts)
        save(name, arrays)


def make_masked(model, recorder: HookRecorder, causal: dict[str, np.ndarray], inputs, counts: list[int]) -> None:
    """The two-image prompt where the second image's chunk cannot see the first one's: a 4-D additive mask."""
    length = len(causal["input_ids"])
    allowed = np.tril(np.ones((length, length), bool))
    a = slice(5, 5 + counts[0] + 2)
    b = slice(a.stop, a.stop + counts[1] + 2)
    input_ids = torch.tensor(causal["input_ids"][None]).long()
    positions = torch.tensor(causal["position_ids"].T[:, None]).long()

    def run(allowed: np.ndarray) -> dict[str, np.ndarray]:
        mask = torch.where(torch.tensor(allowed)[None, None], 0.0, torch.finfo(torch.float32).min)
        return prefill(model, recorder, input_ids, positions, attention_mask=mask, **inputs)[0]

    assert np.array_equal(run(allowed)["logits"], causal["logits"])
    allowed[b, a] = False
    arrays = run(allowed)
    change = np.abs(arrays["logits"] - causal["logits"]).max(axis=1)
    assert change[: b.start].max() == 0
    assert change[b.start :].min() > 1e-2
    kept = ("input_ids", "position_ids", "hidden", "k", "v", "logits")
    spans = {"first": np.array([a.start, a.stop], np.int32), "second": np.array([b.start, b.stop], np.int32)}
    save("masked", {name: arrays[name] for name in kept} | {"allowed": allowed} | spans)


def make_video(model, recorder: HookRecorder) -> None:
    """Three temporal patches of two frames each; positions once by each rule, the stored run uses the authors'."""
    grid = torch.tensor([[3, 4, 6]])
    count, feature = int(grid.prod()), 3 * 2 * 4 * 4
    pixels = standard_values("video", count * feature).reshape(count, feature).astype(np.float32)
    second_per_grid = torch.tensor([1.0])
    input_ids = tokens_of([4, (VIDEO, count // 4), 5])
    kinds = kinds_of(input_ids)
    hf5, _ = model.model.get_rope_index(input_ids, kinds, None, grid, second_per_grid)
    positions = hf5.clone()
    after = 5 + count // 4
    positions[:, :, after:] += positions[:, :, :after].max() + 1 - positions[0, 0, after]
    inputs = {"pixel_values_videos": torch.tensor(pixels), "video_grid_thw": grid}
    arrays, _ = prefill(model, recorder, input_ids, positions, **inputs)
    other, _ = prefill(model, recorder, input_ids, hf5, **inputs)
    arrays |= {
        "pixel_values": pixels,
        "video_grid_thw": grid.numpy().astype(np.int32),
        "second_per_grid_ts": second_per_grid.numpy(),
        "position_ids_hf5": other["position_ids"],
        "logits_hf5": other["logits"],
    }
    save("video", arrays)


def png_bytes(image: Image.Image) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8)


def preprocessing_images() -> dict[str, Image.Image]:
    """Images of many modes and sizes; the tiny processor's factor is 8 and its range 256..4096 pixels."""
    rgb = lambda name, height, width: Image.fromarray(draw_image(name, height, width))
    rgba = Image.fromarray(draw_image("rgba", 24, 32, 4), "RGBA")
    palette = rgb("palette", 24, 40).quantize(16)
    return {
        "rgb_exact": rgb("rgb_exact", 24, 40),
        "rgb_odd": rgb("rgb_odd", 23, 37),
        "rgb_half": rgb("rgb_half", 20, 28),
        "rgb_small": rgb("rgb_small", 9, 10),
        "rgb_thin": rgb("rgb_thin", 3, 150),
        "rgb_large": rgb("rgb_large", 100, 90),
        "rgba": rgba,
        "grey_alpha": rgba.convert("LA").resize((19, 27)),
        "grey": rgb("grey", 31, 18).convert("L"),
        "palette": palette,
        "palette_alpha": rgba.quantize(12),
        "bilevel": rgb("bilevel", 25, 33).convert("1"),
    }


def make_preprocessing(processor) -> None:
    arrays = {}
    for name, image in preprocessing_images().items():
        stored = png_bytes(image)
        opened = Image.open(io.BytesIO(stored.tobytes()))
        out = processor(images=opened, return_tensors="np")
        arrays |= {f"{name}.png": stored, f"{name}.pixel_values": out["pixel_values"]}
        arrays |= {f"{name}.grid": out["image_grid_thw"].astype(np.int32)}
    default = Qwen2VLImageProcessorPil()
    image = Image.fromarray(draw_image("default", 61, 83))
    out = default(images=image, return_tensors="np")
    arrays |= {"default.png": png_bytes(image), "default.pixel_values": out["pixel_values"]}
    arrays |= {"default.grid": out["image_grid_thw"].astype(np.int32)}
    sizes = (standard_values("sizes", 400) ** 2 * 700).astype(int).reshape(-1, 2) + 15
    sizes = np.array([size for size in sizes.tolist() if max(size) / min(size) < 200])
    resized = [smart_resize(*size, 28, 56 * 56, 28 * 28 * 1280) for size in sizes.tolist()]
    arrays |= {"sizes": sizes.astype(np.int32), "resized": np.array(resized, np.int32)}
    save("preprocessing", arrays)


def make_positions(model) -> None:
    """Position tables of get_rope_index for many mixtures; `second_per_grid_ts` are float32."""
    mixtures = {
        "image": ([3, "i", 2], [(1, 6, 10)], [], []),
        "images": (["i", 1, "i", "i", 5], [(1, 2, 8), (1, 8, 2), (1, 4, 4)], [], []),
        "video": ([2, "v", 3], [], [(4, 4, 6)], [1.0]),
        "video_slow": ([1, "v", 1], [], [(3, 2, 2)], [0.2]),
        "videos": (["v", 2, "v", 2], [], [(10, 4, 6), (2, 8, 4)], [2 / 3, 1.7]),
        "mixed": ([2, "i", 1, "v", "i", "v", 3], [(1, 4, 6), (1, 2, 2)], [(5, 4, 4), (7, 2, 6)], [0.35, 1.1]),
    }
    arrays = {}
    for name, (parts, images, videos, seconds) in mixtures.items():
        queues = {"i": iter(images), "v": iter(videos)}
        pads = {"i": IMAGE, "v": VIDEO}
        sized = [(pads[p], int(np.prod(next(queues[p]))) // 4) if isinstance(p, str) else p for p in parts]
        input_ids = tokens_of(sized)
        tensors = [torch.tensor(value) if value else None for value in (images, videos, seconds)]
        positions, delta = model.model.get_rope_index(input_ids, kinds_of(input_ids), *tensors)
        arrays |= {f"{name}.input_ids": input_ids[0].numpy().astype(np.int32)}
        arrays |= {f"{name}.images": np.array(images, np.int32).reshape(-1, 3)}
        arrays |= {f"{name}.videos": np.array(videos, np.int32).reshape(-1, 3)}
        arrays |= {f"{name}.seconds": np.array(seconds, np.float32)}
        arrays |= {f"{name}.positions": positions[:, 0].T.numpy().astype(np.int32)}
        arrays |= {f"{name}.delta": np.int32(delta.item())}
    save("positions", arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    write_configs()
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **PIXELS)
    processor.save_pretrained(OUT)
    model = build_model()
    recorder = HookRecorder(model)
    with torch.no_grad():
        make_text(model, recorder)
        make_images(model, recorder, processor)
        make_video(model, recorder)
        make_positions(model)
    make_preprocessing(processor)


if __name__ == "__main__":
    main()
