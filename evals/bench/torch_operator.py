"""The operator R · (x + u v) under torch.compile on a GPU, beside a copy; in a process of its own."""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from .benchmark import Benchmark, Sides, timed
from .kernels import LEAST_TOKENS, QUEUED, KernelCase, cases, expected, units

SETS = 4
"""Sets of inputs that are run in turns, so that none is in a cache of the device."""


def torch_timings(tiny: bool) -> Iterator[Benchmark]:
    """Yields `kernels.rotate_patch` at the cases of `kernels.timings`."""
    for case in cases(tiny, LEAST_TOKENS):
        yield Benchmark("kernels.rotate_patch", case.name, functools.partial(_compiled, case))


def operator(library: Any, x: Any, cos: Any, sin: Any, u: Any, v: Any, layout: str) -> Any:
    """Computes R · (x + u v) in torch: the product in bfloat16, sum and rotation in float32."""
    value = x.float()
    if u is not None:
        value = value + library.bmm(u, v).reshape(x.shape).float()
    if cos is not None:
        cos, sin = cos[:, None], sin[:, None]
        half = cos.shape[-1]
        if layout == "half":
            first, second = value[..., :half], value[..., half : 2 * half]
        else:
            first, second = value[..., 0 : 2 * half : 2], value[..., 1 : 2 * half : 2]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        head = library.cat(rotated, -1) if layout == "half" else library.stack(rotated, -1).flatten(-2)
        value = library.cat([head, value[..., 2 * half :]], -1) if value.shape[-1] > 2 * half else head
    return value.to(x.dtype)


def _compiled(case: KernelCase) -> Sides:
    """Prepares one case; without torch or a GPU that it can use, a note says so."""
    if importlib.util.find_spec("torch") is None:
        return Sides({}, notes={"torch.compile": "torch is not installed"})
    import torch as library  # pyright: ignore[reportMissingImports]

    if not library.cuda.is_available():
        return Sides({}, notes={"torch.compile": "torch finds no GPU"})
    library.set_grad_enabled(False)
    layers, columns = case.sizes[0], case.shape.heads * case.shape.width

    def normal(*sizes: int) -> Any:
        return library.randn(*sizes, device="cuda", dtype=library.bfloat16)

    sets = []
    angle = library.rand(case.tokens, case.shape.rotary // 2, device="cuda") * 6.28
    tables = (angle.cos(), angle.sin()) if case.shape.rotary else (None, None)
    for _ in range(SETS):
        factors = (normal(layers, case.tokens, case.rank), normal(layers, case.rank, columns))
        sets.append((normal(*case.sizes), *tables, *(factors if case.rank else (None, None))))

    # Programs of all cases come from one function, and only a few of one function are kept.
    library.compiler.reset()
    program = library.compile(functools.partial(operator, library, layout=case.shape.layout), dynamic=False)

    def check() -> dict[str, float]:
        names = ("x", "cos", "sin", "u", "v")
        arrays = {name: value for name, value in zip(names, sets[0], strict=True) if value is not None}
        arrays = {name: value.float().cpu().numpy() for name, value in arrays.items()}
        found = program(*sets[0]).float().cpu().numpy()[[0]]
        # Its product is rounded to bfloat16 before the sum, and that of factors is larger than x.
        tolerance = 1.0 + np.sqrt(max(1, case.rank))
        return {"torch.compile": units(found, expected(arrays, [0], case.shape.layout)) / tolerance}

    def wait(_: Any) -> None:
        library.cuda.synchronize()

    sides = {"torch.compile": lambda: [program(*one_set) for one_set in sets],
             "clone": lambda: [one_set[0].clone() for one_set in sets]}  # fmt: skip
    calls = {name: timed(run, runs=QUEUED, calls=SETS, wait=wait) for name, run in sides.items()}
    return Sides(calls, check)
