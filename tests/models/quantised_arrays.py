"""Quantised arrays as the packers lay them out, and what they mean by loops over single values."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoints import TensorInfo
from models.checkpoints.conversion.quantised import DequantisedSource, read_quantisation

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
