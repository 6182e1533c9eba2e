"""Counts the instruction bundles of the TPU kernels: `python -m pallas_kernels.bundles --help`.

A TPU issues one bundle a cycle at best, so the bundles that a kernel has for a block of tokens, as libtpu's own dump
says them, are what its arithmetic costs before anything is known of its speed. No TPU is needed, only libtpu (the extra
`kernels`). The kernels lay a block out in full, without a loop over its tokens: what is counted is a whole block, with
the copies in and out. The code of a loop counts once: clearing blocks past the length, the copies of `splice`.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from ._ahead_of_time import SPEC, chunk_of, compile_for_tpu
from ._operands import Operands
from .errors import KernelError
from .rotate_patch import tpu as rotate_patch_tpu
from .rotate_patch.shapes import RotateShape
from .splice import tpu as splice_tpu
from .tpu import block

OPERATIONS = ("rotate_patch", "splice")
TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
HEADS = (1, 2, 4, 8)
TOKENS, LAYERS, WIDTH = 1024, 28, 128
POOL = (LAYERS, 256, 64)
"""Layers, pages, slots of a page."""


@contextlib.contextmanager
def dumping() -> Iterator[Path]:
    """Makes libtpu write the bundles of what is compiled inside, if it was not used before, and yields where."""
    directory = tempfile.mkdtemp()
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_pass_label_regex=final_bundles"
    before = os.environ.get("LIBTPU_INIT_ARGS", "")
    cached = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    os.environ["LIBTPU_INIT_ARGS"] = f"{before} {flags} --xla_jf_dump_hlo_text=false".strip()
    jax.config.update("jax_enable_compilation_cache", False)  # what comes from there is not compiled, and dumps nothing

    try:
        yield Path(directory)
    finally:
        os.environ["LIBTPU_INIT_ARGS"] = before
        jax.config.update("jax_enable_compilation_cache", cached)
        shutil.rmtree(directory, ignore_errors=True)


def bundles_of(
    directory: Path, operation: str, topology: str, heads: int, rank: int, dtype: str, whole: bool = False
) -> int:
    """Compiles one kernel inside `dumping` and counts its bundles that are not empty.

    Args:
      directory: what `dumping` yielded.
      whole: take blocks whole, as the kernels do where pairs of heads do not fit, not by pairs of heads.

    Raises:
      KernelError: libtpu has dumped nothing.
    """
    shape = RotateShape("counted", (LAYERS,), TOKENS, heads, WIDTH, WIDTH, rank, "half")
    wide = "bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype
    arguments: tuple[Any, ...] = (Operands(**chunk_of(shape, TOKENS, rank, dtype)), SPEC((), jnp.int32))
    function, donate = functools.partial(rotate_patch_tpu.kernel, layout="half", out_dtype=wide), ()
    if operation == "splice":
        arguments = (SPEC((*POOL, heads, WIDTH), wide), SPEC((TOKENS,), jnp.int32), *arguments)
        function, donate = functools.partial(splice_tpu.kernel, layout="half"), (0,)

    # Only this kernel's dumps are to be there.
    for path in directory.iterdir():
        path.unlink()
    with mock.patch.object(block, "by_pairs", return_value=False) if whole else contextlib.nullcontext():
        compile_for_tpu(topology, function, arguments, donate)
    found = list(directory.glob(f"*-{operation}*schedule-analysis_final_bundles.txt"))
    counts = [re.search(r"non empty scheduled bundles: (\d+)", path.read_text()) for path in found]
    if len(counts) != 1 or counts[0] is None:
        raise KernelError(f"{operation}: got {len(found)} dumps; expected 1, in a process that had not used libtpu")
    return int(counts[0][1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Writes counts as a table, a line per kernel and a column per number of heads."""
    heads = sorted({row["heads"] for row in rows})
    lines: dict[tuple, dict[int, int]] = {}
    for row in rows:
        line = tuple(row[name] for name in ("operation", "topology", "dtype", "rank"))
        lines.setdefault(line, {})[row["heads"]] = row["bundles"]

    text = ["| operation | for | dtype | rank | " + " | ".join(f"{count} heads" for count in heads) + " |"]
    text.append("|---" * (4 + len(heads)) + "|")
    for (operation, topology, dtype, rank), counts in lines.items():
        cells = [f"`{operation}`", topology.partition(":")[0], dtype, rank, *(counts.get(each, "") for each in heads)]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; `arguments` are the command line's."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bundles", description="Counts bundles of kernels.")

    def listed(kind):
        return lambda text: [kind(each) for each in text.split(",")]

    parser.add_argument("--op", type=listed(str), default=OPERATIONS, help="operations, commas between")
    parser.add_argument("--topology", type=listed(str), default=TOPOLOGIES, help="such as v5e:2x2,v6e:2x2")
    parser.add_argument("--dtype", type=listed(str), default=("bfloat16", "float32"), help="of x, u and v")
    parser.add_argument("--rank", type=listed(int), default=(0, 16))
    parser.add_argument("--heads", type=listed(int), default=HEADS)
    parser.add_argument("--whole", action="store_true", help="blocks taken whole, not by pairs of heads")
    parser.add_argument("--json", action="store_true", help="one object per line in place of the table")
    flags = parser.parse_args(arguments)
    rows = []

    with dumping() as directory:
        for case in itertools.product(flags.op, flags.topology, flags.dtype, flags.rank, flags.heads):
            operation, topology, dtype, rank, heads = case
            row = {"operation": operation, "topology": topology, "heads": heads, "rank": rank, "dtype": dtype}
            rows.append(row | {"bundles": bundles_of(directory, **row, whole=flags.whole)})
            if flags.json:
                print(json.dumps(rows[-1]), flush=True)

    if not flags.json:
        print(table(rows))


if __name__ == "__main__":
    main()
