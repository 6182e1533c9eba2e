"""The operator under torch.compile on an accelerator, as a measure for ours; skipped where torch is missing."""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from .accelerator_tasks import KernelCase, Row, Task, cases, spread
from .accelerator_timings import LEAST_TOKENS, REPEATS

SETS = 4
"""Sets of inputs that a timed loop cycles through, so that none is in a cache of the device."""


def torch_environment() -> Row:
    """Describes the device as torch sees it, in place of `results.environment`."""
    if importlib.util.find_spec("torch") is None:
        return {"device": "none", "jax": "none; torch is not installed"}
    import torch as library  # pyright: ignore[reportMissingImports]

    device = library.cuda.get_device_name() if library.cuda.is_available() else "no GPU"
    return {"device": device, "jax": f"none; torch {library.__version__}"}


def compiled(tiny: bool, which: str) -> Iterator[Task]:
    """Yields microseconds of R · (x + u v) under torch.compile, at the cases of the bandwidth part."""
    del which
    for case in cases(tiny, LEAST_TOKENS):
        yield Task(case.name, functools.partial(_compiled, case, 3 if tiny else REPEATS))


NOTES = [
    "torch.compile of the operator, dynamic=False, default mode; bfloat16 in and out, the product in bfloat16 with "
    "float32 accumulation, the rotation in float32. In turns through as many sets of inputs; by the device's events.",
]


def operator(library: Any, x: Any, cos: Any, sin: Any, u: Any, v: Any, layout: str) -> Any:
    """Computes R · (x + u v) in torch."""
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


def _compiled(case: KernelCase, repeats: int) -> Row:
    """Times one case; skipped without torch or a GPU that it can use."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "torch is not installed"}
    import torch as library  # pyright: ignore[reportMissingImports]

    if not library.cuda.is_available():
        return {"skipped": "torch finds no GPU"}
    library.set_grad_enabled(False)

    def normal(*sizes: int) -> Any:
        return library.randn(*sizes, device="cuda", dtype=library.bfloat16)

    layers = case.sizes[0]
    angle = library.rand(case.tokens, case.shape.rotary // 2, device="cuda") * 6.28
    tables = (angle.cos(), angle.sin()) if case.shape.rotary else (None, None)
    sets = []

    for _ in range(SETS):
        u = normal(layers, case.tokens, case.rank) if case.rank else None
        v = normal(layers, case.rank, case.shape.heads * case.shape.width) if case.rank else None
        sets.append((normal(*case.sizes), *tables, u, v))

    # Programs of all cases come from one function here, and only a few of one function are kept.
    library.compiler.reset()
    program = library.compile(
        lambda x, cos, sin, u, v: operator(library, x, cos, sin, u, v, case.shape.layout), dynamic=False
    )

    begin = time.perf_counter()
    seconds = _seconds(library, program, sets, repeats)
    clone = _seconds(library, lambda x, *rest: x.clone(), sets, repeats)
    moved = 2 * sets[0][0].numel() * 2
    return {
        "operation": "rotate_patch",
        "case": case.name,
        **spread(seconds),
        "clone of x GB/s": moved / statistics.median(clone) / 1e9,
        "seconds in all": time.perf_counter() - begin,
    }


def _seconds(library: Any, function: Callable[..., Any], sets: list[tuple], repeats: int) -> list[float]:
    """Returns seconds of a call, the mean over the sets, in each of many rounds after three that are not counted."""
    seconds = []
    for _ in range(repeats + 3):
        begin, end = (library.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for inputs in sets:
            function(*inputs)
        end.record()
        library.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(sets))  # elapsed_time is in milliseconds

    return seconds[3:]
