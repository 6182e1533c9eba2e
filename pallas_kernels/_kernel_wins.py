"""Where a kernel wins: per kind of device, operation and shape, what was fastest when it was timed there.

`kernel_wins.json` is {"devices": {kind: table}}, and a table, as `python -m pallas_kernels.tune` writes it, is
{"device": kind, "source": how it came to be, "operations": {name: {shape: row}}}. A row says which implementation won,
the kernel's best block (`tokens`) where it has blocks, and every candidate's seconds. Shapes are words such as
"heads=4 width=128 rank=32 bytes=2"; any number of tokens takes the same row.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from ._operands import Operands
from ._target import target
from .errors import KernelShapeError

_CHOSEN: list[Mapping[str, Any]] = []
"""Tables of `configured_by`, the innermost last."""
TIMED = "timed"
"""The `source` of a table that a whole run of `tune` on the device made: no other is trusted to choose a kernel."""
RANKS = (0, 16, 32, 64, 128, 256)


def shape_word(heads: int, width: int, rank: int, itemsize: int) -> str:
    """Names a shape as tables know it; the rank rounded up to one of `RANKS`."""
    rounded = next((each for each in RANKS if rank <= each), rank)
    return f"heads={heads} width={width} rank={rounded} bytes={itemsize}"


def word_of(operands: Operands, width: int) -> str:
    """Returns the word of these operands, `width` wide; "" for what `tune` does not time."""
    if operands.dense is not None:
        return ""
    return shape_word(operands.x.shape[-2], width, operands.rank, operands.x.dtype.itemsize)


@functools.cache
def shipped() -> Mapping[str, Any]:
    """Reads the tables that came with the package, by kind of device."""
    return json.loads((resources.files(__package__) / "kernel_wins.json").read_text())["devices"]


@contextlib.contextmanager
def configured_by(path: str | Path) -> Iterator[None]:
    """Uses the table in this file, as `python -m pallas_kernels.tune` writes it, for what is traced inside.

    It acts while a function is traced: functions that are already compiled stay as they are.

    Raises:
      KernelShapeError: a file that is no such table.
    """
    try:
        body = json.loads(Path(path).read_text())
    except ValueError as error:
        raise KernelShapeError(f"table {str(path)!r}: got {error}; expected JSON") from error

    _check(body, path)
    _CHOSEN.append(body)
    try:
        yield
    finally:
        _CHOSEN.pop()


def _check(body: Any, path: str | Path) -> None:
    """Refuses what is no table, so that a lookup never meets a row it cannot read."""
    operations = body.get("operations") if isinstance(body, dict) else None
    if not isinstance(operations, dict):
        raise KernelShapeError(
            f"table {str(path)!r}: got {str(body)[:80]!r}; expected an object with 'device' and 'operations'"
        )

    for operation, rows in operations.items():
        for word, row in rows.items() if isinstance(rows, dict) else [("", rows)]:
            if not isinstance(row, dict) or not isinstance(row.get("tokens", 1), int):
                raise KernelShapeError(
                    f"table {str(path)!r}: got {operation} {word!r} {row!r}; expected a row of `tune`"
                )


def block_of(operation: str, heads: int, width: int, rank: int, itemsize: int) -> Mapping[str, int] | None:
    """Returns the kernel's best block for this shape on the device that is traced for; None where no table has one."""
    aimed = target()
    body = _table(jax.devices()[0].device_kind if aimed is None else aimed.kind)
    row = _row(body, operation, shape_word(heads, width, rank, itemsize))
    return {"tokens": row["tokens"]} if "tokens" in row else None


def winner(kind: str, operation: str, word: str) -> str | None:
    """Returns the implementation that won this shape on this kind of device.

    None where no whole run there timed it, its results held against the XLA path's: nothing is known of a kernel then
    but that it compiles.
    """
    body = _table(kind)
    return None if body.get("source") != TIMED else _row(body, operation, word).get("winner")


def _row(body: Mapping[str, Any], operation: str, word: str) -> Mapping[str, Any]:
    return body.get("operations", {}).get(operation, {}).get(word, {})


def _table(kind: str) -> Mapping[str, Any]:
    """Returns the table that `configured_by` chose, if it is for this kind, else the shipped one; empty where there
    is none.
    """
    chosen = _CHOSEN[-1] if _CHOSEN else None
    return chosen if chosen is not None and chosen.get("device") == kind else shipped().get(kind, {})
