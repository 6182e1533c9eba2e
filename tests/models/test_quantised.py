"""Quantised weights against loops over single values, written from the formats' public descriptions."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoints import TensorInfo
from models.checkpoints.conversion.quantised import DequantisedSource, read_quantisation
from tests.models.quantised_arrays import (
    AWQ,
    FP8,
    ArraySource,
    awq_arrays,
    awq_by_loops,
    blocks_by_loops,
    compressed,
    field,
    fp8_arrays,
    fp8_by_loops,
    gptq,
    gptq_arrays,
    gptq_by_loops,
    packed_arrays,
    packed_by_loops,
    source_of,
)


def cases() -> dict[str, tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]]:
    rng = np.random.default_rng(0)
    found: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]] = {}
    arrays = fp8_arrays(rng)
    found["fp8 blocks"] = arrays, FP8, blocks_by_loops(arrays)
    arrays = fp8_arrays(rng, (2, 7, 5))
    found["fp8 experts"] = arrays, FP8, blocks_by_loops(arrays)
    stored = arrays["a.weight"][0]
    for name, scales, block in (
        ("rows", np.linspace(0.1, 1, 7, dtype=np.float32)[:, None], (1, 5)),
        ("one", np.array(0.3, np.float32), (7, 5)),
        ("one in a row", np.array([0.3], np.float32), (7, 5)),
    ):
        table = {"quant_method": "fp8", "activation_scheme": "static"}
        arrays = {"a.weight": stored, "a.weight_scale": scales, "a.input_scale": np.ones((), np.float32)}
        found[f"fp8 {name}"] = arrays, table, fp8_by_loops(stored, scales.reshape(-1, 1), block)
    scales = np.array([[120, 127, 130]], np.uint8)
    arrays = {"a.weight": stored, "a.weight_scale_inv": scales}
    powers = 2.0 ** (scales.astype(np.float32) - 127)
    table = {"quant_method": "fp8", "weight_block_size": [8, 2], "scale_fmt": "ue8m0"}
    found["fp8 with powers of two"] = arrays, table, fp8_by_loops(stored, powers, (8, 2))
    for bits in (2, 4, 8):
        arrays = gptq_arrays(rng, bits)
        found[f"gptq {bits}"] = arrays, gptq(bits), gptq_by_loops(arrays, bits, 1)
    arrays = gptq_arrays(rng, shuffled=True)
    found["gptq shuffled"] = arrays, gptq(desc_act=True), gptq_by_loops(arrays, 4, 1)
    found["gptq v2"] = arrays, gptq(desc_act=True, checkpoint_format="gptq_v2"), gptq_by_loops(arrays, 4, 0)
    arrays = gptq_arrays(rng, inputs=40, group=16)
    found["gptq, a short last group"] = arrays, gptq(group=16), gptq_by_loops(arrays, 4, 1)
    arrays = gptq_arrays(rng, group=32)
    found["gptq, one group"] = arrays, gptq(group=-1), gptq_by_loops(arrays, 4, 1)
    arrays = awq_arrays(rng)
    found["awq"] = arrays, AWQ, awq_by_loops(arrays)
    for bits, zeros in ((4, False), (4, True), (8, True)):
        arrays = packed_arrays(rng, bits, zeros=zeros)
        table = compressed(bits=bits, strategy="group", group_size=4)
        found[f"packed {bits} {zeros}"] = arrays, table, packed_by_loops(arrays, bits, 4)
    arrays = arrays | {"a.weight_g_idx": rng.permutation(np.arange(20) // 4).astype(np.int32)}
    found["packed shuffled"] = arrays, table, packed_by_loops(arrays, 8, 4)
    arrays = packed_arrays(rng, group=20)
    found["packed rows"] = arrays, compressed(strategy="channel"), packed_by_loops(arrays, 4, 20)
    stored = rng.integers(-128, 128, (6, 5)).astype(np.int8)
    scales, zeros = rng.uniform(0.01, 1, (6, 1)).astype(np.float32), rng.integers(-9, 9, (6, 1)).astype(np.int8)
    arrays = {"a.weight": stored, "a.weight_scale": scales, "a.weight_zero_point": zeros}
    table = compressed(bits=8, form="int-quantized", strategy="channel")
    found["int8 rows"] = arrays, table, (stored.astype(np.float32) - zeros) * scales
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_loops_over_single_ones(case: str) -> None:
    arrays, table, expected = CASES[case]
    source = source_of(arrays, table)
    assert source.tensors == {"a.weight": TensorInfo(expected.shape, "F32")}
    assert np.array_equal(source.read("a.weight"), expected)


def test_columns_whose_groups_descend() -> None:
    """Shuffled groups in every order of two and three columns: runs that end before they begin, or as they begin."""
    arrays, table, expected = CASES["packed shuffled"]
    source = source_of(arrays, table)
    for width in (1, 2, 3):
        for start in range(expected.shape[1] - width + 1):
            region = (slice(0, 2), slice(start, start + width))
            assert np.array_equal(source.read("a.weight", region), expected[region])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_any_region_is_that_of_the_whole(case: str, data: st.DataObject) -> None:
    arrays, table, expected = CASES[case]
    region = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, size))))
    found = source_of(arrays, table).read("a.weight", tuple(region))
    assert np.array_equal(found, expected[tuple(region)])


@pytest.mark.parametrize("case", ["fp8 blocks", "gptq 4", "awq", "packed 4 True"])
def test_bfloat16_is_rounded_once(case: str) -> None:
    arrays, table, expected = CASES[case]
    source = source_of(arrays, table, ml_dtypes.bfloat16)
    assert source.tensors["a.weight"].dtype == "BF16"
    assert np.array_equal(source.read("a.weight"), expected.astype(ml_dtypes.bfloat16))
    assert np.array_equal(source.read("a.weight", (slice(1, 3),)), expected[1:3].astype(ml_dtypes.bfloat16))


def packed_by_the_libraries() -> dict[str, dict[str, np.ndarray]]:
    with np.load(Path(__file__).parents[1] / "goldens" / "quantised.npz") as file:
        arrays = {name: file[name] for name in file.files}
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, value in arrays.items():
        case, part = name.split(".")
        found.setdefault(case, {})[f"a.{part}"] = value
    found["fp8"]["a.weight"] = found["fp8"].pop("a.weight_bytes").view(ml_dtypes.float8_e4m3fn)
    return found


@pytest.mark.parametrize(
    ("case", "table"),
    [
        ("awq", AWQ | {"group_size": 32}),
        ("gptq4", gptq(4, 32)),
        ("gptq8", gptq(8, 32)),
        ("packed", compressed(strategy="group", group_size=32)),
        ("packed_zeros", compressed(strategy="group", group_size=32, symmetric=False)),
        ("fp8", FP8 | {"weight_block_size": [32, 32]}),
    ],
)
def test_what_the_libraries_pack_is_read_as_they_read_it(case: str, table: dict[str, Any]) -> None:
    """AutoAWQ, AutoGPTQ, compressed-tensors and transformers, see `tests/goldens/make_quantised.py`."""
    arrays = packed_by_the_libraries()[case]
    meant = arrays.pop("a.weight_meant")
    assert np.array_equal(source_of(arrays, table).read("a.weight"), meant)


# ------------------------------------------------------------------------------------------------- reading less


@pytest.mark.parametrize("case", ["fp8 blocks", "fp8 experts", "gptq 4", "awq", "packed 4 True"])
def test_a_region_reads_its_own_parts_alone(case: str) -> None:
    arrays, table, expected = CASES[case]
    inner = ArraySource(arrays)
    source = DequantisedSource(inner, read_quantisation(table))
    inner.read_values = dict.fromkeys(inner.tensors, 0)
    source.read("a.weight", tuple(slice(0, 1) for _ in expected.shape))
    packed = next(iter(arrays))
    assert inner.read_values[packed] <= max(8, arrays[packed].size // 8)


def test_plain_tensors_go_through_untouched() -> None:
    rng = np.random.default_rng(1)
    plain = {
        "norm.weight": np.ones(3, ml_dtypes.bfloat16),
        "lm_head.weight": rng.normal(size=(4, 3)).astype(np.float32),
    }
    source = source_of(awq_arrays(rng) | plain, AWQ | {"modules_to_not_convert": ["lm_head"]})
    assert source.tensors["norm.weight"] == TensorInfo((3,), "BF16")
    assert np.array_equal(source.read("lm_head.weight", (slice(1, 3),)), plain["lm_head.weight"][1:3])


def test_zero_biases_of_the_packers_may_stay_unread() -> None:
    arrays = gptq_arrays(np.random.default_rng(2)) | {"a.bias": np.zeros(16, np.float16)}
    assert source_of(arrays, gptq()).unused == {"a.bias"}
    arrays["a.bias"][3] = 1
    assert source_of(arrays, gptq()).unused == frozenset()


def test_gptqmodel_takes_its_one_from_the_whole_word() -> None:
    """A zero point of 0 borrows from its neighbour there; AutoGPTQ's stays within its field."""
    arrays = gptq_arrays(np.random.default_rng(3), inputs=8, outputs=8)
    zeros = np.array([0, 5, 15, 0, 1, 8, 3, 0], np.uint64)
    word = sum(int(zero) << (4 * place) for place, zero in enumerate(zeros))
    arrays["a.qzeros"] = np.array([[(word - 0x11111111) % 2**32]], np.uint32).view(np.int32)
    found = source_of(arrays, gptq(meta={"quantizer": ["gptqmodel:1.4.0"]})).read("a.weight")
    values = np.array([[field(arrays["a.qweight"], 0, row, column, 4) for column in range(8)] for row in range(8)])
    expected = (values - zeros.astype(np.int64)[:, None]) * arrays["a.scales"].astype(np.float32).T
    assert np.array_equal(found, expected.astype(np.float32))


def test_modules_that_differ_are_read_as_their_rule_says() -> None:
    rng = np.random.default_rng(4)
    arrays = gptq_arrays(rng) | {
        name.replace("a.", "b."): value for name, value in gptq_arrays(rng, 8, group=16).items()
    }
    arrays["c.weight"] = np.ones((2, 2), np.float32)
    rules = {r"+:b$": {"bits": 8, "group_size": 16}, r"-:c.*": {}}
    source = source_of(arrays, gptq(dynamic=rules))
    only = {name.replace("b.", "a."): value for name, value in arrays.items() if name.startswith("b.")}
    assert np.array_equal(source.read("b.weight"), gptq_by_loops(only, 8, 1))
    assert np.array_equal(source.read("a.weight"), gptq_by_loops(arrays, 4, 1))
