"""DeepSeek-VL-7B: its SAM tower layer by layer, and what is refused."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from kvpatch_jax import models
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.models.families.deepseek_vl_hybrid import LARGE
from kvpatch_jax.models.families.family import with_parameters
from kvpatch_jax.models.towers.sam import SamBlock, SamConfig
from tests.arrays import placed
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

FAMILY = "deepseek_vl_hybrid"
close = functools.partial(assert_close_to_largest, bar=2e-4)
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model under transformers' names. Read only."""
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp(FAMILY) / "hf")


@pytest.fixture(scope="module")
def backbone(checkpoint: Path) -> models.ModelBackbone:
    return models.load(checkpoint)


@pytest.mark.slow
def test_sams_layers_equal_transformers(backbone):
    """Windows that padding fills, relative positions of both lengths, global layers: each layer's residual."""
    gold = golden_arrays(FAMILY, "one_image")
    graph, state = nnx.split(with_parameters(backbone.config, backbone.parameters))
    _, kept = jax.jit(lambda state, x: nnx.merge(graph, state).high(x, (0, 1, 2, 3)))(state, gold[LARGE])
    assert len(kept) == len(gold["high_blocks"])
    for layer, (found, expected) in enumerate(zip(kept, gold["high_blocks"], strict=True)):
        close(found, expected, f"layer {layer}")


def test_scores_of_a_large_image_are_made_in_blocks(backbone):
    """At the released size a layer that sees everything holds no matrix of 4096 tokens by 4096."""
    config = SamConfig()
    block = nnx.eval_shape(lambda: SamBlock(config, nnx.Rngs(0), windowed=False))
    graph, state = nnx.split(block)
    hidden = jax.ShapeDtypeStruct((1, config.side, config.side, config.width), np.float32)
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, hidden).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    whole = 4 * config.heads * config.side**4
    assert analysis.temp_size_in_bytes < whole / 3


def test_the_large_image_must_come_with_the_small_one(backbone):
    gold = golden_arrays(FAMILY, "one_image")
    ids, small, large = gold["input_ids"][None], gold["pixel_values"], gold[LARGE]
    with pytest.raises(InputError, match=r"high_res_pixel_values: got shape None; expected \(1, 3, 32, 32\)"):
        backbone.embed(ids, pixel_values=small)
    with pytest.raises(InputError, match=r"high_res_pixel_values: got shape \(1, 3, 16, 16\)"):
        backbone.embed(ids, pixel_values=small, high_res_pixel_values=small)
    with pytest.raises(InputError, match="high_res_pixel_values: got shape"):
        backbone.embed(ids, pixel_values=small, high_res_pixel_values=np.concatenate([large, large]))


def test_sam_does_not_interpolate_its_positions(backbone):
    tower = with_parameters(backbone.config, backbone.parameters).high
    with pytest.raises(ShapeError, match="expected 32×32"):
        tower(placed(np.zeros((1, 3, 40, 40), np.float32)))
    with pytest.raises(ShapeError, match="got 9 patches a side; expected 8"):
        jax.eval_shape(tower.blocks["1"], jax.ShapeDtypeStruct((1, 9, 9, 32), np.float32))
