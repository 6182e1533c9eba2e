"""What DeepSeek-OCR-2 has beside the other families: the order of its features, names of its tensors, refusals."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models.families.view_packing import SEPARATOR, place_view
from kvpatch_jax.models.inputs.chat import ChatTemplate
from kvpatch_jax.models.inputs.processors import process_images
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.tolerances import assert_close_to_largest

close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")
FAMILY = "deepseek_ocr2"


def authors_order(view: int, tile: int, rows: int, columns: int) -> list[tuple[str, int, int]]:
    """The authors' `forward`: local features, then the whole's, and a separator."""
    out = []
    if rows:
        local = np.arange(rows * columns * tile**2).reshape(rows, columns, tile, tile).transpose(0, 2, 1, 3)
        for line in local.reshape(rows * tile, columns * tile):
            out += [("tile", int(n) // tile**2, int(n) % tile**2) for n in line]
    for line in np.arange(view**2).reshape(view, view):
        out += [("view", 0, int(n)) for n in line]
    return [*out, ("separator", 0, 0)]


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 1), (2, 3)])
def test_features_stand_in_the_authors_order(grid):
    found = []
    for view, tile, place, kind in place_view(4, 3, grid, False).T.tolist():
        name = {SEPARATOR: "separator"}.get(kind, "view" if tile < 0 else "tile")
        assert (view, tile)[name == "view"] == -1 or name in ("view", "tile")
        found.append((name, max(tile, 0), place))
    assert found == authors_order(4, 3, *grid)


def test_prompts_are_plain_texts():
    """The format "plain": texts one behind the other, an image on a line of its own, no roles."""
    template = models.FAMILIES["DeepseekOcr2ForConditionalGeneration"].template
    assert template is not None
    content = [{"type": "image"}, {"type": "text", "text": "Free OCR."}]
    chat = ChatTemplate(template, (("bos_token", "<s>"),))
    assert chat.render([{"role": "user", "content": content}]) == "<s><image>\nFree OCR."


# ------------------------------------------------------------------------------------------- refusals


def refuse(family: str, change: dict[str, Any]) -> None:
    raw = json.loads((GOLDENS / family / "config.json").read_text())
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    models.FAMILIES[raw["architectures"][0]].config(raw, "float32", None)


def test_a_compressor_must_lead_to_the_next_tower():
    raw = json.loads((GOLDENS / FAMILY / "config.json").read_text())
    raw["vision_config"]["sam_config"]["downsample_channels"] = [12, 16]
    with pytest.raises(ConfigError, match=r"got \(12, 16\); expected to end in the encoder's 24"):
        models.FAMILIES[raw["architectures"][0]].config(raw, "float32", None)


# ------------------------------------------------------------------------------------------- names and sizes


def authors_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DeepSeek-OCR-2's tensors as its authors' files have them: other names, experts one by one."""
    rules = [
        (r"vision_tower\.sam_encoder\.layers\.(\d+)\.layer_norm", r"sam_model.blocks.\1.norm"),
        (r"vision_tower\.sam_encoder\.layers\.", "sam_model.blocks."),
        (r"vision_tower\.sam_encoder\.patch_embed\.projection", "sam_model.patch_embed.proj"),
        *((rf"vision_tower\.sam_encoder\.neck\.{part}", f"sam_model.neck.{n}") for n, part in enumerate(NECK)),
        (r"vision_tower\.sam_encoder\.proj\.conv1", "sam_model.net_2"),
        (r"vision_tower\.sam_encoder\.proj\.conv2", "sam_model.net_3"),
        (r"vision_tower\.sam_encoder\.", "sam_model."),
        (r"vision_tower\.vision_encoder\.", "qwen2_model.model.model."),
        (r"vision_tower\.query_(\d+)_resolution", r"qwen2_model.query_\1"),
        (r"multi_modal_projector", "projector.layers"),
        (r"view_separator", "view_seperator"),
        (r"language_model\.", ""),
    ]
    out = {}
    for name, value in tensors.items():
        for pattern, target in rules:
            name, count = re.subn(pattern, target, name)
            if count:
                break
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for part, half in zip(("gate", "up"), np.split(both, 2), strict=True):
                    out[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half.copy()
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{n}.down_proj.weight"): v.copy() for n, v in enumerate(value)}
        else:
            out[name] = value
    return out


NECK = ("conv1", "layer_norm1", "conv2", "layer_norm2")


def test_the_authors_names_are_the_same_parameters(tmp_path):
    """transformers writes them where it is not asked for its own modules' (`save_original_format`)."""
    plain = write_checkpoint(FAMILY, tmp_path / "plain")
    theirs = write_checkpoint(FAMILY, tmp_path / "theirs")
    file = theirs / "model.safetensors"
    save_file(authors_names(load_file(file)), file)
    found, expected = (models.load(root).parameters for root in (theirs, plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_views_without_tiles_have_the_tiles_size(tmp_path):
    settings = models.FAMILIES["DeepseekOcr2ForConditionalGeneration"].settings(GOLDENS / FAMILY)["image_config"]
    options = {**json.loads(settings.options), "crop_to_patches": False}
    found = process_images([np.zeros((100, 60, 3), np.uint8)], type(settings).of(options, processor=settings.processor))
    assert set(found) == {"pixel_values", "num_local_patches"}
    assert found["pixel_values"].shape == (1, 3, 48, 48)
    assert found["num_local_patches"].tolist() == [0]


def test_sizes_without_queries_are_refused(tmp_path: Path):
    second = models.load(write_checkpoint(FAMILY, tmp_path))
    ids = np.array([[5, *[301] * 145, 6]])
    with pytest.raises(InputError, match=r"got 40 pixels a side; expected one of \[48, 64\]"):
        second.embed(ids, pixel_values=np.zeros((1, 3, 40, 40), np.float32), num_local_patches=[0])
