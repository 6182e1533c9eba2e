"""The tower's output: made once by `encode`, embedded in place of pixels, bit for bit."""

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, load
from tests.compilations import compilations
from tests.goldens.load import write_checkpoint
from tests.goldens.load_text import write_text_checkpoint

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)


PADDED = ("qwen3_vl", "glm4v_moe", "mistral3")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["internvl", "qwen3_vl", "glm4v_moe", "mistral3"])
def test_embedding_kept_features_is_bit_equal(family, tmp_path):
    backbone = load(write_checkpoint(family, tmp_path), buckets=Buckets() if family in PADDED else None)
    prompt = backbone.prepare([[1, 2, 3], IMAGE, [4, 5]])
    with compilations() as towers:
        features = np.asarray(backbone.encode(**prompt))
    assert any("encode" in name for name in towers)
    deep = backbone.config.vision.deepstack_layers if family == "qwen3_vl" else ()
    pads = int((prompt["input_ids"] == backbone.config.image_token).sum())
    assert features.shape == (1 + len(deep), pads, backbone.config.text.width)

    expected = backbone.embed(**prompt)
    without_pixels = {name: value for name, value in prompt.items() if name != "pixel_values"}
    with compilations() as compiled:
        found = backbone.embed(**without_pixels, features=features)
    assert np.array_equal(found.embeddings, expected.embeddings)
    np.testing.assert_array_equal(found.positions, expected.positions)
    assert (found.deepstack is None) == (not deep)
    if deep:
        assert found.deepstack is not None
        assert expected.deepstack is not None
        np.testing.assert_array_equal(found.deepstack, expected.deepstack)
    assert not any("encode" in name for name in compiled)  # the tower does not run

    with pytest.raises(InputError, match=rf"features: got shape .*; expected \({1 + len(deep)}, {pads}, "):
        backbone.embed(**without_pixels, features=features[:, 1:])


def test_prompts_without_images_have_no_features(tmp_path):
    backbone = load(write_text_checkpoint("llama2", tmp_path))
    prompt = backbone.prepare([[1, 2, 3]])
    assert backbone.encode(**prompt) is None
    assert backbone.embed(**prompt, features=backbone.encode(**prompt)).embeddings.shape[:2] == (1, 3)
    with pytest.raises(InputError, match="features: got some for LlamaForCausalLM, which takes no images"):
        backbone.embed(**prompt, features=np.zeros((1, 2, 4), np.float32))
