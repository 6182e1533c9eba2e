"""Rooflines on paper: `python -m evals.bench.roofline`, with jax's CUDA plugin and libtpu installed; no device.

For every operation: bytes that must move, FLOPs, the least time on every device, and how many times those bytes XLA's
own program moves, compiled ahead of time. Every instruction reads its operands and writes its results, except what only
renames them and what lies in a TPU's fast memory; a loop counts by its trips, an update in place by what it writes, a
slice by what it cuts out. XLA's `cost_analysis` has no number for GPUs, and counts fast memory on TPUs.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import block_product, rotate_patch, splice
from pallas_kernels.shapes import PRODUCTION, arguments_of

from .ahead_of_time import compile_for
from .kernels import EXPERTS, KernelCase

DEVICES = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
DEVICES |= {"v5e": (819e9, 197e12), "v5p": (2.765e12, 459e12), "v6e": (1.638e12, 918e12)}
"""Bytes and dense bfloat16 FLOPs per second, as NVIDIA and Google state them."""
COMPILED = {"H200": "NVIDIA H200", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Whose programs are read; an H100 gets an H200's."""
POOL, PAGE_SIZE = 16384, 64
"""Slots of the pool that is written to."""
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota", "partition-id")
IN_PLACE, CUTS = {"dynamic-update-slice": 1, "scatter": 2}, ("dynamic-slice", "slice", "gather")
"""Which operand is written, of instructions that write into another; instructions that read a part."""
SIZES = {"pred": 1, "u4": 0.5, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^{}]*\})?")
HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*-> .*\{$")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")


class Instruction(NamedTuple):
    """A line of a program; `called` are the computations that it runs."""

    name: str
    result: str
    opcode: str
    operands: list[str]
    called: list[str]
    rest: str


def size_of(text: str, fast: bool = False) -> float:
    """Counts the bytes of a shape, or of all of a tuple; in fast memory only if asked to."""
    arrays = [(SIZES.get(kind, 0), sizes) for kind, sizes, at in ARRAY.findall(text) if fast or "S(1)" not in at]
    return float(sum(width * math.prod(map(int, filter(None, sizes.split(",")))) for width, sizes in arrays))


class Program:
    """Instructions of a compiled program by computation, and the shapes of what they return."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.shapes: dict[str, str] = {}
        for line in text.splitlines():
            if head := HEAD.match(line):
                lines = self.computations[head[2]] = []
                self.entry = head[2]  # the last one
            elif match := LINE.match(line):
                name, result, opcode, rest = match.groups()
                operands = re.findall(r"%([\w.-]+)", rest.split("), ", 1)[0])
                called = re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", rest)
                lines.append(Instruction(name, result, opcode, operands, called, rest))
                self.shapes[name] = result

    def moved(self, computation: str) -> float:
        """Counts the bytes that a computation moves."""
        total = 0.0
        for line in self.computations[computation]:
            if line.opcode in ("while", "call", "conditional"):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line.rest)
                total += (int(trips[1]) if trips else 1) * sum(map(self.moved, line.called))
            elif line.opcode not in FREE and not line.opcode.endswith("-done"):
                total += self.moved_by(line)
        return total

    def moved_by(self, line: Instruction) -> float:
        """Counts the bytes of one instruction, of a fusion by what is inside."""
        parts, result = [size_of(self.shapes[operand]) for operand in line.operands], size_of(line.result)
        if line.opcode.endswith("-start"):
            # Its operands are among its results; a slice reads no more than it gives.
            result -= sum(parts)
            if line.opcode == "slice-start":
                given = size_of(line.result, fast=True) - size_of(self.shapes[line.operands[0]], fast=True)
                parts = [min(parts[0], given)]
        inside = self.inside(line)
        for each in inside or [line]:
            if each.opcode in IN_PLACE:
                # What lies there is not read, and only what is new is written.
                size = size_of(each.result)
                result += size_of(self.shapes[each.operands[IN_PLACE[each.opcode]]]) - size
                parts = [0.0 if part == size else part for part in parts]
        for each in inside:
            number = int(each.rest.split(")")[0]) if each.opcode == "parameter" else len(parts)
            readers = readers_of(each.name, inside)
            if number < len(parts) and readers and all(reader.opcode in CUTS for reader in readers):
                parts[number] = min(parts[number], sum(size_of(reader.result) for reader in readers))
        return max(result, 0.0) + sum(parts)

    def inside(self, line: Instruction) -> list[Instruction]:
        """Lists what is inside a fusion, and the updates inside fusions there."""
        own = [each for name in line.called for each in self.computations[name]] if "fusion" in line.opcode else []
        return own + [deeper for each in own for deeper in self.inside(each) if deeper.opcode in IN_PLACE]


def readers_of(name: str, inside: list[Instruction]) -> list[Instruction]:
    """Finds what reads a value, behind what only renames it."""
    readers = []
    for each in inside:
        if name in each.operands:
            readers += readers_of(each.name, inside) if each.opcode in ("bitcast", "reshape") else [each]
    return readers


def operations() -> Iterator[tuple[str, float, float, Callable[..., Any], Any]]:
    """Yields what is done: its name, bytes, FLOPs, and the function of its arguments, a pool first."""
    for shape, rank in [(shape, rank) for shape in PRODUCTION for rank in (0, 32) if rank or shape.rotary]:
        chunk, plan = shape._replace(rank=rank), {"layout": shape.layout, "implementation": "xla"}
        flops = math.prod(shape.x) * (2 * rank + 3 * bool(shape.rotary) + 2 * bool(shape.group))
        pool = jax.ShapeDtypeStruct(shape.pool(POOL // PAGE_SIZE, PAGE_SIZE), jnp.bfloat16)
        slots, given = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32), arguments_of(chunk)
        rotate, write = functools.partial(_rotate, plan), functools.partial(_write, plan)
        yield f"rotate_patch {shape.name}, {rank}", KernelCase("rotate_patch", chunk).moved, flops, rotate, (given,)
        yield f"splice, {rank}", KernelCase("splice", chunk, PAGE_SIZE).moved, flops, write, (pool, slots, given)
    (experts, depth, width, blocks), rows = EXPERTS, EXPERTS[3] * 64
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((rows, depth), (experts, depth, width))]
    numbers = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((blocks,), ())]
    least, product = 2 * (rows * (depth + width) + experts * depth * width), 2 * rows * depth * width
    yield "block_product", least, product, functools.partial(block_product, implementation="xla"), (*arrays, *numbers)


def _rotate(plan, given):
    return rotate_patch(**given, **plan)


def _write(plan, pool, slots, given):
    return splice(pool, slots, **given, **plan)


def main() -> None:
    """Prints the table."""
    jax.config.update("jax_enable_compilation_cache", False)
    heads = ["operation, rank", "MB", "MFLOP", *(f"{name}, µs" for name in DEVICES)]
    heads += [f"XLA, {name}" for name in COMPILED]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for name, least, flops, call, arguments in operations():
        cells = [name, f"{least / 1e6:.1f}", f"{flops / 1e6:.0f}"]
        cells += [f"{1e6 * max(least / bandwidth, flops / peak):.1f}" for bandwidth, peak in DEVICES.values()]
        for kind in COMPILED.values():
            program = Program(str(compile_for(kind, call, arguments, (0,) * name.startswith("splice")).as_text()))
            cells.append(f"{program.moved(program.entry) / least:.2f} ×")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
