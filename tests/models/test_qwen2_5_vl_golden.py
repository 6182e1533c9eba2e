"""The port against transformers: hidden states, caches and logits to 2e-4 of the largest magnitude."""

import functools

import pytest

from kvpatch_jax.core import to_engine
from kvpatch_jax.models import load
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

BAR = 2e-4
close = functools.partial(assert_close_to_largest, bar=BAR)


@pytest.fixture(scope="module")
def backbone(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("golden")
    return load(write_checkpoint("qwen2_5_vl", directory, request.param), angles="float32")


pytestmark = pytest.mark.usefixtures("highest_precision")


def tokens_of(backbone, gold, position_ids="position_ids"):
    vision = {name: gold[name] for name in ("pixel_values", "image_grid_thw", "video_grid_thw") if name in gold}
    return backbone.embed(gold["input_ids"][None], gold[position_ids][None], **vision)


CASES = ("text", "one_image", "two_images", "video")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "case"),
    [*(("config.json", case) for case in CASES), ("config_release.json", "two_images")],
    indirect=["backbone"],
)
def test_forward_equals_transformers(backbone, case):
    gold = golden_arrays("qwen2_5_vl", case)
    tokens = tokens_of(backbone, gold)
    close(tokens.embeddings[0], gold["inputs_embeds"], "embeddings")
    layers = backbone.layout.layers
    out = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    for layer in range(layers):
        close(out.hidden[layer + 1][0], gold["hidden"][layer], f"hidden {layer}")
    close(out.kv["k"][:, 0], gold["k_phase_free"], "phase-free keys")
    engine = to_engine(backbone.layout, out.kv, gold["position_ids"][None], 0)
    close(engine["k"][:, 0], gold["k"], "cached keys")
    close(engine["v"][:, 0], gold["v"], "cached values")
    close(out.logits[0], gold["logits"], "logits")
