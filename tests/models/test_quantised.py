"""Quantised weights against loops over single values, written from the formats' public descriptions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import ConfigError, WeightsError
from models import load
from models.checkpoints import flatten_params, open_source
from models.checkpoints.quantised import DequantisedSource, Quantisation, read_quantisation
from models.checkpoints.source import TensorInfo

KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


class ArraySource:
    """Tensors in memory, and how many values of each were read."""

    unused: frozenset[str] = frozenset()

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.origin, self.arrays = "memory", dict(arrays)
        self.tensors = {name: TensorInfo(value.shape, KINDS[value.dtype.name]) for name, value in arrays.items()}
        self.read_values = dict.fromkeys(arrays, 0)

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> np.ndarray:
        part = self.arrays[name] if region is None else self.arrays[name][region]
        self.read_values[name] = max(self.read_values[name], part.size)
        return part.copy()


def source_of(arrays: Mapping[str, np.ndarray], table: Mapping[str, Any], dtype: Any = np.float32) -> DequantisedSource:
    return DequantisedSource(ArraySource(arrays), read_quantisation(dict(table)), dtype)


# ------------------------------------------------------------------------------------------------- makers

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 3]}


def fp8_arrays(
    rng: np.random.Generator, shape: tuple[int, ...] = (10, 8), name: str = "a.weight"
) -> dict[str, np.ndarray]:
    *leading, rows, columns = shape
    scales = rng.uniform(0.01, 2, (*leading, -(-rows // 4), -(-columns // 3))).astype(np.float32)
    stored = rng.normal(0, 40, shape).astype(ml_dtypes.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scales}


def float8(byte: int) -> float:
    """The value of an e4m3fn byte: sign, four exponent bits (bias 7), three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8_by_loops(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    out, bytes_ = np.zeros(stored.shape, np.float32), stored.view(np.uint8)
    for place in np.ndindex(stored.shape):
        *leading, row, column = place
        scale = scales[(*leading, row // block[0], column // block[1])]
        out[place] = np.float32(float8(int(bytes_[place]))) * np.float32(scale)
    return out


def blocks_by_loops(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return fp8_by_loops(arrays["a.weight"], arrays["a.weight_scale_inv"], (4, 3))


def field(words: np.ndarray, row: int, column: int, place: int, bits: int) -> int:
    return (int(words[row, column]) & 0xFFFFFFFF) >> (bits * place) & ((1 << bits) - 1)


def random_words(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32).view(np.int32)


def gptq_arrays(
    rng: np.random.Generator, bits: int = 4, inputs: int = 32, outputs: int = 16, group: int = 8, shuffled: bool = False
) -> dict[str, np.ndarray]:
    count, groups = 32 // bits, -(-inputs // group)
    order = np.arange(inputs) // group
    return {
        "a.qweight": random_words(rng, (inputs // count, outputs)),
        "a.qzeros": random_words(rng, (groups, outputs // count)),
        "a.scales": rng.uniform(0.01, 1, (groups, outputs)).astype(np.float16),
        "a.g_idx": (rng.permutation(order) if shuffled else order).astype(np.int32),
    }


def gptq_by_loops(arrays: Mapping[str, np.ndarray], bits: int, offset: int) -> np.ndarray:
    count = 32 // bits
    inputs, outputs = len(arrays["a.g_idx"]), arrays["a.qweight"].shape[1]
    out = np.zeros((outputs, inputs), np.float32)
    for column in range(inputs):
        group = int(arrays["a.g_idx"][column])
        for row in range(outputs):
            value = field(arrays["a.qweight"], column // count, row, column % count, bits)
            zero = (field(arrays["a.qzeros"], group, row // count, row % count, bits) + offset) % (1 << bits)
            out[row, column] = np.float32(value - zero) * np.float32(arrays["a.scales"][group, row])
    return out


def gptq(bits: int = 4, group: int = 8, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}


def awq_arrays(rng: np.random.Generator, inputs: int = 24, outputs: int = 16, group: int = 8) -> dict[str, np.ndarray]:
    return {
        "a.qweight": random_words(rng, (inputs, outputs // 8)),
        "a.qzeros": random_words(rng, (inputs // group, outputs // 8)),
        "a.scales": rng.uniform(0.01, 1, (inputs // group, outputs)).astype(np.float16),
    }


def awq_by_loops(arrays: Mapping[str, np.ndarray], group: int = 8) -> np.ndarray:
    inputs, words = arrays["a.qweight"].shape
    out = np.zeros((8 * words, inputs), np.float32)
    for column in range(inputs):
        for word in range(words):
            for place, within in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                row = 8 * word + within
                value = field(arrays["a.qweight"], column, word, place, 4)
                zero = field(arrays["a.qzeros"], column // group, word, place, 4)
                scale = np.float32(arrays["a.scales"][column // group, row])
                out[row, column] = np.float32(value - zero) * scale
    return out


def compressed(kind: str = "int", bits: int = 4, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:visual.*"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }


def packed_arrays(
    rng: np.random.Generator, bits: int = 4, outputs: int = 12, inputs: int = 20, group: int = 4, zeros: bool = False
) -> dict[str, np.ndarray]:
    count, groups = 32 // bits, -(-inputs // group)
    arrays = {
        "a.weight_packed": random_words(rng, (outputs, -(-inputs // count))),
        "a.weight_scale": rng.uniform(0.01, 1, (outputs, groups)).astype(ml_dtypes.bfloat16),
        "a.weight_shape": np.array([outputs, inputs]),
    }
    return arrays | ({"a.weight_zero_point": random_words(rng, (-(-outputs // count), groups))} if zeros else {})


def packed_by_loops(arrays: Mapping[str, np.ndarray], bits: int, group: int) -> np.ndarray:
    outputs, inputs = (int(size) for size in arrays["a.weight_shape"])
    count, half = 32 // bits, 1 << (bits - 1)
    index = arrays.get("a.weight_g_idx", np.arange(inputs) // group)
    out = np.zeros((outputs, inputs), np.float32)
    for row in range(outputs):
        for column in range(inputs):
            value = field(arrays["a.weight_packed"], row, column // count, column % count, bits) - half
            zero = 0
            if "a.weight_zero_point" in arrays:
                zero = field(arrays["a.weight_zero_point"], row // count, int(index[column]), row % count, bits) - half
            out[row, column] = np.float32(value - zero) * np.float32(arrays["a.weight_scale"][row, int(index[column])])
    return out


# ------------------------------------------------------------------------------------------------- values


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


# ------------------------------------------------------------------------------------------------- refusals


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
            "'a.weight' is F8_E4M3 without scales; expected 'a.we",
        ),
        "scales of another shape": (
            block | {"a.weight_scale_inv": np.ones((3, 2), np.float32)},
            FP8,
            r"'a\.weight_scale_inv' has shape \(3, 2\); expected one of \[\(1, 1\), \(3, 3\), \(10, 1\)\]",
        ),
        "scales of whole numbers": (block | {"a.weight_scale_inv": np.ones((3, 3), np.int32)}, FP8, "has type I32"),
        "scales alone": (without(block, "a.weight") | halves, FP8, "'a.weight_scale_inv' .* belongs to quantised"),
        "no zeros": (without(group, "a.qzeros"), gptq(), r"'a\.qzeros' is missing; expected it beside the others"),
        "no group index": (without(group, "a.g_idx"), gptq(desc_act=True), r"'a\.g_idx' is missing"),
        "other bits": (group, gptq(8), r"'a\.qzeros' has shape \(4, 2\); expected \(2, 4\)"),
        "other groups": (awq, AWQ | {"group_size": 4}, r"'a\.qzeros' has shape \(3, 2\); expected \(6, 2\)"),
        "wrong scales": (awq | {"a.scales": np.ones((3, 8), np.float16)}, AWQ, r"expected \(3, 16\)"),
        "weights both ways": (awq | {"a.weight": np.ones((16, 24), np.float16)}, AWQ, "'a.weight' is there and quant"),
        "zeros alone": (without(awq, "a.qweight"), AWQ, r"'a\.qzeros' .* belongs to quantised weights"),
        "said to be plain": (awq, AWQ | {"modules_to_not_convert": ["a"]}, r"'a\.qweight' is quantised, and"),
        "another method": (awq, FP8, r"'a\.qweight' .* belongs to quantised weights; quantization_config says 'fp8'"),
        "no shape": (without(packed, "a.weight_shape"), packing, r"'a\.weight_shape' is missing"),
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
    with pytest.raises(WeightsError, match=r"names group 0 … 4; expected 0 … 3"):
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
        ({"quant_method": "dreams"}, "quantised by 'dreams' are not read"),
        ({"bits": 4}, "has 'quantization_config' without a quant_method; expected one of fp8"),
        ([], "expected a table"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is"),
        (FP8 | {"fmt": "int7"}, "fmt 'int7' is not read; expected one of e4m3, e5m2"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'; expected a list of names"),
        (gptq(3), "3 bits are not read; expected 2 or 4 or 8"),
        (gptq(group=0), "group_size is 0"),
        (gptq(checkpoint_format="marlin"), "format 'marlin' are not read"),
        (gptq(rotation="hadamard"), "has 'rotation': 'hadamard', which is not known for gptq"),
        (gptq(dynamic={"+:(": {}}), "dynamic has '\\(', which is no regular expression"),
        (gptq(dynamic=["a"]), "of gptq cannot be read"),
        (gptq(dynamic={"a": 3}), "of gptq cannot be read"),
        (gptq(meta="gptqmodel"), "of gptq cannot be read"),
        (compressed(strategy="group", group_size=[4]), "of compressed-tensors cannot be read"),
        (AWQ | {"version": "gemv"}, "version 'gemv' are not read; expected 'gemm'"),
        (AWQ | {"bits": 8}, "8 bits are not read; expected 4"),
        (compressed(form="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' are not read"),
        (compressed("float", 4), "type 'float' and 4 bits are not read"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (compressed() | {"transform_config": {"config_groups": {"u": 1}}}, "has 'transform_config'"),
        (compressed() | {"ignore": ["re:("]}, "no regular expression"),
        (compressed() | {"config_groups": None}, "config_groups is None"),
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


# ------------------------------------------------------------------------------------------------- directories

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "torch_dtype": "float32",
}


def plain_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A tiny Llama's tensors by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, 32),
        "lm_head.weight": (40, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
        rows = {"q": 32, "k": 16, "v": 16, "o": 32}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (rows[name], 32) for name in rows}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (32, 64)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_directory(root: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(TINY | config))
    header: dict[str, Any] = {}
    place = 0
    for name, value in tensors.items():
        kind, size = KINDS[value.dtype.name], value.nbytes
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return root


def quantise_projections(method: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Quantised tensors of the tiny Llama, what they stand for by the loops above, and the configuration."""
    rng = np.random.default_rng(7)
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, value in plain_tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            stored[name] = meant[name] = value
            continue
        outputs, inputs = value.shape
        if method == "fp8":
            arrays = fp8_arrays(rng, value.shape)
            arrays["a.weight_scale_inv"] /= 100
            meant[name] = blocks_by_loops(arrays)
        elif method == "awq":
            arrays = awq_arrays(rng, inputs, outputs)
            meant[name] = awq_by_loops(arrays)
        else:
            arrays = gptq_arrays(rng, 4, inputs, outputs, shuffled=True) | {"a.bias": np.zeros(outputs, np.float16)}
            meant[name] = gptq_by_loops(arrays, 4, 1)
        stored |= {f"{module}.{part.removeprefix('a.')}": array for part, array in arrays.items()}
    tables = {"fp8": FP8, "awq": AWQ | {"modules_to_not_convert": ["lm_head"]}, "gptq": gptq(desc_act=True)}
    return stored, meant, tables[method]


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_a_quantised_directory_loads_as_the_plain_one_it_stands_for(tmp_path: Path, method: str) -> None:
    stored, meant, table = quantise_projections(method)
    backbone = load(write_directory(tmp_path / "quantised", stored, quantization_config=table))
    plain = load(write_directory(tmp_path / "plain", meant))
    found, expected = (flatten_params(each.parameters) for each in (backbone, plain))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)
    assert backbone.fingerprint == plain.fingerprint
    assert backbone.fingerprint != load(write_directory(tmp_path / "other", plain_tensors())).fingerprint
    assert "quantization_config" not in backbone.config.to_dict()


def test_a_sharded_load_takes_its_regions(tmp_path: Path) -> None:
    stored, meant, table = quantise_projections("gptq")
    directory = write_directory(tmp_path / "quantised", stored, quantization_config=table)
    mesh = jax.make_mesh((1,), ("tensor",))
    found = flatten_params(load(directory, dtype="bfloat16", mesh=mesh).parameters)
    kernel = found["decoder", "layers", "attention", "query", "kernel"]
    assert np.array_equal(kernel[1], meant["model.layers.1.self_attn.q_proj.weight"].T.astype(ml_dtypes.bfloat16))


def test_older_releases_say_it_in_a_file_of_their_own(tmp_path: Path) -> None:
    stored, meant, _ = quantise_projections("awq")
    directory = write_directory(tmp_path, stored)
    with pytest.raises(WeightsError, match=r"belongs to quantised weights; config\.json has no quantization_config"):
        open_source(directory)
    older = {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}
    (directory / "quant_config.json").write_text(json.dumps(older))
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(open_source(directory).read(name), meant[name])


def test_a_refused_release_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    for config in (
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(TINY | config))
        with pytest.raises(ConfigError, match="quantised by 'mxfp4'"):
            load(tmp_path)


def test_a_scale_of_nan_is_told(tmp_path: Path) -> None:
    stored, _, table = quantise_projections("fp8")
    stored["model.layers.1.mlp.up_proj.weight_scale_inv"][2, 1] = np.nan
    with pytest.raises(WeightsError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds nan at \[8, 3\]"):
        load(write_directory(tmp_path, stored, quantization_config=table))
