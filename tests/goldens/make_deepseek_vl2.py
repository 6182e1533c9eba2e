"""Make the DeepSeek-VL2 goldens with transformers (5.23) and torch. See README.md beside this file.

transformers has no such class. Its parts are there: the decoders are DeepSeek-V3's (latent attention, sigmoid routing)
and DeepSeek-OCR-2's (multi-head attention, softmax routing), the tower's blocks SigLIP's. They are joined here in torch
by the authors' published rules: `modeling_deepseek_vl_v2.py` (`MlpProjector`, `prepare_inputs_embeds`) and
`processing_deepseek_vl_v2.py` (`select_best_resolution`, `tokenize_with_images`).

Run it in an environment that has them: `python tests/goldens/make_deepseek_vl2.py`. It rewrites `deepseek_vl2/` (every
key said) and `deepseek_vl2_tiny/` (as few keys as the authors' classes need).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import hashlib
import json
import math
import re
import types

import numpy as np
import torch
from make_deepseek_ocr2 import save_rows
from PIL import Image, ImageOps
from redraw import redraw_all
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3Model, SiglipVisionConfig, SiglipVisionModel
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel
from vlm_golden import HERE, IMAGE, LayerRecorder, decode, draw_image, line, prefill, tokens_of, write_shapes

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
ROUTING = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
ROUTING |= {"first_k_dense_replace": 1}
FULL = {
    "architectures": ["DeepseekVLV2ForCausalLM"],
    "candidate_resolutions": [[30, 30], [30, 60], [60, 30], [60, 60], [90, 30], [30, 90]],
    "global_view_pos": "head",
    "image_token_id": IMAGE,
    "language_config": {
        **TEXT,
        **EXPERTS,
        **LATENT,
        **ROUTING,
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "lm_head": True,
        "max_position_embeddings": 4096,
        "model_type": "deepseek_v2",
        "moe_layer_freq": 1,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rm_head": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 100.0,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
        "use_cache": True,
        "use_mla": True,
    },
    "model_type": "deepseek_vl_v2",
    "projector_config": {
        "depth": 2,
        "downsample_ratio": 2,
        "input_dim": 32,
        "mlp_ratio": 2,
        "model_type": "mlp_projector",
        "n_embed": 64,
        "projector_type": "downsample_mlp_gelu",
        "token_pooling": False,
    },
    "tile_tag": "2D",
    "torch_dtype": "float32",
    "transformers_version": "4.38.2",
    "vision_config": {
        "class_token": False,
        "deterministic": False,
        "global_pool": "map",
        "heads": 2,
        "ignore_head": True,
        "image_size": 30,
        "layers": 3,
        "mlp_ratio": 3.7362,
        "model_name": "siglip_so400m_patch14_384",
        "model_type": "vision",
        "num_classes": 0,
        "num_recomputing_layers": 0,
        "patch_size": 4,
        "use_checkpoint": False,
        "weight_init": "skip",
        "width": 32,
    },
}
# The sizes that cannot be their classes' own; tiles of 384 pixels in 3×3 patches, whose last rows no patch has.
SPARSE = {
    "candidate_resolutions": [[384, 384], [384, 768], [768, 384], [768, 768]],
    "image_token_id": IMAGE,
    "language_config": {**TEXT, **EXPERTS, "topk_method": "greedy", "use_mla": False},
    "model_type": "deepseek_vl_v2",
    "projector_config": {"input_dim": 32, "n_embed": 64},
    "tile_tag": "2D",
    "vision_config": {"layers": 2, "patch_size": 100, "width": 32},
}
SIZES = {
    "deepseek_vl2": {"text": [], "one_image": [(40, 70)], "two_images": [(61, 37), (20, 27)]},
    "deepseek_vl2_tiny": {"text": [], "one_image": [(40, 57)]},
}


def decoder_of(raw: dict) -> torch.nn.Module:
    """transformers' decoder that computes the same; the authors' defaults are DeepSeek-V2's."""
    text = raw["language_config"]
    if text.get("use_mla", True):
        own = {key: text[key] for key in (*TEXT, *EXPERTS, *LATENT, *ROUTING, "attention_bias", "rms_norm_eps")}
        rope = {"rope_type": "default", "rope_theta": text["rope_theta"]}
        return DeepseekV3Model(
            DeepseekV3Config(**own, rope_parameters=rope, rope_interleave=True, attn_implementation="eager")
        )
    own = {key: text[key] for key in (*TEXT, *EXPERTS)}
    rope, kinds = {"rope_type": "default", "rope_theta": 1e4}, ["sparse"] * 3
    own |= {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    return DeepseekOcr2TextModel(
        DeepseekOcr2TextConfig(
            **own, rms_norm_eps=1e-6, mlp_layer_types=kinds, rope_parameters=rope, attn_implementation="eager"
        )
    )


def tower_of(raw: dict) -> SiglipVisionModel:
    """transformers' SigLIP with the authors' defaults of `VisionEncoderConfig`, and their GELU."""
    vision = raw["vision_config"]
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=vision["width"],
            intermediate_size=int(vision["width"] * vision.get("mlp_ratio", 4)),
            num_hidden_layers=vision["layers"],
            num_attention_heads=vision.get("heads", 16),
            image_size=vision.get("image_size", 384),
            patch_size=vision["patch_size"],
            hidden_act="gelu_pytorch_tanh",
            layer_norm_eps=1e-6,
            vision_use_head=False,
            attn_implementation="eager",
        )
    )


TIMM = [
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.layer_norm", r"vision.blocks.\1.norm"),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.self_attn\.out_proj", r"vision.blocks.\1.attn.proj"),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.self_attn\.[qkv]_proj", r"vision.blocks.\1.attn.qkv"),
    (r"^(?:vision_model\.)?encoder\.layers\.(\d+)\.mlp", r"vision.blocks.\1.mlp"),
    (r"^(?:vision_model\.)?embeddings\.position_embedding\.weight", "vision.pos_embed"),
    (r"^(?:vision_model\.)?embeddings\.patch_embedding", "vision.patch_embed.proj"),
    (r"^(?:vision_model\.)?post_layernorm", "vision.norm"),
]
"""SigLIP's names to timm's."""


def to_timm(name: str) -> str:
    for pattern, target in TIMM:
        name, count = re.subn(pattern, target, name)
        if count:
            return name
    raise KeyError(name)


def build(raw: dict) -> tuple[torch.nn.Module, SiglipVisionModel, dict[str, torch.Tensor], dict[str, list[int]]]:
    """Decoder and tower with weights redrawn under the authors' names, all parameters, and their shapes."""
    decoder, tower = decoder_of(raw), tower_of(raw)
    width, glue = TEXT["hidden_size"], raw["projector_config"]
    inner = width * glue.get("mlp_ratio", 1)
    shapes = {
        "image_newline": [width],
        "view_seperator": [width],
        "projector.layers.0.weight": [inner, 4 * glue["input_dim"]],
        "projector.layers.0.bias": [inner],
        "projector.layers.2.weight": [width, inner],
        "projector.layers.2.bias": [width],
        "language.lm_head.weight": [TEXT["vocab_size"], width],
    }
    for name, value in decoder.state_dict().items():
        theirs, shape = f"language.model.{name}", list(value.shape)
        if name.endswith("experts.gate_up_proj"):
            for expert in range(shape[0]):
                for part in ("gate", "up"):
                    shapes[theirs.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = [shape[1] // 2, shape[2]]
        elif name.endswith("experts.down_proj"):
            shapes |= {theirs.replace("down_proj", f"{e}.down_proj.weight"): shape[1:] for e in range(shape[0])}
        else:
            shapes[theirs] = shape
    siglip = {name: value for name, value in tower.state_dict().items() if "position_ids" not in name}
    for name, value in siglip.items():
        theirs, shape = to_timm(name), list(value.shape)
        fused, table = ".qkv." in theirs, theirs.endswith("pos_embed")
        shapes[theirs] = [3 * shape[0], *shape[1:]] if fused else [1, *shape] if table else shape
    drawn = {name: torch.from_numpy(value) for name, value in redraw_all(shapes).items()}

    def text(name: str, like: torch.Tensor) -> torch.Tensor:
        theirs = f"language.model.{name}"
        if name.endswith("experts.gate_up_proj"):
            pick = lambda e, part: drawn[theirs.replace("gate_up_proj", f"{e}.{part}_proj.weight")]
            return torch.stack([torch.cat([pick(e, "gate"), pick(e, "up")]) for e in range(len(like))])
        if name.endswith("experts.down_proj"):
            return torch.stack([drawn[theirs.replace("down_proj", f"{e}.down_proj.weight")] for e in range(len(like))])
        return drawn[theirs]

    def image(name: str) -> torch.Tensor:
        found = drawn[to_timm(name)]
        part = re.search(r"([qkv])_proj", name)
        return found.chunk(3)["qkv".index(part[1])] if part else found[0] if "position_embedding" in name else found

    decoder.load_state_dict({name: text(name, value) for name, value in decoder.state_dict().items()})
    tower.load_state_dict({name: image(name) for name in siglip}, strict=False)
    return decoder.eval(), tower.eval(), drawn, dict(sorted(shapes.items()))


def select_best_resolution(size: tuple[int, int], candidates: list) -> tuple[int, int]:
    best, most, least = (0, 0), 0, math.inf
    for width, height in candidates:
        scale = min(width / size[0], height / size[1])
        effective = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        wasted = width * height - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (width, height), effective, wasted
    return best


def pixels_of(image: Image.Image) -> torch.Tensor:
    """ToTensor and Normalize(0.5, 0.5)."""
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div(255) - 0.5) / 0.5


def prepared(images: list[np.ndarray], candidates: list) -> dict[str, torch.Tensor]:
    """`tokenize_with_images` of at most two images: views, tiles, and rows and columns of tiles."""
    views, tiles, grids, side = [], [], [], candidates[0][0]
    for array in images:
        image = Image.fromarray(array)
        width, height = select_best_resolution(image.size, candidates)
        views.append(pixels_of(ImageOps.pad(image, (side, side), color=(127, 127, 127))))
        local = ImageOps.pad(image, (width, height), color=(127, 127, 127))
        for top in range(0, height, side):
            tiles += [pixels_of(local.crop((x, top, x + side, top + side))) for x in range(0, width, side)]
        grids.append((height // side, width // side))
    return {
        "pixel_values": torch.stack(views),
        "pixel_values_local": torch.stack(tiles),
        "tile_grids": torch.tensor(grids),
    }


def make(family: str, raw: dict) -> None:
    (HERE / family).mkdir(exist_ok=True)
    (HERE / family / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    settings = {"candidate_resolutions": raw["candidate_resolutions"], "downsample_ratio": 2, "normalize": True}
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_token": "<image>", "sft_format": "deepseek"}
    settings |= {"patch_size": raw["vision_config"]["patch_size"], "processor_class": "DeepseekVLV2Processor"}
    (HERE / family / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    decoder, tower, drawn, shapes = build(raw)
    write_shapes(family, shapes)
    newline, separator = drawn["image_newline"], drawn["view_seperator"]

    def projected(pixels: torch.Tensor) -> torch.Tensor:
        """`MlpProjector.forward` of the tower's features, [n, side, side, D]."""
        found = tower(pixel_values=pixels).last_hidden_state
        side = int(found.shape[1] ** 0.5)
        found = found.reshape(len(found), side, side, -1)
        if side % 2:
            found = functional.pad(found, (0, 0, 0, 1, 0, 1))
        folded = functional.unfold(found.permute(0, 3, 1, 2), kernel_size=2, stride=2).permute(0, 2, 1)
        first, second = ((drawn[f"projector.layers.{n}.weight"], drawn[f"projector.layers.{n}.bias"]) for n in (0, 2))
        out = functional.linear(functional.gelu(functional.linear(folded, *first)), *second)
        return out.reshape(len(out), (side + 1) // 2, (side + 1) // 2, -1)

    def joined(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with_ends = lambda x: torch.cat([x, newline.expand(len(x), 1, -1)], dim=1).flatten(0, 1)
        whole, local, parts = projected(inputs["pixel_values"]), projected(inputs["pixel_values_local"]), []
        for view, (rows, columns) in zip(whole, inputs["tile_grids"].tolist(), strict=True):
            own, local = local[: rows * columns], local[rows * columns :]
            lines = [torch.cat(list(own[row * columns : (row + 1) * columns]), dim=1) for row in range(rows)]
            parts += [with_ends(view), separator[None], with_ends(torch.cat(lines))]
        return torch.cat(parts)

    def call(input_ids, position_ids, use_cache, past_key_values=None, **inputs):
        embeddings = decoder.embed_tokens(input_ids)
        if inputs:
            embeddings[input_ids == IMAGE] = joined(inputs)
        out = decoder(
            inputs_embeds=embeddings,
            position_ids=position_ids,
            use_cache=use_cache,
            past_key_values=past_key_values,
        )
        logits = functional.linear(out.last_hidden_state, drawn["language.lm_head.weight"])
        return types.SimpleNamespace(logits=logits, past_key_values=out.past_key_values)

    latent = raw["language_config"].get("use_mla", True)
    recorder = LayerRecorder(decoder, {}, None if latent else "k_proj", heads=4)
    vision = raw["vision_config"]
    side = -(-(vision.get("image_size", 384) // vision["patch_size"]) // 2)
    # Only an image that is larger than one tile gets several; squares of one colour make a small file.
    enlarged = 8 if side == 2 else 1
    for case, sizes in SIZES[family].items():
        images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
        images = [image.repeat(enlarged, 0).repeat(enlarged, 1) for image in images]
        inputs, parts = prepared(images, raw["candidate_resolutions"]) if images else {}, [5]
        for rows, columns in inputs["tile_grids"].tolist() if images else ():
            parts += [((side + 1) * side + 1 + (columns * side + 1) * rows * side,), 2]
        input_ids = tokens_of([*parts, 3], start=None, end=None)
        length = input_ids.shape[1]
        arrays, cache = prefill(
            call, recorder, input_ids, line(length), ("ckv", "kpe") if latent else ("k", "v"), **inputs
        )
        if case == "one_image":
            arrays |= decode(call, cache, arrays["logits"], length, 1)
        kept = {f"image.{index}": image for index, image in enumerate(images)}
        kept |= {name: value.numpy() for name, value in inputs.items()}
        if images:
            kept["tile_grids"] = kept["tile_grids"].astype(np.int32)
        # Of large pixels, a sum over their bits: the processor's are compared with it before they are used.
        for name in ("pixel_values", "pixel_values_local"):
            if images and vision.get("image_size", 384) > 100:
                digest = hashlib.blake2b(kept.pop(name).tobytes()).digest()
                kept[f"{name}.digest"] = np.frombuffer(digest, np.uint8)
        save_rows(family, case, arrays | kept, np.arange(length, dtype=np.int32))


def main() -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        make("deepseek_vl2", FULL)
        make("deepseek_vl2_tiny", SPARSE)


if __name__ == "__main__":
    main()
