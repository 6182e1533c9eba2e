"""The tower, and the model of tower and decoder: SmolVLM's own modules, a cell of a page as a tile.

A tile of 48 pixels is nine patches, one per letter; pixel shuffle makes one token of them, the connector is one map.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file, save_file

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import ConfigError, WeightsError
from models import FAMILIES, ModelBackbone, load
from models.checkpoints import flatten_params
from models.decoder.layers import Linear
from models.families.smolvlm import ARCHITECTURE
from models.inputs.images import PictureConfig, process_smolvlm
from models.towers.vit import ViT

from .pages import CELL, COLUMNS, SLOT, Style, draw_page
from .pieces import SIDE, Pieces

IMAGE_TOKEN = 16
"""SmolLM2's `<empty_output>`, which no text here has: it stands for a cell. SmolVLM adds a token of its own."""
THUMBNAIL = "\n"
"""How the whole page, which SmolVLM shrinks to a tile after its tiles, is read."""
CONFIG, WEIGHTS = "tower.json", "tower.safetensors"
LEAST_ROWS = 16
"""Rows and columns from which a matrix is kept in eight bits."""
PICTURES = PictureConfig.from_dict(
    {
        "do_image_splitting": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": CELL},
        "resample": 1,
        "size": {"longest_edge": COLUMNS * CELL},
    }
)


def vision_config(width: int, depth: int, heads: int, intermediate: int) -> dict[str, Any]:
    """Makes the tower's part of SmolVLM's `config.json`."""
    return {
        "model_type": "smolvlm_vision",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "image_size": CELL,
        "patch_size": SLOT,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }


def model_config(text: Mapping[str, Any], vision: Mapping[str, Any], angles: str = "exact") -> Any:
    """Makes the whole model's configuration from the decoder's `config.json` and the tower's part."""
    decoder = {name: value for name, value in text.items() if name not in ("architectures", "torch_dtype", "dtype")}
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": "smolvlm",
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": SIDE,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        "text_config": decoder,
        "vision_config": dict(vision),
        "torch_dtype": "float32",
    }
    return FAMILIES[ARCHITECTURE].config(raw, angles, None)


class Tower(nnx.Module):
    """SmolVLM's tower and connector, without the decoder."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.visual = ViT(config.vision, rngs)
        self.projector = Linear(config.vision.width * SIDE**2, config.text.width, bias=False, rngs=rngs)

    def __call__(self, tiles: Float[Array, "n 3 H W"]) -> Float[Array, "n D"]:
        """Reads tiles: an embedding each."""
        features = self.visual(tiles)
        return self.projector(features.reshape(len(features), -1))


def save_tower(directory: str | os.PathLike[str], parameters: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Writes a tower: matrices in eight bits with a scale per output, the rest in float32. Returns the directory.

    Args:
      parameters: "visual" and "projector".
      about: the contents of `tower.json`, "vision" and "pieces" among them.
    """
    root, arrays = Path(directory), dict[str, np.ndarray]()
    root.mkdir(parents=True, exist_ok=True)
    for path, leaf in flatten_params(parameters).items():
        name, value = ".".join(path), np.asarray(leaf, np.float32)
        if value.ndim < 2 or min(value.shape[-2:]) < LEAST_ROWS:
            arrays[name] = value
            continue
        # A scale per output, so that an output with small weights keeps its precision.
        scale = np.maximum(np.abs(value).max(-2, keepdims=True) / 127, 1e-12)
        arrays[name] = np.round(value / scale).astype(np.int8)
        arrays[f"{name}.scale"] = scale

    save_file(arrays, root / WEIGHTS)
    (root / CONFIG).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return root


def load_tower(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a tower: its parameters in float32, and the contents of `tower.json`.

    Raises:
      ConfigError: no such directory. WeightsError: no weights beside `tower.json`.
    """
    root = Path(directory)
    if not (root / CONFIG).is_file():
        raise ConfigError(
            f"tower: got {root}, which has no {CONFIG}; expected a folder that `python -m evals.reading.train` wrote"
        )
    if not (root / WEIGHTS).is_file():
        raise WeightsError(f"tower: got {root}, which has no {WEIGHTS}; expected it beside {CONFIG}")

    stored, nested = load_file(root / WEIGHTS), dict[str, Any]()
    for name, value in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(f"{name}.scale")
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(value if scale is None else value * scale)

    return nested, json.loads((root / CONFIG).read_text(encoding="utf-8"))


class PageReadingModel:
    """A pretrained decoder that reads pages: `model` takes images, `pieces` are the word pieces drawn.

    The decoder's tokenizer is not the model's own: SmolVLM's processor would write the names of tiles between them.
    """

    def __init__(self, directory: str | os.PathLike[str], checkpoint: str | os.PathLike[str]):
        """Puts a tower before the decoder of a checkpoint.

        Raises:
          ConfigError, WeightsError: as `load_tower` and `models.load`, or a decoder of another width.
        """
        parameters, self.about = load_tower(directory)
        decoder = load(checkpoint, dtype="float32", angles="float32")
        config = model_config(decoder.config.to_dict(), self.about["vision"], "float32")
        width = parameters["projector"]["kernel"].shape[-1]
        if width != config.text.width:
            raise ConfigError(f"tower: got {width} numbers a piece; expected the decoder's {config.text.width}")

        self.model = ModelBackbone(config, {**parameters, "decoder": decoder.parameters["decoder"]}, PICTURES)
        self.tokenizer = decoder.tokenizer
        self.pieces = Pieces.of(self.tokenizer, self.about["pieces"])
        self.behind = int(self.tokenizer.encode(THUMBNAIL).ids[0])

    def prepare(self, items: Sequence[str]) -> dict[str, np.ndarray]:
        """Writes a text in the drawn pieces alone: token ids [1,T]."""
        ids = []
        for item in items:
            ids += self.tokenizer.encode(item, add_special_tokens=False).ids
        return {"input_ids": self.pieces.split(ids)[None]}

    def pages(self, ids: Int[np.ndarray, "B T"], styles: Sequence[Style]) -> Tokens:
        """Draws a page per row and reads it as an image: T pieces and the whole page, shrunk, [B, T+1].

        Raises:
          InputError: pieces that are not drawn, or that do not fill lines of sixteen.
        """
        drawn = []
        for row, style in zip(ids, styles, strict=True):
            drawn.append(draw_page(self.pieces.letters[self.pieces.rows(row)], style))
        places = np.full((len(ids), ids.shape[1] + 1), IMAGE_TOKEN, np.int32)
        return self.model.embed(places, **process_smolvlm(drawn, PICTURES))

    def texts(self, ids: Int[np.ndarray, "B T"]) -> Tokens:
        """Embeds the same pieces as tokens, and the one that a shrunk page is read as, [B, T+1]."""
        return self.model.embed(self.with_end(ids))

    def with_end(self, ids: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B S"]:
        """Appends the piece that the shrunk page is read as."""
        return np.concatenate([ids, np.full((len(ids), 1), self.behind, np.int32)], axis=1)
