"""Quantised checkpoints and settings that cannot be read are refused by name."""

from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, WeightsError
from models.checkpoints.conversion.quantised import Quantisation, read_quantisation
from tests.models.quantised_arrays import (
    AWQ,
    FP8,
    awq_arrays,
    compressed,
    fp8_arrays,
    gptq,
    gptq_arrays,
    packed_arrays,
    source_of,
)


def without(arrays: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in arrays.items() if name not in names}


def bad_checkpoints() -> dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]]:
    rng = np.random.default_rng(5)
    block, group, awq, packed = fp8_arrays(rng), gptq_arrays(rng), awq_arrays(rng), packed_arrays(rng)
    packing = compressed(strategy="group", group_size=4)
    halves = {"a.weight": rng.normal(size=(3, 3)).astype(np.float16)}
    return {
        "no scales": (
            without(block, "a.weight_scale_inv"),
            FP8,
            "'a.weight' of F8_E4M3 without scales; expected 'a.we",
        ),
        "scales of another shape": (
            block | {"a.weight_scale_inv": np.ones((3, 2), np.float32)},
            FP8,
            r"'a\.weight_scale_inv' of shape \(3, 2\); expected one of \[\(1, 1\), \(3, 3\), \(10, 1\)\]",
        ),
        "scales of whole numbers": (block | {"a.weight_scale_inv": np.ones((3, 3), np.int32)}, FP8, "of type I32"),
        "scales alone": (without(block, "a.weight") | halves, FP8, "'a.weight_scale_inv' .* of quantised"),
        "no zeros": (without(group, "a.qzeros"), gptq(), r"no tensor 'a\.qzeros'; expected it beside the others"),
        "no group index": (without(group, "a.g_idx"), gptq(desc_act=True), r"no tensor 'a\.g_idx'"),
        "other bits": (group, gptq(8), r"'a\.qzeros' of shape \(4, 2\); expected \(2, 4\)"),
        "other groups": (awq, AWQ | {"group_size": 4}, r"'a\.qzeros' of shape \(3, 2\); expected \(6, 2\)"),
        "wrong scales": (awq | {"a.scales": np.ones((3, 8), np.float16)}, AWQ, r"3, 16\)"),
        "weights both ways": (awq | {"a.weight": np.ones((16, 24), np.float16)}, AWQ, "'a.weight' plain and quant"),
        "zeros alone": (without(awq, "a.qweight"), AWQ, r"'a\.qzeros' .* of quantised weights"),
        "said to be plain": (awq, AWQ | {"modules_to_not_convert": ["a"]}, r"'a\.qweight' quantised, where"),
        "another method": (awq, FP8, r"'a\.qweight' .* of quantised weights; .*quantization_config says 'fp8'"),
        "no shape": (without(packed, "a.weight_shape"), packing, r"'a\.weight_shape'"),
        "a wrong shape": (packed | {"a.weight_shape": np.array([12, 60])}, packing, "as 'a.weight_shape' says"),
        "an endless shape": (packed | {"a.weight_shape": np.array([12, -1])}, packing, "as 'a.weight_shape' says"),
        "one axis": ({"a.weight": block["a.weight"][0], "a.weight_scale": np.ones((), np.float32)}, FP8, "two axes"),
    }


BAD = bad_checkpoints()


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_by_name(case: str) -> None:
    arrays, table, message = BAD[case]
    with pytest.raises(WeightsError, match=message):
        source_of(arrays, table)


def test_groups_out_of_order_or_out_of_range_are_refused() -> None:
    arrays = gptq_arrays(np.random.default_rng(6), shuffled=True)
    with pytest.raises(WeightsError, match="out of order where desc_act is false"):
        source_of(arrays, gptq()).read("a.weight")
    arrays["a.g_idx"][0] = 4
    with pytest.raises(WeightsError, match="with groups 0 … 4; expected 0 … 3"):
        source_of(arrays, gptq(desc_act=True)).read("a.weight")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "'bitsandbytes' .*nf4.* are not read; expected one of fp8",
        ),
        ({"load_in_8bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4' .* are not read"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "dreams"}, "quantised by 'dreams', which are not read"),
        ({"bits": 4}, "'quantization_config' without a quant_method; expected one of fp8"),
        ([], "expected a table"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size .*; expected two"),
        (FP8 | {"fmt": "int7"}, "fmt 'int7', which is not read; expected one of e4m3, e5m2"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers 'lm_head'; expected a list of names"),
        (gptq(3), "3 bits, which are not read; expected 2 or 4 or 8"),
        (gptq(group=0), "group_size 0"),
        (gptq(checkpoint_format="marlin"), "format 'marlin', which are not read"),
        (gptq(rotation="hadamard"), "got 'rotation': 'hadamard'; expected settings that are known for gptq"),
        (gptq(dynamic={"+:(": {}}), r"dynamic: got '\(' .*expected a regular expression"),
        (gptq(dynamic=["a"]), "settings of gptq that cannot be read"),
        (gptq(dynamic={"a": 3}), "settings of gptq that cannot be read"),
        (gptq(meta="gptqmodel"), "settings of gptq that cannot be read"),
        (compressed(strategy="group", group_size=[4]), "settings of compressed-tensors that cannot be read"),
        (AWQ | {"version": "gemv"}, "version 'gemv', which are not read; expected 'gemm'"),
        (AWQ | {"bits": 8}, "8 bits, which are not read; expected 4"),
        (compressed(form="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized', which are not read"),
        (compressed("float", 4), "type 'float' and 4 bits, which are not read"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (compressed() | {"transform_config": {"config_groups": {"u": 1}}}, "got 'transform_config'"),
        (compressed() | {"ignore": ["re:("]}, "expected a regular expression"),
        (compressed() | {"config_groups": None}, "config_groups None"),
    ],
)
def test_what_is_not_read_is_refused_by_name(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantisation(table)


@pytest.mark.parametrize(
    ("entry", "module", "plain"),
    [
        ("lm_head", "lm_head", True),
        ("visual", "model.visual.blocks.0.attn.qkv", True),
        ("model.layers.1", "model.layers.11.mlp.gate", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*gate$", "model.layers.0.mlp.gate", True),
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_modules_that_are_left_plain(entry: str, module: str, plain: bool) -> None:
    assert (Quantisation("awq", "here", plain=(entry,)).of_module(module) is None) == plain
