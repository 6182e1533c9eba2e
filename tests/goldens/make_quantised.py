"""Make `quantised.npz`: small matrices packed and unpacked by the libraries that releases are made with.

    python tests/goldens/make_quantised.py AUTOAWQ AUTOGPTQ COMPRESSED_TENSORS

The arguments are checkouts of AutoAWQ, AutoGPTQ and compressed-tensors, of which single files are loaded: neither their
kernels nor a GPU is needed. FP8 is transformers' own. Needs torch, transformers 5.23, pydantic and loguru.

Arrays are called `<case>.<tensor>`; `<case>.weight_meant` is the matrix [out, in] as the library itself reads it back.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

INPUTS, OUTPUTS, GROUP = 96, 64, 32


def load(path: Path, name: str) -> Any:
    """A single file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stub(name: str, **entries: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    for key, value in entries.items():
        setattr(sys.modules[name], key, value)


def linear(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    layer.weight.data = (layer.weight.data * 3).half()
    return layer


def groups(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [out, groups] of the plain asymmetric rule."""
    parts = weight.float().reshape(OUTPUTS, -1, GROUP)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = torch.round(-low / scales.float()).clamp(1, 2**bits - 1)
    return scales, zeros


def awq(root: Path) -> dict[str, torch.Tensor]:
    for name in ("awq", "awq.utils", "awq.modules"):
        stub(name)
    stub("awq.utils.module", try_import=lambda name: (None, ""))
    stub("awq.utils.utils", get_best_device=lambda: "cpu")
    packing = load(root / "awq/utils/packing_utils.py", "awq.utils.packing_utils")
    gemm = load(root / "awq/modules/linear/gemm.py", "awq.modules.linear.gemm")
    layer = linear(0)
    scales, zeros = groups(layer.weight.data, 4)
    packed = gemm.WQLinear_GEMM.from_linear(
        layer, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    meant = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP)
    return {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "weight_meant": meant.t()}


def gptq(root: Path, bits: int) -> dict[str, torch.Tensor]:
    module = load(root / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py", "qlinear_cuda_old")
    layer = linear(bits)
    scales, zeros = groups(layer.weight.data, bits)
    packed = module.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, bias=False)
    packed.pack(layer, scales, zeros, None)
    packed.autogptq_cuda_available = False
    packed.scales = packed.scales.float()
    meant = packed(torch.eye(INPUTS)).t()
    named = {name: getattr(packed, name) for name in ("qweight", "qzeros", "g_idx")}
    return named | {"scales": scales.t().contiguous(), "weight_meant": meant}


def compressed(root: Path, symmetric: bool) -> dict[str, torch.Tensor]:
    sys.path.insert(0, str(root / "src"))
    stub("compressed_tensors.version", __version__="checkout")  # its build writes it
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

    arguments = QuantizationArgs(num_bits=4, symmetric=symmetric, group_size=GROUP, strategy=QuantizationStrategy.GROUP)
    weight = linear(9).weight.data.float()
    scales, zeros = groups(weight, 4)
    zeros = (torch.zeros_like(zeros) if symmetric else zeros - 8).to(torch.int8)
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress_weight(weight, scales.float(), arguments, zero_point=zeros)
    packed["weight_scale"] = scales.float()
    meant = compressor.decompress_weight({**packed, "weight_scale": scales.float()}, arguments)
    return packed | {"weight_meant": meant}


def fp8() -> dict[str, torch.Tensor]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(3)
    weight = (torch.randn(96, 64) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.01
    meant = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    return {"weight_bytes": weight.view(torch.uint8), "weight_scale_inv": scales, "weight_meant": meant}


def main() -> None:
    autoawq, autogptq, compressed_tensors = map(Path, sys.argv[1:4])
    cases = {
        "awq": awq(autoawq),
        "gptq4": gptq(autogptq, 4),
        "gptq8": gptq(autogptq, 8),
        "packed": compressed(compressed_tensors, True),
        "packed_zeros": compressed(compressed_tensors, False),
        "fp8": fp8(),
    }
    arrays = {
        f"{case}.{name}": value.detach().numpy() for case, found in cases.items() for name, value in found.items()
    }
    np.savez_compressed(Path(__file__).with_name("quantised.npz"), **arrays)
    for name, value in arrays.items():
        print(name, value.shape, value.dtype)


if __name__ == "__main__":
    main()
