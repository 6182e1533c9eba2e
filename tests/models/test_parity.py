"""Every family's embeddings, caches, logits and greedy tokens equal those of transformers.

`tests/goldens/table.py` has the models and the prompts. A family of each kind runs by default.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import load
from kvpatch_jax.models.decoder.layers import ACTIVATIONS
from tests.goldens.held_out import AXES, COUNT, settings
from tests.goldens.load import held_out, write_held_out
from tests.goldens.redraw import digest, draw_image, draw_numbers
from tests.goldens.table import FAMILIES, Picture
from tests.shared.tolerances import assert_close_to_largest

BAR = 2e-5
# Linear attention adds to its state and takes from it in float32, and a norm divides by what is left: transformers' own
# float32 is 1.8e-5 from its float64 for one image, 1.5e-5 for a held-out setting where ours is 3.4e-5.
# Gemma 4 norms what its gelu leaves far below zero, of which transformers' tanh has no digits: its float32 is up to
# 6e-5 from its float64.
BARS = {"qwen3_5_moe": 5e-5, "gemma4": 5e-5}
HELD_OUT_BARS = BARS | dict.fromkeys(("qwen3_5_moe_text", "qwen3_next", "qwen3_5"), 5e-5)
DEFAULT = ("llama2", "deepseek_v3", "qwen3_vl", "internvl", "gemma3", "qwen3_5_moe_text")

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
def test_prefill_and_answer_equal_transformers(golden, family, case):
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
    embeddings = np.asarray(tokens.embeddings)[0][arrays["embedded"]]
    assert_close_to_largest(embeddings, arrays["embeddings"], "embeddings", bar=bar)

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


def refusal(config):
    """What the message of a legal setting that is not built says, or None."""
    text = config.get("text_config", config)
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        return "expected experts in every layer"
    deep = config.get("vision_config", {}).get("deepstack_visual_indexes", ())
    return "deepstack layers: got" if len(deep) > text.get("num_hidden_layers", 99) else None


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("family", AXES)
def test_settings_drawn_by_chance_equal_transformers(family, number, tmp_path):
    """Ten settings of every family that no other test uses."""
    arrays = held_out(family)[1]
    gold = {name.partition(".")[2]: value for name, value in arrays.items() if name.startswith(f"{number}.")}
    row, directory = settings(family)[number], write_held_out(family, number, tmp_path)
    if (message := refusal(row.config)) is not None:
        with pytest.raises(ConfigError, match=message):
            load(directory)
        return
    backbone = load(directory, angles="float32")
    inputs = {}
    sizes = [part for part in row.cases["held"] if isinstance(part, Picture)]
    if sizes and family == "kimi_vl":
        grid = (1, sizes[0].height // 4, sizes[0].width // 4)
        inputs = {"pixel_values": draw_numbers("held", int(np.prod(grid)), 3, 4, 4), "image_grid_thw": np.array([grid])}
    elif sizes:
        prompt = backbone.prepare([[5], draw_image("image 0", *sizes[0])])
        inputs = {name: value for name, value in prompt.items() if name not in ("input_ids", "position_ids")}
    tokens = backbone.embed(gold["input_ids"].astype(np.int32)[None], **inputs)
    assert np.array_equal(tokens.positions[0], gold["position_ids"])

    logits = np.asarray(backbone.prefill(tokens, logits="all").logits)[0]
    bar = HELD_OUT_BARS.get(family, BAR)
    assert_close_to_largest(logits[-1], gold["last"], "last logits", bar=bar)
    sums = logits[gold["rows"]] @ draw_numbers("directions", 320, 16)[: logits.shape[1]]
    assert_close_to_largest(sums, gold["sums"], "sums of other logits", bar=bar)


GELU_TANH = lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    **dict.fromkeys(("silu", "swish"), lambda x: x / (1 + np.exp(-x))),
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), GELU_TANH),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def test_activations_follow_the_formulas_of_their_names():
    x = np.linspace(-6, 6, 241)
    for name, formula in FORMULAS.items():
        assert_close_to_largest(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), formula(x), name, bar=1e-6)
