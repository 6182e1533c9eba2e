"""The operator R · (x + u v) under torch.compile, on the GPU that jax uses and over the same arrays."""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def operator(torch: Any, layout: str, x: Any, cos: Any = None, sin: Any = None, u: Any = None, v: Any = None) -> Any:
    """Computes R · (x + u v) in torch: the product in bfloat16, sum and rotation in float32."""
    value = x.float()
    if u is not None:
        value = value + torch.bmm(u, v).reshape(x.shape).float()
    if cos is not None:
        cos, sin = cos[:, None], sin[:, None]
        half = cos.shape[-1]
        first = slice(0, half) if layout == "half" else slice(0, 2 * half, 2)
        second = slice(half, 2 * half) if layout == "half" else slice(1, 2 * half, 2)
        rotated = value[..., first] * cos - value[..., second] * sin, value[..., second] * cos + value[..., first] * sin
        head = torch.cat(rotated, -1) if layout == "half" else torch.stack(rotated, -1).flatten(-2)
        value = torch.cat([head, value[..., 2 * half :]], -1)
    return value.to(x.dtype)


def find_torch() -> Any:
    """Imports torch. Raises ImportError where it is not installed, or finds no GPU."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError("torch is not installed")
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        raise ImportError("torch finds no GPU")
    return torch


def compiled_operator(torch: Any, sets: Sequence[Mapping[str, Any]], layout: str) -> Callable[[], list[Any]]:
    """Compiles the operator for chunks that jax holds on a GPU; the call returns the result of each."""
    torch.set_grad_enabled(False)
    # Programs of all cases come from one function, and only a few of one function are kept.
    torch.compiler.reset()
    program = torch.compile(functools.partial(operator, torch, layout), dynamic=False)
    tensors = [{name: torch.from_dlpack(value) for name, value in chunk.items()} for chunk in sets]
    return lambda: [program(**chunk) for chunk in tensors]
