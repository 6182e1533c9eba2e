"""Make the Phi-3-vision goldens with transformers (5.23), torch and torchvision. See README.md beside this file.

transformers has no such class: here its CLIP and its Phi-3 are joined by the published rules of
`image_embedding_phi3_v.py`, and images are made by those of `processing_phi3_v.py`, with torchvision's operations.

Run it in an environment that has them: `python tests/goldens/make_phi3_v.py`. It rewrites `phi3_v/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import math

import numpy as np
import torch
import torchvision.transforms.functional as F
from PIL import Image
from redraw import redraw_all
from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM
from vlm_golden import HERE, IMAGE, TEXT, LayerRecorder, draw_image, run_cases, tokens_of, write_shapes

FAMILY = "phi3_v"
SIDE, CROPS = 16, 4
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
FACTORS = {
    "short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
}
# Far enough that an image can be moved by 100 000 positions within the short regime.
LENGTHS = {"max_position_embeddings": 2**21, "original_max_position_embeddings": 2**20}
PLACE = "model.vision_embed_tokens"
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SIZES = {"text": [], "one_image": [(20, 41)], "two_images": [(20, 41), (33, 18)]}
EXTRA = {"square": (16, 16), "tall": (90, 21), "wide": (13, 100), "odd": (37, 35)}


def hd_transform(image: Image.Image) -> Image.Image:
    """`HD_transform` with `num_crops` CROPS."""
    trans = image.width < image.height
    if trans:
        image = image.transpose(Image.TRANSPOSE)
    width, height = image.size
    ratio, scale = width / height, 1
    while scale * np.ceil(scale / ratio) <= CROPS:
        scale += 1
    scale -= 1
    wide = int(scale * SIDE)
    image = F.resize(image, [int(wide / ratio), wide])
    height = image.size[1]
    target = int(np.ceil(height / SIDE) * SIDE)
    top = int((target - height) / 2)
    image = F.pad(image, [0, top, 0, target - height - top], fill=[255, 255, 255])
    return image.transpose(Image.TRANSPOSE) if trans else image


def process(images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """`Phi3VImageProcessor.preprocess`: [n, CROPS + 1, 3, SIDE, SIDE], filled up with zeros."""
    stacks, sizes = [], []
    for image in images:
        whole = F.normalize(F.to_tensor(hd_transform(Image.fromarray(image))), MEAN, STD)
        small = torch.nn.functional.interpolate(whole[None], size=(SIDE, SIDE), mode="bicubic")
        _, height, width = whole.shape
        rows, columns = height // SIDE, width // SIDE
        crops = whole.reshape(1, 3, rows, SIDE, columns, SIDE).permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, SIDE, SIDE)
        stack = torch.cat([small, crops])
        stacks.append(torch.cat([stack, torch.zeros(CROPS + 1 - len(stack), 3, SIDE, SIDE)]))
        sizes.append([height, width])
    return {"pixel_values": torch.stack(stacks), "image_sizes": torch.tensor(sizes)}


def real_tiles(pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> np.ndarray:
    counts = [1 + (height // SIDE) * (width // SIDE) for height, width in image_sizes.tolist()]
    return np.concatenate([tiles[:count].numpy() for tiles, count in zip(pixel_values, counts, strict=True)])


class Phi3V(torch.nn.Module):
    """transformers' CLIP and Phi-3 with what `Phi3ImageEmbedding` does between them."""

    def __init__(self) -> None:
        super().__init__()
        rope = {"rope_type": "longrope", "rope_theta": 100.0, **FACTORS}
        text = {**TEXT, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, **LENGTHS}
        config = Phi3Config(**text, rope_parameters=rope, attn_implementation="eager")
        self.language = Phi3ForCausalLM(config)
        self.clip = CLIPVisionModel(CLIPVisionConfig(**VISION, attn_implementation="eager"))
        wide = 4 * VISION["hidden_size"]
        self.sub_GN = torch.nn.Parameter(torch.zeros(1, 1, 1, wide))
        self.glb_GN = torch.nn.Parameter(torch.zeros(1, 1, wide))
        self.img_projection = torch.nn.Sequential(torch.nn.Linear(wide, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))

    def names(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by the names of released files."""
        found = dict(self.language.named_parameters())
        for name, value in self.clip.named_parameters():
            found[f"{PLACE}.img_processor.vision_model.{name.removeprefix('vision_model.')}"] = value
        found |= {f"{PLACE}.{name}": getattr(self, name) for name in ("sub_GN", "glb_GN")}
        return found | {f"{PLACE}.img_projection.{n}": v for n, v in self.img_projection.named_parameters()}

    def features(self, pixel_values, image_sizes):
        """The embeddings that stand for each image, one behind the other."""
        count, tiles = pixel_values.shape[:2]
        found = self.clip(pixel_values.flatten(0, 1), output_hidden_states=True).hidden_states[-2][:, 1:]
        C, H = found.shape[-1], math.isqrt(found.shape[1])
        found, half, out = found.view(count, tiles, H * H, C), H // 2, []

        def merged(x, number):
            x = x.reshape(number, half, 2, half, 2, C).permute(0, 1, 3, 2, 4, 5)
            return x.reshape(number, half * half, 4 * C)

        for image, (height, width) in enumerate(image_sizes.tolist()):
            h, w = height // SIDE, width // SIDE
            glb = merged(found[image, :1], 1).reshape(1, half, half, 4 * C)
            glb = torch.cat([glb, self.sub_GN.repeat(1, half, 1, 1)], dim=2).reshape(1, -1, 4 * C)
            sub = merged(found[image, 1 : 1 + h * w], h * w).reshape(1, h, w, half, half, -1)
            sub = sub.permute(0, 1, 3, 2, 4, 5).reshape(1, h * half, w * half, 4 * C)
            sub = torch.cat([sub, self.sub_GN.repeat(1, h * half, 1, 1)], dim=2).reshape(1, -1, 4 * C)
            out.append(self.img_projection(torch.cat([sub, self.glb_GN, glb], dim=1))[0])  # sub_glb
        return torch.cat(out)

    def forward(self, input_ids, pixel_values=None, image_sizes=None, **keywords):
        embeddings = self.language.model.embed_tokens(input_ids)
        if pixel_values is not None:
            embeddings = embeddings.clone()
            embeddings[input_ids == IMAGE] = self.features(pixel_values, image_sizes)
        return self.language(inputs_embeds=embeddings, **keywords)


def write_configs() -> None:
    """`config.json` as the 3.5 release has it, `config_release.json` as the first one ("su")."""
    raw = {
        "architectures": ["Phi3VForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM"},
        "model_type": "phi3_v",
        **TEXT,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        **LENGTHS,
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 32,
            "model_name": "tiny",
            "name": "clip_vision_model",
            "num_img_tokens": 4,
        },
        "image_token_id": IMAGE,
        "rope_theta": 100.0,
        "rope_scaling": {"type": "longrope", **FACTORS},
        "torch_dtype": "float32",
    }
    (HERE / FAMILY / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    first = raw | {"rope_scaling": {"type": "su", **FACTORS}, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    (HERE / FAMILY / "config_release.json").write_text(json.dumps(first, indent=2) + "\n")
    processor = {"image_processor_type": "Phi3VImageProcessor", "num_crops": CROPS, "num_img_tokens": 4}
    processor |= {"image_mean": MEAN, "image_std": STD, "do_convert_rgb": True, "crop_size": SIDE}
    (HERE / FAMILY / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (HERE / FAMILY).mkdir(exist_ok=True)
    write_configs()
    with torch.no_grad():
        model = Phi3V().eval()
        parameters = model.names()
        shapes = {name: list(parameters[name].shape) for name in sorted(parameters)}
        for name, value in redraw_all(shapes).items():
            parameters[name].copy_(torch.from_numpy(value))
        write_shapes(FAMILY, shapes)

        vision = {"vision_blocks": model.clip.encoder.layers}
        recorder = LayerRecorder(model.language.model, vision, keys=None, heads=4)
        cases = {}
        for case, sizes in SIZES.items():
            images = [draw_image(f"image {index}", *shape) for index, shape in enumerate(sizes)]
            inputs = process(images) if images else {}
            parts = [5]
            for height, width in inputs.get("image_sizes", torch.zeros(0, 2)).tolist():
                h, w = height // SIDE, width // SIDE
                parts += [((h * w + 1) * 4 + 1 + (h + 1) * 2,), 2]
            kept = {f"image.{index}": image for index, image in enumerate(images)}
            if images:  # what counts of them: the authors fill every image up to CROPS + 1 tiles
                kept["pixel_values"] = real_tiles(**inputs)
            cases[case] = (tokens_of([*parts, 3], start=None, end=None), inputs, kept)
        run_cases(FAMILY, model, recorder, cases)

        kept = {}
        for name, shape in EXTRA.items():
            image = draw_image(name, *shape)
            out = process([image])
            kept |= {f"{name}.image": image, f"{name}.image_sizes": out["image_sizes"].numpy().astype(np.int32)}
            kept[f"{name}.pixel_values"] = out["pixel_values"][0].numpy()
        np.savez_compressed(HERE / FAMILY / "preprocessing.npz", **kept)


if __name__ == "__main__":
    main()
