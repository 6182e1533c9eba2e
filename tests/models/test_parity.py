"""Every family against transformers, case by case: pixels, positions, features, KV, logits and greedy tokens.

`tests/goldens/table.py` has the models and the prompts. A family of each kind runs by default, the rest is slow.
"""

import numpy as np
import pytest

from kvpatch_jax.core import to_engine
from kvpatch_jax.models import load
from tests.goldens.load import drawn_inputs, golden_arrays, golden_config, write_checkpoint
from tests.goldens.redraw import digest
from tests.goldens.table import AUDIO, FAMILIES, IMAGE, VIDEO
from tests.shared.tolerances import assert_close_to_largest

BAR = 2e-5
# Linear attention adds to its state and takes from it in float32, and a norm divides by what is left: transformers' own
# float32 is 1.8e-5 from its float64 for one image.
# Gemma 4 norms what its gelu leaves far below zero, of which transformers' tanh has no digits: its float32 is up to
# 6e-5 from its float64.
BARS = {"qwen3_5_moe": 5e-5, "gemma4": 5e-5}
DEFAULT = ("llama2", "gemma3_text", "deepseek_v3", "qwen3_vl", "internvl", "gemma3", "qwen3_5_moe_text")

pytestmark = pytest.mark.usefixtures("highest_precision")


def cases() -> list:
    rows = [(family, case) for family, row in FAMILIES.items() for case in row.cases]
    fast = {family: list(FAMILIES[family].cases)[:2][-1] for family in DEFAULT}
    return [
        pytest.param(*row, marks=() if row in fast.items() else pytest.mark.nightly, id="-".join(row)) for row in rows
    ]


def cached_of(arrays, layout, channel):
    """transformers' keys or values of the layers that keep this channel."""
    side = "second" if channel[0] == "v" or channel == "kpe" else "first"
    layers = layout.layers_of(channel)
    if side not in arrays:
        return np.stack([arrays[f"{side}.{layer}"] for layer in layers])
    return arrays[side] if "state" in arrays else arrays[side][np.asarray(layers)]


@pytest.mark.parametrize(("family", "case"), cases())
def test_equals_transformers(golden, family, case):
    backbone, arrays, inputs, tokens = golden(family, case)

    bar = BARS.get(family, BAR)

    # What the family's processors make of images and what is drawn.
    for name, value in inputs.items():
        if family == "phi3_v" and name == "pixel_values":  # the small whole images are rounded as torch's bicubic
            counts = [1 + height // 16 * (width // 16) for height, width in inputs["image_sizes"].tolist()]
            value = np.delete(value, np.cumsum([0, *counts[:-1]]), axis=0)
        if f"digest.{name}" in arrays:
            assert np.array_equal(digest(value), arrays[f"digest.{name}"]), name
    assert not inputs or any(f"digest.{name}" in arrays for name in inputs)

    assert np.array_equal(tokens.positions[0], arrays["position_ids"])
    assert np.asarray(tokens.positions).dtype == arrays["position_ids"].dtype
    found = np.asarray(tokens.embeddings)[0][arrays["embedded"]]
    assert_close_to_largest(found, arrays["embeddings"], "embeddings", bar=bar)

    out = backbone.prefill(tokens, logits="all")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    for channel, value in engine.items():
        if channel in ("state", "tail"):
            assert_close_to_largest(value[:, 0], arrays[channel], channel, bar=bar)
        elif channel != "map":
            expected = cached_of(arrays, backbone.layout, channel)
            assert_close_to_largest(value[:, 0][:, arrays["rows"]], expected, channel, bar=bar)
    assert_close_to_largest(np.asarray(out.logits)[0][arrays["rows"]], arrays["logits"], "logits", bar=bar)

    if family == "llama_dynamic":  # its regime ends with the prompt
        return
    # The goldens go on behind the checkpoint's end token.
    generated = backbone.generate(tokens, len(arrays["generated"]), stop=())
    assert np.array_equal(generated[0], arrays["generated"])


@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family, row in FAMILIES.items() for case in row.positions]
)
def test_positions_equal_transformers(family, case, tmp_path):
    """Of mixtures whose towers do not run: features are given in their place. By transformers' rule for videos."""
    rule = "hf5" if family == "qwen2_5_vl" else None
    backbone, arrays = load(write_checkpoint(family, tmp_path), video_rule=rule), golden_arrays(family, case)
    ids = arrays.pop("input_ids").astype(np.int32)[None]
    expected = arrays.pop("position_ids")
    layers = len(golden_config(family)["vision_config"].get("deepstack_visual_indexes", ()))
    pads = int(np.isin(ids, (IMAGE, VIDEO, AUDIO)).sum())
    features = np.zeros((1 + layers, pads, backbone.config.text.width), np.float32)
    positions = backbone.embed(ids, features=features, **drawn_inputs(family, case), **arrays).positions[0]
    assert np.array_equal(positions, expected)
