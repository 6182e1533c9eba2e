"""A saved model has the tensors that it was read from, bit for bit, and is read again as the same model."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvpatch_jax.models import load, save
from kvpatch_jax.models.checkpoints import flatten_params
from tests.goldens.load import write_checkpoint
from tests.goldens.table import FAMILIES
from tests.models.conftest import REGIMES

WIDE = ("correction", "decay_rate", "decay_bias")
"""Parameters of float32 in every file."""
DEFAULT = ("deepseek_v3", "phi3_short", "qwen3_5_moe_text")
"""Experts and shared ones above a dense layer; fused projections; fused experts and linear attention."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.nightly) for name in FAMILIES]
)
def test_a_saved_model_is_the_one_that_was_read(tiny, family, tmp_path):
    backbone = tiny(family)
    original = load_file(write_checkpoint(family, tmp_path / "original") / "model.safetensors")
    written = load_file(save(backbone, tmp_path / "copy") / "model.safetensors")
    assert written.keys() <= original.keys()
    assert all(written[name].tobytes() == original[name].tobytes() for name in written)
    again = load(tmp_path / "copy", angles="float32", regime=REGIMES.get(family))
    assert again.config.text == backbone.config.text
    assert again.layout == backbone.layout
    assert again.fingerprint == backbone.fingerprint
    half = load(save(again, tmp_path / "half", dtype="bfloat16"), regime=REGIMES.get(family))
    assert half.fingerprint != again.fingerprint
    for path, leaf in flatten_params(half.parameters).items():
        assert leaf.dtype == ("float32" if path[-1] in WIDE else "bfloat16"), path


def test_the_fingerprint_follows_a_weight(tiny):
    backbone = tiny("llama2")
    values = jax.tree.map(np.array, backbone.parameters)
    assert backbone.replaced(values).fingerprint == backbone.fingerprint
    values["decoder"]["norm"]["weight"][3] *= np.float32(1.0001)
    assert backbone.replaced(values).fingerprint != backbone.fingerprint
