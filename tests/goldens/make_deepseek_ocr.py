"""Make the DeepSeek-OCR goldens with transformers (5.23) and torch. See README.md beside this file.

transformers has no such class. Its parts are there: SAM with a compressor and the decoder are DeepSeek-OCR-2's, CLIP's
layers CLIP's. They are joined here in torch by the authors' published rules (`modeling_deepseekocr.py`: the model's
`forward` and `infer`; `deepencoder.py`: positions of CLIP, `get_abs_pos`).

Run it in an environment that has them: `python tests/goldens/make_deepseek_ocr.py`. It rewrites `deepseek_ocr/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalSubscript=false

import hashlib
import json
import re

import numpy as np
import torch
from make_deepseek_ocr2 import EXPERTS, save_rows
from PIL import Image, ImageOps
from redraw import redraw_all
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel, DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, decode, draw_image, line, prefill, tokens_of, write_shapes

FAMILY = "deepseek_ocr"
WIDE = 24
BASE, TILE, MOST = 256, 128, 3
CLIP = {"heads": 2, "image_size": 224, "layers": 2, "patch_size": 14, "width": WIDE}
SAM = {"downsample_channels": [12, WIDE], "global_attn_indexes": [1], "heads": 2, "layers": 2, "width": 32}
SIZES = {"text": [], "one_image": [(90, 150)], "two_images": [(60, 41), (150, 100)]}


def released() -> dict:
    """`config.json` as the release has it: the text's keys twice."""
    text = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")} | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    }
    text |= EXPERTS | {"first_k_dense_replace": 1, "bos_token_id": 0, "eos_token_id": 1, "lm_head": True}
    text |= {"rm_head": False, "use_mla": False, "kv_lora_rank": None, "q_lora_rank": None}
    text |= {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "rope_theta": 100.0}
    inner = {"architectures": ["DeepseekV2ForCausalLM"], "torch_dtype": "float32", **text}
    return {
        "_name_or_path": "deepseek-ai/DeepSeek-OCR",
        "candidate_resolutions": [[1024, 1024]],
        "global_view_pos": "head",
        "architectures": ["DeepseekOCRForCausalLM"],
        "language_config": inner,
        "model_type": "deepseek_vl_v2",
        "projector_config": {
            "input_dim": 2 * WIDE,
            "model_type": "mlp_projector",
            "n_embed": TEXT["hidden_size"],
            "projector_type": "linear",
        },
        "tile_tag": "2D",
        "torch_dtype": "float32",
        "vision_config": {
            "image_size": BASE,
            "mlp_ratio": 3.7362,
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
        },
        **text,
        "image_token_id": IMAGE,
    }


def to_authors(name: str) -> str:
    """A parameter of the parts as the authors call it; experts are taken apart elsewhere."""
    rules = [
        (r"^model\.language_model\.", "model."),
        (r"^model\.vision_tower\.sam_encoder\.layers\.(\d+)\.layer_norm", r"model.sam_model.blocks.\1.norm"),
        (r"^model\.vision_tower\.sam_encoder\.layers\.", "model.sam_model.blocks."),
        (r"^model\.vision_tower\.sam_encoder\.patch_embed\.projection", "model.sam_model.patch_embed.proj"),
        (r"^model\.vision_tower\.sam_encoder\.neck\.conv1", "model.sam_model.neck.0"),
        (r"^model\.vision_tower\.sam_encoder\.neck\.layer_norm1", "model.sam_model.neck.1"),
        (r"^model\.vision_tower\.sam_encoder\.neck\.conv2", "model.sam_model.neck.2"),
        (r"^model\.vision_tower\.sam_encoder\.neck\.layer_norm2", "model.sam_model.neck.3"),
        (r"^model\.vision_tower\.sam_encoder\.proj\.conv1", "model.sam_model.net_2"),
        (r"^model\.vision_tower\.sam_encoder\.proj\.conv2", "model.sam_model.net_3"),
        (r"^model\.vision_tower\.sam_encoder\.", "model.sam_model."),
        (r"^encoder\.layers\.", "model.vision_model.transformer.layers."),
        (r"^(embeddings|pre_layrnorm)\.", r"model.vision_model.\1."),
    ]
    for pattern, target in rules:
        name, count = re.subn(pattern, target, name)
        if count:
            return name
    return name


def build() -> tuple[DeepseekOcr2ForConditionalGeneration, CLIPVisionModel, dict[str, torch.Tensor], dict]:
    """The parts with weights redrawn under the authors' names, the parameters that no part has, and all shapes."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    text = {**TEXT, "num_key_value_heads": 4, **EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    sam = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": BASE, "mlp_dim": 128}
    sam |= {key: SAM[key] for key in ("downsample_channels", "global_attn_indexes")}
    encoder = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    encoder |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config={**text, "rope_parameters": rope},
        image_token_id=IMAGE,
    )
    config._attn_implementation = "eager"
    model = DeepseekOcr2ForConditionalGeneration(config)
    clip = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=WIDE,
            intermediate_size=4 * WIDE,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=224,
            patch_size=14,
            hidden_act="quick_gelu",
            layer_norm_eps=1e-5,
            attn_implementation="eager",
        )
    )
    unread = ("vision_encoder", "query_", "multi_modal_projector", "view_separator")
    parts = {name: value for name, value in model.state_dict().items() if not any(word in name for word in unread)}
    names = clip.state_dict()
    names = {
        name: value for name, value in names.items() if "post_layernorm" not in name and "position_ids" not in name
    }
    strip = {name: name.removeprefix("vision_model.") for name in names}

    shapes: dict[str, list[int]] = {}
    for name, value in {**parts, **{strip[name]: value for name, value in names.items()}}.items():
        theirs, shape = to_authors(name), list(value.shape)
        if theirs.endswith("experts.gate_up_proj"):
            for expert in range(shape[0]):
                for part in ("gate", "up"):
                    shapes[theirs.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = [shape[1] // 2, shape[2]]
        elif theirs.endswith("experts.down_proj"):
            shapes |= {theirs.replace("down_proj", f"{e}.down_proj.weight"): shape[1:] for e in range(shape[0])}
        elif ".self_attn." in theirs and "vision_model" in theirs and "out_proj" not in theirs:
            fused = re.sub(r"[qkv]_proj", "qkv_proj", theirs)
            shapes[fused] = [3 * shape[0], *shape[1:]]
        else:
            shapes[theirs] = shape
    width = TEXT["hidden_size"]
    own = {"projector.layers.weight": [width, 2 * WIDE], "projector.layers.bias": [width]}
    own |= {"image_newline": [width], "view_seperator": [width]}
    shapes |= {f"model.{name}": shape for name, shape in own.items()}
    drawn = {name: torch.from_numpy(value) for name, value in redraw_all(shapes).items()}

    def found(name: str, like: torch.Tensor) -> torch.Tensor:
        theirs = to_authors(name)
        if theirs.endswith("experts.gate_up_proj"):
            pick = lambda e, part: drawn[theirs.replace("gate_up_proj", f"{e}.{part}_proj.weight")]
            return torch.stack([torch.cat([pick(e, "gate"), pick(e, "up")]) for e in range(len(like))])
        if theirs.endswith("experts.down_proj"):
            return torch.stack([drawn[theirs.replace("down_proj", f"{e}.down_proj.weight")] for e in range(len(like))])
        if ".self_attn." in theirs and "vision_model" in theirs and "out_proj" not in theirs:
            place = "qkv".index(re.search(r"([qkv])_proj", theirs)[1])
            return drawn[re.sub(r"[qkv]_proj", "qkv_proj", theirs)].chunk(3)[place]
        return drawn[theirs]

    model.load_state_dict({name: found(name, value) for name, value in parts.items()}, strict=False)
    clip.load_state_dict({name: found(strip[name], value) for name, value in names.items()}, strict=False)
    return model.eval(), clip.eval(), drawn, dict(sorted(shapes.items()))


def clip_of(clip: CLIPVisionModel, patches: torch.Tensor) -> torch.Tensor:
    """CLIP over SAM's features [n, D, h, w] in its patches' place, without the class token."""
    inner = getattr(clip, "vision_model", clip)
    side, table = patches.shape[-1], inner.embeddings.position_embedding.weight
    first, rest = table[:1], table[1:]
    if side != 16:
        square = rest.reshape(1, 16, 16, -1).permute(0, 3, 1, 2)
        square = functional.interpolate(square, (side, side), mode="bicubic", antialias=True, align_corners=False)
        rest = square.permute(0, 2, 3, 1).reshape(side * side, -1)
    flat = patches.flatten(2).transpose(1, 2)
    head = inner.embeddings.class_embedding.expand(len(flat), 1, -1)
    hidden = torch.cat([head, flat], dim=1) + torch.cat([first, rest])
    hidden = inner.pre_layrnorm(hidden)
    for layer in inner.encoder.layers:
        hidden = layer(hidden, attention_mask=None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden[:, 1:]


def ratio_of(width: int, height: int) -> tuple[int, int]:
    """`dynamic_preprocess` and `find_closest_aspect_ratio`: columns and rows."""
    ratios = {
        (i, j) for n in range(2, MOST + 1) for i in range(1, n + 1) for j in range(1, n + 1) if 2 <= i * j <= MOST
    }
    best, least = (1, 1), float("inf")
    for ratio in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
        difference = abs(width / height - ratio[0] / ratio[1])
        if difference < least:
            best, least = ratio, difference
        elif difference == least and width * height > 0.5 * TILE * TILE * ratio[0] * ratio[1]:
            best = ratio
    return best


def pixels_of(image: Image.Image) -> torch.Tensor:
    """ToTensor and Normalize(0.5, 0.5)."""
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div(255) - 0.5) / 0.5


def prepared(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """`infer` with crop_mode: views, tiles, and rows and columns of tiles."""
    views, tiles, grids = [], [], []
    for array in images:
        image, grid = Image.fromarray(array), (0, 0)
        if max(image.size) > TILE:
            columns, rows = ratio_of(*image.size)
            large, grid = image.resize((columns * TILE, rows * TILE)), (rows, columns)
            for number in range(rows * columns):
                left, top = number % columns * TILE, number // columns * TILE
                tiles.append(pixels_of(large.crop((left, top, left + TILE, top + TILE))))
        views.append(pixels_of(ImageOps.pad(image, (BASE, BASE), color=(127, 127, 127))))
        grids.append(grid)
    out = {"pixel_values": torch.stack(views), "tile_grids": torch.tensor(grids)}
    return out | ({"pixel_values_local": torch.stack(tiles)} if tiles else {})


def main() -> None:
    torch.set_num_threads(1)
    (HERE / FAMILY).mkdir(exist_ok=True)
    (HERE / FAMILY / "config.json").write_text(json.dumps(released(), indent=2) + "\n")
    settings = {"size": {"height": BASE, "width": BASE}, "tile_size": TILE, "max_patches": MOST}
    (HERE / FAMILY / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    with torch.no_grad():
        model, clip, drawn, shapes = build()
        write_shapes(FAMILY, shapes)
        newline, separator = drawn["model.image_newline"], drawn["model.view_seperator"]

        def features(pixels: torch.Tensor) -> torch.Tensor:
            low = model.model.vision_tower.sam_encoder(pixels).last_hidden_state
            both = torch.cat([clip_of(clip, low), low.flatten(2).permute(0, 2, 1)], dim=-1)
            return functional.linear(both, drawn["model.projector.layers.weight"], drawn["model.projector.layers.bias"])

        def joined(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            whole, parts = features(inputs["pixel_values"]), []
            local = iter(features(inputs["pixel_values_local"]) if "pixel_values_local" in inputs else ())
            for view, (rows, columns) in zip(whole, inputs["tile_grids"].tolist(), strict=True):
                with_ends = lambda x: torch.cat([x, newline.expand(len(x), 1, -1)], dim=1).flatten(0, 1)
                if rows:
                    own = torch.stack([next(local) for _ in range(rows * columns)])
                    side = int(own.shape[1] ** 0.5)
                    own = own.view(rows, columns, side, side, -1).permute(0, 2, 1, 3, 4)
                    parts.append(with_ends(own.reshape(rows * side, columns * side, -1)))
                side = int(len(view) ** 0.5)
                parts += [with_ends(view.view(side, side, -1)), separator[None]]
            return torch.cat(parts)

        def call(input_ids, position_ids, use_cache, past_key_values=None, **inputs):
            embeddings = model.get_input_embeddings()(input_ids)
            if inputs:
                embeddings[input_ids == IMAGE] = joined(inputs)
            return model(
                inputs_embeds=embeddings,
                position_ids=position_ids,
                use_cache=use_cache,
                past_key_values=past_key_values,
            )

        recorder = LayerRecorder(model.model.language_model, {}, heads=4)
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            inputs = prepared(images) if images else {}
            view, tile, parts = BASE // 64, TILE // 64, [5]
            for rows, columns in inputs["tile_grids"].tolist() if images else ():
                parts += [((view + 1) * view + (columns * tile + 1) * rows * tile + 1,), 2]
            input_ids = tokens_of([*parts, 3], start=None, end=None)
            length = input_ids.shape[1]
            arrays, cache = prefill(call, recorder, input_ids, line(length), **inputs)
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            for name, value in inputs.items():
                kept[name] = value.numpy().astype(np.int32) if name == "tile_grids" else value.numpy()
            if case == "one_image":
                arrays |= decode(call, cache, arrays["logits"], length, 1)
            # Of pixels, a sum over their eight bits: the processor's are compared with it before they are used.
            for name in ("pixel_values", "pixel_values_local"):
                if name in kept:
                    stored = np.rint((kept.pop(name) * 0.5 + 0.5) * 255).astype(np.uint8)
                    kept[f"{name}.digest"] = np.frombuffer(hashlib.blake2b(stored.tobytes()).digest(), np.uint8)
            save_rows(FAMILY, case, arrays | kept, np.arange(length, dtype=np.int32))


if __name__ == "__main__":
    main()
