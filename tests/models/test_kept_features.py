"""A tower's kept output stands for the images bit for bit, and no tower runs."""

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets
from tests.goldens.load import golden_images
from tests.goldens.table import FAMILIES
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest

MORE = ("qwen3_vl", "qwen2_5_omni", "qwen3_omni", "gemma3", "mistral3")
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.mark.parametrize("family", ["internvl", *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_features_stand_for_pixels_and_sounds(golden, family):
    """In a padded prompt too."""
    case = "one_image" if family == "internvl" else "mixed" if "mixed" in FAMILIES[family].cases else "two_images"
    backbone, _, inputs, tokens = prompt = golden(family, case)
    features = backbone.encode(prompt.ids, **inputs)
    with compilations() as compiled:
        again = backbone.embed(prompt.ids, **inputs, features=features)
    assert not any("encode" in name for name in compiled)
    jax.tree.map(np.testing.assert_array_equal, again, tokens)
    if family != "internvl":
        padded = backbone.replaced(backbone.parameters).with_buckets(Buckets())
        embedded = padded.embed(prompt.ids, **inputs)
        assert_close_to_largest(embedded.embeddings, np.asarray(tokens.embeddings), "embeddings", bar=1e-5)
        logits = backbone.prefill(tokens).logits
        assert_close_to_largest(padded.prefill(embedded).logits, np.asarray(logits), "logits", bar=1e-5)


def test_a_chunk_is_made_from_what_the_store_kept(tiny, tmp_path):
    backbone, (image,) = tiny("internvl"), golden_images("internvl", "one_image")
    chunk = kvp.make_chunk(backbone, [image])
    assert chunk.encoder is None
    full = kvp.make_chunk(backbone, [image], keep_encoder=True)
    assert full.content == chunk.content
    with kvp.ChunkStore(tmp_path) as store:
        store.put(full)
        features = store.get_encoder(full.id, full.backbone)
    again = kvp.make_chunk(backbone, [image], encoder=features)
    for name, value in chunk.kv.items():
        assert np.array_equal(full.kv[name], value)
        assert np.array_equal(again.kv[name], value)
    with pytest.raises(InputError, match="features: got shape"):
        kvp.make_chunk(backbone, [image, image], encoder=features)
