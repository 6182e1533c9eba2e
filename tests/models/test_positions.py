"""Every token of a prompt gets the position that transformers, or the authors' rule for videos, gives it."""

from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.positions import PositionRule, get_rope_positions
from tests.goldens.load import (
    drawn_inputs,
    golden_arrays,
    golden_config,
    golden_images,
    golden_prompt,
    write_checkpoint,
)
from tests.goldens.table import AUDIO, FAMILIES, IMAGE, VIDEO

START, AUDIO_START = 303, 306
OMNI = PositionRule(IMAGE, VIDEO, 2, 2, AUDIO, (START, AUDIO_START))


@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if row.positions])
def test_positions_equal_transformers(tiny, family, tmp_path):
    """Of mixtures whose towers do not run: features are given in their place. By transformers' rule for videos."""
    backbone = tiny(family)
    if family == "qwen2_5_vl":
        backbone = load(write_checkpoint(family, tmp_path), video_rule="hf5")
    layers = len(golden_config(family)["vision_config"].get("deepstack_visual_indexes", ()))
    for case in FAMILIES[family].positions:
        arrays = golden_arrays(family, case)
        ids, expected = arrays.pop("input_ids").astype(np.int32)[None], arrays.pop("position_ids")
        pads = int(np.isin(ids, (IMAGE, VIDEO, AUDIO)).sum())
        features = np.zeros((1 + layers, pads, backbone.config.text.width), np.float32)
        positions = backbone.embed(ids, features=features, **drawn_inputs(family, case), **arrays).positions[0]
        assert np.array_equal(positions, expected), case


def test_a_prompt_in_parts_has_the_ids_and_positions_of_transformers(tiny):
    """Two images between runs of token ids."""
    backbone, images = tiny("qwen2_5_vl"), golden_images("qwen2_5_vl", "two_images")
    gold = golden_prompt(backbone, "qwen2_5_vl", "two_images")
    gold |= {"position_ids": golden_arrays("qwen2_5_vl", "two_images")["position_ids"][None]}
    ids = gold["input_ids"][0].tolist()
    marks = [place for place, token in enumerate(ids) if token in (303, 304)]
    parts = [ids[: marks[0]], images[0], ids[marks[1] + 1 : marks[2]], images[1], ids[marks[3] + 1 :]]
    prompt = backbone.prepare([part for part in parts if len(part)])
    for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw"):
        assert np.array_equal(prompt[name], gold[name]), name


@pytest.mark.parametrize(("rule", "after"), [("max", 5), ("hf5", 2)])
def test_a_video_stands_at_its_seconds(rule, after):
    ids = np.array([1, *[VIDEO] * 3, 3], np.int32)
    settings = PositionRule(IMAGE, VIDEO, 2, rate=3, video_rule=rule)
    positions = get_rope_positions(ids, None, np.array([[3, 2, 2]]), np.array([0.5]), settings)
    assert positions[:, 0].tolist() == [0, 1, 2, 4, after]  # 0, 1.5 and 3 positions, truncated


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([AUDIO_START, AUDIO, AUDIO, 307], {"sounds": [3]}, "got 2 placeholders 305 from index 1; expected 3"),
        ([START, IMAGE], {"images": [[1, 3, 4]]}, "multiple of the merge size"),
        ([START, IMAGE], {"images": [[1, 4, 4]]}, "image: got 1 placeholders 301 from index 1; expected 4"),
        ([START, VIDEO, VIDEO], {"videos": [[2, 2, 2]], "seconds": [1e30]}, "expected positions below"),
    ],
)
def test_sizes_and_placeholders_must_match(ids, sizes, message):
    arrays: dict[str, Any] = {"images": None, "videos": None, "seconds": None, "sounds": []}
    arrays |= {name: value if name == "sounds" else np.array(value) for name, value in sizes.items()}
    with pytest.raises(InputError, match=message):
        get_rope_positions(np.array(ids, np.int32), rule=OMNI, **arrays)
