"""Times block sizes on the present device and writes them as a configuration: `python -m pallas_kernels.tune --help`.

`pallas_kernels.configured_by(FILE)` uses what was written; a file in `pallas_kernels/configurations/` is used wherever
its kind of device is. Every candidate's result is held against the XLA path's. A whole run says "timed", and only then
are the kernels taken unasked on that kind of device. On a GPU there are no blocks to choose: it says how the kernel
compares. On a CPU there is no kernel: the XLA path's seconds are written, and that nothing was tuned.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import rotate_patch, splice
from ._configurations import TIMED, shape_word
from .errors import KernelError, KernelUnavailableError
from .rotate_patch import shapes
from .rotate_patch import tpu as rotate_patch_tpu
from .splice import tpu as splice_tpu

OPERATIONS = ("rotate_patch", "splice")
CANDIDATES = (64, 128, 256, 512, 1024)
TUNED_RANKS = (0, 16, 32, 64)
PAGE_SIZE = 64
UNTIMED = "heuristic, not timed"


def heuristic_configuration(kind: str, operations: Iterable[str] = OPERATIONS) -> dict[str, Any]:
    """The heuristic's own blocks for the production shapes, for a kind of TPU that is not at hand."""
    blocks = {
        _word(shape, rank): {"tokens": rotate_patch_tpu.tile_of(1 << 20, shape.heads, shape.width, rank, 2).tokens}
        for shape, rank in _cases(shapes.PRODUCTION, TUNED_RANKS)
    }
    return {"device": kind, "source": UNTIMED, "operations": {name: dict(blocks) for name in operations}}


def tune(operations: Sequence[str], quick: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Times every candidate at the production shapes (with `quick`: two small ones), the best block of each shape.

    Args:
      operations: of `OPERATIONS`.
      quick: few tokens and repeats, to see that it runs; its choices say little.
      say: takes a line of progress.
    """
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    cases = _cases(shapes.SMALL[:2] if quick else shapes.PRODUCTION, TUNED_RANKS[:2] if quick else TUNED_RANKS)
    body: dict[str, Any] = {"device": kind, "jax": jax.__version__, "operations": {}, "seconds": {}}
    if platform == "cpu":
        body["source"] = "nothing tuned: the platform 'cpu' has no kernel of ours; seconds are of the xla path"
    else:
        body["source"] = f"{TIMED}, quick" if quick or tuple(operations) != OPERATIONS else TIMED
    for operation in operations:
        best, seconds = body["operations"].setdefault(operation, {}), body["seconds"].setdefault(operation, {})
        for shape, rank in cases:
            word = _word(shape, rank)
            timed = _candidates(operation, shape, rank, platform, 3 if quick else 20)
            say(f"{operation} {word}: " + ", ".join(f"{name} {value * 1e6:.0f} µs" for name, value in timed.items()))
            seconds[word] = timed
            tokens = {name: value for name, value in timed.items() if name.isdecimal()}
            if tokens:
                best[word] = {"tokens": int(min(tokens, key=lambda name: tokens[name]))}
    return body


def _cases(chosen: Sequence[shapes.Shape], ranks: Sequence[int]) -> list[tuple[shapes.Shape, int]]:
    return [(shape, rank) for shape in chosen for rank in ranks if shape.rotary or rank]


def _word(shape: shapes.Shape, rank: int) -> str:
    return shape_word(shape.heads, shape.width, rank, 2)


def _candidates(operation: str, shape: shapes.Shape, rank: int, platform: str, repeats: int) -> dict[str, float]:
    """Median seconds by candidate: a number of tokens on a TPU, "gpu" on a GPU, and "xla" everywhere."""
    given = _draw(shape, rank)
    pages = 2 * (-(-shape.tokens // PAGE_SIZE))
    pool = jnp.ones((*shape.leading, pages, PAGE_SIZE, shape.heads, shape.width), jnp.bfloat16)
    expected, result = None, {}
    for name, call in _calls(operation, shape, rank, platform, given, pool):
        what = f"{operation} {shape.name} rank {rank} {name}"
        try:
            found = call()
        except (KernelUnavailableError, jax.errors.JaxRuntimeError) as error:  # or a block beyond the fast memory
            print(f"{what}: {str(error).splitlines()[0][:120]}")
            continue
        if expected is None:  # the XLA path comes first
            expected = jnp.copy(found)
        _check(found, expected, what)
        result[name] = _seconds(call, repeats)
    return result


def _calls(
    operation: str, shape: shapes.Shape, rank: int, platform: str, given: dict[str, Any], pool: jax.Array
) -> Iterator[tuple[str, Callable[[], jax.Array]]]:
    """What is timed, by name, each giving the same numbers; one at a time, for each may have a pool of its own."""
    slots = jnp.arange(shape.tokens, dtype=jnp.int32)
    x = given["x"]
    cos, sin, u, v = (given.get(name) for name in ("cos", "sin", "u", "v"))

    def public(name: str) -> Callable[[], jax.Array]:
        plan: dict[str, Any] = {"layout": shape.layout, "implementation": name}
        if operation == "rotate_patch":
            return jax.jit(lambda: rotate_patch(**given, **plan))
        return _Donating(lambda own: splice(own, slots, **given, **plan), pool)

    def blocked(tokens: int) -> Callable[[], jax.Array]:
        plan: dict[str, Any] = {"layout": shape.layout, "tile": rotate_patch_tpu.Tile(tokens)}
        if operation == "rotate_patch":
            return jax.jit(lambda: rotate_patch_tpu.kernel(x, cos, sin, u, v, None, None, **plan))
        write = lambda own: splice_tpu.kernel(own, slots, x, cos, sin, u, v, None, None, **plan)
        return _Donating(jax.jit(write, donate_argnums=0), pool)

    yield "xla", public("xla")
    if platform == "gpu":
        yield "gpu", public("gpu")
    reason = splice_tpu.unsupported(pool, x, cos, u, v, None, False) if operation == "splice" else None
    for tokens in CANDIDATES if platform == "tpu" and reason is None else ():
        yield str(tokens), blocked(tokens)


def _check(found: jax.Array, expected: jax.Array, what: str) -> None:
    """Raises KernelError where a result is not the XLA path's, up to the last place of the largest bfloat16."""
    wide = [value.astype(jnp.float32) for value in (found, expected)]
    error = float(jnp.abs(wide[0] - wide[1]).max() / jnp.abs(wide[1]).max())
    if not error <= 2**-7:
        raise KernelError(f"{what}: off by {error:.3g} of the largest value; expected the XLA path's result")


class _Donating:
    """A call that gives its pool away and keeps what comes back."""

    def __init__(self, function: Callable[[jax.Array], jax.Array], pool: jax.Array):
        self.function, self.pool = function, jnp.copy(pool)

    def __call__(self) -> jax.Array:
        self.pool = self.function(self.pool)
        return self.pool


def _draw(shape: shapes.Shape, rank: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *sizes: jax.random.normal(key, sizes, jnp.bfloat16)
    given = {"x": normal(keys[0], *shape.leading, shape.tokens, shape.heads, shape.width)}
    if shape.rotary:
        angle = jax.random.normal(keys[1], (shape.tokens, shape.rotary // 2))
        given |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if rank:
        given["u"] = normal(keys[2], *shape.leading, shape.tokens, rank)
        given["v"] = normal(keys[3], *shape.leading, rank, shape.heads * shape.width)
    return given


def _seconds(call: Callable[[], jax.Array], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a configuration; `arguments` are the command line's."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description="Times block sizes of kernels.")
    parser.add_argument("--out", required=True, type=Path, help="the JSON file to write")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="only this operation; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats, to see that it runs")
    parser.add_argument(
        "--heuristic", metavar="KIND", help="write the heuristic's blocks for this kind, timing nothing"
    )
    flags = parser.parse_args(arguments)
    operations = tuple(flags.op or OPERATIONS)
    body = heuristic_configuration(flags.heuristic, operations) if flags.heuristic else tune(operations, flags.quick)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    print(f"{flags.out}: {body['source']}")


if __name__ == "__main__":
    main()
