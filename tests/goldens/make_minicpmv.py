"""Make the MiniCPM-V goldens with transformers (5.23), torch and Pillow. See README.md beside this file.

transformers has no such class: here its SigLIP, its Qwen2, Llama and Qwen3 and torch's multi-head attention are
joined by the published rules of `modeling_minicpmv.py`, `modeling_navit_siglip.py` and `resampler.py`; images are made
by those of `image_processing_minicpmv.py`.

Run it in an environment that has them: `python tests/goldens/make_minicpmv.py`. It rewrites `minicpmv/`,
`minicpmv_2_6/` and `minicpmv_4_0/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import hashlib
import json
import math

import numpy as np
import torch
from PIL import Image
from redraw import draw_frames, redraw_all
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from vlm_golden import (
    HERE,
    IMAGE,
    TEXT,
    WHOLE,
    LayerRecorder,
    decode,
    draw_image,
    line,
    prefill,
    save,
    tokens_of,
    write_shapes,
)

PATCH, SIDE, SLICES, QUERIES, WIDTH = 4, 16, 4, 3, 256
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 10 * PATCH,
    "patch_size": PATCH,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
BASE = TEXT | {"hidden_size": WIDTH, "num_hidden_layers": 2, "eos_token_id": 299}
FACTORS = {"short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35]}
FACTORS["long_factor"] = FACTORS["short_factor"]
# The release's factor, and its original length that is not the model's own.
LONGROPE = {"rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 4114, **FACTORS}
TEXTS = {
    "minicpmv": (4.5, Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}, {"rope_theta": 100.0}, "k_norm"),
    "minicpmv_2_6": (2.6, Qwen2Config, Qwen2ForCausalLM, {}, {"rope_theta": 100.0}, None),
    "minicpmv_4_0": (4.0, LlamaConfig, LlamaForCausalLM, {"head_dim": 16}, {"rope_theta": 100.0, **LONGROPE}, None),
}
SIZES = {"text": [], "one_image": [(20, 16)], "two_images": [(18, 30), (11, 9)]}
"""By case: (height, width) of images, of which three slices and one are made."""
EXTRA = {"tiny": (3, 5), "square": (16, 16), "wide": (9, 80), "tall": (70, 11), "odd": (37, 35), "large": (61, 90)}


# ------------------------------------------------------------------------------------------------------------- images


def ensure_divide(length, patch_size):
    return max(round(length / patch_size) * patch_size, patch_size)


def find_best_resize(size, upscale=False):
    width, height = size
    if (width * height > SIDE * SIDE) or upscale:
        r = width / height
        height = int(SIDE / math.sqrt(r))
        width = int(height * r)
    return ensure_divide(width, PATCH), ensure_divide(height, PATCH)


def get_sliced_grid(size, most):
    width, height = size
    log_ratio = math.log(width / height)
    multiple = min(math.ceil(width * height / (SIDE * SIDE)), most)
    if multiple <= 1:
        return None
    candidates = []
    for number in [multiple - 1, multiple, multiple + 1]:
        if number == 1 or number > most:
            continue
        candidates += [[m, number // m] for m in range(1, number + 1) if number % m == 0]
    best, error = [1, 1], float("inf")
    for grid in candidates:
        own = abs(log_ratio - math.log(grid[0] / grid[1]))
        if own < error:
            best, error = grid, own
    return best


def get_sliced_images(image, most=SLICES):
    grid, bicubic = get_sliced_grid(image.size, most), Image.Resampling.BICUBIC
    if grid is None:
        return [image.resize(find_best_resize(image.size, upscale=True), resample=bicubic)], grid
    pieces = [image.copy().resize(find_best_resize(image.size), resample=bicubic)]
    width, height = ensure_divide(image.width, grid[0]), ensure_divide(image.height, grid[1])
    best = find_best_resize((width / grid[0], height / grid[1]), upscale=True)
    refined = image.resize((best[0] * grid[0], best[1] * grid[1]), resample=bicubic)
    wide, tall = int(refined.width / grid[0]), int(refined.height / grid[1])
    for top in range(0, refined.height, tall):
        pieces += [refined.crop((left, top, left + wide, top + tall)) for left in range(0, refined.width, wide)]
    return pieces, grid


def reshape_by_patch(image):
    patches = torch.nn.functional.unfold(image, (PATCH, PATCH), stride=(PATCH, PATCH))
    patches = patches.reshape(image.size(0), PATCH, PATCH, -1)
    return patches.permute(0, 1, 3, 2).reshape(image.size(0), PATCH, -1)


def process(images):
    """`MiniCPMVImageProcessor.preprocess`: pixels [3, PATCH, PATCH · patches] of every slice, and their grids."""
    slices, sizes, grids = [], [], []
    for image in images:
        pieces, grid = get_sliced_images(Image.fromarray(image))
        grids.append(grid or [0, 0])
        for piece in pieces:
            pixels = np.array(piece).astype(np.float32) / 255
            mean, std = (np.array(np.array([0.5, 0.5, 0.5]), dtype=pixels.dtype) for _ in range(2))
            pixels = ((pixels - mean) / std).transpose(2, 0, 1)
            slices.append(reshape_by_patch(torch.from_numpy(pixels.copy())))
            sizes.append([pixels.shape[1] // PATCH, pixels.shape[2] // PATCH])
    return {"slices": slices, "tgt_sizes": torch.tensor(sizes, dtype=torch.int32), "slice_grids": np.array(grids)}


def packed(slices):
    """Patches [P, 3, p, p] in raster order, slice by slice."""
    return np.concatenate([s.reshape(3, PATCH, -1, PATCH).permute(2, 0, 1, 3).numpy() for s in slices])


# -------------------------------------------------------------------------------------------------------------- model


def get_1d_sincos_pos_embed(embed_dim, pos):
    omega = np.arange(embed_dim // 2, dtype=np.float32)
    omega /= embed_dim / 2.0
    omega = 1.0 / 10000**omega
    out = np.einsum("hw,d->hwd", pos, omega)
    return np.concatenate([np.sin(out), np.cos(out)], axis=-1)


def get_2d_sincos_pos_embed(embed_dim, height, width):
    grid = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    return np.concatenate([get_1d_sincos_pos_embed(embed_dim // 2, axis) for axis in grid], axis=-1)


class Resampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        norm = lambda: torch.nn.LayerNorm(WIDTH, eps=1e-6)
        self.query = torch.nn.Parameter(torch.zeros(QUERIES, WIDTH))
        self.kv_proj = torch.nn.Linear(VISION["hidden_size"], WIDTH, bias=False)
        self.attn = torch.nn.MultiheadAttention(WIDTH, WIDTH // 128)
        self.ln_q, self.ln_kv, self.ln_post = norm(), norm(), norm()
        self.proj = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x, tgt_sizes):
        lengths = tgt_sizes[:, 0] * tgt_sizes[:, 1]
        mask = torch.zeros((len(x), int(lengths.max())), dtype=torch.bool)
        pos_embed = []
        for i, (height, width) in enumerate(tgt_sizes.tolist()):
            table = torch.from_numpy(get_2d_sincos_pos_embed(WIDTH, 70, 70)).float()
            pos_embed.append(table[:height, :width, :].reshape((height * width, -1)))
            mask[i, int(lengths[i]) :] = True
        pos_embed = torch.nn.utils.rnn.pad_sequence(pos_embed, batch_first=True).permute(1, 0, 2)
        x = self.ln_kv(self.kv_proj(x)).permute(1, 0, 2)
        q = self.ln_q(self.query).unsqueeze(1).repeat(1, x.shape[1], 1)
        out = self.attn(q, x + pos_embed, x, key_padding_mask=mask)[0]
        return self.ln_post(out.permute(1, 0, 2)) @ self.proj


class MiniCPMV(torch.nn.Module):
    def __init__(self, family):
        super().__init__()
        _, config, cls, own, rope, _ = TEXTS[family]
        rope = {"rope_type": "default", **rope}
        self.llm = cls(config(**BASE, **own, rope_parameters=rope, attn_implementation="eager"))
        vision = SiglipVisionConfig(**VISION, vision_use_head=False, attn_implementation="eager")
        self.vpm = SiglipVisionModel(vision)
        self.resampler = Resampler()

    def names(self):
        found = {f"llm.{name}": value for name, value in self.llm.named_parameters()}
        for name, value in self.vpm.named_parameters():
            found[f"vpm.{name.removeprefix('vision_model.')}"] = value
        return found | {f"resampler.{name}": value for name, value in self.resampler.named_parameters()}

    def tower(self, pixels, height, width):
        """`SiglipVisionTransformer` on one slice [3, p, p · patches]."""
        vpm = getattr(self.vpm, "vision_model", self.vpm)
        patches = vpm.embeddings.patch_embedding(pixels[None]).flatten(2).transpose(1, 2)
        side = vpm.embeddings.image_size // PATCH
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        buckets = []
        for count in (height, width):
            coordinates = torch.arange(0, 1 - 1e-6, 1 / count)
            buckets.append(torch.bucketize(coordinates, boundaries, right=True))
        position_ids = (buckets[0][:, None] * side + buckets[1]).flatten()
        hidden = patches + vpm.embeddings.position_embedding(position_ids)
        return vpm.post_layernorm(vpm.encoder(inputs_embeds=hidden).last_hidden_state)[0]

    def features(self, slices, tgt_sizes):
        found = [self.tower(s, *size) for s, size in zip(slices, tgt_sizes, strict=True)]
        return self.resampler(torch.nn.utils.rnn.pad_sequence(found, batch_first=True), tgt_sizes)

    def forward(self, input_ids, slices=None, tgt_sizes=None, slice_grids=None, **keywords):
        embeddings = self.llm.model.embed_tokens(input_ids)
        if slices:
            embeddings = embeddings.clone()
            embeddings[input_ids == IMAGE] = self.features(slices, tgt_sizes).reshape(-1, WIDTH)
        return self.llm(inputs_embeds=embeddings, **keywords)


def write_configs(family) -> None:
    """`config.json` without what classes have by default; `config_release.json` with all that releases say."""
    version, _, _, own, rope, _ = TEXTS[family]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"} or None
    raw = {
        "architectures": ["MiniCPMV"],
        "version": version,
        **BASE,
        **own,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "query_num": QUERIES,
        "drop_vision_last_layer": False,
        "image_token_id": IMAGE,
        "vision_config": {key: value for key, value in VISION.items() if key not in ("hidden_act", "layer_norm_eps")},
        "torch_dtype": "float32",
        "model_type": "minicpmv",
    }
    (HERE / family / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    release = raw | {
        "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
        "batch_vision_input": True,
        "image_size": 448,
        "patch_size": PATCH,
        "slice_config": {"max_slice_nums": SLICES, "patch_size": PATCH, "model_type": "minicpmv"},
        "slice_mode": True,
        "use_image_id": True,
        "vision_config": {"model_type": "siglip", **VISION, "attention_dropout": 0.0, "num_channels": 3},
    }
    release |= {"batch_3d_resampler": True} if version == 4.5 else {"vision_batch_size": 16}
    (HERE / family / "config_release.json").write_text(json.dumps(release, indent=2) + "\n")
    processor = {"image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": SLICES, "scale_resolution": SIDE}
    processor |= {"patch_size": PATCH, "use_image_id": True, "image_feature_size": QUERIES, "slice_mode": True}
    processor |= {"im_start": "<image>", "im_end": "</image>", "slice_start": "<slice>", "slice_end": "</slice>"}
    processor |= {"unk": "<unk>", "im_id_start": "<image_id>", "im_id_end": "</image_id>", "version": version}
    processor |= {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    (HERE / family / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def make(family, sizes) -> None:
    (HERE / family).mkdir(exist_ok=True)
    write_configs(family)
    model = MiniCPMV(family).eval()
    parameters = model.names()
    shapes = {name: list(parameters[name].shape) for name in sorted(parameters)}
    for name, value in redraw_all(shapes).items():
        parameters[name].copy_(torch.from_numpy(value))
    write_shapes(family, shapes)
    keys = TEXTS[family][5]
    recorder = LayerRecorder(model.llm.model, {"vision_features": [model.resampler]}, keys=keys)
    cases = {}
    for case, shapes in sizes.items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(shapes)]
        inputs = process(images) if images else {}
        parts, kept = [3], {f"image.{index}": image for index, image in enumerate(images)}
        for columns, rows in inputs.get("slice_grids", np.zeros((0, 2), int)).tolist():
            parts += [(QUERIES,)] * (1 + columns * rows) + [2]
        kept |= {"pixel_values": packed(inputs["slices"])} if images else {}
        cases[case] = (tokens_of([*parts, 2]), inputs, kept)
    for case, (input_ids, inputs, kept) in cases.items():
        length = input_ids.shape[1]
        arrays, cache = prefill(model, recorder, input_ids, line(length), **inputs)
        arrays |= kept | {name: np.asarray(value) for name, value in inputs.items() if name != "slices"}
        arrays = {name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in arrays.items()}
        if family != "minicpmv":  # the tower and its features are those of `minicpmv`
            arrays = {name: value for name, value in arrays.items() if name not in ("inputs_embeds", "vision_features")}
        if case == WHOLE:
            arrays |= decode(model, cache, arrays["logits"], length, 1)
        save(family, case, arrays)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        make("minicpmv", SIZES)
        for family in ("minicpmv_2_6", "minicpmv_4_0"):
            make(family, {"two_images": [(13, 21), (11, 9)]})

        kept = {}
        for name, shape in EXTRA.items():
            out = process(list(draw_frames(name, 1, *shape)))
            kept |= {f"{name}.size": np.array(shape, np.int32), f"{name}.tgt_sizes": out["tgt_sizes"].numpy()}
            kept |= {f"{name}.slice_grids": out["slice_grids"].astype(np.int32)}
            pixels = packed(out["slices"])
            kept[f"{name}.shape"] = np.array(pixels.shape, np.int32)
            kept[f"{name}.digest"] = np.array(hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest())
        for side in (10, 70):
            for count in (1, 2, 5, 13, 28, 32, 49, 58, 77, 98, 110, 155):
                boundaries = torch.arange(1 / side, 1.0, 1 / side)
                shares = torch.arange(0, 1 - 1e-6, 1 / torch.tensor([count], dtype=torch.int32)[0])
                kept[f"buckets.{side}.{count}"] = (
                    torch.bucketize(shares, boundaries, right=True).numpy().astype(np.int32)
                )
        np.savez_compressed(HERE / "minicpmv" / "preprocessing.npz", **kept)


if __name__ == "__main__":
    main()
