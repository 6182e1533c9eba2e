"""Times kernels against the XLA path on this device and writes which wins: `python -m pallas_kernels.tune --help`.

`pallas_kernels.configured_by(FILE)` uses what was written; a table in `pallas_kernels/kernel_wins.json` is used
wherever its kind of device is. Every candidate's result is held against the XLA path's. A whole run says "timed", and
only then is a kernel taken unasked on that kind of device, for the shapes that it won. On a GPU there are no blocks to
choose. On a CPU there is no kernel: the XLA path's seconds are written, and that nothing was timed against them.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from . import rotate_patch, splice
from ._kernel_wins import TIMED, shape_word
from ._operands import Operands
from ._timing import OverSets, ThroughPool, median_seconds
from .errors import KernelError, KernelUnavailableError
from .rotate_patch import shapes
from .rotate_patch import tpu as rotate_patch_tpu
from .rotate_patch.shapes import RotateShape
from .splice import shapes as spliced
from .splice import tpu as splice_tpu
from .tpu.prepare import Tile

OPERATIONS = ("rotate_patch", "splice")
CANDIDATES = (64, 128, 256, 512, 1024)
"""Tokens of a block that are tried on a TPU."""
TUNED_RANKS = (0, 16, 32, 64)
PAGE_SIZE = 64
SETS = 24
"""Calls in one timed program, each on inputs of its own: none is found in a cache or left out as a repetition."""
MEMORY = 4 << 30
"""Bytes that inputs and results of one timed program may take together; larger shapes get fewer sets."""

Given = dict[str, Any]


class TuningCandidate(NamedTuple):
    """One way of doing an operation: `call(given)`, or for `splice` `call(pool, given)`; what else it writes down."""

    name: str
    implementation: str
    tokens: int | None
    call: Callable[..., Array]


def tune(operations: Sequence[str], quick: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Times every candidate at the production shapes (with `quick`: two small ones) and says which won each.

    Args:
      operations: of `OPERATIONS`.
      quick: few tokens and repeats, to see that it runs; its choices say little.
      say: takes a line of progress.
    """
    platform, kind = jax.default_backend(), jax.devices()[0].device_kind
    body: dict[str, Any] = {"device": kind, "jax": jax.__version__, "operations": {}}
    if platform == "cpu":
        body["source"] = "nothing tuned: the platform 'cpu' has no kernel of ours; seconds are of the xla path"
    else:
        body["source"] = f"{TIMED}, quick" if quick or tuple(operations) != OPERATIONS else TIMED

    for operation, shape, rank in cases(operations, quick):
        row = tune_case(operation, shape, rank, platform, 3 if quick else 20)
        timed = ", ".join(f"{name} {value * 1e6:.1f} µs" for name, value in row["seconds"].items())
        word = shape_word(shape.heads, shape.width, rank, 2)
        say(f"{operation} {word}: {timed}; {row['winner']} wins")
        body["operations"].setdefault(operation, {})[word] = row

    return body


def cases(operations: Sequence[str], quick: bool) -> list[tuple[str, RotateShape, int]]:
    """Returns what a run times: each operation, shape and rank."""
    result = []
    for operation in operations:
        production = shapes.PRODUCTION if operation == "rotate_patch" else [each.chunk for each in spliced.PRODUCTION]
        for shape in shapes.SMALL[:2] if quick else production:
            ranks = TUNED_RANKS[:2] if quick else TUNED_RANKS
            result += [(operation, shape, rank) for rank in ranks if shape.rotary or rank]
    return result


def tune_case(operation: str, shape: RotateShape, rank: int, platform: str, repeats: int) -> dict[str, Any]:
    """Times every candidate of one shape: {"winner", "over_xla", "tokens" of the kernel's best block, "seconds"}.

    `seconds` are medians by candidate: a number of tokens on a TPU, "gpu" on a GPU, and "xla" everywhere; `over_xla` is
    the XLA path's seconds over the best kernel's.

    Raises:
      KernelError: a candidate's result is not the XLA path's.
    """
    sets = draw_sets(shape, rank)
    expected, seconds, kernels = None, {}, []
    for candidate in candidates(operation, shape, rank, platform):
        what = f"{operation} {shape.name} rank {rank} {candidate.name}"
        try:
            # The first set alone, for the comparison.
            found = _program(operation, candidate, shape, sets[:1])()
            found = found[0] if operation == "rotate_patch" else found
            expected = found if expected is None else expected  # the XLA path comes first
            _check(found, expected, what)
            seconds[candidate.name] = median_seconds(_program(operation, candidate, shape, sets), len(sets), repeats)
        except (KernelUnavailableError, jax.errors.JaxRuntimeError) as error:  # or a block beyond the fast memory
            print(f"{what}: {str(error).splitlines()[0][:120]}")
            continue

        if candidate.name != "xla":
            kernels.append(candidate)

    best = min(kernels, key=lambda candidate: seconds[candidate.name], default=None)
    if best is None:
        return {"winner": "xla", "seconds": seconds}

    ratio = seconds["xla"] / seconds[best.name]
    row = {"winner": best.implementation if ratio > 1 else "xla", "over_xla": ratio, "seconds": seconds}
    return row if best.tokens is None else row | {"tokens": best.tokens}


def candidates(operation: str, shape: RotateShape, rank: int, platform: str) -> Iterator[TuningCandidate]:
    """Yields what is timed, the XLA path first; all give the same numbers."""

    def public(name: str) -> Callable[..., Array]:
        plan: dict[str, Any] = {"layout": shape.layout, "implementation": name}
        if operation == "rotate_patch":
            return lambda given: rotate_patch(**given, **plan)
        return lambda pool, given: splice(pool, **given, **plan)

    def blocked(tokens: int) -> Callable[..., Array]:
        plan: dict[str, Any] = {"layout": shape.layout, "tile": Tile(tokens)}
        if operation == "rotate_patch":
            return lambda given: rotate_patch_tpu.kernel(Operands(**given), None, **plan)
        return lambda pool, given: splice_tpu.kernel(pool, given["slots"], _operands(given), None, **plan)

    yield TuningCandidate("xla", "xla", None, public("xla"))
    if platform == "gpu":
        yield TuningCandidate("gpu", "gpu", None, public("gpu"))
    if platform != "tpu":
        return

    # Asked by shapes alone, before anything of this size is drawn.
    if operation == "splice":
        given, pool = jax.eval_shape(lambda: (_draw(shape, rank, 0, 1), make_pool(shape, 1)))
        if splice_tpu.unsupported(pool, _operands(given), False, shape.layout) is not None:
            return
    for tokens in CANDIDATES:
        yield TuningCandidate(str(tokens), "tpu", tokens, blocked(tokens))


def _operands(given: Given) -> Operands:
    """Returns the operands of a set, which has slots beside them."""
    return Operands(**_without_slots(given))


def draw_sets(shape: RotateShape, rank: int) -> list[Given]:
    """Draws as many sets of inputs as fit the memory, two to `SETS`, each with slots of its own in a common pool."""
    size = 2 * jnp.dtype(jnp.bfloat16).itemsize * shape.tokens * shape.heads * shape.width
    for leading in shape.leading:
        size *= leading
    count = min(SETS, max(2, MEMORY // size))
    return [_draw(shape, rank, index, count) for index in range(count)]


def _draw(shape: RotateShape, rank: int, index: int, count: int) -> Given:
    keys = jax.random.split(jax.random.key(index), 4)

    def normal(key, *sizes):
        return jax.random.normal(key, sizes, jnp.bfloat16)

    given: Given = {"x": normal(keys[0], *shape.leading, shape.tokens, shape.heads, shape.width)}
    if shape.rotary:
        angle = jax.random.normal(keys[1], (shape.tokens, shape.rotary // 2))
        given |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}

    if rank:
        given["u"] = normal(keys[2], *shape.leading, shape.tokens, rank)
        given["v"] = normal(keys[3], *shape.leading, rank, shape.heads * shape.width)

    # Every set has places of its own, from the middle of a page on.
    given["slots"] = jnp.arange(shape.tokens, dtype=jnp.int32) + index * shape.tokens + PAGE_SIZE // 2
    return given


def make_pool(shape: RotateShape, count: int) -> Array:
    """Makes a pool that holds this many chunks and half a page in front, [*leading, P, O, K, H]."""
    pages = -(-(count * shape.tokens + PAGE_SIZE // 2) // PAGE_SIZE)
    return jnp.ones((*shape.leading, pages, PAGE_SIZE, shape.heads, shape.width), jnp.bfloat16)


def _without_slots(given: Given) -> Given:
    return {name: value for name, value in given.items() if name != "slots"}


def _program(
    operation: str, candidate: TuningCandidate, shape: RotateShape, sets: Sequence[Given]
) -> Callable[[], Any]:
    if operation == "rotate_patch":
        return OverSets(candidate.call, [_without_slots(given) for given in sets])
    return ThroughPool(candidate.call, lambda: make_pool(shape, len(sets)), sets)


def _check(found: Array, expected: Array, what: str) -> None:
    """Raises KernelError where a result is not the XLA path's, up to the last place of the largest bfloat16."""
    wide = [value.astype(jnp.float32) for value in (found, expected)]
    error = float(jnp.abs(wide[0] - wide[1]).max() / jnp.abs(wide[1]).max())
    if not error <= 2**-7:
        raise KernelError(
            f"{what}: got a result off by {error:.3g} of the largest value; expected the XLA path's result"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a table of what won; `arguments` are the command line's."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description="Times kernels; says which win.")
    parser.add_argument("--out", required=True, type=Path, help="the JSON file to write")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="only this operation; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small shapes and few repeats, to see that it runs")
    flags = parser.parse_args(arguments)
    body = tune(tuple(flags.op or OPERATIONS), flags.quick)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    print(f"{flags.out}: {body['source']}")


if __name__ == "__main__":
    main()
