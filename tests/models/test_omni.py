"""Qwen2.5-Omni's and Qwen3-Omni's thinkers against transformers: images, videos, audio, and all of them mixed."""

import functools

import numpy as np
import pytest

from kvpatch_jax.core import to_engine
from models import load
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)
CASES = {
    "qwen2_5_omni": ("video_with_audio", "mixed", "audio", "one_image", "text"),
    "qwen3_omni": ("video_with_audio", "mixed", "audio", "long_audio", "one_image", "text"),
}
INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    *("input_features", "feature_attention_mask"),
)

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    return functools.cache(
        lambda family: load(write_checkpoint(family, tmp_path_factory.mktemp(family)), angles="float32")
    )


def inputs_of(gold):
    return {name: gold[name] for name in INPUTS if name in gold}


def check_forward(backbone, gold):
    tokens = backbone.embed(gold["input_ids"][None], **inputs_of(gold))
    assert np.array_equal(tokens.positions[0], gold["position_ids"])
    assert np.asarray(tokens.positions).dtype == gold["position_ids"].dtype
    close(tokens.embeddings[0], gold["inputs_embeds"], "embeddings")
    layers = backbone.layout.layers
    out = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    whole = gold["hidden"].shape[1] == len(gold["input_ids"])
    rows = slice(None) if whole else gold["rows"]
    for layer in range(layers):
        close(out.hidden[layer + 1][0, rows], gold["hidden"][layer], f"hidden {layer}")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    for channel in engine:
        close(engine[channel][:, 0, rows], gold[channel], f"cached {channel}")
    close(out.logits[0, gold["rows"]], gold["logits"], "logits")


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if case == "video_with_audio" else pytest.mark.slow)
        for family, cases in CASES.items()
        for case in cases
    ],
)
def test_forward_equals_transformers(backbones, family, case):
    check_forward(backbones(family), golden_arrays(family, case))
