"""Phi-3-vision and DeepSeek-VL2, of which transformers has no class: its parts, joined by the authors' published rules.

Phi-3-vision: `image_embedding_phi3_v.py` and `processing_phi3_v.py`. DeepSeek-VL2: `modeling_deepseek_vl_v2.py`
(`MlpProjector`, `prepare_inputs_embeds`) and `processing_deepseek_vl_v2.py`. Imported by `make.py`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import math
import re
import types
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel

from tests.goldens.redraw import redraw_all
from tests.goldens.table import IMAGE

EAGER = {"attn_implementation": "eager"}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
TOWER |= {"image_size": 16, "patch_size": 4, "projection_dim": 32, "hidden_act": "quick_gelu"}
EXPERT = re.compile(r"experts\.(gate_up|down)_proj$")


class Joined(torch.nn.Module):
    """A decoder and a tower; `redraw` fills them by the released names, and what is drawn beside stays in `drawn`."""

    def __init__(self, raw: dict[str, Any], decoder: torch.nn.Module, tower: torch.nn.Module) -> None:
        super().__init__()
        self.raw, self.decoder, self.tower, self.config = raw, decoder, tower, decoder.config
        self.language_model = getattr(decoder, "model", decoder)

    def redraw(self, extra: dict[str, list[int]]) -> dict[str, list[int]]:
        """Draws every parameter by its released name; returns the shapes of released files."""
        shapes, parts = dict(extra), {}
        for prefix, module in (("decoder.", self.decoder), ("tower.", self.tower)):
            for name, value in module.named_parameters():
                parts[prefix + name] = released = self.released(prefix + name, list(value.shape))
                shapes |= {theirs: shape for piece in released for theirs, shape in [piece[:2]]}
        self.drawn = {name: torch.from_numpy(value) for name, value in redraw_all(shapes).items()}
        with torch.no_grad():
            for name, value in self.named_parameters():
                pieces = [self.drawn[theirs].reshape(shape)[pick] for theirs, shape, pick in parts[name]]
                value.copy_(torch.cat([piece.reshape(-1) for piece in pieces]).reshape(value.shape))
        return dict(sorted(shapes.items()))

    def get_image_features(self, **inputs: Any) -> Any:
        return types.SimpleNamespace(pooler_output=self.features(**inputs))

    def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False, cache: Any = None, **inputs):
        del attention_mask
        inputs.pop("mm_token_type_ids", None)
        embeddings = self.language_model.embed_tokens(input_ids).clone()
        if inputs:
            embeddings[input_ids == IMAGE] = torch.cat(self.features(**inputs))
        out = self.language_model(inputs_embeds=embeddings, use_cache=use_cache, cache=cache)
        out["logits"] = functional.linear(out.last_hidden_state, self.drawn[self.HEAD])
        return out


class Phi3V(Joined):
    PLACE, HEAD = "model.vision_embed_tokens", "lm_head.weight"

    def __init__(self, raw: dict[str, Any]) -> None:
        rope = {"rope_theta": raw["rope_theta"], **raw["rope_scaling"], "rope_type": "longrope"}
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "original_max_position_embeddings")
        text = Phi3Config(**{name: raw[name] for name in names}, pad_token_id=None, rope_parameters=rope, **EAGER)
        super().__init__(raw, Phi3ForCausalLM(text), CLIPVisionModel(CLIPVisionConfig(**TOWER, **EAGER)))
        self.side = TOWER["image_size"]
        wide, width = 4 * TOWER["hidden_size"], raw["hidden_size"]
        extra = {"sub_GN": [1, 1, 1, wide], "glb_GN": [1, 1, wide], "img_projection.0.weight": [width, wide]}
        extra |= {"img_projection.0.bias": [width], "img_projection.2.weight": [width, width]}
        extra |= {"img_projection.2.bias": [width]}
        self.shapes = self.redraw({f"{self.PLACE}.{name}": shape for name, shape in extra.items()})

    def released(self, name: str, shape: list[int]) -> list[Any]:
        part, _, rest = name.partition(".")
        tower = f"{self.PLACE}.img_processor.vision_model.{rest.removeprefix('vision_model.')}"
        return [(rest if part == "decoder" else tower, shape, slice(None))]

    def process(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """`HD_transform` and `Phi3VImageProcessor.preprocess`, filled up with zeros to one number of crops."""
        stacks, sizes, side, crops = [], [], self.side, 4
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
        for image in images:
            turned = image.width < image.height
            image = image.transpose(Image.TRANSPOSE) if turned else image
            ratio, scale = image.width / image.height, 1
            while scale * np.ceil(scale / ratio) <= crops:
                scale += 1
            wide = (scale - 1) * side
            image = image.resize((wide, int(wide / ratio)), Image.BILINEAR)
            high = int(np.ceil(image.height / side) * side)
            top = int((high - image.height) / 2)
            image = ImageOps.expand(image, (0, top, 0, high - image.height - top), (255, 255, 255))
            image = image.transpose(Image.TRANSPOSE) if turned else image
            whole = (torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255) - mean) / std
            small = functional.interpolate(whole[None], size=(side, side), mode="bicubic")
            rows, columns = whole.shape[1] // side, whole.shape[2] // side
            tiles = whole.reshape(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
            stack = torch.cat([small, tiles])
            stacks.append(torch.cat([stack, torch.zeros(crops + 1 - len(stack), 3, side, side)]))
            sizes.append(list(whole.shape[1:]))
        return {"pixel_values": torch.stack(stacks), "image_sizes": torch.tensor(sizes)}

    def features(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> list[torch.Tensor]:
        """`Phi3ImageEmbedding.forward`, "sub_glb" with learnable separators."""
        found, (sub, whole) = [], (self.drawn[f"{self.PLACE}.{name}"][0] for name in ("sub_GN", "glb_GN"))
        layers = [
            (self.drawn[f"{self.PLACE}.img_projection.{n}.{leaf}"]) for n in (0, 2) for leaf in ("weight", "bias")
        ]
        for tiles, size in zip(pixel_values, image_sizes.tolist(), strict=True):
            states = self.tower(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
            half = math.isqrt(states.shape[1]) // 2
            states = states.reshape(len(tiles), half, 2, half, 2, -1).permute(0, 1, 3, 2, 4, 5)
            states = states.reshape(len(tiles), half, half, -1)
            rows, columns = (edge // self.side for edge in size)
            local = states[1 : 1 + rows * columns].reshape(rows, columns, half, half, -1).permute(0, 2, 1, 3, 4)
            local = local.reshape(rows * half, columns * half, -1)
            ended = lambda grid: torch.cat([grid, sub.expand(len(grid), 1, -1)], dim=1).flatten(0, 1)
            lines = [ended(local), whole, ended(states[0])]
            lines = torch.cat(lines[::-1] if self.raw["embd_layer"]["hd_transform_order"] == "glb_sub" else lines)
            found.append(functional.linear(functional.gelu(functional.linear(lines, *layers[:2])), *layers[2:]))
        return found


class DeepseekVL2(Joined):
    HEAD = "language.lm_head.weight"
    TIMM = (
        (r"encoder\.layers\.(\d+)\.layer_norm", r"vision.blocks.\1.norm"),
        (r"encoder\.layers\.(\d+)\.self_attn\.out_proj", r"vision.blocks.\1.attn.proj"),
        (r"encoder\.layers\.(\d+)\.self_attn\.[qkv]_proj", r"vision.blocks.\1.attn.qkv"),
        (r"encoder\.layers\.(\d+)\.mlp", r"vision.blocks.\1.mlp"),
        (r"embeddings\.position_embedding\.weight", "vision.pos_embed"),
        (r"embeddings\.patch_embedding", "vision.patch_embed.proj"),
        ("post_layernorm", "vision.norm"),
    )
    TEXT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    TEXT += ("num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    TEXT += ("moe_intermediate_size",)
    LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group")
    LATENT += ("topk_group", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "attention_bias")

    def __init__(self, raw: dict[str, Any]) -> None:
        text, vision, glue = raw["language_config"], raw["vision_config"], raw["projector_config"]
        kept = {name: text[name] for name in self.TEXT}
        if text.get("use_mla", True):
            kept |= {name: text[name] for name in self.LATENT} | {"rms_norm_eps": text["rms_norm_eps"]}
            rope = {"rope_type": "default", "rope_theta": text["rope_theta"]}
            config = DeepseekV3Config(**kept, rope_parameters=rope, rope_interleave=True, **EAGER)
            decoder = DeepseekV3ForCausalLM(config).model
        else:
            kept |= {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
            kept |= {"rms_norm_eps": 1e-6, "mlp_layer_types": ["sparse"] * text["num_hidden_layers"]}
            rope = {"rope_type": "default", "rope_theta": 1e4}
            decoder = DeepseekOcr2TextModel(DeepseekOcr2TextConfig(**kept, rope_parameters=rope, **EAGER))
        tower = SiglipVisionConfig(
            hidden_size=vision["width"],
            intermediate_size=int(vision["width"] * vision.get("mlp_ratio", 4)),
            num_hidden_layers=vision["layers"],
            num_attention_heads=vision.get("heads", 16),
            image_size=vision.get("image_size", 384),
            patch_size=vision["patch_size"],
            hidden_act="gelu_pytorch_tanh",
            vision_use_head=False,
            **EAGER,
        )
        super().__init__(raw, decoder, SiglipVisionModel(tower))
        self.side, width = raw["candidate_resolutions"][0][0], text["hidden_size"]
        inner = width * glue.get("mlp_ratio", 1)
        extra = {"image_newline": [width], "view_seperator": [width], self.HEAD: [text["vocab_size"], width]}
        extra |= {"projector.layers.0.weight": [inner, 4 * glue["input_dim"]], "projector.layers.0.bias": [inner]}
        extra |= {"projector.layers.2.weight": [width, inner], "projector.layers.2.bias": [width]}
        self.shapes = self.redraw(extra)
        # Of routing without groups a buffer and no parameter.
        for name, value in self.decoder.named_buffers():
            if name.endswith("e_score_correction_bias"):
                self.shapes[f"language.model.{name}"] = list(value.shape)
                value.copy_(torch.from_numpy(redraw_all({f"language.model.{name}": list(value.shape)}).popitem()[1]))
        self.shapes = dict(sorted(self.shapes.items()))

    def released(self, name: str, shape: list[int]) -> list[Any]:
        part, _, rest = name.partition(".")
        if part == "decoder":
            theirs, whole, experts = f"language.model.{rest}", slice(None), EXPERT.search(rest)
            if experts is None:
                return [(theirs, shape, whole)]
            stem, halves = theirs[: -len(experts[0])] + "experts", experts[1].split("_")
            shape = [shape[1] // len(halves), shape[2]]
            return [(f"{stem}.{e}.{half}_proj.weight", shape, whole) for e in range(self.experts) for half in halves]
        rest = rest.removeprefix("vision_model.")
        for pattern, target in self.TIMM:
            theirs, count = re.subn(f"^{pattern}", target, rest)
            if count:
                break
        fused = re.search("([qkv])_proj", rest)
        if fused:
            start = "qkv".index(fused[1]) * shape[0]
            return [(theirs, [3 * shape[0], *shape[1:]], slice(start, start + shape[0]))]
        return [(theirs, [1, *shape] if theirs.endswith("pos_embed") else shape, slice(None))]

    @property
    def experts(self) -> int:
        return self.raw["language_config"]["n_routed_experts"]

    def process(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """`tokenize_with_images` of at most two images: views, tiles, and rows and columns of tiles."""
        views, tiles, grids, side = [], [], [], self.side
        pixels = lambda image: (torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255) - 0.5) / 0.5
        padded = lambda image, size: pixels(ImageOps.pad(image, size, color=(127, 127, 127)))
        for image in images:
            best, most, least = (0, 0), 0, math.inf
            for width, height in self.raw["candidate_resolutions"]:
                scale = min(width / image.width, height / image.height)
                area = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
                wasted = width * height - area
                if area > most or (area == most and wasted < least):
                    best, most, least = (width, height), area, wasted
            views.append(padded(image, (side, side)))
            local = padded(image, best)
            cells = local.reshape(3, best[1] // side, side, best[0] // side, side).permute(1, 3, 0, 2, 4)
            tiles.append(cells.reshape(-1, 3, side, side))
            grids.append((best[1] // side, best[0] // side))
        local = {"pixel_values_local": torch.cat(tiles), "tile_grids": torch.tensor(grids)}
        return {"pixel_values": torch.stack(views), **local}

    def projected(self, pixels: torch.Tensor) -> torch.Tensor:
        """`MlpProjector.forward` of the tower's features, [n, side, side, D]."""
        found = self.tower(pixel_values=pixels).last_hidden_state
        side = math.isqrt(found.shape[1])
        found = found.reshape(len(found), side, side, -1)
        found = functional.pad(found, (0, 0, 0, side % 2, 0, side % 2))
        folded = functional.unfold(found.permute(0, 3, 1, 2), kernel_size=2, stride=2).permute(0, 2, 1)
        first, second = ([self.drawn[f"projector.layers.{n}.{leaf}"] for leaf in ("weight", "bias")] for n in (0, 2))
        out = functional.linear(functional.gelu(functional.linear(folded, *first)), *second)
        return out.reshape(len(out), (side + 1) // 2, (side + 1) // 2, -1)

    def features(self, pixel_values: Any, pixel_values_local: Any, tile_grids: Any) -> list[torch.Tensor]:
        newline, separator = self.drawn["image_newline"], self.drawn["view_seperator"]
        ended = lambda grid: torch.cat([grid, newline.expand(len(grid), 1, -1)], dim=1).flatten(0, 1)
        whole, local, found = self.projected(pixel_values), self.projected(pixel_values_local), []
        for view, (rows, columns) in zip(whole, tile_grids.tolist(), strict=True):
            tiles, local = local[: rows * columns], local[rows * columns :]
            lines = tiles.reshape(rows, columns, *tiles.shape[1:]).permute(0, 2, 1, 3, 4)
            lines = lines.reshape(rows * tiles.shape[1], columns * tiles.shape[2], -1)
            found.append(torch.cat([ended(view), separator[None], ended(lines)]))
        return found
