"""KV of several units in one prompt, unit by unit, and chunks from a tower's kept output."""

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from tests.goldens.load import write_checkpoint

BAR = 1e-5


pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """Deepstack, and three axes of positions."""
    return load(write_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl")))


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)


def assert_close(found, expected, bar: float = BAR):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert np.abs(found[name] - value).max() <= bar * np.abs(value).max()


@pytest.mark.nightly
def test_each_unit_has_its_part_of_the_whole_prompt(backbone):
    units = [[image(1)], [[3, 1, 4]], [image(2)]]
    found = kvp.conditioned(backbone, units)
    whole = backbone.prefill(backbone.embed(**backbone.prepare([unit[0] for unit in units]))).kv
    begin = 0
    for unit, kv in zip(units, found, strict=True):
        chunk = kvp.make_chunk(backbone, unit)
        end = begin + chunk.length
        assert_close(kv, {name: value[:, 0, begin:end] for name, value in whole.items()})
        kvp.form_patch(chunk, kv, 2, ("others",))
        begin = end
    assert begin == next(iter(whole.values())).shape[2]
    assert_close(found[0], kvp.make_chunk(backbone, units[0]).kv)


@pytest.mark.nightly
def test_a_chunk_is_made_from_a_towers_kept_output(backbone, tmp_path):
    chunk = kvp.make_chunk(backbone, [image(3)])
    assert chunk.encoder is None
    kept = kvp.make_chunk(backbone, [image(3)], keep_encoder=True)
    assert kept.content == chunk.content
    with kvp.ChunkStore(tmp_path) as store:
        store.put(kept)
        features = store.get_encoder(kept.id, kept.backbone)
    again = kvp.make_chunk(backbone, [image(3)], encoder=features)
    for name, value in chunk.kv.items():
        assert np.array_equal(kept.kv[name], value)
        assert np.array_equal(again.kv[name], value)
    with pytest.raises(InputError, match="features: got shape"):
        kvp.make_chunk(backbone, [image(3), image(4)], encoder=features)
    assert kvp.make_chunk(backbone, [[3, 1]], keep_encoder=True).encoder is None
